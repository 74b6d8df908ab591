"""Metrics of one process, as Prometheus reads them.

Every label comes from the configuration or from an enum, never from a request, so the number of series is bounded
whatever clients send.  What is counted here is counted in plain dicts: an event a token makes a tenth of a
microsecond matter, and the client library's own histogram costs seven times as much.  Not for several threads: events
and scrapes belong to one event loop.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.core.events import (
    AdmittedByShare,
    CallEnded,
    Event,
    FirstToken,
    Healed,
    LeaseLost,
    StoreAnswered,
    StoreUp,
    TokenGaps,
)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

REFUSAL_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
STORE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
QUEUE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TTFT_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
UNUSED_BLOCKS = (0.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
ERROR_RATIO = (-0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)

Labels = tuple[str, ...]


class _Counter:
    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[Labels, int] = {}

    def add(self, labels: Labels, amount: int = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
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


class _Histogram:
    def __init__(self, name: str, text: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._series: dict[Labels, _Series] = {}

    def add(self, labels: Labels, value: float) -> None:
        self.add_all(labels, (value,))

    def add_all(self, labels: Labels, values: Iterable[float]) -> None:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(self._bounds)
        for value in values:
            series.add(value)

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric(labels, self._buckets(series), series.sum)
        return family

    def _buckets(self, series: _Series) -> list[tuple[str, float]]:
        """Cumulative, as the format wants them."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), series.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class _Known:
    """The configured names; whatever else is asked for becomes the empty label."""

    def __init__(self, fleets: Mapping[str, Mapping[str, Collection[str]]], classes: Collection[str]) -> None:
        self.fleets = tuple(fleets)
        self._pools = {(fleet, pool) for fleet, pools in fleets.items() for pool in pools}
        self._replicas = {
            (fleet, pool, replica)
            for fleet, pools in fleets.items()
            for pool, replicas in pools.items()
            for replica in replicas
        }
        self._classes = frozenset(classes)

    def fleet(self, fleet: str) -> str:
        return fleet if fleet in self.fleets else ""

    def class_(self, class_: str) -> str:
        return class_ if class_ in self._classes else ""

    def pool(self, fleet: str, pool: str) -> Labels:
        return (fleet, pool) if (fleet, pool) in self._pools else (self.fleet(fleet), "")

    def replica(self, fleet: str, pool: str, replica: str) -> Labels:
        known = (fleet, pool, replica) in self._replicas
        return (fleet, pool, replica) if known else (*self.pool(fleet, pool), "")


class Metrics(Collector):
    """An observer of events, and the source of `/metrics`."""

    def __init__(
        self,
        fleets: Mapping[str, Mapping[str, Collection[str]]],
        classes: Collection[str],
        inflight: Callable[[], Mapping[str, int]],
    ) -> None:
        """As `know`.  `inflight`: calls of each fleet that this process has now."""
        self.know(fleets, classes)
        self._inflight = inflight
        self._states: dict[str, Mapping[str, Any]] = {}
        self._store_up = False
        self._make_families()
        self._handlers: dict[type, Callable[[Any], None]] = {
            TokenGaps: self._on_gaps,
            CallEnded: self._on_call,
            FirstToken: self._on_first,
            StoreAnswered: lambda event: self._store.add((), event.milliseconds / 1_000),
            StoreUp: self._on_store,
            AdmittedByShare: lambda event: self._shared.add((self._known.fleet(event.fleet),)),
            LeaseLost: lambda event: self._expired.add((self._known.fleet(event.fleet),)),
            Healed: lambda event: self._healed.add((self._known.fleet(event.fleet),), event.count),
        }
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def __call__(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def know(self, fleets: Mapping[str, Mapping[str, Collection[str]]], classes: Collection[str]) -> None:
        """The configured names.  `fleets`: fleet -> pool -> names of replicas; a lane is named as a pool."""
        self._known = _Known(fleets, classes)

    def set_state(self, fleet: str, state: Mapping[str, Any]) -> None:
        """What the store holds for a fleet, laid out as `GET /admin/v1/state`; shown until the next one comes."""
        if self._known.fleet(fleet):
            self._states[fleet] = state

    def reload_failed(self, file: str) -> None:
        """`config` or `keys` was changed and could not be used."""
        self._reload_failures.add((file,))

    def render(self) -> bytes:
        """The body of `/metrics`, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield family.family()
        yield _gauge("kvgate_store_up", "1 while the store answers", (), {(): float(self._store_up)})
        yield self._inflight_gauge()
        yield from self._state_gauges()

    def _make_families(self) -> None:
        place = ("fleet", "pool", "class")
        self._calls = _Counter(
            "kvgate_admission_requests",
            "Calls by how they ended",
            ("outcome", "reason", "pool", "class", "fleet"),
        )
        self._expired = _Counter("kvgate_leases_expired", "Leases that this process lost", ("fleet",))
        self._healed = _Counter("kvgate_healed", "Differences from the store that were mended", ("fleet",))
        self._shared = _Counter(
            "kvgate_share_admissions", "Calls admitted by this process alone, without the store", ("fleet",)
        )
        self._reload_failures = _Counter("kvgate_reload_failures", "Changes of a file not used", ("file",))
        for file in ("config", "keys"):
            self._reload_failures.add((file,), 0)
        self._refusals = _Histogram(
            "kvgate_refusal_seconds", "Body read to refusal written", ("fleet", "reason"), REFUSAL_SECONDS
        )
        self._waits = _Histogram(
            "kvgate_queue_wait_seconds", "Waiting for blocks", ("fleet", "lane", "class"), QUEUE_SECONDS
        )
        self._ttft = _Histogram("kvgate_ttft_seconds", "Body read to first data event", place, TTFT_SECONDS)
        self._gaps = _Histogram("kvgate_inter_token_seconds", "Between data events", place, TOKEN_SECONDS)
        self._unused = _Histogram(
            "kvgate_reserved_unused_blocks",
            "Left over at settle",
            ("fleet", "pool", "replica"),
            UNUSED_BLOCKS,
        )
        self._errors = _Histogram(
            "kvgate_estimate_error_ratio", "(estimated - real) / real prompt tokens", ("fleet",), ERROR_RATIO
        )
        self._store = _Histogram("kvgate_store_seconds", "Round trips to the store", (), STORE_SECONDS)
        self._families = (
            self._calls, self._expired, self._healed, self._shared, self._reload_failures, self._refusals, self._waits,
            self._ttft, self._gaps, self._unused, self._errors, self._store,
        )  # fmt: skip

    def _place(self, event: CallEnded | FirstToken | TokenGaps) -> Labels:
        return *self._known.pool(event.fleet, event.pool), self._known.class_(event.class_)

    def _on_gaps(self, event: TokenGaps) -> None:
        self._gaps.add_all(self._place(event), [gap / 1_000 for gap in event.gaps_ms])

    def _on_first(self, event: FirstToken) -> None:
        self._ttft.add(self._place(event), event.ttft_ms / 1_000)

    def _on_store(self, event: StoreUp) -> None:
        self._store_up = event.up

    def _on_call(self, event: CallEnded) -> None:
        fleet, pool, class_ = self._place(event)
        reason = event.reason.value if event.reason is not None else ""
        self._calls.add((event.outcome.value, reason, pool, class_, fleet))
        if event.refusal_ms is not None:
            self._refusals.add((fleet, reason), event.refusal_ms / 1_000)
        elif fleet:
            lane = self._known.pool(event.fleet, event.lane)  # a lane has the name of a pool
            self._waits.add((*lane, class_), event.queue_ms / 1_000)
        if event.unused_blocks is not None:
            replica = self._known.replica(event.fleet, event.pool, event.replica)
            self._unused.add(replica, event.unused_blocks)
        if event.prompt_tokens and event.prompt_tokens_estimated:
            error = (event.prompt_tokens_estimated - event.prompt_tokens) / event.prompt_tokens
            self._errors.add((fleet,), error)

    def _inflight_gauge(self) -> Metric:
        counts: dict[Labels, float] = dict.fromkeys(((fleet,) for fleet in self._known.fleets), 0.0)
        for fleet, count in self._inflight().items():
            _sum(counts, (self._known.fleet(fleet),), count)
        return _gauge("kvgate_inflight_requests", "Calls being served or waiting", ("fleet",), counts)

    def _state_gauges(self) -> Iterator[Metric]:
        reserved: dict[Labels, float] = {}
        limit: dict[Labels, float] = {}
        debt: dict[Labels, float] = {}
        depth: dict[Labels, float] = {}
        for fleet, state in self._states.items():
            for labels, replica in self._replicas(fleet, state):
                _sum(reserved, labels, replica.get("reserved"))
                _sum(limit, labels, replica.get("limit"))
                _sum(debt, labels, replica.get("debt"))
            for lane, classes in _items(state.get("queued")):
                for class_, tickets in _items(classes):
                    labels = (*self._known.pool(fleet, lane), self._known.class_(class_))
                    _sum(depth, labels, tickets)
        places = ("fleet", "pool", "replica")
        yield _gauge("kvgate_reserved_blocks", "Blocks held by calls", places, reserved)
        yield _gauge("kvgate_limit_blocks", "Blocks that may be handed out", places, limit)
        yield _gauge("kvgate_debt_blocks", "Blocks held above the limit", places, debt)
        yield _gauge("kvgate_queue_depth", "Calls waiting", ("fleet", "lane", "class"), depth)

    def _replicas(self, fleet: str, state: Mapping[str, Any]) -> Iterator[tuple[Labels, Mapping[str, Any]]]:
        for pool, inside in _items(state.get("pools")):
            replicas = inside.get("replicas") if isinstance(inside, Mapping) else None
            for name, replica in _items(replicas):
                if isinstance(replica, Mapping):
                    yield self._known.replica(fleet, pool, name), replica


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """Nothing where the state lacks a level."""
    return value.items() if isinstance(value, Mapping) else ()


def _sum(values: dict[Labels, float], labels: Labels, value: Any) -> None:
    """Names that are not configured share one series; what is unknown has none."""
    if isinstance(value, int | float):
        values[labels] = values.get(labels, 0.0) + value


def _gauge(name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
