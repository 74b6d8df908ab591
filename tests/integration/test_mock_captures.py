"""The mock against everything that was recorded from a real vLLM 0.32.0: the same requests, the same answers.

A capture that has nothing to do with what the mock is for is not in `tests/fixtures/vllm`; one that is there and
cannot be repeated is in `NOT_REPEATED`, one that is repeated with an allowance in `ALLOWED`, each with its reason.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.integration.captured import (
    FOLDER,
    LINE_CHARS_MAX,
    Capture,
    Reply,
    difference,
    events,
    ids,
    load,
    repeat,
    tens,
)
from tests.processes import Mock

ENGINE = ("--model", "model", "--served-model-name", "tiny", "--block-size", "32", "--blocks", "256")
ENGINE += ("--max-model-len", "4096", "--speed", "inf", "--enable-request-id-headers")

NOT_REPEATED = {
    "get_tokenizer_info": "recorded with the flag that opens it; it describes the real tokenizer",
    "dev_chat_render": "recorded with --enable-scale-out, which the mock does not have",
    "dev_comp_render": "the same",
    "dev_generate": "the same",
    "dev_generate_stream": "the same",
    "dev_abort": "the same",
    "dev_get_kv_event_sources": "recorded with a publisher of KV events, which the mock does not have",
    "dev_get_weight_info": "a route of weight transfer, which the mock does not have",
    # Told in prose, and asserted in test_mock_failures.py.
    "limits": "",
    "drain_newreq": "",
}
SERIES = ["dev_comp1", "dev_comp2_hit", "dev_comp3_salt", "dev_comp4_stream", "dev_prio", "dev_chat_stream"]
"""Recorded one after the other on one server, so that the second one meets the blocks of the first."""
STORED = ["responses_stored", "responses_get", "responses_cancel_sync"]
"""The same of a server that stores responses."""
POOLING, CLASSIFYING = "pool_", "classify_"
"""Beginnings of the names of captures from models that pool, once converted to embed, once to classify."""
DEV = [
    *("dev_get_is_paused", "dev_get_is_sleeping", "dev_pause", "dev_resume", "dev_sleep", "dev_wake"),
    "dev_reset_prefix",
]
PATHS = {
    "dev_get_is_paused": ("GET", "/is_paused"),
    "dev_get_is_sleeping": ("GET", "/is_sleeping"),
    "options_chat": ("OPTIONS", "/v1/chat/completions"),
}
"""Requests that the recording noted in other words."""
HEADERS = {"options_chat": [("origin", "http://x"), ("access-control-request-method", "POST")]}
EMBEDDED_TOO_LONG = {"model": "tiny", "input": [[10] * 4097]}
IDS = re.compile(rb'"(prompt|input)":\s*\[[\s\[]*[0-9]')
STORED_BODY = {"model": "tiny", "input": "def foo", "max_output_tokens": 4, "ignore_eos": True}
LONG_TEXT = "def foo " * 4000
MESSAGES = [{"role": "user", "content": LONG_TEXT}]
BODIES = {
    "err_prompt_too_long_ids": tens(5000, max_tokens=3),
    "err_prompt_too_long_chat": json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 3}).encode(),
    "err_prompt_too_long_chat_stream": json.dumps(
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    ).encode(),
    "err_prompt_too_long_comp_text": json.dumps(
        {"model": "tiny", "prompt": LONG_TEXT, "max_tokens": 3}
    ).encode(),
    "ok_prompt_plus_max_exact": tens(4080, max_tokens=16, ignore_eos=True),
    "err_prompt_plus_max_exact1": tens(4080, max_tokens=17, ignore_eos=True),
    "edge_prompt_4095_nomax": tens(4095, ignore_eos=True),
    "edge_prompt_4096": tens(4096, max_tokens=1),
    "err_truncate": tens(5000, max_tokens=3, truncate_prompt_tokens=100),
    "dev_comp1": ids(range(10, 110), echo=True, max_tokens=3),
    "dev_comp2_hit": ids(range(10, 110), echo=True, max_tokens=3),
    "dev_comp3_salt": ids(range(10, 110), echo=True, max_tokens=3, cache_salt="a"),
    "dev_comp4_stream": ids(
        range(10, 110), echo=True, max_tokens=2, stream=True, stream_options={"include_usage": True}
    ),
    "dev_prio": ids(range(10, 110), echo=True, max_tokens=2, priority=5),
    "responses_stored": json.dumps({**STORED_BODY, "request_id": "resp_ad1a2aec563b735a"}).encode(),
    "responses_trunc": json.dumps(
        {"model": "tiny", "input": LONG_TEXT, "truncation": "auto", "max_output_tokens": 2}
    ).encode(),
    "pool_embed_full": json.dumps({"model": "tiny", "input": [[10] * 4096]}).encode(),
    "pool_embed_too_long": json.dumps(EMBEDDED_TOO_LONG).encode(),
    "pool_embed_too_long_cut": json.dumps({**EMBEDDED_TOO_LONG, "truncate_prompt_tokens": -1}).encode(),
    # The mock's vocabulary is larger than that of the recorded model.
    "comp_prompt_ids_oov": b'{"model":"tiny","prompt":[10,281474976710656],"max_tokens":3}',
    "pool_embed_oov": b'{"model":"tiny","input":[10,281474976710656]}',
}
"""Bodies that the recording cut, in full."""
ALLOWED = {
    "err_max_tokens_too_big_chat": {
        "finish_reason",
        "completion_tokens",
    },  # the recorded model came to an end
    "chat_default_max": {"completion_tokens"},  # what the prompt leaves of the context
    "err_max_tokens_too_big_comp": {"completion_tokens"},
    "comp_prompt_ids_oov": {"message"},  # names the other id
    "pool_embed_oov": {"message"},
    "responses_trunc": {"cached_tokens", "cache_write_tokens"},  # other captures have the same beginning
    "dev_comp4_stream": {"prompt_token_ids"},  # null although it echoes: asked for otherwise than is known
}
FIRST_TOKEN_LOST = {"responses_stream"}
"""Streams in which a token of the real tokenizer ended in half a character and so came with the next one."""


def names() -> list[str]:
    found = {path.stem for path in FOLDER.glob("*.txt") if not path.stem.startswith("metrics_")}
    return sorted(found - {*NOT_REPEATED, *SERIES, *STORED, *DEV})


def names_of(kind: str) -> list[str]:
    return [name for name in names() if name.startswith(kind)]


def names_of_generating() -> list[str]:
    return [name for name in names() if not name.startswith((POOLING, CLASSIFYING))]


def capture_of(name: str) -> Capture:
    capture = load(name)
    method, path = PATHS.get(name, (capture.method, capture.path))
    body = BODIES.get(name, capture.body)
    assert len(body) < LINE_CHARS_MAX or name in BODIES
    headers = HEADERS.get(name, capture.headers)
    return dataclasses.replace(capture, method=method, path=path, body=body, headers=headers)


@pytest.fixture(scope="module")
def plain() -> Iterator[Mock]:
    mock = Mock(*ENGINE)
    yield mock
    mock.stop()


@pytest.fixture(scope="module")
def embedding() -> Iterator[Mock]:
    mock = Mock(*ENGINE, "--runner", "pooling")
    yield mock
    mock.stop()


@pytest.fixture(scope="module")
def classifying() -> Iterator[Mock]:
    mock = Mock(*ENGINE, "--runner", "pooling", "--convert", "classify")
    yield mock
    mock.stop()


@pytest.fixture
def developed() -> Iterator[Mock]:
    more = ("--speed", "1", "--dev-mode", "--enable-prompt-tokens-details", "--enable-per-request-metrics")
    mock = Mock(*ENGINE, *more)
    yield mock
    mock.stop()


@pytest.mark.parametrize("name", names_of_generating())
def test_the_mock_answers_as_vllm_did(plain: Mock, name: str) -> None:
    compare(capture_of(name), plain.url)


@pytest.mark.parametrize("name", names_of(POOLING))
def test_the_mock_embeds_as_vllm_did(embedding: Mock, name: str) -> None:
    compare(capture_of(name), embedding.url)


@pytest.mark.parametrize("name", names_of(CLASSIFYING))
def test_the_mock_classifies_as_vllm_did(classifying: Mock, name: str) -> None:
    compare(capture_of(name), classifying.url)


def test_prefix_hits_and_figures_of_one_call_after_the_other(developed: Mock) -> None:
    for name in SERIES:
        compare(capture_of(name), developed.url)


def test_a_response_that_is_asked_for_again() -> None:
    mock = Mock(*ENGINE, "--responses-store")
    try:
        for name in STORED:
            compare(capture_of(name), mock.url)
    finally:
        mock.stop()


def test_the_routes_of_the_dev_mode(developed: Mock) -> None:
    for name in DEV:
        compare(capture_of(name), developed.url)


def test_every_capture_is_accounted_for() -> None:
    known = {*names(), *NOT_REPEATED, *SERIES, *STORED, *DEV}
    assert {path.stem for path in FOLDER.glob("*.txt") if not path.stem.startswith("metrics_")} == known
    assert {*PATHS, *HEADERS, *BODIES, *ALLOWED} <= known


def compare(capture: Capture, url: str) -> None:
    expected, actual = capture.reply, repeat(capture, url)
    assert actual.status == expected.status
    assert actual.names == expected.names
    for (name, value), (_, other) in zip(expected.headers, actual.headers, strict=True):
        check_header(name, value, other, capture)
    text_prompt = not IDS.search(capture.body)
    allowed = ALLOWED.get(capture.name, set())
    if expected.chunked:
        compare_streams(expected, actual, text_prompt, allowed, capture.name in FIRST_TOKEN_LOST)
    elif ("content-type", "application/json") in expected.headers and expected.body:
        found = difference(
            without(json.loads(expected.body), allowed),
            without(json.loads(actual.body), allowed),
            text_prompt=text_prompt,
        )
        assert found == ""
        assert b": " not in actual.body or b'"message":"' in actual.body, "written without blanks"
    else:
        assert actual.body == expected.body


def check_header(name: str, value: str, other: str, capture: Capture) -> None:
    if name == "x-request-id" and value not in dict(capture.headers).values():
        assert len(bytes.fromhex(other)) == 16
    elif name == "endpoint-load-metrics":
        assert other.split(" ", 1)[0] == value.split(" ", 1)[0]
        assert [part for part in other if not part.isdecimal()] == [c for c in value if not c.isdecimal()]
    elif name not in ("date", "content-length", "x-request-id"):
        assert other == value
    elif name == "content-length" and capture.reply.status.split(" ")[1] != "200":
        assert other == value or capture.name in ALLOWED


def compare_streams(
    expected: Reply, actual: Reply, text_prompt: bool, allowed: set[str], lost_one: bool
) -> None:
    """One event a chunk, and for each choice the same events; how choices interleave is the engine's affair."""
    assert all(len(events(piece)) == 1 for piece in actual.pieces)
    wanted = [events(piece)[0] for piece in expected.pieces]
    got = [events(piece)[0] for piece in actual.pieces]
    if lost_one:
        wanted, got = collapsed(wanted), collapsed(got)
    assert [kind(event) for event in sorted(wanted, key=choice)] == [
        kind(event) for event in sorted(got, key=choice)
    ]
    for one, other in zip(sorted(wanted, key=choice), sorted(got, key=choice), strict=True):
        assert one[0] == other[0]
        found = difference(without(one[1], allowed), without(other[1], allowed), text_prompt=text_prompt)
        assert found == ""
    roles = [event for event in got if kind(event) == "role"]
    assert got[: len(roles)] == roles
    assert [kind(event) for event in got[-2:]] == [kind(event) for event in wanted[-2:]]


def kind(event: tuple[str, Any]) -> str:
    name, document = event
    if name or document == "[DONE]":
        return name or "done"
    if not document["choices"]:
        return "usage"
    return "role" if "role" in document["choices"][0].get("delta", {}) else "text"


def choice(event: tuple[str, Any]) -> tuple[int, int]:
    """Events that are of no choice keep their place at the end."""
    name, document = event
    if name:
        return (0, 0)
    if document == "[DONE]":
        return (2, 0)
    return (0, document["choices"][0]["index"]) if document["choices"] else (1, 0)


def collapsed(stream: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """One of several deltas in a row, all with the same sequence number, once they are known to count."""
    assert [document["sequence_number"] for _, document in stream] == list(range(len(stream)))
    first = [next(group) for _, group in groupby(stream, key=lambda event: event[0])]
    return [(name, {**document, "sequence_number": 0}) for name, document in first]


def without(document: Any, keys: set[str]) -> Any:
    if isinstance(document, dict):
        return {name: without(value, keys) for name, value in document.items() if name not in keys}
    return [without(item, keys) for item in document] if isinstance(document, list) else document
