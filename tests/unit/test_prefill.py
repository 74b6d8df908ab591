"""How long a prompt is thought to be in prefill where no first token can be seen."""

import pytest

from gateway.core.prefill import MARGIN, WEIGHT, PrefillTimes


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
