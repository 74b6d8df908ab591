"""When running calls are expected to end, from how far those before them went."""

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.forecast import (
    KEPT,
    KNOWN_MIN,
    PACED_EVENTS_MIN,
    RUNS_MAX,
    Course,
    Ends,
    Forecast,
    Run,
    unseen,
)
from gateway.core.order import FORECAST_ENDS

LIMIT = 1000
"""Tokens that each call may generate."""
PACE = 0.02
"""Seconds between two events."""


def ends_of(*found: float) -> Ends:
    ends = Ends()
    for end in found:
        ends.add(end)
    return ends


def streaming(events: int, now: float, lot: float = 0.5, pace: float = PACE) -> Run:
    """A stream whose last event has just come."""
    begun = now - (events - 1) * pace
    return Run("r0", 10, LIMIT, lot, begun - 0.5, lambda: Course(events, begun, now))


def silent(started_at: float, lot: float = 0.5, blocks: int = 10) -> Run:
    return Run("r0", blocks, LIMIT, lot, started_at, unseen)


def test_nothing_is_said_before_some_have_ended() -> None:
    assert ends_of(*[1.0] * (KNOWN_MIN - 1)).of_one_at(0.5, 0.5) is None
    assert ends_of(*[1.0] * KNOWN_MIN).of_one_at(0.5, 0.5) == 1.0


def test_nothing_is_said_of_who_came_further_than_all_before() -> None:
    ends = ends_of(*[0.5] * KNOWN_MIN)
    assert ends.of_one_at(0.5, 0.0) == 0.5
    assert ends.of_one_at(0.501, 0.0) is None


def test_the_lot_takes_one_of_the_ends_that_lie_beyond() -> None:
    ends = ends_of(*(i / 10 for i in range(1, 11)))
    assert [ends.of_one_at(0.55, lot) for lot in (0.0, 0.19, 0.2, 0.5, 0.99)] == [0.6, 0.6, 0.7, 0.8, 1.0]


@given(st.lists(st.floats(0, 2), min_size=KNOWN_MIN, max_size=2 * KEPT), st.floats(0, 2), st.floats(0, 0.999))
def test_an_end_is_one_of_the_last_and_not_before_the_place(
    found: list[float], place: float, lot: float
) -> None:
    end = ends_of(*found).of_one_at(place, lot)
    beyond = [each for each in found[-KEPT:] if each >= place]
    assert (end in beyond) if beyond else (end is None)


def test_of_calls_that_vary_as_many_end_soon_as_did() -> None:
    """A tenth of those that came to a fifth of their limits ended within the next tenth."""
    lengths = random.Random(1)
    ends = ends_of(*(lengths.uniform(0.2, 1.2) for _ in range(KEPT)))
    drawn = [ends.of_one_at(0.2, lot / 1000) or 0 for lot in range(1000)]
    assert sum(end < 0.3 for end in drawn) == pytest.approx(100, abs=30)


def test_a_stream_that_goes_to_its_limit_ends_when_its_own_pace_brings_it_there() -> None:
    """Whatever the time that others took: an engine that is slow today is slow for it, too."""
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(streaming(LIMIT, now=50.0), 50.0)
    for pace in (PACE, 2 * PACE):
        assert forecast.seconds_left(streaming(900, 100.0, pace=pace), 100.0) == pytest.approx(100 * pace)
        assert forecast.seconds_left(streaming(900, 100.0, pace=pace), 100.3) == pytest.approx(
            100 * pace - 0.3
        )


def test_before_a_stream_has_a_pace_its_age_is_what_counts() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 20.0)
        forecast.ended(streaming(LIMIT, now=20.5), 20.5)
    young = streaming(PACED_EVENTS_MIN - 1, now=100.0, lot=0.0)
    assert forecast.seconds_left(young, 100.0) == pytest.approx(20 - (100 - young.started_at))


def test_what_shows_no_course_goes_by_its_age_for_the_tokens_that_it_may_have() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 20.0)
    assert forecast.seconds_left(silent(90.0), 100.0) == pytest.approx(10)
    short = Run("r0", 10, LIMIT // 2, 0.5, 95.0, unseen)
    assert forecast.seconds_left(short, 100.0) == pytest.approx(5)
    assert forecast.seconds_left(silent(70.0), 100.0) is None


def test_the_next_ends_are_told_in_order_and_no_more_than_so_many() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 20.0)
    runs = [silent(100.0 - i / 4, blocks=i + 1) for i in range(2 * FORECAST_ENDS)]
    told = forecast.next_ends(runs, 100.0)
    assert told[::3] == [4250 + 250 * i for i in range(FORECAST_ENDS)]
    assert told[:3] == [20_000 - 250 * 63, "r0", 64]


def test_no_more_than_so_many_calls_are_looked_at() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 20.0)
    numbers = count()
    runs = (silent(0.0, blocks=next(numbers)) for _ in range(2 * RUNS_MAX))
    assert len(forecast.next_ends(runs, 10.0)) == 3 * FORECAST_ENDS
    assert next(numbers) == RUNS_MAX


def test_what_is_more_than_an_hour_away_is_not_told() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 4000.0)
    assert forecast.next_ends([silent(100.0), silent(-299.0), silent(-300.0)], 100.0) == [3_600_000, "r0", 10]


def test_ends_of_the_past_are_not_told() -> None:
    forecast = Forecast()
    for _ in range(KNOWN_MIN):
        forecast.ended(silent(0.0), 20.0)
    assert forecast.next_ends([silent(80.0), silent(85.0)], 100.0) == [5000, "r0", 10]
