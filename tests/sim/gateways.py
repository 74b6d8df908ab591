"""Gateway processes: the product's own edge, flow, ledger and upstream client, without server and scrapes."""

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from gateway.call import Fleet
from gateway.core.books import FleetConfig
from gateway.core.events import Event as Fact
from gateway.core.lifecycle import Event
from gateway.core.modes import Mode
from gateway.flow import Flow
from gateway.http.auth import Callers, Key, Keyring
from gateway.http.proxy import Calls, ClassTerms, EdgeSettings, Proxy
from gateway.ledger.api import Admission, Lost
from gateway.ledger.reservation import Ask
from gateway.ledger.valkey import HoldLimits, ValkeyLedger
from gateway.upstream.api import Receiver, Trouble, UpstreamRequest
from gateway.upstream.client import EngineClient
from gateway.upstream.engines import FleetPlan, WatchedEngines
from gateway.upstream.fleet import ReplicaShape, ReplicaSpec, ReplicaState
from gateway.upstream.limits import UpstreamLimits
from tests.flow.world import WordCounter
from tests.sim.beginnings import Beginnings
from tests.sim.engines import BLOCK_SIZE, Engine
from tests.sim.growth import Growth
from tests.sim.loop import Process, VirtualLoop
from tests.sim.store import URL

FLEET = "demo"
LEASE_MS = 6_000
HEARTBEAT_MS = 1_000
HOLD_SECONDS = 2.0
LIMITS = UpstreamLimits(connect_seconds=1, headers_seconds=2, first_event_seconds=2, idle_seconds=2)
SETTLE_SECONDS = 5.0
SHORT_TOKENS_MAX = 600
WAIT_MS = {"high": 4_000, "normal": 6_000, "low": 9_000}
SEQUENCES_MAX = 6
PREFILL_TOKENS = 1_500
CHARGED_TO: ContextVar[Ask] = ContextVar("reservation")
"""What the running call was given."""
Runs = Callable[["Gateway", Ask, UpstreamRequest], Callable[[], None]]
"""Told of each exchange that begins, and of the reservation that pays for it; returns what is called at its end."""


def keys() -> list[Key]:
    """One of each class, and two with limits of their own."""
    given = [
        Key("high", "high"),
        Key("normal", "normal"),
        Key("low", "low", weight=2),
        Key("few", "normal", requests_max=2),
        Key("small", "high", blocks_max=40),
    ]
    return [Key(k.name, k.class_, weight=k.weight, requests_max=k.requests_max, blocks_max=k.blocks_max,
                digest=hashlib.sha256(f"kvg_{k.name}".encode()).digest()) for k in given]  # fmt: skip


class Watch:
    """What `WatchedEngines` asks: which engines answer, as this process was last told."""

    def __init__(self, engines: Sequence[Engine], caches: bool) -> None:
        """`caches`: they are known to keep prefixes."""
        self._engines = engines
        self._caches = caches
        self._down: set[str] = set()

    def states(self) -> list[ReplicaState]:
        return [self._state(engine) for engine in self._engines]

    def _state(self, engine: Engine) -> ReplicaState:
        shape = ReplicaShape(
            engine.name,
            engine.pool,
            engine.url,
            engine.blocks,
            BLOCK_SIZE,
            4096,
            SEQUENCES_MAX,
            PREFILL_TOKENS,
            prefix_caching=self._caches,
        )
        return ReplicaState(
            ReplicaSpec(engine.pool, engine.name, engine.url), shape, self.is_up(engine.name), ""
        )

    def is_up(self, name: str) -> bool:
        return name not in self._down

    def set(self, name: str, up: bool) -> None:
        self._down = self._down - {name} if up else self._down | {name}

    def report_failure(self, name: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        """Only the world's own events take an engine out."""

    def report_success(self, name: str) -> None:
        """Nor does one bring it back."""


class Ledger(ValkeyLedger):
    """Notes for which reservation the call's task works from now on."""

    growth: Growth
    beginnings: Beginnings

    def open(self, admission: Admission, lost: Lost) -> Ask:
        ask = super().open(self.beginnings.of(self.growth.weighted(admission)), lost)
        CHARGED_TO.set(ask)
        return ask


class Client(EngineClient):
    """Tells of exchanges, from before the connection to after its end."""

    def __init__(self, gateway: "Gateway", runs: Runs) -> None:
        super().__init__(LIMITS)
        self._gateway = gateway
        self._runs = runs

    async def exchange(self, request: UpstreamRequest, receiver: Receiver) -> None:
        ended = self._runs(self._gateway, CHARGED_TO.get(), request)
        try:
            await super().exchange(request, receiver)
        finally:
            ended()


class Gateway:
    """One process from its start to its end."""

    def __init__(
        self, name: str, engines: Sequence[Engine], runs: Runs, observe: Callable[["Gateway", Fact], None],
        seed: str, queue_max: int, on_lease_lost: str, loop: VirtualLoop, metered: bool, shares: bool,
    ) -> None:  # fmt: skip
        """`metered`: its calls grow by what their engines report, in pools of which all engines have one mode.
        `shares`: they begin alike, and what engines have of conversations is held for their next turns."""
        self.name = name
        self.process = Process(name)
        self.calls = Calls()
        self.draining = False
        self.ended = asyncio.Event()
        """Its process is gone, one way or the other."""
        self.visits: dict[asyncio.Task[Any], None] = {}
        self._engines = engines
        self._observe = observe
        self._watch = Watch(engines, caches=shares)
        self._known = WatchedEngines(_plan(engines, metered, shares), self._watch)  # type: ignore[arg-type]
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self.ledger = Ledger(
            URL, FLEET, self._books_config, HoldLimits(HOLD_SECONDS, 64, 1 << 26), self.observe, loop.time,
            keep_lost=on_lease_lost == "keep",
        )  # fmt: skip
        self.ledger.growth = Growth(engines, seed, metered)
        self.ledger.beginnings = Beginnings(engines, seed, shares)
        self.client = Client(self, runs)
        self.app = self._edge(random.Random(seed), queue_max)

    def __repr__(self) -> str:
        return self.name

    def _books_config(self) -> FleetConfig:
        config = self._known.books_config()
        modes = {engine.name: engine.mode for engine in self._engines}
        replicas = tuple(replace(replica, mode=modes[replica.name]) for replica in config.replicas)
        return replace(config, replicas=replicas)

    def observe(self, fact: Fact) -> None:
        self._observe(self, fact)

    def _edge(self, random_: random.Random, queue_max: int) -> Proxy:
        return Proxy(
            Flow(WordCounter(), self.client, self.ledger, self.observe),  # no key has limits over all fleets
            Callers(Keyring(keys(), None)),
            {FLEET: Fleet(FLEET, self._known, self.ledger)},
            _settings(queue_max),
            self.calls,
            self.observe,
            jitter=lambda: random_.uniform(1, 1.25),
        )

    @property
    def alive(self) -> bool:
        return not self.process.dead and not self.ended.is_set()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return self._loop.create_task(work, context=self.process.context.copy())

    def start(self) -> None:
        self._tasks = [self.run(self.ledger.run()), self.run(self.calls.watch_writes())]
        self._tasks.append(self.run(self.ledger.beginnings.read(self.ledger.seats)))
        self._tasks.append(self.run(self.ledger.growth.go_on(lambda: list(self.ledger._asks.values()))))

    def visit(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Serve one request, as the server would."""
        task = self.run(work)
        self.visits[task] = None
        task.add_done_callback(self.visits.pop)
        return task

    async def see(self, engine: str, up: bool) -> None:
        """Its watch finds that an engine stopped or resumed answering."""
        self._watch.set(engine, up)
        self._known.changed()
        self.ledger.reconfigure()
        await self.ledger.observe(engine, up)

    # -- ends ----------------------------------------------------------------------------------------------------

    async def drain(self, grace_seconds: float) -> None:
        """As SIGTERM: what runs may finish within the grace period, then everything is given back."""
        self.draining = True
        self.calls.drain()
        await self._until_idle(grace_seconds)
        self.calls.interrupt(Event.GRACE_OVER)
        await self._until_idle(1.0)
        await self.ledger.close(SETTLE_SECONDS)
        await self.end()

    async def _until_idle(self, seconds: float) -> None:
        ends_at = self._loop.time() + seconds
        while self.calls.inflight() and self._loop.time() < ends_at:
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        for task in [*self._tasks, *self.visits]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self.visits, return_exceptions=True)
        await self.client.close()
        self.ended.set()

    def killed(self) -> None:
        """As SIGKILL: nothing of it ever runs again."""
        self.process.dead = True
        self.process.stop()
        self.ended.set()

    async def bury(self) -> None:
        """At the end of the world: what a killed process left in memory is undone, where nobody hears of it."""
        self.process.go_on(self._loop)
        await self.end()


def _plan(engines: Sequence[Engine], metered: bool, shares: bool) -> FleetPlan:
    pools = tuple(dict.fromkeys(engine.pool for engine in engines))
    lanes: Mapping[str, tuple[str, ...]] = {"short": pools, "long": ("long",)}
    return FleetPlan(
        name=FLEET,
        model=FLEET,
        names=frozenset({FLEET}),
        default_output_tokens=64,
        max_output_tokens=None,
        token_factor=1.0,
        exact_above=0.7,
        learns=False,
        speculative_tokens=0,
        share_prompt_of_n=False,
        safe_fraction=1.0,
        overtake_blocks=None,
        pools=(("short", SHORT_TOKENS_MAX), ("long", None)),
        modes={engine.pool: Mode(engine.mode) for engine in engines} if metered else {},
        lanes=lanes,
        classes=(("high", 0), ("normal", 200), ("low", 100)),
        lease_ms=LEASE_MS,
        heartbeat_ms=HEARTBEAT_MS,
        soft_hold=shares,
    )


def _settings(queue_max: int) -> EdgeSettings:
    return EdgeSettings(
        body_bytes_max=1 << 20,
        body_seconds=5,
        bodies_bytes_max=1 << 26,
        n_max=16,
        overload_status=429,
        show_replica=True,
        classes={name: ClassTerms(wait_ms, queue_max, queue_max) for name, wait_ms in WAIT_MS.items()},
        default_class="normal",
        retry_share=0.2,
    )
