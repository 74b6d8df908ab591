"""Comments to a stream that waits: on one that is written to all the time, and left at every moment, nothing breaks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.core.outcomes import Code, Outcome
from gateway.http.keepalive import COMMENT
from gateway.mock.engine import EngineConfig
from gateway.mock.faults import Fault, Kind
from gateway.mock.journal import State
from tests.flow.driver import Visitor
from tests.flow.engines import MockEngine, mock_engine
from tests.flow.world import World, chat, gateway, soon

ALWAYS_SECONDS = 0.001
STREAM = chat(stream=True, max_tokens=6)


@pytest.fixture(autouse=True)
def nothing_fails_unseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What breaks the rules of ASGI only ends the comments."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelname == "ERROR"]


@asynccontextmanager
async def talkative(store_url: str, wait_ms: int = 20_000) -> AsyncIterator[tuple[World, MockEngine]]:
    """A comment comes whenever nothing else does."""
    async with (
        mock_engine(EngineConfig(step_base_ms=5), speed=1) as mock,
        gateway(store_url, {"a": mock.url}, wait_ms=wait_ms) as world,
    ):
        world.app.use(replace(world.app._settings, keepalive_seconds=ALWAYS_SECONDS))
        yield world, mock


def without_comments(visitor: Visitor) -> list[bytes]:
    """The events of a stream, of which every other one has to be a comment as a whole."""
    *events, rest = visitor.body.split(b"\n\n")
    assert rest == b""
    return [event for event in events if event != COMMENT.strip()]


@pytest.mark.parametrize("pause_seconds", [0, 0.002])
async def test_comments_stand_between_events(store_url: str, pause_seconds: float) -> None:
    """However slowly they are read; the head is there once."""
    async with talkative(store_url) as (world, _):
        release = await world.hold(1000)
        visitor = Visitor(world.app, STREAM, pause_seconds=pause_seconds)
        async with with_visit(visitor):
            await soon(lambda: visitor.body.count(COMMENT) >= 3, "it is told that it waits")
            release()
        assert visitor.complete
        assert (visitor.status, visitor.header("content-type")) == (200, "text/event-stream; charset=utf-8")
        events = without_comments(visitor)
        assert all(event.startswith(b"data: ") for event in events)
        assert events[-1] == b"data: [DONE]"
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


@asynccontextmanager
async def with_visit(visitor: Visitor) -> AsyncIterator[None]:
    async with asyncio.timeout(30), asyncio.TaskGroup() as both:
        both.create_task(visitor.run())
        yield


@pytest.mark.parametrize("sends", range(1, 16))
async def test_a_client_may_leave_between_any_two_writes(store_url: str, sends: int) -> None:
    async with talkative(store_url) as (world, mock):
        release = await world.hold(1000)
        visitor = Visitor(world.app, STREAM, leave_after_sends=sends)
        async with with_visit(visitor):
            await soon(lambda: visitor.status or world.ended, "its answer has begun")
            if sends > 5:
                release()
        release()
        assert world.only_end().outcome in (Outcome.CANCELLED, Outcome.COMPLETED)
        await world.quiet()
        await soon(lambda: not mock.open_calls, "the engine's calls have ended")


async def test_one_that_waited_in_vain_hears_it_as_an_event(store_url: str) -> None:
    async with talkative(store_url, wait_ms=100) as (world, mock):
        release = await world.hold(1000)
        visitor = await world.visit(STREAM)
        assert visitor.status == 200
        error, done = without_comments(visitor)
        assert (Code.QUEUE_TIMEOUT.encode() in error, done) == (True, b"data: [DONE]")
        assert world.only_end().status == 429
        assert mock.count(State.RECEIVED) == 0
        release()
        await world.quiet()


async def test_a_replica_that_fails_is_left_for_another_though_the_head_is_sent(store_url: str) -> None:
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=1) as broken,
        mock_engine(EngineConfig(step_base_ms=1), speed=1) as sound,
        gateway(store_url, {"a": broken.url, "b": sound.url}, blocks={"a": 1001, "b": 501}) as world,
    ):
        world.app.use(replace(world.app._settings, keepalive_seconds=ALWAYS_SECONDS))
        broken.app.faults.add(Fault(Kind.STATUS, 500), 1)
        held = [await world.hold(1000), await world.hold(500)]
        visitor = Visitor(world.app, STREAM)
        async with with_visit(visitor):
            await soon(lambda: COMMENT in visitor.body, "it is told that it waits")
            for release in held:
                release()
        assert broken.count(State.FAILED) == 1
        assert visitor.complete
        assert without_comments(visitor)[-1] == b"data: [DONE]"
        assert world.only_end().replica == "b"
        await world.quiet()


async def test_an_answer_waits_for_a_comment_that_is_being_written(store_url: str) -> None:
    """Its client does not read yet: the head is on its way when the engine has already said everything."""
    async with talkative(store_url) as (world, mock):
        release = await world.hold(1000)
        visitor = Visitor(world.app, STREAM)
        visitor.stop_reading()
        async with with_visit(visitor):
            await soon(lambda: visitor.unread, "the head waits to be read")
            release()
            await soon(lambda: mock.count(State.STARTED) == 1, "the engine has the call")
            visitor.read_on()
        assert without_comments(visitor)[-1] == b"data: [DONE]"
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


async def test_what_is_no_stream_is_left_alone(store_url: str) -> None:
    async with talkative(store_url) as (world, _):
        visitor = await world.visit(chat(max_tokens=6))
        assert visitor.json["usage"]["completion_tokens"] == 6
        assert COMMENT not in visitor.body
        await world.quiet()
