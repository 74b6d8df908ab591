"""Responses in the background: their blocks are held as long as the engine works, whoever asks, leaves or fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import background
from gateway.core.lifecycle import Event
from gateway.core.outcomes import Code, Outcome
from gateway.core.responses import RANDOM_CHARS
from gateway.ledger.api import Cut
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import Visitor
from tests.flow.engines import Peer, mock_engine, whole
from tests.flow.stored import BLOCKS, PATH, StoringEngine, following, held, listening
from tests.flow.world import World, gateway, soon, soon_true

pytestmark = pytest.mark.usefixtures("quick_looks")

ASKED: dict[str, Any] = {"model": "demo", "input": "one two", "max_output_tokens": 8, "background": True}


class Engine(StoringEngine):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def begin(self, peer: Peer) -> None:
        await self.answers.wait()
        await super().begin(peer)


def begun(world: World, **fields: Any) -> tuple[Visitor, "asyncio.Task[Visitor]"]:
    visitor = Visitor(world.app, ASKED | fields, path=PATH)
    return visitor, asyncio.create_task(visitor.run())


async def holds(world: World, blocks: int) -> None:
    async def does() -> bool:
        return await held(world) == blocks

    await soon_true(does, f"{blocks} blocks are held")


async def test_its_place_is_held_until_the_engine_says_that_it_is_over(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        assert (visitor.status, visitor.json["status"]) == (200, "queued")
        assert visitor.json["id"] == engine.body["request_id"]
        assert len(visitor.json["id"]) == len("resp_") + RANDOM_CHARS + 16
        assert visitor.header("x-kvgate-reserved-blocks") == str(BLOCKS)
        await soon(lambda: engine.asked.count("GET") > 3, "the engine is asked")
        assert (await held(world), task.done(), world.ended) == (BLOCKS, False, [])
        engine.status = "completed"
        await task
        end = world.only_end()
        assert (end.outcome, end.prompt_tokens, end.output_tokens) == (Outcome.COMPLETED, 4, 3)
        assert end.held_seconds > 0
        assert "POST cancel" not in engine.asked
        await world.quiet()


async def test_a_client_that_has_its_answer_may_leave(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        visitor.leave()
        seen = len(engine.asked)
        await soon(lambda: len(engine.asked) > seen + 2, "it goes on")
        assert await held(world) == BLOCKS
        engine.status = "incomplete"
        await task
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


async def test_a_client_that_leaves_before_its_answer_ends_it(store_url: str) -> None:
    """Nobody knows its id; the engine may have begun."""
    async with following(store_url, Engine()) as (world, engine):
        engine.answers.clear()
        visitor, task = begun(world)
        await soon(lambda: engine.asked == ["POST"], "it is asked for")
        visitor.leave()
        await task
        assert engine.asked == ["POST", "POST cancel", "GET"]
        assert world.only_end().outcome is Outcome.CANCELLED
        await world.quiet()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda world: world.calls.cut(Cut("anonymous", time.monotonic())), Code.CUT),
        (lambda world: world.calls.interrupt(Event.GRACE_OVER), Code.DRAINING),
        (lambda world: world.calls.interrupt(Event.LEASE_LOST), Code.LEASE_LOST),
    ],
)
async def test_what_ends_calls_ends_it_at_its_engine(
    store_url: str, end: Callable[[World], object], reason: Code
) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        answer = visitor.body
        end(world)
        await task
        assert visitor.body == answer, "there is nothing more to tell"
        assert "POST cancel" in engine.asked
        fact = world.only_end()
        assert (fact.outcome, fact.reason) == (Outcome.FAILED, reason)
        await world.quiet()


async def test_a_drain_lets_it_go_on(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        world.calls.drain()
        seen = len(engine.asked)
        await soon(lambda: len(engine.asked) > seen + 2, "it goes on")
        assert world.calls.inflight()
        engine.status = "completed"
        await task
        assert "POST cancel" not in engine.asked
        await world.quiet()


async def test_one_that_takes_too_long_is_ended(store_url: str) -> None:
    async with following(store_url, Engine(), background_seconds=0.1) as (world, engine):
        visitor, task = begun(world)
        await task
        assert visitor.json["status"] == "queued"
        assert engine.asked[-2:] == ["POST cancel", "GET"]
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


async def test_one_that_its_engine_has_forgotten_is_over(store_url: str) -> None:
    """It was restarted."""
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        engine.known = False
        await task
        await world.quiet()


async def test_an_engine_that_is_gone_holds_nothing(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "UNREACHABLE_SECONDS", 0.05)
    engine = Engine()
    async with listening(engine) as raw, gateway(store_url, {"a": raw.url}) as world:
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        raw.server.close()
        await raw.server.wait_closed()
        await task
        await world.quiet()


@pytest.mark.parametrize(
    "answer", [whole(200, b"oops"), whole(500, b"{}"), whole(200, b'{"error": {}, "status": "failed"}')]
)
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
        visitor, task = begun(world)
        await soon(lambda: visitor.complete, "the answer")
        assert visitor.status == 200
        assert bad.asked == ["POST", "POST cancel", "GET"]
        assert bad.body["request_id"] != good.body["request_id"]
        good.status = "completed"
        await task
        await world.quiet()


async def test_an_engine_that_may_go_on_is_not_left_for_another(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "END_SECONDS", 0.05)
    bad, good = Engine(), Engine()
    bad.answer = whole(500, b"{}")
    bad.shown = lambda: whole(500, b"{}")  # type: ignore[method-assign]
    async with (
        listening(bad) as a,
        listening(good) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}) as world,
    ):
        visitor, task = begun(world)
        await task
        assert (visitor.status, visitor.json["error"]["code"]) == (502, Code.UPSTREAM_ERROR)
        assert good.asked == []
        await world.quiet()


async def test_what_the_engine_refuses_is_not_asked_about(store_url: str) -> None:
    async with following(store_url, Engine()) as (world, engine):
        engine.answer = whole(400, b'{"error": {"message": "no store"}}')
        visitor, task = begun(world)
        await task
        assert (visitor.status, engine.asked) == (400, ["POST"])
        assert world.only_end().charged is False
        await world.quiet()


@pytest.mark.parametrize("fields", [{"store": False}, {"background": "yes"}])
async def test_what_could_not_be_followed_is_refused(store_url: str, fields: dict[str, Any]) -> None:
    async with following(store_url, Engine()) as (world, engine):
        visitor, task = begun(world, **fields)
        await task
        assert (visitor.status, visitor.json["error"]["param"]) == (400, "background")
        assert engine.asked == []
        await world.quiet()


# -- the mock, as vLLM does it ---------------------------------------------------------------------------------------


@asynccontextmanager
async def mocked(store_url: str, speed: float) -> AsyncIterator[tuple[World, Any]]:
    async with (
        mock_engine(EngineConfig(), speed=speed, options=Options(responses_store=True)) as mock,
        gateway(store_url, {"a": mock.url}) as world,
    ):
        yield world, mock


async def look(world: World, response_id: str, rest: str = "", method: str = "GET") -> Any:
    visitor = await world.visit(b"", path=f"{PATH}/{response_id}{rest}", method=method)
    assert visitor.status == 200, visitor.body
    return visitor.json


async def test_it_can_be_asked_for_until_it_is_over(store_url: str) -> None:
    async with mocked(store_url, 1) as (world, _):
        visitor, task = begun(world, max_output_tokens=30)
        await soon(lambda: visitor.complete, "the answer")
        response = await look(world, visitor.json["id"])
        assert (response["status"], response["background"]) == ("queued", True)
        await task
        response = await look(world, visitor.json["id"])
        assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 30)
        end = [fact for fact in world.ended if fact.route == PATH]
        assert [fact.output_tokens for fact in end] == [30]
        await world.quiet()


async def test_it_can_be_cancelled(store_url: str) -> None:
    async with mocked(store_url, 0.01) as (world, mock):
        visitor, task = begun(world, max_output_tokens=5000)
        await soon(lambda: visitor.complete, "the answer")
        await holds(world, -(-(9 + 5000 - 1) // 16))
        assert (await look(world, visitor.json["id"], "/cancel", "POST"))["status"] == "cancelled"
        await task
        assert not mock.app.driver.engine.running
        await world.quiet()
