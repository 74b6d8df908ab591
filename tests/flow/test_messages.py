"""`/v1/messages` through the gateway: Anthropic's words in both directions, the same books behind them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.mock.engine import EngineConfig
from tests.flow.driver import Visitor
from tests.flow.engines import STREAM_HEAD, Peer, chunk, mock_engine, raw_engine, whole
from tests.flow.world import MESSAGES, World, gateway

PATH = "/v1/messages"
FAST = 100


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 8, **fields}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


START = event("message_start", message={"usage": {"input_tokens": 4, "output_tokens": 0}})
WORD = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "one"})
DELTA = event(
    "message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 4, "output_tokens": 3}
)
STOP = event("message_stop")
ENGINE_ERROR = event("error", error={"type": "InternalServerError", "message": "it failed"})
THREE = START + 3 * WORD


@asynccontextmanager
async def playing(store_url: str, *parts: bytes, stream: bool = True) -> AsyncIterator[World]:
    """Behind the gateway an engine that answers so, and closes."""

    async def script(peer: Peer) -> None:
        await peer.send(*([STREAM_HEAD, *map(chunk, parts)] if stream else parts))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        yield world


async def one_call(store_url: str, body: Any) -> tuple[Visitor, dict[str, Any], CallEnded]:
    """The answer, the request upstream and the report."""
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body, path=PATH)
        request: dict[str, Any] = mock.app.journal.shown()["requests"][-1]
        await world.quiet()
        return visitor, request, world.only_end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_holds_what_its_chat_would(store_url: str, stream: bool) -> None:
    asked = body(stream=stream, system="Be brief.")
    visitor, request, end = await one_call(store_url, asked)
    assert visitor.status == 200
    assert request["body"] == asked, "its bytes are the client's"
    assert (end.outcome, end.output_tokens) == (Outcome.COMPLETED, 8)
    assert end.prompt_tokens is not None
    blocks = -(-(end.prompt_tokens_estimated + 8 - 1) // 16)
    assert visitor.header("x-kvgate-reserved-blocks") == str(blocks)
    if stream:
        assert visitor.body.endswith(STOP.replace(b'": "', b'":"'))
        assert visitor.body.count(b"event: content_block_delta") == 8
    else:
        assert visitor.json["type"] == "message"


async def test_a_limit_beyond_the_context_is_clamped(store_url: str) -> None:
    _, request, end = await one_call(store_url, body(max_tokens=8192, mock={"output_tokens": 1}))
    assert request["body"]["max_tokens"] == 8192 - end.prompt_tokens_estimated


@pytest.mark.parametrize(
    ("changes", "status", "type_", "code"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", Code.INVALID_VALUE),
        ({"max_tokens": 9999}, 400, "invalid_request_error", Code.INVALID_VALUE),
        ({"model": "nope"}, 404, "not_found_error", Code.MODEL_NOT_FOUND),
    ],
)
async def test_a_refusal_is_in_anthropics_envelope(
    store_url: str, changes: dict[str, Any], status: int, type_: str, code: Code
) -> None:
    async with playing(store_url, STOP) as world:
        visitor = await world.visit(body(**changes), path=PATH)
        assert (visitor.status, visitor.json["type"]) == (status, "error")
        assert (visitor.json["error"]["type"], visitor.json["error"]["code"]) == (type_, code)
        await world.quiet()


@pytest.mark.parametrize(
    "broken", [THREE, THREE + event("content_block_delta", error={"message": "?"})[:40]], ids=["ended", "cut"]
)
async def test_a_broken_stream_ends_with_anthropics_error_event(store_url: str, broken: bytes) -> None:
    async with playing(store_url, broken, b"") as world:
        visitor = await world.visit(body(stream=True), path=PATH)
        assert (visitor.status, visitor.complete) == (200, True)
        name, data, *rest = visitor.body.removeprefix(THREE).split(b"\n")
        error = json.loads(data.removeprefix(b"data: "))
        assert (name, error["type"], rest) == (b"event: error", "error", [b"", b""])
        assert error["error"]["code"] == Code.UPSTREAM_ERROR
        end = world.only_end()
        assert (end.outcome, end.output_tokens_estimated) == (Outcome.FAILED, 3)
        await world.quiet()


async def test_the_engines_own_error_event_is_relayed_unchanged(store_url: str) -> None:
    async with playing(store_url, THREE, ENGINE_ERROR) as world:
        visitor = await world.visit(body(stream=True), path=PATH)
        assert visitor.body == THREE + ENGINE_ERROR
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_a_status(store_url: str, stream: bool) -> None:
    error = {"type": "error", "error": {"type": "InternalServerError", "message": "it failed"}}
    parts = [ENGINE_ERROR] if stream else [whole(200, json.dumps(error).encode())]
    async with playing(store_url, *parts, stream=stream) as world:
        visitor = await world.visit(body(stream=stream), path=PATH)
        assert (visitor.status, visitor.json["error"]["code"]) == (502, Code.UPSTREAM_ERROR)
        assert visitor.json["error"]["type"] == "api_error"
        await world.quiet()


async def test_what_the_engine_counted_is_settled(store_url: str) -> None:
    async with playing(store_url, THREE, DELTA, STOP, b"") as world:
        visitor = await world.visit(body(stream=True), path=PATH)
        assert visitor.body == THREE + DELTA + STOP
        end = world.only_end()
        assert (end.outcome, end.prompt_tokens, end.output_tokens) == (Outcome.COMPLETED, 4, 3)
        await world.quiet()


ABORT = event("message_delta", delta={"stop_reason": None}, usage={"input_tokens": 4, "output_tokens": 3})
PING = event("ping")
EVENTS = [PING, START, WORD, WORD, DELTA]
NOTHING, UNNAMED = b"", ENGINE_ERROR.partition(b"\n")[2]


@pytest.mark.parametrize("end", [NOTHING, ENGINE_ERROR, UNNAMED, WORD[:-9], ABORT + STOP], ids=range(5))
@pytest.mark.parametrize("count", range(len(EVENTS)))
async def test_wherever_a_stream_fails_its_client_hears_of_it(store_url: str, count: int, end: bytes) -> None:
    """Before the first event that tells something as a status, then as an event that says so by its name."""
    begun = b"".join(EVENTS[:count])
    is_status = count < 2 and not end.startswith(ABORT)
    async with playing(store_url, begun + end, b"") as world:
        visitor = await world.visit(body(stream=True), path=PATH)
        if is_status:
            assert (visitor.status, visitor.json["error"]["type"]) == (502, "api_error")
        else:
            last = visitor.body.rstrip(b"\n").split(b"\n\n")[-1]
            assert last.startswith(b"event: error\ndata: ")
            assert STOP not in visitor.body
        end_of_call = world.only_end()
        assert (end_of_call.outcome, end_of_call.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()


async def test_an_aborted_message_is_not_passed_on(store_url: str) -> None:
    message = {"type": "message", "content": [], "usage": {"input_tokens": 4, "output_tokens": 1}}
    async with playing(store_url, whole(200, json.dumps(message).encode()), stream=False) as world:
        visitor = await world.visit(body(), path=PATH)
        assert (visitor.status, visitor.json["type"]) == (502, "error")
        await world.quiet()


async def test_a_ping_is_no_byte_of_an_answer_that_fails(store_url: str) -> None:
    """The call is tried elsewhere, and the client sees that answer only."""

    async def fails(peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(PING), chunk(b""))

    async def serves(peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(THREE + DELTA + STOP), chunk(b""))

    async with (
        raw_engine(fails) as a,
        raw_engine(serves) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}) as world,
    ):
        visitor = await world.visit(body(stream=True), path=PATH)
        assert visitor.body == THREE + DELTA + STOP
        assert len(a.bodies) == len(b.bodies) == 1
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()
