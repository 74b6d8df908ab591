"""One engine that restarts is told from several that take turns."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.capacity import Reading
from gateway.core.lineage import RESTART_MS, SINGLE_READINGS, Lineage

PROBE_MS = 2_000


def seen(*readings: Reading, step_ms: int = PROBE_MS) -> list[bool]:
    lineage = Lineage()
    return [lineage.see(reading, number * step_ms) for number, reading in enumerate(readings)]


def process(started_at: float | None, tokens: int = 0) -> Reading:
    return Reading(started_at=started_at, tokens=tokens)


OLD, NEW = process(100.0), process(200.0)
BUSY, IDLE = process(None, 5000), process(None, 3)


def test_one_engine_is_one() -> None:
    assert seen(*[OLD] * 50) == [False] * 50
    assert seen(*(process(None, tokens) for tokens in range(50))) == [False] * 50


def test_a_restart_is_no_second_engine() -> None:
    assert seen(OLD, OLD, NEW, NEW, process(300.0)) == [False] * 5
    assert seen(BUSY, BUSY, IDLE, BUSY) == [False] * 4, "counters go up again"


def test_a_process_that_was_before_the_last_one_runs_beside_it() -> None:
    assert seen(OLD, NEW, OLD) == [False, False, True]


def test_without_a_start_counters_that_go_back_twice_tell_it() -> None:
    assert seen(BUSY, IDLE, BUSY, IDLE) == [False, False, False, True]


def test_an_engine_that_restarts_again_and_again_is_one() -> None:
    assert seen(BUSY, IDLE, BUSY, IDLE, BUSY, IDLE, step_ms=RESTART_MS) == [False] * 6


@pytest.mark.parametrize("several", [(OLD, NEW), (NEW, OLD), (OLD, NEW, process(300.0)), (BUSY, IDLE)])
def test_as_long_as_they_take_turns_there_are_several(several: tuple[Reading, ...]) -> None:
    found = seen(*islice(cycle(several), 60))
    first = found.index(True)
    assert first <= 3
    assert all(found[first:])


def test_one_that_is_left_alone_is_one_again() -> None:
    found = seen(OLD, NEW, OLD, NEW, *[NEW] * SINGLE_READINGS)
    assert found[2:] == [True] * SINGLE_READINGS + [True, False]


def test_a_page_without_figures_accuses_nobody() -> None:
    assert seen(OLD, Reading(), NEW, Reading(), Reading(tokens=5)) == [False] * 5


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=40))
def test_starts_that_never_go_back_are_restarts(steps: list[float]) -> None:
    started, readings = 100.0, []
    for step in steps:
        started += step
        readings.append(process(started))
    assert not any(seen(*readings))
