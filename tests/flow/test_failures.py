"""Everything that an engine can do wrong, what the client gets for it, and what is held afterwards: nothing."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from gateway.core.outcomes import STATUS as KINDS
from gateway.core.outcomes import Code, Outcome
from gateway.mock.engine import EngineConfig
from gateway.mock.journal import State
from gateway.tokens.api import Counted
from gateway.upstream.api import Trouble
from gateway.upstream.limits import UpstreamLimits
from tests.flow.driver import CHAT, Visitor
from tests.flow.engines import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    MockEngine,
    Peer,
    Script,
    chunk,
    event,
    mock_engine,
    raw_engine,
    whole,
)
from tests.flow.world import LONG, MESSAGES, World, chat, gateway, soon

SHORT = 0.1
NOWHERE = "http://127.0.0.1:9"
THREE = b"".join(event(word) for word in ("one", "two", "three"))
ENGINE_ERROR = (
    b'data: {"error":{"message":"it failed","type":"InternalServerError","param":null,"code":500}}\n\n'
)
TOO_LONG = b'{"error":{"message":"too long","type":"BadRequestError","param":"messages","code":400}}'
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
ANSWER = json.dumps({"id": "1", "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}).encode()


def plays(*parts: bytes, stay: bool = False, reset: bool = False) -> Script:
    """Send the parts, then close in order, reset, or fall silent until the other side has closed."""

    async def script(peer: Peer) -> None:
        await peer.send(*parts)
        if stay:
            await peer.until_gone()
        elif reset:
            await let_read()
            peer.reset()

    return script


async def let_read() -> None:
    """Until the gateway, in the same loop, has read what was sent: a failure overtakes what was not."""
    for _ in range(50):
        await asyncio.sleep(0)


async def broken_chunk(peer: Peer) -> None:
    await peer.send(STREAM_HEAD, chunk(THREE))
    await let_read()
    await peer.send(b"zz\r\nnot a chunk")


def streams(*data: bytes, **how: Any) -> Script:
    return plays(STREAM_HEAD, *(chunk(part) for part in data), **how)


async def comments_only(peer: Peer) -> None:
    await peer.send(STREAM_HEAD)
    while True:
        await peer.send(chunk(b": still here\n\n"))
        await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Fault:
    script: Script | None
    """None: nobody listens."""
    code: Code
    slow: str = ""
    """The limit that has to be short."""
    streams_only: bool = False
    trouble: Trouble = Trouble.BROKEN
    """What it says of the replica."""

    def __post_init__(self) -> None:
        if self.code is Code.UPSTREAM_TIMEOUT:
            object.__setattr__(self, "trouble", Trouble.SLOW)


BEFORE_THE_FIRST_BYTE = {
    "refused": Fault(None, Code.UPSTREAM_ERROR, trouble=Trouble.UNREACHABLE),
    "closed before headers": Fault(plays(), Code.UPSTREAM_ERROR),
    "reset before headers": Fault(plays(reset=True), Code.UPSTREAM_ERROR),
    "500": Fault(plays(whole(500, b'{"error":{"message":"boom"}}')), Code.UPSTREAM_ERROR),
    "503": Fault(plays(whole(503, b'{"error":{"message":"busy"}}')), Code.NO_BACKEND, trouble=Trouble.BUSY),
    "headers late": Fault(plays(stay=True), Code.UPSTREAM_TIMEOUT, slow="headers_seconds"),
    "not HTTP": Fault(plays(b"\x00\x01 nonsense\r\n\r\n"), Code.UPSTREAM_ERROR),
    "redirect": Fault(plays(whole(302, b"", extra="location: /\r\n")), Code.UPSTREAM_ERROR),
    "not JSON": Fault(plays(whole(200, b"<html>", "text/html")), Code.UPSTREAM_ERROR),
    "half an answer": Fault(plays(whole(200, ANSWER)[:-9]), Code.UPSTREAM_ERROR),
    "answer that stops": Fault(
        plays(whole(200, ANSWER)[:-9], stay=True), Code.UPSTREAM_TIMEOUT, slow="idle_seconds"
    ),
    "abort": Fault(
        plays(whole(200, ANSWER.replace(b'"stop"', b'"abort"'))), Code.UPSTREAM_ERROR, trouble=Trouble.ENDING
    ),
    "reset at the first byte": Fault(streams(reset=True), Code.UPSTREAM_ERROR, streams_only=True),
    "head only": Fault(streams(), Code.UPSTREAM_ERROR, streams_only=True),
    "empty stream": Fault(plays(STREAM_HEAD, LAST_CHUNK), Code.UPSTREAM_ERROR, streams_only=True),
    "error first": Fault(streams(ENGINE_ERROR, DONE, b""), Code.UPSTREAM_ERROR, streams_only=True),
    "busy first": Fault(
        streams(ENGINE_ERROR.replace(b"500", b"503"), DONE, b""),
        Code.NO_BACKEND,
        streams_only=True,
        trouble=Trouble.BUSY,
    ),
    "[DONE] only": Fault(streams(DONE, b""), Code.UPSTREAM_ERROR, streams_only=True, trouble=Trouble.ENDING),
    "abort first": Fault(
        streams(event("", "abort"), DONE, b""),
        Code.UPSTREAM_ERROR,
        streams_only=True,
        trouble=Trouble.ENDING,
    ),
    "garbage": Fault(streams(b"\x00\xff {no event\n\n", b""), Code.UPSTREAM_ERROR, streams_only=True),
    "first event late": Fault(
        streams(stay=True), Code.UPSTREAM_TIMEOUT, slow="first_event_seconds", streams_only=True
    ),
    "comments only": Fault(
        comments_only, Code.UPSTREAM_TIMEOUT, slow="first_event_seconds", streams_only=True
    ),
    "comments, then the end": Fault(streams(b": hm\n\n", b""), Code.UPSTREAM_ERROR, streams_only=True),
}

AFTER_THE_FIRST_BYTE = {
    "cut": Fault(streams(THREE), Code.UPSTREAM_ERROR),
    "orderly end without [DONE]": Fault(streams(THREE, b""), Code.UPSTREAM_ERROR),
    "reset": Fault(streams(THREE, reset=True), Code.UPSTREAM_ERROR),
    "idle": Fault(streams(THREE, stay=True), Code.UPSTREAM_TIMEOUT, slow="idle_seconds"),
    "broken chunk": Fault(broken_chunk, Code.UPSTREAM_ERROR),
    "half an event": Fault(streams(THREE, event("four")[:20]), Code.UPSTREAM_ERROR),
    "abort": Fault(streams(THREE, event("", "abort"), DONE, b""), Code.UPSTREAM_ERROR),
    "abort in one piece": Fault(streams(THREE + event("", "abort") + DONE, b""), Code.UPSTREAM_ERROR),
    "old error": Fault(
        streams(THREE, b'data: {"object":"error","message":"boom","type":"x","code":500}\n\n', DONE, b""),
        Code.UPSTREAM_ERROR,
    ),
}


def named(faults: dict[str, Fault]) -> Any:
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in faults.items()])


def limits(fault: Fault) -> UpstreamLimits:
    return UpstreamLimits(LONG, **{name: SHORT if name == fault.slow else LONG for name in (
        "headers_seconds", "first_event_seconds", "idle_seconds")})  # fmt: skip


@asynccontextmanager
async def faulty(fault: Fault) -> AsyncIterator[str]:
    """The URL of an engine that always fails so."""
    if fault.script is None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    else:
        async with raw_engine(fault.script) as engine:
            yield engine.url


@asynccontextmanager
async def alone(store_url: str, fault: Fault) -> AsyncIterator[World]:
    async with faulty(fault) as url, gateway(store_url, {"a": url}, limits=limits(fault)) as world:
        yield world


@asynccontextmanager
async def with_a_healthy_second(store_url: str, fault: Fault) -> AsyncIterator[tuple[World, MockEngine]]:
    """The faulty replica is the roomier one, so it is tried first."""
    async with faulty(fault) as url, mock_engine(EngineConfig(), speed=100) as mock:
        urls = {"a": url, "b": mock.url}
        async with gateway(store_url, urls, blocks={"a": 2001}, limits=limits(fault)) as world:
            yield world, mock


def expect_answer(visitor: Visitor, status: int, code: Code) -> None:
    """A whole answer in OpenAI's envelope."""
    assert (visitor.status, visitor.complete) == (status, True)
    error = visitor.json["error"]
    assert (error["code"], error["type"]) == (code, KINDS[code][1])
    assert set(error) == {"message", "type", "param", "code"}
    assert visitor.header("x-kvgate-reason") == code


def expect_broken_stream(visitor: Visitor, before: bytes, code: Code) -> None:
    """What came before, exactly one error event, `[DONE]`."""
    assert (visitor.status, visitor.complete) == (200, True)
    assert visitor.body.startswith(before)
    last = visitor.body[len(before) :].split(b"\n\n")
    assert len(last) == 3
    assert json.loads(last[0].removeprefix(b"data: "))["error"]["code"] == code
    assert last[1:] == [b"data: [DONE]", b""]


STATUS = {code: status for code, (status, _) in KINDS.items()}


@named(BEFORE_THE_FIRST_BYTE)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_byte_is_a_status(
    store_url: str, fault: Fault, stream: bool
) -> None:
    if fault.streams_only and not stream:
        fault = BEFORE_THE_FIRST_BYTE["refused"]
    async with alone(store_url, fault) as world:
        visitor = await world.visit(chat(stream=stream))
        expect_answer(visitor, STATUS[fault.code], fault.code)
        end = world.only_end()
        assert (end.outcome, end.reason, end.replica) == (Outcome.FAILED, fault.code, "a")
        assert world.replicas.failures == [("a", fault.trouble)]
        assert not world.replicas.successes
        await world.quiet()


@named(BEFORE_THE_FIRST_BYTE)
async def test_a_failure_before_the_first_byte_is_tried_elsewhere(store_url: str, fault: Fault) -> None:
    """The client sees one clean answer, from the second replica."""
    async with with_a_healthy_second(store_url, fault) as (world, mock):
        visitor = await world.visit(chat(stream=True))
        assert (visitor.status, visitor.complete) == (200, True)
        assert visitor.header("x-kvgate-replica") == "b"
        assert visitor.events[-1] == b"[DONE]"
        assert b"error" not in visitor.body
        await soon(lambda: mock.count(State.FINISHED) == 1, "the second engine's call has ended well")
        assert world.replicas.successes == ["b"]
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


@named({name: fault for name, fault in BEFORE_THE_FIRST_BYTE.items() if not fault.streams_only})
async def test_a_whole_answer_is_tried_elsewhere(store_url: str, fault: Fault) -> None:
    async with with_a_healthy_second(store_url, fault) as (world, _):
        visitor = await world.visit(chat())
        assert (visitor.status, visitor.header("x-kvgate-replica")) == (200, "b")
        assert visitor.json["usage"]["completion_tokens"] == 8
        await world.quiet()


@pytest.mark.parametrize("second", ["500", "headers late", "reset at the first byte", "refused"])
@pytest.mark.parametrize("first", ["refused", "headers late"])
async def test_no_third_replica_is_tried(store_url: str, first: str, second: str) -> None:
    """The answer is that of the second failure, though a third replica is up."""
    one, two = BEFORE_THE_FIRST_BYTE[first], BEFORE_THE_FIRST_BYTE[second]
    both = UpstreamLimits(LONG, SHORT, LONG, LONG)
    async with faulty(one) as a, faulty(two) as b, mock_engine(EngineConfig(), speed=100) as mock:
        urls, blocks = {"a": a, "b": b, "c": mock.url}, {"a": 3001, "b": 2001}
        async with gateway(store_url, urls, blocks=blocks, limits=both) as world:
            visitor = await world.visit(chat(stream=True))
            expect_answer(visitor, STATUS[two.code], two.code)
            assert [name for name, _ in world.replicas.failures] == ["a", "b"]
            assert not world.replicas.successes
            assert mock.count(State.RECEIVED) == 0
            assert world.only_end().outcome is Outcome.FAILED
            await world.quiet()


async def test_a_replica_that_is_down_is_not_tried(store_url: str) -> None:
    async with with_a_healthy_second(store_url, BEFORE_THE_FIRST_BYTE["500"]) as (world, mock):
        world.replicas.down.add("b")
        expect_answer(await world.visit(chat()), 502, Code.UPSTREAM_ERROR)
        assert mock.count(State.RECEIVED) == 0
        await world.quiet()


BUSY = b'{"error":{"message":"busy","code":503}}'


@pytest.mark.parametrize(
    ("asked", "told"), [("retry-after: 7\r\n", "7"), ("retry-after: 0\r\n", "1"), ("", "1")]
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_who_meets_a_busy_engine_alone_hears_when_to_come_back(
    store_url: str, path: str, asked: str, told: str
) -> None:
    """As the engine says, or in a second."""
    fault = Fault(plays(whole(503, BUSY, extra=asked)), Code.NO_BACKEND, trouble=Trouble.BUSY)
    async with alone(store_url, fault) as world:
        visitor = await world.visit(chat(), path=path)
        expect_answer(visitor, 503, Code.NO_BACKEND)
        assert (visitor.header("retry-after"), visitor.header("retry-after-ms")) == (told, f"{told}000")
        end = world.only_end()
        assert (end.outcome, end.reason, end.charged) == (Outcome.FAILED, Code.NO_BACKEND, False)
        await world.quiet()


async def test_two_busy_engines_are_one_too_few(store_url: str) -> None:
    one, two = (plays(whole(503, BUSY, extra=f"retry-after: {seconds}\r\n")) for seconds in (9, 3))
    async with (
        raw_engine(one) as a,
        raw_engine(two) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}) as world,
    ):
        visitor = await world.visit(chat(stream=True))
        expect_answer(visitor, 503, Code.NO_BACKEND)
        assert visitor.header("retry-after") == "3"
        assert world.replicas.failures == [("a", Trouble.BUSY), ("b", Trouble.BUSY)]
        await world.quiet()


@named(AFTER_THE_FIRST_BYTE)
async def test_a_broken_stream_ends_with_an_error_event(store_url: str, fault: Fault) -> None:
    """And it is never tried elsewhere."""
    async with with_a_healthy_second(store_url, fault) as (world, mock):
        visitor = await world.visit(chat(stream=True))
        expect_broken_stream(visitor, THREE, fault.code)
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, fault.code)
        generated = 4 if b"abort" in visitor.body else 3
        assert (end.status, end.output_tokens, end.output_tokens_estimated) == (200, None, generated)
        assert mock.count(State.RECEIVED) == 0
        await world.quiet()


async def test_the_engines_own_error_event_is_relayed_unchanged(store_url: str) -> None:
    fault = Fault(streams(THREE, ENGINE_ERROR, DONE, b""), Code.UPSTREAM_ERROR)
    async with with_a_healthy_second(store_url, fault) as (world, _):
        visitor = await world.visit(chat(stream=True))
        assert visitor.body == THREE + ENGINE_ERROR + DONE
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()


@pytest.mark.parametrize(
    "after",
    [streams(THREE + DONE), streams(THREE + DONE, reset=True), streams(THREE + DONE, stay=True)],
    ids=["closed", "reset", "left open"],
)
async def test_what_happens_after_done_is_no_failure(store_url: str, after: Script) -> None:
    """The client has everything; it is not told twice how its stream ended."""
    fault = Fault(after, Code.UPSTREAM_ERROR, slow="idle_seconds")
    async with alone(store_url, fault) as world:
        visitor = await world.visit(chat(stream=True))
        assert visitor.body == THREE + DONE
        assert visitor.complete
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engines_own_refusal_is_relayed(store_url: str, status: int, stream: bool) -> None:
    """Status and body as they came; no other replica is asked, and the replica is only reported where it is busy."""
    fault = Fault(plays(whole(status, TOO_LONG, extra="retry-after: 7\r\n")), Code.UPSTREAM_ERROR)
    async with with_a_healthy_second(store_url, fault) as (world, mock):
        visitor = await world.visit(chat(stream=stream))
        assert (visitor.status, visitor.body, visitor.complete) == (status, TOO_LONG, True)
        assert visitor.header("content-type") == "application/json"
        assert visitor.header("content-length") == str(len(TOO_LONG))
        assert visitor.header("retry-after") == "7"
        told = [("a", Trouble.BUSY)] if status == 429 else []
        assert (world.replicas.failures, world.replicas.successes) == (told, [])
        assert mock.count(State.RECEIVED) == 0
        world.only_end()
        await world.quiet()


async def test_a_compressed_answer_arrives_plain(store_url: str) -> None:
    answer = whole(200, gzip.compress(ANSWER), extra="content-encoding: gzip\r\n")
    async with alone(store_url, Fault(plays(answer), Code.UPSTREAM_ERROR)) as world:
        visitor = await world.visit(chat())
        assert (visitor.status, visitor.body) == (200, ANSWER)
        assert visitor.header("content-encoding") is None
        assert visitor.header("content-length") == str(len(ANSWER))
        assert world.only_end().output_tokens == 2
        await world.quiet()


class Exploding:
    """A counter that fails inside the gateway."""

    async def count(self, texts: object) -> Counted:
        raise RuntimeError("not a tokenizer")


async def test_a_fault_of_our_own_before_the_reserve(store_url: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}, counter=Exploding()) as world:
        expect_own_fault(await world.visit(chat(stream=True)))
        assert world.only_end().reason is Code.INTERNAL_ERROR
        await world.quiet()


async def test_a_fault_of_our_own_after_the_reserve(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone(store_url, BEFORE_THE_FIRST_BYTE["500"]) as world:
        monkeypatch.setattr("gateway.flow.forward", lambda *_: 1 / 0)
        expect_own_fault(await world.visit(chat(stream=True)))
        end = world.only_end()
        assert (end.outcome, end.reason, end.status) == (Outcome.FAILED, Code.INTERNAL_ERROR, 500)
        await world.quiet()


async def test_a_fault_of_our_own_within_a_stream(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone(store_url, Fault(streams(THREE, DONE, b""), Code.UPSTREAM_ERROR)) as world:
        monkeypatch.setattr("gateway.http.relay.AnswerRelay.finish", None)
        visitor = await world.visit(chat(stream=True))
        expect_broken_stream(visitor, THREE + DONE, Code.INTERNAL_ERROR)
        assert world.only_end().outcome is Outcome.FAILED
        await world.quiet()


def expect_own_fault(visitor: Visitor) -> None:
    """What went wrong is for the log only."""
    expect_answer(visitor, 500, Code.INTERNAL_ERROR)
    assert b"tokenizer" not in visitor.body
    assert b"division" not in visitor.body


async def test_failed_calls_leave_the_whole_budget(store_url: str) -> None:
    """Fifty failures of each kind, and the fleet still serves as many calls at once as it could before."""
    scripts = [fault.script for fault in BEFORE_THE_FIRST_BYTE.values() if fault.script and not fault.slow]
    turn = iter(scripts * 3)

    async def script(peer: Peer) -> None:
        found = next(turn, None)
        if found is not None:
            await found(peer)
        else:
            if len(engine.peers) == len(scripts) * 3 + 10:
                all_there.set()
            await all_there.wait()
            await peer.send(whole(200, ANSWER))

    all_there = asyncio.Event()
    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}, blocks={"a": 11}) as world:
        await asyncio.gather(*(world.visit(chat(stream=True)) for _ in range(len(scripts) * 3)))
        await world.quiet()
        healthy = await asyncio.gather(*(world.visit(chat()) for _ in range(10)))
        assert [visitor.status for visitor in healthy] == [200] * 10
        await world.quiet()


@named(
    AFTER_THE_FIRST_BYTE
    | {"the engine's own error": Fault(streams(THREE, ENGINE_ERROR), Code.UPSTREAM_ERROR)}
)
async def test_the_official_client_raises_for_a_broken_stream(store_url: str, fault: Fault) -> None:
    async with alone(store_url, fault) as world, official_client(world) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=9, stream=True
        )
        words: list[str | None] = []

        async def read() -> None:
            async for part in stream:
                words.append(part.choices[0].delta.content)

        with pytest.raises(openai.APIError):
            await read()
        assert words[:3] == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["500", "headers late"])
async def test_the_official_client_raises_for_a_failed_call(store_url: str, name: str) -> None:
    fault = BEFORE_THE_FIRST_BYTE[name]
    async with alone(store_url, fault) as world, official_client(world) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="demo", messages=MESSAGES)
        assert (raised.value.status_code, raised.value.code) == (STATUS[fault.code], fault.code)


@asynccontextmanager
async def official_client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    """Its transport gathers the whole answer first, which is enough to see how the client reads it."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=world.app))  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(
        base_url="http://kvgate/v1", api_key="x", max_retries=0, http_client=http
    ) as client:
        yield client


async def test_a_whole_answer_that_breaks_too_late_closes_the_connection(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head is gone and it is no stream: only a connection that is cut says that something is missing."""
    monkeypatch.setattr("gateway.http.relay.ANSWER_BYTES_MAX", 100)
    answer = whole(200, b'{"choices":[' + b" " * 5000)[:-50]
    async with alone(store_url, Fault(plays(answer), Code.UPSTREAM_ERROR)) as world:
        visitor = Visitor(world.app, chat())
        with contextlib.suppress(Exception):
            await visitor.run()
        assert (visitor.status, visitor.complete) == (200, False)
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()
