"""The digest finds what a lost message leaves behind, within two heartbeats, and nothing where nothing was lost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway.ledger.api import Grant
from gateway.ledger.reservation import Ask, Phase
from tests.faults.proxy import store_proxy
from tests.faults.test_ledger_store import FOREIGN, come_and_go, step
from tests.integration.ledger_world import WAIT_SECONDS, Member, World, eventually, running_store, world

HEARTBEAT_MS = 200
TIMING = {"lease_ms": 5000, "heartbeat_ms": HEARTBEAT_MS}
LIVE = 5_000
ROOM = 10 * LIVE
TOGETHER = 200
"""Calls that ask at the same time: fewer than are held when the store is slow."""


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_store() as store:
        yield str(store.socket)


class Beats:
    """Counts a member's heartbeats from now on, and those at which an admit was under way."""

    def __init__(self, member: Member) -> None:
        self.count = 0
        self.with_admits = 0
        self.healed: list[dict[str, int]] = []
        """What had been mended when each of them began."""
        self._member = member
        self._ledger = member.ledger
        self._digest = member.ledger.digest
        member.ledger.digest = self._noted  # type: ignore[method-assign]

    def _noted(self) -> list[object]:
        self.count += 1
        self.healed.append(self._member.healed())
        self.with_admits += any(ask.phase is Phase.ASKED for ask in self._ledger._asks.values())
        return self._digest()


@asynccontextmanager
async def live(path: str, count: int) -> AsyncIterator[tuple[World, Member, list[Ask], str]]:
    """A process that runs so many calls, and its owner id; in the end they are given back."""
    async with world(path, ROOM, **TIMING, sequences_max=ROOM) as w:
        m = await w.join()
        asks: list[Ask] = []
        while len(asks) < count:
            few = min(count - len(asks), TOGETHER)
            asks += await asyncio.gather(*(m.reserve(1) for _ in range(few)))
        yield w, m, asks, w.calls()[asks[0].id]["owner"]
        for ask in asks:
            ask.settle(None, None)
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)


async def healed(m: Member, beats: Beats, **kinds: int) -> None:
    """A difference is in the digest of the next heartbeat, and is gone before the one after it is over."""
    await eventually(lambda: m.healed() == kinds)
    waited_for = beats.count + 2
    await eventually(lambda: beats.count >= waited_for)
    assert beats.healed[2] == kinds
    assert m.healed() == kinds, "once"


@pytest.mark.parametrize("count", [7, LIVE])
async def test_a_settle_that_was_lost(path: str, count: int) -> None:
    """The store has one more than the process; without it the store would be right again only at the lease's end."""
    async with live(path, count) as (w, m, asks, owner):
        beats = Beats(m)
        assert step(w, owner, FOREIGN) == [["grant", "r0"]]
        await healed(m, beats, settled=1)
        assert w.states() == {ask.id: "reserved" for ask in asks}


@pytest.mark.parametrize("count", [7, LIVE])
async def test_an_admit_that_was_lost(path: str, count: int) -> None:
    async with live(path, count) as (w, m, asks, owner):
        beats = Beats(m)
        assert step(w, owner, ["S", asks[-1].id, -1, -1, [], ""]) == [["settled"]]
        await healed(m, beats, redeclared=1)
        assert w.states() == {ask.id: "reserved" for ask in asks}
        assert m.lost == []


async def test_several_at_once_among_thousands(path: str) -> None:
    async with live(path, LIVE) as (w, m, asks, owner):
        beats = Beats(m)
        lost = [["S", ask.id, -1, -1, [], ""] for ask in asks[:30]]
        foreign = [[*FOREIGN[:1], f"{number:010x}", *FOREIGN[2:]] for number in range(30)]
        step(w, owner, *lost, *foreign)
        await healed(m, beats, settled=30, redeclared=30)
        assert w.states() == {ask.id: "reserved" for ask in asks}


async def test_an_admit_in_flight_at_the_heartbeat_is_no_difference(path: str) -> None:
    """Replies take most of a heartbeat, and calls come and go all the time."""
    async with world(path, ROOM, **TIMING) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        proxy.reply_seconds = HEARTBEAT_MS * 0.3 / 1000
        beats = Beats(m)
        calls = [asyncio.create_task(come_and_go(m, pause_ms / 1000)) for pause_ms in range(0, 200, 7)]
        await eventually(lambda: beats.count >= 8)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        proxy.reply_seconds = 0.0
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)
        assert beats.with_admits >= 4
        assert m.healed() == {}


async def test_a_grant_that_was_lost_with_its_wake_up(path: str) -> None:
    """No message tells of it, and the reply that lists it never comes: the same batch again lists it again."""
    async with world(path, 100, **TIMING) as w, store_proxy(path) as proxy:
        other, m = await w.join(), await w.join(proxy.url)
        held = await other.reserve(100)
        ask = m.open(100)
        waiting = asyncio.create_task(ask.granted())
        await eventually(lambda: ask.phase.name == "QUEUED" and not m.ledger.channel.busy)
        proxy.deaf, proxy.swallow = True, b"\xa1H"
        beats = Beats(m)
        held.settle(None, None)
        await eventually(lambda: w.states() == {ask.id: "unclaimed"})
        assert isinstance(await asyncio.wait_for(waiting, WAIT_SECONDS), Grant)
        assert proxy.swallowed == 1
        assert beats.count <= 2
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}
