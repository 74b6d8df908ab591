"""Calls that embed or score: their inputs, the engine's prompts that come of those, and what that asks of a fleet."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import inputs_blocks
from gateway.core.estimate import Demand, token_bounds
from gateway.core.inputs import PAIR_TOKENS
from gateway.core.media import MEDIA_TOKENS
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import ENDS_TOKENS, INPUTS_MAX, PromptText, PromptTokens
from gateway.core.request import Endpoint, GenerationRequest, forward, parse
from gateway.core.route import FleetShape, KeyLimits, PoolShape, candidate_lanes, hopeless, route

EMBEDDINGS, RERANK, SCORE = Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE
USER = {"role": "user", "content": "hi"}
SMALL = PoolShape("small", 512, max_model_len=4096, block_size=16, usable_max=1000, sequences_max=8)
LARGE = PoolShape("large", None, max_model_len=4096, block_size=16, usable_max=300, sequences_max=4)
FREE = KeyLimits()


def fleet(*pools: PoolShape, **changes: Any) -> FleetShape:
    settings: dict[str, Any] = {
        "default_output_tokens": 1024,
        "max_output_tokens": 16,
        "token_factor": 1.0,
        "speculative_tokens": 4,
        "share_prompt_of_n": True,
    }
    return FleetShape("demo", "demo", frozenset({"demo"}), pools=pools, **settings | changes)


def read(endpoint: Endpoint, **fields: Any) -> GenerationRequest:
    request = parse(endpoint, json.dumps(fields).encode(), 1)
    assert isinstance(request, GenerationRequest), request
    return request


def refused(endpoint: Endpoint, **fields: Any) -> Refusal:
    refusal = parse(endpoint, json.dumps(fields).encode(), 1)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def words(request: GenerationRequest) -> list[int]:
    """Counts of the call's texts where every word is a token."""
    counts = []
    for prompt in request.prompts:
        if isinstance(prompt, PromptTokens):
            counts.append(prompt.tokens)
        else:
            counts.append(sum(len(str(text).split()) for text in prompt.texts) + prompt.fixed_tokens)
    return counts


def prompts(request: GenerationRequest) -> list[int]:
    return list(request.prompt_tokens(words(request)))


# -- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.POOLING])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a b c", [3 + ENDS_TOKENS]),
        (["a", "b c"], [1 + ENDS_TOKENS, 2 + ENDS_TOKENS]),
        ("", [ENDS_TOKENS]),
        ([1, 2, 3], [3]),
        ([[1, 2, 3], [4]], [3, 1]),
    ],
)
def test_every_input_is_a_prompt(endpoint: Endpoint, value: Any, expected: list[int]) -> None:
    request = read(endpoint, input=value)
    assert prompts(request) == expected
    assert (request.sequences, request.prompt_count) == (len(expected), len(expected))


@pytest.mark.parametrize("name", ["input", "messages"])
def test_conversations_are_inputs_too(name: str) -> None:
    one, two = read(EMBEDDINGS, **{name: [USER]}), read(EMBEDDINGS, **{name: [[USER], [USER, USER]]})
    assert one.sequences == 1
    assert prompts(two)[0] == prompts(one)[0]
    assert prompts(two)[1] > prompts(one)[0]


def test_a_template_is_in_every_conversation_and_counted_once() -> None:
    plain = read(EMBEDDINGS, messages=[[USER], [USER]])
    templated = read(EMBEDDINGS, messages=[[USER], [USER]], chat_template="a b c d")
    assert [more - less for more, less in zip(prompts(templated), prompts(plain), strict=True)] == [4, 4]
    assert len(templated.prompts) == len(plain.prompts)


@pytest.mark.parametrize(
    "value", [[], [[]], {}, 1, True, ["a", 1], ["a", [1]], [1, "a"], [[1], ["a"]], [1.5], [True], [[USER], 1]]
)
def test_what_is_no_input_is_refused_by_name(value: Any) -> None:
    refusal = refused(EMBEDDINGS, input=value)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "input")


def test_a_conversation_needs_messages() -> None:
    assert refused(EMBEDDINGS, messages=[[USER], []]).param == "messages"


@pytest.mark.parametrize(
    "value", [["x"] * (INPUTS_MAX + 1), [[1]] * (INPUTS_MAX + 1), [[USER]] * (INPUTS_MAX + 1)]
)
def test_inputs_are_bounded(value: Any) -> None:
    refusal = refused(EMBEDDINGS, input=value)
    assert (refusal.code, refusal.param) == (Code.TOO_MANY_SEQUENCES, "input")
    assert f"{INPUTS_MAX + 1}" in refusal.message
    assert f"{INPUTS_MAX}" in refusal.message
    assert read(EMBEDDINGS, input=value[1:]).sequences == INPUTS_MAX


def test_documents_are_bounded() -> None:
    refusal = refused(RERANK, query="q", documents=["d"] * (INPUTS_MAX + 1))
    assert (refusal.code, refusal.param) == (Code.TOO_MANY_SEQUENCES, "documents")


@pytest.mark.parametrize(
    ("endpoint", "fields", "code", "param"),
    [
        (EMBEDDINGS, {}, Code.MISSING_FIELD, "input"),
        (EMBEDDINGS, {"input": None, "messages": None}, Code.MISSING_FIELD, "input"),
        (EMBEDDINGS, {"input": "x", "messages": [USER]}, Code.INVALID_VALUE, "input"),
        (EMBEDDINGS, {"input": "x", "padding": "max_length"}, Code.INVALID_VALUE, "padding"),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": -2}, Code.INVALID_VALUE, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "x", "kv_transfer_params": {}}, Code.INVALID_VALUE, "kv_transfer_params"),
        (EMBEDDINGS, {"input": "x", "model": 1}, Code.INVALID_VALUE, "model"),
        (Endpoint.POOLING, {"data": {}}, Code.INVALID_VALUE, "data"),
        (SCORE, {"text_1": "x"}, Code.MISSING_FIELD, "queries"),
        (SCORE, {"text_1": "x", "text_2": "y", "queries": "a", "documents": "b"}, Code.INVALID_VALUE, "queries"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, Code.INVALID_VALUE, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, Code.INVALID_VALUE, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, Code.INVALID_VALUE, "text_2"),
        (SCORE, {"text_1": "a", "text_2": [[1, 2]]}, Code.INVALID_VALUE, "text_2"),
        (SCORE, {"text_1": "a", "text_2": {"text": "x"}}, Code.INVALID_VALUE, "text_2"),
        (RERANK, {"documents": ["x"]}, Code.MISSING_FIELD, "query"),
        (RERANK, {"query": "x"}, Code.MISSING_FIELD, "documents"),
        (RERANK, {"query": ["x"], "documents": ["x"]}, Code.INVALID_VALUE, "query"),
        (RERANK, {"query": "x", "documents": "y", "max_tokens_per_doc": -1}, Code.INVALID_VALUE, "max_tokens_per_doc"),
    ],
)  # fmt: skip
def test_refusals(endpoint: Endpoint, fields: dict[str, Any], code: Code, param: str) -> None:
    refusal = refused(endpoint, **fields)
    assert (refusal.code, refusal.param) == (code, param)
    assert f"`{param}`" in refusal.message


# -- pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
@pytest.mark.parametrize("endpoint", [Endpoint.SCORE, Endpoint.SCORE_V1])
def test_one_query_goes_with_every_document(endpoint: Endpoint, names: tuple[str, str]) -> None:
    request = read(endpoint, **dict(zip(names, ("a b", ["c", "d e f"]), strict=True)))
    assert prompts(request) == [2 + 1 + PAIR_TOKENS, 2 + 3 + PAIR_TOKENS]
    assert request.sequences == 2


def test_as_many_queries_as_documents_go_together() -> None:
    request = read(SCORE, text_1=["a", "b b"], text_2=["c c c", "d"])
    assert prompts(request) == [1 + 3 + PAIR_TOKENS, 2 + 1 + PAIR_TOKENS]


@pytest.mark.parametrize("endpoint", [Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2])
def test_a_document_alone_is_one_pair(endpoint: Endpoint) -> None:
    assert prompts(read(endpoint, query="a b", documents="c")) == [3 + PAIR_TOKENS]


def test_what_many_pairs_have_is_counted_once() -> None:
    """Else one long query would be tokenized for every document."""
    request = read(RERANK, query="q " * 50, documents=["d"] * 40, instruction="i i i")
    assert len(request.prompts) == 1 + 1 + 40
    assert prompts(request) == [3 + 50 + 1 + PAIR_TOKENS] * 40


def test_cuts_of_queries_and_documents_count() -> None:
    request = read(
        SCORE, text_1="q q q", text_2=["d d d d", "d"], max_tokens_per_query=2, max_tokens_per_doc=3
    )
    assert prompts(request) == [2 + 3 + PAIR_TOKENS, 2 + 1 + PAIR_TOKENS]


def test_parts_count_as_in_a_chat() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    request = read(SCORE, queries="q", documents={"content": [{"type": "text", "text": "a b"}, image]})
    assert prompts(request) == [1 + 2 + MEDIA_TOKENS + PAIR_TOKENS]


# -- demand --------------------------------------------------------------------------------------------------------


def demand(*tokens: int, shape: FleetShape | None = None, **fields: Any) -> Demand:
    request = read(EMBEDDINGS, input=[[1]] * len(tokens), **fields)
    answer = route(shape or fleet(SMALL, LARGE), request, tokens, FREE)
    assert isinstance(answer, Demand), answer
    return answer


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (512, 32)])
def test_a_prompt_holds_its_own_blocks_and_no_more(tokens: int, blocks: int) -> None:
    """No token of output, no look-ahead, no limit on output that could refuse it."""
    answer = demand(tokens)
    assert (answer.blocks, answer.output_tokens, answer.sequences, answer.lane) == (blocks, 0, 1, "small")
    assert answer.units.output_tokens == 0


def test_a_prompt_may_fill_the_context() -> None:
    assert demand(4096).blocks == 256
    refusal = route(fleet(SMALL, LARGE), read(EMBEDDINGS, input=[1]), [4097], FREE)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "input")
    assert "at most 4096" in refusal.message


def test_of_more_inputs_than_an_engine_runs_it_holds_the_largest() -> None:
    answer = demand(*range(16, 16 * 13, 16))
    assert (answer.sequences, answer.blocks) == (8, sum(range(5, 13)))
    assert answer.prompt_tokens == sum(range(16, 16 * 13, 16))


def test_of_more_blocks_than_an_engine_has_it_holds_all() -> None:
    answer = demand(4096, 4096, 4096)
    assert (answer.lane, answer.sequences, answer.blocks) == ("large", 3, 300)


def test_each_input_must_fit_by_itself() -> None:
    tiny = PoolShape("tiny", None, max_model_len=4096, block_size=16, usable_max=100, sequences_max=4)
    refusal = route(fleet(tiny), read(EMBEDDINGS, input=[1]), [1601], FREE)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert "101 KV blocks" in refusal.message
    assert isinstance(route(fleet(tiny), read(EMBEDDINGS, input=[[1], [1]]), [1600, 1600], FREE), Demand)


def test_a_lane_of_two_pools_counts_on_the_larger_engine() -> None:
    """Where the call may be granted, the engine runs as much of it at once as it can."""
    shape = fleet(SMALL, LARGE, lanes={"small": ("small", "large"), "large": ("large", "small")})
    assert demand(*[4096] * 6, shape=shape).blocks == 1000
    assert demand(*[4096] * 6, shape=shape).sequences == 6


@pytest.mark.parametrize(("cut", "blocks"), [(None, 64), (16, 1), (-1, 64), (0, 64)])
def test_a_prompt_that_the_engine_cuts_holds_less(cut: int | None, blocks: int) -> None:
    assert demand(1024, truncate_prompt_tokens=cut).blocks == blocks


def test_a_prompt_over_the_context_fits_once_it_is_cut() -> None:
    assert demand(9999, truncate_prompt_tokens=-1).blocks == 256


def test_the_caps_of_a_key() -> None:
    long = read(EMBEDDINGS, input=[1])
    refusal = route(fleet(LARGE), long, [1000], KeyLimits(context_tokens_max=999))
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.CONTEXT_NOT_CLEARED, "input")
    refusal = route(fleet(LARGE), long, [1000], KeyLimits(blocks_max=62))
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.KEY_CAP_EXCEEDED
    assert isinstance(
        route(fleet(LARGE), long, [1000], KeyLimits(max_output_tokens=1, blocks_max=63)), Demand
    )


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(0, 5000))
def test_bounds_never_contradict_the_demand(tokens: list[int], low: int) -> None:
    """What is refused by its bytes is refused by its tokens, and the lane is one of those that were foreseen."""
    shape, request = fleet(SMALL, LARGE), read(EMBEDDINGS, input=[[1]] * len(tokens))
    low = min(low, max(tokens))
    answer = route(shape, request, tokens, FREE)
    early = hopeless(shape, request, max(1, low), FREE)
    assert early is None or (isinstance(answer, Refusal) and early.code == answer.code)
    if isinstance(answer, Demand):
        assert answer.lane in candidate_lanes(shape, request, max(1, low), max(tokens), FREE)
        assert answer.blocks <= inputs_blocks(tokens, 16)
        assert answer.blocks >= inputs_blocks([max(tokens)], 16)


@given(st.lists(st.text(max_size=9), min_size=1, max_size=5), st.text(max_size=9))
def test_the_bounds_of_pairs_hold_their_tokens(documents: list[str], query: str) -> None:
    request = read(RERANK, query=query, documents=documents)
    low, high = token_bounds(request, 1.0)
    counts = [
        0 if isinstance(p, PromptTokens) else -(-p.utf8_bytes // 2) + p.fixed_tokens for p in request.prompts
    ]
    assert low <= max(request.prompt_tokens(counts)) <= high


def test_nothing_is_written_into_the_body() -> None:
    body = b'{"input": "x", "max_tokens": 5, "stream": true, "n": 3, "encoding_format": "base64"}'
    request = parse(EMBEDDINGS, body, 1)
    assert isinstance(request, GenerationRequest)
    assert forward(request, 0) is body
    assert not request.stream


def test_texts_are_read_as_they_are() -> None:
    request = read(EMBEDDINGS, input=["a\\u00e9\\n", "<|endoftext|>"])
    texts = [prompt.texts for prompt in request.prompts if isinstance(prompt, PromptText)]
    assert texts == [(), ("a\\u00e9\\n",), ("<|endoftext|>",)]
