"""Calls with limits over all fleets are in two books at once: faults of the store leave them in both or in neither."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.all_fleets import LANE, Joint, books_config, keep_running
from gateway.core.events import LeaseLost
from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Grant
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.valkey import HoldLimits
from tests.integration.ledger_world import (
    Member,
    World,
    demand,
    eventually,
    fleet_config,
    running_store,
    world,
)

LEASE_MS, HEARTBEAT_MS = 600, 50
LONG_LEASE_MS = 4000


@pytest.fixture
def own_store() -> Iterator[EmbeddedStore]:
    """One that may be killed."""
    with running_store() as store:
        yield store


@dataclass
class Process:
    """One gateway: its member of the fleet, and of the limits."""

    fleet: Member
    limits: Member

    def open(self, blocks: int = 10, requests_max: int = -1, wait_ms: int = 5000) -> Joint:
        within = self.limits.open(1, lane=LANE, requests_max=requests_max, wait_ms=wait_ms)
        return Joint(within, self.fleet.ledger, demand(blocks, wait_ms=wait_ms), keep_running)

    async def reserve(self, blocks: int = 10, requests_max: int = -1) -> Joint:
        call = self.open(blocks, requests_max)
        answer = await call.granted()
        assert isinstance(answer, Grant), answer
        return call

    async def stop(self) -> None:
        for member in (self.fleet, self.limits):
            await member.stop()

    def go_on(self) -> None:
        for member in (self.fleet, self.limits):
            member.go_on()

    @property
    def ready(self) -> bool:
        return self.fleet.ledger.ready and self.limits.ledger.ready


@dataclass
class Books:
    fleet: World
    limits: World

    async def join(self, **options: Any) -> Process:
        process = Process(self.fleet.add(**options), self.limits.add(**options))
        process.go_on()
        await eventually(lambda: process.ready)
        return process

    def states(self) -> tuple[list[str], list[str]]:
        """Of the calls in each, in any order."""
        fleet, limits = (sorted(books.states().values()) for books in (self.fleet, self.limits))
        return fleet, limits

    def empty(self) -> bool:
        return self.fleet.empty() and self.limits.empty()


@asynccontextmanager
async def both(path: Path, lease_ms: int = LEASE_MS) -> AsyncIterator[Books]:
    """A fleet of 100 blocks, and the limits."""
    async with world(str(path), 100, lease_ms=lease_ms) as fleet:
        limits = World(str(path), fleet_config(1))
        limits.config = books_config(lease_ms, HEARTBEAT_MS, fleet.config.classes)
        try:
            yield Books(fleet, limits)
            limits.check()
        finally:
            for member in limits.members:
                await member.stop()
            limits.store.close()


def kill(store: EmbeddedStore) -> None:
    assert store.process
    store.process.kill()
    store.process.wait()


async def test_a_lost_store_is_told_of_both_places(own_store: EmbeddedStore) -> None:
    async with both(own_store.socket) as books:
        process = await books.join()
        calls = [await process.reserve(40, requests_max=2) for _ in range(2)]
        kill(own_store)
        own_store.start()
        await eventually(lambda: books.states() == (["reserved"] * 2, ["reserved"] * 2))
        await eventually(lambda: process.ready)
        third = process.open(10, requests_max=2, wait_ms=50)
        answer = await third.granted()
        assert isinstance(answer, Refusal)
        assert answer.code is Code.QUEUE_TIMEOUT, "two are known to run"
        for call in (*calls, third):
            call.settle(None, None)
        await eventually(books.empty)


async def test_a_process_that_slept_keeps_both_places(own_store: EmbeddedStore) -> None:
    async with both(own_store.socket) as books:
        sleeper, other = await books.join(), await books.join()
        call = await sleeper.reserve(60)
        await sleeper.stop()
        await eventually(books.empty)
        sleeper.go_on()
        await eventually(lambda: books.states() == (["reserved"], ["reserved"]))
        assert [m.count(LeaseLost) for m in (sleeper.fleet, sleeper.limits)] == [1, 1]
        call.settle(None, None)
        await eventually(lambda: books.empty() and other.ready)


async def test_a_dead_process_gives_both_places_back(own_store: EmbeddedStore) -> None:
    async with both(own_store.socket) as books:
        dead, other = await books.join(), await books.join()
        await dead.reserve(60, requests_max=1)
        await dead.stop()
        call = await other.reserve(60, requests_max=1)
        await eventually(lambda: books.states() == (["reserved"], ["reserved"]))
        call.settle(None, None)
        await eventually(books.empty)


async def test_while_the_store_is_away_one_answer_is_given_for_both(own_store: EmbeddedStore) -> None:
    async with both(own_store.socket, LONG_LEASE_MS) as books:
        process = await books.join(hold=HoldLimits(0.0, 256, 1 << 26), reply_seconds=0.2)
        running = await process.reserve(10)
        kill(own_store)
        await eventually(lambda: process.limits.ledger.away_seconds is not None)
        call = process.open(10)
        answer = await call.granted()
        assert isinstance(answer, Refusal)
        assert (answer.code, answer.message) == (
            Code.STORE_UNAVAILABLE,
            "the store of reservations does not answer",
        )
        call.settle(None, None)
        running.settle(None, None)
        own_store.start()
        await eventually(lambda: process.ready)
        await eventually(books.empty)
        assert not process.limits.ledger.inflight + process.fleet.ledger.inflight


async def test_within_a_share_both_are_admitted_and_declared_on_return(own_store: EmbeddedStore) -> None:
    """The key's limit holds for what this process runs of it."""
    async with both(own_store.socket, LONG_LEASE_MS) as books:
        process = await books.join(share_seconds=30.0)
        sharing = [member.ledger.sharing for member in (process.fleet, process.limits)]
        await eventually(lambda: all(each.portions for each in sharing))
        kill(own_store)
        await eventually(lambda: all(each.active for each in sharing))
        calls = [await process.reserve(40, requests_max=2) for _ in range(2)]
        third = process.open(10, requests_max=2)
        answer = await third.granted()
        assert isinstance(answer, Refusal)
        assert answer.code is Code.QUOTA_EXCEEDED
        third.settle(None, None)
        own_store.start()
        await eventually(lambda: books.states() == (["reserved"] * 2, ["reserved"] * 2))
        for call in calls:
            call.settle(None, None)
        await eventually(books.empty)


async def test_a_fleet_that_refuses_gives_the_place_within_the_limits_to_the_next(
    own_store: EmbeddedStore,
) -> None:
    async with both(own_store.socket) as books:
        process = await books.join()
        full = await process.reserve(100)
        late = process.open(10, requests_max=2, wait_ms=30)
        refusal = await late.granted()
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.QUEUE_TIMEOUT
        late.settle(None, None)
        await eventually(lambda: books.states() == (["reserved"], ["reserved"]))
        waiting = process.open(10, requests_max=2)
        granted = asyncio.create_task(waiting.granted())
        await eventually(lambda: books.states() == (["queued", "reserved"], ["reserved"] * 2))
        full.settle(None, None)
        assert isinstance(await granted, Grant)
        waiting.settle(None, None)
        await eventually(books.empty)
