"""The bounds of `docs/fairness.md`, in virtual time."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from gateway.ledger.embedded import EmbeddedStore
from tests.sim.fairness.scenes import UNEQUAL, WEIGHTS, Habit, flood, heads, shares, uses

OVERTAKE_BLOCKS = 400
"""One replica's limit."""
LARGEST = 30


@pytest.fixture(scope="module")
def store_client() -> Iterator["redis.Redis[bytes]"]:
    """A client of a real Valkey of this module's own."""
    store = EmbeddedStore()
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    yield client
    client.close()
    store.stop()


@pytest.mark.parametrize("seed", range(4))
def test_weights_share_block_seconds(seed: int) -> None:
    """Counted from the start, after 20 mean call times."""
    errors = shares(seed, UNEQUAL, 20).errors(0, 20)
    assert max(map(abs, errors.values())) <= 0.05, errors


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keys", ["cba", "bca"])
def test_whichever_key_has_the_long_calls(seed: int, keys: str) -> None:
    """From 20 mean call times on: what ran before anybody waited is no share."""
    habits = {key: UNEQUAL[like] for key, like in zip(WEIGHTS, keys, strict=True)}
    errors = shares(seed, habits, 60).errors(20, 60)
    assert max(map(abs, errors.values())) <= 0.05, errors


@pytest.mark.parametrize("seed", range(2))
def test_passed_heads_are_made_good(seed: int) -> None:
    """Calls of all sizes: who was passed because it did not fit has its share all the same."""
    habits = {key: replace(habit, blocks=(5, LARGEST)) for key, habit in UNEQUAL.items()}
    errors = shares(seed, habits, 60).errors(20, 60)
    assert max(map(abs, errors.values())) <= 0.05, errors


MISTAKES = st.sampled_from((0.5, 1.0, 2.0, 4.0))
HOLDS = st.sampled_from(((500, 1_500), (2_000, 4_000), (3_000, 9_000), (5_000, 8_000)))
HABITS = st.fixed_dictionaries(dict.fromkeys(WEIGHTS, st.builds(Habit, hold_ms=HOLDS, mistake=MISTAKES)))


@settings(max_examples=5, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 999), habits=HABITS)
@example(seed=1, habits={**UNEQUAL, "c": replace(UNEQUAL["c"], mistake=4.0)})
def test_wrong_estimates_are_made_good(seed: int, habits: dict[str, Habit]) -> None:
    """Whatever is expected of calls, what they held counts: from 20 mean call times on."""
    errors = shares(seed, habits, 60).errors(20, 60)
    assert max(map(abs, errors.values())) <= 0.05, errors


@pytest.mark.parametrize("first_mistake", [1.0, 50.0])
def test_a_single_call_passes_ten_thousand_of_another_key(
    store_client: "redis.Redis[bytes]", first_mistake: float
) -> None:
    """Also while the other key gets back what it was charged far too much."""
    singles = list(flood(store_client, 1, 10_000, 60, first_mistake))
    assert len(singles) > 3
    assert [single for single in singles if single.wait_ms > single.longest_ms + 1_000] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [100, 200])
def test_a_lower_class_has_its_turn(seed: int, share: int) -> None:
    """Its head starts within cost / (share x drain): no later than when so many blocks have come back."""
    others = {key: Habit((10, 10)) for key in "pqr"}
    for head in heads(seed, others, Habit((10, 10), class_="low"), share):
        assert head.before_blocks < head.call.blocks * 1_000 / share, head


@pytest.mark.parametrize("seed", range(3))
def test_a_large_head_of_a_lower_class_has_its_turn_and_then_its_room(seed: int) -> None:
    others = {key: Habit((5, LARGEST)) for key in "pqr"}
    for head in heads(seed, others, Habit((5, 400), class_="low"), 200):
        assert head.before_blocks < head.call.blocks * 1_000 / 200 + OVERTAKE_BLOCKS + 2 * LARGEST, head
        assert head.late_ms <= 0, head


@pytest.mark.parametrize("seed", range(3))
def test_a_large_head_is_overtaken_by_so_much_only(seed: int) -> None:
    """It starts within overtake_blocks / drain + the longest remaining call on the replica that is held for it."""
    others = {key: Habit((10, 10)) for key in "pqr"}
    for head in heads(seed, others, Habit((100, 400))):
        assert head.before_blocks < OVERTAKE_BLOCKS, head
        assert head.late_ms <= 0, head


@pytest.mark.parametrize("seed", range(3))
def test_among_calls_of_all_sizes_one_of_them_more_may_overtake(seed: int) -> None:
    others = {key: Habit((5, LARGEST)) for key in "pqr"}
    for head in heads(seed, others, Habit((100, 400))):
        assert head.before_blocks < OVERTAKE_BLOCKS + LARGEST, head
        assert head.late_ms <= 0, head


def test_the_order_costs_little_throughput(store_client: "redis.Redis[bytes]") -> None:
    """Beside first fit, which lets large calls wait until nobody else does; a third of the work is theirs."""
    found = [uses(store_client, seed, large_share=0.03, calls=1_000) for seed in range(2)]
    ordered, unordered = (sum(part) for part in zip(*found, strict=True))
    assert ordered >= 0.96 * unordered, found
