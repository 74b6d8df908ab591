"""Places that calls leave in the queue, and calls under an `Idempotency-Key`, on real gateways' ledgers and a store."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.core.identity import INLINE_BYTES_MAX, Identity
from gateway.core.order import PLACE_ONLY
from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Grant
from gateway.ledger.reservation import Ask
from tests.integration.ledger_world import WAIT_SECONDS, Member, World, eventually, running_store, world

BLOCKS = 100
ROUTE = "/v1/completions"
SHORT, LONG = b"hello", b"x" * (INLINE_BYTES_MAX + 1)


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_store() as store:
        yield str(store.socket)


class Waiting:
    """A call that asks in a task of its own, as that of a client does."""

    def __init__(self, member: Member, body: bytes, **changes: Any) -> None:
        changes = {"identity": Identity("k", ROUTE, body), **changes}
        self.ask: Ask = member.open(BLOCKS, **changes)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Grant | Refusal:
        try:
            return await self.ask.granted()
        except asyncio.CancelledError:
            self.ask.settle(None, None)
            raise

    async def leave(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def busy(path: str) -> AsyncIterator[tuple[World, Member, Member, Ask]]:
    """Two gateways, and what holds all blocks."""
    async with world(path, BLOCKS) as w:
        first, second = await w.join(), await w.join()
        running = await first.reserve(BLOCKS)
        yield w, first, second, running
        await eventually(w.empty)


def queued(w: World) -> list[str]:
    """Ids in the order of the queue."""
    calls = [(call["arrival"], id_) for id_, call in w.calls().items() if call["state"] == "queued"]
    return [id_ for _, id_ in sorted(calls)]


async def joined(w: World, count: int) -> None:
    await eventually(lambda: len(queued(w)) == count)


async def finish(*waiting: Waiting) -> list[Waiting]:
    """In which order they were served."""
    served = []
    left = set(waiting)
    while left:
        await asyncio.wait([w.task for w in left], return_when=asyncio.FIRST_COMPLETED)
        done = next(w for w in left if w.task.done())
        assert isinstance(done.task.result(), Grant), done.task.result()
        left.remove(done)
        served.append(done)
        done.ask.settle(None, None)
    return served


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["short", "long"])
async def test_a_client_that_leaves_finds_its_place_at_another_gateway(path: str, body: bytes) -> None:
    async with busy(path) as (w, first, second, running):
        left = Waiting(first, body)
        await joined(w, 1)
        behind = Waiting(first, b"another")
        await joined(w, 2)
        await left.leave()
        await joined(w, 1)
        newcomer = Waiting(second, b"a third")
        await joined(w, 2)
        again = Waiting(second, body)
        await joined(w, 3)
        running.settle(None, None)
        assert await finish(behind, newcomer, again) == [again, behind, newcomer]


async def test_a_gateway_that_shuts_down_leaves_the_places_of_its_clients(path: str) -> None:
    async with busy(path) as (w, first, second, running):
        moved = Waiting(second, SHORT)
        await joined(w, 1)
        behind = Waiting(first, b"another")
        await joined(w, 2)
        await second.ledger.close(2)
        refusal = await moved.task
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.DRAINING
        await joined(w, 1)
        again = Waiting(first, SHORT)
        await joined(w, 2)
        running.settle(None, None)
        assert await finish(behind, again) == [again, behind]


async def test_who_waited_in_vain_left_no_place(path: str) -> None:
    """The gateway's own timer decides; the store's deadline has not come."""
    async with busy(path) as (w, first, _, running):
        waiting = Waiting(first, SHORT)
        await joined(w, 1)
        waiting.ask._waited_out()
        refusal = await waiting.task
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.QUEUE_TIMEOUT
        waiting.ask.settle(None, None)
        await joined(w, 0)
        assert not w.store.exists(w.key("places"))
        running.settle(None, None)


async def test_a_client_that_leaves_before_its_ticket_is_there_leaves_its_place(path: str) -> None:
    async with busy(path) as (w, first, _, running):
        left = Waiting(first, SHORT)
        async with asyncio.timeout(WAIT_SECONDS):
            while not first.ledger.channel.carries(left.ask.id):  # a heartbeat may be on its way before it
                await asyncio.sleep(0)
        await left.leave()
        await eventually(lambda: w.store.zcard(w.key("places")) == 1)
        running.settle(None, None)


@pytest.mark.parametrize("wait", ["at all", "until the hash is there"])
async def test_a_client_that_leaves_while_its_long_body_is_hashed(
    path: str, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """Nothing of it is left, and its gateway waits for nothing."""
    async with busy(path) as (w, first, second, running):
        left = Waiting(first, LONG)
        await joined(w, 1)
        await left.leave()
        await joined(w, 0)
        again = Waiting(second, LONG)
        hashed = asyncio.Event()
        identified = Ask._identified

        def noted(ask: Ask, then: Any) -> None:
            def after() -> None:
                then()
                hashed.set()

            identified(ask, after)
            if wait == "at all":
                again.task.cancel()

        monkeypatch.setattr(Ask, "_identified", noted)
        if wait != "at all":
            await hashed.wait()
            again.task.cancel()
        with suppress(asyncio.CancelledError):
            await again.task
        await eventually(lambda: second.ledger.inflight == 0)
        running.settle(None, None)


async def test_one_call_under_an_idempotency_key_at_all_gateways(path: str) -> None:
    async with busy(path) as (w, first, second, running):
        named = {"once": "a" * 16}
        waiting = Waiting(first, SHORT, **named)
        await joined(w, 1)
        same = await Waiting(second, SHORT, **named).task
        other = await Waiting(second, b"another", **named).task
        assert isinstance(same, Refusal)
        assert isinstance(other, Refusal)
        assert (same.code, same.retry_ms, same.should_retry) == (Code.DUPLICATE_IN_PROGRESS, None, None)
        assert (other.code, other.should_retry) == (Code.IDEMPOTENCY_KEY_REUSED, False)
        running.settle(None, None)
        await finish(waiting)
        await eventually(w.empty)
        await finish(Waiting(second, SHORT, **named))


async def test_it_holds_when_the_store_has_lost_its_data(path: str) -> None:
    async with busy(path) as (w, first, second, running):
        running.settle(None, None)
        named = Waiting(first, SHORT, once="a" * 16)
        await named.task
        w.store.delete(*w.key_names())
        await eventually(lambda: first.ledger.ready and w.states() == {named.ask.id: "reserved"})
        await eventually(lambda: second.ledger.ready)
        duplicate = await Waiting(second, SHORT, once="a" * 16).task
        assert isinstance(duplicate, Refusal)
        assert duplicate.code is Code.DUPLICATE_IN_PROGRESS
        named.ask.settle(None, None)


async def test_who_waits_in_its_own_place_waits_on_when_the_store_has_lost_it(path: str) -> None:
    """It is asked for again, and the place that it took is not there to be found."""
    async with busy(path) as (w, first, _, running):
        left = Waiting(first, SHORT)
        await joined(w, 1)
        await left.leave()
        await joined(w, 0)
        again = Waiting(first, SHORT, standing=PLACE_ONLY)
        await joined(w, 1)
        w.store.delete(*w.key_names())
        await eventually(lambda: first.ledger.ready and w.states().get(running.id) == "reserved")
        await joined(w, 1)
        running.settle(None, None)
        await finish(again)


async def test_a_retry_too_many_is_not_remembered_as_a_full_queue(path: str) -> None:
    """Another call of its key may wait."""
    async with busy(path) as (_, first, _, running):
        refusal = await Waiting(first, SHORT, standing=PLACE_ONLY).task
        assert isinstance(refusal, Refusal)
        assert (refusal.code, "queue.retry_share" in refusal.message) == (Code.QUEUE_FULL, True)
        assert refusal.retry_ms
        assert not first.ledger.refused_lately
        running.settle(None, None)
