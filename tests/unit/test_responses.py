"""OpenAI's responses: what a body asks for, whose a response is and where, and what an answer says."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.media import MEDIA_TOKENS
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import (
    MESSAGE_TOKENS,
    REPLY_TOKENS,
    TOOL_TOKENS,
    PromptText,
    literal_text,
)
from gateway.core.request import Endpoint, GenerationRequest, forward, parse
from gateway.core.responses import ResponsesInspector, inspect_response, maker, new_id
from gateway.core.sse import Failure, Usage
from gateway.http.routes import find_route

ID = "resp_" + "0" * 32


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({**fields, 'type': name})}\n\n".encode()


USAGE = {"input_tokens": 8, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3}
BEGUN = {"status": "in_progress", "usage": None}
CREATED, GOING = (event(f"response.{name}", response=BEGUN) for name in ("created", "in_progress"))
ITEM = event("response.output_item.added", item={"content": []}, output_index=0)
WORD = event("response.output_text.delta", delta="pends", output_index=0)
DONE = event("response.completed", response={"status": "incomplete", "usage": USAGE})
GOOD = CREATED + GOING + ITEM + 3 * WORD + DONE


def read(**fields: Any) -> GenerationRequest | Refusal:
    body = {"model": "tiny", "input": "def foo", **fields}
    return parse(Endpoint.RESPONSES, json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), 1)


def accepted(**fields: Any) -> GenerationRequest:
    request = read(**fields)
    assert isinstance(request, GenerationRequest), request
    return request


def prompt_of(**fields: Any) -> PromptText:
    (prompt,) = accepted(**fields).prompts
    assert isinstance(prompt, PromptText)
    return prompt


def texts_of(**fields: Any) -> list[str]:
    return [text if isinstance(text, str) else literal_text(text) for text in prompt_of(**fields).texts]


# -- bodies --------------------------------------------------------------------------------------------------------


def test_the_limit_has_a_name_of_its_own() -> None:
    assert (accepted().output_limit, accepted(max_tokens=3).output_limit) == (None, None)
    assert accepted(max_output_tokens=7).output_limit == 7
    assert accepted(n=3).sequences == 1, "there is no such field here"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ...}, Code.MISSING_FIELD, "input"),
        ({"input": None}, Code.MISSING_FIELD, "input"),
        ({"input": 1}, Code.INVALID_VALUE, "input"),
        ({"input": []}, Code.INVALID_VALUE, "input"),
        ({"input": ["x"]}, Code.INVALID_VALUE, "input"),
        ({"input": [{"role": "user", "content": 1}]}, Code.INVALID_VALUE, "input"),
        ({"max_output_tokens": 0}, Code.INVALID_VALUE, "max_output_tokens"),
        ({"max_output_tokens": "9"}, Code.INVALID_VALUE, "max_output_tokens"),
        ({"background": 1}, Code.INVALID_VALUE, "background"),
        ({"background": True, "store": False}, Code.INVALID_VALUE, "background"),
        ({"previous_response_id": 1}, Code.INVALID_VALUE, "previous_response_id"),
        ({"kv_transfer_params": {}}, Code.INVALID_VALUE, "kv_transfer_params"),
        ({"stream": 1}, Code.INVALID_VALUE, "stream"),
        ({"store": "no"}, Code.INVALID_VALUE, "store"),
    ],
)
def test_refusals(fields: dict[str, Any], code: Code, param: str) -> None:
    refusal = read(**fields)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (code, param)


def test_the_prompt_is_a_conversation() -> None:
    prompt = prompt_of(instructions="Be brief.", input="def foo")
    assert texts_of(instructions="Be brief.", input="def foo") == ["Be brief.", "def foo"]
    assert prompt.fixed_tokens == REPLY_TOKENS + 2 * MESSAGE_TOKENS


def test_every_item_counts() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:xx"}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": "{}",
            "id": "fc",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x" * 99},
    ]
    texts = texts_of(input=items)
    assert [text for text in texts if text not in ("c1", "c2")] == ["look", "f", "{}", "12", "13", "[]"]
    wanted = REPLY_TOKENS + 6 * MESSAGE_TOKENS + MEDIA_TOKENS + TOOL_TOKENS + 1  # a call has a name
    assert prompt_of(input=items).fixed_tokens == wanted


def test_what_the_engine_remembers_counts() -> None:
    request = accepted(previous_response_id=ID)
    assert request.response_id == ID
    (plain,), (longer,) = request.prompts, request.after(1000).prompts
    assert isinstance(plain, PromptText)
    assert isinstance(longer, PromptText)
    assert (longer.fixed_tokens - plain.fixed_tokens, longer.texts) == (1000, plain.texts)
    assert (request.after(1000).body, request.after(1000).id_edit) == (request.body, request.id_edit)


def test_tools_and_formats_count() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    format_ = {"type": "json_schema", "name": "s", "schema": {}}
    more = prompt_of(tools=[tool], text={"format": format_}).fixed_tokens - prompt_of().fixed_tokens
    assert more == TOOL_TOKENS
    assert len(texts_of(tools=[tool], text={"format": format_})) == 3


def test_what_is_cut_to_the_context() -> None:
    assert accepted(truncation="auto").truncate_prompt_tokens == -1
    assert accepted(truncation="disabled").truncate_prompt_tokens is None


@pytest.mark.parametrize(
    ("body", "forwarded"),
    [
        ({}, {"max_output_tokens": 5, "request_id": ID}),
        (
            {"max_output_tokens": 9, "stream": True},
            {"max_output_tokens": 5, "stream": True, "request_id": ID},
        ),
        ({"request_id": "mine", "store": True}, {"request_id": ID, "store": True, "max_output_tokens": 5}),
        ({"store": None}, {"store": None, "max_output_tokens": 5, "request_id": ID}),
        (
            {"store": False, "request_id": "mine"},
            {"store": False, "request_id": "mine", "max_output_tokens": 5},
        ),
    ],
)
def test_the_limit_and_the_id_are_written(body: dict[str, Any], forwarded: dict[str, Any]) -> None:
    sent = forward(accepted(**body), 5, ID)
    assert json.loads(sent) == {"model": "tiny", "input": "def foo", **forwarded}
    assert list(json.loads(sent)) == ["model", "input", *forwarded]


# -- ids -----------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=20)
RANDOM = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")


@given(RANDOM, st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=5, unique=True), NAMES, NAMES)
def test_an_id_leads_back_for_its_own_key_alone(
    random: str, places: list[tuple[str, str]], key: str, other: str
) -> None:
    """Replicas of two fleets may have one name."""
    made = new_id(random, places[-1], key)
    assert maker(made, key, places) == places[-1]
    assert maker(made, key, places[:-1]) is None
    assert maker(made, other, places) == (places[-1] if other == key else None)
    assert find_route(f"/v1/responses/{made}".encode(), []) is not None


@pytest.mark.parametrize(
    "other", ["", "resp_", "resp_a64f43d4de3d21a7", ID.upper(), ID + "0", "x" + ID, ID + "\n"]
)
def test_what_is_no_id_of_ours_leads_nowhere(other: str) -> None:
    assert maker(other, "key", [("f", "a")]) is None


def test_ids_of_one_key_have_nothing_in_common() -> None:
    one, two = new_id("0" * 16, ("f", "a"), "key"), new_id("1" * 16, ("f", "b"), "key")
    assert one[-16:-8] != two[-16:-8]
    assert one[-8:] != two[-8:]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"/v1/responses/{ID}", "/v1/responses/{id}"),
        (f"/v1/responses/{ID}/cancel", "/v1/responses/{id}/cancel"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/", None),
        (f"/v1/responses/{ID}/", None),
        (f"/v1/responses/{ID}/input_items", None),
        (f"/v1/responses/{ID}/cancel/", None),
        ("/v1/responses/../admin", None),
        ("/v1/responses/a%2fb", None),
    ],
)
def test_the_paths_of_responses(path: str, name: str | None) -> None:
    route = find_route(path.encode(), [])
    assert (route.name if route else None) == name


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "usage", "failure"),
    [
        ({"status": "incomplete", "usage": USAGE}, Usage(8, 3, 5), None),
        ({"status": "completed", "usage": {"input_tokens": 8, "output_tokens": 1}}, Usage(8, 1), None),
        ({"status": "completed", "usage": None, "error": None}, None, None),
        ({"status": "completed", "usage": {"input_tokens": -1}}, None, None),
        ({"status": "cancelled", "usage": USAGE}, Usage(8, 3, 5), Failure.ABORTED),
        ({"status": "failed"}, None, Failure.ERROR),
        ({"error": {"message": "?"}}, None, Failure.ERROR),
        ([], None, Failure.NOT_JSON),
    ],
)
def test_a_whole_answer(body: Any, usage: Usage | None, failure: Failure | None) -> None:
    facts = inspect_response(json.dumps(body).encode())
    assert (facts.usage, facts.failure) == (usage, failure)


def test_a_stream_passes_whole() -> None:
    inspector = ResponsesInspector()
    assert inspector.feed(GOOD) + inspector.finish() == GOOD
    assert (inspector.done, inspector.failure, inspector.events) == (True, None, 3)
    assert inspector.usage == Usage(8, 3, 5)


def test_what_the_engine_repeats_begins_nothing() -> None:
    """It is written before the engine has looked at the call."""
    inspector = ResponsesInspector()
    assert inspector.feed(CREATED + GOING) == CREATED + GOING
    assert not inspector.started
    inspector.feed(ITEM)
    assert inspector.started
    assert len(CREATED + GOING) < inspector.opening_bytes_max


EMPTY = event(
    "response.completed",
    response={"status": "completed", "output": [], "usage": {"input_tokens": 8, "output_tokens": 0}},
)
SILENT = event(
    "response.completed",
    response={"status": "completed", "output": [], "usage": {"input_tokens": 8, "output_tokens": 1}},
)
CANCELLED = event("response.completed", response={"status": "cancelled", "usage": USAGE})


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (CREATED + EMPTY, Failure.EMPTY),
        (CREATED + SILENT, None),
        (CREATED + ITEM + CANCELLED, Failure.ABORTED),
        (CREATED + event("response.failed", response={"status": "failed", "error": {}}), Failure.ERROR),
        (CREATED + ITEM + event("error", code="500", message="it failed"), Failure.ERROR),
        (CREATED + b'data: {"error": {"message": "it failed"}}\n\n', Failure.ERROR),
        (CREATED + ITEM + WORD, Failure.UNFINISHED),
        (CREATED, Failure.UNFINISHED),
    ],
)  # fmt: skip
def test_how_a_stream_fails(stream: bytes, failure: Failure | None) -> None:
    inspector = ResponsesInspector()
    inspector.feed(stream)
    inspector.finish()
    assert inspector.failure is failure
    assert inspector.relayable_failure == b""


@given(st.lists(st.integers(0, len(GOOD)), max_size=8))
@settings(max_examples=50)
def test_cuts_change_nothing(cuts: list[int]) -> None:
    inspector = ResponsesInspector()
    places = [0, *sorted(cuts), len(GOOD)]
    passed = b"".join(inspector.feed(GOOD[start:end]) for start, end in pairwise(places))
    assert passed + inspector.finish() == GOOD
    assert (inspector.failure, inspector.events, inspector.usage) == (None, 3, Usage(8, 3, 5))
