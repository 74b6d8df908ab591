"""Fields as pydantic reads them and vLLM bounds them; every message was recorded of a real vLLM 0.32.0."""

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.mock import logprobs
from gateway.mock.bodies import (
    Refusal,
    check_media_type,
    check_messages,
    parse_object,
    token_ids,
    wrong_prompt,
)
from gateway.mock.fields import CHAT_FIELDS, TEXT_FIELDS, check_ranges, coerced


def refused(call: Any, *given: Any) -> dict[str, Any]:
    with pytest.raises(Refusal) as caught:
        call(*given)
    assert caught.value.status == 400
    body: dict[str, Any] = caught.value.body
    return body


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"stream": "yes"}, {"stream": True}),
        ({"stream": "FALSE"}, {"stream": False}),
        ({"stream": 1}, {"stream": True}),
        ({"echo": 0.0}, {"echo": False}),
        ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"temperature": True}, {"temperature": 1.0}),
        ({"n": "3", "seed": 2.0}, {"n": 3, "seed": 2}),
        ({"n": None, "stream": None}, {"n": None, "stream": None}),
        ({"stream_options": {"include_usage": "on"}}, {"stream_options": {"include_usage": True}}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"frobnicate": "x"}, {"frobnicate": "x"}),
    ],
)
def test_coerced(given: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    assert coerced(given, TEXT_FIELDS) == read


@pytest.mark.parametrize(
    ("given", "kind", "message", "shown"),
    [
        ({"stream": "perhaps"}, "bool_parsing", "a valid boolean, unable to interpret input", "perhaps"),
        ({"stream": 2}, "bool_parsing", "a valid boolean, unable to interpret input", "2"),
        ({"stream": [1]}, "bool_type", "a valid boolean", "<list of 1 items>"),
        ({"temperature": [1]}, "float_type", "a valid number", "<list of 1 items>"),
        ({"top_p": "x"}, "float_parsing", "a valid number, unable to parse string as a number", "x"),
        ({"seed": 1.5}, "int_from_float", "a valid integer, got a number with a fractional part", "1.5"),
        ({"user": 5}, "string_type", "a valid string", "5"),
    ],
)
def test_fields_of_the_wrong_type(given: Mapping[str, Any], kind: str, message: str, shown: str) -> None:
    (name,) = given
    error = refused(coerced, given, CHAT_FIELDS)["error"]
    line = {"type": kind, "loc": f"body.{name}", "msg": f"Input should be {message}", "input": shown}
    assert error == {
        "message": f"1 validation error:\n  {line}",
        "type": "Bad Request",
        "param": f"body.{name}",
        "code": 400,
    }


def test_all_wrong_fields_are_listed_in_the_order_of_the_model() -> None:
    body = {"temperature": "hot", "n": "many", "max_tokens": "many", "stream_options": "x"}
    message = refused(coerced, body, CHAT_FIELDS)["error"]["message"]
    assert message.startswith("4 validation errors:\n")
    places = [line.split("'loc': 'body.")[1].split("'")[0] for line in message.splitlines()[1:]]
    assert places == ["max_tokens", "n", "temperature", "stream_options"]


def test_truncation_has_a_least_value() -> None:
    error = refused(coerced, {"truncate_prompt_tokens": -2}, CHAT_FIELDS)["error"]
    assert error["message"].endswith("equal to -1', 'input': '-2', 'ctx': {'ge': -1}}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        (
            {"temperature": -1},
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        ),
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
        ({"top_k": -5}, "top_k must be 0 (disable), or at least 1, got -5."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
    ],
)
def test_ranges(given: Mapping[str, Any], message: str) -> None:
    error = refused(check_ranges, coerced(given, CHAT_FIELDS))["error"]
    assert (error["message"], error["type"]) == (message, "BadRequestError")


def test_ranges_that_vllm_allows() -> None:
    check_ranges({"temperature": 2.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": -2.0})
    check_ranges({"temperature": None, "top_p": None, "top_k": None})


@pytest.mark.parametrize("raw", [b"", b"null"])
def test_no_body(raw: bytes) -> None:
    line = {"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}
    assert refused(parse_object, raw)["error"]["message"] == f"1 validation error:\n  {line}"


def test_a_body_that_cannot_be_read_is_fastapis_to_refuse() -> None:
    assert refused(parse_object, b'{"model":"\xff"}') == {"detail": "There was an error parsing the body"}


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_json(kind: str) -> None:
    check_media_type(kind)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonl"])
def test_other_media_types(kind: str) -> None:
    error = refused(check_media_type, kind)["error"]
    text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    assert (error["message"], error["param"]) == (text, None)


def test_messages_that_are_none() -> None:
    message = refused(check_messages, {"messages": ["hi"]})["error"]["message"]
    assert message.startswith("8 validation errors:\n")
    assert message.count("dict_type") == 7
    whole = refused(check_messages, {"messages": "hi"})["error"]
    assert (whole["message"].splitlines()[0], whole["param"]) == ("1 validation error:", "body.messages")
    message = refused(check_messages, {"messages": [{"content": "x"}]})["error"]["message"]
    assert message.startswith("11 validation errors:\n")
    assert message.count("'type': 'missing'") == 10
    assert message.endswith("\n  ...and 1 more errors")


def test_negative_ids() -> None:
    message = wrong_prompt([10, -1]).message
    assert message.startswith("6 validation errors:\n  {'type': 'greater_than_equal', 'loc': 'body.prompt.1'")
    assert refused(token_ids, {"tokens": [-1]}, "tokens")["error"]["param"] == "body.tokens.0"
    assert refused(token_ids, {"tokens": "x"}, "tokens")["error"]["param"] == "body.tokens"
    assert refused(token_ids, {}, "tokens")["error"]["message"].startswith(
        "1 validation error:\n  {'type': 'missing'"
    )
    assert token_ids({"tokens": [True, "12"]}, "tokens") == [1, 12]


def test_logprobs_of_an_echoed_prompt() -> None:
    """The first token has none; with one candidate asked for, each of the others has two."""
    told = logprobs.prompt_logprobs([66, 67, 68], 1)
    assert told[0] is None
    assert [len(entry) for entry in told[1:] if entry is not None] == [2, 2]
    assert told[1] is not None
    assert told[1]["67"] == {"logprob": logprobs.SAMPLED, "rank": 1, "decoded_token": "C"}
    beside = logprobs.text_logprobs(1, 2, 1, 0, ["B", "C", "D"])
    assert [row is None for row in beside["top_logprobs"]] == [True, False, False, False, False]
    assert beside["token_logprobs"] == [None, *[logprobs.SAMPLED] * 4]
