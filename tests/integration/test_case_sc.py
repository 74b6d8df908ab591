"""SC-01 to SC-04: streams that break off, that hold strange characters, that are asked for usage, and that wait.

SC-01's `reason=upstream_error` is `upstream_timeout` where the engine was silent: DESIGN section 5 keeps the two apart.
SC-04's 12 s and 20 s are waits that the test ends when it has seen enough, and its interval is shorter; what is
asserted are the bytes, not when they came.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.core.outcomes import Code
from tests.integration.front import Front, front
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World, world
from tests.wire import Answer, Wire, ask, completion, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
DONE = b"data: [DONE]\n\n"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": HI, "max_tokens": 8, **fields}


def calls_of(here: World) -> list[dict[str, Any]]:
    """The call log so far; a line that is being written is left for the next look."""
    path = here.folder / "calls.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


async def only_call(here: World) -> dict[str, Any]:
    await soon(lambda: calls_of(here), "the log has it")
    (call,) = calls_of(here)
    return call


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def event(text: str, finish: str | None = None) -> bytes:
    """As vLLM writes it, with the text not escaped where JSON allows that."""
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    shown = json.dumps(frame | {"choices": [choice]}, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + shown.encode() + b"\n\n"


THREE = (event("a"), event("b"), event("c"))


@asynccontextmanager
async def behind_a_front(here: World, **settings: Any) -> AsyncIterator[tuple[GatewayProcess, Front, Mock]]:
    mock = await asyncio.to_thread(here.mock, "--blocks", "201", "--speed", "inf")
    async with front(mock.url) as door:
        config, (key,) = here.config(
            [{"name": "only", "replicas": [door.url]}],
            store=QUICK_STORE,
            log={"calls": "calls.jsonl"},
            **settings,
        )
        gateway = await asyncio.to_thread(here.gateway, config, key)
        try:
            yield gateway, door, mock
        finally:
            await asyncio.to_thread(gateway.stop)


# -- SC-01 ---------------------------------------------------------------------------------------------------------

BREAKS: dict[str, tuple[bytes | str, Code]] = {
    "three frames and a reset": ("reset_after_events:3", Code.UPSTREAM_ERROR),
    "three frames and a good end": (STREAM_HEAD + chunked(*THREE) + b"0\r\n\r\n", Code.UPSTREAM_ERROR),
    "three frames and silence": ("hang:3", Code.UPSTREAM_TIMEOUT),
    "a chunk that is cut": (STREAM_HEAD + chunked(*THREE) + b"64\r\ndata: {", Code.UPSTREAM_ERROR),
    "a chunk of no length": (STREAM_HEAD + chunked(*THREE) + b"xyz\r\n\r\n", Code.UPSTREAM_ERROR),
}
"""What the engine does, as a fault of the mock's or as bytes, and what it is called."""


@pytest.mark.parametrize(("how", "code"), BREAKS.values(), ids=BREAKS)
async def test_sc01_a_stream_that_breaks_is_never_a_success(
    new_world: World, how: bytes | str, code: Code
) -> None:
    """One event more says so, then `[DONE]`; the tokens that were passed on are charged."""
    async with behind_a_front(new_world, upstream={"idle_seconds": 1.5}) as (gateway, door, mock):
        await asyncio.to_thread(break_calls, how, door, mock)
        answer = await ask(gateway.url, post(gateway.key, chat(stream=True), CHAT))
        *good, error, done = answer.body.removesuffix(b"\n\n").split(b"\n\n")
        assert (answer.status, done) == (200, b"data: [DONE]")
        assert len(good) == 3
        assert all(json.loads(data.removeprefix(b"data: "))["choices"] for data in good)
        told = json.loads(error.removeprefix(b"data: "))
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["code"] == code
        call = await only_call(new_world)
        assert (call["outcome"], call["reason"]) == ("failed", code)
        shown = sum(bool(json.loads(data.removeprefix(b"data: "))["choices"]) for data in good)
        assert (call["charged"], call["output_tokens"], call["output_estimated"]) == (True, shown, True)
        await soon(gateway.is_quiet, "nothing is held")
        await asyncio.to_thread(break_calls, how, door, mock)
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0
        ) as sdk:
            stream = await sdk.chat.completions.create(**chat(stream=True))
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass


def break_calls(how: bytes | str, door: Front, mock: Mock) -> None:
    if isinstance(how, str):
        mock.fail(how)
    else:
        door.answers["POST"] = how


async def test_sc01_the_engines_own_error_is_passed_on_and_counts_as_a_failure(new_world: World) -> None:
    async with behind_a_front(new_world) as (gateway, door, _):
        own = b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\n'
        door.answers["POST"] = STREAM_HEAD + chunked(*THREE, own, DONE) + b"0\r\n\r\n"
        answer = await ask(gateway.url, post(gateway.key, chat(stream=True), CHAT))
        assert answer.body == b"".join(THREE) + own + DONE
        call = await only_call(new_world)
        assert (call["outcome"], call["reason"], call["output_tokens"]) == ("failed", "upstream_error", 3)
        await soon(gateway.is_quiet, "nothing is held")


# -- SC-02 ---------------------------------------------------------------------------------------------------------

STRANGE = (
    "\u2028",
    "\u2029",
    "\u0085",
    "\u000b",
    "\u000c",
    "\u001c\u001d\u001e",
    "\n\n",
    "\r\n\r\n",
    "\x00",
    "\ufeff",
    "🙂",
)
"""What line readers cut at, and other text: JSON escapes those below U+0020 itself, and they stay escaped."""


@pytest.mark.parametrize("cut", [None, 1, 7])
async def test_sc02_only_blank_lines_end_an_event(new_world: World, cut: int | None) -> None:
    """However the bytes are cut on their way, they arrive as they were, and usage is read."""
    usage = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"demo","choices":[],'
    usage += b'"usage":{"prompt_tokens":9,"total_tokens":20,"completion_tokens":11}}\n\n'
    events = [event(f"a{text}b") for text in STRANGE]
    stream = b"".join([*events, event("", "stop"), usage, DONE])
    pieces = [stream] if cut is None else [stream[at : at + cut] for at in range(0, len(stream), cut)]
    async with behind_a_front(new_world) as (gateway, door, _):
        door.answers["POST"] = STREAM_HEAD + chunked(*pieces) + b"0\r\n\r\n"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await ask(gateway.url, post(gateway.key, chat(**options), CHAT))
        assert answer.body == stream
        call = await only_call(new_world)
        assert (call["prompt_tokens"], call["output_tokens"], call["outcome"]) == (9, 11, "completed")
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0
        ) as sdk:
            chunks = [chunk async for chunk in await sdk.chat.completions.create(**chat(stream=True))]
        assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == [f"a{text}b" for text in STRANGE]


# -- SC-03 ---------------------------------------------------------------------------------------------------------

ASKED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "a": ({"stream": True}, {"include_usage": True}, False),
    "b": ({"stream": True, "stream_options": {"include_usage": False}}, {"include_usage": True}, False),
    "c": ({"stream": True, "stream_options": {"include_usage": True}}, {"include_usage": True}, True),
    "d": ({"stream": True, "stream_options": {"x": 1}}, {"x": 1, "include_usage": True}, False),
    "e": ({"stream": False}, None, False),
    "g": (
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"include_usage": True, "continuous_usage_stats": True},
        True,
    ),
    "g, alone": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"include_usage": True},
        False,
    ),
}
"""What the client sends, what its engine gets, and whether the client sees a frame of usage alone.

Alone `continuous_usage_stats` means nothing to vLLM, beside our `include_usage` it would."""
Running = tuple[World, GatewayProcess, Mock]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with world() as here:
        mock = here.mock("--blocks", "201", "--speed", "inf")
        config, (key,) = here.config(
            [{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE, log={"calls": "calls.jsonl"}
        )
        yield here, here.gateway(config, key), mock


@pytest.mark.parametrize(("fields", "upstream", "shown"), ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_sc03_usage_is_for_who_asked(
    running: Running, path: str, fields: dict[str, Any], upstream: dict[str, Any] | None, shown: bool
) -> None:
    here, gateway, mock = running
    mock.reset()
    before = len(calls_of(here))
    body = chat(**fields) if path == CHAT else completion(9, 8) | fields
    answer = await ask(gateway.url, post(gateway.key, body, path))
    assert answer.status == 200
    (record,) = mock.log()["requests"]
    assert record["body"].get("stream_options") == upstream
    if fields["stream"]:
        frames = [json.loads(data) for data in data_of(answer.body)]
        assert [not frame["choices"] for frame in frames] == [False] * (len(frames) - shown) + [True] * shown
        continuous = fields.get("stream_options", {}).get("continuous_usage_stats") and shown
        assert all(bool(frame.get("usage")) == bool(continuous) for frame in frames if frame["choices"])
    await soon(lambda: len(calls_of(here)) > before, "the log has it")
    call = calls_of(here)[-1]
    assert (call["charged"], call["output_tokens"], call["output_estimated"]) == (True, 8, False)


def data_of(body: bytes) -> list[bytes]:
    """Of a good stream, without its end."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [event_.removeprefix(b"data: ") for event_ in events]


async def test_sc03_what_is_wrong_without_a_stream_is_for_the_engine_to_say(running: Running) -> None:
    _, gateway, mock = running
    mock.reset()
    options = {"include_usage": True}
    answer = await ask(gateway.url, post(gateway.key, chat(stream=False, stream_options=options), CHAT))
    assert (answer.status, "x-kvgate-reason" in answer.headers) == (400, False)
    assert "stream_options" in answer.json()["error"]["message"]
    (record,) = mock.log()["requests"]
    assert record["body"]["stream_options"] == options


# -- SC-04 ---------------------------------------------------------------------------------------------------------

SILENCE_SECONDS = 0.2
COMMENT = b": keep-alive"
WHOLE = 200
"""Blocks of the engine; a call that holds all of them lets nobody else in."""


def all_blocks(stream: bool = True, **script: Any) -> dict[str, Any]:
    return completion(16, WHOLE * 16 - 15, stream, **script)


@asynccontextmanager
async def waiting(
    here: World, seconds_max: float = 60.0, silence_seconds: float = SILENCE_SECONDS
) -> AsyncIterator[tuple[GatewayProcess, Mock, Wire]]:
    """An engine that somebody has for himself until he leaves."""
    mock = await asyncio.to_thread(here.mock, "--blocks", str(WHOLE + 1), "--step-base-ms", "1")
    config, (key,) = here.config(
        [{"name": "only", "replicas": [mock.url]}],
        store=QUICK_STORE,
        queue={"seconds_max": seconds_max},
        answers={"keepalive_seconds": silence_seconds},
        log={"calls": "calls.jsonl"},
    )
    gateway = await asyncio.to_thread(here.gateway, config, key)
    holder = await Wire.open(gateway.url)
    await holder.send(post(key, all_blocks(hold_seconds=600)))
    await soon(lambda: mock.log()["started"] == 1, "the engine is full")
    yield gateway, mock, holder


async def comments(wire: Wire, count: int) -> None:
    for _ in range(count):
        assert await wire.event() == COMMENT


async def begun(gateway: GatewayProcess, body: dict[str, Any], path: str = CHAT, count: int = 3) -> Wire:
    """A stream that has been waiting for so many comments."""
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, body, path))
    status, headers = await wire.head()
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert headers["x-request-id"]
    await comments(wire, count)
    return wire


async def test_sc04_a_stream_is_never_silent_in_the_queue_nor_in_its_prefill(new_world: World) -> None:
    async with waiting(new_world) as (gateway, mock, holder):
        wire = await begun(gateway, chat(stream=True))
        await asyncio.to_thread(mock.change, "pause")
        holder.reset()
        await soon(lambda: gateway.state()["queue"] == 0, "it has its place")
        await comments(wire, 3)
        await asyncio.to_thread(mock.change, "resume")
        events = [found for found in await wire.events() if found != COMMENT]
        assert events[-1] == b"data: [DONE]"
        frames = [json.loads(found.removeprefix(b"data: ")) for found in events[:-1]]
        assert sum(bool(frame["choices"][0]["delta"].get("content")) for frame in frames) == 8
        await soon(
            lambda: any(call["outcome"] == "completed" for call in calls_of(new_world)), "it is logged"
        )
        (call,) = [call for call in calls_of(new_world) if call["outcome"] == "completed"]
        assert (call["status"], call["output_tokens"]) == (200, 8)
        await soon(gateway.is_quiet, "nothing is held")


async def test_sc04_nor_between_two_tokens(new_world: World) -> None:
    """A comment never stands inside an event, and never ends the stream."""
    async with behind_a_front(new_world, answers={"keepalive_seconds": SILENCE_SECONDS}) as (gateway, _, _):
        wire = await Wire.open(gateway.url)
        await wire.send(post(gateway.key, chat(stream=True, mock={"fail": "hang:3"}), CHAT))
        assert (await wire.head())[0] == 200
        seen: list[bytes] = []
        while seen[-3:] != [COMMENT] * 3 or sum(found != COMMENT for found in seen) < 3:
            found = await wire.event()
            assert found is not None
            assert found == COMMENT or json.loads(found.removeprefix(b"data: "))
            seen.append(found)
        wire.reset()
        await soon(gateway.is_quiet, "nothing is held")


def late(path: str, events: list[bytes]) -> dict[str, Any]:
    """The one error that a stream ends with, in the words of its protocol."""
    while events and events[0] == COMMENT:
        events = events[1:]
    if path == MESSAGES:
        (only,) = events
        name, data = only.split(b"\n")
        assert name == b"event: error"
    else:
        data, done = events
        assert done == b"data: [DONE]"
    found: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return found


PATHS = (CHAT, "/v1/completions", MESSAGES, "/v1/responses")


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"model": "demo", "input": "hi", "max_output_tokens": 8, **fields}
    return completion(9, 8) | fields if path == "/v1/completions" else chat(**fields)


@pytest.mark.parametrize("path", PATHS)
async def test_sc04_a_wait_in_vain_ends_with_an_error_event(new_world: World, path: str) -> None:
    async with waiting(new_world, seconds_max=1.5) as (gateway, _, holder):
        wire = await begun(gateway, body_of(path, stream=True), path, count=1)
        assert late(path, await wire.events())["error"]["code"] == Code.QUEUE_TIMEOUT
        holder.reset()
        await soon(gateway.is_quiet, "nothing is held")
        calls = {call["reason"]: call["status"] for call in calls_of(new_world)}
        assert calls.get(Code.QUEUE_TIMEOUT, 429) == 429, "as it would have been told"


@pytest.mark.parametrize("path", PATHS)
async def test_sc04_an_engines_refusal_after_a_wait_is_an_error_event(new_world: World, path: str) -> None:
    """With the engine's own error; the engine is not to blame."""
    async with waiting(new_world) as (gateway, mock, holder):
        wire = await begun(gateway, body_of(path, stream=True), path, count=1)
        await asyncio.to_thread(mock.fail, "status:400")
        holder.reset()
        error = late(path, await wire.events())["error"]
        assert error["message"] == "The request was refused by a script."
        await soon(gateway.is_quiet, "nothing is held")
        assert gateway.takes_calls()


async def test_sc04_an_engines_failure_after_a_wait_is_an_error_event(new_world: World) -> None:
    async with waiting(new_world) as (gateway, mock, holder):
        wire = await begun(gateway, chat(stream=True), count=1)
        await asyncio.to_thread(mock.fail, "status:500")
        holder.reset()
        assert late(CHAT, await wire.events())["error"]["code"] == Code.UPSTREAM_ERROR
        await soon(gateway.is_quiet, "nothing is held")


async def test_sc04_who_leaves_while_comments_come_leaves_nothing(new_world: World) -> None:
    async with waiting(new_world) as (gateway, mock, holder):
        leave: Callable[[Wire], None]
        for leave in (Wire.reset, Wire.close):
            leave(await begun(gateway, chat(stream=True), count=2))
        await soon(lambda: gateway.state()["queue"] == 0, "they have left the queue")
        holder.reset()
        await soon(gateway.is_quiet, "nothing is held")
        assert mock.log()["received"] == 1


async def test_sc04_what_is_no_stream_gets_no_stray_byte(new_world: World) -> None:
    """While a stream beside it is told three times that it waits, nothing comes of it; then the whole answer."""
    async with waiting(new_world) as (gateway, _, holder):
        wire = await Wire.open(gateway.url)
        await wire.send(post(gateway.key, chat(), CHAT))
        await soon(lambda: gateway.state()["queue"] == 1, "it waits")
        beside = await begun(gateway, chat(stream=True))
        holder.reset()
        answer = await wire.answer()
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert b"data: [DONE]" in await beside.events()


async def test_sc04_without_it_the_true_status_is_told(new_world: World) -> None:
    async with waiting(new_world, seconds_max=0.5, silence_seconds=0) as (gateway, _, holder):
        refused: Answer = await ask(gateway.url, post(gateway.key, chat(stream=True), CHAT))
        assert (refused.status, refused.code) == (429, Code.QUEUE_TIMEOUT)
        assert int(refused.headers["retry-after"]) >= 1
        holder.reset()
