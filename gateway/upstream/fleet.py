"""The replicas of one fleet: what each engine has, and which of them answer."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec

from gateway.core.headers import pinned
from gateway.core.lineage import Lineage
from gateway.core.rests import Why, busy_seconds
from gateway.upstream.api import Access, Trouble
from gateway.upstream.breaker import TOLD_BY_CALLS, Breaker, Verdict, verdict_of
from gateway.upstream.metrics_text import CacheConfig, EnginePage, read_page
from gateway.upstream.scraper import NO_ACCESS, Late, Scraper, Unusable

log = logging.getLogger(__name__)

PROBE_SECONDS = 2.0
PROBE_TIMEOUT_SECONDS = 1.0
DISCOVERY_TIMEOUT_SECONDS = 5.0
DISCOVERY_READINGS = 3
"""Two engines in turn show in three."""

_OF_BLOCKS = ("num_gpu_blocks", "block_size")
"""Where the operator and the engine differ on these somebody is wrong; a context is often made shorter on purpose."""

MISSES_MAX = 2
"""Failed probes, or refused connections without a good probe between them, that take a replica out."""

BACKOFF_FIRST_SECONDS = 1.0
BACKOFF_MAX_SECONDS = 5.0
"""Between attempts at a replica that is down, and between trials of one that rests."""

TRIAL = b'{"prompt": "a", "max_tokens": 1}'
"""Without a model the engine takes its own."""
TRIAL_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as configured; None = ask the engine."""

    pool: str
    name: str
    url: str
    """Without a trailing slash."""
    rank: int | None = None
    """The data-parallel rank behind the URL, where there are several."""
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    """vLLM's own default; no engine states it."""
    prefill_tokens: int = 16_384
    access: Access = NO_ACCESS

    @property
    def place(self) -> tuple[str, int | None]:
        """What no other replica is at."""
        return self.url, self.rank


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a replica has, every number known."""

    name: str
    pool: str
    url: str
    num_gpu_blocks: int
    """Including the null block, which no sequence can use."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    prefill_tokens: int
    prefix_caching: bool = False
    """It says that it keeps the beginnings of prompts."""
    bases: frozenset[str] = frozenset()
    """Names under which it serves a model, and no adapter of one."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the watch knows of a replica."""

    spec: ReplicaSpec
    shape: ReplicaShape | None
    """None until it answered once; afterwards what it had last."""
    up: bool
    problem: str
    """Why it is down, in words; empty while it is up."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(gt=0, lt=2**53)] | None = None
    parent: str | None = None
    """Of an adapter, its model."""


class _Models(msgspec.Struct):
    data: list[_Model]


def _accept(_page: EnginePage) -> None:
    """Any page will do."""


async def discover(
    spec: ReplicaSpec,
    models: frozenset[str],
    scraper: Scraper,
    *,
    timeout_seconds: float = DISCOVERY_TIMEOUT_SECONDS,
    accept: Callable[[EnginePage], None] = _accept,
) -> ReplicaShape | str:
    """Ask one engine what it has; what cannot be used is told in words.

    `models` are the names of the fleet's model: the engine has to serve one of them.  A configured number may
    lower what the engine states or fill in what it does not; it never raises it, since blocks that do not exist
    would be handed out.  Unreachable sources are forgiven only where every number they give is configured.
    `accept` raises Unusable for a page of metrics that is not that of one engine.
    """
    try:
        config = await _cache_config(spec, scraper, timeout_seconds, accept)
        context, bases = await _context(spec, models, scraper, timeout_seconds)
        return ReplicaShape(
            name=spec.name,
            pool=spec.pool,
            url=spec.url,
            num_gpu_blocks=_smaller(spec, "num_gpu_blocks", spec.num_gpu_blocks, config.num_gpu_blocks),
            block_size=_smaller(spec, "block_size", spec.block_size, config.block_size),
            max_model_len=_smaller(spec, "max_model_len", spec.max_model_len, context),
            max_num_seqs=spec.max_num_seqs,
            prefill_tokens=spec.prefill_tokens,
            prefix_caching=config.shares_prefixes is True,
            bases=bases,
        )
    except Unusable as trouble:
        return str(trouble)


async def _cache_config(
    spec: ReplicaSpec, scraper: Scraper, timeout_seconds: float, accept: Callable[[EnginePage], None]
) -> CacheConfig:
    """Read several times: where a URL balances over engines, each new connection may reach another one."""
    try:
        pages = [await _page(spec, scraper, timeout_seconds) for _ in range(DISCOVERY_READINGS)]
    except Unusable:
        if spec.num_gpu_blocks is None or spec.block_size is None:
            raise
        return CacheConfig(None, None)
    for page in pages:
        accept(page)
    return _config_of(spec, pages[-1])


async def _page(spec: ReplicaSpec, scraper: Scraper, timeout_seconds: float) -> EnginePage:
    """What the engine's metrics say; blocks that they do not state are as configured."""
    raw = await scraper.get(spec.url, "/metrics", timeout_seconds, spec.access)
    page = read_page(raw.decode("utf-8", "replace"), spec.rank)
    if page.reading.num_gpu_blocks is not None:
        return page
    return replace(page, reading=msgspec.structs.replace(page.reading, num_gpu_blocks=spec.num_gpu_blocks))


def _config_of(spec: ReplicaSpec, page: EnginePage) -> CacheConfig:
    if len(page.configs) > 1:
        names = ", ".join(sorted(page.configs))
        raise Unusable(
            f"{spec.url} reaches {len(page.configs)} engines ({names}); each needs a URL of its own, or is a replica "
            "with its data_parallel_rank"
        )
    return next(iter(page.configs.values()), CacheConfig(None, None))


async def _context(
    spec: ReplicaSpec, models: frozenset[str], scraper: Scraper, timeout_seconds: float
) -> tuple[int | None, frozenset[str]]:
    """The context length that the engine states for the fleet's model, and the names of models that are no adapters."""
    try:
        served = await _served(spec, scraper, timeout_seconds)
    except Unusable:
        if spec.num_gpu_blocks is None or spec.block_size is None or spec.max_model_len is None:
            raise
        return None, frozenset()
    if missing := models - {model.id for model in served}:
        names = ", ".join(sorted(missing))
        log.warning(
            "replica %s does not serve %s: calls that ask for it will be answered 404", spec.name, names
        )
    bases = frozenset(model.id for model in served if model.parent is None)
    return _context_of(spec, models, served), bases


async def _served(spec: ReplicaSpec, scraper: Scraper, timeout_seconds: float) -> list[_Model]:
    body = await scraper.get(spec.url, "/v1/models", timeout_seconds, spec.access)
    try:
        return msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError as error:
        raise Unusable(f"{spec.url}/v1/models is not a list of models") from error


def _context_of(spec: ReplicaSpec, models: frozenset[str], served: list[_Model]) -> int | None:
    ours = [model for model in served if model.id in models]
    if not ours:
        names = ", ".join(sorted(model.id for model in served))[:200] or "nothing"
        raise Unusable(f"{spec.url} serves {names}, not {', '.join(sorted(models))}")
    return min((model.max_model_len for model in ours if model.max_model_len is not None), default=None)


def _smaller(spec: ReplicaSpec, what: str, configured: int | None, stated: int | None) -> int:
    if configured is not None and stated is not None:
        used = _lower(configured, stated)
        if configured > stated or (configured < stated and what in _OF_BLOCKS):
            log.warning(
                "replica %s: %s is configured as %d but the engine states %d; %d is used",
                spec.name,
                what,
                configured,
                stated,
                used,
            )
        return used
    known = configured if configured is not None else stated
    if known is None:
        raise Unusable(f"{spec.url} does not state its {what}: configure it for replica {spec.name}")
    return known


def _lower(configured: int | None, stated: int) -> int:
    return stated if configured is None else min(configured, stated)


def _differs(configured: int | None, stated: int | None, discovered: int) -> bool:
    """Whether discovery would give another number now; what is not stated says nothing."""
    return stated is not None and _lower(configured, stated) != discovered


def _other_blocks(spec: ReplicaSpec, shape: ReplicaShape, page: EnginePage) -> str:
    try:
        stated = _config_of(spec, page)
    except Unusable as trouble:
        return str(trouble)
    if _differs(spec.num_gpu_blocks, stated.num_gpu_blocks, shape.num_gpu_blocks):
        return f"its blocks are now {stated.num_gpu_blocks}"
    if _differs(spec.block_size, stated.block_size, shape.block_size):
        return f"its blocks are now of {stated.block_size} tokens"
    return ""


ReadPage = Callable[[], Awaitable[EnginePage]]
Measure = Callable[[str, ReadPage], Awaitable[EnginePage]]


async def _only_read(_replica: str, read: ReadPage) -> EnginePage:
    return await read()


class _Replica:
    """One replica under watch."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.shape: ReplicaShape | None = None
        self.up = False
        self.problem = "not asked yet"
        self.outdated = False
        """Its configuration changed since it was asked what it has; until it answers, what it had last counts."""
        self.misses = 0
        self.refusals = 0
        self.lineage = Lineage()
        self.blind = False
        """Its metrics do not state how full it is."""
        self.up_since = 0.0
        self.answered_at = -math.inf
        """When a call was answered by it last."""
        self.backoff_seconds = BACKOFF_FIRST_SECONDS
        self.breaker = Breaker()
        self.why: Why | None = None
        """Why it rests, as was told last."""
        self.tried = asyncio.Event()
        self.pause: asyncio.Future[None] | None = None
        self.busy: asyncio.TimerHandle | None = None
        """Ends its rest where it rests because it is busy."""
        self.task: asyncio.Task[None] | None = None


class FleetWatch:
    """Probes every replica of a fleet and says which may be used.

    A replica is down after two failed probes, or at once after two connections in a row that it did not accept
    (`report_failure`).  It comes back with one good probe, and is asked anew what it has, because it may be
    another process: one that serves another model stays down.  A probe that is late while calls are answered there
    says nothing.  One that is up may rest (`breaker.py`).  No error leaves the watch.
    """

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        models: frozenset[str],
        on_change: Callable[[frozenset[str]], Awaitable[None]],
        *,
        scraper: Scraper,
        probe_seconds: float = PROBE_SECONDS,
        probe_timeout_seconds: float = PROBE_TIMEOUT_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        measure: Measure = _only_read,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` gets the names of replicas that came up, went down or changed shape; never twice at a time.

        Each name comes once after the first attempt too, whatever came of it: what others still believe of a
        replica that never answers here has to be corrected.
        If `on_change` fails it is called again later with the same names.  The watch owns `scraper` and closes it.
        `measure` gets the name of a replica that is up and what reads its metrics, calls that once and returns what
        it returns.
        """
        self._replicas = {spec.name: _Replica(spec) for spec in specs}
        self._models = models
        self._on_change = on_change
        self._scraper = scraper
        self._probe_seconds = probe_seconds
        self._probe_timeout_seconds = probe_timeout_seconds
        self._sleep = sleep
        self._measure = measure
        self._now = now
        self._changed: set[str] = set()
        self._news = asyncio.Event()
        self._announcer: asyncio.Task[None] | None = None
        self._ended: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to watch; nothing is up before it has answered."""
        for replica in self._replicas.values():
            replica.task = asyncio.create_task(self._watch(replica))
        self._announcer = asyncio.create_task(self._announce())

    def update(self, specs: Sequence[ReplicaSpec], models: frozenset[str]) -> None:
        """Another configuration, once started.  A replica that it no longer has is forgotten at once.

        A replica is its URL: one that is changed or renamed is asked again what it has, and until then keeps what it
        had; one of a new URL has to answer before it is up.
        """
        before, other_models = self._replicas, models != self._models
        by_place = {replica.spec.place: replica for replica in before.values()}
        self._models = models
        self._replicas = {
            spec.name: self._continued(by_place.pop(spec.place, None), spec, other_models) for spec in specs
        }
        for replica in by_place.values():
            self._end(replica)
        self._changed.intersection_update(self._replicas)
        for name, replica in self._replicas.items():
            if name in before and not replica.up:
                self._tell(replica)  # under another URL: others may still believe that it answers

    def _continued(self, replica: _Replica | None, spec: ReplicaSpec, other_models: bool) -> _Replica:
        if replica is None:
            replica = _Replica(spec)
        elif replica.spec == spec and not other_models:
            return replica
        else:
            self._end(replica)
            replica.spec, replica.outdated = spec, replica.up
            if replica.shape:
                replica.shape = replace(replica.shape, name=spec.name, pool=spec.pool)
        replica.task = asyncio.create_task(self._watch(replica))
        return replica

    def _end(self, replica: _Replica) -> None:
        self._forget_busy(replica)
        replica.breaker.rested()  # who watches it from now on has no timer for it
        if replica.task:
            replica.task.cancel()
            self._ended.add(replica.task)
            replica.task.add_done_callback(self._ended.discard)

    async def tried(self) -> None:
        """Returns when every replica has been asked once, whatever came of it; bounded by the time-outs."""
        for replica in self._replicas.values():
            await replica.tried.wait()

    async def close(self) -> None:
        """Stop watching and close the scraper."""
        for replica in self._replicas.values():
            self._end(replica)
        if self._announcer:
            self._announcer.cancel()
            self._ended.add(self._announcer)
        await asyncio.gather(*self._ended, return_exceptions=True)
        await self._scraper.close()

    def is_up(self, name: str) -> bool:
        replica = self._replicas.get(name)
        return replica is not None and replica.up

    def shape_of(self, name: str) -> ReplicaShape | None:
        """None until it answered once."""
        replica = self._replicas.get(name)
        return replica.shape if replica else None

    def why_it_rests(self, name: str) -> Why | None:
        """None for one that may get calls, and for one that is not up."""
        replica = self._replicas.get(name)
        return replica.why if replica and replica.up else None

    def others_are_warm(self, name: str, seconds: float) -> bool:
        """Whether another replica of its pool has been up for so long."""
        here = self._replicas.get(name)
        return here is not None and any(
            other.up and other.spec.pool == here.spec.pool and self._now() - other.up_since >= seconds
            for other in self._replicas.values()
            if other is not here
        )

    def states(self) -> list[ReplicaState]:
        """Every replica in the order of the configuration."""
        return [
            ReplicaState(replica.spec, replica.shape, replica.up, replica.problem)
            for replica in self._replicas.values()
        ]

    def report_failure(self, name: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        """A call failed at this replica.  `rest_seconds`: for which a busy one asks to be left alone, if it says."""
        replica = self._replicas.get(name)
        if replica is None or not replica.up:
            return
        doubtful = replica.breaker.doubtful
        replica.breaker.failed(trouble, rest_seconds)
        if trouble is Trouble.BUSY:
            self._leave_alone(replica, busy_seconds(rest_seconds))
        if replica.breaker.doubtful and not doubtful:
            self._hurry(replica)
        self._reconsider(replica)
        if trouble is not Trouble.UNREACHABLE:
            return
        replica.refusals += 1
        if replica.refusals >= MISSES_MAX:
            self._take_out(replica, "it does not accept connections")

    def report_success(self, name: str) -> None:
        """A call was answered by this replica."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.answered_at = self._now()
        if not replica.why:
            replica.breaker.succeeded()

    async def _watch(self, replica: _Replica) -> None:
        while True:
            try:
                known = replica.up and not replica.outdated
                await (self._probe(replica) if known else self._revive(replica))
            except Exception:
                log.exception("replica %s: the watch failed", replica.spec.name)
            if not replica.tried.is_set():
                replica.tried.set()
                self._tell(replica)
            await self._pause(replica)

    async def _pause(self, replica: _Replica) -> None:
        """Until it is time to look again, or somebody cannot wait so long."""
        replica.pause = asyncio.ensure_future(self._sleep(self._pause_seconds(replica)))
        try:
            await asyncio.wait([replica.pause])
        finally:
            replica.pause.cancel()

    def _pause_seconds(self, replica: _Replica) -> float:
        """After a missed probe the next one comes soon, so that a silent replica is out within 5 s; so it does where a
        call may have ended."""
        if replica.up and replica.why not in TOLD_BY_CALLS:
            soon = replica.misses or replica.why is Why.SUSPECT
            return self._probe_seconds / 4 if soon else self._probe_seconds
        seconds = replica.backoff_seconds
        replica.backoff_seconds = min(2 * seconds, BACKOFF_MAX_SECONDS)
        return seconds

    async def _probe(self, replica: _Replica) -> None:
        """Is it alive, and still the engine that was discovered?"""
        began = self._now()
        try:
            await self._get_health(replica.spec)
        except Unusable as trouble:
            # A server with hundreds of streams may be seconds behind with `/health`; what it ends meanwhile tells more.
            if not (isinstance(trouble, Late) and replica.answered_at >= began):
                self._missed(replica, str(trouble))
            return
        replica.misses = 0
        replica.refusals = 0
        if problem := await self._difference(replica):
            self._take_out(replica, problem)
            await self._revive(replica)
            return
        if replica.breaker.wants_trial(self._another_takes_calls(replica)):
            replica.breaker.tried(await self._try_out(replica.spec))
        self._reconsider(replica)

    async def _try_out(self, spec: ReplicaSpec) -> Verdict:
        """A call of one token, which one of its blocks beside the limit has room for."""
        access = replace(spec.access, headers=pinned(spec.access.headers, spec.rank))
        try:
            answer = await self._scraper.post(
                spec.url, "/v1/completions", TRIAL, TRIAL_TIMEOUT_SECONDS, access
            )
        except Unusable:
            return Verdict.BAD
        return verdict_of(*answer)

    def _reconsider(self, replica: _Replica) -> None:
        """Tell of a rest that began, or that is over.

        What calls met does not close the last replica of a pool: their clients hear of it sooner than of a queue that
        nobody serves.  One that says how long it wants to be left alone says when it will serve them.
        """
        another, breaker = self._another_takes_calls(replica), replica.breaker
        optional = TOLD_BY_CALLS if breaker.asks_for_rest else TOLD_BY_CALLS | {Why.BUSY}
        why = next((why for why in breaker.reasons if another or why not in optional), None)
        if why == replica.why:
            return
        replica.why = why
        if why is Why.SUSPECT:
            self._hurry(replica)  # what runs there has to be known at once
        if why:
            log.warning("replica %s gets no new calls: it is %s", replica.spec.name, why)
        else:
            replica.backoff_seconds = BACKOFF_FIRST_SECONDS
            log.info("replica %s may get calls again", replica.spec.name)
        self._tell(replica)

    def _leave_alone(self, replica: _Replica, seconds: float) -> None:
        """Of several times that it asked for the one that ends last counts."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if replica.busy is not None and replica.busy.when() >= until:
            return
        self._forget_busy(replica)
        replica.busy = loop.call_at(until, self._rested, replica)

    def _forget_busy(self, replica: _Replica) -> None:
        if replica.busy:
            replica.busy.cancel()
        replica.busy = None

    def _rested(self, replica: _Replica) -> None:
        replica.busy = None
        replica.breaker.rested()
        self._reconsider(replica)

    def _hurry(self, replica: _Replica) -> None:
        if replica.pause:
            replica.pause.cancel()

    def _another_takes_calls(self, replica: _Replica) -> bool:
        others = [other for other in self._replicas.values() if other is not replica and other.up]
        return any(other.spec.pool == replica.spec.pool and not other.why for other in others)

    async def _difference(self, replica: _Replica) -> str:
        """Another process may answer at the same address between two good probes; empty where none shows.

        What its metrics say of how it is goes to its breaker.
        """
        shape = replica.shape
        assert shape is not None, "a replica is up only once it was discovered"
        async with asyncio.TaskGroup() as both:
            context = both.create_task(self._other_context(replica.spec, shape))
            metrics = both.create_task(self._metrics(replica.spec))
        page = metrics.result()
        if page is None:
            return context.result()
        replica.breaker.saw(page.vitals)
        self._note_sight(replica, page)
        several = self._several(replica, page)
        return several or context.result() or _other_blocks(replica.spec, shape, page)

    def _note_sight(self, replica: _Replica, page: EnginePage) -> None:
        """Said once: an engine of another release may give the figure a name that is not known here."""
        blind = page.reading.kv_use is None
        if blind and not replica.blind:
            log.warning(
                "replica %s does not state its KV use: calls that pass kvgate by cannot be seen",
                replica.spec.name,
            )
        replica.blind = blind

    async def _get_health(self, spec: ReplicaSpec) -> None:
        """Raises Unusable."""
        await self._scraper.get(spec.url, "/health", self._probe_timeout_seconds, spec.access)

    async def _metrics(self, spec: ReplicaSpec) -> EnginePage | None:
        read = partial(_page, spec, self._scraper, self._probe_timeout_seconds)
        try:
            return await self._measure(spec.name, read)
        except Unusable:
            return None

    def _several(self, replica: _Replica, page: EnginePage) -> str:
        """What shows that the URL reaches several engines in turn; empty where nothing does."""
        reading = page.reading
        if not replica.lineage.see(reading, round(self._now() * 1000)):
            return ""
        started = "" if reading.started_at is None else f", the last one started at {reading.started_at:.0f}"
        return (
            f"{replica.spec.url} balances over several engines: their start times or counters go back between "
            f"readings{started}; each needs a URL of its own"
        )

    def _accept(self, replica: _Replica, page: EnginePage) -> None:
        """Raises Unusable where several engines answer."""
        if several := self._several(replica, page):
            raise Unusable(several)

    async def _other_context(self, spec: ReplicaSpec, shape: ReplicaShape) -> str:
        try:
            served = await _served(spec, self._scraper, self._probe_timeout_seconds)
        except Unusable:
            return ""
        try:
            stated = _context_of(spec, self._models, served)
        except Unusable as trouble:
            return str(trouble)
        differs = _differs(spec.max_model_len, stated, shape.max_model_len)
        return f"its max_model_len is now {stated}" if differs else ""

    async def _revive(self, replica: _Replica) -> None:
        """Bring a replica in that answers and is what it should be."""
        try:
            await self._get_health(replica.spec)
        except Unusable as trouble:
            self._missed(replica, str(trouble))
            return
        accept = partial(self._accept, replica)
        found = await discover(replica.spec, self._models, self._scraper, accept=accept)
        if isinstance(found, str):
            self._missed(replica, found)
            return
        replica.shape = found
        replica.up_since = replica.up_since if replica.up else self._now()
        replica.up = True
        replica.outdated = False
        replica.problem = ""
        replica.misses = replica.refusals = 0
        replica.backoff_seconds = BACKOFF_FIRST_SECONDS
        replica.breaker, replica.why = Breaker(), None
        self._forget_busy(replica)
        log.info(
            "replica %s is up: %d blocks of %d tokens, context %d",
            found.name,
            found.num_gpu_blocks,
            found.block_size,
            found.max_model_len,
        )
        self._tell(replica)

    def _take_out(self, replica: _Replica, problem: str) -> None:
        if not replica.up:
            return
        replica.up = replica.outdated = False
        replica.problem = problem
        log.warning("replica %s is down: %s", replica.spec.name, problem)
        self._tell(replica)

    def _missed(self, replica: _Replica, problem: str) -> None:
        if replica.up:
            replica.misses += 1
            if replica.misses >= MISSES_MAX:
                self._take_out(replica, problem)
        elif problem != replica.problem:
            replica.problem = problem
            log.warning("replica %s stays down: %s", replica.spec.name, problem)

    def _tell(self, replica: _Replica) -> None:
        self._changed.add(replica.spec.name)
        self._news.set()

    async def _announce(self) -> None:
        """Deliver changes one call at a time; what happens meanwhile is in the next one."""
        while True:
            await self._news.wait()
            self._news.clear()
            names = frozenset(self._changed)
            self._changed.clear()
            try:
                await self._on_change(names)
            except Exception:
                log.exception("a change of replicas could not be applied and is tried again")
                self._changed |= names
                self._news.set()
                await self._sleep(self._probe_seconds)
