"""The figures of a run written by hand, against what paper says."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.loadtest.figures import LAG_MS_MAX, LATENESS_MS_MAX, figures
from gateway.loadtest.observe import Observations
from gateway.loadtest.percentiles import at_rank
from gateway.loadtest.records import Attempt, End, Outcome, Recording, together
from gateway.loadtest.scenario import parse
from gateway.loadtest.series import series
from tests.unit.loadtest import runs


@pytest.fixture
def found() -> dict[str, Any]:
    return figures(runs.SCENARIO, runs.recording(), runs.observations(), 8.0)


def test_calls(found: dict[str, Any]) -> None:
    assert found["calls"] == {
        "offered": 5, "answered": 3, "gave_up": 1, "left": 1, "unfinished": 0,
        "in_time": 2, "in_time_from_arrival": 1, "retried": 2,
    }  # fmt: skip


def test_attempts(found: dict[str, Any]) -> None:
    attempts = found["attempts"]

    assert (attempts["made"], attempts["admitted"], attempts["queued"]) == (7, 5, 1)
    assert [attempts[end] for end in End] == [3, 2, 1, 0, 1, 0]
    assert attempts["timed_out_by_stage"] == {"between_tokens": 1}
    assert attempts["queue_ms"]["max"] == 300


def test_refusals_by_code_and_size(found: dict[str, Any]) -> None:
    small, large = found["refused"]["429 queue_full"], found["refused"]["400 context_length_exceeded"]

    assert small["latency_ms_under_16_kb"]["p99"] == pytest.approx(4, abs=0.01)
    assert small["latency_ms_from_16_kb"]["count"] == 0
    assert large["latency_ms_from_16_kb"]["p99"] == pytest.approx(9, abs=0.01)


def test_first_tokens_count_from_arrival_and_for_each_attempt(found: dict[str, Any]) -> None:
    first = found["first_token_ms"]

    assert first["from_arrival"] == {"count": 4, "p50": 200, "p90": 1_900, "p99": 1_900, "max": 1_900}
    assert first["calls_without"] == 1
    assert first["per_attempt"] == {"count": 5, "p50": 200, "p90": 500, "p99": 500, "max": 500}


def test_gaps_pooled_corrected_and_worst(found: dict[str, Any]) -> None:
    """The open gap of 3 s is no gap of the pool; corrected it is 150 of them, and the silence of 0.5 s is 25."""
    assert found["gap_ms"] == {"count": 5, "p50": 20, "p99": 500, "p999": 500, "max": 500}
    assert found["gap_corrected_ms"]["count"] == 4 + 25 + 150
    assert found["gap_corrected_ms"]["expected_ms"] == 20
    assert found["gap_corrected_ms"]["p99"] == 2_980
    assert found["gap_corrected_ms"]["max"] == 3_000
    assert found["worst_gap_ms"] == {"count": 2, "p50": 500, "p90": 3_000, "p99": 3_000, "max": 3_000}


def test_tokens_and_goodput(found: dict[str, Any]) -> None:
    assert found["tokens"] == {
        "completed": 18, "completed_per_second": 2.2, "wasted": 2, "of_calls_that_left": 3,
    }  # fmt: skip
    assert found["goodput"]["tokens"] == 11
    assert found["goodput"]["tokens_from_arrival"] == 5
    assert found["goodput"]["calls_per_second"] == 0.25


def test_keys(found: dict[str, Any]) -> None:
    assert found["keys"] == {
        "a": {"offered": 2, "answered": 2, "in_time": 2, "tokens": 11},
        "b": {"offered": 3, "answered": 1, "in_time": 0, "tokens": 7},
    }


def test_engines_grow_through_a_restart(found: dict[str, Any]) -> None:
    engine = found["engines"]["each"]["http://e"]

    assert found["engines"]["preemptions"] == 5 + 2
    assert (engine["prompt_tokens"], engine["generation_tokens"], engine["restarts"]) == (15, 16, 1)
    assert found["engines"]["recomputed_tokens"] is None
    assert "not visible" in found["engines"]["recomputed_tokens_from"]


def test_gateway(found: dict[str, Any]) -> None:
    gateway = found["kvgate"]

    assert gateway["clean"]
    assert gateway["queue_max"] == 3
    assert gateway["reserved_share_while_queued"] == {"demo/only": {"samples": 2, "mean": 0.85, "min": 0.8}}
    assert gateway["refusal_ms"]["queue_full"] == {
        "count": 100, "p50_at_most": 1.0, "p99_at_most": 5.0, "max_at_most": 5.0, "in_5_ms": 100,
    }  # fmt: skip


def test_predicted_waits_are_those_of_the_run(found: dict[str, Any]) -> None:
    shares = {"at_most_0.8": 0.25, "at_most_1.25": 0.75, "at_most_inf": 1.0}
    assert found["kvgate"]["real_over_predicted_wait"] == {"count": 4, **shares}


@pytest.mark.parametrize(
    ("after", "taken"),
    [
        (Attempt(0, 2.0, End.ANSWERED), 1),
        (Attempt(0, 2.0, End.TIMED_OUT), 1),
        (Attempt(0, 2.0, End.REFUSED, "429 queue_timeout"), 1),
        (Attempt(0, 2.0, End.REFUSED, "429 queue_full", queue_ms=7), 1),
        (Attempt(0, 2.0, End.REFUSED, "429 queue_full", queue_ms=0), 0),
    ],
    ids=lambda value: value.reason or str(value.end) if isinstance(value, Attempt) else "",
)
def test_who_comes_back_after_a_refusal_is_granted_queued_or_refused_again(
    after: Attempt, taken: int
) -> None:
    recording = runs.recording()
    recording.calls = [
        replace(recording.calls[0], attempts=[Attempt(0, 1.0, End.REFUSED, "429 queue_full"), after])
    ]

    found = figures(runs.SCENARIO, recording, runs.observations(), 8.0)["attempts"]["back_after_refusal"]

    assert found == {"count": 1, "granted_or_queued": taken, "share": taken}


def test_what_a_gateway_still_holds_is_a_leak() -> None:
    observations = runs.observations()
    observations.left_over["leases"] = 1

    assert not figures(runs.SCENARIO, runs.recording(), observations, 8.0)["kvgate"]["clean"]


def test_without_a_gateway_there_are_no_figures_of_one() -> None:
    observations = runs.observations()
    observations.left_over = None

    assert figures(runs.SCENARIO, runs.recording(), observations, 8.0)["kvgate"] is None


def test_the_generator_says_whether_it_kept_up() -> None:
    def kept_up(recording: Recording) -> bool:
        return bool(figures(runs.SCENARIO, recording, runs.observations(), 8.0)["generator"]["kept_up"])

    late, lagging, short, broken = (runs.recording() for _ in range(4))
    late.calls[0].lateness = LATENESS_MS_MAX / 1_000
    lagging.lags.extend([LAG_MS_MAX / 1_000 + 0.001] * 10)
    short.socket_shortage = 1
    broken.own_errors = 1

    assert kept_up(runs.recording())
    assert figures(runs.SCENARIO, broken, runs.observations(), 8.0)["generator"]["cpu_share"] == 0.05
    assert not any(map(kept_up, (late, lagging, short, broken)))


def test_without_a_hint_the_median_is_the_expected_interval() -> None:
    text = parse(
        "name: x\nphases: [{seconds: 8, sessions: 1}]\ncalls: [{prompt_tokens: 9, output_tokens: 9}]"
    )

    found = figures(text, runs.recording(), runs.observations(), 8.0)

    pooled = sorted(runs.recording().gaps.pooled())
    assert found["gap_corrected_ms"]["expected_ms"] == round(at_rank(pooled, 0.5) * 1_000, 2) == 20


def test_recordings_of_two_processes_are_one() -> None:
    whole, left, right = runs.recording(), runs.recording(), runs.recording()
    left.calls, right.calls = whole.calls[::2], whole.calls[1::2]
    right.gaps, right.open_gaps, right.tokens = Recording(10).gaps, Recording(10).open_gaps, [0] * 10
    right.cpu_seconds = 0.0

    merged = together([left, right])

    assert [call.number for call in merged.calls] == [0, 1, 2, 3, 4]
    assert len(merged.lags) == 200
    merged.lags = whole.lags
    both = [figures(runs.SCENARIO, recording, runs.observations(), 8.0) for recording in (merged, whole)]
    assert both[0] == both[1]


def test_series_add_up_to_the_figures() -> None:
    recording, observations = runs.recording(), runs.observations()
    found, over_time = (
        figures(runs.SCENARIO, recording, observations, 8.0),
        series(runs.SCENARIO, recording, observations),
    )
    per_second = over_time["per_second"]

    assert {len(values) for values in per_second.values()} == {8}  # the last thing ended in the eighth second
    assert sum(per_second["offered"]) == found["calls"]["offered"]
    assert sum(per_second["answered"]) == found["calls"]["answered"]
    assert sum(per_second["answered_in_time"]) == found["calls"]["in_time"]
    assert sum(per_second["refusals"]) == found["attempts"]["refused"]
    assert sum(per_second["timed_out_or_failed"]) == found["attempts"]["timed_out"]
    assert sum(per_second["completed_tokens"]) == found["tokens"]["completed"]
    assert per_second["gap_p99_ms"] == [20, None, None, 500, None, 20, None, None]
    assert per_second["gap_corrected_p99_ms"][6] == 2_980
    assert over_time["engines"]["preemptions"] == [0, 5, 5, 7]
    assert over_time["engines"]["blocks_used"] == [128, 128, None, 128]
    assert over_time["kvgate"]["queue"] == [0, 3, 1]


def test_a_run_without_a_call_has_figures() -> None:
    empty = Recording(3)

    found = figures(runs.SCENARIO, empty, Observations(), 0.0)

    assert found["calls"]["offered"] == 0
    assert found["gap_corrected_ms"]["count"] == 0
    assert series(runs.SCENARIO, empty, Observations())["per_second"]["offered"] == [0]


def test_every_outcome_has_a_figure(found: dict[str, Any]) -> None:
    assert set(Outcome) <= set(found["calls"])
