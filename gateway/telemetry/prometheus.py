"""Metrics of one process, or of all workers of one command, as Prometheus reads them.

Every label comes from the configuration or from an enum, never from a request, so the number of series is bounded
whatever clients send.  Not for several threads: events and scrapes belong to one event loop.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.core.events import (
    AdmittedByShare,
    CacheDoubted,
    CallEnded,
    Event,
    FirstToken,
    Healed,
    LeaseLost,
    LengthSurprise,
    Overdraft,
    PinCall,
    PinUse,
    PrefixFound,
    StoreAnswered,
    StoreUp,
    TokenGaps,
    Unmetered,
)
from gateway.core.learned import QUANTILES
from gateway.core.outcomes import Outcome
from gateway.core.quota import ALL_FLEETS
from gateway.core.rests import Why
from gateway.telemetry.counted import Counted, Labels, Snapshot, Totals
from gateway.telemetry.replicas import add, gauge, replica_families
from gateway.telemetry.workers import RollCall

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OUTCOMES = {outcome: outcome.value for outcome in Outcome}
"""An enum's own way to its value is Python."""
REPLICA_STATES = ("up", "draining", "down")
"""One that the configuration has no more is none of them."""


class _Known:
    """The configured names; whatever else is asked for becomes the empty label."""

    def __init__(self, fleets: Mapping[str, Mapping[str, Collection[str]]], classes: Collection[str]) -> None:
        self.fleets = tuple(fleets)
        self._pools = {(fleet, pool) for fleet, pools in fleets.items() for pool in pools}
        self._replicas: set[tuple[str, str, str]] = set()
        for fleet, pools in fleets.items():
            self.replace(fleet, pools)
        self._classes = frozenset(classes)

    def replace(self, fleet: str, pools: Mapping[str, Collection[str]]) -> None:
        """The replicas of a fleet."""
        self._replicas = {place for place in self._replicas if place[0] != fleet}
        self._replicas |= {(fleet, pool, replica) for pool, names in pools.items() for replica in names}

    def fleet(self, fleet: str) -> str:
        """The books of the limits over all fleets have their series, too."""
        return fleet if fleet in self.fleets or fleet == ALL_FLEETS else ""

    def class_(self, class_: str) -> str:
        return class_ if class_ in self._classes else ""

    def pool(self, fleet: str, pool: str) -> Labels:
        return (fleet, pool) if (fleet, pool) in self._pools else (self.fleet(fleet), "")

    def replica(self, fleet: str, pool: str, replica: str) -> Labels:
        known = (fleet, pool, replica) in self._replicas
        return (fleet, pool, replica) if known else (*self.pool(fleet, pool), "")


class Metrics:
    """An observer of events, and the source of `/metrics`."""

    def __init__(
        self,
        fleets: Mapping[str, Mapping[str, Collection[str]]],
        classes: Collection[str],
        inflight: Callable[[], Mapping[str, int]],
        calls_lost: Callable[[], int] = lambda: 0,
    ) -> None:
        """As `know`.  `inflight`: calls of each fleet that this process has now; `calls_lost`: those that its call log
        has lost since the start."""
        self._counted = Counted()
        self.know(fleets, classes)
        self._inflight = inflight
        self._calls_lost = calls_lost
        self._calls_lost_before = 0
        self._states: dict[str, Mapping[str, Any]] = {}
        self._store_up = False
        self._processes = _Processes()
        self._platform = PlatformCollector(registry=None)
        self._handlers: dict[type, Callable[[Any], None]] = {
            TokenGaps: self._on_gaps,
            CallEnded: self._on_call,
            FirstToken: self._on_first,
            StoreAnswered: lambda event: self._counted.store.add((), event.milliseconds / 1_000),
            StoreUp: self._on_store,
            AdmittedByShare: lambda event: self._counted.shared.add((self._known.fleet(event.fleet),)),
            LeaseLost: lambda event: self._counted.expired.add((self._known.fleet(event.fleet),)),
            Healed: lambda event: self._counted.healed.add((self._known.fleet(event.fleet),), event.count),
            Overdraft: lambda event: self._counted.overdrafts.add(
                self._known.replica(event.fleet, event.pool, event.replica)
            ),
            PrefixFound: self._on_prefix,
            CacheDoubted: lambda event: self._counted.prefix_doubts.add(
                self._known.replica(event.fleet, event.pool, event.replica)
            ),
            PinCall: self._on_pin_call,
            PinUse: lambda event: self._counted.pin_saved.add(
                (event.fleet, event.prefix), event.saved_tokens
            ),
            Unmetered: lambda event: self._counted.unmetered.add(self._known.pool(event.fleet, event.pool)),
            LengthSurprise: lambda event: self._counted.surprises.add(
                (self._known.fleet(event.fleet), self._known.class_(event.class_))
            ),
        }

    def __call__(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def know(self, fleets: Mapping[str, Mapping[str, Collection[str]]], classes: Collection[str]) -> None:
        """The configured names.  `fleets`: fleet -> pool -> names of replicas; a lane is named as a pool."""
        self._known = _Known(fleets, classes)
        for fleet in fleets:  # an alert on an increase misses the first one of a series that was not there
            for counter in (self._counted.expired, self._counted.healed, self._counted.shared):
                counter.add((fleet,), 0)
            for class_ in classes:
                self._counted.surprises.add((fleet, class_), 0)
            self._begin_at_none(fleet, fleets[fleet])

    def know_replicas(self, fleet: str, pools: Mapping[str, Collection[str]]) -> None:
        """Other replicas of a known fleet, by pool."""
        self._known.replace(fleet, pools)
        self._begin_at_none(fleet, pools)

    def _begin_at_none(self, fleet: str, pools: Mapping[str, Collection[str]]) -> None:
        for pool, replicas in pools.items():
            self._counted.unmetered.add((fleet, pool), 0)
            for replica in replicas:
                for counter in self._counted.of_replicas:
                    counter.add((fleet, pool, replica), 0)

    def set_state(self, fleet: str, state: Mapping[str, Any]) -> None:
        """What the store holds for a fleet, laid out as `GET /admin/v1/state`; shown until the next one comes."""
        if self._known.fleet(fleet):
            self._states[fleet] = state

    def reload_failed(self, file: str) -> None:
        """`config` or `keys` was changed and could not be used."""
        self._counted.reload_failures.add((file,))

    def snapshot(self) -> Snapshot:
        """For the other workers."""
        lost = self._calls_lost()
        self._counted.calls_lost.add((), lost - self._calls_lost_before)
        self._calls_lost_before = lost
        return Snapshot(os.getpid(), self._counted.totals(), dict(self._inflight()), self._store_up)

    def inherit(self, totals: Totals) -> None:
        """Count on from what the process before had counted."""
        self._counted.add(totals)

    def page(self, roll: RollCall | None = None) -> Callable[[], bytes]:
        """What writes the body of `/metrics`, of type `CONTENT_TYPE`: of all workers, without `roll` of this process.

        It is of now, and for a thread: writing the page of a large fleet takes tens of milliseconds.
        """
        families = self.families(roll)
        return lambda: generate_latest(_Page(families))

    def families(self, roll: RollCall | None = None) -> Iterator[Metric]:
        """What stands on the page."""
        return self._own_families(self.snapshot()) if roll is None else self._common_families(roll)

    def _own_families(self, own: Snapshot) -> Iterator[Metric]:
        yield from _sum_of([own]).families()
        yield _store_up(own.store_up)
        yield self._inflightgauge(own.inflight)
        yield from self._state_gauges()
        yield from self._processes.own()
        yield from self._platform.collect()

    def _common_families(self, roll: RollCall) -> Iterator[Metric]:
        yield from _sum_of((*roll.answered.values(), *roll.left)).families()
        yield _store_up(all(snapshot.store_up for snapshot in roll.answered.values()))
        yield self._inflightgauge(roll.inflight())
        yield from self._state_gauges()
        text = "Workers that did not answer this scrape: their counts are as they last were"
        yield gauge("kvgate_scrape_missing_workers", text, (), {(): float(roll.missing)})
        yield from self._processes.of({number: each.pid for number, each in roll.answered.items()})
        yield from self._platform.collect()

    def _place(self, event: CallEnded | FirstToken | TokenGaps) -> Labels:
        return *self._known.pool(event.fleet, event.pool), self._known.class_(event.class_)

    def _on_gaps(self, event: TokenGaps) -> None:
        self._counted.gaps.add_all(self._place(event), [gap / 1_000 for gap in event.gaps_ms])

    def _on_first(self, event: FirstToken) -> None:
        self._counted.ttft.add(self._place(event), event.ttft_ms / 1_000)

    def _on_prefix(self, event: PrefixFound) -> None:
        replica = self._known.replica(event.fleet, event.pool, event.replica)
        self._counted.prefix_expected.add(replica, event.expected_tokens)
        self._counted.prefix_found.add(replica, event.found_tokens)

    def _on_pin_call(self, event: PinCall) -> None:
        self._counted.pin_calls.add((event.fleet, event.prefix, event.ending))
        self._counted.pin_tokens.add((event.fleet, event.prefix), event.tokens)

    def _on_store(self, event: StoreUp) -> None:
        self._store_up = event.up

    def _on_call(self, event: CallEnded) -> None:
        fleet, pool, class_ = self._place(event)
        reason = event.reason.value if event.reason is not None else ""
        self._counted.calls.add((OUTCOMES[event.outcome], reason, pool, class_, fleet))
        if event.refusal_ms is not None:
            self._counted.refusals.add((fleet, reason), event.refusal_ms / 1_000)
        elif fleet and event.reserves:
            lane = self._known.pool(event.fleet, event.lane)  # a lane has the name of a pool
            self._counted.waits.add((*lane, class_), event.queue_ms / 1_000)
            if event.predicted_ms:
                self._counted.predictions.add((*lane, class_), event.queue_ms / event.predicted_ms)
        if event.unused_blocks is not None:
            replica = self._known.replica(event.fleet, event.pool, event.replica)
            self._counted.unused.add(replica, event.unused_blocks)
        if event.warm:
            self._counted.warm.add(self._known.replica(event.fleet, event.pool, event.replica))
        if event.prompt_tokens and event.prompt_tokens_estimated:
            error = (event.prompt_tokens_estimated - event.prompt_tokens) / event.prompt_tokens
            self._counted.errors.add((fleet,), error)

    def _inflightgauge(self, inflight: Mapping[str, int]) -> Metric:
        counts: dict[Labels, float] = dict.fromkeys(((fleet,) for fleet in self._known.fleets), 0.0)
        for fleet, count in inflight.items():
            add(counts, (self._known.fleet(fleet),), count)
        return gauge("kvgate_inflight_requests", "Calls being served or waiting", ("fleet",), counts)

    def _state_gauges(self) -> Iterator[Metric]:
        replicas: list[tuple[Labels, Mapping[str, Any]]] = []
        depth: dict[Labels, float] = {}
        states: dict[Labels, float] = {}
        rests: dict[Labels, float] = {}
        closed: dict[Labels, float] = {}
        for fleet, state in list(self._states.items()):
            for labels, replica in self._replicas(fleet, state):
                replicas.append((labels, replica))
                for state_name in REPLICA_STATES:
                    add(states, (*labels, state_name), int(replica.get("state") == state_name))
                for why in Why:
                    add(rests, (*labels, why.value), int(why in replica.get("rests", ())))
            if state.get("gate") in ("open", "closed"):
                closed[(fleet,)] = float(state["gate"] == "closed")
            for lane, classes in _items(state.get("queued")):
                for class_, tickets in _items(classes):
                    labels = (*self._known.pool(fleet, lane), self._known.class_(class_))
                    add(depth, labels, tickets)
        places = ("fleet", "pool", "replica")
        yield from replica_families(replicas)
        text = "1 for the state that it is in: `up`, `draining` or `down`"
        yield gauge("kvgate_replica_state", text, (*places, "state"), states)
        text = "1 for each reason for which it gets no new calls"
        yield gauge("kvgate_replica_rests", text, (*places, "why"), rests)
        yield gauge("kvgate_gate_closed", "1 while an operator keeps it closed", ("fleet",), closed)
        yield gauge("kvgate_queue_depth", "Calls waiting", ("fleet", "lane", "class"), depth)
        yield self._lengths_gauge()

    def _lengths_gauge(self) -> Metric:
        """The models are those of the settings."""
        tokens: dict[Labels, float] = {}
        for fleet, state in list(self._states.items()):
            for kind in state.get("lengths", ()):
                labels = (fleet, self._known.class_(kind["class"]), kind["model"])
                for quantile in QUANTILES:
                    found = kind.get(f"p{quantile * 100:g}")
                    if found is not None:
                        tokens[*labels, f"{quantile:g}"] = found
        text = "Tokens that this part of a class's elastic calls stays within, as learned"
        return gauge("kvgate_learned_length_tokens", text, ("fleet", "class", "model", "quantile"), tokens)

    def _replicas(self, fleet: str, state: Mapping[str, Any]) -> Iterator[tuple[Labels, Mapping[str, Any]]]:
        for pool, inside in _items(state.get("pools")):
            replicas = inside.get("replicas") if isinstance(inside, Mapping) else None
            for name, replica in _items(replicas):
                if isinstance(replica, Mapping):
                    yield self._known.replica(fleet, pool, name), replica


def _sum_of(snapshots: Iterable[Snapshot]) -> Counted:
    everything = Counted()
    for snapshot in snapshots:
        everything.add(snapshot.totals)
    return everything


class _Page(Collector):
    """What the client library writes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Processes:
    """Processor time, memory and files, as the system tells them: of this process, or of each worker of one parent."""

    def __init__(self) -> None:
        self._pid: int | str = "self"
        self._collector = ProcessCollector(pid=lambda: self._pid, registry=None)

    def own(self) -> Iterable[Metric]:
        self._pid = "self"
        return self._collector.collect()

    def of(self, pids: Mapping[int, int]) -> Iterable[Metric]:
        """Worker -> process; each sample is labelled with its worker."""
        families: dict[str, Metric] = {}
        for number, pid in pids.items():
            self._pid = pid
            for found in self._collector.collect():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
        return families.values()


def _store_up(up: bool) -> Metric:
    return gauge("kvgate_store_up", "1 while the store answers", (), {(): float(up)})


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """Nothing where the state lacks a level."""
    return value.items() if isinstance(value, Mapping) else ()
