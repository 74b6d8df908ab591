"""One world by one seed: a store, engines, gateways and clients, what goes wrong, and the judgement."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from gateway.core.elastic import ELASTIC, SHARED
from tests.sim.beginnings import SHARED_SHARE
from tests.sim.chaos import Chaos
from tests.sim.clients import Crowd
from tests.sim.engines import Engine
from tests.sim.gateways import LEASE_MS, Gateway
from tests.sim.growth import MODES
from tests.sim.judge import STREAM_SECONDS_MAX, Judge, Violation
from tests.sim.loop import Stuck, VirtualLoop
from tests.sim.network import Network
from tests.sim.store import Store

LOAD_SECONDS = 14.0
FAULTS_SECONDS = 8.0
"""Faults begin within this time, so that calm comes while there still is load."""
QUIET_SECONDS = 2 * LEASE_MS / 1000 + 2
TROUBLE_SHARES = (0.0, 0.05, 0.3)
METERED_SHARE = 0.4
"""Of worlds, in which calls grow by what their engines report, as in the product."""
TALKS_SHARE = 0.6
"""Of those in which calls begin alike: their clients have conversations."""
LINES_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Story:
    """How a world went."""

    seed: int
    violation: str
    """Empty where all was well."""
    virtual_seconds: float
    facts: dict[str, int]
    trace: list[str]


class World:
    def __init__(self, seed: int, loop: VirtualLoop, keep_trace: bool, only: str) -> None:
        self._seed = seed
        self._only = only
        self.loop = loop
        self._keep_trace = keep_trace
        self.lines: list[str] = []
        self._random = pick = random.Random(f"world {seed}")
        self.network = Network(loop, f"network {seed}")
        self.judge = Judge(loop, self.trace)
        self.store = Store(self.network, self.judge.ran)
        self.judge.watch(self.store)
        self.store.wakes_lost = pick.random() < 0.1
        self.engines = [
            Engine(f"engine{n}", pool, blocks, self.network, f"engine {n} {seed}")
            for n, (pool, blocks) in enumerate(
                (("short", 61), ("short", pick.choice([61, 91])), ("long", 121))
            )
        ]
        modes = random.Random(f"modes {seed}")
        possible = modes.choice(MODES)
        for engine in self.engines:
            engine.mode = modes.choice(possible)
        self._metered = modes.random() < METERED_SHARE
        if self._metered:
            of_pools = {engine.pool: modes.choice((ELASTIC, SHARED)) for engine in self.engines}
            for engine in self.engines:
                engine.mode = of_pools[engine.pool]
        self._shares = random.Random(f"beginnings {seed}").random() < SHARED_SHARE
        share = pick.choice(TROUBLE_SHARES)
        for engine in self.engines:
            engine.trouble_share = share
        self.gateways: list[Gateway] = []
        self._queue_max = pick.choice([0, 6, 100, 100])
        self._on_lease_lost = pick.choice(["cut", "cut", "keep"])
        talks = random.Random(f"talks {seed}")
        goes_on = self._shares and talks.random() < TALKS_SHARE
        self.crowd = Crowd(
            random.Random(f"crowd {seed}"), self._open_gateways, self.trace, talks if goes_on else None
        )

    def trace(self, line: str) -> None:
        if self._keep_trace and len(self.lines) < LINES_MAX:
            self.lines.append(f"{self.loop.time():9.4f} {line}")

    def start_gateway(self) -> None:
        number = len(self.gateways)
        gateway = Gateway(
            f"gateway{number}", self.engines, self.judge.began, self.judge.observe, f"gateway {number} {self._seed}",
            self._queue_max, self._on_lease_lost, self.loop, self._metered, self._shares,
        )  # fmt: skip
        self.gateways.append(gateway)
        self.judge.add(gateway)
        gateway.start()

    def _open_gateways(self) -> list[Gateway]:
        return [gateway for gateway in self.gateways if gateway.alive and not gateway.draining]

    async def live(self) -> None:
        """Raises Violation."""
        story = asyncio.ensure_future(self._story())
        await asyncio.wait([story, self.judge.failed], return_when=asyncio.FIRST_COMPLETED)
        if self.judge.failed.done():
            raise Violation(self.judge.failed.result())
        await story

    async def _story(self) -> None:
        for _ in range(self._random.randint(2, 4)):
            self.start_gateway()
        await asyncio.sleep(3)
        eyes = asyncio.ensure_future(self.judge.look())
        load = asyncio.ensure_future(self.crowd.arrive(LOAD_SECONDS, self._random.choice([3, 6, 10])))
        await asyncio.sleep(1)
        chaos = asyncio.ensure_future(
            Chaos(self, random.Random(f"chaos {self._seed}"), self._only).run(FAULTS_SECONDS)
        )
        await load
        await chaos
        await self._clients_gone()
        await asyncio.sleep(QUIET_SECONDS)
        eyes.cancel()
        self.judge.judge_visits(self.crowd.visits)
        self.judge.judge_quiet()
        await self._end()

    async def _clients_gone(self) -> None:
        try:
            async with asyncio.timeout(STREAM_SECONDS_MAX):
                await self.crowd.gone()
        except TimeoutError:
            left = ", ".join(f"{v.id} at {v.gateway}, {v.visitor.status}" for v in self.crowd.waiting)
            self.judge.fail(f"clients wait for ever: {left}")

    async def _end(self) -> None:
        """Nothing stays behind but the engines' own hanging calls."""
        for gateway in self.gateways:
            if gateway.process.dead:
                await gateway.bury()
            elif gateway.alive:
                await gateway.run(gateway.drain(1))
        processes = [gateway.process for gateway in self.gateways]
        left = [task for process in processes for task in self.loop.tasks_of(process)]
        if left:
            self.judge.fail(f"tasks are left: {left}")


def play(seed: int, keep_trace: bool = False, only: str = "") -> Story:
    """One world from its beginning to its end, in no time.  `only`: the one kind of fault that happens in it."""
    loop = VirtualLoop()
    violation = ""
    with _seeded(seed, loop):
        world = World(seed, loop, keep_trace, only)
        try:
            with _logged_to(world.judge):
                loop.run_until_complete(world.live())
        except (Violation, Stuck) as failure:
            violation = str(failure)
        with _logged_to(None):
            _end(loop, world)
    return Story(seed, violation, loop.time(), dict(sorted(world.judge.facts.items())), world.lines)


@contextmanager
def _seeded(seed: int, loop: VirtualLoop) -> Iterator[None]:
    """What the product takes from its machine, the time and its entropy, is the world's."""
    entropy = random.Random(f"entropy {seed}")
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(secrets, "randbits", entropy.getrandbits),
        mock.patch.object(secrets, "token_hex", lambda size: entropy.randbytes(size).hex()),
    ):
        yield


@contextmanager
def _logged_to(judge: Judge | None) -> Iterator[None]:
    """All logs of the product go to the judge, or nowhere."""
    handler = logging.NullHandler() if judge is None else _Handler(judge)
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        yield
    finally:
        root.handlers = before


class _Handler(logging.Handler):
    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def emit(self, record: logging.LogRecord) -> None:
        self._judge.log(record)


def _end(loop: VirtualLoop, world: World) -> None:
    """Whatever is left, of a world that failed too, is cancelled where nobody hears of it."""
    for gateway in world.gateways:
        gateway.process.dead = True
        gateway.process.go_on(loop)
    world.store.process.go_on(loop)
    while left := [task for task in asyncio.all_tasks(loop) if not task.done()]:
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=0.1))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
