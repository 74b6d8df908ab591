"""How long a prompt is thought to be in prefill where no first token can be seen."""

import pytest

from gateway.core.prefill import MARGIN, WEIGHT, PrefillTimes, wait_for_first_token_ms


def test_before_anything_is_known_the_design_speed_counts() -> None:
    """2,000 prompt tokens a second, with the margin."""
    assert PrefillTimes().seconds("r", 2000) == pytest.approx(MARGIN * 1.0)
    assert PrefillTimes().seconds("r", 64_000) == pytest.approx(MARGIN * 32.0)


def test_the_first_observation_replaces_the_guess() -> None:
    times = PrefillTimes()
    times.observe("r", 1000, 100)
    assert times.seconds("r", 1000) == pytest.approx(MARGIN * 0.1)
    assert times.seconds("r", 8000) == pytest.approx(MARGIN * 0.8)


def test_later_ones_move_the_average_by_their_weight() -> None:
    times = PrefillTimes()
    times.observe("r", 1000, 100)
    times.observe("r", 1000, 200)
    assert times.seconds("r", 1000) == pytest.approx(MARGIN * (0.1 + WEIGHT * 0.1))


def test_the_average_follows_an_engine_that_became_slower() -> None:
    times = PrefillTimes()
    times.observe("r", 1000, 100)
    for _ in range(40):
        times.observe("r", 2000, 2000)
    assert times.seconds("r", 1000) == pytest.approx(MARGIN * 1.0, rel=0.01)


def test_replicas_are_learned_apart() -> None:
    times = PrefillTimes()
    times.observe("fast", 1000, 10)
    times.observe("slow", 1000, 1000)
    assert times.seconds("fast", 1000) == pytest.approx(MARGIN * 0.01)
    assert times.seconds("slow", 1000) == pytest.approx(MARGIN * 1.0)
    assert times.seconds("new", 2000) == pytest.approx(MARGIN * 1.0)


def test_what_is_expected_has_no_margin_and_is_of_all_replicas() -> None:
    times = PrefillTimes()
    assert times.expected_ms(["a", "b"], 2000) == times.expected_ms([], 2000) == 1000
    times.observe("a", 1000, 100)
    assert times.expected_ms(["a"], 3000) == 300
    assert times.expected_ms(["a", "b"], 3000) == 900
    assert times.expected_ms(["a"], 0) == 0


@pytest.mark.parametrize(
    ("wait_ms", "ttft_ms", "passed_ms", "prefill_ms", "left_ms"),
    [
        (30_000, None, 5, 9000, 30_000),
        (30_000, 10_000, 0, 0, 10_000),
        (30_000, 10_000, 500, 2500, 7000),
        (3000, 10_000, 500, 2500, 3000),
        (30_000, 10_000, 0, 10_001, 0),
        (30_000, 10_000, 12_000, 0, 0),
        (0, 10_000, 0, 0, 0),
    ],
)
def test_a_place_has_to_come_while_there_is_time_for_the_prompt(
    wait_ms: int, ttft_ms: int | None, passed_ms: int, prefill_ms: int, left_ms: int
) -> None:
    assert wait_for_first_token_ms(wait_ms, ttft_ms, passed_ms, prefill_ms) == left_ms
