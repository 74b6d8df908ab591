"""Refusals that are certain are given before tokens are counted, and the store's own for a moment without asking it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome, Refusal
from gateway.core.prompt import Text
from gateway.core.request import GenerationRequest, parse
from gateway.http.auth import Key
from gateway.ledger.api import Reservation
from gateway.tokens.api import Counted
from tests.flow.driver import Visitor
from tests.flow.world import WordCounter, World, admission, chat, gateway, soon

NOWHERE = "http://127.0.0.1:9"
"""No call here gets as far as its engine."""


class Uncalled:
    """A counter for calls whose tokens must not be counted."""

    async def count(self, texts: object) -> Counted:
        raise AssertionError("tokens were counted")


class Clock:
    """The ledger's monotonic clock, which a test stops and moves by hand."""

    def __init__(self) -> None:
        self.stopped_at: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.stopped_at is None else self.stopped_at

    def stop(self) -> None:
        self.stopped_at = time.monotonic()

    def go_on(self) -> None:
        self.stopped_at = None

    def advance(self, seconds: float) -> None:
        assert self.stopped_at is not None
        self.stopped_at += seconds


async def test_a_hopeless_call_is_refused_on_its_bytes(store_url: str) -> None:
    body = chat(messages=[{"role": "user", "content": "word " * 400_000}])
    async with gateway(store_url, {"a": NOWHERE}, counter=Uncalled()) as world:
        visitor = await world.visit(body)
        assert (visitor.status, visitor.json["error"]["code"]) == (400, "context_length_exceeded")
        assert visitor.header("x-should-retry") == "false"
        assert visitor.header("retry-after") is None
        assert world.only_end().outcome is Outcome.REFUSED
        await world.quiet()


async def test_a_key_without_any_request_is_refused_before_its_body_is_read_as_json(store_url: str) -> None:
    key = Key(name="blocked", class_="normal", requests_max=0)
    async with gateway(store_url, {"a": NOWHERE}, counter=Uncalled(), key=key) as world:
        for body in (chat(), b"no json"):
            visitor = await world.visit(body)
            assert (visitor.status, visitor.json["error"]["code"]) == (429, "quota_exceeded")
            assert "limits.requests_max is 0" in visitor.json["error"]["message"]
            assert visitor.header("retry-after") == "1"
        assert {end.reason for end in world.ended} == {Code.QUOTA_EXCEEDED}
        await world.quiet()


@asynccontextmanager
async def full_queue(
    store_url: str, clock: Clock
) -> AsyncIterator[tuple[World, list[int], Callable[[], None]]]:
    """A fleet whose one place in the queue is taken, a list that grows with every call that asks the store, and what
    gives some blocks back, too few for the one that waits."""
    async with gateway(store_url, {"a": NOWHERE}, queue_max=1, now=clock) as world:
        ledger, asked = world.ledger, []
        release, release_some = await world.hold(900), await world.hold(100)
        waiting = ledger.open(admission(200, "anonymous"), lambda: None)  # its own key's place nobody takes
        waiter = asyncio.create_task(waiting.granted())
        await world.queued(1)
        clock.stop()

        def noted(*arguments: Any) -> Reservation:
            asked.append(1)
            return type(ledger).open(ledger, *arguments)

        ledger.open = noted  # type: ignore[assignment]
        yield world, asked, release_some
        del ledger.open
        clock.go_on()
        release()
        release_some()
        await waiter
        waiting.settle(None, None)
        await world.quiet()


async def refused(world: World) -> Visitor:
    visitor = await world.visit(chat())
    assert (visitor.status, visitor.json["error"]["code"]) == (429, "queue_full")
    assert visitor.header("retry-after") is not None
    return visitor


def is_cached(visitor: Visitor) -> bool:
    return visitor.header("x-kvgate-refused-by") == "cache"


async def test_queue_full_is_repeated_for_50_ms_without_asking(store_url: str) -> None:
    clock = Clock()
    async with full_queue(store_url, clock) as (world, asked, _):
        assert not is_cached(await refused(world))
        counted = world.counter.counts
        clock.advance(0.009)
        assert is_cached(await refused(world))
        assert (len(asked), world.counter.counts) == (1, counted)
        clock.advance(0.051)
        assert not is_cached(await refused(world))
        assert len(asked) == 2
        ended = [fact for fact in world.facts if isinstance(fact, CallEnded)]
        assert {(end.outcome, end.reason) for end in ended} == {(Outcome.REFUSED, Code.QUEUE_FULL)}


async def test_an_old_answer_is_not_repeated_while_a_probe_is_on_its_way(store_url: str) -> None:
    clock = Clock()
    async with full_queue(store_url, clock) as (world, asked, _):
        await refused(world)
        clock.advance(0.045)
        assert world.ledger.known_refusal(["short"], "normal", "anonymous") is None
        clock.advance(0.004)
        assert is_cached(await refused(world))
        clock.advance(0.002)
        assert not is_cached(await refused(world))
        assert len(asked) == 2


async def test_one_call_in_10_ms_asks_all_the_same(store_url: str) -> None:
    clock = Clock()
    async with full_queue(store_url, clock) as (world, asked, _):
        await refused(world)
        for probes in (2, 3, 4):
            clock.advance(0.0101)
            assert not is_cached(await refused(world))
            assert is_cached(await refused(world))
            assert len(asked) == probes


async def test_a_settle_of_this_process_ends_the_memory(store_url: str) -> None:
    clock = Clock()
    async with full_queue(store_url, clock) as (world, asked, release_some):
        await refused(world)
        assert is_cached(await refused(world))
        release_some()
        await refused(world)
        assert len(asked) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_queue_timeout_is_a_status(store_url: str, stream: bool) -> None:
    async with gateway(store_url, {"a": NOWHERE}, wait_ms=30) as world:
        release = await world.hold(1000)
        visitor = await world.visit(chat(stream=stream))
        assert (visitor.status, visitor.json["error"]["code"]) == (429, "queue_timeout")
        end = world.only_end()
        assert (end.outcome, end.reason, end.refusal_ms) == (Outcome.REFUSED, Code.QUEUE_TIMEOUT, None)
        release()
        await world.quiet()


async def test_who_made_room_for_another_key_was_not_refused_at_once(store_url: str) -> None:
    """It waited, so it says nothing of how fast refusals are."""
    async with gateway(store_url, {"a": NOWHERE}, queue_max=1) as world:
        release = await world.hold(1000)
        visiting = asyncio.create_task(world.visit(chat(max_tokens=100)))
        await world.queued(1)
        alone = msgspec.structs.replace(admission(1, "other"), queue_max=1, queue_key_max=1)
        newcomer = world.ledger.open(alone, lambda: None)
        waiting = asyncio.create_task(newcomer.granted())
        visitor = await visiting
        assert (visitor.status, visitor.json["error"]["code"]) == (429, "queue_full")
        end = world.only_end()
        assert (end.outcome, end.reason, end.refusal_ms) == (Outcome.REFUSED, Code.QUEUE_FULL, None)
        release()
        await waiting
        newcomer.settle(None, None)
        await world.quiet()


class Hesitant(WordCounter):
    """It counts in a thread, as it were: `counts` is how often that began."""

    async def count(self, texts: Sequence[Text]) -> Counted:
        await asyncio.sleep(0)
        return await super().count(texts)


@pytest.mark.parametrize(("headers", "counts"), [({}, 0), ({"idempotency-key": "of another, perhaps"}, 1)])
async def test_a_long_prompt_is_not_counted_where_any_would_be_refused(
    store_url: str, headers: dict[str, str], counts: int
) -> None:
    """40 KB of 8,000 tokens; whether another one waits under its `Idempotency-Key` is told by an admit only."""
    counter = Hesitant()
    body = chat(messages=[{"role": "user", "content": "word " * 8_000}], max_tokens=16)
    async with gateway(store_url, {"a": NOWHERE}, counter=counter, queue_max=1) as world:
        release = await world.hold(1000)
        waiting = asyncio.create_task(world.hold(1, key="anonymous", queue_max=1))
        await world.queued(1)
        refused = await world.visit(body, headers=headers)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        assert counter.counts == counts
        release()
        (await waiting)()
        served = await world.visit(body, headers=headers)
        assert served.json["error"]["code"] == "upstream_error"
        assert counter.counts == counts + 1
        await world.quiet()


class Slow(WordCounter):
    """It counts when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.go_on = asyncio.Event()

    async def count(self, texts: Sequence[Text]) -> Counted:
        self.begun += 1
        await self.go_on.wait()
        return await super().count(texts)


async def test_a_long_prompt_is_not_counted_for_a_place_that_another_one_is_counted_for(
    store_url: str,
) -> None:
    """Until that is known, the first is as good as in the queue."""
    counter = Slow()
    body = chat(messages=[{"role": "user", "content": "word " * 8_000}], max_tokens=16)
    async with gateway(store_url, {"a": NOWHERE}, counter=counter, queue_max=1) as world:
        release = await world.hold(1000)
        first = asyncio.create_task(world.visit(body))
        await soon(lambda: counter.begun == 1, "the first is being counted")
        refused = await world.visit(body)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        counter.go_on.set()
        await world.queued(1)
        release()
        assert (await first).json["error"]["code"] == "upstream_error"
        assert counter.counts == 1
        await world.quiet()


class Overrun:
    """A counter with too much to count: bytes stand for tokens."""

    async def count(self, texts: Sequence[Text]) -> Counted:
        return Counted(sum(map(len, texts)), exact=False)


async def test_a_call_is_not_called_hopeless_by_an_estimate_of_bytes(store_url: str) -> None:
    """While too much is being counted, what only its bytes forbid may come again."""
    body = chat(messages=[{"role": "user", "content": "word " * 20_000}])
    async with gateway(store_url, {"a": NOWHERE}, counter=Overrun()) as world:
        visitor = await world.visit(body)
    assert (visitor.status, visitor.json["error"]["code"]) == (429, "capacity_exceeded")
    assert visitor.header("retry-after") in ("1", "2")


NASTY = b'{"messages":[{"role":"user","content":"x","z":[' + b'{"a":1.5},2.5,"c",' * 190_000 + b"0"
NASTY += b" " * (8_000_000 - len(NASTY)) + b"]}]}"
"""Nearly all the values that a body may have, and as long as it may be."""


@pytest.mark.parametrize(("body", "goes_on"), [(NASTY, True), (b"{}", False)], ids=["long", "short"])
async def test_the_loop_goes_on_while_a_long_body_is_parsed(
    store_url: str, monkeypatch: pytest.MonkeyPatch, body: bytes, goes_on: bool
) -> None:
    turns, parsed = 0, []

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def counted(*arguments: Any) -> GenerationRequest | Refusal:
        before = turns
        request = parse(*arguments)
        parsed.append(turns - before)
        return request

    monkeypatch.setattr("gateway.http.routes.parse", counted)
    async with gateway(store_url, {"a": NOWHERE}) as world:
        turning = asyncio.create_task(turn())
        await world.visit(body)
        turning.cancel()
        await world.quiet()
    assert [bool(count) for count in parsed] == [goes_on]


async def test_a_client_that_leaves_during_a_parse_leaves_nothing(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def held(*arguments: Any) -> GenerationRequest | Refusal:
        loop.call_soon_threadsafe(begun.set)
        end.wait()
        return parse(*arguments)

    monkeypatch.setattr("gateway.http.routes.parse", held)
    async with gateway(store_url, {"a": NOWHERE}) as world:
        visit = asyncio.create_task(world.visit(NASTY))
        await begun.wait()
        visit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit
        end.set()
        assert (world.only_end().outcome, world.calls.inflight()) == (Outcome.CANCELLED, {})
        await world.quiet()


async def test_a_drain_during_a_parse_comes_first(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(store_url, {"a": NOWHERE}) as world:
        loop = asyncio.get_running_loop()

        def drained(*arguments: Any) -> GenerationRequest | Refusal:
            loop.call_soon_threadsafe(world.calls.drain)
            return parse(*arguments)

        monkeypatch.setattr("gateway.http.routes.parse", drained)
        visitor = await world.visit(NASTY)
        assert (visitor.status, visitor.json["error"]["code"]) == (503, "draining")
        await world.quiet()
