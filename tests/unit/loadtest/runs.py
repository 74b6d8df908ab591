"""A small run, written by hand, whose figures can be worked out on paper."""

from gateway.loadtest.observe import EngineSample, GatewaySample, Observations
from gateway.loadtest.records import Attempt, CallRecord, End, Outcome, Recording
from gateway.loadtest.scenario import Scenario, parse

SECONDS = 10

SCENARIO: Scenario = parse(
    "name: paper\ndescription: By <hand>.\nkeys: [a, b]\ntargets: {first_token_seconds: 1, gap_seconds: 0.2}\n"
    "expected_gap_ms: 20\nphases: [{seconds: 8, sessions: 1}]\ncalls: [{prompt_tokens: 9, output_tokens: 9}]\n"
)


def call(
    number: int, key: str, arrival: float, outcome: Outcome, *attempts: Attempt, size: int = 2_000
) -> CallRecord:
    return CallRecord(
        number=number, key=key, arrival=arrival, lateness=0.001, prompt_tokens=9, output_tokens=9, body_bytes=size,
        stream=True, slow=False, outcome=outcome, attempts=list(attempts),
    )  # fmt: skip


def attempt(
    began: float, end: End, reason: str, first: float | None, ended: float, tokens: int = 0
) -> Attempt:
    return Attempt(
        target=0, began=began, end=end, reason=reason, status=200 if first else 429, sent_at=began,
        headers_at=began, first_token_at=first, ended=ended, events=tokens, tokens=tokens,
    )  # fmt: skip


def recording() -> Recording:
    """Five calls.

    0 (key a) is answered in time.  1 (a) is refused in 4 ms and answered at its second attempt: in time for the
    attempt, not for its user, who waited 1.9 s.  2 (b) is answered with a silence of 0.5 s.  3 (b) times out between
    tokens, then is refused for good with a large body.  4 (b) leaves.
    """
    found = Recording(SECONDS)
    quick = attempt(0.1, End.ANSWERED, "", 0.4, 1.0, tokens=5)
    refused = attempt(1.0, End.REFUSED, "429 queue_full", None, 1.004)
    second = attempt(2.4, End.ANSWERED, "", 2.9, 3.5, tokens=6)
    stalled = attempt(2.0, End.ANSWERED, "", 2.2, 4.0, tokens=7)
    stalled.worst_gap = 0.5
    silent = attempt(3.0, End.TIMED_OUT, "between_tokens", 3.2, 6.5, tokens=2)
    silent.worst_gap = 3.0
    large = attempt(7.0, End.REFUSED, "400 context_length_exceeded", None, 7.009)
    gone = attempt(4.0, End.LEFT, "", 4.1, 4.3, tokens=3)
    second.queue_ms, quick.queue_ms = 300, 0
    found.calls = [
        call(0, "a", 0.1, Outcome.ANSWERED, quick),
        call(1, "a", 1.0, Outcome.ANSWERED, refused, second),
        call(2, "b", 2.0, Outcome.ANSWERED, stalled),
        call(3, "b", 3.0, Outcome.GAVE_UP, silent, large, size=300_000),
        call(4, "b", 4.0, Outcome.LEFT, gone),
    ]
    for second_, gap in [(0, 0.02), (0, 0.02), (3, 0.5), (3, 0.02), (5, 0.02)]:
        found.gaps.add(second_ + 0.5, gap)
    found.open_gaps.add(6.5, 3.0)
    found.tokens[0] = 23
    found.lags.extend([0.001] * 99 + [0.003])
    found.cpu_seconds, found.sending_seconds = 0.5, 10.0
    return found


def observations() -> Observations:
    """One engine whose process restarts half-way, and a gateway."""
    shape = {"kv_use": 0.5, "blocks": 255.0, "running": 2.0, "waiting": 1.0}
    samples = [
        EngineSample(-0.5, True, preemptions=4, prompt_tokens=10, generation_tokens=7, started=1.0, **shape),
        EngineSample(0.5, True, preemptions=9, prompt_tokens=20, generation_tokens=20, started=1.0, **shape),
        EngineSample(1.0, False),
        EngineSample(1.5, True, preemptions=2, prompt_tokens=5, generation_tokens=3, started=2.0, **shape),
    ]
    gateway = [
        GatewaySample(0.5, 50, 100, 0, 1, 1, {}),
        GatewaySample(1.0, 90, 100, 3, 4, 1, {"demo/only": 0.9}),
        GatewaySample(1.5, 80, 100, 1, 4, 1, {"demo/only": 0.8}),
    ]
    nothing = dict.fromkeys(("reserved", "leases", "queue", "inflight"), 0)
    before = {"queue_full": {0.001: 1.0, 0.005: 1.0, float("inf"): 1.0}}
    after = {"queue_full": {0.001: 91.0, 0.005: 101.0, float("inf"): 101.0}}
    waits = {"predictions_before": {0.8: 0.0, 1.25: 2.0, float("inf"): 2.0}}
    waits["predictions_after"] = {0.8: 1.0, 1.25: 5.0, float("inf"): 6.0}
    return Observations({"http://e": samples}, gateway, before, after, nothing, **waits)
