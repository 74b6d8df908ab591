"""The flow and the HTTP edge in this process, on the real ledger, a real Valkey and the real upstream client."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import redis

from gateway.all_fleets import books_config
from gateway.call import Fleet
from gateway.core.capacity import Learned, Reading
from gateway.core.content import Share
from gateway.core.events import CallEnded, Event
from gateway.core.identity import Identity
from gateway.core.learned import LearnedLengths
from gateway.core.media import USUAL, MediaRule
from gateway.core.modes import Mode
from gateway.core.outcomes import Outcome
from gateway.core.prompt import Text, literal_text, text_bytes
from gateway.core.quota import ALL_FLEETS
from gateway.flow import Flow
from gateway.http.auth import Callers, Key, Keyring, anonymous
from gateway.http.proxy import Calls, ClassTerms, EdgeSettings, Proxy
from gateway.ledger.api import Admission, Grant
from gateway.ledger.valkey import HoldLimits, ValkeyLedger
from gateway.tokens.api import Counted, Counter, ModelCounter
from gateway.tokens.ids import ThreadedIdReader
from gateway.tokens.threads import CountingThreads
from gateway.upstream.api import Trouble
from gateway.upstream.client import EngineClient
from gateway.upstream.engines import FleetPlan, WatchedEngines
from gateway.upstream.fleet import ReplicaShape, ReplicaSpec, ReplicaState
from gateway.upstream.limits import UpstreamLimits
from tests.conformance.books import assert_books_hold
from tests.flow.driver import Visitor
from tests.processes import HANG_SECONDS

LONG = 20.0
MESSAGES = [{"role": "user", "content": "hi"}]
HEARTBEAT_MS = 10
"""Short, because a fresh store opens its gate after two."""
LEASE_MS = 5_000
BASES = frozenset({"demo"})
CLASSES = (("normal", 0),)

_fleet_numbers = itertools.count()


class WordCounter:
    """A token a word; `counts` says how often it was asked."""

    def __init__(self) -> None:
        self.counts = 0

    async def count(self, texts: Sequence[Text]) -> Counted:
        self.counts += 1
        await asyncio.sleep(0)
        decoded = (text if isinstance(text, str) else literal_text(text) for text in texts)
        words = sum(len(text.split()) for text in decoded)
        return Counted(words, True, (Share("words", words, sum(map(text_bytes, texts))),))


class Replicas:
    """What `WatchedEngines` needs of a watch: replicas that are up until a test says otherwise."""

    def __init__(
        self,
        urls: Mapping[str, str],
        blocks: Mapping[str, int],
        prefill_tokens: int,
        caching: bool,
        pools: Sequence["PoolOf"],
    ) -> None:
        self.failures: list[tuple[str, Trouble]] = []
        """Reports of failed calls."""
        self.successes: list[str] = []
        self.down: set[str] = set()
        of = {replica: pool.name for pool in pools for replica in pool.replicas}
        self._states = [
            ReplicaState(
                ReplicaSpec(of.get(name, "short"), name, url),
                ReplicaShape(
                    name,
                    of.get(name, "short"),
                    url,
                    blocks.get(name, 1001),
                    16,
                    8192,
                    256,
                    prefill_tokens,
                    caching,
                    BASES,
                ),
                up=True,
                problem="",
            )
            for name, url in urls.items()
        ]

    def states(self) -> list[ReplicaState]:
        return self._states

    def is_up(self, name: str) -> bool:
        return name not in self.down

    def why_it_rests(self, name: str) -> None:
        return None

    def report_failure(self, name: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        self.failures.append((name, trouble))

    def report_success(self, name: str) -> None:
        self.successes.append(name)


class PoolOf(NamedTuple):
    """A pool of a fleet that has several."""

    name: str
    max_prompt_tokens: int | None
    replicas: Sequence[str]
    lane: Sequence[str] = ()
    """The pools that its calls may use; () = only it."""


class World:
    """One gateway process without its sockets."""

    def __init__(
        self,
        replicas: Replicas,
        ledger: ValkeyLedger,
        proxy: Proxy,
        calls: Calls,
        facts: list[Event],
        counter: Counter,
        store: "redis.Redis[bytes]",
        limits: ValkeyLedger,
        lengths: LearnedLengths,
        fleet: Fleet,
    ) -> None:
        self.lengths = lengths
        self.fleet = fleet
        self.replicas = replicas
        self.ledger = ledger
        self.limits = limits
        """Of the limits over all fleets; it runs only where the key has some."""
        self.app = proxy
        self.calls = calls
        self.facts = facts
        self.counter = counter
        self.store = store

    @property
    def ended(self) -> list[CallEnded]:
        return [fact for fact in self.facts if isinstance(fact, CallEnded)]

    async def visit(self, body: Mapping[str, Any] | bytes, **options: Any) -> Visitor:
        async with asyncio.timeout(LONG):
            return await Visitor(self.app, body, **options).run()

    async def hold(self, blocks: int, **changes: Any) -> Callable[[], None]:
        """Take blocks as another client would; returns what gives them back."""
        return await _held(self.ledger, msgspec.structs.replace(admission(blocks), **changes))

    async def hold_limit(self, key: str) -> Callable[[], None]:
        """Be one call of the key that runs on another fleet."""
        wanted = msgspec.structs.replace(admission(1, key), lane=ALL_FLEETS, requests_max=1)
        return await _held(self.limits, wanted)

    async def learn_cache(self, replica: str, started_at: float = 1.0, caching: bool = True) -> None:
        """As if its metrics had been read: which process it is, and whether that keeps prefixes."""
        seat = await self.ledger.seats.seat(replica)
        assert seat is not None
        engine = Reading(num_gpu_blocks=1001, started_at=started_at, prefix_caching=caching)
        learned = Learned(engine=engine)
        assert await self.ledger.seats.learn(replica, seat.number + 1, learned, seat.configured)

    async def queued(self, count: int) -> None:
        """Returns when so many calls hold a ticket."""
        await soon_true(lambda: self._is_queued(count), f"{count} calls wait")

    async def _is_queued(self, count: int) -> bool:
        found: bool = (await self.ledger.state())["queue"] == count
        return found

    async def quiet(self) -> None:
        """Everything was given back: in this process and in the store.  Fails where that does not come true."""
        ledgers = [ledger for ledger in (self.ledger, self.limits) if ledger.opened]
        await soon(
            lambda: not self.calls.inflight() and not any(ledger.inflight for ledger in ledgers),
            "no call is in flight",
        )
        assert self.app._bodies._held == 0, "bytes of bodies are counted that nobody has"
        passages = (self.app._passages, self.app._streams)
        assert not any(each.count for each in passages), "a place is taken that nobody has"
        for ledger in ledgers:
            self._hold_nothing(ledger.fleet)

    def _hold_nothing(self, fleet: str) -> None:
        books = assert_books_hold(self.store, fleet)
        assert not books.calls
        for name, key in books.keys.items():
            assert (key.blocks, key.calls) == (0, 0), name
        for name, replica in books.replicas.items():
            assert (replica.used, replica.sequences, replica.prefill) == (0, 0, 0), name

    def only_end(self) -> CallEnded:
        """The one report of the one call since the last time."""
        ended = self.ended
        assert len(ended) == 1, ended
        self.facts.clear()
        return ended[0]


async def _held(ledger: ValkeyLedger, wanted: Admission) -> Callable[[], None]:
    reservation = ledger.open(wanted, lambda: None)
    grant = await reservation.granted()
    assert isinstance(grant, Grant), grant
    return lambda: reservation.settle(None, None)


def admission(blocks: int, key: str = "holder") -> Admission:
    return Admission(
        key=key, class_="normal", lane="short", blocks=blocks, sequences=1, prefill=0, cost=1, wait_ms=20_000,
        weight=1, blocks_max=-1, requests_max=-1, queue_max=100, queue_key_max=100,
        identity=Identity(key, "", secrets.token_bytes(8)),
    )  # fmt: skip


def chat(**fields: Any) -> dict[str, Any]:
    """A body; `mock` scripts the mock engine."""
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 8, **fields}


async def soon(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that needs no clock of ours; fails the test when it does not come."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"it did not come true: {what}") from None


async def soon_true(condition: Callable[[], Any], what: str) -> None:
    """The same for a condition that is awaited."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it did not come true: {what}") from None


@asynccontextmanager
async def gateway(
    store_url: str,
    urls: Mapping[str, str],
    *,
    blocks: Mapping[str, int] | None = None,
    prefill_tokens: int = 16_384,
    limits: UpstreamLimits | None = None,
    counter: Counter | None = None,
    model_counter: ModelCounter | None = None,
    notes_fill: bool = False,
    learns: bool = False,
    queue_max: int = 100,
    wait_ms: int = 20_000,
    key: Key | None = None,
    now: Callable[[], float] | None = None,
    pass_through: Sequence[str] = (),
    unreserved_max: int = 64,
    media: MediaRule = USUAL,
    background_seconds: float = LONG,
    encoder_tokens: int = 0,
    mode: Mode = Mode.GUARANTEED,
    promise: Mode | None = None,
    ttft_ms: int | None = None,
    lengths: LearnedLengths | None = None,
    caching: bool = False,
    adapters: Sequence[str] = (),
    pools: Sequence[PoolOf] = (),
) -> AsyncIterator[World]:
    """`urls` and `blocks` (`num_gpu_blocks`, 1,001 by default) by replica; all replicas are of one pool, `short`.

    `mode` is the pool's, `promise` what the class was promised; `lengths`: what is known of how much calls write.
    `caching`: the engines are known to keep prefixes, and these are shared.
    `adapters`: further models of the engines.
    `pools`: those of the fleet where it has several, by rising bounds.
    """
    name = f"fleet-{next(_fleet_numbers)}"
    facts: list[Event] = []
    replicas = Replicas(urls, blocks or {}, prefill_tokens, caching, pools)
    plan = _with_pools(_plan(name, learns, media, mode, encoder_tokens), pools)
    engines = WatchedEngines(plan, replicas)  # type: ignore[arg-type]
    lengths = lengths or LearnedLengths()
    clock = {} if now is None else {"now": now}
    ledger = ValkeyLedger(
        store_url,
        name,
        engines.books_config,
        HoldLimits(2, 256, 1 << 26),
        facts.append,
        notes_fill=notes_fill,
        **clock,
    )
    limits_ledger = ValkeyLedger(
        store_url,
        f"{name}-limits",
        lambda: books_config(LEASE_MS, HEARTBEAT_MS, CLASSES),
        HoldLimits(2, 256, 1 << 26),
        facts.append,
        **clock,
    )
    upstream = EngineClient(limits or UpstreamLimits(LONG, LONG, LONG, LONG))
    counter = counter or WordCounter()
    calls = Calls()
    threads = CountingThreads()
    fleet = Fleet(name, engines, ledger, model_counter, lengths=lengths)
    proxy = Proxy(
        Flow(counter, upstream, limits_ledger, facts.append, background_seconds, ThreadedIdReader(threads)),
        Callers(Keyring((), key or anonymous("normal"))),
        dict.fromkeys(("demo", *adapters), fleet),
        replace(
            _settings(ClassTerms(wait_ms, queue_max, queue_max, ttft_ms, promise)),
            pass_through=frozenset(pass_through),
            unreserved_max=unreserved_max,
        ),
        calls,
        facts.append,
        jitter=lambda: 1.0,
    )
    store = redis.Redis.from_url(store_url, protocol=2)
    ledgers = [ledger, limits_ledger] if key and key.all_fleets else [ledger]
    tasks = [asyncio.create_task(work) for work in (calls.watch_writes(), *(each.run() for each in ledgers))]
    try:
        await soon(lambda: all(each.ready for each in ledgers), "the gate is open")
        facts.clear()
        yield World(replicas, ledger, proxy, calls, facts, counter, store, limits_ledger, lengths, fleet)
    finally:
        store.close()
        await asyncio.gather(*(each.close(2) for each in ledgers))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await upstream.close()
        threads.close()


def _plan(name: str, learns: bool, media: MediaRule, mode: Mode, encoder_tokens: int) -> FleetPlan:
    return FleetPlan(
        name=name,
        model="demo",
        names=frozenset({"demo"}),
        default_output_tokens=64,
        max_output_tokens=None,
        token_factor=1.0,
        exact_above=0.7,
        learns=learns,
        speculative_tokens=0,
        media=media,
        encoder_tokens=encoder_tokens,
        share_prompt_of_n=False,
        share_prefixes=True,
        soft_hold=True,
        safe_fraction=1.0,
        overtake_blocks=None,
        pools=(("short", None),),
        lanes={"short": ("short",)},
        modes={"short": mode},
        classes=CLASSES,
        lease_ms=LEASE_MS,
        heartbeat_ms=HEARTBEAT_MS,
    )


def _with_pools(plan: FleetPlan, pools: Sequence[PoolOf]) -> FleetPlan:
    if not pools:
        return plan
    return replace(
        plan,
        pools=tuple((pool.name, pool.max_prompt_tokens) for pool in pools),
        lanes={pool.name: tuple(pool.lane or (pool.name,)) for pool in pools},
        modes={},
    )


def _settings(normal: ClassTerms) -> EdgeSettings:
    return EdgeSettings(
        body_bytes_max=1 << 23,
        body_seconds=LONG,
        bodies_bytes_max=1 << 29,
        n_max=16,
        overload_status=429,
        show_replica=True,
        classes={"normal": normal},
        default_class="normal",
        retry_share=0.2,
    )


def outcomes(facts: Sequence[CallEnded]) -> dict[Outcome, int]:
    return {outcome: sum(fact.outcome is outcome for fact in facts) for outcome in Outcome}
