"""What the mock makes of a request body, against the answers of a real vLLM 0.32.0 with max_model_len 4096."""

import json
from typing import Any

import pytest

from gateway.mock.bodies import Refusal, parse_object
from gateway.mock.calls import Call, Server, parse_batch, parse_chat, parse_text
from gateway.mock.engine import EngineConfig, Sizes
from gateway.mock.options import Options

SERVER = Server(EngineConfig(model="tiny", max_model_len=4096, enable_prefix_caching=False), Options())
MESSAGES = [{"role": "user", "content": "hello there"}]  # 2 tokens, 4 for the message, 3 for the reply


def parse(chat: bool, body: dict[str, Any] | bytes) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (parse_chat if chat else parse_text)(parse_object(raw), "rid", SERVER)


def prompts(call: Call) -> tuple[int, ...]:
    return tuple(prompt.tokens for prompt in call.prompts)


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
    assert (prompts(call), call.limits) == ((9,), (limit,))


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
    assert prompts(text(prompt=["a b", "c"])) == (2, 1)
    assert prompts(text(prompt=[10] * 500, truncate_prompt_tokens=100)) == (100,)


def test_a_scripted_length_ends_with_stop_below_the_limit() -> None:
    call = text(max_tokens=8, mock={"output_tokens": 5})
    assert call.sequences(None) == (Sizes(4, 5),)
    assert (call.reason_at(0, 5), call.reason_at(0, 8)) == ("stop", "length")
    assert text(max_tokens=8, mock={"output_tokens": 50}).sequences(None) == (Sizes(4, 8),)


def test_ids_and_stream_options() -> None:
    assert chat().id == "chatcmpl-rid"
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
    ],
)
def test_nonsense_is_a_400_and_never_an_exception(body: dict[str, Any] | bytes) -> None:
    assert refusal(False, body)["code"] == 400
    assert refusal(True, {"messages": [1]})["code"] == 400


@pytest.mark.parametrize("raw", [b'{"prompt": "\xff"}', b"[" * 100_000])
def test_what_cannot_be_read_has_the_answer_of_fastapi(raw: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parse(False, raw)
    assert caught.value.body == {"detail": "There was an error parsing the body"}


def test_a_conversation_list_is_a_batch_of_prompts() -> None:
    body = {"messages": [MESSAGES, MESSAGES], "n": 2, "max_tokens": 3, "stream": True}
    call = parse_batch(body, "rid", SERVER)
    assert (prompts(call), call.width, call.stream) == ((9, 9), 4, False)
    for wrong in ({}, {"messages": MESSAGES}, {"messages": [[]]}, {"messages": [[{"role": 5}]]}):
        with pytest.raises(Refusal):
            parse_batch(wrong, "rid", SERVER)


def test_a_call_runs_at_least_its_min_tokens() -> None:
    assert text(max_tokens=8, min_tokens=6).sequences(3)[0].output_tokens == 6
    assert text(max_tokens=8).sequences(3)[0].output_tokens == 3
    assert text(max_tokens=8, ignore_eos=True).sequences(3)[0].output_tokens == 8
    assert text(max_tokens=8, ignore_eos=True, mock={"output_tokens": 2}).sequences(3)[0].output_tokens == 2


def test_the_name_of_the_limit_is_told() -> None:
    message = refusal(True, {"messages": MESSAGES, "max_completion_tokens": 9999})["message"]
    assert message.startswith("max_completion_tokens=9999 cannot be greater than max_model_len=4096.")


def test_prefix_caching_sees_the_prompt_and_its_salt() -> None:
    server = Server(EngineConfig(model="tiny", block_size=4), Options())

    def hashes(**fields: Any) -> tuple[int, ...]:
        return parse_text({"prompt": list(range(10)), **fields}, "rid", server).prompts[0].content.hashes

    assert len(hashes()) == 2
    assert hashes() == hashes()
    assert hashes(cache_salt="a") != hashes()
    assert hashes(prompt=[0, 1, 2, 3, 9, 9, 9, 9])[0] == hashes()[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        ({"use_beam_search": True, "stream": True}, "Streaming is not currently supported with beam search"),
        (
            {"logprobs": 21},
            "Requested sample logprobs of 21, which is greater than max allowed: 20 (parameter=logprobs, value=21)",
        ),
        ({"logprobs": -2}, "`logprobs` must be a positive value or -1. (parameter=logprobs, value=-2)"),
    ],
)
def test_refusals_of_options(fields: dict[str, Any], message: str) -> None:
    assert refusal(False, {"prompt": "a", **fields})["message"] == message


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"logprobs": True, "top_logprobs": 2}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"echo": True, "top_logprobs": None}, True),
    ],
)
def test_chats_that_read_no_cache(fields: dict[str, Any], reads: bool) -> None:
    call = chat(**fields)
    assert (call.reads_cache, call.sequences(1)[0].reads_cache) == (reads, reads)


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"echo": True}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_texts_that_read_no_cache(fields: dict[str, Any], reads: bool) -> None:
    assert text(**fields).reads_cache == reads


def test_top_logprobs_need_logprobs() -> None:
    assert chat(logprobs=True, top_logprobs=2).logprobs == 2
    assert chat(logprobs=True).logprobs == 0
    assert chat().logprobs is None
    assert "`logprobs` must be set" in refusal(True, {"messages": MESSAGES, "top_logprobs": 2})["message"]


@pytest.mark.parametrize(
    ("prompt", "errors"),
    [(5, 4), ([1.5], 4), (["a", [1, 2]], 5), ([[1], ["x"]], 6), ([None] * 20, 61)],
)
def test_a_prompt_of_no_known_form_lists_the_errors_of_each(prompt: object, errors: int) -> None:
    message = refusal(False, {"prompt": prompt})["message"]
    assert message.startswith(f"{errors} validation errors:")
    assert message.count("\n  {") == min(errors, 10)
    assert ("more errors" in message) == (errors > 10)
