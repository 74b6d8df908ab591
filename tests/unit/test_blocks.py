"""Blocks of a call, against figures measured on a real vLLM 0.32 (blocks of 32 tokens, 255 usable)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import BlockShape, demand_blocks, sequence_blocks

SHAPE = BlockShape(max_model_len=4096, block_size=32)


@pytest.mark.parametrize(
    ("prompt", "output", "blocks"),
    [
        (32, 512, 17),  # 15 of them are 255 blocks and fill the engine without a preemption
        (33, 512, 17),  # 544 tokens but for the last, which is never written
        (34, 512, 18),
        (33, 480, 16),
        (1, 1, 1),
        (1, 32, 1),
        (1, 33, 2),
        (4095, 1, 128),
        (4000, 4000, 128),  # the engine stops at its context
        (11, 4085, 128),
    ],
)
def test_one_sequence(prompt: int, output: int, blocks: int) -> None:
    assert sequence_blocks(prompt, output, 4096, 32, 0) == blocks


@pytest.mark.parametrize(
    ("prompt", "output", "context", "blocks"),
    [
        (100, 8000, 32768, 507),  # the larger of two limits decides
        (1000, 16, 32768, 64),
        (31_900, 1000, 32768, 2048),
    ],
)
def test_one_sequence_in_blocks_of_sixteen(prompt: int, output: int, context: int, blocks: int) -> None:
    assert sequence_blocks(prompt, output, context, 16, 0) == blocks


def test_speculative_decoding_looks_ahead() -> None:
    assert sequence_blocks(33, 512, 4096, 32, 4) == 18
    assert sequence_blocks(4095, 1, 4096, 32, 4) == 129


def test_fifteen_measured_sequences_fill_the_engine_exactly() -> None:
    assert 15 * sequence_blocks(33, 512, 4096, 32, 0) == 255


def test_sequences_are_charged_in_full_by_default() -> None:
    assert demand_blocks([250], 2, 250, SHAPE, share_prompt_of_n=False) == 2 * 16
    assert demand_blocks([1600], 8, 160, BlockShape(32768, 16), share_prompt_of_n=False) == 8 * 110


def test_a_block_aligned_prompt_shares_all_but_the_block_of_its_last_token() -> None:
    assert demand_blocks([256], 16, 512, SHAPE, share_prompt_of_n=True) == 279


def test_who_decodes_speculatively_shares_a_block_less() -> None:
    """EAGLE computes the last block anew that it finds; of a prompt of one block nothing is left."""
    eagle = BlockShape(4096, 16, speculative_tokens=1)
    each = -(-(256 + 512) // 16)
    assert demand_blocks([256], 16, 512, eagle, share_prompt_of_n=True) == 14 + 16 * (each - 14)
    assert demand_blocks([10], 2, 10, eagle, share_prompt_of_n=True) == 2 * 2


def test_list_prompts_are_never_shared() -> None:
    assert demand_blocks([256, 256], 16, 512, SHAPE, share_prompt_of_n=True) == 2 * 16 * 24


def test_a_single_sequence_shares_nothing() -> None:
    assert demand_blocks([256], 1, 512, SHAPE, share_prompt_of_n=True) == 24


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 16),
    st.sampled_from([1, 16, 32]),
    st.integers(0, 8),
)
def test_sharing_never_adds_and_never_goes_below_one_sequence(
    prompt: int, output: int, n: int, block_size: int, speculative: int
) -> None:
    shape = BlockShape(4096, block_size, speculative)
    full = demand_blocks([prompt], n, output, shape, share_prompt_of_n=False)
    shared = demand_blocks([prompt], n, output, shape, share_prompt_of_n=True)
    assert full // n <= shared <= full
    assert full == n * demand_blocks([prompt], 1, output, shape, share_prompt_of_n=False)
