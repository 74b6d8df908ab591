"""The inspector on streams as vLLM 0.32 sends them, in every cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.sse import Failure, StreamInspector, Usage, inspect_answer

HEAD = b'data: {"id":"chatcmpl-97ba3ce9f35753cb","object":"chat.completion.chunk","created":1795958082,"model":"tiny",'
ROLE = HEAD + (
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null}\n\n'
)
WORD = HEAD + (
    b'"choices":[{"index":0,"delta":{"content":"ial"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
LAST = HEAD + (
    b'"choices":[{"index":0,"delta":{"content":"ial"},"logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null,"token_ids":null}]}\n\n'
)
ABORT = LAST.replace(b'"length"', b'"abort"')
USAGE = HEAD + (
    b'"choices":[],"usage":{"prompt_tokens":11,"total_tokens":16,"completion_tokens":5},'
    b'"system_fingerprint":"vllm-0.32.0-8bb81094"}\n\n'
)
CONTINUOUS = WORD.replace(
    b"}]}\n\n",
    b'}],"usage":{"prompt_tokens":11,"total_tokens":13,"completion_tokens":2,"completion_tokens_details":null}}\n\n',
)
ERROR = (
    b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError",'
    b'"param":null,"code":500}}\n\n'
)
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
# U+2028, U+2029, U+0085 raw, VT and FF escaped, a literal backslash-n: none of them ends a line.
UNICODE = WORD.replace(b'"ial"', '"a\u2028b\u2029c\u0085d\\u000b\\u000ce\\n\\n🙂"'.encode())
WORDY = (
    WORD.replace(b'"ial"', b'"usage"')
    + WORD.replace(b'"ial"', b'"error"')
    + WORD.replace(b'"ial"', b'"abort"')
)

GOOD = COMMENT + ROLE + WORD + COMMENT + UNICODE + WORDY + LAST + USAGE + DONE


def run(stream: bytes, cuts: list[int], **options: bool) -> tuple[bytes, StreamInspector]:
    inspector = StreamInspector(**options)  # type: ignore[arg-type]
    edges = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    forwarded = b"".join(inspector.feed(stream[a:b]) for a, b in pairwise(edges))
    return forwarded + inspector.finish(), inspector


def facts(inspector: StreamInspector) -> tuple[object, ...]:
    return (
        inspector.started,
        inspector.usage,
        inspector.events,
        inspector.done,
        inspector.failure,
        inspector.failure_bytes,
        inspector.relayable_failure,
    )


STREAMS = {
    "good": GOOD,
    "crlf": GOOD.replace(b"\n", b"\r\n"),
    "mixed ends": (WORD + USAGE).replace(b"\n\n", b"\n\r\n") + WORD.replace(b"\n\n", b"\r\n\n") + DONE,
    "continuous": ROLE + CONTINUOUS + LAST + USAGE + DONE,
    "error later": ROLE + WORD + ERROR + DONE,
    "error first": COMMENT + ERROR + DONE,
    "abort": ROLE + WORD + ABORT + USAGE + DONE,
    "only done": DONE,
    "empty with usage": USAGE + DONE,
    "cut": ROLE + WORD + WORD[:40],
    "no blank line at the end": ROLE + b"data: [DONE]",
    "two data lines": b'event: x\ndata: {"choices":\ndata: [{"index":0}]}\nid: 1\n\n' + DONE,
    "too long after an error": ERROR + b"data: " + b"x" * 5_000 + b"\n\n" + DONE,
    "too long": ROLE + b"data: " + b"x" * 5_000 + b"\n\n" + DONE,
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_outcome_is_the_same_for_single_bytes(name: str) -> None:
    stream = STREAMS[name]
    check_cuts(name, True, list(range(len(stream))))


@settings(max_examples=200)
@given(st.sampled_from(sorted(STREAMS)), st.booleans(), st.lists(st.integers(0, len(GOOD)), max_size=12))
def test_the_outcome_does_not_depend_on_the_cuts(name: str, drop_usage: bool, cuts: list[int]) -> None:
    check_cuts(name, drop_usage, cuts)


def check_cuts(name: str, drop_usage: bool, cuts: list[int]) -> None:
    options = {"drop_usage": drop_usage, "event_bytes_max": 1_000}
    whole, inspector = run(STREAMS[name], [], **options)  # type: ignore[arg-type]
    cut, other = run(STREAMS[name], cuts, **options)  # type: ignore[arg-type]
    assert cut == whole
    assert facts(other) == facts(inspector)


@pytest.mark.parametrize(
    "name", ["good", "crlf", "mixed ends", "continuous", "no blank line at the end", "two data lines"]
)
def test_a_good_stream_passes_byte_for_byte(name: str) -> None:
    forwarded, inspector = run(STREAMS[name], [])
    assert forwarded == STREAMS[name]
    assert inspector.failure is None
    assert inspector.started
    assert inspector.done


def test_an_undivided_chunk_is_not_copied() -> None:
    assert StreamInspector(drop_usage=True).feed(WORD) is WORD


def test_a_plain_event_is_noted_without_being_cut_out() -> None:
    inspector = StreamInspector()
    assert inspector.passes(b"<" + WORD + b">", 1, 1 + len(WORD))
    assert (inspector.started, inspector.events, inspector.failure) == (True, 1, None)


@pytest.mark.parametrize(
    "event",
    [
        ROLE[:-1] + b"x",
        ROLE[:-1],
        ROLE[:40],
        ROLE + WORD,
        COMMENT,
        USAGE,
        CONTINUOUS,
        LAST,
        ABORT,
        ERROR,
        DONE,
    ],
)
def test_nothing_is_noted_of_any_other(event: bytes) -> None:
    """The first is JSON over two lines, of which one is data."""
    inspector = StreamInspector()
    assert not inspector.passes(event, 0, len(event))
    assert facts(inspector) == facts(StreamInspector())


@pytest.mark.parametrize(
    "before", [ERROR, WORD[:40], b"x" * 1_001], ids=["failure", "half an event", "too long"]
)
def test_no_event_passes_by_what_is_held(before: bytes) -> None:
    inspector = StreamInspector(event_bytes_max=1_000)
    inspector.feed(before)
    assert not inspector.passes(WORD, 0, len(WORD))


def test_an_event_that_is_too_long_does_not_pass() -> None:
    assert not StreamInspector(event_bytes_max=len(WORD) - 1).passes(WORD, 0, len(WORD))


def test_facts_of_a_good_stream() -> None:
    _, inspector = run(GOOD, [])
    assert inspector.usage == Usage(prompt_tokens=11, completion_tokens=5)
    assert inspector.events == 7


def test_only_the_usage_event_is_dropped() -> None:
    forwarded, inspector = run(GOOD, [], drop_usage=True)
    assert forwarded == GOOD.replace(USAGE, b"")
    assert inspector.usage == Usage(11, 5)


def test_usage_inside_a_choice_is_counted_and_kept() -> None:
    forwarded, inspector = run(ROLE + CONTINUOUS + DONE, [], drop_usage=True)
    assert CONTINUOUS in forwarded
    assert inspector.usage == Usage(11, 2)
    assert inspector.events == 2


def test_only_whole_events_are_passed_on() -> None:
    inspector = StreamInspector()
    assert inspector.feed(ROLE + WORD[:50]) == ROLE
    assert inspector.feed(WORD[50:-1]) == b""
    assert inspector.feed(WORD[-1:]) == WORD


def test_comments_pass_and_are_no_start() -> None:
    inspector = StreamInspector()
    assert inspector.feed(COMMENT) == COMMENT
    assert not inspector.started
    inspector.feed(ROLE)
    assert inspector.started


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (ERROR + DONE, Failure.ERROR),
        (b'data: {"object":"error","message":"m","type":"t","code":500}\n\n' + DONE, Failure.ERROR),
        (b'data: {"error" : "half a pair: \\ud83d"}\n\n' + DONE, Failure.ERROR),
        (ABORT + DONE, Failure.ABORTED),
        (ABORT.replace(b'reason":"', b'reason" :  "') + DONE, Failure.ABORTED),
        (ABORT.replace(b'"logprobs":null', b'"logprobs":-Infinity') + DONE, Failure.ABORTED),
        (DONE, Failure.EMPTY),
        (COMMENT + DONE, Failure.EMPTY),
        (USAGE + DONE, Failure.EMPTY),
        (b"", Failure.UNFINISHED),
        (WORD[:-1], Failure.UNFINISHED),
        (b"<html>not a stream</html>", Failure.UNFINISHED),
    ],
)
def test_a_failure_before_anything_is_forwarded(stream: bytes, failure: Failure) -> None:
    forwarded, inspector = run(stream, [])
    assert forwarded.replace(COMMENT, b"") == b""
    assert inspector.failure is failure
    assert not inspector.started or failure is Failure.UNFINISHED


def test_events_before_a_failure_in_the_same_chunk_are_passed_on() -> None:
    inspector = StreamInspector()
    assert inspector.feed(ROLE + WORD + ERROR + DONE) == ROLE + WORD
    assert inspector.failure is Failure.ERROR
    assert inspector.failure_bytes == ERROR + DONE
    assert inspector.relayable_failure == ERROR + DONE
    assert inspector.feed(WORD) == b""


def test_an_error_event_is_closed_with_done_where_the_engine_has_not_yet() -> None:
    inspector = StreamInspector()
    inspector.feed(ROLE + ERROR)
    assert inspector.relayable_failure == ERROR + DONE


def test_only_the_engines_own_error_is_relayed() -> None:
    inspector = StreamInspector()
    assert inspector.feed(ROLE + ABORT + USAGE + DONE) == ROLE
    assert inspector.relayable_failure == b""
    assert inspector.usage == Usage(11, 5)


def test_a_stream_without_done_is_unfinished_and_its_half_event_is_not_passed_on() -> None:
    forwarded, inspector = run(ROLE + WORD + WORD[:-1], [])
    assert forwarded == ROLE + WORD
    assert inspector.failure is Failure.UNFINISHED


def test_an_event_without_end_is_given_up_at_the_bound() -> None:
    inspector = StreamInspector(event_bytes_max=100)
    assert inspector.feed(b"data: " + b"x" * 94) == b""
    assert inspector.failure is None
    inspector.feed(b"x")
    assert inspector.failure is Failure.EVENT_TOO_LONG
    assert inspector.relayable_failure == b""


def test_what_follows_a_failure_is_bounded() -> None:
    inspector = StreamInspector(event_bytes_max=1_000)
    for _ in range(100):
        inspector.feed(ERROR)
    assert len(inspector.failure_bytes) <= 2_000


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_garbage_passes_in_any_cut_and_never_raises(garbage: bytes, cuts: list[int]) -> None:
    whole, inspector = run(garbage, [])
    cut, other = run(garbage, cuts)
    assert cut == whole
    assert facts(other) == facts(inspector)


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": -1}, {"prompt_tokens": 2**53}, {"prompt_tokens": "7"}, None, 5]
)
def test_unbelievable_usage_is_no_usage(usage: object) -> None:
    body = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": usage}).encode()
    assert inspect_answer(body).usage is None
    assert inspect_answer(body).failure is None
    _, inspector = run(b"data: " + body + b"\n\n" + DONE, [])
    assert inspector.usage is None
    assert inspector.events == 1


@pytest.mark.parametrize(
    ("body", "usage", "failure"),
    [
        (
            b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
            Usage(3, 4),
            None,
        ),
        (b'{"object":"list","data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}', Usage(3, None), None),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"abort"}]}', None, Failure.ABORTED),
        (b'{"error":{"message":"x"}}', None, Failure.ERROR),
        (b'{"error":null,"choices":[]}', None, None),
        (b'{"choices":[{"logprobs":NaN,"finish_reason":"abort"}]}', None, Failure.ABORTED),
        (b'{"choices":"?","usage":{"prompt_tokens":3}}', Usage(3, None), None),
        (b'{"choices":["\\ud800"],"usage":{"prompt_tokens":3}}', Usage(3, None), None),
        (b'{"choices":[{"\\ud800":1}],"error":{"message":"x"}}', None, Failure.ERROR),
        (b"[1]", None, Failure.NOT_JSON),
        (b"<html>", None, Failure.NOT_JSON),
        (b"", None, Failure.NOT_JSON),
        (b'{"choices":[', None, Failure.NOT_JSON),
        (b"[" * 100_000, None, Failure.NOT_JSON),
    ],
)
def test_a_body_that_is_no_stream(body: bytes, usage: Usage | None, failure: Failure | None) -> None:
    answer = inspect_answer(body)
    assert (answer.usage, answer.failure) == (usage, failure)


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 8}, 8),
        ({"cached_tokens": 0, "created_cache_tokens": 3}, 0),
        (None, None),
        ({}, None),
        ({"cached_tokens": None}, None),
        ({"cached_tokens": True}, None),
        ({"cached_tokens": 8.0}, None),
        ({"cached_tokens": -1}, None),
        ({"cached_tokens": 2**53}, None),
        ([8], None),
        ("8", None),
        ({"\ud800": 1, "cached_tokens": 8}, 8),
    ],
)
def test_cached_tokens_are_told_and_never_cost_the_counts(details: object, cached: int | None) -> None:
    counts = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": details}
    body = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": counts}).encode()
    assert inspect_answer(body).usage == Usage(11, 5, cached)
    _, inspector = run(ROLE + b"data: " + body + b"\n\n" + DONE, [])
    assert inspector.usage == Usage(11, 5, cached)
