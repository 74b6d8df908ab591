"""QF-01: a full engine, a bounded queue and calls that come at a steady rate.

The queue holds 100 calls for 2 s each.  For 10 s the engine is full and 50 calls a second come, then there is room for
40 a second, then nobody comes any more.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from gateway.ledger.scripts import KEY_NAMES, fleet_keys
from tests.integration.arrivals import Seen, arriving
from tests.processes import QUICK_STORE, GatewayProcess, World, sum_of
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

DEPTH_MAX, WAIT_SECONDS = 100, 2.0
LONG_WAIT_SECONDS = 8.0
"""Where a hundred and thirty calls come before the first one's time is over, on a busy machine, too."""
LATE_SECONDS = 0.3
"""How much later than that a waiter may hear of it."""
PER_SECOND, FULL_SECONDS = 50, 10.0
RECOVERED_SECONDS = 9.0
"""Most of them are good, though a busy machine stands still for two."""
PLACES, SERVICE_SECONDS = 20, 0.5
NOMINAL_PER_SECOND = PLACES / SERVICE_SECONDS
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 145
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
ROUNDS = 3
MORE = 30
"""Calls that find no place, one after the other."""
QUICK_SECONDS = 0.005
LOOK_SECONDS = 0.02
INDEXES = ("queue", "order", "parked", "outbox", "deadlines", "backlog")
"""The store's keys that hold something while somebody waits."""
WAITED_OUT = (429, "queue_timeout")


def body(**script: Any) -> dict[str, Any]:
    return completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True, output_tokens=1, **script)


@dataclass
class Scene:
    """A gateway in front of an engine that is full until `make_room`."""

    gateway: GatewayProcess
    store: redis.Redis
    holders: list[Wire] = field(default_factory=list)
    deepest: int = 0
    """Of the gauge and of the store's own count, as they were ever seen."""

    async def fill(self) -> None:
        request = post(self.gateway.key, body(fail="hang:1"))
        self.holders = [await Wire.open(self.gateway.url) for _ in range(PLACES)]
        for wire in self.holders:
            await wire.send(request)
            assert (await wire.head())[0] == 200

    def make_room(self) -> float:
        for wire in self.holders:
            wire.reset()
        return time.monotonic()

    def entries(self) -> int:
        """Calls that wait, as the store has them."""
        return int(self.store.zcard(_keys("queue")[0]))

    def gauge(self) -> int:
        """The same as a scrape shows it, which may be that of a second ago."""
        return int(self.gateway.metric("kvgate_queue_depth"))

    async def watch(self) -> None:
        while True:
            found = await asyncio.to_thread(lambda: (self.gauge(), self.entries()))
            self.deepest = max(self.deepest, *found)
            await asyncio.sleep(LOOK_SECONDS)

    async def nothing_is_left(self) -> None:
        await soon(self.gateway.is_quiet, "nobody waits and nothing is held")
        await soon(lambda: self.gauge() == 0, "the gauge shows it")
        assert self.store.exists(*_keys(*INDEXES)) == 0


def _keys(*names: str) -> list[str]:
    keys = dict(zip(KEY_NAMES, fleet_keys("demo"), strict=True))
    return [keys[name] for name in names]


@asynccontextmanager
async def full_engine(world: World, wait_seconds: float = WAIT_SECONDS) -> AsyncIterator[Scene]:
    mock = world.mock("--blocks", str(PLACES * BLOCKS + 1), "--step-base-ms", "1")
    queue = {"depth_max": DEPTH_MAX, "seconds_max": wait_seconds, "key_share": 1}
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = world.config(pools, queue=queue, store=QUICK_STORE)
    gateway = world.gateway(config, key)
    with redis.Redis(unix_socket_path=str(world.store.socket), protocol=2) as store:
        scene = Scene(gateway, store)
        await scene.fill()
        watching = asyncio.create_task(scene.watch())
        try:
            yield scene
            assert not watching.done(), watching.exception()
        finally:
            watching.cancel()
            await asyncio.wait([watching])


def expect_on_time(waits: list[float]) -> None:
    """None is told before its time, and half of them within what the case allows: a busy machine holds some up."""
    assert min(waits) >= WAIT_SECONDS
    assert statistics.median(waits) < WAIT_SECONDS + LATE_SECONDS


async def test_a_flood_while_the_engine_is_full(new_world: World) -> None:
    async with full_engine(new_world) as scene:
        async with arriving([scene.gateway], body(hold_seconds=SERVICE_SECONDS), PER_SECOND) as arrivals:
            await asyncio.sleep(FULL_SECONDS)
            room_at = scene.make_room()
            await asyncio.sleep(RECOVERED_SECONDS)
        await scene.nothing_is_left()
    expect_waited_out(arrivals.answered(0, room_at))
    assert DEPTH_MAX * 0.8 <= scene.deepest <= DEPTH_MAX
    started = [seen.sent_at + seen.seconds for seen in arrivals.seen if seen.status == 200]
    expect_throughput(started, room_at)


def expect_throughput(started: list[float], room_at: float) -> None:
    """Nominal in half of the seconds after the first: a busy machine stands still for some."""
    seconds = Counter(int(at - room_at) for at in started)
    each = [seconds[second] for second in range(1, int(RECOVERED_SECONDS))]
    assert 0.85 < statistics.median(each) / NOMINAL_PER_SECOND < 1.05, each


def expect_waited_out(calls: list[Seen]) -> None:
    """Every call that found a place in the queue; 50 a second for 2 s are just as many as it holds."""
    waited = [seen.seconds for seen in calls if seen.code == "queue_timeout"]
    assert len(waited) >= len(calls) / 2, "a busy machine sends some late, and then many at once"
    expect_on_time(waited)
    assert {(seen.status, seen.code) for seen in calls} <= {WAITED_OUT, (429, "queue_full")}
    assert all(seen.retry_after >= 1 for seen in calls)


async def test_the_call_after_the_hundredth(new_world: World) -> None:
    """It hears at once that there is no place, and the hundred wait no longer than their time.

    They are all told in one moment, for which a busy machine takes its time, and in which it may stand still: the first
    quarter of them tells, and the best of the rounds counts, for a wait that is too long is too long each time.
    """
    late: list[float] = []
    async with full_engine(new_world, LONG_WAIT_SECONDS) as scene:
        while not late or (late[-1] > LATE_SECONDS and len(late) < ROUNDS):
            waits = await one_after_the_hundredth(scene)
            assert min(waits) >= LONG_WAIT_SECONDS
            late.append(statistics.quantiles(waits, n=4)[0] - LONG_WAIT_SECONDS)
        page = await asyncio.to_thread(scene.gateway.metrics)
        scene.make_room()
        await scene.nothing_is_left()
    assert late[-1] <= LATE_SECONDS, late
    assert share_of_quick_refusals(page) > 0.5, "a busy machine holds some up"


async def one_after_the_hundredth(scene: Scene) -> list[float]:
    """How long each of the hundred waited."""
    request = post(scene.gateway.key, body())
    calls = [asyncio.create_task(timed(scene.gateway, request)) for _ in range(DEPTH_MAX)]
    await soon(lambda: scene.entries() == DEPTH_MAX, "the queue is full")
    for _ in range(MORE):
        answer = await ask(scene.gateway.url, request)
        assert (answer.status, answer.code) == (429, "queue_full")
    assert not any(call.done() for call in calls)
    waited = [await call for call in calls]
    await soon(lambda: scene.entries() == 0, "their entries are gone with them")
    assert scene.deepest == DEPTH_MAX
    assert {(answer.status, answer.code) for answer, _ in waited} == {WAITED_OUT}
    return [seconds for _, seconds in waited]


async def timed(gateway: GatewayProcess, request: bytes) -> tuple[Answer, float]:
    sent_at = time.monotonic()
    answer = await ask(gateway.url, request)
    return answer, time.monotonic() - sent_at


def share_of_quick_refusals(page: str) -> float:
    """Of those that found no place; from the last byte of the body to the last one of the answer."""
    lines = [line for line in page.splitlines() if 'reason="queue_full"' in line]
    quick = "\n".join(line for line in lines if f'le="{QUICK_SECONDS}"' in line)
    count = sum_of("kvgate_refusal_seconds_count", "\n".join(lines))
    return sum_of("kvgate_refusal_seconds_bucket", quick) / count
