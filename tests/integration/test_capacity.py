"""Who reads an engine's metrics, and what becomes of it in the store that all gateways share."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.capacity import Budgets, Learned, Reading, Rules, Seat
from gateway.ledger.api import Grant
from gateway.upstream.capacity import Meter
from gateway.upstream.metrics_text import EnginePage
from gateway.upstream.scraper import Unusable
from tests.integration.ledger_world import WAIT_SECONDS, Member, World, eventually, running_store, world

LONG_MS = 60_000
"""A lease that no stall of the machine outlasts."""
ENGINE = Reading(num_gpu_blocks=101, kv_use=0.0, preemptions=0, started_at=100.0)
CONFIGURED = Budgets(blocks=100, sequences=5000, prefill=1000)


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_store() as store:
        yield str(store.socket)


def limits(w: World) -> tuple[int, int, int]:
    row = w.rows("replicas", "replica")["r0"]
    return row["limit"], row["sequences_max"], row["prefill_max"]


async def seat(member: Member) -> Seat:
    """Of `r0`, once the store answers."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (found := await member.ledger.seats.seat("r0")) is None:
            await asyncio.sleep(0.01)
    return found


async def teach(member: Member, number: int, **learned: Any) -> bool:
    lesson = Learned(engine=ENGINE, **learned)
    return await member.ledger.seats.learn("r0", number, lesson, CONFIGURED)


async def test_one_gateway_at_a_time_has_the_seat(path: str) -> None:
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one, two = await w.join(), await w.join()
        first = await seat(one)
        assert (first.mine, first.number, first.learned) == (True, 0, None)
        assert first.configured == CONFIGURED
        second = await seat(two)
        assert not second.mine
        assert 0 < second.lease_ms <= LONG_MS
        assert (await seat(one)).mine
        assert not await teach(two, 1, blocks=50)
        assert limits(w) == (100, 5000, 1000)


async def test_the_seat_of_one_who_is_gone_is_taken_and_its_knowledge_too(path: str) -> None:
    async with world(path, 100) as w:
        one, two = await w.join(), await w.join()
        assert (await seat(one)).mine
        assert await teach(one, 1, blocks=50, incarnation=3)
        await one.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            while not (found := await seat(two)).mine:
                await asyncio.sleep(0.02)
        assert found.number == 1
        assert found.learned == Learned(engine=ENGINE, blocks=50, incarnation=3)


async def test_an_older_reading_is_refused(path: str) -> None:
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        await seat(one)
        assert await teach(one, 2, blocks=50)
        assert not await teach(one, 2, blocks=60)
        assert not await teach(one, 1, blocks=60)
        assert limits(w)[0] == 50


async def test_what_is_configured_again_keeps_what_was_learned(path: str) -> None:
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        await seat(one)
        assert await teach(one, 1, blocks=50, sequences=40, prefill=300, strangers=((0, 10),))
        assert limits(w) == (40, 40, 300)
        lower = replace(w.config.replicas[0], limit=30)
        w.config = replace(w.config, replicas=(lower,))
        one.ledger.reconfigure()
        await eventually(lambda: limits(w) == (30, 40, 300))
        assert (await seat(one)).configured == Budgets(30, 5000, 1000)
        w.config = replace(w.config, replicas=(replace(lower, limit=100),))
        one.ledger.reconfigure()
        await eventually(lambda: limits(w) == (40, 40, 300))


async def test_a_limit_that_is_raised_starts_who_waits(path: str) -> None:
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        await seat(one)
        assert await teach(one, 1, blocks=50)
        running = await one.reserve(40)
        waiting = one.open(40)
        granted = asyncio.ensure_future(waiting.granted())
        await eventually(lambda: sorted(w.states().values()) == ["queued", "reserved"])
        assert await teach(one, 2)
        assert isinstance(await asyncio.wait_for(granted, WAIT_SECONDS), Grant)
        for call in (running, waiting):
            call.settle(None, None)
        await eventually(w.empty)


async def test_a_call_above_a_lowered_limit_waits_and_runs_alone(path: str) -> None:
    """That it never fits is judged by what the engine has, not by what was learned."""
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        await seat(one)
        assert await teach(one, 1, blocks=50, sequences=4)
        call = await one.reserve(90, sequences=20)
        call.settle(None, None)
        await eventually(w.empty)


async def test_a_replica_that_is_taken_out_is_forgotten(path: str) -> None:
    async with world(path, 100, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        await seat(one)
        assert await teach(one, 1, blocks=50)
        assert w.store.hexists(w.key("meta"), "capacity:r0")
        w.config = replace(w.config, replicas=w.config.replicas[1:])
        one.ledger.reconfigure()
        await eventually(lambda: not w.store.hexists(w.key("meta"), "capacity:r0"))
        assert await one.ledger.seats.seat("r0") is None


async def test_while_the_store_is_away_nobody_has_a_seat(path: str) -> None:
    async with world(path, 100) as w:
        one = w.add()
        assert await one.ledger.seats.seat("r0") is None
        assert not await teach(one, 1)


# -- readings --------------------------------------------------------------------------------------------------------


def meter_of(
    member: Member,
    warm_beside: bool = False,
    wall_seconds: float = 10_000.0,
    holds_more: Callable[[str, int], None] = lambda *_: None,
) -> Meter:
    rules = Rules(16, slow_start_ms=LONG_MS)
    return Meter(
        member.ledger.seats, lambda: rules, lambda _: warm_beside, holds_more, wall=lambda: wall_seconds
    )


class Engine:
    """What a page says when it is read, and what happens meanwhile."""

    def __init__(self) -> None:
        self.reading = ENGINE
        self.reads = 0
        self.broken = False

    async def read(self) -> EnginePage:
        self.reads += 1
        if self.broken:
            raise Unusable("no page")
        return EnginePage({}, self.reading)


async def test_strangers_lower_the_limit_in_the_store(path: str) -> None:
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one, engine = await w.join(), Engine()
        meter = meter_of(one)
        await seat(one)
        call = await one.reserve(20)
        engine.reading = Reading(num_gpu_blocks=101, kv_use=0.5, preemptions=0)
        for _ in range(3):
            assert (await meter.measure("r0", engine.read)).reading == engine.reading
        assert limits(w)[0] == 70
        state = await one.ledger.state()
        shown = state["pools"]["p"]["replicas"]["r0"]
        assert (shown["limit"], shown["engine"]["strangers"], shown["engine"]["kv_use"]) == (70, 30, 0.5)
        assert shown["engine"]["swaps"] is None
        call.settle(None, None)
        await eventually(w.empty)


async def test_calls_of_ours_are_no_strangers_whenever_they_come_and_go(path: str) -> None:
    """One starts, another ends, between the engine's answer and the ledger's."""
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one = await w.join()
        meter = meter_of(one)
        await seat(one)
        for _ in range(4):
            call = await one.reserve(60)

            async def read(call: Any = call) -> EnginePage:
                page = EnginePage({}, Reading(num_gpu_blocks=101, kv_use=0.6))
                call.settle(None, None)
                await eventually(w.empty)
                return page

            await meter.measure("r0", read)
            assert limits(w)[0] == 100


async def test_who_cannot_read_lets_another_try(path: str) -> None:
    async with world(path, 100) as w:
        one, two = await w.join(), await w.join()
        blind, seeing = Engine(), Engine()
        blind.broken = True
        meters = meter_of(one), meter_of(two)
        await seat(one)

        async def read_both() -> None:
            with pytest.raises(Unusable):
                await meters[0].measure("r0", blind.read)
            await meters[1].measure("r0", seeing.read)
            await asyncio.sleep(0.02)

        async with asyncio.timeout(WAIT_SECONDS):
            while not (await seat(two)).mine:
                await read_both()
        assert blind.reads


async def test_without_a_store_pages_are_read_all_the_same(path: str) -> None:
    async with world(path, 100) as w:
        one, engine = w.add(), Engine()
        await meter_of(one).measure("r0", engine.read)
        assert engine.reads == 1


@pytest.mark.parametrize(
    ("warm_beside", "age_seconds", "most"), [(True, 5, 30), (True, 5000, 100), (False, 5, 100)]
)
async def test_one_that_was_just_started_beside_others_starts_slowly(
    path: str, warm_beside: bool, age_seconds: float, most: int
) -> None:
    """As long as no machine stands still for a quarter of a minute it has less than a third of its blocks."""
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one, engine = await w.join(), Engine()
        await seat(one)
        meter = meter_of(one, warm_beside, wall_seconds=100.0 + age_seconds)
        await meter.measure("r0", engine.read)
        await eventually(lambda: limits(w)[0] <= most)
        assert limits(w)[0] >= min(most, 10)
        assert (limits(w)[0] == 100) is (most == 100)


async def test_every_gateway_hears_of_an_engine_that_holds_more(path: str) -> None:
    """Also one that does not read its metrics."""
    async with world(path, 100, lease_ms=LONG_MS) as w:
        one, two = await w.join(), await w.join()
        heard: dict[str, int] = {}
        other: dict[str, int] = {}
        await seat(one)
        engine = Engine()
        engine.reading = Reading(num_gpu_blocks=101, kv_use=0.3)
        meter = meter_of(one, holds_more=heard.__setitem__)
        while not heard:
            await meter.measure("r0", engine.read)
        await eventually(lambda: limits(w)[0] == 70)
        async with asyncio.timeout(WAIT_SECONDS):
            while not other:
                await meter_of(two, holds_more=other.__setitem__).measure("r0", engine.read)
        assert heard == other == {"r0": 30}
