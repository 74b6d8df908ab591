"""Speech to text through a whole gateway: every clip of a sound is reserved, and the form arrives as it was sent."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.media import MediaRule
from gateway.core.outcomes import Code, Outcome
from gateway.core.quota import of_limits
from gateway.core.sse import data_of
from gateway.http.auth import anonymous
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import Visitor
from tests.flow.engines import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    MockEngine,
    Peer,
    chunk,
    mock_engine,
    raw_engine,
    whole,
)
from tests.flow.world import World, gateway
from tests.forms import BOUNDARY, CONTENT_TYPE, form, wav

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
LISTENS = Options(listens=True, output_tokens=3)
RULE = MediaRule(audio_tokens=250)
"""What a clip of 30 s has in the mock, and a few more."""
CLIP_TOKENS = 250 + 32
CLIP_BLOCKS = -(-(CLIP_TOKENS + 64 - 1) // 16)
HEADERS = {"content-type": CONTENT_TYPE}


@asynccontextmanager
async def listening(store_url: str, options: Options = LISTENS) -> AsyncIterator[tuple[World, MockEngine]]:
    async with (
        mock_engine(EngineConfig(), options=options, speed=math.inf) as mock,
        gateway(store_url, {"a": mock.url}, media=RULE) as world,
    ):
        yield world, mock


async def ask(world: World, *fields: tuple[str, str | bytes], path: str = TRANSCRIPTIONS) -> Visitor:
    return await world.visit(form(("model", "demo"), *fields), path=path, headers=HEADERS)


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
@pytest.mark.parametrize(("seconds", "clips"), [(2, 1), (29.9, 1), (75, 3)])
async def test_each_clip_is_reserved(store_url: str, path: str, seconds: float, clips: int) -> None:
    async with listening(store_url) as (world, mock):
        visitor = await ask(world, ("file", wav(seconds)), path=path)
        assert visitor.status == 200, visitor.body
        assert visitor.json["text"]
        assert visitor.header("x-kvgate-reserved-blocks") == str(clips * CLIP_BLOCKS)
        assert visitor.header("x-kvgate-output-limit") == "64"
        assert visitor.header("x-prompt-tokens") == str(clips * CLIP_TOKENS)
        (request,) = mock.app.journal.shown()["requests"]
        assert (request["path"], request["output_tokens"]) == (path, clips * 3)
        assert request["prompt_tokens"] <= clips * CLIP_TOKENS
        end = world.only_end()
        assert (end.outcome, end.route, end.prompt_tokens) == (Outcome.COMPLETED, path, None)
        assert (end.reserved_blocks, end.unused_blocks) == (clips * CLIP_BLOCKS, None)
        await world.quiet()


async def test_no_engine_preempts_for_a_long_sound(store_url: str) -> None:
    """Twenty clips grow side by side: without their blocks the engine would have to throw some out."""
    async with (
        mock_engine(EngineConfig(blocks=500), options=LISTENS, speed=math.inf) as mock,
        gateway(store_url, {"a": mock.url}, blocks={"a": 500}, media=RULE) as world,
    ):
        for _ in range(2):
            visitor = await ask(world, ("file", wav(560)), ("max_completion_tokens", "100"))
            assert visitor.status == 200, visitor.body
        assert mock.app.driver.engine.preemptions == 0
        await world.quiet()


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stream_is_asked_for_usage_that_who_did_not_ask_does_not_see(
    store_url: str, asked: bool
) -> None:
    async with listening(store_url) as (world, _):
        more: list[tuple[str, str | bytes]] = [("stream_include_usage", "true")] if asked else []
        visitor = await ask(world, ("file", wav(2)), ("stream", "true"), *more)
        assert (visitor.status, visitor.header("content-type")) == (200, "text/event-stream; charset=utf-8")
        events = [data_of(event) for event in visitor.body.split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        assert any(b'"usage"' in (event or b"") for event in events) is asked
        end = world.only_end()
        assert (end.outcome, end.output_tokens, end.unused_blocks) == (Outcome.COMPLETED, 3, None)
        assert (end.prompt_tokens, end.prompt_tokens_estimated) == (None, CLIP_TOKENS)
        await world.quiet()


async def test_a_quota_counts_the_estimate_of_a_prompt_that_is_heard(store_url: str) -> None:
    """Some engines call a hundred pieces of sound in a second the tokens of the prompt."""

    async def script(peer: Peer) -> None:
        event = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":200000,"completion_tokens":2}}\n\n'
        await peer.send(STREAM_HEAD, chunk(event), chunk(usage), chunk(DONE), LAST_CHUNK)

    quotas = of_limits({"prompt_tokens_per_day": 1_000_000}, 1.0)
    key = replace(anonymous("normal"), quotas=quotas)
    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, media=RULE, key=key) as world,
    ):
        remaining = []
        for _ in range(2):
            visitor = await ask(world, ("file", wav(1)), ("stream", "true"))
            remaining.append(int(visitor.header("x-ratelimit-remaining-tokens") or ""))
            await world.quiet()
        assert 0 <= remaining[0] - remaining[1] <= CLIP_TOKENS


async def test_every_other_byte_arrives_as_it_was_sent(store_url: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(whole(200, b'{"text": "hi"}'))

    fields: list[tuple[str, str | bytes]] = [
        ("model", "demo"),
        ("max_completion_tokens", "5000000"),
        ("file", b"\r\n--\0\xff" + b"x" * 20_000),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
    ]
    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, media=MediaRule(audio_tokens=9)) as world,
    ):
        too_much = await world.visit(form(*fields), path=TRANSCRIPTIONS, headers=HEADERS)
        assert (too_much.status, too_much.json["error"]["param"]) == (400, "max_completion_tokens")
        fields[1] = ("max_completion_tokens", "8000")
        visitor = await world.visit(form(*fields), path=TRANSCRIPTIONS, headers=HEADERS)
        assert (visitor.status, visitor.json) == (200, {"text": "hi"})
        limit = visitor.header("x-kvgate-output-limit")
        assert limit == "8000"
        visitor = await world.visit(form(*fields[:1], *fields[2:]), path=TRANSCRIPTIONS, headers=HEADERS)
        added = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="max_completion_tokens"\r\n\r\n64\r\n'.encode()
        assert engine.bodies == [form(*fields), added + form(*fields[:1], *fields[2:])]
        assert CONTENT_TYPE.encode() in engine.peers[0].head
        await world.quiet()


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("text/plain; charset=utf-8", b"1\n00:00 --> 00:01\nhi\n"), ("application/x-subrip", b"1"), ("", b"hi")],
)
async def test_subtitles_pass_as_they_are(store_url: str, content_type: str, body: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(whole(200, body, content_type))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}, media=RULE) as world:
        visitor = await ask(world, ("file", wav(1)))
        assert (visitor.status, visitor.body) == (200, body)
        assert world.only_end().outcome is Outcome.COMPLETED


@pytest.mark.parametrize("answer", [whole(200, b"oops"), whole(200, b'{"error": {}}'), whole(500, b"{}")])
async def test_a_failure_is_tried_elsewhere(store_url: str, answer: bytes) -> None:
    async def fails(peer: Peer) -> None:
        await peer.send(answer)

    async def works(peer: Peer) -> None:
        await peer.send(whole(200, b'{"text": "hi"}'))

    async with (
        raw_engine(fails) as bad,
        raw_engine(works) as good,
        gateway(store_url, {"a": bad.url, "b": good.url}, blocks={"a": 2000}, media=RULE) as world,
    ):
        visitor = await ask(world, ("file", wav(1)))
        assert (visitor.status, visitor.json) == (200, {"text": "hi"})
        assert bad.bodies == good.bodies
        await world.quiet()


async def test_an_error_event_ends_a_stream(store_url: str) -> None:
    async def script(peer: Peer) -> None:
        event = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
        error = b'data: {"error": {"message": "m", "type": "InternalServerError", "code": 500}}\n\n'
        await peer.send(STREAM_HEAD, chunk(event), chunk(error), chunk(DONE), LAST_CHUNK)

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}, media=RULE) as world:
        visitor = await ask(world, ("file", wav(1)), ("stream", "true"))
        assert visitor.status == 200
        assert b'"error"' in visitor.body
        assert world.only_end().outcome is Outcome.FAILED
        await world.quiet()


async def test_a_replica_without_the_route_says_so_itself(store_url: str) -> None:
    async with listening(store_url, Options()) as (world, _):
        visitor = await ask(world, ("file", wav(1)))
        assert (visitor.status, visitor.json) == (404, {"detail": "Not Found"})
        assert world.only_end().charged is False
        await world.quiet()


async def test_what_the_engine_refuses_it_refuses_itself(store_url: str) -> None:
    async with listening(store_url) as (world, _):
        visitor = await ask(world, ("file", b"no sound"))
        assert (visitor.status, visitor.json["error"]["message"]) == (
            400,
            "Invalid or unsupported audio file.",
        )
        await world.quiet()


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (form(("model", "demo")), HEADERS, 400, Code.MISSING_FIELD),
        (form(("model", "nope"), ("file", b"x")), HEADERS, 404, Code.MODEL_NOT_FOUND),
        (b"{}", {"content-type": "application/json"}, 400, Code.INVALID_VALUE),
        (form(("file", b"x"))[:-9], HEADERS, 400, Code.INVALID_VALUE),
        (form(("file", b"x")), {}, 400, Code.INVALID_VALUE),
    ],
)
async def test_refusals(
    store_url: str, body: bytes, headers: dict[str, str], status: int, code: Code
) -> None:
    async with listening(store_url) as (world, mock):
        visitor = await world.visit(body, path=TRANSCRIPTIONS, headers=headers)
        assert (visitor.status, visitor.json["error"]["code"]) == (status, code)
        assert mock.app.journal.shown()["requests"] == []
        await world.quiet()


async def test_a_sound_may_be_larger_than_another_body_within_a_bound_of_its_own(store_url: str) -> None:
    async with listening(store_url) as (world, _):
        world.app.use(edge(world, body_bytes_max=1024, audio_bytes_max=50_000))
        assert (await ask(world, ("file", wav(2)))).status == 200
        for options in ({}, {"pieces": 3}):
            visitor = await world.visit(
                form(("file", wav(9))), path=TRANSCRIPTIONS, headers=HEADERS, **options
            )
            assert (visitor.status, visitor.json["error"]["code"]) == (413, Code.BODY_TOO_LARGE)
            assert "server.audio_bytes_max (50000 bytes)" in visitor.json["error"]["message"]
        await world.quiet()


def edge(world: World, **changes: Any) -> Any:
    return replace(world.app._settings, **changes)
