"""Percentiles by nearest rank, and the correction of gaps for coordinated omission: pure."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

BIN_MS = 0.1
"""Resolution of corrected gaps."""
EXPECTED_GAP_MS_MIN = 1.0
"""A shorter expected interval is taken as this: below it events share one read of the socket."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def at_rank(ordered: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(quantile * len(ordered) - 1e-9) - 1)]


def summary(values: Iterable[float], names: Sequence[str], digits: int = 1) -> dict[str, float | int | None]:
    """`count`, the named percentiles and `max`, rounded; None where there is no value."""
    ordered = sorted(values)
    found: dict[str, float | int | None] = {"count": len(ordered)}
    for name in names:
        found[name] = round(at_rank(ordered, QUANTILES[name]), digits) if ordered else None
    found["max"] = round(ordered[-1], digits) if ordered else None
    return found


def binned(gaps_seconds: Iterable[float]) -> Counter[int]:
    """Counts by whole bins of `BIN_MS`."""
    return Counter(round(gap * (1_000 / BIN_MS)) for gap in gaps_seconds)


def corrected(bins: Mapping[int, int], expected_gap_ms: float) -> dict[int, int]:
    """Bins with the tokens that should have come in each silence, as HdrHistogram corrects for coordinated omission.

    A gap g counts also as g - e, g - 2e, ... down to e: had tokens been due every e, the one due at the beginning of
    the silence would have waited all of it, the next one e less, and so on.  Source: HdrHistogram's
    `recordValueWithExpectedInterval`.  Each bin hands its whole count to the bin one e below.
    """
    step = round(max(expected_gap_ms, EXPECTED_GAP_MS_MIN) / BIN_MS)
    counts = dict(bins)
    heap = [-bin_ for bin_ in counts]
    heapq.heapify(heap)
    while heap:
        bin_ = -heapq.heappop(heap)
        below = bin_ - step
        if below < step:
            continue
        if below not in counts:
            counts[below] = 0
            heapq.heappush(heap, -below)
        counts[below] += counts[bin_]
    return counts


def bin_summary(bins: Mapping[int, int], names: Sequence[str]) -> dict[str, float | int | None]:
    """As `summary`, in milliseconds, of counted bins."""
    ordered = sorted(bins)
    found: dict[str, float | int | None] = {"count": sum(bins.values())}
    for name in names:
        found[name] = bin_at_rank(bins, ordered, QUANTILES[name])
    found["max"] = round(ordered[-1] * BIN_MS, 1) if ordered else None
    return found


def bin_at_rank(bins: Mapping[int, int], ordered: Sequence[int], quantile: float) -> float | None:
    rank = max(1, math.ceil(quantile * sum(bins.values()) - 1e-9))
    seen = 0
    for bin_ in ordered:
        seen += bins[bin_]
        if seen >= rank:
            return round(bin_ * BIN_MS, 1)
    return None


def histogram_quantile(buckets: Mapping[float, float], quantile: float) -> float | None:
    """Upper bound of a quantile from cumulative Prometheus buckets: the bound of the bucket it falls into."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    return next(bound for bound in bounds if buckets[bound] >= quantile * total)
