"""Token estimates: cheap bounds, the correction by a factor, cost."""

import json

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate import (
    LONGEST_TOKEN_BYTES,
    apply_factor,
    call_cost,
    held_cost,
    prefill_share,
    prompt_tokens,
    token_bounds,
)
from gateway.core.prompt import PromptText, PromptTokens
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.tokens.tiktoken_counter import VOCABULARY, load_encoding


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return load_encoding(VOCABULARY)


def completion(*prompts: str) -> GenerationRequest:
    request = parse(Endpoint.COMPLETIONS, json.dumps({"prompt": prompts}).encode(), 16)
    assert isinstance(request, GenerationRequest)
    return request


def test_the_longest_token_is_the_vocabularys(encoding: tiktoken.Encoding) -> None:
    assert max(map(len, encoding.token_byte_values())) == LONGEST_TOKEN_BYTES


@pytest.mark.parametrize(
    ("tokens", "factor", "corrected"),
    [(10, 1.0, 10), (10, 1.1, 11), (10, 1.11, 12), (10, 0.5, 5), (0, 1.5, 0)],
)
def test_a_factor_rounds_up_and_only_then(tokens: int, factor: float, corrected: int) -> None:
    assert apply_factor(tokens, factor) == corrected


def test_a_factor_corrects_the_count_but_neither_the_frame_nor_token_ids() -> None:
    assert prompt_tokens(PromptText(("x",), 7, 1), 100, 1.2) == 127
    assert prompt_tokens(PromptTokens(50), 0, 1.2) == 50


@given(
    st.lists(st.text(min_size=1) | st.sampled_from([" " * 700, "a" * 300, "😀" * 90]), min_size=1, max_size=4)
)
def test_the_count_is_within_the_bounds_by_bytes(encoding: tiktoken.Encoding, prompts: list[str]) -> None:
    body = json.dumps({"prompt": prompts}).encode()
    request = parse(Endpoint.COMPLETIONS, body, 16)
    if not isinstance(request, GenerationRequest):  # a lone surrogate
        return
    for factor in (1.0, 1.3, 0.7):
        counts = (
            prompt_tokens(p, len(encoding.encode_ordinary(t)), factor)
            for p, t in zip(request.prompts, prompts, strict=True)
        )
        low, high = token_bounds(request, factor)
        assert low <= max(counts) <= high


def test_bounds_are_of_the_longest_prompt() -> None:
    assert token_bounds(completion("a" * 256, "b"), 1.0) == (3, 257)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0), (511, 0), (512, 512), (70_000, 70_000)])
def test_short_prompts_have_no_share_of_prefill(tokens: int, share: int) -> None:
    assert prefill_share(tokens) == share


@pytest.mark.parametrize(
    ("blocks", "tokens", "output", "cost"),
    [
        (1, 1, 1, 1),
        (10, 2000, 40, 20),
        (10, 2001, 40, 30),
        (10, 2000, 41, 30),
        (5, 1, 40, 10),  # 1.0005 seconds are two
        (507, 100, 8000, 507 * 201),
    ],
)
def test_cost_is_blocks_times_whole_seconds(blocks: int, tokens: int, output: int, cost: int) -> None:
    assert call_cost(blocks, tokens, output) == cost


@pytest.mark.parametrize(
    ("blocks", "seconds", "cost"),
    [(20, 0.5, 10), (20, 1.01, 21), (3, 0.1, 1), (1, 0.0, 1), (7, 10.0, 70)],
)
def test_what_was_held_is_rounded_up_once(blocks: int, seconds: float, cost: int) -> None:
    """Not the seconds: half a second would count twice."""
    assert held_cost(blocks, seconds) == cost
