"""The figures over time, for the plots: pure."""

from collections.abc import Callable, Sequence
from typing import Any

from gateway.loadtest.figures import expected_gap_ms, gap_p99_by_second, in_time
from gateway.loadtest.observe import EngineSample, Observations
from gateway.loadtest.records import End, Outcome, Recording
from gateway.loadtest.scenario import Scenario

Series = dict[str, Any]
ENGINE_SERIES = ("at_seconds", "preemptions", "blocks_used", "blocks", "running", "waiting")


def series(scenario: Scenario, recording: Recording, observations: Observations) -> Series:
    """`per_second`: lists of one value per second of the run.  `engines`, `kvgate`: samples with their times."""
    end = _last_second(recording, observations)
    plain, fair = gap_p99_by_second(recording, expected_gap_ms(scenario, recording))
    per_second = {
        "offered": _counted((call.arrival for call in recording.calls), end),
        "running": [round(value, 1) for value in recording.running[:end]],
        "tokens": recording.tokens[:end],
        "gap_p99_ms": plain[:end],
        "gap_corrected_p99_ms": fair[:end],
        **_endings(scenario, recording, end),
    }
    return {
        "per_second": per_second,
        "engines": _engines(observations),
        "kvgate": {
            name: [getattr(sample, key) for sample in observations.gateway]
            for name, key in (
                ("at_seconds", "at"), ("reserved", "reserved"), ("limit", "limit"), ("queue", "queue"),
            )
        },
    }  # fmt: skip


def _endings(scenario: Scenario, recording: Recording, end: int) -> Series:
    answered = [call for call in recording.calls if call.outcome is Outcome.ANSWERED]
    timely = [call for call in answered if in_time(call, scenario.targets)]
    refusals = (a.ended for call in recording.calls for a in call.attempts if a.end is End.REFUSED)
    troubles = (
        attempt.ended
        for call in recording.calls
        for attempt in call.attempts
        if attempt.end in (End.TIMED_OUT, End.FAILED)
    )
    completed = [0] * end
    for call in answered:
        completed[min(int(call.attempts[-1].ended), end - 1)] += call.attempts[-1].tokens
    return {
        "answered": _counted((call.attempts[-1].ended for call in answered), end),
        "answered_in_time": _counted((call.attempts[-1].ended for call in timely), end),
        "completed_tokens": completed,
        "refusals": _counted(refusals, end),
        "timed_out_or_failed": _counted(troubles, end),
    }


def _counted(moments: Any, end: int) -> list[int]:
    counts = [0] * end
    for moment in moments:
        counts[min(max(int(moment), 0), end - 1)] += 1
    return counts


def _engines(observations: Observations) -> Series:
    """Sums over the engines at each moment of sampling; preemptions from the run's start."""
    rows = [samples for samples in observations.engines.values() if samples]
    if not rows:
        return {name: [] for name in ENGINE_SERIES}
    length = min(map(len, rows))
    steps: list[Sequence[EngineSample]] = [[row[index] for row in rows] for index in range(length)]
    return {
        "at_seconds": [round(step[0].at, 2) for step in steps],
        "preemptions": _grown(rows, length),
        "blocks_used": [_sum(step, _blocks_used) for step in steps],
        "blocks": [_sum(step, lambda sample: sample.blocks) for step in steps],
        "running": [_sum(step, lambda sample: sample.running) for step in steps],
        "waiting": [_sum(step, lambda sample: sample.waiting) for step in steps],
    }


def _blocks_used(sample: EngineSample) -> float | None:
    if sample.kv_use is None or sample.blocks is None:
        return None
    return round(sample.kv_use * sample.blocks)


def _sum(step: Sequence[EngineSample], of: Callable[[EngineSample], float | None]) -> float | None:
    values = [value for sample in step if (value := of(sample)) is not None]
    return sum(values) if values else None


def _grown(rows: Sequence[Sequence[EngineSample]], length: int) -> list[float]:
    totals = [0.0] * length
    for row in rows:
        grown, before = 0.0, row[0].preemptions
        for index in range(length):
            now = row[index].preemptions
            if now is not None:
                grown += 0.0 if before is None else (now - before if now >= before else now)
                before = now
            totals[index] += grown
    return totals


def _last_second(recording: Recording, observations: Observations) -> int:
    """The time axis ends with the last thing that happened."""
    ends = [attempt.ended for call in recording.calls for attempt in call.attempts]
    ends += [call.arrival for call in recording.calls[-1:]]
    return min(max(1, int(max(ends, default=0.0)) + 1), recording.seconds)
