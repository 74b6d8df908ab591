"""A call that comes again: in its old place, only once at a time, and not at the cost of those that come first."""

import asyncio
import threading

import pytest

from gateway.core.identity import Identity
from gateway.core.outcomes import Code, Outcome
from gateway.core.retries import FEW
from gateway.http import proxy
from gateway.ledger.scripts import fleet_keys
from gateway.mock.engine import EngineConfig
from tests.flow.driver import Visitor
from tests.flow.engines import mock_engine
from tests.flow.world import World, chat, gateway, soon

NOWHERE = "http://127.0.0.1:9"
"""No call here gets as far as its engine."""
BODY = chat(max_tokens=100)
ONCE = {"idempotency-key": "order 66"}


def error(visitor: Visitor) -> tuple[int, str]:
    return visitor.status, visitor.json["error"]["code"]


async def wait_in_queue(
    world: World, body: object = BODY, **headers: str
) -> tuple[Visitor, "asyncio.Task[Visitor]"]:
    before = (await world.ledger.state())["queue"]
    visitor = Visitor(world.app, body, headers=headers)  # type: ignore[arg-type]
    visiting = asyncio.create_task(visitor.run())
    await world.queued(before + 1)
    return visitor, visiting


async def leave(world: World, visitor: Visitor, visiting: "asyncio.Task[Visitor]") -> None:
    """Of one that waits.  The store knows it, too, when this returns."""
    before = (await world.ledger.state())["queue"]
    visitor.leave()
    await visiting
    await world.queued(before - 1)


async def test_a_client_that_gave_up_is_served_in_its_old_place(store_url: str) -> None:
    """One call at a time fits, and another came between."""
    another = chat(max_tokens=120)
    async with (
        mock_engine(EngineConfig(), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, blocks={"a": 12}) as world,
    ):
        release = await world.hold(11)
        given_up = await wait_in_queue(world)
        _, behind = await wait_in_queue(world, another)
        await leave(world, *given_up)
        _, again = await wait_in_queue(world)
        release()
        await asyncio.gather(again, behind)
        served = [end for end in world.ended if end.outcome is Outcome.COMPLETED]
        assert [end.reserved_blocks for end in served] == [7, 8]
        await world.quiet()


async def test_a_second_call_under_an_idempotency_key(store_url: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}) as world:
        release = await world.hold(1000)
        first = await wait_in_queue(world, **ONCE)
        world.facts.clear()
        duplicate = await world.visit(BODY, headers=ONCE)
        assert error(duplicate) == (409, "duplicate_in_progress")
        assert (duplicate.header("retry-after"), duplicate.header("x-should-retry")) == (None, None)
        assert world.only_end().reason is Code.DUPLICATE_IN_PROGRESS
        reused = await world.visit(chat(max_tokens=101), headers=ONCE)
        assert error(reused) == (422, "idempotency_key_reused")
        assert (reused.header("retry-after"), reused.header("x-should-retry")) == (None, "false")
        await leave(world, *first)
        await leave(world, *await wait_in_queue(world, **ONCE))
        release()
        await world.quiet()


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each hashing whether it kept the event loop."""
    found: list[bool] = []
    fingerprint = Identity.fingerprint

    def noted(identity: Identity) -> str:
        if not identity.known:
            found.append(threading.current_thread() is threading.main_thread())
        return fingerprint(identity)

    monkeypatch.setattr(Identity, "fingerprint", noted)
    return found


async def test_a_long_call_under_an_idempotency_key(store_url: str, hashing: list[bool]) -> None:
    """Its body is hashed beside the loop."""
    body = chat(max_tokens=100, user="x" * 600_000)
    async with gateway(store_url, {"a": NOWHERE}) as world:
        release = await world.hold(1000)
        first = await wait_in_queue(world, body, **ONCE)
        assert error(await world.visit(body, headers=ONCE)) == (409, "duplicate_in_progress")
        await leave(world, *first)
        release()
        await world.quiet()
    assert hashing == [False, False]


async def test_nobody_hashes_a_body_in_advance(store_url: str, hashing: list[bool]) -> None:
    """Who is served at once, and who waits where no place was left, needs no fingerprint; who leaves does."""
    async with mock_engine(EngineConfig(), speed=4) as mock, gateway(store_url, {"a": mock.url}) as world:
        assert (await world.visit(BODY)).status == 200
        release = await world.hold(1000)
        given_up = await wait_in_queue(world)
        assert hashing == []
        await leave(world, *given_up)
        assert hashing == [True]
        long = await wait_in_queue(world, chat(max_tokens=100, user="x" * 600_000))
        await leave(world, *long)
        assert hashing == [True, False]
        release()
        assert (await world.visit(BODY)).status == 200
        assert hashing == [True, False]
        await world.quiet()


async def test_a_gateway_that_shuts_down_leaves_the_places_of_its_clients(store_url: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}) as world:
        release = await world.hold(1000)
        _, waiting = await wait_in_queue(world)
        world.calls.drain()
        assert error(await waiting) == (503, "draining")
        await soon(lambda: world.store.exists(fleet_keys(world.ledger.fleet)[16]), "its place is remembered")
        release()
        await world.quiet()


@pytest.mark.parametrize("value", ["", "x" * 256, "caf\xe9"])
async def test_an_idempotency_key_that_is_none(store_url: str, value: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}) as world:
        visitor = await world.visit(BODY, headers={"idempotency-key": value})
        assert error(visitor) == (400, "invalid_value")
        assert visitor.json["error"]["param"] == "Idempotency-Key"


async def test_retries_too_many_are_not_queued(store_url: str) -> None:
    """The first attempts of their key are, and they themselves where they have left a place."""
    retry = {"x-stainless-retry-count": "1"}
    async with gateway(store_url, {"a": NOWHERE}) as world:
        release = await world.hold(1000)
        given_up = await wait_in_queue(world)
        waiting = [await wait_in_queue(world, chat(max_tokens=i + 1), **retry) for i in range(FEW)]
        for _ in range(2):
            refused = await world.visit(chat(max_tokens=50), headers=retry)
            assert error(refused) == (429, "queue_full")
            assert "queue.retry_share" in refused.json["error"]["message"]
            assert refused.header("retry-after")
            assert refused.header("x-kvgate-refused-by") is None
        waiting.append(await wait_in_queue(world, chat(max_tokens=51), **{"x-stainless-retry-count": "junk"}))
        await leave(world, *given_up)
        waiting.append(await wait_in_queue(world, **retry))
        for one in waiting:
            await leave(world, *one)
        release()
        await world.quiet()


async def test_a_retry_that_was_asked_for_is_queued(store_url: str) -> None:
    """The budget is spent, and the queue was full when the first attempt came; the next retry nobody asked for."""
    async with gateway(store_url, {"a": NOWHERE}, queue_max=1) as world:
        release = await world.hold(1000)
        retried = await wait_in_queue(world, **{"x-stainless-retry-count": str(FEW)})
        refused = await world.visit(chat(max_tokens=50))
        assert error(refused) == (429, "queue_full")
        assert "queue.depth_max" in refused.json["error"]["message"]
        await leave(world, *retried)
        retry = {"x-stainless-retry-count": "1"}
        await leave(world, *await wait_in_queue(world, chat(max_tokens=50), **retry))
        unasked = await world.visit(chat(max_tokens=51), headers=retry)
        assert "queue.retry_share" in unasked.json["error"]["message"]
        release()
        await world.quiet()


async def test_a_place_is_kept_for_a_retry_that_comes_when_it_was_told_to(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 places two are kept, also where the store's refusal of others is remembered; once for each appointment."""
    now_ms = 1_000_000
    monkeypatch.setattr(proxy, "_now_ms", lambda: now_ms)
    async with gateway(store_url, {"a": NOWHERE}, queue_max=20) as world:
        (await world.hold(1))()  # from now on there is a measure of how fast blocks come back
        release = await world.hold(1000)
        waiting = [await wait_in_queue(world, chat(max_tokens=4000 + i)) for i in range(20)]
        told = await world.visit(chat(max_tokens=4050))
        assert error(told) == (429, "queue_full")
        await leave(world, *waiting.pop())
        retry = {"x-stainless-retry-count": "1"}
        early = await world.visit(chat(max_tokens=4050), headers=retry)
        assert error(early) == (429, "queue_full")
        now_ms += int(told.header("retry-after-ms") or "")
        for max_tokens in (4050, 4051):  # the second one by the appointment of the first that came too early
            waiting.append(await wait_in_queue(world, chat(max_tokens=max_tokens), **retry))
            await leave(world, *waiting.pop(0))
        another = await world.visit(chat(max_tokens=4052), headers=retry)
        assert "a tenth is kept" in another.json["error"]["message"]
        for one in waiting:
            await leave(world, *one)
        release()
        await world.quiet()


async def test_a_retry_too_many_that_fits_is_served(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=4) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(chat(), headers={"x-stainless-retry-count": "99"})
        assert visitor.status == 200
        await world.quiet()
