"""Streams of responses in the background: the client leaves and comes back, the engine and its place go on."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.lifecycle import Event
from gateway.core.outcomes import Code, Outcome
from gateway.http import proxy
from gateway.ledger.api import Cut
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import Suspensions, Visitor
from tests.flow.engines import LAST_CHUNK, STREAM_HEAD, Peer, chunk, mock_engine, whole
from tests.flow.stored import BLOCKS, PATH, USAGE, StoringEngine, following, held, listening
from tests.flow.world import LONG, World, gateway, soon

pytestmark = pytest.mark.usefixtures("quick_looks")

ASKED: dict[str, Any] = {
    "model": "demo",
    "input": "one two",
    "max_output_tokens": 8,
    "background": True,
    "stream": True,
}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({**fields, 'type': name})}\n\n".encode()


BEGUN = event("response.created", response={"status": "in_progress"})
WORD = event("response.output_text.delta", delta="one")
DONE = event("response.completed", response={"status": "completed", "usage": USAGE})
FAILED = event("error", message="it failed")


class Engine(StoringEngine):
    """Its events are told by a test."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Peer | None = None
        """The connection on which the response was asked for."""
        self.left = asyncio.Event()
        """That was closed."""

    @property
    def looks(self) -> int:
        return self.asked.count("GET")

    async def tell(self, *events: bytes) -> None:
        assert self.stream is not None
        await self.stream.send(*map(chunk, events))

    async def end(self) -> None:
        """The status first, as vLLM, and its last event."""
        self.status = "completed"
        await self.tell(DONE)
        assert self.stream is not None
        await self.stream.send(LAST_CHUNK)

    def break_off(self) -> None:
        assert self.stream is not None
        self.stream.reset()

    async def begin(self, peer: Peer) -> None:
        if self.answer is not None:
            return await peer.send(self.answer)
        await peer.send(STREAM_HEAD)
        self.stream = peer
        await peer.until_gone()
        self.left.set()


Running = asyncio.Task[Visitor]


async def begun(world: World, engine: Engine, *events: bytes) -> tuple[Visitor, Running]:
    """One whose client has seen these events, and so its id."""
    visitor = Visitor(world.app, ASKED, path=PATH)
    task = asyncio.create_task(visitor.run())
    await soon(lambda: engine.stream is not None, "it is asked for")
    await engine.tell(*events)
    await soon(lambda: visitor.body == b"".join(events), "they are passed on")
    return visitor, task


async def goes_on(world: World, engine: Engine) -> None:
    seen = engine.looks
    await soon(lambda: engine.looks > seen + 2, "the engine is asked")
    assert await held(world) == BLOCKS


async def test_its_events_pass_and_the_last_one_ends_it(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        assert (visitor.status, engine.body["request_id"][:5]) == (200, "resp_")
        await goes_on(world, engine)
        await engine.end()
        await task
        assert (visitor.body, visitor.complete) == (BEGUN + WORD + DONE, True)
        end = world.only_end()
        assert (end.outcome, end.prompt_tokens, end.output_tokens) == (Outcome.COMPLETED, 4, 3)
        assert "POST cancel" not in engine.asked
        await world.quiet()


async def test_a_client_that_leaves_ends_nothing(store_url: str) -> None:
    """What is told afterwards is still heard: its end, and what it came to."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        visitor.leave()
        await goes_on(world, engine)
        await engine.tell(*[WORD] * 50)
        assert not engine.left.is_set()
        assert not task.done()
        await engine.end()
        await task
        end = world.only_end()
        assert (end.outcome, end.prompt_tokens, end.output_tokens) == (Outcome.COMPLETED, 4, 3)
        assert "POST cancel" not in engine.asked
        await world.quiet()


async def test_without_client_and_stream_it_is_asked_about(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        visitor.leave()
        engine.break_off()
        await goes_on(world, engine)
        engine.status = "completed"
        await task
        end = world.only_end()
        assert (end.outcome, end.output_tokens) == (Outcome.COMPLETED, 3)
        assert "POST cancel" not in engine.asked
        await world.quiet()


async def test_a_client_that_stops_to_read_has_left(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "CLIENT_STALL_SECONDS", 0.02)
    monkeypatch.setattr(proxy, "STALL_CHECK_SECONDS", 0.01)
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        visitor.stop_reading()
        await engine.tell(WORD)
        await soon(lambda: visitor.unread, "it is written to")
        await soon(engine.left.is_set, "the stream is closed")
        await goes_on(world, engine)
        engine.status = "completed"
        await task
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


async def test_what_fails_when_nobody_is_there_is_ended(store_url: str) -> None:
    """vLLM's status says nothing of it."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        visitor.leave()
        await engine.tell(FAILED)
        await task
        assert "POST cancel" in engine.asked
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()


async def test_a_client_that_leaves_before_it_has_an_id_ends_it(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor = Visitor(world.app, ASKED, path=PATH)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: engine.stream is not None, "it is asked for")
        await engine.tell(BEGUN)
        visitor.leave()
        await task
        assert engine.asked == ["POST", "POST cancel", "GET"]
        assert world.only_end().outcome is Outcome.CANCELLED
        await world.quiet()


@pytest.mark.parametrize("stays", [True, False])
async def test_it_can_be_cancelled_from_elsewhere(store_url: str, stays: bool) -> None:
    """A stream of vLLM's has no end then; that is no failure of the engine."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        if not stays:
            visitor.leave()
        await goes_on(world, engine)
        engine.status = "cancelled"
        await task
        if stays:
            expect_error(visitor, BEGUN + WORD, Code.RESPONSE_CANCELLED)
        assert engine.left.is_set()
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.CANCELLED, Code.RESPONSE_CANCELLED)
        assert not world.replicas.failures
        await world.quiet()


def expect_error(visitor: Visitor, before: bytes, code: Code) -> None:
    assert visitor.complete
    error, done, rest = visitor.body.removeprefix(before).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_one_that_takes_too_long_is_ended(store_url: str) -> None:
    async with following(store_url, Engine(), background_seconds=0.1) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        await task
        expect_error(visitor, BEGUN + WORD, Code.RESPONSE_CANCELLED)
        assert engine.asked[-2:] == ["POST cancel", "GET"]
        await world.quiet()


async def test_its_last_events_are_waited_for(store_url: str) -> None:
    """They come after its status says that it is over."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        engine.status = "completed"
        seen = engine.looks
        await soon(lambda: engine.looks > seen, "that is seen")
        await engine.tell(WORD)
        await soon(lambda: visitor.body.endswith(WORD + WORD), "they are passed on")
        await engine.end()
        await task
        assert visitor.body == BEGUN + WORD + WORD + DONE
        assert world.only_end().output_tokens == 3
        await world.quiet()


async def test_who_leaves_when_it_is_over_ends_the_waiting(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        engine.status = "completed"
        seen = engine.looks
        await soon(lambda: engine.looks > seen, "that is seen")
        visitor.leave()
        await task
        end = world.only_end()
        assert (end.outcome, end.output_tokens) == (Outcome.COMPLETED, 3)
        await world.quiet()


ENDINGS: list[tuple[Callable[[World], object], Code]] = [
    (lambda world: world.calls.cut(Cut("anonymous", time.monotonic())), Code.CUT),
    (lambda world: world.calls.interrupt(Event.GRACE_OVER), Code.DRAINING),
    (lambda world: world.calls.interrupt(Event.LEASE_LOST), Code.LEASE_LOST),
]


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(("end", "reason"), ENDINGS)
async def test_what_ends_calls_ends_it_at_its_engine(
    store_url: str, end: Callable[[World], object], reason: Code, stays: bool
) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        if not stays:
            visitor.leave()
            await goes_on(world, engine)
        end(world)
        await task
        if stays:
            expect_error(visitor, BEGUN + WORD, reason)
        assert "POST cancel" in engine.asked
        fact = world.only_end()
        assert (fact.outcome, fact.reason) == (Outcome.FAILED, reason)
        await world.quiet()


async def test_a_drain_lets_it_go_on(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        world.calls.drain()
        await goes_on(world, engine)
        await engine.end()
        await task
        assert visitor.complete
        await world.quiet()


async def test_a_stream_that_breaks_ends_it(store_url: str) -> None:
    """Its client hears of that, as of any stream's."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = await begun(world, engine, BEGUN, WORD)
        engine.break_off()
        await task
        expect_error(visitor, BEGUN + WORD, Code.UPSTREAM_ERROR)
        assert "POST cancel" in engine.asked
        assert world.only_end().outcome is Outcome.FAILED
        await world.quiet()


async def test_an_engine_that_only_says_that_it_has_begun_is_followed(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        engine.answer = whole(200, b'{"status": "queued", "output": []}')
        visitor = Visitor(world.app, ASKED, path=PATH)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: visitor.complete, "the answer")
        await goes_on(world, engine)
        engine.status = "completed"
        await task
        assert world.only_end().output_tokens == 3
        await world.quiet()


async def test_what_the_engine_refuses_is_not_asked_about(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        engine.answer = whole(400, b'{"error": {"message": "no store"}}')
        visitor = await world.visit(ASKED, path=PATH)
        assert (visitor.status, engine.asked) == (400, ["POST"])
        await world.quiet()


@pytest.mark.parametrize("answer", [whole(500, b"{}"), whole(200, b"oops"), STREAM_HEAD + LAST_CHUNK])
async def test_after_a_failure_another_engine_is_asked_once_nothing_is_left(
    store_url: str, answer: bytes
) -> None:
    bad, good = Engine(), Engine()
    bad.answer = answer
    async with (
        listening(bad) as a,
        listening(good) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}) as world,
    ):
        visitor, task = await begun(world, good, BEGUN, WORD)
        assert bad.asked == ["POST", "POST cancel", "GET"]
        assert bad.body["request_id"] != good.body["request_id"]
        await good.end()
        await task
        assert visitor.body == BEGUN + WORD + DONE
        await world.quiet()


# -- the mock, as vLLM does it ---------------------------------------------------------------------------------------


@asynccontextmanager
async def mocked(store_url: str, speed: float, **options: Any) -> AsyncIterator[tuple[World, Any]]:
    async with (
        mock_engine(EngineConfig(), speed=speed, options=Options(responses_store=True)) as mock,
        gateway(store_url, {"a": mock.url}, **options) as world,
    ):
        yield world, mock


def documents(visitor: Visitor) -> list[dict[str, Any]]:
    """What its events say."""
    parts = visitor.body.split(b"\n\n")
    return [json.loads(part.partition(b"\ndata: ")[2]) for part in parts if b"\ndata: " in part]


def coming_back(world: World, response_id: str, query: str) -> tuple[Visitor, Running]:
    visitor = Visitor(world.app, b"", path=f"{PATH}/{response_id}", method="GET", query=query)
    return visitor, asyncio.create_task(visitor.run())


async def test_a_client_leaves_and_comes_back(store_url: str) -> None:
    """What it has not seen comes from where it left off, and then as it is told."""
    async with mocked(store_url, 4) as (world, mock):
        visitor = Visitor(world.app, ASKED | {"max_output_tokens": 60}, path=PATH)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: len(documents(visitor)) > 6, "it has seen some")
        visitor.leave()
        seen = documents(visitor)
        response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        assert await held(world) == -(-(9 + 60 - 1) // 16)
        again, reading = coming_back(world, response_id, f"stream=true&starting_after={last}")
        await reading
        assert (again.status, again.complete) == (200, True)
        assert again.header("cache-control") == "no-cache"
        rest = documents(again)
        numbers = [document["sequence_number"] for document in seen + rest]
        assert numbers == list(range(len(numbers)))
        assert rest[-1]["type"] == "response.completed"
        assert rest[-1]["response"]["usage"]["output_tokens"] == 60
        await task
        (end,) = [fact for fact in world.ended if fact.route == PATH]
        assert (end.outcome, end.output_tokens) == (Outcome.COMPLETED, 60)
        assert mock.app.journal.shown()["received"] == 1
        await world.quiet()


async def test_its_events_are_there_when_it_is_over(store_url: str) -> None:
    async with mocked(store_url, 100) as (world, _):
        visitor = await world.visit(ASKED, path=PATH)
        told = documents(visitor)
        assert [document["sequence_number"] for document in told] == list(range(len(told)))
        again, reading = coming_back(world, told[0]["response"]["id"], "stream=1")
        await reading
        assert again.body == visitor.body
        whole_one, reading = coming_back(world, told[0]["response"]["id"], "stream=false")
        await reading
        assert whole_one.json == told[-1]["response"]
        await world.quiet()


async def test_who_comes_back_and_leaves_again_holds_nothing(store_url: str) -> None:
    async with mocked(store_url, 0.01) as (world, mock):
        visitor = Visitor(world.app, ASKED | {"max_output_tokens": 5000}, path=PATH)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: documents(visitor), "it has its id")
        response_id = documents(visitor)[0]["response"]["id"]
        visitor.leave()
        for _ in range(3):
            again, reading = coming_back(world, response_id, "stream=true")
            await soon(lambda: again.body.startswith(b"event: response.created"), "it is told")  # noqa: B023
            again.leave()
            await reading
        assert world.app._streams.count == 0
        assert not task.done()
        cancelled = await world.visit(b"", path=f"{PATH}/{response_id}/cancel")
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        await task
        await soon(lambda: not mock.app.driver.engine.running, "the engine has dropped it")
        await world.quiet()


async def test_streams_leave_places_to_short_questions(store_url: str) -> None:
    """And the other way round; of each one key takes half."""
    async with mocked(store_url, 0.01, unreserved_max=4) as (world, _):
        visitor = Visitor(world.app, ASKED | {"max_output_tokens": 5000}, path=PATH)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: documents(visitor), "it has its id")
        response_id = documents(visitor)[0]["response"]["id"]
        reading = [coming_back(world, response_id, "stream=true") for _ in range(2)]
        await soon(lambda: all(again.body for again, _ in reading), "both are told")
        third, refused = coming_back(world, response_id, "stream=true")
        await refused
        assert (third.status, third.json["error"]["code"]) == (429, Code.CAPACITY_EXCEEDED)
        counted = await world.visit({"model": "demo", "prompt": "x"}, path="/tokenize")
        assert counted.status == 200
        await world.visit(b"", path=f"{PATH}/{response_id}/cancel")
        await task
        for again, running in reading:
            again.leave()
            await running
        await world.quiet()


async def test_a_client_can_leave_at_every_suspension(store_url: str) -> None:
    """Either the engine has dropped it or it goes on to its end, and nothing is held any more."""
    outcomes = set()
    async with mocked(store_url, 20) as (world, mock):
        for at in range(1, 80):
            visitor = Visitor(world.app, ASKED | {"max_output_tokens": 4}, path=PATH, pieces=2)
            steps = Suspensions(visitor.run(), at, visitor.leave)

            async def run(steps: Suspensions = steps) -> None:
                async with asyncio.timeout(LONG):
                    await steps

            await asyncio.create_task(run())
            outcomes.add(world.only_end().outcome)
            await world.quiet()
            await soon(lambda: not mock.app.driver.engine.running, "the engine is at rest")
            if not steps.struck:
                break
    assert outcomes == {Outcome.CANCELLED, Outcome.COMPLETED}
    assert at < 79


async def test_another_key_reads_nothing(store_url: str) -> None:
    """Not its events either; what is asked is answered without the engine."""
    async with mocked(store_url, 100) as (world, mock):
        visitor = await world.visit(ASKED, path=PATH)
        response_id = documents(visitor)[0]["response"]["id"]
        foreign = response_id[:-1] + ("0" if response_id[-1] != "0" else "1")
        received = mock.app.journal.shown()["received"]
        for query in ("stream=true", ""):
            again, reading = coming_back(world, foreign, query)
            await reading
            assert (again.status, again.json["error"]["code"]) == (404, Code.NOT_FOUND)
        assert mock.app.journal.shown()["received"] == received
        await world.quiet()
