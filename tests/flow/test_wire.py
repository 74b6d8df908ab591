"""What the gateway changes on the wire, in both directions, and that it changes nothing else."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway.core.events import CallEnded
from gateway.core.outcomes import Outcome
from gateway.mock.engine import EngineConfig
from tests.flow.driver import CHAT, Visitor
from tests.flow.engines import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    MockEngine,
    Peer,
    chunk,
    event,
    mock_engine,
    raw_engine,
    whole,
)
from tests.flow.world import World, chat, gateway

TEXT = "/v1/completions"
FAST = 100


def received(mock: MockEngine) -> dict[str, Any]:
    """The last request as the engine got it."""
    found: dict[str, Any] = mock.app.journal.shown()["requests"][-1]
    return found


def header_of(request: dict[str, Any], name: str) -> list[str]:
    return [value for key, value in request["headers"] if key == name]


async def one_call(store_url: str, body: Any, **options: Any) -> tuple[Visitor, dict[str, Any], CallEnded]:
    """The answer, the request upstream and the report of one call through a gateway to the mock."""
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body, **options)
        return visitor, received(mock), world.only_end()


@pytest.mark.parametrize(
    ("path", "asked", "sent"),
    [
        (CHAT, {}, {"max_completion_tokens": 64}),
        (CHAT, {"max_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"max_completion_tokens": 5}, {"max_completion_tokens": 5}),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 9}, {"max_completion_tokens": 5, "max_tokens": 5}),
        (CHAT, {"max_tokens": 8192}, {"max_tokens": 8185}),
        (TEXT, {}, {"max_tokens": 16}),
        (TEXT, {"max_tokens": 3}, {"max_tokens": 3}),
    ],
)
async def test_the_output_limit_is_written(
    store_url: str, path: str, asked: dict[str, int], sent: dict[str, int]
) -> None:
    """And is the one that the client is shown and that its blocks were reserved for."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body = {"model": "demo", **prompt, **asked, "mock": {"output_tokens": 1}}
    visitor, request, end = await one_call(store_url, body, path=path)
    assert visitor.status == 200
    limits = {name: value for name, value in request["body"].items() if name.startswith("max_")}
    if asked.get("max_tokens") == 8192:
        sent = {"max_tokens": 8192 - end.prompt_tokens_estimated}
    assert limits == sent
    limit = next(iter(sent.values()))
    assert visitor.header("x-kvgate-output-limit") == str(limit)
    blocks = -(-(end.prompt_tokens_estimated + limit - 1) // 16)
    assert visitor.header("x-kvgate-reserved-blocks") == str(blocks)
    assert request["body"] == body | sent


@pytest.mark.parametrize(
    ("options", "upstream", "shown"),
    [
        ({"stream": True}, {"include_usage": True}, False),
        ({"stream": True, "stream_options": None}, {"include_usage": True}, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, {"include_usage": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"include_usage": True}, True),
        ({"stream": True, "stream_options": {"x": 1}}, {"x": 1, "include_usage": True}, False),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": True},
            True,
        ),
    ],
)
async def test_usage_is_asked_for_and_shown_to_who_asked(
    store_url: str, options: dict[str, Any], upstream: dict[str, Any], shown: bool
) -> None:
    visitor, request, end = await one_call(store_url, chat(max_tokens=4, **options))
    assert request["body"]["stream_options"] == upstream
    frames = [json.loads(payload) for payload in visitor.events if payload != b"[DONE]"]
    assert [frame for frame in frames if not frame["choices"]] == frames[-1:] * shown
    assert visitor.events[-1] == b"[DONE]"
    assert (end.output_tokens, end.outcome) == (4, Outcome.COMPLETED)
    assert end.unused_blocks == 0


async def test_a_call_that_is_no_stream_gets_no_stream_options(store_url: str) -> None:
    visitor, request, end = await one_call(store_url, chat(stream=False))
    assert "stream_options" not in request["body"]
    assert (visitor.status, end.output_tokens) == (200, 8)


async def test_wrong_stream_options_are_for_the_engine_to_refuse(store_url: str) -> None:
    options = {"include_usage": True}
    visitor, request, _ = await one_call(store_url, chat(stream=False, stream_options=options))
    assert request["body"]["stream_options"] == options
    assert visitor.status == 400
    assert "stream_options" in visitor.json["error"]["message"]


async def direct(mock: MockEngine, request: dict[str, Any]) -> bytes:
    """The engine's answer to the request that it got, asked for without a gateway."""
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"x-request-id": header_of(request, "x-request-id")[0]}
        return (await client.post(mock.url + request["path"], json=request["body"], headers=headers)).content


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "options", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
)
async def test_every_other_byte_passes_as_it_came(
    store_url: str, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("gateway.mock.server.time", SimpleNamespace(time=lambda: 1_800_000_000))
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": ["hi", "you"]}
    body = {"model": "demo", "max_tokens": 7, "n": 2, **prompt, **options}
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body, path=path)
        expected = await direct(mock, received(mock))
    frames = expected.split(b"\n\n")
    if options == {"stream": True}:
        frames = [frame for frame in frames if b'"choices":[]' not in frame]
        assert len(frames) < len(expected.split(b"\n\n"))
    assert visitor.body == b"\n\n".join(frames)


ODD = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\\n\\n \U0001f600 data: [DONE]"
ODD_EVENT = event("odd").replace(
    b"odd", ODD.replace("\x0b", "\\u000b").replace("\x0c", "\\f").replace("\x1c", "\\u001c").encode()
)
ODD_STREAM = (
    b": hello\n\n"
    + ODD_EVENT
    + b": between\r\n\r\n"
    + event("x").replace(b"\n\n", b"\r\n\r\n")
    + b"event: y\n"
    + ODD_EVENT
)
USAGE_EVENT = (
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":3,"total_tokens":12,"completion_tokens":9}}\n\n'
)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64, 4096])
async def test_only_line_feeds_end_lines(store_url: str, cut: int) -> None:
    """Raw U+2028 and its like, comments, other fields, CR LF, however the bytes are cut: identical, usage read."""
    sent = ODD_STREAM + USAGE_EVENT + DONE

    async def script(peer: Peer) -> None:
        await peer.send(
            STREAM_HEAD, *(chunk(sent[at : at + cut]) for at in range(0, len(sent), cut)), LAST_CHUNK
        )

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        visitor = await world.visit(chat(stream=True))
        assert visitor.body == ODD_STREAM + DONE
        assert world.only_end().output_tokens == 9


async def test_what_the_gateway_says_about_a_call(store_url: str) -> None:
    visitor, request, _ = await one_call(store_url, chat(stream=True), headers={"x-request-id": "mine-1"})
    assert visitor.header("x-request-id") == "mine-1"
    assert visitor.header("x-kvgate-pool") == "short"
    assert visitor.header("x-kvgate-replica") == "a"
    assert visitor.header("x-kvgate-output-limit") == "8"
    assert int(visitor.header("x-kvgate-queue-ms") or "") >= 0
    assert visitor.header("cache-control") == "no-cache"
    assert visitor.header("x-accel-buffering") == "no"
    assert visitor.header("content-type") == "text/event-stream; charset=utf-8"
    assert visitor.header("x-kvgate-reason") is None
    assert header_of(request, "x-request-id")[0].startswith("kvg-")


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (CHAT, chat(), 8),
        (CHAT, chat(stream=True, n=2), 8),
        (TEXT, {"prompt": ["one two", "three"], "max_tokens": 3}, 2 + 1 + 2),
        (TEXT, {"prompt": [1, 2, 3], "max_tokens": 3, "truncate_prompt_tokens": 2}, 2),
    ],
)
async def test_the_estimate_travels_upstream_and_back(
    store_url: str, path: str, body: dict[str, Any], tokens: int
) -> None:
    """The client's own word for it, and the engine's, are replaced."""
    headers = {"x-prompt-tokens": "7777777"}
    visitor, request, end = await one_call(store_url, body, path=path, headers=headers)
    assert visitor.status == 200
    assert header_of(request, "x-prompt-tokens") == [str(tokens)]
    told = [value for name, value in visitor.headers if name == b"x-prompt-tokens"]
    assert told == [b"%d" % tokens]
    assert end.prompt_tokens_estimated == tokens


async def test_an_engines_own_word_for_the_estimate_is_not_passed_on(store_url: str) -> None:
    async def script(peer: Peer) -> None:
        answer = {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5}}
        await peer.send(whole(200, json.dumps(answer).encode(), extra="x-prompt-tokens: 5\r\n"))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        visitor = await world.visit(chat())
        assert (visitor.status, visitor.header("x-prompt-tokens")) == (200, "8")
        assert [value for name, value in visitor.headers if name == b"x-prompt-tokens"] == [b"8"]


async def test_what_reserves_nothing_has_no_estimate(store_url: str) -> None:
    body = {"prompt": "one two"}
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body, path="/tokenize", headers={"x-prompt-tokens": "9"})
        assert (visitor.status, visitor.header("x-prompt-tokens")) == (200, None)
        assert mock.app.journal.shown()["requests"] == []


async def test_the_callers_secrets_stay_behind(store_url: str) -> None:
    headers = {
        "authorization": "Bearer kvg_secret",
        "x-api-key": "kvg_secret",
        "cookie": "a=b",
        "x-forwarded-for": "10.0.0.1",
        "user-agent": "me/1",
        "accept": "*/*",
    }
    _, request, _ = await one_call(store_url, chat(), headers=headers)
    assert "kvg_secret" not in str(request["headers"])
    assert (header_of(request, "cookie"), header_of(request, "x-forwarded-for")) == ([], [])
    assert (header_of(request, "user-agent"), header_of(request, "accept")) == (["me/1"], ["*/*"])


async def test_two_calls_with_one_id_get_two_upstream(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        visits = [world.visit(chat(stream=True), headers={"x-request-id": "same"}) for _ in range(2)]
        answers = await asyncio.gather(*visits)
        assert [answer.header("x-request-id") for answer in answers] == ["same", "same"]
        ids = {header_of(request, "x-request-id")[0] for request in mock.app.journal.shown()["requests"]}
        assert len(ids) == 2


async def test_a_refusal_says_why(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=FAST) as mock, gateway(store_url, {"a": mock.url}) as world:
        await expect_refusal(world, chat(max_tokens=0), 400, "invalid_value", retry=False)
        await expect_refusal(world, chat(model="nope"), 404, "model_not_found", retry=False)
        await expect_refusal(world, b"{", 400, "invalid_json", retry=False)
        release = await world.hold(1000)
        world.calls.draining = True
        await expect_refusal(world, chat(), 503, "draining", retry=True)
        release()


async def expect_refusal(world: World, body: Any, status: int, code: str, retry: bool) -> None:
    visitor = await world.visit(body, headers={"x-request-id": "mine"})
    assert (visitor.status, visitor.json["error"]["code"]) == (status, code)
    assert visitor.header("x-kvgate-reason") == code
    assert visitor.header("x-request-id") == "mine"
    assert (visitor.header("retry-after") is not None) == retry
    end = world.only_end()
    assert (end.outcome, end.reason, end.status) == (Outcome.REFUSED, code, status)
