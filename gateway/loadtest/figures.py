"""From what was noted to the figures of the report: pure.  Keys end in their unit: `_ms`, `_seconds`, `_share`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gateway.loadtest.observe import EngineSample, Observations
from gateway.loadtest.percentiles import (
    EXPECTED_GAP_MS_MIN,
    at_rank,
    bin_at_rank,
    bin_summary,
    binned,
    corrected,
    histogram_quantile,
    summary,
)
from gateway.loadtest.records import Attempt, CallRecord, End, Outcome, Recording
from gateway.loadtest.scenario import Scenario, Targets

LATENCY = ("p50", "p90", "p99")
GAP = ("p50", "p99", "p999")
SIZE_BYTES_SPLIT = 16 * 1024
LATENESS_MS_MAX = 50.0
QUICK_SECONDS = 0.005
"""A refusal that never waited should take no longer."""
LAG_MS_MAX = 20.0
"""The load generator kept up while the 99th percentiles of both stay below."""

Figures = dict[str, Any]


def figures(
    scenario: Scenario, recording: Recording, observations: Observations, arrivals_end_seconds: float
) -> Figures:
    """Everything but the series over time.  Rates are over the time of arrivals, and of answers where those take
    longer: work that was done after the last arrival took time too."""
    gaps = _gaps(scenario, recording)
    answered = (call.attempts[-1].ended for call in recording.calls if call.outcome is Outcome.ANSWERED)
    seconds = max([arrivals_end_seconds, *answered])
    return {
        "calls": _calls(recording.calls, scenario.targets),
        "attempts": _attempts(recording.calls),
        "refused": _refusals(recording.calls),
        "first_token_ms": _first_token(recording.calls),
        **gaps,
        "worst_gap_ms": summary(
            (1_000 * max(attempt.worst_gap for attempt in call.attempts) for call in _streamed(recording)),
            LATENCY,
        ),
        "tokens": _tokens(recording.calls, seconds),
        "goodput": _goodput(recording.calls, scenario.targets, seconds),
        "keys": _keys(recording.calls, scenario),
        "engines": _engines(observations),
        "kvgate": _gateway(observations),
        "generator": _generator(recording, arrivals_end_seconds),
    }


# -- calls ------------------------------------------------------------------------------------------------------------


def in_time(call: CallRecord, targets: Targets, *, from_arrival: bool = False) -> bool:
    """Answered, and the attempt that answered held both targets.

    `from_arrival` counts the first token from the call's planned arrival: what its user saw.  A whole answer's first
    token is its end; the gaps of a client that reads slowly are its own.
    """
    if call.outcome is not Outcome.ANSWERED:
        return False
    attempt = call.attempts[-1]
    first = attempt.first_token_at if attempt.first_token_at is not None else attempt.ended
    begin = call.arrival if from_arrival else attempt.began
    return first - begin <= targets.first_token_seconds and attempt.worst_gap <= targets.gap_seconds


def _calls(calls: Sequence[CallRecord], targets: Targets) -> Figures:
    outcomes = Counter(call.outcome for call in calls)
    return {
        "offered": len(calls),
        **{str(outcome): outcomes[outcome] for outcome in Outcome},
        "in_time": sum(in_time(call, targets) for call in calls),
        "in_time_from_arrival": sum(in_time(call, targets, from_arrival=True) for call in calls),
        "retried": sum(len(call.attempts) > 1 for call in calls),
    }


def _attempts(calls: Sequence[CallRecord]) -> Figures:
    attempts = list(_all_attempts(calls))
    queued = [attempt.queue_ms for attempt in attempts if attempt.queue_ms is not None]
    return {
        "made": len(attempts),
        "admitted": sum(attempt.status == 200 for attempt in attempts),
        "queued": sum(waited > 0 for waited in queued),
        "queue_ms": summary(queued, LATENCY),
        **{str(end): sum(attempt.end is end for attempt in attempts) for end in End},
        "stopped_by_stage": _stopped(attempts),
        "timed_out_by_stage": _by_reason(attempts, End.TIMED_OUT),
        "failed_by_kind": _by_reason(attempts, End.FAILED),
        "back_after_refusal": _back(calls),
    }


def _back(calls: Sequence[CallRecord]) -> Figures:
    """Next attempts of refused ones, and how many of these were granted or queued, whatever became of them then."""
    pairs = [pair for call in calls for pair in pairwise(call.attempts) if pair[0].end is End.REFUSED]
    taken = [after for _, after in pairs if after.end is not End.REFUSED or _was_queued(after)]
    return {"count": len(pairs), "granted_or_queued": len(taken), "share": _share(len(taken), len(pairs))}


def _was_queued(attempt: Attempt) -> bool:
    return bool(attempt.queue_ms) or attempt.reason.endswith("queue_timeout")


def _refusals(calls: Sequence[CallRecord]) -> Figures:
    """Seconds from the request handed to the socket to the answer's last byte."""
    found: dict[str, dict[bool, list[float]]] = {}
    for call in calls:
        large = call.body_bytes >= SIZE_BYTES_SPLIT
        for attempt in call.attempts:
            if attempt.end is End.REFUSED:
                took = (attempt.ended - (attempt.sent_at or attempt.began)) * 1_000
                found.setdefault(attempt.reason, {False: [], True: []})[large].append(took)
    return {
        code: {
            "count": len(sizes[False]) + len(sizes[True]),
            "latency_ms": summary(sizes[False] + sizes[True], LATENCY, 2),
            "latency_ms_under_16_kb": summary(sizes[False], LATENCY, 2),
            "latency_ms_from_16_kb": summary(sizes[True], LATENCY, 2),
        }
        for code, sizes in sorted(found.items())
    }


def _first_token(calls: Sequence[CallRecord]) -> Figures:
    """Of calls that stream.  From arrival: of the attempt that answered or was left; other calls have none."""
    served = [call for call in calls if call.outcome in (Outcome.ANSWERED, Outcome.LEFT)]
    from_arrival = [
        (call.attempts[-1].first_token_at - call.arrival) * 1_000
        for call in served
        if call.attempts[-1].first_token_at is not None
    ]
    per_attempt = [
        (attempt.first_token_at - attempt.began) * 1_000
        for attempt in _all_attempts(calls)
        if attempt.first_token_at is not None
    ]
    return {
        "from_arrival": summary(from_arrival, LATENCY),
        "calls_without": sum(call.stream for call in calls) - len(from_arrival),
        "per_attempt": summary(per_attempt, LATENCY),
    }


def _tokens(calls: Sequence[CallRecord], seconds: float) -> Figures:
    """Output tokens: `completed` of calls that were answered, `wasted` of attempts that came to nothing."""
    completed = sum(call.attempts[-1].tokens for call in calls if call.outcome is Outcome.ANSWERED)
    good = (End.ANSWERED, End.LEFT)
    return {
        "completed": completed,
        "completed_per_second": round(completed / seconds, 1) if seconds else 0.0,
        "wasted": sum(attempt.tokens for attempt in _all_attempts(calls) if attempt.end not in good),
        "of_calls_that_left": sum(a.tokens for a in _all_attempts(calls) if a.end is End.LEFT),
    }


def _goodput(calls: Sequence[CallRecord], targets: Targets, seconds: float) -> Figures:
    """Of calls in time, per second."""
    found: Figures = {}
    for name, from_arrival in (("", False), ("_from_arrival", True)):
        good = [call for call in calls if in_time(call, targets, from_arrival=from_arrival)]
        tokens = sum(call.attempts[-1].tokens for call in good)
        found[f"calls_per_second{name}"] = round(len(good) / seconds, 2) if seconds else 0.0
        found[f"tokens{name}"] = tokens
        found[f"tokens_per_second{name}"] = round(tokens / seconds, 1) if seconds else 0.0
    return found


def _keys(calls: Sequence[CallRecord], scenario: Scenario) -> Figures:
    found: Figures = {
        key.name: {"offered": 0, "answered": 0, "in_time": 0, "tokens": 0} for key in scenario.weighted_keys
    }
    for call in calls:
        key = found.setdefault(call.key, {"offered": 0, "answered": 0, "in_time": 0, "tokens": 0})
        key["offered"] += 1
        key["in_time"] += in_time(call, scenario.targets)
        if call.outcome is Outcome.ANSWERED:
            key["answered"] += 1
            key["tokens"] += call.attempts[-1].tokens
    return found


# -- gaps -------------------------------------------------------------------------------------------------------------


def expected_gap_ms(scenario: Scenario, recording: Recording) -> float | None:
    """What the correction takes as the time between two tokens: the scenario's, else the pooled median."""
    if scenario.expected_gap_ms is not None:
        return max(scenario.expected_gap_ms, EXPECTED_GAP_MS_MIN)
    pooled = sorted(recording.gaps.pooled())
    return max(at_rank(pooled, 0.5) * 1_000, EXPECTED_GAP_MS_MIN) if pooled else None


def _gaps(scenario: Scenario, recording: Recording) -> Figures:
    """`gap_ms` pools the gaps of all streams as vLLM's own benchmark does, there called inter-token latency.

    A stream that stands still for 3 s has one gap where a hundred tokens should have come, so a pool of gaps hides
    stalls; `gap_corrected_ms` does not.  Streams that came to nothing count in both.
    """
    expected = expected_gap_ms(scenario, recording)
    pooled = recording.gaps.pooled()
    bins = binned(pooled) + binned(recording.open_gaps.pooled())
    return {
        "gap_ms": summary((gap * 1_000 for gap in pooled), GAP),
        "gap_corrected_ms": {
            "expected_ms": None if expected is None else round(expected, 2),
            **bin_summary(corrected(bins, expected) if expected is not None else bins, GAP),
        },
    }


def gap_p99_by_second(recording: Recording, expected_ms: float | None) -> tuple[list[Any], list[Any]]:
    """Pooled and corrected, in milliseconds; None in a second without a gap."""
    plain: list[Any] = []
    fair: list[Any] = []
    for gaps, open_gaps in zip(recording.gaps.seconds, recording.open_gaps.seconds, strict=True):
        plain.append(round(at_rank(sorted(gaps), 0.99) * 1_000, 1) if gaps else None)
        bins: Mapping[int, int] = binned(gaps) + binned(open_gaps)
        if expected_ms is not None:
            bins = corrected(bins, expected_ms)
        fair.append(bin_at_rank(bins, sorted(bins), 0.99) if bins else None)
    return plain, fair


# -- engines, gateway, generator --------------------------------------------------------------------------------------


def growth(samples: Sequence[EngineSample], of: Callable[[EngineSample], float | None]) -> float | None:
    """By how much a counter grew; one that fell has begun anew.  None where it was never seen."""
    seen = [value for sample in samples if (value := of(sample)) is not None]
    if not seen:
        return None
    return sum(after - before if after >= before else after for before, after in pairwise(seen))


def _engines(observations: Observations) -> Figures:
    each = {url: _engine(samples) for url, samples in observations.engines.items()}
    recomputed = _total(engine["recomputed_tokens"] for engine in each.values())
    return {
        "preemptions": _total(engine["preemptions"] for engine in each.values()),
        "recomputed_tokens": recomputed,
        "recomputed_tokens_from": "mock:recomputed_tokens_total"
        if recomputed is not None
        else "not visible: vLLM counts a prompt once however often it computes it; see preemptions",
        "each": each,
        "scrapes_missed": observations.missed,
    }


def _engine(samples: Sequence[EngineSample]) -> Figures:
    starts = [sample.started for sample in samples if sample.started is not None]
    return {
        "preemptions": growth(samples, lambda sample: sample.preemptions),
        "recomputed_tokens": growth(samples, lambda sample: sample.recomputed_tokens),
        "prompt_tokens": growth(samples, lambda sample: sample.prompt_tokens),
        "cached_tokens": growth(samples, lambda sample: sample.cached_tokens),
        "generation_tokens": growth(samples, lambda sample: sample.generation_tokens),
        "kv_use_share_max": _largest(sample.kv_use for sample in samples),
        "running_max": _largest(sample.running for sample in samples),
        "waiting_max": _largest(sample.waiting for sample in samples),
        "restarts": sum(after != before for before, after in pairwise(starts)),
    }


def _gateway(observations: Observations) -> Figures | None:
    if observations.left_over is None:
        return None
    shares: dict[str, list[float]] = {}
    for sample in observations.gateway:
        for pool, share in sample.shares_while_queued.items():
            shares.setdefault(pool, []).append(share)
    return {
        "leaked": observations.left_over,
        "clean": not any(observations.left_over.values()),
        "queue_max": max((sample.queue for sample in observations.gateway), default=None),
        "reserved_share_max": max(
            (s.reserved / s.limit for s in observations.gateway if s.limit), default=None
        ),
        "reserved_share_while_queued": {
            pool: {
                "samples": len(found),
                "mean": round(sum(found) / len(found), 3),
                "min": round(min(found), 3),
            }
            for pool, found in sorted(shares.items())
        },
        "refusal_ms": _server_refusals(observations),
        "real_over_predicted_wait": _predictions(observations),
    }


def _predictions(observations: Observations) -> Figures:
    """Of calls that waited and got a place: the shares of them by bounds of the gateway's buckets."""
    after, before = observations.predictions_after, observations.predictions_before
    buckets = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    count = max(buckets.values(), default=0.0)
    shares = {f"at_most_{bound:g}": round(buckets[bound] / count, 3) for bound in sorted(buckets) if count}
    return {"count": int(count), **shares}


def _server_refusals(observations: Observations) -> Figures:
    """The gateway's own measure, from the body's last byte to the answer's; upper bounds from its buckets."""
    found: Figures = {}
    for reason, after in sorted(observations.refusals_after.items()):
        before = observations.refusals_before.get(reason, {})
        buckets = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        count = max(buckets.values(), default=0.0)
        if count > 0:
            found[reason] = {"count": int(count)}
            for name, quantile in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                bound = histogram_quantile(buckets, quantile)
                found[reason][f"{name}_at_most"] = None if bound in (None, float("inf")) else bound * 1_000
            found[reason]["in_5_ms"] = int(max(n for bound, n in buckets.items() if bound <= QUICK_SECONDS))
    return found


def _generator(recording: Recording, seconds: float) -> Figures:
    lateness = summary((call.lateness * 1_000 for call in recording.calls), LATENCY)
    lag = summary((lag * 1_000 for lag in recording.lags), LATENCY)
    late, slow = lateness["p99"] or 0.0, lag["p99"] or 0.0
    troubles = recording.socket_shortage + recording.own_errors
    return {
        "kept_up": late < LATENESS_MS_MAX and slow < LAG_MS_MAX and not troubles,
        "bounds": {
            "lateness_ms_p99": LATENESS_MS_MAX,
            "lag_ms_p99": LAG_MS_MAX,
            "socket_shortage": 0,
            "own_errors": 0,
        },
        "lateness_ms": lateness,
        "lag_ms": lag,
        "cpu_seconds": round(recording.cpu_seconds, 2),
        "cpu_share": _share(recording.cpu_seconds, recording.sending_seconds),
        "events": sum(recording.tokens),
        "socket_shortage": recording.socket_shortage,
        "own_errors": recording.own_errors,
        "arrivals_seconds": round(seconds, 3),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def _all_attempts(calls: Iterable[CallRecord]) -> Iterator[Attempt]:
    return (attempt for call in calls for attempt in call.attempts)


def _streamed(recording: Recording) -> Iterator[CallRecord]:
    """Calls that got a second token, or waited for it in vain; slow readers make their gaps themselves."""
    for call in recording.calls:
        if call.stream and not call.slow and any(attempt.worst_gap for attempt in call.attempts):
            yield call


def _stopped(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Running where an answer had begun; one that does not stream begins with its end, so it waits until then."""
    open_ = [attempt for attempt in attempts if attempt.end is End.STOPPED]
    running = sum(attempt.status == 200 for attempt in open_)
    return {"running": running, "waiting": len(open_) - running}


def _by_reason(attempts: Iterable[Attempt], end: End) -> dict[str, int]:
    return dict(sorted(Counter(attempt.reason for attempt in attempts if attempt.end is end).items()))


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
