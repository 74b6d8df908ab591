"""Answers of a vLLM, in every cut, and what is wrong with those that only look right."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.loadtest.answers import EVENT_BYTES_MAX, BadAnswer, EventStream, WholeAnswer, error_code

HEAD = b'data: {"id":"chatcmpl-97","object":"chat.completion.chunk","created":1,"model":"tiny",'
ROLE = HEAD + (
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
)
WORD = HEAD + (
    b'"choices":[{"index":0,"delta":{"content":"ial"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
LAST = WORD.replace(b'"finish_reason":null', b'"finish_reason":"length"')
ABORT = WORD.replace(b'"finish_reason":null', b'"finish_reason":"abort"').replace(b"ial", b"")
USAGE = HEAD + b'"choices":[],"usage":{"prompt_tokens":11,"total_tokens":18,"completion_tokens":7}}\n\n'
ERROR = b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\n'
TEXT = (
    b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" lorem","logprobs":null,"finish_reason":null}]}\n\n'
)
QUOTED = WORD.replace(b'"ial"', rb'"say \"error\" or \"finish_reason\":\"stop\""')
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
GOOD = ROLE + COMMENT + WORD + QUOTED + WORD + LAST + USAGE + DONE


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(GOOD)), max_size=12))
def test_a_good_stream_is_right_in_every_cut(cuts: list[int]) -> None:
    stream, edges = EventStream(), [0, *sorted(cuts), len(GOOD)]

    events = sum(stream.feed(GOOD[a:b]) for a, b in pairwise(edges))

    assert events == 4
    assert stream.problem() == ""
    assert stream.usage_tokens == 7


@pytest.mark.parametrize(
    ("answer", "problem", "events"),
    [
        (ROLE + WORD + LAST + DONE, "", 2),
        (TEXT + TEXT.replace(b"null}]", b'"stop"}]') + DONE, "", 2),
        (ROLE + WORD + LAST, "ended_before_done", 2),
        (ROLE + WORD, "ended_before_done", 1),
        (b"", "ended_before_done", 0),
        (DONE, "done_without_choices", 0),
        (ROLE + DONE, "done_without_choices", 0),
        (ROLE + WORD + DONE, "done_before_finish", 1),
        (ROLE + WORD + ABORT + DONE, "finish_abort", 1),
        (ROLE + WORD + ERROR + DONE, "error_event", 1),
        (ERROR + DONE, "error_event", 0),
        (ROLE + WORD + LAST + ERROR + DONE, "error_event", 2),
        (
            ROLE + WORD + WORD.replace(b'"choices"', b'"error":{"code":500},"choices"') + LAST + DONE,
            "error_event",
            3,
        ),
    ],
)
def test_what_a_stream_amounts_to(answer: bytes, problem: str, events: int) -> None:
    stream = EventStream()

    assert stream.feed(answer) == events
    assert stream.problem() == problem


def test_usage_in_every_event_counts_what_a_cut_stream_had_given() -> None:
    running = WORD.replace(b"]}", b'],"usage":{"prompt_tokens":1,"total_tokens":5,"completion_tokens":4}}')
    stream = EventStream()

    assert stream.feed(ROLE + WORD + running) == 2
    assert stream.usage_tokens == 4


def test_json_with_blanks_is_read_too() -> None:
    def frame(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    word = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    last = {
        "choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 5},
    }
    stream = EventStream()

    assert stream.feed(frame(word) + frame(word) + frame(last) + DONE) == 3
    assert (stream.problem(), stream.usage_tokens) == ("", 5)


@pytest.mark.parametrize("junk", [b"data: {]\n\n", b"data: 7\n\n", b"data: \x00\xff\n\n"])
def test_junk_is_a_bad_answer(junk: bytes) -> None:
    with pytest.raises(BadAnswer, match="event_not_json"):
        EventStream().feed(ROLE + junk)


def test_an_event_has_a_bound() -> None:
    with pytest.raises(BadAnswer, match="event_too_long"):
        EventStream().feed(b"data: " + b"x" * EVENT_BYTES_MAX)


@pytest.mark.parametrize(
    ("answer", "problem", "tokens"),
    [
        ({"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 3}}, "", 3),
        ({"choices": [{"finish_reason": "abort"}], "usage": {"completion_tokens": 0}}, "finish_abort", 0),
        ({"choices": [{}]}, "finish_None", None),
        ({"choices": []}, "answer_without_choices", None),
        ({"error": {"code": 500}}, "error_answer", None),
    ],
)
def test_what_a_whole_answer_amounts_to(answer: dict[str, Any], problem: str, tokens: int | None) -> None:
    whole, raw = WholeAnswer(), json.dumps(answer).encode()

    assert whole.feed(raw[:5]) + whole.feed(raw[5:]) == 0
    assert (whole.problem(), whole.usage_tokens) == (problem, tokens)


def test_a_whole_answer_that_is_no_json() -> None:
    whole = WholeAnswer()
    whole.feed(b"<html>")

    with pytest.raises(BadAnswer, match="answer_not_json"):
        whole.problem()


@pytest.mark.parametrize(
    ("status", "header", "body", "code"),
    [
        (429, "queue_full", b"{}", "429 queue_full"),
        (400, "", b'{"error":{"code":"invalid_value"}}', "400 invalid_value"),
        (503, "", b'{"error":{"type":"Service Unavailable","code":503}}', "503 Service Unavailable"),
        (500, "", b'{"error":"text"}', "500"),
        (502, "", b"<html>", "502"),
        (404, "", b'{"detail":"Not Found"}', "404"),
        (418, "", b"[]", "418"),
    ],
)
def test_a_refusal_is_counted_by_status_and_code(status: int, header: str, body: bytes, code: str) -> None:
    assert error_code(status, header, body) == code


def test_lines_may_end_with_cr_lf_however_they_are_cut() -> None:
    whole = (
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    for cut in range(len(whole)):
        stream = EventStream()
        assert stream.feed(whole[:cut]) + stream.feed(whole[cut:]) == 2
        assert stream.problem() == ""


@pytest.mark.parametrize(
    "choice", ['"text"', '{"delta":"text"}', '{"finish_reason":["stop"]}', '{"finish_reason":7}']
)
def test_an_event_of_another_shape_is_a_bad_answer(choice: str) -> None:
    with pytest.raises(BadAnswer):
        EventStream().feed(f'data: {{"choices":[{choice}]}}\n\n'.encode())


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"choices":["text"]}', b'{"choices":[{"finish_reason":[]}]}']
)
def test_a_whole_answer_of_another_shape_is_a_bad_answer(body: bytes) -> None:
    answer = WholeAnswer()
    answer.feed(body)
    with pytest.raises(BadAnswer):
        answer.problem()
