"""Bodies of `/v1/chat/completions/batch`: conversations side by side, each a sequence with its own blocks."""

import json
from typing import Any

import pytest

from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import MESSAGE_TOKENS, PROMPTS_MAX, REPLY_TOKENS, TOOL_TOKENS, PromptText
from gateway.core.request import Endpoint, GenerationRequest, forward, parse

USER = {"role": "user", "content": "hi"}
FRAME = REPLY_TOKENS + MESSAGE_TOKENS


def read(messages: Any, **fields: Any) -> GenerationRequest:
    request = parse(Endpoint.CHAT_BATCH, json.dumps({"messages": messages} | fields).encode(), 16)
    assert isinstance(request, GenerationRequest), request
    return request


def prompts(request: GenerationRequest) -> list[int]:
    """Tokens of each prompt of the engine's, a byte a token."""
    counts = [p.utf8_bytes + p.fixed_tokens for p in request.prompts if isinstance(p, PromptText)]
    return list(request.prompt_tokens(counts))


def test_each_conversation_is_a_prompt() -> None:
    request = read([[USER], [USER, {"role": "assistant", "content": "hello"}]])
    assert prompts(request) == [FRAME + 2, FRAME + MESSAGE_TOKENS + 2 + 5]
    assert (request.prompt_count, request.sequences, request.prompt_field) == (2, 2, "messages")


def test_what_a_template_shows_in_all_of_them_counts_in_each() -> None:
    tools = [{"name": "f"}]
    request = read([[USER]] * 3, tools=tools, documents=["d"])
    shared = len('[{"name":"f"}]') + TOOL_TOKENS + len('["d"]')
    assert prompts(request) == [FRAME + 2 + shared] * 3


def test_the_limit_is_that_of_each_and_written_once() -> None:
    request = read([[USER], [USER]], max_completion_tokens=5, max_tokens=9)
    assert (request.limit_field, request.output_limit) == ("max_completion_tokens", 5)
    body = json.loads(forward(request, 4))
    assert (body["max_completion_tokens"], body["max_tokens"]) == (4, 4)
    assert json.loads(forward(read([[USER]]), 64)) == {"messages": [[USER]], "max_completion_tokens": 64}


def test_it_never_streams() -> None:
    """vLLM answers with one document even where a stream is asked for: there is no usage to ask for."""
    request = read([[USER]], stream=True)
    assert (request.stream, request.usage_edits) == (False, ())
    assert b"stream_options" not in forward(request, 4)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, Code.MISSING_FIELD, "messages"),
        ({"messages": None}, Code.MISSING_FIELD, "messages"),
        ({"messages": []}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[]]}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[USER], []]}, Code.INVALID_VALUE, "messages"),
        ({"messages": [USER]}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[USER], USER]}, Code.INVALID_VALUE, "messages"),
        ({"messages": [["hi"]]}, Code.INVALID_VALUE, "messages"),
        ({"messages": "hi"}, Code.INVALID_VALUE, "messages"),
        ({"messages": {"0": [USER]}}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[[USER]]]}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[USER]] * (PROMPTS_MAX + 1)}, Code.TOO_MANY_SEQUENCES, "messages"),
        ({"messages": [[USER]] * 600, "n": 2}, Code.TOO_MANY_SEQUENCES, "messages"),
        ({"messages": [[USER] * 6000] * 2}, Code.INVALID_VALUE, "messages"),
        ({"messages": [[USER]], "n": 17}, Code.TOO_MANY_SEQUENCES, "n"),
        ({"messages": [[USER]], "max_tokens": 0}, Code.INVALID_VALUE, "max_tokens"),
        ({"messages": [[USER]], "tools": 1}, Code.INVALID_VALUE, "tools"),
        ({"messages": [[USER]], "stream": "yes"}, Code.INVALID_VALUE, "stream"),
        ({"messages": [[USER]], "kv_transfer_params": {}}, Code.INVALID_VALUE, "kv_transfer_params"),
    ],
)
def test_refusals(body: dict[str, Any], code: Code, param: str) -> None:
    refusal = parse(Endpoint.CHAT_BATCH, json.dumps(body).encode(), 16)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (code, param)


def test_as_many_as_a_call_may_have() -> None:
    assert read([[USER]] * PROMPTS_MAX).sequences == PROMPTS_MAX
