"""`/v1/responses` through the gateway: admitted as a chat, and asked for again of the replica that made it."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import background
from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.core.responses import new_id
from gateway.http.auth import Key
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import Visitor
from tests.flow.engines import STREAM_HEAD, MockEngine, Peer, chunk, mock_engine, raw_engine, whole
from tests.flow.world import World, gateway, soon

PATH = "/v1/responses"
STORES = Options(responses_store=True)
ASKED: dict[str, Any] = {"model": "demo", "input": "one two", "max_output_tokens": 8}
LIMITED = {"status": "incomplete", "usage": {"input_tokens": 4, "output_tokens": 3}}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({**fields, 'type': name})}\n\n".encode()


BEGUN = event("response.created", response={"status": "in_progress"})
WORD = event("response.output_text.delta", delta="one")
DONE = event("response.completed", response=LIMITED)
CANCELLED = event("response.completed", response={**LIMITED, "status": "cancelled"})


@asynccontextmanager
async def stores(store_url: str, **options: Any) -> AsyncIterator[tuple[World, dict[str, MockEngine]]]:
    """Two replicas that store responses; the first one has more room."""
    sizes = EngineConfig()
    async with (
        mock_engine(sizes, speed=math.inf, options=STORES) as a,
        mock_engine(sizes, speed=math.inf, options=STORES) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}, **options) as world,
    ):
        yield world, {"a": a, "b": b}


@asynccontextmanager
async def playing(store_url: str, *parts: bytes, stream: bool = True) -> AsyncIterator[World]:
    """Behind the gateway an engine that answers so, and closes."""

    async def script(peer: Peer) -> None:
        await peer.send(*([STREAM_HEAD, *map(chunk, parts)] if stream else parts))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        yield world


async def ask(world: World, path: str, method: str = "GET", **options: Any) -> Visitor:
    return await world.visit(b"", path=path, method=method, **options)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_holds_what_its_chat_would(store_url: str, stream: bool) -> None:
    async with stores(store_url) as (world, mocks):
        asked = ASKED | {"stream": stream, "instructions": "Be brief."}
        visitor = await world.visit(asked, path=PATH)
        assert visitor.status == 200, visitor.body
        sent = mocks["a"].app.journal.shown()["requests"][-1]["body"]
        assert sent == asked | {"request_id": sent["request_id"]}
        end = world.only_end()
        assert (end.outcome, end.route, end.output_tokens) == (Outcome.COMPLETED, PATH, 8)
        assert end.prompt_tokens is not None
        blocks = -(-(end.prompt_tokens_estimated + 8 - 1) // 16)
        assert visitor.header("x-kvgate-reserved-blocks") == str(blocks)
        if stream:
            assert visitor.body.count(b"event: response.output_text.delta") == 8
            assert sent["request_id"].encode() in visitor.body
        else:
            assert visitor.json["id"] == sent["request_id"]
        await world.quiet()


async def test_a_limit_that_is_not_given_is_written(store_url: str) -> None:
    async with stores(store_url) as (world, mocks):
        visitor = await world.visit({"model": "demo", "input": "x"}, path=PATH)
        assert visitor.header("x-kvgate-output-limit") == "64"
        assert mocks["a"].app.journal.shown()["requests"][-1]["body"]["max_output_tokens"] == 64
        await world.quiet()


async def test_it_is_asked_for_again_where_it_was_made(store_url: str) -> None:
    async with stores(store_url) as (world, mocks):
        made = await world.visit(ASKED, path=PATH)
        assert made.header("x-kvgate-replica") == "a"
        path = f"{PATH}/{made.json['id']}"
        for _ in range(3):  # not in turn
            again = await ask(world, path)
            assert (again.status, again.json) == (200, made.json)
            assert again.header("x-kvgate-replica") == "a"
        world.replicas.down.add("a")
        away = await ask(world, path)
        assert (away.status, away.json["error"]["code"]) == (503, Code.NO_BACKEND)
        give_back = await world.hold(2000)
        other = await world.visit(ASKED, path=PATH)
        assert (await ask(world, f"{PATH}/{other.json['id']}")).header("x-kvgate-replica") == "b"
        assert list(mocks["b"].app._server.stored) == [other.json["id"]]
        give_back()
        ends = world.ended
        assert {end.route for end in ends} == {PATH, f"{PATH}/{{id}}"}
        await world.quiet()


async def test_a_response_is_cancelled_where_it_was_made(store_url: str) -> None:
    """What the engine says of it passes: without background mode there is nothing to cancel."""
    async with stores(store_url) as (world, _):
        made = await world.visit(ASKED, path=PATH)
        cancelled = await ask(world, f"{PATH}/{made.json['id']}/cancel", "POST")
        assert (cancelled.status, cancelled.json["error"]["code"]) == (400, 400)
        assert cancelled.json["error"]["message"] == "Cannot cancel a synchronous response."
        await world.quiet()


async def test_the_query_of_a_request_passes(store_url: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(WORD + DONE), chunk(b""))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        path = f"{PATH}/{new_id('0' * 16, (world.ledger.fleet, 'a'), 'anonymous')}"
        visitor = await ask(world, path, query="stream=true&starting_after=3")
        assert engine.lines == [f"GET {path}?stream=true&starting_after=3 HTTP/1.1"]
        assert visitor.body == WORD + DONE
        await world.quiet()


async def test_nobody_else_finds_it(store_url: str) -> None:
    async with stores(store_url, key=Key("one", "normal")) as (world, _):
        made = await world.visit(ASKED, path=PATH)
        assert (await ask(world, f"{PATH}/{made.json['id']}")).status == 200
        fleet = world.ledger.fleet
        strange = new_id(made.json["id"][5:21], (fleet, "a"), "two")
        for other in (strange, "resp_a64f43d4de3d21a7", new_id("0" * 16, (fleet, "c"), "one")):
            for path, method in ((other, "GET"), (f"{other}/cancel", "POST")):
                visitor = await ask(world, f"{PATH}/{path}", method)
                assert (visitor.status, visitor.json["error"]["code"]) == (404, Code.NOT_FOUND)
                assert visitor.json["error"]["param"] == "response_id"
        await world.quiet()


async def test_other_methods_are_refused(store_url: str) -> None:
    async with stores(store_url) as (world, _):
        path = f"{PATH}/{new_id('0' * 16, (world.ledger.fleet, 'a'), 'anonymous')}"
        for each, method, allowed in (
            (path, "DELETE", "GET"),
            (path, "POST", "GET"),
            (f"{path}/cancel", "GET", "POST"),
        ):
            visitor = await ask(world, each, method)
            assert (visitor.status, visitor.header("allow")) == (405, allowed)
        await world.quiet()


# -- conversations that go on --------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_where_it_is_and_counts_whole(store_url: str) -> None:
    async with stores(store_url) as (world, _):
        give_back = await world.hold(2000)
        first = await world.visit(ASKED | {"input": "word " * 100}, path=PATH)
        assert first.header("x-kvgate-replica") == "b"
        give_back()
        world.facts.clear()
        second = await world.visit(ASKED | {"previous_response_id": first.json["id"]}, path=PATH)
        assert (second.status, second.header("x-kvgate-replica")) == (200, "b"), "although there is more room"
        end = world.only_end()
        assert end.prompt_tokens == second.json["usage"]["input_tokens"] > 100
        before = first.json["usage"]
        assert end.prompt_tokens_estimated > before["input_tokens"] + before["output_tokens"]
        third = await world.visit(ASKED | {"previous_response_id": second.json["id"]}, path=PATH)
        assert third.json["usage"]["input_tokens"] > second.json["usage"]["input_tokens"]
        await world.quiet()


async def test_a_conversation_waits_for_its_replica(store_url: str) -> None:
    """The other one has room."""
    async with stores(store_url) as (world, _):
        first = await world.visit(ASKED, path=PATH)
        give_back = await world.hold(2000)
        onward = ASKED | {"previous_response_id": first.json["id"]}
        second = asyncio.create_task(world.visit(onward, path=PATH))
        await world.queued(1)
        give_back()
        answer = await second
        assert (answer.status, answer.header("x-kvgate-replica")) == (200, "a")
        await world.quiet()


async def test_a_conversation_that_is_not_there(store_url: str) -> None:
    async with stores(store_url, key=Key("one", "normal")) as (world, mocks):
        first = await world.visit(ASKED | {"store": False}, path=PATH)
        fleet = world.ledger.fleet
        lost = new_id("0" * 16, (fleet, "a"), "one")
        strange = new_id("0" * 16, (fleet, "a"), "two")
        for previous in (first.json["id"], lost, strange):
            visitor = await world.visit(ASKED | {"previous_response_id": previous}, path=PATH)
            assert (visitor.status, visitor.json["error"]["code"]) == (404, Code.NOT_FOUND)
        assert mocks["a"].app.journal.shown()["received"] == 1
        await world.quiet()


async def test_a_conversation_whose_replica_is_away(store_url: str) -> None:
    async with stores(store_url) as (world, _):
        first = await world.visit(ASKED, path=PATH)
        world.replicas.down.add("a")
        visitor = await world.visit(ASKED | {"previous_response_id": first.json["id"]}, path=PATH)
        assert (visitor.status, visitor.json["error"]["code"]) == (503, Code.NO_BACKEND)
        await world.quiet()


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([whole(500, b"{}")], 502),
        ([whole(503, b"{}")], 503),
        ([whole(200, b"{}")], 404),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"], 502),
        ([whole(200, json.dumps(LIMITED).encode()), whole(500, b"{}")], 502),
    ],
)
async def test_a_conversation_whose_replica_fails_goes_nowhere_else(
    store_url: str, answers: list[bytes], status: int
) -> None:
    """Neither the question how long it is nor the call itself."""
    left = list(answers)

    async def script(peer: Peer) -> None:
        await peer.send(left.pop(0))

    async def never(peer: Peer) -> None:
        raise AssertionError("it has nothing of the conversation")

    async with (
        raw_engine(script) as a,
        raw_engine(never) as b,
        gateway(store_url, {"a": a.url, "b": b.url}) as world,
    ):
        previous = new_id("0" * 16, (world.ledger.fleet, "a"), "anonymous")
        visitor = await world.visit(ASKED | {"previous_response_id": previous}, path=PATH)
        assert (visitor.status, left, b.bodies) == (status, [], [])
        assert a.lines[0] == f"GET {PATH}/{previous} HTTP/1.1"
        await world.quiet()


async def test_conversations_that_are_looked_up_share_a_bound(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer repeats what its call brought, however small the one is that goes on from it."""
    monkeypatch.setattr(background, "ANSWERS_BYTES_MAX", 5000)
    waiting = asyncio.Event()
    answer = whole(200, json.dumps(LIMITED | {"instructions": "x" * 3000}).encode())

    async def script(peer: Peer) -> None:
        if peer.head.startswith(b"POST"):
            return await peer.send(whole(200, json.dumps(LIMITED).encode()))
        await peer.send(answer[:-9])
        await waiting.wait()
        await peer.send(answer[-9:])

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        previous = new_id("0" * 16, (world.ledger.fleet, "a"), "anonymous")
        body = ASKED | {"previous_response_id": previous}
        first = asyncio.create_task(world.visit(body, path=PATH))
        ours = world.app._flow._background
        await soon(lambda: ours.held_bytes > 3000, "most of one is there")
        refused = await world.visit(body, path=PATH)
        assert (refused.status, refused.json["error"]["code"]) == (429, Code.CAPACITY_EXCEEDED)
        assert refused.header("retry-after") == "1"
        waiting.set()
        assert ((await first).status, ours.held_bytes) == (200, 0)
        assert (await world.visit(body, path=PATH)).status == 200
        await world.quiet()


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [b"", CANCELLED, WORD[:-9], event("error", message="it failed")], ids=range(4)
)
@pytest.mark.parametrize("count", range(3))
async def test_wherever_a_stream_fails_its_client_hears_of_it(store_url: str, count: int, end: bytes) -> None:
    """Before the first event that tells something as a status, then as an error that OpenAI's client raises."""
    begun = b"".join([BEGUN, WORD][:count])
    async with playing(store_url, begun + end, b"") as world:
        visitor = await world.visit(ASKED | {"stream": True}, path=PATH)
        if count < 2:
            assert (visitor.status, visitor.json["error"]["code"]) == (502, Code.UPSTREAM_ERROR)
        else:
            error, done = visitor.body.removeprefix(begun).split(b"\n\n")[:2]
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == Code.UPSTREAM_ERROR
            assert done == b"data: [DONE]"
        assert only_failure(world.only_end())
        await world.quiet()


@pytest.mark.parametrize("body", [{"status": "cancelled"}, {"status": "failed", "error": {"code": "x"}}, []])
async def test_a_whole_answer_that_failed_is_not_passed_on(store_url: str, body: Any) -> None:
    async with playing(store_url, whole(200, json.dumps(body).encode()), stream=False) as world:
        visitor = await world.visit(ASKED, path=PATH)
        assert (visitor.status, visitor.json["error"]["code"]) == (502, Code.UPSTREAM_ERROR)
        assert only_failure(world.only_end())
        await world.quiet()


async def test_what_the_engine_repeats_is_passed_on_however_long(store_url: str) -> None:
    """It is held until the engine has begun: the second event alone takes several reads of the socket."""
    names = ("response.created", "response.in_progress")
    repeated = {"instructions": "x" * 2_000_000, "status": "in_progress"}
    long = b"".join(event(name, response=repeated) for name in names)
    async with playing(store_url, long, WORD, DONE, b"") as world:
        visitor = await world.visit(ASKED | {"stream": True}, path=PATH)
        assert visitor.body == long + WORD + DONE
        end = world.only_end()
        assert (end.prompt_tokens, end.output_tokens) == (4, 3)
        await world.quiet()


def only_failure(end: CallEnded) -> bool:
    return (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
