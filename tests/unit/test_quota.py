"""What a call takes of its key's rate quotas, and what a client is told of them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.core import quota
from gateway.core.order import QUOTA_BUCKETS
from gateway.core.outcomes import Code
from gateway.core.quota import BUCKETS, DAY_US, MINUTE_US, Charge, Left, Quota, Units

COUNTS = st.integers(0, 10**7)
UNITS = st.builds(Units, COUNTS, COUNTS, COUNTS)


@st.composite
def quotas(draw: st.DrawFn) -> list[Quota]:
    buckets = draw(st.lists(st.sampled_from(range(len(BUCKETS))), unique=True))
    limits = [draw(st.integers(1, 10**9)) for _ in buckets]
    return [
        Quota(bucket, limit, draw(st.integers(1, limit)))
        for bucket, limit in zip(buckets, limits, strict=True)
    ]


def test_every_bucket_is_a_setting_and_fits_the_ledger() -> None:
    assert len(BUCKETS) == QUOTA_BUCKETS
    for bucket in range(len(BUCKETS)):
        assert hasattr(Limits(), Quota(bucket, 1, 1).name)


def test_limits_become_buckets() -> None:
    limits = Limits(
        requests_per_minute=3, prompt_tokens_per_day=10**9, output_tokens_per_minute=1000, minute_burst=0.25
    )
    assert quota.of_limits(msgspec.structs.asdict(limits), limits.minute_burst) == (
        Quota(0, 3, 1),
        Quota(3, 10**9, 10**9),
        Quota(4, 1000, 250),
    )
    assert quota.of_limits(msgspec.structs.asdict(Limits()), 1.0) == ()


@given(quotas(), UNITS, UNITS)
def test_a_corrected_charge_is_what_was_really_taken(
    found: list[Quota], before: Units, really: Units
) -> None:
    taken = quota.charges(found, before)
    corrections = quota.corrections(taken, really)
    difference = dict(zip(corrections[::2], corrections[1::2], strict=True))
    for charge, wanted in zip(taken, quota.charges(found, really), strict=True):
        bucket = charge.quota.bucket
        debt_max_us = quota.DEBT_WINDOWS_MAX * BUCKETS[bucket][2]
        most_us = min(wanted.microseconds, charge.microseconds + debt_max_us)
        assert charge.microseconds + difference.get(bucket, 0) == most_us


@given(quotas(), UNITS)
def test_no_usage_that_an_engine_can_report_is_too_much_for_the_ledger(
    found: list[Quota], before: Units
) -> None:
    """Its settle would be refused there, and its blocks would not come back."""
    most = 2**53 - 1  # what core/sse.py takes for a count
    flat = quota.corrections(quota.charges(found, before), Units(1, most, most))
    for bucket, debt_us in zip(flat[::2], flat[1::2], strict=True):
        assert debt_us <= quota.DEBT_WINDOWS_MAX * BUCKETS[bucket][2] < 2**50


@given(quotas(), UNITS)
def test_what_goes_to_the_ledger_is_exact_there(found: list[Quota], units: Units) -> None:
    """Integers below 2^53, and a call that the quota can ever hold never takes more than a full bucket."""
    taken = quota.charges(found, units)
    if quota.never_fits(taken):
        return
    arguments = quota.arguments(taken)
    for bucket, cost, capacity in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        assert 0 <= cost <= capacity <= BUCKETS[bucket][2]
        assert capacity < 2**53


@pytest.mark.parametrize(
    ("units", "code"), [(Units(1, 10, 100), None), (Units(1, 10, 101), Code.KEY_CAP_EXCEEDED)]
)
def test_more_than_a_full_bucket_never_fits(units: Units, code: Code | None) -> None:
    refusal = quota.never_fits(quota.charges([Quota(0, 60, 60), Quota(4, 1000, 100)], units))
    assert (refusal.code if refusal else None) == code
    if refusal:
        assert refusal.message == (
            "the request may take 101 output tokens, "
            "the key's limits.output_tokens_per_minute gives at most 100 at once"
        )
        assert refusal.should_retry is False
        assert refusal.retry_ms is None


def test_a_refusal_names_the_limit_and_the_true_time() -> None:
    tokens = Quota(2, 1000, 1000)
    refusal = quota.refusal(
        [Charge(Quota(0, 60, 60), 1), Charge(tokens, 100)], 2, MINUTE_US * 38 // 1000, 37_200
    )
    assert refusal.code is Code.QUOTA_EXCEEDED
    assert refusal.message == (
        "the request may take 100 of the key's limits.prompt_tokens_per_minute, which is 1000; 38 left now"
    )
    assert (refusal.retry_ms, refusal.should_retry) == (37_200, None)
    later = quota.refusal([Charge(tokens, 100)], 2, 0, 120_001)
    assert (later.retry_ms, later.should_retry) == (120_001, False)
    assert dict(refusal.headers) == {
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"38",
        b"x-ratelimit-reset-tokens": b"57.72s",
    }


def test_who_used_more_than_the_bucket_holds_is_told_when_it_is_full() -> None:
    tokens = Quota(2, 1000, 1000)
    refusal = quota.refusal([Charge(tokens, 100)], 2, -2 * MINUTE_US, 126_000)
    headers = dict(refusal.headers)
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"
    assert headers[b"x-ratelimit-reset-tokens"] == b"3m0s"
    assert "; 0 left now" in refusal.message


@given(st.integers(1, 2000), st.sampled_from(range(len(BUCKETS))), st.data())
def test_a_full_bucket_holds_what_it_says_and_counts_it_down(
    limit: int, bucket: int, data: st.DataObject
) -> None:
    """Whether its window can be divided by the limit or not."""
    capacity = data.draw(st.integers(1, limit))
    one = Charge(Quota(bucket, limit, capacity), 1)
    full_us = one.quota.microseconds(capacity)
    for taken in range(1, capacity + 1):
        missing_us = taken * one.microseconds
        assert missing_us <= full_us
        assert quota.lefts([one], [missing_us])[0].remaining == capacity - taken


def test_headers_tell_of_the_tightest_quota_of_each_kind() -> None:
    left = [
        Left(Quota(0, 60, 60), 30, MINUTE_US // 2),
        Left(Quota(1, 1000, 1000), 10, DAY_US * 99 // 100),
        Left(Quota(4, 500, 500), 500, 0),
    ]
    assert dict(quota.headers(left)) == {
        b"x-ratelimit-limit-requests": b"1000",
        b"x-ratelimit-remaining-requests": b"10",
        b"x-ratelimit-reset-requests": b"23h45m36s",
        b"x-ratelimit-limit-tokens": b"500",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"0ms",
    }


@pytest.mark.parametrize(
    ("missing_us", "told"),
    [(1, b"1ms"), (999_000, b"999ms"), (1_000_000, b"1s"), (1_500_000, b"1.5s"), (360_000_000, b"6m0s"),
     (DAY_US, b"24h0m0s")],
)  # fmt: skip
def test_a_span_is_written_as_openai_writes_it(missing_us: int, told: bytes) -> None:
    assert dict(quota.headers([Left(Quota(1, 5, 5), 0, missing_us)]))[b"x-ratelimit-reset-requests"] == told
