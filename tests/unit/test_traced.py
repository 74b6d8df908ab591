"""Traces that are played on a real engine: what is asked of it, and what is read of its answers."""

import random
from typing import Any

import pytest

from tests.vllm.engine import BLOCK_SIZE
from tests.vllm.mixed import CHAT, TEXT
from tests.vllm.traced import TRACES, Told, Trace, TracedCall, ids, judge, read

TEMPLATE_TOKENS = 16
"""More than the tiny model's template adds to a prompt."""


@pytest.mark.parametrize("trace", TRACES.values(), ids=list(TRACES))
def test_every_call_fits_and_limits_are_generous(trace: Trace) -> None:
    chance = random.Random(3)
    calls = [trace.call(number, chance, ids) for number in range(2000)]
    for call in calls:
        assert 1 <= call.output_tokens <= call.limit
        assert len(call.prompt) + TEMPLATE_TOKENS + call.limit <= trace.context_tokens
    assert sum(call.limit for call in calls) > 5 * sum(call.output_tokens for call in calls)
    assert trace.context_tokens <= trace.usable_blocks * BLOCK_SIZE


def test_an_answer_ends_where_it_is_to_by_its_end_or_by_its_limit() -> None:
    early = TracedCall(0, TEXT, [7], 1, 5, 9).body("salt")
    assert (early["min_tokens"], early["max_tokens"], early["logit_bias"]) == (4, 9, {"2": 100})
    assert (early["prompt"], early["stream_options"]) == ([7], {"include_usage": True})
    late = TracedCall(1, CHAT, "hi", None, 9, 9).body("salt")
    assert (late["ignore_eos"], late["max_tokens"]) == (True, 9)
    assert late["messages"] == [{"role": "user", "content": "hi"}]
    assert not {"min_tokens", "logit_bias", "prompt", "stream_options"} & set(late)


def frame(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}], **more}


USAGE = {"usage": {"prompt_tokens": 1, "completion_tokens": 5}}
ASKED, UNASKED = TracedCall(0, TEXT, [7], 1, 5, 9), TracedCall(1, TEXT, [7], 1, 5, 9)


def test_what_is_told_is_read() -> None:
    found = read([frame("a"), frame("b", "stop"), {"choices": [], **USAGE}], 0.5)
    assert found == Told("ab", "stop", (1, 5), 0.5)
    judge(ASKED, found)
    chat = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("", "x")]
    assert read(chat, 0.5) == Told("x", "", None, 0.5)


@pytest.mark.parametrize(
    ("call", "frames"),
    [
        (ASKED, [frame("a", "length"), {"choices": [], **USAGE}]),
        (ASKED, [frame("a", "stop")]),
        (UNASKED, [frame("a", "stop"), {"choices": [], **USAGE}]),
        (ASKED, [frame("a", **USAGE), frame("b", "stop", **USAGE)]),
        (ASKED, [frame("a", "stop"), {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}]),
        (ASKED, [frame("a", "stop"), {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}}]),
        (UNASKED, [frame("a")]),
    ],
    ids=["other end", "no usage", "usage unasked", "usage twice", "other length", "other prompt", "no end"],
)
def test_an_answer_that_is_not_as_asked_for(call: TracedCall, frames: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError):
        judge(call, read(frames, 0.0))
