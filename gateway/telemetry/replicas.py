"""Metrics of each replica, from a state laid out as `GET /admin/v1/state`: its limits, and what its engine says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from gateway.telemetry.counted import Labels

_PLACE = ("fleet", "pool", "replica")
Replicas = Sequence[tuple[Labels, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Figure:
    key: str
    """In the state."""
    name: str
    text: str


_BOOKS = (
    _Figure("reserved", "kvgate_reserved_blocks", "Blocks held by calls"),
    _Figure("limit", "kvgate_limit_blocks", "Blocks that may be handed out"),
    _Figure("debt", "kvgate_debt_blocks", "Blocks held above the limit"),
    _Figure(
        "soft_blocks", "kvgate_soft_blocks", "Blocks that are kept free for conversations likely to go on"
    ),
    _Figure("sequences_limit", "kvgate_limit_sequences", "Sequences that may run"),
    _Figure(
        "prefill_tokens_limit", "kvgate_limit_prefill_tokens", "Prompt tokens that may be in prefill at once"
    ),
)
# No counters: workers and gateways tell what each has read last, so that a page may be older than the one before.
_ENGINE = (
    _Figure("kv_use", "kvgate_engine_kv_use_ratio", "Part of the engine's blocks that sequences hold"),
    _Figure("running", "kvgate_engine_running_requests", "Requests that the engine computes"),
    _Figure("waiting", "kvgate_engine_waiting_requests", "Requests that wait inside the engine"),
    _Figure("preemptions", "kvgate_engine_preemptions", "Requests that lost their blocks, since it began"),
    _Figure(
        "prefix_queries",
        "kvgate_engine_prefix_queries",
        "Prompt tokens looked up in its cache, since it began",
    ),
    _Figure("prefix_hits", "kvgate_engine_prefix_hits", "Prompt tokens found in its cache, since it began"),
    _Figure("swaps", "kvgate_engine_swap_used", "1 = blocks are in the host's memory"),
    _Figure("strangers", "kvgate_engine_strangers_blocks", "Blocks in use that the ledger does not know"),
    _Figure("incarnation", "kvgate_engine_incarnation", "Processes seen one after the other"),
)


def replica_families(replicas: Replicas) -> Iterator[Metric]:
    for figure in _BOOKS:
        yield _family(figure, replicas)
    engines = [(place, row["engine"]) for place, row in replicas if isinstance(row.get("engine"), Mapping)]
    for figure in _ENGINE:
        yield _family(figure, engines)
    yield _unknown(engines)


def _family(figure: _Figure, rows: Replicas) -> Metric:
    values: dict[Labels, float] = {}
    for place, row in rows:
        add(values, place, row.get(figure.key))
    return gauge(figure.name, figure.text, _PLACE, values)


def _unknown(engines: Replicas) -> Metric:
    """Of what an engine does not export there is no series above: nobody can see it, which is not 0."""
    values: dict[Labels, float] = {}
    for place, engine in engines:
        for figure in _ENGINE:
            add(values, (*place, figure.key), engine.get(figure.key) is None)
    text = "Engines that do not export it"
    return gauge("kvgate_engine_unknown", text, (*_PLACE, "figure"), values)


def add(values: dict[Labels, float], labels: Labels, value: Any) -> None:
    """Names that are not configured share one series; what is unknown has none."""
    if isinstance(value, int | float):
        values[labels] = values.get(labels, 0.0) + value


def gauge(name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
