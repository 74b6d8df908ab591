"""Anthropic's and OpenAI's newer protocol: what their bodies come to, and the events of calls that are cut short."""

import json
from typing import Any

import pytest

from gateway.mock.anthropic import MessagesStream, counted, message, parse_messages, refusal_body
from gateway.mock.bodies import Refusal
from gateway.mock.calls import Call, Server
from gateway.mock.engine import EngineConfig, Token
from gateway.mock.options import Options
from gateway.mock.progress import Extras, Progress
from gateway.mock.responses import ResponsesStream, parse_responses, response

SERVER = Server(EngineConfig(model="tiny", max_model_len=1000), Options())
USER = {"role": "user", "content": "hello there"}  # 2 tokens, 4 for the message, 3 for the reply


def ask(**fields: Any) -> Call:
    return parse_messages({"model": "tiny", "messages": [USER], "max_tokens": 5} | fields, "x", SERVER)


def respond(**fields: Any) -> Call:
    return parse_responses({"input": "hello there", "max_output_tokens": 5} | fields, "x", SERVER)


def token(number: int, *, last: bool = False) -> Token:
    return Token("1", 0, number, last)


def events(frames: list[bytes]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for frame in frames:
        name, data = frame.decode().removesuffix("\n\n").split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert document["type"] == name.removeprefix("event: ")
        found.append((document["type"], document))
    return found


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 9),
        ({"system": "be kind"}, 9 + 6),
        ({"system": [{"type": "text", "text": "be kind"}]}, 9 + 6),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]}, 9),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 7 + 256),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a b"}]}]}, 9),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "content": [{"type": "text", "text": "a b"}]}],
                    }
                ]
            },
            9,
        ),
    ],
)
def test_prompts_of_messages(fields: dict[str, Any], tokens: int) -> None:
    assert ask(**fields).prompt_tokens == tokens
    body = {"model": "tiny", "messages": [USER], **fields}
    assert counted(body, SERVER)["input_tokens"] == tokens


def test_tools_and_tool_calls_count() -> None:
    plain = ask().prompt_tokens
    assert ask(tools=[{"name": "look", "input_schema": {"type": "object"}}]).prompt_tokens > plain
    used = {"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {"at": 1}}]}
    assert ask(messages=[USER, used]).prompt_tokens > plain + 4


def test_refusals_of_messages_have_anthropics_envelope_but_for_validation() -> None:
    with pytest.raises(Refusal) as caught:
        ask(model="nope")
    assert refusal_body(caught.value) == {
        "type": "error",
        "error": {
            "type": "NotFoundError",
            "message": "The model `nope` does not exist. Valid aliases: tiny.",
        },
    }
    with pytest.raises(Refusal) as caught:
        parse_messages({}, "x", SERVER)
    assert refusal_body(caught.value)["error"]["message"].startswith("3 validation errors:")


def test_a_message_that_was_cut_short() -> None:
    stream = MessagesStream(ask(), 0)
    assert [name for name, _ in events([*stream.abort(), *stream.close()])] == ["message_stop"]
    stream = MessagesStream(ask(), 0)
    told = events([*stream.tokens([token(1)]), *stream.abort(), *stream.close()])
    names = ["message_start", "content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in told] == [*names, "message_delta", "message_stop"]
    assert told[-2][1]["delta"] == {"stop_reason": None, "stop_sequence": None}
    assert told[-2][1]["usage"] == {"input_tokens": 9, "output_tokens": 1}


def test_tokens_at_hand_come_in_one_delta() -> None:
    stream = MessagesStream(ask(), 0)
    (*_, (_, delta)) = events(stream.tokens([token(1), token(2), token(3)]))
    assert delta["delta"]["text"] == " lorem ipsum dolor"
    late = ResponsesStream(respond(), 0)
    (*_, (_, delta)) = events(late.tokens([token(1), token(2)]))
    assert delta["delta"] == " lorem ipsum"


def test_stop_reasons() -> None:
    for last, stopped, status in ((5, "max_tokens", "incomplete"), (3, "end_turn", "completed")):
        progress = Progress(ask())
        progress.see(token(last, last=True))
        assert message(progress, 0)["stop_reason"] == stopped
        progress = Progress(respond())
        progress.see(token(last, last=True))
        assert response(progress, 0)["status"] == status
    nothing = Progress(ask())
    assert "stop_reason" not in message(nothing, 0)
    assert response(Progress(respond()), 0)["status"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 9),
        ({"instructions": "be kind"}, 9 + 6),
        ({"input": [{"role": "user", "content": "hello there"}]}, 9),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello there"}]}]}, 9),
    ],
)
def test_prompts_of_responses(fields: dict[str, Any], tokens: int) -> None:
    call = respond(**fields)
    assert (call.prompt_tokens, call.limits) == (tokens, (5,))
    assert respond(**fields, max_output_tokens=None).limits == (1000 - tokens,)


@pytest.mark.parametrize("body", [{}, {"input": 5}, {"input": [5]}, {"input": "x", "model": "nope"}])
def test_refusals_of_responses(body: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        parse_responses(body, "x", SERVER)
    assert respond(input=[{"type": "function_call_output", "output": "x"}]).prompt_tokens > 7


def test_a_response_is_numbered_and_tells_what_was_asked() -> None:
    stream = ResponsesStream(respond(temperature=0.5, metadata={"a": "b"}, tools=[{"type": "x"}]), 7)
    frames = [*stream.begin(), *stream.tokens([token(1)]), *stream.tokens([token(2, last=True)])]
    told = events([*frames, *stream.close(Extras(cached_tokens=4))])
    assert [document["sequence_number"] for _, document in told] == list(range(len(told)))
    assert all(list(document) == sorted(document) for _, document in told)
    whole = told[-1][1]["response"]
    assert (whole["temperature"], whole["metadata"], whole["tool_choice"]) == (0.5, {"a": "b"}, "auto")
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert whole["output"][0]["content"][0]["text"] == " lorem ipsum"
    assert whole["output"][0]["id"] == told[2][1]["item"]["id"]


def test_a_response_that_was_cut_short_or_failed() -> None:
    stream = ResponsesStream(respond(), 7)
    told = events([*stream.begin(), *stream.abort(), *stream.close()])
    assert (told[-1][0], told[-1][1]["response"]["output"]) == ("response.completed", [])
    error = {"error": {"message": "dead", "type": "InternalServerError", "param": None, "code": 500}}
    assert events(stream.error(error))[0][1]["message"] == "dead"
    assert events(MessagesStream(ask(), 0).error(error)) == [
        ("error", {"type": "error", "error": {"type": "InternalServerError", "message": "dead"}})
    ]
