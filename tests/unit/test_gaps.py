"""The times between tokens are told all together, soon, and once."""

from types import SimpleNamespace

import pytest

from gateway.core.events import Event, TokenGaps
from gateway.http import gaps
from gateway.http.gaps import GATHERED_MAX, AllGaps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(gaps, "time", clock)
    return clock


def test_those_of_several_streams_are_one_report_and_those_of_another_kind_another(
    clock: SimpleNamespace,
) -> None:
    told: list[Event] = []
    found = AllGaps(told.append)
    mine, other = found.of("demo", "short", "normal"), found.of("demo", "long", "normal")
    first = second = 10.0
    clock.now = 10.25
    first = mine.next(first)
    assert other.next(10.0) == 10.25
    clock.now = 10.5
    second = found.of("demo", "short", "normal").next(second)
    clock.now = 11.0
    first = mine.next(first)
    assert told == []
    clock.now = 11.125
    second = mine.next(second)
    assert told == [TokenGaps("demo", "short", "normal", [250, 500, 750, 625])]
    assert (first, second) == (11.0, 11.125)
    mine.report()
    other.report()
    assert told[1:] == [TokenGaps("demo", "long", "normal", [250])]


def test_no_more_are_gathered_than_may(clock: SimpleNamespace) -> None:
    told: list[Event] = []
    mine = AllGaps(told.append).of("demo", "short", "normal")
    for _ in range(GATHERED_MAX + 1):
        mine.next(10.0)
    assert [len(event.gaps_ms) for event in told if isinstance(event, TokenGaps)] == [GATHERED_MAX]
