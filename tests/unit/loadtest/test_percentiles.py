"""Percentiles against naive ones, and the correction for coordinated omission worked out by hand."""

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.loadtest.percentiles import (
    at_rank,
    bin_summary,
    binned,
    corrected,
    histogram_quantile,
    summary,
)


@settings(deadline=None)
@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=300),
    quantile=st.sampled_from([0.01, 0.5, 0.9, 0.99, 0.999, 1.0]),
)
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], quantile: float
) -> None:
    found = at_rank(sorted(values), quantile)

    def enough(value: float) -> bool:
        return sum(other <= value for other in values) >= quantile * len(values) - 1e-9

    assert found in values
    assert enough(found)
    assert not any(enough(value) for value in values if value < found)


def test_of_a_hundred_values_the_99th() -> None:
    assert summary(range(1, 101), ("p50", "p90", "p99", "p999")) == {
        "count": 100, "p50": 50, "p90": 90, "p99": 99, "p999": 100, "max": 100,
    }  # fmt: skip
    assert summary([], ("p50",)) == {"count": 0, "p50": None, "max": None}


def test_a_stall_weighs_as_the_tokens_that_should_have_come() -> None:
    """98 gaps of 20 ms and one silence of 100 ms: it stands for the gaps of 100, 80, 60, 40 and 20 ms."""
    gaps = array("f", [0.020] * 98 + [0.100])

    assert corrected(binned(gaps), 20) == {200: 99, 1_000: 1, 800: 1, 600: 1, 400: 1}
    plain = bin_summary(binned(gaps), ("p50", "p99"))
    fair = bin_summary(corrected(binned(gaps), 20), ("p50", "p99"))
    assert plain == {"count": 99, "p50": 20, "p99": 100, "max": 100}
    assert fair == {"count": 103, "p50": 20, "p99": 80, "max": 100}


def test_one_long_silence_hides_in_a_pool_and_not_in_the_correction() -> None:
    """A minute of a stream at 20 ms a token with a silence of 3 s in it: one gap of 2,851, and 5 % of the time."""
    gaps = [0.020] * 2_850 + [3.0]

    plain = bin_summary(binned(gaps), ("p99",))
    fair = bin_summary(corrected(binned(gaps), 20), ("p99",))

    assert plain["p99"] == 20
    assert fair["p99"] == pytest.approx(3_000 - 20 * 30, abs=21)


@settings(deadline=None)
@given(
    bins=st.dictionaries(st.integers(0, 3_000), st.integers(1, 5), max_size=20),
    expected_ms=st.sampled_from([0.01, 1, 1.7, 20, 50, 400]),
)
def test_the_correction_is_hdrhistograms(bins: dict[int, int], expected_ms: float) -> None:
    step = round(max(expected_ms, 1.0) / 0.1)
    naive: dict[int, int] = {}
    for value, count in bins.items():
        naive[value] = naive.get(value, 0) + count
        missing = value - step
        while missing >= step:
            naive[missing] = naive.get(missing, 0) + count
            missing -= step

    assert corrected(bins, expected_ms) == naive


@settings(deadline=None)
@given(gaps=st.lists(st.floats(0, 60), min_size=1, max_size=200))
def test_counted_bins_give_the_same_percentiles_to_a_tenth_of_a_millisecond(gaps: list[float]) -> None:
    names = ("p50", "p99", "p999")
    exact = summary((gap * 1_000 for gap in gaps), names, 3)
    rough = bin_summary(binned(gaps), names)

    for name in (*names, "max"):
        left, right = exact[name], rough[name]
        assert left is not None
        assert right is not None
        assert math.isclose(left, right, abs_tol=0.11)


def test_a_quantile_of_buckets_is_the_bound_it_falls_under() -> None:
    buckets = {0.001: 50.0, 0.005: 99.0, 0.01: 100.0, float("inf"): 100.0}

    assert histogram_quantile(buckets, 0.5) == 0.001
    assert histogram_quantile(buckets, 0.99) == 0.005
    assert histogram_quantile(buckets, 1.0) == 0.01
    assert histogram_quantile({0.001: 0.0}, 0.5) is None
    assert histogram_quantile({}, 0.5) is None
