"""Anthropic's protocol: what a body asks for, and what an answer says, as vLLM 0.32 reads and writes them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.media import MEDIA_TOKENS
from gateway.core.messages import MessagesInspector, inspect_message
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import MESSAGE_TOKENS, REPLY_TOKENS, TOOL_TOKENS, PromptText
from gateway.core.request import Endpoint, GenerationRequest, forward, parse
from gateway.core.sse import Failure, Usage

USER = {"role": "user", "content": "def foo(x):"}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-ae6db3e56185019d",'
    b'"type":"message","role":"assistant","content":[],"model":"tiny","stop_reason":null,"stop_sequence":null,'
    b'"usage":{"input_tokens":11,"output_tokens":0}}}\n\n'
)
OPEN = event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
WORD = event("content_block_delta", delta={"type": "text_delta", "text": "pends"}, index=0)
CLOSE = event("content_block_stop", index=0)
DELTA = event(
    "message_delta",
    delta={"stop_reason": "max_tokens", "stop_sequence": None},
    usage={"input_tokens": 11, "output_tokens": 3},
)
ABORT = event("message_delta", delta={"stop_reason": None, "stop_sequence": None}, usage={"input_tokens": 11})
STOP = event("message_stop")
PING = event("ping")
ERROR = event("error", error={"type": "InternalServerError", "message": "EngineCore encountered an issue."})
NAMELESS_ERROR = ERROR.partition(b"\n")[2]
ONLY_NAMED_ERROR = b'event: error\ndata: {"detail":"boom"}\n\n'
GOOD = PING + START + OPEN + 3 * WORD + CLOSE + DELTA + STOP


def read(**fields: Any) -> GenerationRequest | Refusal:
    body = {"model": "tiny", "max_tokens": 4, "messages": [USER], **fields}
    return parse(Endpoint.MESSAGES, json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), 4)


def prompt_of(**fields: Any) -> PromptText:
    request = read(**fields)
    assert isinstance(request, GenerationRequest), request
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    return prompt


# -- bodies ------------------------------------------------------------------------------------------------------


def test_a_message_is_one_sequence_with_a_limit() -> None:
    request = read(stream=True, n=7, min_tokens=9, truncate_prompt_tokens=1, priority=3)
    assert isinstance(request, GenerationRequest)
    assert (request.output_limit, request.limit_field, request.stream) == (4, "max_tokens", True)
    assert (request.sequences, request.min_tokens, request.priority) == (1, 0, 0), "vLLM reads none of these"
    assert request.truncate_prompt_tokens is None
    assert forward(request, 3) == request.body.replace(b'"max_tokens": 4', b'"max_tokens": 3')


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": ...}, Code.MISSING_FIELD, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 4}, Code.MISSING_FIELD, "max_tokens"),
        ({"max_tokens": 0}, Code.INVALID_VALUE, "max_tokens"),
        ({"messages": ...}, Code.MISSING_FIELD, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, Code.INVALID_VALUE, "messages"),
        ({"system": 7}, Code.INVALID_VALUE, "system"),
        ({"system": [7]}, Code.INVALID_VALUE, "system"),
        ({"stream": "yes"}, Code.INVALID_VALUE, "stream"),
        ({"kv_transfer_params": {}}, Code.INVALID_VALUE, "kv_transfer_params"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], code: Code, param: str) -> None:
    refusal = read(**fields)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (code, param)
    assert f"`{param}`" in refusal.message or "`content`" in refusal.message


def test_the_system_prompt_counts_as_a_message() -> None:
    plain = prompt_of()
    assert plain.texts == ("def foo(x):",)
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        prompt = prompt_of(system=system)
        assert prompt.texts == ("Be brief.", *plain.texts)
        assert prompt.fixed_tokens == plain.fixed_tokens + MESSAGE_TOKENS
    assert prompt_of(system="") == prompt_of(system=None) == plain


def test_tools_and_what_they_gave_are_texts_and_their_images_media() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}
    given = {"type": "tool_result", "tool_use_id": "t1"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 90_000}}
    prompt = prompt_of(
        messages=[
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "Well:"}, use]},
            {"role": "user", "content": [{**given, "content": [{"type": "text", "text": "42"}, image]}]},
            {"role": "user", "content": [{**given, "content": "43"}, {**given}]},
        ]
    )
    assert prompt.texts == (
        "def foo(x):",
        "Well:",
        '{"type":"tool_use","id":"t1","name":"look","input":{"at":"x"}}',
        "t1",
        "42",
        "t1",
        "43",
        "t1",
        "",
    )
    messages = 4 + 3  # each result is one of its own, and of two parts has a new line
    assert prompt.fixed_tokens == REPLY_TOKENS + messages * MESSAGE_TOKENS + 1 + TOOL_TOKENS + MEDIA_TOKENS


def test_results_in_results_are_not_followed() -> None:
    """A request could nest them as deep as the interpreter's stack."""
    inner: dict[str, Any] = {"type": "text", "text": "x"}
    for _ in range(300):
        inner = {"type": "tool_result", "tool_use_id": "t", "content": [inner]}
    prompt = prompt_of(messages=[{"role": "user", "content": [inner]}])
    assert prompt.fixed_tokens == REPLY_TOKENS + 2 * MESSAGE_TOKENS + MEDIA_TOKENS


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_what_a_tool_gave_counts_whole_where_it_is_no_users(role: str) -> None:
    """vLLM shows an image's base64, too."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 90_000}}
    content = [{"type": "text", "text": "42", "cache_control": {"type": "ephemeral"}}, image]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    assert prompt_of(messages=[{"role": role, "content": [result]}]).texts == (
        "t1",
        json.dumps(content, separators=(",", ":")),
    )


def test_a_users_role_may_be_escaped() -> None:
    body = b"""{"model":"m","max_tokens":4,"messages":[{"role":"\\u0075ser","content":[
        {"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"42"}]}]}]}"""
    request = parse(Endpoint.MESSAGES, body, 4)
    assert isinstance(request, GenerationRequest)
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    assert prompt.texts[-2:] == ("t1", "42")


@pytest.mark.parametrize("depth", range(900, 1000))
def test_a_result_that_is_nested_deeply_is_refused_not_failed(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    part = f'{{"type":"tool_result","content":{deep}}}'
    body = f'{{"max_tokens":4,"messages":[{{"role":"assistant","content":[{part}]}}]}}'
    request = parse(Endpoint.MESSAGES, body.encode(), 4)
    assert isinstance(request, GenerationRequest) or request.code is Code.INVALID_JSON


def test_texts_that_a_tool_gave_are_joined_by_new_lines() -> None:
    texts = [{"type": "text", "text": "a"}] * 500
    result = {"type": "tool_result", "tool_use_id": "t1", "content": texts}
    prompt = prompt_of(messages=[{"role": "user", "content": [result]}])
    assert prompt.fixed_tokens == REPLY_TOKENS + 2 * MESSAGE_TOKENS + 499
    empty = prompt_of(messages=[{"role": "user", "content": [{**result, "content": []}]}])
    assert empty.fixed_tokens == REPLY_TOKENS + 2 * MESSAGE_TOKENS


def test_a_tool_that_is_declared_in_a_message_is_a_text() -> None:
    """vLLM 0.32 adds it to `tools`."""
    tool = {"type": "tool_definition", "definition": {"name": "look", "input_schema": {"x": "y" * 90_000}}}
    part = {"type": "tool_addition", "tool": tool}
    prompt = prompt_of(messages=[USER, {"role": "system", "content": [part]}])
    assert prompt.texts[-1] == json.dumps(part, separators=(",", ":"))
    assert prompt.fixed_tokens == REPLY_TOKENS + 2 * MESSAGE_TOKENS + TOOL_TOKENS


def test_the_schema_of_the_output_counts() -> None:
    """vLLM makes a `response_format` of it, which some chat templates show."""
    form = {"type": "json_schema", "schema": {"x": "y" * 1_000}}
    assert prompt_of(output_config={"format": form}).texts[0] == json.dumps(form, separators=(",", ":"))
    assert prompt_of(output_config={"effort": "low"}) == prompt_of(output_config=None) == prompt_of()


# -- answers -----------------------------------------------------------------------------------------------------


def run(stream: bytes, cuts: list[int]) -> tuple[bytes, MessagesInspector]:
    inspector = MessagesInspector(event_bytes_max=1_000)
    edges = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    forwarded = b"".join(inspector.feed(stream[a:b]) for a, b in pairwise(edges))
    return forwarded + inspector.finish(), inspector


def facts(inspector: MessagesInspector) -> tuple[object, ...]:
    return (
        inspector.started, inspector.usage, inspector.events, inspector.done, inspector.failure,
        inspector.failure_bytes, inspector.relayable_failure,
    )  # fmt: skip


STREAMS = {
    "good": GOOD,
    "crlf": GOOD.replace(b"\n", b"\r\n"),
    "error later": START + OPEN + WORD + ERROR,
    "error first": PING + ERROR,
    "only stop": STOP,
    "aborted": START + OPEN + WORD + CLOSE + ABORT + STOP,
    "nameless error": START + OPEN + WORD + NAMELESS_ERROR,
    "only named an error": PING + ONLY_NAMED_ERROR,
    "name behind": PING + b"\n".join(reversed(ERROR[:-2].split(b"\n"))) + b"\n\n",
    "only [DONE]": b"data: [DONE]\n\n",
    "garbage": b"data: <html>\n\n",
    "cut": START + OPEN + WORD + WORD[:40],
    "too long": START + event("content_block_delta", delta={"text": "x" * 5_000}),
}


@settings(max_examples=100)
@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, len(GOOD)), max_size=12))
def test_the_outcome_does_not_depend_on_the_cuts(name: str, cuts: list[int]) -> None:
    whole, inspector = run(STREAMS[name], [])
    cut, other = run(STREAMS[name], cuts)
    assert cut == whole
    assert facts(other) == facts(inspector)


@pytest.mark.parametrize("name", ["good", "crlf"])
def test_a_good_stream_passes_byte_for_byte(name: str) -> None:
    forwarded, inspector = run(STREAMS[name], [])
    assert forwarded == STREAMS[name]
    assert facts(inspector)[:5] == (True, Usage(11, 3), 3, True, None)


@pytest.mark.parametrize("untold", [PING, b"data: [DONE]\n\n", b"data: {}\n\n", b"data: ?\n\n", b": x\n\n"])
def test_what_tells_nothing_is_no_start(untold: bytes) -> None:
    """Until the first event of a message the call can still be tried elsewhere."""
    inspector = MessagesInspector()
    assert inspector.feed(untold) == untold
    assert not inspector.started
    inspector.feed(START)
    assert (inspector.started, inspector.events) == (True, 0)


def test_the_output_is_known_at_the_end() -> None:
    inspector = MessagesInspector()
    inspector.feed(START + WORD)
    assert inspector.usage == Usage(11, None)
    inspector.feed(DELTA)
    assert inspector.usage == Usage(11, 3)


@pytest.mark.parametrize(
    ("name", "failure", "forwarded"),
    [
        ("error later", Failure.ERROR, START + OPEN + WORD),
        ("error first", Failure.ERROR, PING),
        ("aborted", Failure.ABORTED, START + OPEN + WORD + CLOSE + ABORT),
        ("nameless error", Failure.ERROR, START + OPEN + WORD),
        ("only named an error", Failure.ERROR, PING),
        ("name behind", Failure.ERROR, PING),
        ("only stop", Failure.EMPTY, b""),
        ("only [DONE]", Failure.UNFINISHED, b"data: [DONE]\n\n"),
        ("garbage", Failure.UNFINISHED, b"data: <html>\n\n"),
        ("cut", Failure.UNFINISHED, START + OPEN + WORD),
        ("too long", Failure.EVENT_TOO_LONG, START),
    ],
)
def test_a_failure_is_not_passed_on(name: str, failure: Failure, forwarded: bytes) -> None:
    passed, inspector = run(STREAMS[name], [])
    assert (inspector.failure, passed) == (failure, forwarded)
    relayable = {"error later": ERROR, "error first": ERROR, "only named an error": ONLY_NAMED_ERROR}
    named_behind = STREAMS["name behind"].removeprefix(PING)
    assert inspector.relayable_failure == (relayable | {"name behind": named_behind}).get(name, b"")


def test_the_cache_is_part_of_the_prompt() -> None:
    usage = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert inspect_message(json.dumps({"type": "message", "usage": usage}).encode()).usage == Usage(11, 3, 4)


@pytest.mark.parametrize(
    ("body", "usage", "failure"),
    [
        (
            b'{"type":"message","content":[],"stop_reason":"end_turn",'
            b'"usage":{"input_tokens":11,"output_tokens":4}}',
            Usage(11, 4),
            None,
        ),
        (
            b'{"type":"message","stop_reason":"end_turn","usage":{"input_tokens":-1,"output_tokens":4}}',
            None,
            None,
        ),
        (
            b'{"type":"message","content":[],"usage":{"input_tokens":11,"output_tokens":4}}',
            Usage(11, 4),
            Failure.ABORTED,
        ),
        (
            b'{"type":"message","content":[{"text":"\\ud83d"}],"stop_reason":"end_turn",'
            b'"usage":{"input_tokens":1}}',
            Usage(1, None),
            None,
        ),
        (b'{"type":"error","error":{"type":"x","message":"y"}}', None, Failure.ERROR),
        (b"[]", None, Failure.NOT_JSON),
    ],
)
def test_a_body_that_is_no_stream(body: bytes, usage: Usage | None, failure: Failure | None) -> None:
    facts = inspect_message(body)
    assert (facts.usage, facts.failure) == (usage, failure)
