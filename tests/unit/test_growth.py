"""When an elastic call needs more blocks, and what it tells the store."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.elastic import SCALE, blocks_at, next_growth, path_of, unpack
from gateway.core.estimate import Demand
from gateway.core.growth import AHEAD_TOKENS, NEVER, Growth, Holding, Law, start
from gateway.core.lengths import Lengths, Watched

LENGTHS = Lengths()
for _written in range(20, 600, 10):
    _news: dict[int, tuple[int, int]] = {}
    Watched().end(_written, True, _news)
    LENGTHS.add(_news)
LAW = Law(LENGTHS.survival, 1024, 0)


def demand(prompt: int = 100, output: int = 1000, block_size: int = 16) -> Demand:
    blocks = blocks_at(prompt, output, block_size, 0)
    return Demand(
        lane="short", sequences=1, prompt_tokens=prompt, longest_prompt_tokens=prompt, output_tokens=output,
        blocks=blocks, block_size=block_size, unshared_blocks=blocks, prefill=0, cost=1,
    )  # fmt: skip


def expected(prompt: int, written: int, output: int = 1000) -> Holding:
    held = blocks_at(prompt, next_growth(written, output), 16, 0)
    path = path_of(prompt, output, written, LENGTHS.survival, 16, 1024)
    return Holding(held, 1024, b"".join(point.to_bytes(4, "big") for point in path))


def test_it_begins_with_its_first_step() -> None:
    assert start(demand(), LAW) == expected(100, 0)
    assert start(demand(), LAW).held == blocks_at(100, 64, 16, 0) < demand().blocks


def test_it_grows_shortly_before_it_has_to() -> None:
    growth, seen = Growth(demand(), LAW), {}
    for written in range(1001):
        holding = growth.note(100, written)
        if holding:
            assert holding == expected(100, written)
            seen[written] = next_growth(written, 1000)
    steps = list(seen.items())
    assert steps[0] == (64 - AHEAD_TOKENS, 120)
    assert all(later == grown - AHEAD_TOKENS for (_, grown), (later, _) in pairwise(steps))
    assert steps[-1][1] == 1000
    assert growth.due == NEVER


def test_what_is_told_late_is_made_good_at_once() -> None:
    growth = Growth(demand(), LAW)
    assert growth.note(100, 1) is None
    assert growth.note(100, 400) == expected(100, 400)
    assert growth.note(100, 401) is None


@pytest.mark.parametrize("prompt", [60, 300])
def test_the_first_count_corrects_the_prompt(prompt: int) -> None:
    growth = Growth(demand(), LAW)
    holding = growth.note(prompt, 1)
    whole = demand().blocks
    assert holding is not None
    assert holding.held == min(blocks_at(prompt, 65, 16, 0), whole)
    assert max(unpack(holding.path)) <= whole * SCALE
    assert growth.note(prompt, 2) is None


def test_from_the_first_count_on_its_path_is_that_of_what_it_does_not_share() -> None:
    """What it holds is told whole: the ledger knows what it shares."""
    growth, rest = Growth(demand(1000), LAW, shared=60), expected(1000 - 60 * 16, 0)
    assert growth.note(1000, 1) == (expected(1000, 1).held, 1024, expected(40, 1).path, 60)
    assert growth.note(1000, 2) is None
    later = growth.note(1000, 400)
    assert later == (expected(1000, 400).held, 1024, expected(40, 400).path, 60)
    assert rest.held + 60 == expected(1000, 0).held


def test_who_shares_more_than_its_engine_counts_has_a_path_still() -> None:
    holding = Growth(demand(1000), LAW, shared=60).note(900, 1)
    assert holding is not None
    assert max(unpack(holding.path)) <= (demand(1000).blocks - 60) * SCALE


def test_a_count_within_the_same_block_changes_nothing() -> None:
    assert Growth(demand(100), LAW).note(101, 0) is None


def test_without_counts_it_holds_all() -> None:
    growth = Growth(demand(), LAW)
    assert growth.in_full() == Holding(demand().blocks)
    assert growth.note(100, 900) is None


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 3000),
    st.lists(st.integers(0, 400), max_size=40),
    st.sampled_from([1, 16, 128]),
)
def test_it_always_holds_what_is_written(
    prompt: int, estimated: int, output: int, steps: list[int], size: int
) -> None:
    """But for what was not told yet, and never more than was admitted."""
    wanted = demand(estimated, output, size)
    growth, written, held = Growth(wanted, LAW), 0, start(wanted, LAW).held
    for step in [0, *steps]:
        written = min(written + step, output)
        holding = growth.note(prompt, written)
        if holding:
            held = holding.held
            assert max(unpack(holding.path)) <= wanted.blocks * SCALE
        covered = min(written + AHEAD_TOKENS, output)
        assert wanted.blocks >= held >= min(blocks_at(prompt, covered, size, 0), wanted.blocks)
