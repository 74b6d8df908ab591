"""What engines are asked about tokens, and how their answers are read."""

import json
from typing import Any

import pytest

from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.core.tokenize import PROMPTS_MAX, count_in, questions

USER = {"role": "user", "content": "hi é"}
CHAT, TEXT = Endpoint.CHAT, Endpoint.COMPLETIONS
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def asked(endpoint: Endpoint, **fields: Any) -> list[tuple[str, Any]] | None:
    request = parse(endpoint, json.dumps({"model": "m", **fields}).encode(), 16)
    assert isinstance(request, GenerationRequest), request
    found = questions(request)
    return found and [(question.path, json.loads(question.body)) for question in found]


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {}),
        ({"max_tokens": 4, "stream": True, "temperature": 1}, {}),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, {"tools": [{"type": "function"}]}),
        ({"add_generation_prompt": False, "continue_final_message": True}, None),
        ({"add_special_tokens": True, "chat_template": "x"}, None),
        ({"chat_template_kwargs": {"a": 1}}, None),
        (
            {"reasoning_effort": "none", "documents": [{"a": "b"}], "chat_template_kwargs": {"c": 1}},
            {
                "chat_template_kwargs": {
                    "c": 1,
                    "documents": [{"a": "b"}],
                    "reasoning_effort": "none",
                    "enable_thinking": False,
                }
            },
        ),
    ],
)
def test_a_chat_asks_with_what_reaches_its_template(
    fields: dict[str, Any], more: dict[str, Any] | None
) -> None:
    expected = {"model": "m", "messages": [USER], **(fields if more is None else more)}
    assert asked(CHAT, messages=[USER], **fields) == [("/tokenize", expected)]


def test_each_prompt_of_a_completion_is_asked_for() -> None:
    assert asked(TEXT, prompt="a", max_tokens=1) == [("/tokenize", {"model": "m", "prompt": "a"})]
    plain = {"model": "m", "add_special_tokens": False}
    both = [("/tokenize", plain | {"prompt": text}) for text in "ab"]
    assert asked(TEXT, prompt=["a", "b"], add_special_tokens=False) == both


def test_anthropics_messages_have_a_route_of_their_own() -> None:
    body = {"messages": [USER], "system": "s", "max_tokens": 1}
    expected = [("/v1/messages/count_tokens", {"model": "m", **body})]
    assert asked(Endpoint.MESSAGES, **body) == expected


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}),
        (TEXT, {"prompt": ["a"] * (PROMPTS_MAX + 1)}),
    ],
    ids=["media", "variables that are none", "many prompts"],
)
def test_some_things_are_not_asked(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    assert asked(endpoint, **fields) is None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"count":11,"max_model_len":4096,"tokens":[1,2],"token_strs":null}', 11),
        (b'{"input_tokens":7,"context_management":{"original_input_tokens":7}}', 7),
        (b'{"count":-1}', None),
        (b'{"count":"11"}', None),
        (b"{}", None),
        (b"[]", None),
        (b"\xff", None),
    ],
)
def test_an_answer_tells_one_number(answer: bytes, tokens: int | None) -> None:
    assert count_in(answer) == tokens
