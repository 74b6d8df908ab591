"""What a process counts from its start on, so laid out that it can be sent, added up and continued by another process.

Plain dicts: an event a token makes a tenth of a microsecond matter, and the client library's own histogram costs seven
times as much.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

Labels = tuple[str, ...]

REFUSAL_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
STORE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
QUEUE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PREDICTION_RATIO = (0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
TTFT_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
UNUSED_BLOCKS = (0.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
ERROR_RATIO = (-0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Totals(msgspec.Struct, frozen=True):
    """A copy of all counts, by name of the family and by label values."""

    counters: dict[str, dict[Labels, int]]
    histograms: dict[str, dict[Labels, tuple[list[int], float]]]
    """The counts of the buckets, not cumulative, and the sum of all values."""


class Snapshot(msgspec.Struct, frozen=True):
    """One process at one moment."""

    pid: int
    totals: Totals
    inflight: dict[str, int]
    """Calls by fleet."""
    store_up: bool


class Counter:
    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name, self._text, self._labels = name, text, labels
        self._counts: dict[Labels, int] = {}

    def add(self, labels: Labels, amount: int = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def counts(self) -> dict[Labels, int]:
        """A copy."""
        return dict(self._counts)

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return family


class _Series:
    """The distribution behind one set of label values."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def merge(self, counts: list[int], sum_: float) -> None:
        self.counts = [mine + other for mine, other in zip(self.counts, counts, strict=True)]
        self.sum += sum_


class Histogram:
    def __init__(self, name: str, text: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        self.name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._series: dict[Labels, _Series] = {}

    def add(self, labels: Labels, value: float) -> None:
        series = self._series.get(labels) or self._of(labels)
        series.counts[bisect_left(self._bounds, value)] += 1
        series.sum += value

    def add_all(self, labels: Labels, values: Iterable[float]) -> None:
        series = self._of(labels)
        for value in values:
            series.add(value)

    def merge(self, labels: Labels, counts: list[int], sum_: float) -> None:
        """Another process's series; one with other buckets is of another version, and left out."""
        if len(counts) == len(self._bounds) + 1:
            self._of(labels).merge(counts, sum_)

    def series(self) -> dict[Labels, tuple[list[int], float]]:
        """A copy: the counts of the buckets, and the sum."""
        return {labels: (list(series.counts), series.sum) for labels, series in self._series.items()}

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric(labels, self._buckets(series), series.sum)
        return family

    def _of(self, labels: Labels) -> _Series:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(self._bounds)
        return series

    def _buckets(self, series: _Series) -> list[tuple[str, float]]:
        """Cumulative, as the format wants them."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), series.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


def _of_elastic_calls() -> tuple[Counter, Counter, Counter]:
    return (
        Counter(
            "kvgate_overdrafts",
            "Growths of calls that their replica had no blocks left for",
            ("fleet", "pool", "replica"),
        ),
        Counter(
            "kvgate_unmetered_streams",
            "Elastic calls whose engine did not report tokens, and which hold all of their demand",
            ("fleet", "pool"),
        ),
        Counter(
            "kvgate_length_surprises",
            "Times that calls wrote more than was learned, which was then forgotten",
            ("fleet", "class"),
        ),
    )


def _of_files() -> Counter:
    failures = Counter("kvgate_reload_failures", "Changes of a file not used", ("file",))
    for file in ("config", "keys", "jwt", "replicas"):
        failures.add((file,), 0)
    return failures


def _of_prefixes() -> tuple[Counter, Counter, Counter, Counter]:
    places = ("fleet", "pool", "replica")
    return (
        Counter("kvgate_warm_requests", "Calls for whose conversation blocks were held softly", places),
        Counter(
            "kvgate_prefix_expected_tokens",
            "Tokens of prompts that other calls held, where the engine tells what it had",
            places,
        ),
        Counter("kvgate_prefix_found_tokens", "Of these, tokens that the engine had in its cache", places),
        Counter(
            "kvgate_prefix_doubts", "Caches that had less than they should, and are shared no more", places
        ),
    )


def _of_pins() -> tuple[Counter, Counter, Counter]:
    return (
        Counter(
            "kvgate_pin_calls",
            "Calls of kvgate's own that keep a named prefix in an engine's cache",
            ("fleet", "prefix", "ending"),
        ),
        Counter("kvgate_pin_tokens", "Tokens that engines computed for such calls", ("fleet", "prefix")),
        Counter(
            "kvgate_pin_saved_tokens",
            "Tokens of a named prefix that calls of clients found in an engine's cache",
            ("fleet", "prefix"),
        ),
    )


def _of_queues() -> tuple[Histogram, Histogram]:
    lines = ("fleet", "lane", "class")
    return (
        Histogram(
            "kvgate_queue_wait_seconds",
            "From asking for blocks to having them or giving up",
            lines,
            QUEUE_SECONDS,
        ),
        Histogram(
            "kvgate_queue_wait_prediction_ratio",
            "Real over predicted wait, of calls that waited and got a place",
            lines,
            PREDICTION_RATIO,
        ),
    )


class Counted:
    """Every counter and histogram of the gateway, of one process or added up over several."""

    def __init__(self) -> None:
        places = ("fleet", "pool", "class")
        self.calls = Counter(
            "kvgate_admission_requests",
            "Calls by how they ended",
            ("outcome", "reason", "pool", "class", "fleet"),
        )
        self.expired = Counter("kvgate_leases_expired", "Leases that a process lost", ("fleet",))
        self.healed = Counter("kvgate_healed", "Differences from the store that were mended", ("fleet",))
        text = "Calls admitted by a process alone, without the store"
        self.shared = Counter("kvgate_share_admissions", text, ("fleet",))
        self.overdrafts, self.unmetered, self.surprises = _of_elastic_calls()
        self.warm, self.prefix_expected, self.prefix_found, self.prefix_doubts = _of_prefixes()
        self.pin_calls, self.pin_tokens, self.pin_saved = _of_pins()
        self.reload_failures = _of_files()
        text = "Calls that ended and are not in the file of `log.calls`"
        self.calls_lost = Counter("kvgate_call_log_lost", text, ())
        self.refusals = Histogram(
            "kvgate_refusal_seconds",
            "From a body's last byte to the refusal's first",
            ("fleet", "reason"),
            REFUSAL_SECONDS,
        )
        self.waits, self.predictions = _of_queues()
        self.ttft = Histogram(
            "kvgate_ttft_seconds", "From a body's last byte to the first data event", places, TTFT_SECONDS
        )
        self.gaps = Histogram(
            "kvgate_inter_token_seconds", "Between two data events of a stream", places, TOKEN_SECONDS
        )
        self.unused = Histogram(
            "kvgate_reserved_unused_blocks",
            "Blocks of a call that it did not come to use",
            ("fleet", "pool", "replica"),
            UNUSED_BLOCKS,
        )
        self.errors = Histogram(
            "kvgate_estimate_error_ratio", "(estimated - real) / real prompt tokens", ("fleet",), ERROR_RATIO
        )
        self.store = Histogram("kvgate_store_seconds", "Round trips to the store", (), STORE_SECONDS)
        self._counters = (
            self.calls, self.expired, self.healed, self.shared, self.overdrafts, self.unmetered, self.surprises,
            self.prefix_expected, self.prefix_found, self.prefix_doubts, self.reload_failures, self.calls_lost,
            self.pin_calls, self.pin_tokens, self.pin_saved, self.warm,
        )  # fmt: skip
        self.of_replicas = (
            self.overdrafts, self.prefix_expected, self.prefix_found, self.prefix_doubts, self.warm,
        )  # fmt: skip
        """Counters of which each replica has one from the start."""
        self._histograms = (
            self.refusals, self.waits, self.predictions, self.ttft, self.gaps, self.unused, self.errors, self.store,
        )  # fmt: skip

    def families(self) -> Iterator[Metric]:
        for family in (*self._counters, *self._histograms):
            yield family.family()

    def totals(self) -> Totals:
        return Totals(
            {counter.name: counter.counts() for counter in self._counters},
            {histogram.name: histogram.series() for histogram in self._histograms},
        )

    def add(self, totals: Totals) -> None:
        """Families that only the other side knows are left out: it is of another version."""
        for counter in self._counters:
            for labels, count in totals.counters.get(counter.name, {}).items():
                counter.add(labels, count)
        for histogram in self._histograms:
            for labels, (counts, sum_) in totals.histograms.get(histogram.name, {}).items():
                histogram.merge(labels, counts, sum_)
