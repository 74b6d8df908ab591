"""The simulation itself: worlds are clean, go the same way twice, and show what is planted in them."""

import pytest

from tests.sim.plants import PLANTS
from tests.sim.world import play

SEEDS = (4, 7, 10)
SEEDS_MAX = 12


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_is_clean(seed: int) -> None:
    story = play(seed)
    assert not story.violation, f"{story.violation}; replay: python -m tests.sim --seed {seed} --trace"
    assert story.facts["completed"]


def test_a_world_goes_the_same_way_twice() -> None:
    first, second = play(4, keep_trace=True), play(4, keep_trace=True)
    assert first.trace == second.trace
    assert len(first.trace) > 100


@pytest.mark.parametrize(
    "plant",
    [
        "lost-wake",
        "lost-grant",
        "settle-lost-when-cancelled",
        "path-kept-at-settle",
        "reference-kept-at-settle",
        "soft-sum-drifts",
        "soft-hold-kept",
    ],
)
def test_a_planted_fault_is_found(plant: str) -> None:
    with PLANTS[plant]():
        assert any(play(seed).violation for seed in range(SEEDS_MAX))
