"""What goes wrong in a world, by seed: which kinds at all, how often, when and for how long."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from tests.sim.gateways import LEASE_MS, Gateway
from tests.sim.network import LATENCY_SECONDS
from tests.sim.store import HOST

if TYPE_CHECKING:
    from tests.sim.world import World

LEASE_SECONDS = LEASE_MS / 1000
FAULTS_MAX = 7


class Chaos:
    """A seed has some of the kinds only: what happens alone is not hidden by what happens with it."""

    def __init__(self, world: "World", random_: random.Random, only: str) -> None:
        """`only`: the one kind that happens, by the end of its method's name; empty for what the seed says."""
        self._world = world
        self._random = random_
        kinds: Sequence[Callable[[], Awaitable[None]]] = (
            self._store_paused, self._store_restarted, self._store_restarted, self._connections_cut, self._partition,
            self._partition, self._slow_way, self._breaking_way, self._late_copies, self._clock_jump,
            self._engine_down, self._engine_hangs, self._gateway_killed, self._gateway_killed, self._gateway_drained,
            self._gateway_paused, self._gateway_paused,
        )  # fmt: skip
        chosen = [kind for kind in kinds if only and kind.__name__.endswith(only)]
        self._kinds = chosen or random_.sample(kinds, random_.randint(1, 4))

    async def run(self, seconds: float) -> None:
        """Faults one after the other, and some at once; returns when the last one is over."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        going_on: list[asyncio.Task[None]] = []
        for _ in range(self._random.randint(0, FAULTS_MAX)):
            await asyncio.sleep(self._random.choice([0, 0.01, self._random.uniform(0, 3)]))
            if loop.time() > ends_at:
                break
            kind = self._random.choice(self._kinds)
            going_on.append(asyncio.ensure_future(kind()))
        await asyncio.gather(*going_on)

    def _tell(self, what: str) -> None:
        self._world.trace(f"FAULT {what}")

    def _some_gateway(self) -> Gateway | None:
        living = [g for g in self._world.gateways if g.alive and not g.draining and not g.process.stopped]
        return self._random.choice(living) if living else None

    def _seconds(self) -> float:
        """Mostly short; some just around the deadlines that matter, some past a lease."""
        pick = self._random
        return pick.uniform(*pick.choice([(0.05, 0.9), (0.9, 1.1), (1, 4), (5.5, 9)]))

    # -- the store -----------------------------------------------------------------------------------------------

    async def _store_paused(self) -> None:
        seconds, store = self._seconds(), self._world.store
        if store.process.stopped:
            return
        self._tell(f"the store stops for {seconds:.2f} s")
        self._world.judge.disturb(None, seconds)
        store.process.stop()
        await asyncio.sleep(seconds)
        store.process.go_on(self._world.loop)

    async def _store_restarted(self) -> None:
        store, data = self._world.store, self._random.choice(["kept", "old", "lost", "lost"])
        if store.process.stopped or store.down:
            return
        if data == "old":
            store.save()
            await asyncio.sleep(self._random.uniform(0, 2))
            if store.process.stopped or store.down:
                return
        seconds = self._random.choice([0.01, 0.3, self._seconds()])
        self._tell(f"the store is killed, and back after {seconds:.2f} s with its data {data}")
        self._world.judge.disturb(None, seconds + LEASE_SECONDS)
        store.kill()
        if data != "kept":
            self._world.judge.lost_data(old=data == "old")
        await asyncio.sleep(seconds)
        store.start(data)
        self._world.judge.disturb(None, LEASE_SECONDS)

    async def _connections_cut(self) -> None:
        gateway = self._some_gateway()
        self._tell(f"the connections of {gateway or 'all'} to the store are reset")
        self._world.judge.disturb(gateway.process if gateway else None, 0)
        for connection in self._world.network.between(gateway.name if gateway else None, HOST):
            self._world.network.cut(connection)

    async def _clock_jump(self) -> None:
        hours = self._random.choice([-1, 1])
        self._tell(f"the clock of the store's host jumps by {hours} h")
        self._world.store.clock_offset_ms += hours * 3_600_000

    # -- the way to it -------------------------------------------------------------------------------------------

    async def _partition(self) -> None:
        """Requests, replies or both wait; in the end they arrive late, or their connections are gone."""
        gateway, network = self._some_gateway(), self._world.network
        if gateway is None:
            return
        seconds = self._random.choice([self._seconds(), self._random.uniform(6, 9)])
        way = self._random.choice(["up", "down", "both"])
        self._tell(f"{gateway} and the store are parted for {seconds:.2f} s, {way}")
        self._world.judge.disturb(gateway.process, seconds)
        route = network.route(gateway.name, HOST)
        route.up_held, route.down_held = way != "down", way != "up"
        await asyncio.sleep(seconds)
        route.up_held = route.down_held = False
        if self._random.random() < 0.3:
            for connection in network.between(gateway.name, HOST):
                network.cut(connection)
        network.release()

    async def _slow_way(self) -> None:
        """Latencies around the deadline of a reply: the batch comes again while its first copy is under way."""
        gateway = self._some_gateway()
        if gateway is None:
            return
        seconds, most = self._random.uniform(1, 6), self._random.choice([0.05, 0.3, 0.8, 2.0])
        self._tell(f"{gateway} is up to {most:g} s away from the store for {seconds:.2f} s")
        self._world.judge.disturb(gateway.process, seconds + most)
        route = self._world.network.route(gateway.name, HOST)
        route.latency_seconds = (0.0, most)
        await asyncio.sleep(seconds)
        route.latency_seconds = LATENCY_SECONDS

    async def _breaking_way(self) -> None:
        """Connections break right after a message: it is sent again elsewhere, and both copies are carried out."""
        gateway = self._some_gateway()
        if gateway is None:
            return
        seconds, share = self._random.uniform(0.5, 6), self._random.choice([0.02, 0.1, 0.3])
        self._tell(f"connections of {gateway} to the store break for {seconds:.2f} s, {share:g} of them")
        self._world.judge.disturb(gateway.process, seconds)
        route = self._world.network.route(gateway.name, HOST)
        route.breaks = share
        await asyncio.sleep(seconds)
        route.breaks = 0.0

    async def _late_copies(self) -> None:
        """Each of them is the second copy of a batch whose first connection broke."""
        seconds, share = self._random.uniform(1, 8), self._random.choice([0.05, 0.3, 1.0])
        self._tell(f"late copies of {share:g} of the batches come for {seconds:.2f} s")
        self._world.judge.disturb(None, seconds)
        self._world.store.copies_share = share
        await asyncio.sleep(seconds)
        self._world.store.copies_share = 0.0

    # -- engines -------------------------------------------------------------------------------------------------

    async def _engine_down(self) -> None:
        engine, seconds = self._random.choice(self._world.engines), self._seconds()
        self._tell(f"{engine.name} is down for {seconds:.2f} s")
        engine.crash()
        await asyncio.sleep(self._random.uniform(0, 1))
        await self._all_see(engine.name, up=False)
        await asyncio.sleep(seconds)
        engine.start()
        await self._all_see(engine.name, up=True)

    async def _all_see(self, engine: str, up: bool) -> None:
        for gateway in list(self._world.gateways):
            await asyncio.sleep(self._random.uniform(0, 0.1))
            if gateway.alive:
                gateway.run(gateway.see(engine, up))

    async def _engine_hangs(self) -> None:
        engine, seconds = self._random.choice(self._world.engines), self._seconds()
        self._tell(f"{engine.name} hangs for {seconds:.2f} s")
        engine.hangs = True
        await asyncio.sleep(seconds)
        engine.hangs = False

    # -- gateways ------------------------------------------------------------------------------------------------

    async def _gateway_killed(self) -> None:
        gateway = self._some_gateway()
        if gateway is None:
            return
        self._tell(f"{gateway} is killed")
        self._world.network.kill(gateway.process)
        self._world.judge.dropped(gateway)
        gateway.killed()
        await asyncio.sleep(self._seconds())
        self._world.start_gateway()

    async def _gateway_drained(self) -> None:
        gateway = self._some_gateway()
        if gateway is None:
            return
        grace_seconds = self._random.choice([0.1, 1.0, 10.0])
        self._tell(f"{gateway} is told to end within {grace_seconds:g} s")
        gateway.draining = True
        self._world.start_gateway()
        await gateway.run(gateway.drain(grace_seconds))

    async def _gateway_paused(self) -> None:
        gateway = self._some_gateway()
        if gateway is None:
            return
        seconds = self._random.choice([self._seconds(), self._random.uniform(6, 10)])
        self._tell(f"{gateway} stops for {seconds:.2f} s")
        self._world.judge.disturb(gateway.process, seconds)
        self._world.judge.paused(seconds)
        gateway.process.stop()
        await asyncio.sleep(seconds)
        gateway.process.go_on(self._world.loop)
