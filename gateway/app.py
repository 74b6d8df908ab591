"""The composition root: settings become objects, objects become one ASGI application.

The only file that knows every room.  `Gateway.start` and `stop` are the process's life between them.
"""

import asyncio
import contextlib
import logging
import math
import secrets as random_secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any

from fastapi import FastAPI

from gateway import __version__, all_fleets
from gateway.call import Fleet, Memory
from gateway.config import (
    AUTO,
    ENGINE,
    ConfigError,
    Jwt,
    Media,
    PriorityClass,
    Secrets,
    Settings,
    Tokenizer,
    Upstream,
    check_promises,
    load_keys,
    text_of,
)
from gateway.config import Fleet as FleetSettings
from gateway.core import quota
from gateway.core.books import FleetConfig
from gateway.core.capacity import Reading
from gateway.core.capacity import Rules as CapacityRules
from gateway.core.events import CacheDoubted
from gateway.core.events import Event as Fact
from gateway.core.factors import Factors
from gateway.core.learned import QUANTILES, LearnedLengths, ages, quantile
from gateway.core.lifecycle import Event
from gateway.core.media import MediaRule
from gateway.core.modes import Mode
from gateway.core.pins import Page
from gateway.core.prefixes import FIRST_BLOCKS
from gateway.fleetdesk import FleetDesk
from gateway.flow import Flow
from gateway.found import FoundReplicas, names_by_pool, replica_specs
from gateway.http.admin import create_api
from gateway.http.auth import Callers, Key, Keyring, TrustedHeader, anonymous
from gateway.http.errors import safe_request_id
from gateway.http.proxy import Calls, ClassTerms, EdgeSettings, Proxy
from gateway.http.signed import MISSING as SIGNED_MISSING
from gateway.http.signed import PublicKey, Rules, SignedTokens, read_jwks, read_public_key
from gateway.keybook import Entries, KeyBook
from gateway.keydesk import KeyDesk
from gateway.ledger.factors import SharedFactors
from gateway.ledger.lengths import SharedLengths
from gateway.ledger.sharedkeys import FollowedKeys
from gateway.ledger.valkey import HoldLimits, ValkeyLedger
from gateway.ledger.wire import StoreAway
from gateway.pins import PinCounter, Pins
from gateway.reload import FileWatch, check_reload
from gateway.telemetry.calllog import CallLog
from gateway.telemetry.logs import CallRecords
from gateway.telemetry.prometheus import CONTENT_TYPE, Metrics
from gateway.telemetry.workers import Place, Workers
from gateway.tokens.api import ModelCounter
from gateway.tokens.files import MISSING, TokenizerError, TokenizerFiles
from gateway.tokens.ids import ThreadedIdReader
from gateway.tokens.threads import CountingThreads
from gateway.tokens.tiktoken_counter import TiktokenCounter
from gateway.upstream.api import Access, UpstreamFailed
from gateway.upstream.capacity import Meter
from gateway.upstream.client import EngineClient, tls_context
from gateway.upstream.engines import FleetPlan, WatchedEngines
from gateway.upstream.fleet import FleetWatch, ReadPage
from gateway.upstream.limits import UpstreamLimits
from gateway.upstream.metrics_text import EnginePage
from gateway.upstream.scraper import Scraper, Unusable
from gateway.upstream.tokenize import EngineCounter

log = logging.getLogger("kvgate.app")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DISCOVERY_SECONDS = 6.0
"""How long a start waits for replicas; those that answer later join later."""
CUT_SECONDS = 1.0
"""For the calls that the end of the grace period cuts off: a last event to a client that may read slowly."""
DRAIN_POLL_SECONDS = 0.02
SETTLE_SECONDS = 5.0
"""For giving back, at the very end, what calls still held."""
STATE_SECONDS = 1.0
"""A scrape within this time of the last one shows the same content of the store."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the settings came from."""

    path: Path
    read: Callable[[], Settings]
    """Raises ConfigError."""


class FleetRoom:
    """One fleet's engines, ledger and tasks."""

    def __init__(
        self,
        settings: Settings,
        fleet: FleetSettings,
        accesses: Mapping[str, Access],
        metrics: Metrics,
        observer: Callable[[Fact], None],
        counter: TiktokenCounter,
        threads: CountingThreads,
        memory: Memory,
    ):
        """`accesses` by pool.  Raises TokenizerError."""
        self._settings, self._configured, self._metrics = settings, fleet, metrics
        self._accesses = accesses
        self.found = FoundReplicas(self._use_found, partial(metrics.reload_failed, "replicas"))
        scraper = Scraper()
        self.watch = FleetWatch(
            replica_specs(fleet, {}, accesses),
            frozenset(fleet.models),
            self._on_change,
            scraper=scraper,
            measure=self._measure,
        )
        self.engines = WatchedEngines(_plan(settings, fleet), self.watch)
        books_config, counted = self.engines.books_config, fleet.tokenizer is not None
        self.ledger = _ledger(settings, fleet.name, books_config, observer, notes_fill=counted)
        self._meter = Meter(self.ledger.seats, self._rules, self._others_are_warm, self._holds_more)
        self._observer = observer
        asking = EngineCounter(self._engines_up, scraper.post)
        exact = asking if fleet.tokenizer == ENGINE else _model_counter(fleet.tokenizer, threads)
        factors = Factors()
        self.shared_factors = SharedFactors(settings.store.url, fleet.name, factors)
        lengths = LearnedLengths()
        self.shared_lengths = SharedLengths(settings.store.url, fleet.name, lengths, observer)
        self.pins = self._make_pins(scraper, PinCounter(counter, exact, self.engines, factors), observer)
        self._use_pins()
        self.fleet = Fleet(
            fleet.name,
            self.engines,
            self.ledger,
            exact,
            factors,
            lengths,
            memory=memory,
            on_end=self.pins.see_call,
        )
        self.models = fleet.models
        self._doubted: dict[str, int] = {}
        """By replica, caches of which the ledger is to be told."""

    def _make_pins(self, scraper: Scraper, counter: PinCounter, observer: Callable[[Fact], None]) -> Pins:
        post = partial(_post, scraper)
        return Pins(self._configured.name, self.engines, self.ledger, post, counter.count, observer)

    async def start(self) -> None:
        """Return once all replicas that can be found were asked."""
        self.watch.start()
        self.found.follow(self._configured)
        await self.found.looked()
        await self.watch.tried()

    async def run(self) -> None:
        """Until cancelled: nothing is said to the store before it is known which replicas there are."""
        await self.found.told()
        await self.ledger.run()

    async def close(self) -> None:
        await self.found.close()
        await self.watch.close()

    def use(self, settings: Settings, fleet: FleetSettings) -> None:
        """Another configuration that `check_reload` allows; the store hears of it with the next batch."""
        self._settings, self._configured = settings, fleet
        self.models = fleet.models
        self._use_pins()
        self.found.follow(fleet)
        self._use_found()

    def _use_found(self) -> None:
        """A replica that is gone gets no new calls; its streams go on."""
        fleet = self._configured
        specs = replica_specs(fleet, self.found.of, self._accesses)
        self.watch.update(specs, frozenset(fleet.models))
        self.engines.update(_plan(self._settings, fleet))
        self.fleet.caches.keep_only(self.engines.names())
        self.ledger.reconfigure()
        self._metrics.know_replicas(fleet.name, names_by_pool(fleet, specs))

    async def state(self) -> dict[str, Any]:
        """What the store holds of the fleet, which is not asked while it is known to be away, and what is learned."""
        return {**await _state_of(self.ledger), "lengths": self._quantiles()}

    def holds_elastically(self) -> bool:
        return any(pool.mode != Mode.GUARANTEED for pool in self._configured.pools)

    def lengths(self) -> list[dict[str, Any]]:
        """By class and model what is known of how much calls write."""
        return [
            {"class": class_, "model": model, "calls": known.seen, "ages": ages(known)}
            for class_, model, known in self.fleet.lengths
        ]

    def _quantiles(self) -> list[dict[str, Any]]:
        """Of the models of the settings: these become labels."""
        return [
            {
                "class": class_,
                "model": model,
                **{f"p{part * 100:g}": quantile(known, part) for part in QUANTILES},
            }
            for class_, model, known in self.fleet.lengths
            if not model or model in self.models
        ]

    def _rules(self) -> CapacityRules:
        slow_start_ms = round(self._configured.slow_start_seconds * 1000)
        return CapacityRules(self._settings.server.n_max, slow_start_ms)

    def _others_are_warm(self, replica: str) -> bool:
        return self.watch.others_are_warm(replica, self._configured.slow_start_seconds)

    async def _measure(self, replica: str, read: ReadPage) -> EnginePage:
        page = await self._meter.measure(replica, read)
        if cache := self._doubted.pop(replica, 0):
            await self.ledger.distrust(replica, cache)
            self._observer(CacheDoubted(self.fleet.name, self.engines.pool(replica), replica))
        if replica in self._meter.mine:
            self._show_page(replica, page.reading)
        return page

    def _show_page(self, replica: str, reading: Reading) -> None:
        """Without all of its figures nothing can be kept there."""
        capacity = self.watch.shape_of(replica)
        told = reading.kv_use, reading.tokens, reading.prefix_hits
        if capacity is not None and None not in told:
            free = (capacity.num_gpu_blocks - 1) * (1 - (reading.kv_use or 0.0))
            room = int(free) * capacity.block_size
            self.pins.see_page(replica, Page(reading.tokens or 0, reading.prefix_hits or 0, room))

    def _use_pins(self) -> None:
        lowest = self._settings.classes[-1]
        self.pins.use(self._configured.pins, lowest.name, lowest.depth_max)

    def _holds_more(self, replica: str, blocks: int) -> None:
        """An engine holds more blocks than the ledger: it may keep copies of what is charged once, if so many."""
        self.engines.holds_more(replica)
        if blocks >= FIRST_BLOCKS and (cache := self.fleet.caches.suspect(replica)):
            self._doubted[replica] = cache

    def _engines_up(self) -> list[tuple[str, Access]]:
        return [(state.spec.url, state.spec.access) for state in self.watch.states() if state.up]

    async def _on_change(self, names: frozenset[str]) -> None:
        self.engines.changed()
        self.ledger.reconfigure()
        for name in names:
            self.ledger.rest(name, self.watch.why_it_rests(name) or "")
            await self.ledger.observe(name, self.watch.is_up(name))


class LimitsRoom:
    """The ledger of the limits over all fleets.  It speaks to the store from the moment that some key has such limits,
    and then until the end: what was used of them has to be corrected when the key is gone, too."""

    def __init__(self, settings: Settings, observer: Callable[[Fact], None]) -> None:
        self.needed = asyncio.Event()
        self._needed_at_start = False
        self._settings = settings
        self.ledger = _ledger(settings, quota.ALL_FLEETS, self._books_config, observer)

    def use(self, settings: Settings) -> None:
        self._settings = settings
        self.ledger.reconfigure()

    def note(self, keys: Iterable[Key]) -> None:
        """Those that may call from now on."""
        if any(key.all_fleets for key in keys):
            self.needed.set()

    @property
    def ready(self) -> bool:
        """A change of the keys that makes it needed does not take the gateway out until it serves."""
        return self.ledger.ready or not (self._needed_at_start or self.ledger.opened)

    async def run(self) -> None:
        """Until cancelled."""
        self._needed_at_start = self.needed.is_set()
        await self.needed.wait()
        await self.ledger.run()

    async def close(self, seconds: float) -> None:
        if self.needed.is_set():
            await self.ledger.close(seconds)

    async def state(self) -> dict[str, Any] | None:
        """What is held within the limits and who waits for them; None while no key has any."""
        if not self.needed.is_set():
            return None
        state = await _state_of(self.ledger)
        keys = {name: {"requests": held["requests"]} for name, held in state["keys"].items()}
        return {"leases": state["leases"], "queue": state["queue"], "queued": state["queued"], "keys": keys}

    def _books_config(self) -> FleetConfig:
        return all_fleets.books_config(*_leases_ms(self._settings), _class_shares(self._settings))


class Gateway:
    """One worker process.  A wrong vocabulary, tokenizer or keys file raises at once."""

    def __init__(
        self, settings: Settings, secrets: Secrets, source: Source | None = None, place: Place | None = None
    ) -> None:
        """`source` is followed while the process runs; without one the settings stay.

        `place`: among several workers of one command, which show their numbers as one.
        """
        self._settings = settings
        self._source = source
        self._rooms: list[FleetRoom] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._state_read_at = -STATE_SECONDS
        self._ends_at = math.inf
        self.calls = Calls()
        self._counting = CountingThreads()
        self._counter = TiktokenCounter(self._counting)
        self._call_log = CallLog(Path(settings.log.calls)) if settings.log.calls else None
        self._metrics = Metrics(
            _metric_names(settings),
            [c.name for c in settings.classes],
            self.calls.inflight,
            lambda: self._call_log.lost if self._call_log else 0,
        )
        self._workers = self._join(place) if place else None
        self._call_records = CallRecords()
        self._rooms = self._make_rooms(secrets)
        self._limits = LimitsRoom(settings, self._observe)
        self._keys = Keyring((), None if settings.auth.required else anonymous(settings.default_class))
        self._book = KeyBook(self._keys, self._limits.note)
        self._callers = Callers(self._keys, _trusted_header(settings))
        self._followed = [*self._follow_keys(), *self._follow_signatures(), *self._follow_settings()]
        in_store = settings.auth.keys_in_store
        self._shared = FollowedKeys(
            settings.store.url, self._book.read_stored if in_store else None, self.calls.cut
        )
        self._upstream = EngineClient(_upstream_limits(settings.upstream))
        self._models: dict[str, Fleet] = {}
        self._name_models()
        self._proxy = Proxy(
            Flow(
                self._counter,
                self._upstream,
                self._limits.ledger,
                self._observe,
                settings.upstream.background_seconds,
                ThreadedIdReader(self._counting),
            ),
            self._callers,
            self._models,
            _edge_settings(settings),
            self.calls,
            self._observe,
        )
        self._api = self._create_api(secrets.admin_token)

    def _make_rooms(self, secrets: Secrets) -> list[FleetRoom]:
        settings, accesses = self._settings, _accesses(self._settings, secrets)
        tools = self._metrics, self._observe, self._counter, self._counting, Memory()
        return [FleetRoom(settings, fleet, accesses[fleet.name], *tools) for fleet in settings.fleets]

    def _create_api(self, admin_token: str | None) -> FastAPI:
        settings = self._settings
        classes = [c.name for c in settings.classes]
        return create_api(
            self._callers,
            self._models,
            self.problem,
            self._render_metrics,
            self.state,
            self.lengths,
            KeyDesk(self._book, self._shared, settings.auth, classes, self._models),
            FleetDesk([room.fleet for room in self._rooms]),
            admin_token,
            __version__,
        )

    def _observe(self, fact: Fact) -> None:
        self._metrics(fact)
        self._call_records(fact)
        if self._call_log:
            self._call_log(fact)

    def _join(self, place: Place) -> Workers:
        workers = Workers(place, self._metrics.snapshot)
        if totals := workers.inherited():
            self._metrics.inherit(totals)
        return workers

    def _name_models(self) -> None:
        """In place: who was given the mapping sees the models of now."""
        self._models.clear()
        self._models.update({model: room.fleet for room in self._rooms for model in room.models})

    # -- files that are followed ---------------------------------------------------------------------------------

    def _follow_keys(self) -> Iterator[FileWatch[Any]]:
        if self._settings.auth.keys_file is None:
            return
        path = Path(self._settings.auth.keys_file)
        secretless = self._settings.auth.names_from_outside
        classes = [class_.name for class_ in self._settings.classes]

        def read() -> Entries:
            entries = load_keys(path, classes, secretless)
            check_promises(entries, self._settings.fleets)
            return self._book.read_file(Entries.of(entries))

        keys = read()
        self._book.use_file(keys)
        yield FileWatch(path, keys, read, self._book.use_file, partial(self._metrics.reload_failed, "keys"))

    def _follow_signatures(self) -> Iterator[FileWatch[Any]]:
        if not (jwt := self._settings.auth.jwt):
            return

        def use(keys: Sequence[PublicKey]) -> None:
            """Tokens that were valid before are checked anew."""
            self._callers.tokens = SignedTokens(rules, keys)

        rules = Rules(jwt.algorithms, jwt.issuer, jwt.audience, jwt.claim)
        path = Path(jwt.jwks_file or jwt.public_key_file or "")
        read = partial(read_signature_keys, jwt)
        keys = read()
        use(keys)
        yield FileWatch(path, keys, read, use, partial(self._metrics.reload_failed, "jwt"))

    def _follow_settings(self) -> Iterator[FileWatch[Any]]:
        if self._source:
            failed = partial(self._metrics.reload_failed, "config")
            yield FileWatch(self._source.path, self._settings, self._source.read, self._use, failed)

    def _use(self, settings: Settings) -> None:
        """All of it or, where `check_reload` raises ConfigError, nothing."""
        check_reload(self._settings, settings)
        self._settings = settings
        self._metrics.know(_metric_names(settings), [c.name for c in settings.classes])
        for room, fleet in zip(self._rooms, settings.fleets, strict=True):
            room.use(settings, fleet)
        self._limits.use(settings)
        self._name_models()
        self._proxy.use(_edge_settings(settings))

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return once replicas were asked; what is still missing shows in `problem`."""
        loop = asyncio.get_running_loop()
        if self._call_log:
            self._call_log.start()
        if self._workers:
            await self._workers.start()
        starting = [asyncio.create_task(room.start()) for room in self._rooms]
        await asyncio.wait(starting, timeout=DISCOVERY_SECONDS)
        self._tasks += starting
        for room in self._rooms:
            self._tasks.append(loop.create_task(room.run()))
            self._tasks.append(loop.create_task(room.pins.run()))
            self._tasks.append(loop.create_task(room.shared_factors.run()))
            self._tasks.append(loop.create_task(room.shared_lengths.run(room.holds_elastically)))
        self._tasks.append(loop.create_task(self._limits.run()))
        self._tasks.append(loop.create_task(self.calls.watch_writes()))
        self._tasks += [loop.create_task(watch.run()) for watch in self._followed]
        await self._shared.poll()
        self._tasks.append(loop.create_task(self._shared.run()))

    def drain(self) -> None:
        """Not ready from now on; after the grace period what still runs is ended.  A second call ends that period."""
        if self.calls.draining:
            self.end_grace()
            return
        self.calls.drain()
        loop, grace_seconds = asyncio.get_running_loop(), self._settings.server.grace_seconds
        self._ends_at = loop.time() + grace_seconds
        loop.call_later(grace_seconds, self.end_grace)

    def end_grace(self) -> None:
        self._ends_at = min(self._ends_at, asyncio.get_running_loop().time())
        self.calls.interrupt(Event.GRACE_OVER)

    async def drained(self) -> None:
        """After `drain`: return when no call is left, or soon after the grace period if one does not end."""
        loop = asyncio.get_running_loop()
        # Once in a process's life; an event would be one more thing that every call has to keep.
        while self.calls.inflight() and loop.time() < self._ends_at + CUT_SECONDS:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        """Give back what is still held, then end everything."""
        closing = [room.ledger.close(SETTLE_SECONDS) for room in self._rooms]
        await asyncio.gather(self._limits.close(SETTLE_SECONDS), *closing)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shared.close()
        for room in self._rooms:
            await room.close()
        await self._upstream.close()
        self._counting.close()
        if self._call_log:
            await asyncio.to_thread(self._call_log.close)
        if self._workers:
            await self._workers.stop()

    # -- what operators see --------------------------------------------------------------------------------------

    def problem(self) -> str:
        """Why this process should get no traffic; empty when it should."""
        if self.calls.draining:
            return "draining"
        for room in self._rooms:
            if silent := room.found.silent:
                return f"nothing says yet which replicas fleet {room.fleet.name} has in {', '.join(silent)}"
            if not room.ledger.ready:
                return f"the store does not answer, or was just started and does not admit yet: {room.fleet.name}"
            if not any(state.up for state in room.watch.states()):
                return f"no replica of fleet {room.fleet.name} is up"
        if not self._limits.ready:
            return "the store does not answer for limits.all_fleets"
        return "" if self._shared.up_to_date else "the keys in the store were not read yet"

    async def state(self) -> dict[str, Any]:
        """What the store and the workers of this command hold; the numbers at the top are sums over fleets."""
        inflight = (await self._workers.call_roll()).inflight() if self._workers else self.calls.inflight()
        fleets: dict[str, Any] = {}
        for room in self._rooms:
            fleets[room.fleet.name] = {**await room.state(), "inflight": inflight.get(room.fleet.name, 0)}
        counts = ("reserved", "debt", "leases", "queue", "inflight")
        sums = {name: _sum(fleet[name] for fleet in fleets.values()) for name in counts}
        limits = await self._limits.state()
        return {"fleets": fleets, **sums, quota.ALL_FLEETS: limits, "ready": not self.problem()}

    def lengths(self) -> dict[str, Any]:
        """What is known of how much calls write, by fleet."""
        return {"fleets": {room.fleet.name: room.lengths() for room in self._rooms}}

    async def _render_metrics(self) -> tuple[bytes, str]:
        now = asyncio.get_running_loop().time()
        if now - self._state_read_at >= STATE_SECONDS:
            self._state_read_at = now
            for room in self._rooms:
                self._metrics.set_state(room.fleet.name, await room.state())
            self._metrics.set_state(quota.ALL_FLEETS, await self._limits.state() or {})
        roll = await self._workers.call_roll() if self._workers else None
        return await asyncio.to_thread(self._metrics.page(roll)), CONTENT_TYPE

    # -- ASGI ----------------------------------------------------------------------------------------------------

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI's; what it returns is the work itself: a coroutine around it would cost each call's every wait."""
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        if scope["type"] == "websocket":
            return send({"type": "websocket.close", "code": 1008})
        if route := self._proxy.route(scope):
            return self._proxy.serve(route, scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id")
        with_id = _with_request_id(send, safe_request_id(given, random_secrets.token_hex(16)))
        return self._api(scope, receive, with_id)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})


def _ledger(
    settings: Settings,
    name: str,
    config: Callable[[], FleetConfig],
    observer: Callable[[Fact], None],
    notes_fill: bool = False,
) -> ValkeyLedger:
    store = settings.store
    held = 0.0 if store.on_outage == "refuse" else store.hold_seconds
    return ValkeyLedger(
        store.url,
        name,
        config,
        HoldLimits(held, store.hold_calls_max, store.hold_bytes_max),
        observer,
        keep_lost=store.on_lease_lost == "keep",
        share_seconds=store.share_seconds if store.on_outage == "share" else 0.0,
        notes_fill=notes_fill,
    )


async def _post(
    scraper: Scraper, base_url: str, path: str, body: bytes, timeout_seconds: float, access: Access
) -> tuple[int, bytes]:
    """As `Scraper.post`, with what the request path knows failures by."""
    try:
        return await scraper.post(base_url, path, body, timeout_seconds, access)
    except Unusable as failed:
        raise UpstreamFailed(str(failed)) from None


async def _state_of(ledger: ValkeyLedger) -> dict[str, Any]:
    with contextlib.suppress(StoreAway):
        if ledger.away_seconds is None:
            return await ledger.state()
    sums = dict.fromkeys(("reserved", "debt", "leases", "queue"))
    return {"pools": {}, **sums, "queued": {}, "keys": {}, "gate": None}


def _with_request_id(send: Send, request_id: str) -> Send:
    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
        await send(message)

    return send_with_id


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if None in found else sum(value or 0 for value in found)


def read_signature_keys(jwt: Jwt) -> tuple[PublicKey, ...]:
    """Those that tokens are checked with.  Raises ConfigError."""
    setting, file = (
        ("jwks_file", jwt.jwks_file) if jwt.jwks_file else ("public_key_file", jwt.public_key_file)
    )
    path = Path(file or "")
    try:
        text = text_of(path)
        return read_jwks(text) if jwt.jwks_file else read_public_key(text)
    except ImportError:
        raise ConfigError("auth.jwt", SIGNED_MISSING) from None
    except ConfigError as error:
        raise ConfigError(f"auth.jwt.{setting}", str(error)) from None
    except ValueError as error:
        raise ConfigError(f"auth.jwt.{setting}", f"{path.name} {error}") from None


def _model_counter(tokenizer: Tokenizer | str | None, threads: CountingThreads) -> ModelCounter | None:
    """By the files of a model; None without any.  Raises TokenizerError, also where the extra is not installed."""
    if not isinstance(tokenizer, Tokenizer):
        return None
    template = tokenizer.chat_template
    files = TokenizerFiles(
        Path(tokenizer.file), Path(template) if template else None, tokenizer.chat_template_kwargs
    )
    try:
        from gateway.tokens.exact import TokenizerCounter  # noqa: PLC0415 - an extra
    except ImportError:
        raise TokenizerError(MISSING) from None
    return TokenizerCounter(files, threads)


def _trusted_header(settings: Settings) -> TrustedHeader | None:
    header = settings.auth.trusted_header
    return TrustedHeader(header.name, header.from_) if header else None


def _leases_ms(settings: Settings) -> tuple[int, int]:
    """Lease and heartbeat."""
    return round(settings.store.lease_seconds * 1000), round(settings.store.heartbeat_seconds * 1000)


def _class_shares(settings: Settings) -> tuple[tuple[str, int], ...]:
    """In thousandths."""
    return tuple((class_.name, round(class_.share * 1000)) for class_ in settings.classes)


def read_certificates(settings: Settings) -> dict[str, dict[str, SSLContext]]:
    """What connections to each pool of each fleet are made with.  Raises ConfigError.

    Pools of the same files share one: it takes milliseconds, and the system's authorities take up memory.
    """
    made: dict[tuple[str | None, ...], SSLContext] = {}
    found: dict[str, dict[str, SSLContext]] = {}
    for f, fleet in enumerate(settings.fleets):
        for p, pool in enumerate(fleet.pools):
            access = pool.upstream
            files = access.ca_file, access.client_cert_file, access.client_key_file
            try:
                context = made.setdefault(files, made.get(files) or tls_context(*files))
            except OSError as error:
                problem = f"its files cannot be used for TLS: {error.strerror or error}"
                raise ConfigError(f"fleets[{f}].pools[{p}].upstream", problem) from None
            found.setdefault(fleet.name, {})[pool.name] = context
    return found


def _accesses(settings: Settings, secrets: Secrets) -> dict[str, dict[str, Access]]:
    """By fleet and pool."""
    contexts, keys = read_certificates(settings), secrets.engine_keys
    return {
        fleet.name: {
            pool.name: Access.of(
                keys[pool.upstream.api_key_env] if pool.upstream.api_key_env else None,
                contexts[fleet.name][pool.name],
            )
            for pool in fleet.pools
        }
        for fleet in settings.fleets
    }


def _plan(settings: Settings, fleet: FleetSettings) -> FleetPlan:
    lease_ms, heartbeat_ms = _leases_ms(settings)
    return FleetPlan(
        name=fleet.name,
        model=fleet.model,
        names=frozenset(fleet.models),
        default_output_tokens=fleet.default_output_tokens,
        max_output_tokens=fleet.max_output_tokens,
        token_factor=1.0 if fleet.token_factor is None else fleet.token_factor,
        learns=fleet.token_factor is None,
        exact_above=fleet.exact_above,
        speculative_tokens=fleet.speculative_tokens,
        encoder_tokens=fleet.encoder_tokens,
        engine_tools=fleet.engine_tools,
        media=_media_rule(fleet.media),
        share_prompt_of_n=fleet.share_prompt_of_n,
        share_prefixes=fleet.share_prefixes == AUTO,
        soft_hold=fleet.soft_hold == AUTO,
        safe_fraction=fleet.safe_fraction,
        overtake_blocks=fleet.overtake_blocks,
        pools=tuple((pool.name, pool.max_prompt_tokens) for pool in fleet.pools),
        modes={pool.name: Mode(pool.mode) for pool in fleet.pools},
        lanes=fleet.lanes,
        classes=_class_shares(settings),
        lease_ms=lease_ms,
        heartbeat_ms=heartbeat_ms,
    )


def _media_rule(media: Media) -> MediaRule:
    return MediaRule(
        media.image_tokens,
        media.audio_tokens,
        media.video_tokens,
        None if media.hosts is None else frozenset(media.hosts),
        media.inline,
        media.clip_seconds,
        media.audio_seconds_max,
        media.audio_bytes_per_second,
        media.tensor_tokens,
    )


def _upstream_limits(upstream: Upstream) -> UpstreamLimits:
    return UpstreamLimits(
        upstream.connect_seconds,
        upstream.headers_seconds,
        upstream.first_event_seconds,
        upstream.idle_seconds,
    )


def _edge_settings(settings: Settings) -> EdgeSettings:
    return EdgeSettings(
        body_bytes_max=settings.server.body_bytes_max,
        body_seconds=settings.server.body_seconds,
        bodies_bytes_max=settings.server.bodies_bytes_max,
        audio_bytes_max=settings.server.audio_bytes_max,
        n_max=settings.server.n_max,
        overload_status=settings.answers.overload_status,
        show_replica=settings.answers.show_replica,
        keepalive_seconds=settings.answers.keepalive_seconds,
        classes={c.name: _class_terms(c) for c in settings.classes},
        default_class=settings.default_class,
        retry_share=settings.queue.retry_share,
        pass_through=frozenset(settings.routes.pass_through),
        unreserved_max=settings.routes.unreserved_max,
    )


def _metric_names(settings: Settings) -> dict[str, dict[str, list[str]]]:
    return {
        fleet.name: {pool.name: [replica.name for replica in pool.replicas] for pool in fleet.pools}
        for fleet in settings.fleets
    }


def _class_terms(class_: PriorityClass) -> ClassTerms:
    queue_key_max = math.ceil(class_.depth_max * class_.key_share)
    return ClassTerms(
        round(class_.seconds_max * 1000),
        class_.depth_max,
        queue_key_max,
        None if class_.ttft_seconds is None else round(class_.ttft_seconds * 1000),
        Mode(class_.mode) if class_.mode else None,
    )
