"""RD-02: a store that accepts and never answers, then answers late, keeps no call longer than the limit allows.

The case has the black hole for 30 s; here it is 12 s, which is still longer than a lease.  Late replies follow, the way
is good again, and a second, short black hole shows that a process also gets out of one without replies in between.
"""

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.faults.proxy import StoreProxy, store_proxy
from tests.integration.arrivals import Arrivals, Seen, arriving
from tests.processes import QUICK_STORE, GatewayProcess, World, sum_of
from tests.wire import completion, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PER_SECOND = 100
LIMIT_SECONDS = 0.1
"""`store.hold_seconds`: how long a call may wait for the store."""
HOLE_SECONDS = 12.0
SHORT_HOLE_SECONDS = 3.0
BROKEN_SECONDS = 2.0
"""A reply is waited for this long at most, and a little more: from then on the breaker answers."""
LATE_SECONDS = 0.3
LATE_FOR_SECONDS = 3.0
SERVED, REFUSED = (200, ""), (503, "store_unavailable")
BREAKER_SECONDS = 0.005
OPEN_MAX = PER_SECOND
"""Calls of a whole second: ten times what the limit makes of them, half of what the default limit would."""
GROWTH_BYTES = 8 << 20


@dataclass(frozen=True)
class Look:
    at: float
    live: int
    ready: int
    inflight: float
    resident_bytes: float


@dataclass
class Watch:
    """What the gateway shows, and how many calls are open, looked at all the time."""

    gateway: GatewayProcess
    arrivals: Arrivals
    looks: list[Look] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    async def count(self) -> None:
        while True:
            self.open.append(self.arrivals.open)
            await asyncio.sleep(0.01)

    async def look(self) -> None:
        while True:
            self.looks.append(await asyncio.to_thread(self._look))
            await asyncio.sleep(0.1)

    def _look(self) -> Look:
        at = time.monotonic()
        live, ready = (self.gateway.client.get(f"/health/{which}").status_code for which in ("live", "ready"))
        page = self.gateway.metrics()
        figures = (
            sum_of(name, page) for name in ("kvgate_inflight_requests", "process_resident_memory_bytes")
        )
        return Look(at, live, ready, *figures)

    def between(self, start: float, end: float) -> list[Look]:
        return [look for look in self.looks if start <= look.at < end]


@dataclass
class Scene:
    gateway: GatewayProcess
    proxy: StoreProxy
    arrivals: Arrivals

    async def hole(self, seconds: float) -> float:
        """Returns the part of the refusals that were as quick as the breaker has to be, once it should answer."""
        self.proxy.black_hole = True
        await asyncio.sleep(BROKEN_SECONDS)
        before = await self._refusals()
        await asyncio.sleep(seconds - BROKEN_SECONDS)
        after = await self._refusals()
        return (after[0] - before[0]) / (after[1] - before[1])

    async def _refusals(self) -> tuple[float, float]:
        """Those within the breaker's bound, from the last byte of the body to the last of the answer; and all."""
        page = await asyncio.to_thread(self.gateway.metrics)
        lines = [line for line in page.splitlines() if 'reason="store_unavailable"' in line]
        quick = [line for line in lines if f'le="{BREAKER_SECONDS}"' in line]
        return sum_of("kvgate_refusal_seconds_bucket", "\n".join(quick)), sum_of(
            "kvgate_refusal_seconds_count", "\n".join(lines)
        )

    async def back(self) -> float:
        """The way is good from now on: served again, and ready.

        That the next attempt comes soon, and is good, is for `test_ledger_store.py`.
        """
        self.proxy.black_hole, self.proxy.reply_seconds = False, 0.0
        mended = time.monotonic()
        await soon(lambda: self._served(mended), "calls are served again")
        await soon(self.gateway.is_ready, "ready again")
        return mended

    async def serves(self) -> None:
        """Half a second's calls; what a busy machine holds up for the limit is refused rightly."""
        since = time.monotonic()
        await soon(lambda: self._served(since) >= PER_SECOND / 2, "calls are served")

    def _served(self, since: float) -> int:
        return sum(seen.status == 200 for seen in self.arrivals.between(since, math.inf))


def expect_bounded(refused: list[Seen]) -> None:
    """Refused, and a quarter of them no later than the limit: a busy machine holds others up, on both sides."""
    assert len(refused) >= PER_SECOND / 2
    assert {(seen.status, seen.code) for seen in refused} == {REFUSED}
    assert all(seen.retry_after >= 1 for seen in refused)
    assert statistics.quantiles((seen.seconds for seen in refused), n=4)[0] < 1.5 * LIMIT_SECONDS


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[tuple[Scene, Watch]]:
    mock = world.mock("--blocks", "4001", "--step-base-ms", "1")
    store = QUICK_STORE | {"hold_seconds": LIMIT_SECONDS}
    config, (key,) = world.config([{"name": "only", "replicas": [mock.url]}], store=store)
    async with store_proxy(str(world.store.socket), tcp=True) as proxy:
        gateway = world.gateway(config, key, wait=False, KVGATE_STORE__URL=proxy.url)
        await soon(gateway.is_ready, "the gateway is ready")
        async with arriving([gateway], completion(20, 10, stream=True), PER_SECOND) as arrivals:
            watch = Watch(gateway, arrivals)
            tasks = [asyncio.create_task(watch.count()), asyncio.create_task(watch.look())]
            try:
                yield Scene(gateway, proxy, arrivals), watch
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        await soon(gateway.is_quiet, "all was given back")
        await asyncio.to_thread(gateway.stop)


async def test_no_answer_then_late_answers(new_world: World) -> None:
    async with serving(new_world) as (scene, watch):
        await scene.serves()
        began = time.monotonic()
        quick = await scene.hole(HOLE_SECONDS)
        scene.proxy.black_hole, scene.proxy.reply_seconds = False, LATE_SECONDS
        late = time.monotonic()
        await asyncio.sleep(LATE_FOR_SECONDS)
        mended = await scene.back()
        await scene.serves()
        quick_again = await scene.hole(SHORT_HOLE_SECONDS)
        await scene.back()
    between, answered = scene.arrivals.between, scene.arrivals.answered
    assert {(seen.status, seen.code) for seen in between(0, math.inf)} == {SERVED, REFUSED}
    expect_bounded(sorted(answered(began, late), key=lambda seen: seen.sent_at)[:PER_SECOND])
    expect_bounded(answered(late, mended))
    assert {(seen.status, seen.code) for seen in between(began, late)} == {REFUSED}
    assert min(quick, quick_again) > 0.5, "a busy machine holds some up"
    expect_flat(watch, began, late)
    assert {look.live for look in watch.looks} == {200}
    assert {look.ready for look in watch.between(began + BROKEN_SECONDS, late)} == {503}


def expect_flat(watch: Watch, began: float, ended: float) -> None:
    """Calls that were kept would be open all the time, those that a busy machine holds up are for a moment."""
    assert statistics.quantiles(watch.open, n=10)[-1] < OPEN_MAX
    assert statistics.quantiles((look.inflight for look in watch.looks), n=10)[-1] < OPEN_MAX
    broken = [look.resident_bytes for look in watch.between(began + BROKEN_SECONDS, ended)]
    assert broken[-1] - broken[0] < GROWTH_BYTES
