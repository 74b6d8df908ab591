"""What the mock makes of a request body, against the answers of a real vLLM 0.32.0 with max_model_len 4096."""

import json
from typing import Any

import pytest

from gateway.mock.calls import Call, Refusal, parse_call
from gateway.mock.engine import EngineConfig, Sizes

CONFIG = EngineConfig(model="tiny", max_model_len=4096)
MESSAGES = [{"role": "user", "content": "hello there"}]  # 2 tokens, 4 for the message, 3 for the reply


def parse(chat: bool, body: dict[str, Any] | bytes) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_call(chat, raw, "rid", CONFIG)


def chat(**fields: Any) -> Call:
    return parse(True, {"model": "tiny", "messages": MESSAGES} | fields)


def text(**fields: Any) -> Call:
    return parse(False, {"model": "tiny", "prompt": [10] * 4} | fields)


def refusal(is_chat: bool, body: dict[str, Any] | bytes) -> dict[str, Any]:
    with pytest.raises(Refusal) as caught:
        parse(is_chat, body)
    assert caught.value.body["error"]["code"] == caught.value.status
    return dict(caught.value.body["error"])


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 4096 - 9),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 4096}, 4096 - 9),
        ({"max_tokens": "12"}, 12),
        ({"max_tokens": 3.0}, 3),
        ({"max_tokens": True}, 1),
    ],
)
def test_chat_limits(fields: dict[str, Any], limit: int) -> None:
    call = chat(**fields)
    assert (call.prompts, call.limits) == ((9,), (limit,))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_completion_tokens": 4}, 16),
        ({"prompt": [10] * 4080}, 16),
        ({"prompt": [10] * 4090}, 6),
        ({"prompt": [10] * 4095}, 1),
        ({"prompt": [10] * 4000, "max_tokens": 4096}, 96),
    ],
)
def test_completion_limits(fields: dict[str, Any], limit: int) -> None:
    assert text(**fields).limits == (limit,)


def test_prompts_times_choices_are_sequences_in_order() -> None:
    call = text(prompt=[[10, 11, 12, 13], [20, 21]], n=2, max_tokens=3)
    assert call.sequences(None) == (Sizes(4, 3), Sizes(4, 3), Sizes(2, 3), Sizes(2, 3))
    assert call.sequences(2)[0] == Sizes(4, 2)
    assert text(prompt=["a b", "c"]).prompts == (2, 1)
    assert text(prompt=[10] * 500, truncate_prompt_tokens=100).prompts == (100,)


def test_a_scripted_length_ends_with_stop_below_the_limit() -> None:
    call = text(max_tokens=8, mock={"output_tokens": 5})
    assert call.sequences(None) == (Sizes(4, 5),)
    assert (call.reason_at(0, 5), call.reason_at(0, 8)) == ("stop", "length")
    assert text(max_tokens=8, mock={"output_tokens": 50}).sequences(None) == (Sizes(4, 8),)


def test_ids_and_stream_options() -> None:
    assert chat().id == "chatcmpl-rid"
    assert text(request_id="mine").id == "cmpl-mine"
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = chat(stream=True, stream_options=options, frobnicate=1, priority=5)
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)
    assert not parse(True, {"messages": MESSAGES}).stream  # no model: the served one


def tokens_error(text: str, value: int) -> tuple[str, str, str]:
    return f"{text} (parameter=max_tokens, value={value})", "BadRequestError", "max_tokens"


REFUSALS = [
    (
        {"model": "nope"},
        ("The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError", "model"),
    ),
    ({"max_tokens": 0}, tokens_error("max_tokens must be at least 1, got 0.", 0)),
    ({"max_tokens": -1}, tokens_error("max_tokens must be at least 1, got -1.", -1)),
    (
        {"max_tokens": 999999999999},
        tokens_error(
            "max_tokens=999999999999 cannot be greater than max_model_len=4096."
            " Please request fewer output tokens.",
            999999999999,
        ),
    ),
    (
        {"max_tokens": 3.5},
        (
            "1 validation error:\n  {'type': 'int_from_float', 'loc': 'body.max_tokens', 'msg': 'Input should be"
            " a valid integer, got a number with a fractional part', 'input': '3.5'}",
            "Bad Request",
            "body.max_tokens",
        ),
    ),
    ({"n": 0}, ("n must be at least 1, got 0.", "BadRequestError", None)),
    (
        {"n": 100000},
        (
            "n must be at most 16384, got 100000. To increase this limit, set the VLLM_MAX_N_SEQUENCES"
            " environment variable.",
            "BadRequestError",
            None,
        ),
    ),
    (
        {"stream_options": {"include_usage": True}},
        (
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            "BadRequestError",
            "stream_options",
        ),
    ),
    (
        {"temperature": -1},
        (
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "BadRequestError",
            "temperature",
        ),
    ),
    (
        {"cache_salt": ""},
        (
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            "BadRequestError",
            "cache_salt",
        ),
    ),
]


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(("fields", "expected"), REFUSALS)
def test_refusals_of_both_routes(
    is_chat: bool, fields: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    error = refusal(is_chat, {"model": "tiny", "messages": MESSAGES, "prompt": [10]} | fields)
    assert (error["message"], error["type"], error["param"]) == expected
    assert error["code"] == (404 if "model" in fields else 400)


NO_TEMPLATE = "Cannot apply chat template to an empty conversation. Provide at least one message."


@pytest.mark.parametrize(
    ("is_chat", "body", "message", "param"),
    [
        (
            True,
            b'{"model":"tiny","messages":[{"role":"user","content":"def foo(x):"}],',
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.69', 'msg': 'JSON decode error', 'input':"
            " '<dict of 0 items>', 'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
            "body.69",
        ),
        (
            True,
            b"",
            "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}",
            "body",
        ),
        (
            True,
            b"[1,2]",
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid"
            " dictionary or object to extract fields from', 'input': '<list of 2 items>'}",
            "body",
        ),
        (
            True,
            {"model": "tiny", "max_tokens": 3},
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input':"
            " '<dict of 2 items>'}",
            "body.messages",
        ),
        (True, {"messages": []}, NO_TEMPLATE, None),
        (
            False,
            {"prompt": ""},
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "prompt",
        ),
        (False, {"prompt": []}, "You must pass at least one prompt", None),
        (False, {"prompt": [10, 1 << 60]}, f"Token id {1 << 60} is out of vocabulary", None),
        (
            False,
            {"prompt": "a", "suffix": "x"},
            "suffix is only supported for models with FIM completion rendering",
            "suffix",
        ),
    ],
)
def test_refusals_of_one_route(
    is_chat: bool, body: dict[str, Any] | bytes, message: str, param: str | None
) -> None:
    error = refusal(is_chat, body)
    assert (error["message"], error["param"], error["code"]) == (message, param, 400)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([10] * 5000, "contains 5000 input"), ("a " * 5000, "contains at least 4097 input")],
)
def test_a_prompt_over_the_context(prompt: object, words: str) -> None:
    error = refusal(False, {"prompt": prompt})
    assert words in error["message"]
    assert error["message"].startswith("This model's maximum context length is 4096 tokens.")
    assert error["param"] == "input_tokens"
    full = refusal(False, {"prompt": [10] * 4096})
    assert full["message"].startswith("max_tokens must be at least 1, got 0.")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", [1, 2]]},
        {"prompt": [1.5]},
        {"prompt": {"a": 1}},
        {"prompt": "a", "n": "x"},
        {"prompt": "a", "n": []},
        {"prompt": "a", "stream_options": "x"},
        {"prompt": "a", "mock": {"fail": "explode"}},
        {"prompt": "a", "mock": {"output_tokens": 0}},
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_nonsense_is_a_400_and_never_an_exception(body: dict[str, Any] | bytes) -> None:
    assert refusal(False, body)["code"] == 400
    assert refusal(True, {"messages": [1]})["code"] == 400
