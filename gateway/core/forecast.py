"""When running calls end, as far as it follows from how far those before them went.

A stream tells how far it is: events so far, of the tokens that it may generate at most, and how fast they come.  Of
any other call, and of a stream's first events, the age alone is known.  Either way a call is somewhere on a measure on
which others have ended before, and those ends that lie beyond are the ones that it may have.  Which of them is taken
for its own is drawn once for each call: so of calls that vary each ends somewhere, all together as spread as they
really are, and where all go to their limits their ends are known.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from heapq import nsmallest
from itertools import islice

import msgspec

from gateway.core.order import FORECAST_ENDS, FORECAST_REACH_MS

KEPT = 256
"""Ends of calls that are remembered, the last ones."""
KNOWN_MIN = 8
"""With fewer nothing is said."""
PACED_EVENTS_MIN = 16
"""Events from which on a stream's pace is its own."""
RUNS_MAX = 512
"""Calls that are looked at, those that run longest: 0.6 ms of the event loop, once a heartbeat."""


class Course(msgspec.Struct, frozen=True, gc=False):
    """Of a stream so far; times are seconds of the caller's clock."""

    events: int
    first_at: float
    last_at: float


def unseen() -> Course | None:
    """The course of a call that shows none."""
    return None


class Run(msgspec.Struct, frozen=True):
    """A call that holds blocks."""

    replica: str
    blocks: int
    tokens_max: int
    """That it may generate, all its sequences together."""
    lot: float
    """Drawn from 0 to below 1: which of the possible ends is taken for its own."""
    started_at: float
    course: Callable[[], Course | None]


class Ends:
    """How far calls went on one measure, the last KEPT of them."""

    def __init__(self) -> None:
        self._by_age: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, end: float) -> None:
        self._by_age.append(end)
        insort(self._sorted, end)
        if len(self._by_age) > KEPT:
            del self._sorted[bisect_left(self._sorted, self._by_age.popleft())]

    def of_one_at(self, place: float, lot: float) -> float | None:
        """Where a call ends that has come to `place`; None where too few, or none that came so far, are known."""
        first, known = bisect_left(self._sorted, place), len(self._sorted)
        if known < KNOWN_MIN or first == known:
            return None
        return self._sorted[first + int(lot * (known - first))]


class Forecast:
    """Of one process's calls in one fleet."""

    def __init__(self) -> None:
        self._events = Ends()
        """Events for each token of the limit."""
        self._seconds = Ends()
        """Seconds for each token of the limit."""

    def ended(self, run: Run, now: float) -> None:
        self._seconds.add((now - run.started_at) / run.tokens_max)
        course = run.course()
        if course:
            self._events.add(course.events / run.tokens_max)

    def seconds_left(self, run: Run, now: float) -> float | None:
        """Until it ends; None where that is not known, and 0 or less where it should have."""
        course = run.course()
        if course is None or course.events < PACED_EVENTS_MIN:
            place = (now - run.started_at) / run.tokens_max
            end = self._seconds.of_one_at(place, run.lot)
            return None if end is None else (end - place) * run.tokens_max
        place = course.events / run.tokens_max
        end = self._events.of_one_at(place, run.lot)
        if end is None:
            return None
        pace_seconds = (course.last_at - course.first_at) / (course.events - 1)
        return (end - place) * run.tokens_max * pace_seconds - (now - course.last_at)

    def next_ends(self, runs: Iterable[Run], now: float) -> list[int | str]:
        """Of those that lie ahead the next FORECAST_ENDS, in order: milliseconds from now, replica, blocks...

        `runs`: those that run longest come first.
        """
        found: list[tuple[float, str, int]] = []
        for run in islice(runs, RUNS_MAX):
            left = self.seconds_left(run, now)
            if left is not None and 0 < left * 1000 <= FORECAST_REACH_MS:
                found.append((left, run.replica, run.blocks))
        ends = (
            (round(left * 1000), replica, blocks) for left, replica, blocks in nsmallest(FORECAST_ENDS, found)
        )
        return [item for end in ends for item in end]
