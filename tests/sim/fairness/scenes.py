"""The situations for which `docs/fairness.md` states bounds, each by seed; what is found the caller judges.

Sizes are blocks of 2 replicas; whoever keeps a fleet busy offers a new call at each start of one.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import redis

from gateway.core.books import FleetConfig
from tests.sim.fairness.fleet import START_MS, Call, Fleet, fleet_config
from tests.sim.fairness.ledgers import FirstFit, Ledger, RealStore, Specification

WEIGHTS = {"a": 1, "b": 2, "c": 4}
REPLICAS = 2
FOREVER_MS = 10**9
PATIENCE_MS = 600_000
"""After this a call that has not started never will."""
FULL_MS = 5_000
"""By then the gate of the new books is open and the fleet is full of the calls that came first."""
FILLED_MS = 30_000
"""By then the calls that came first are over."""
Range = tuple[int, int]
"""Least and most of a uniform choice."""


@dataclass(frozen=True, slots=True)
class Habit:
    """What calls of a key are like."""

    blocks: Range = (20, 20)
    hold_ms: Range = (2_000, 20_000)
    mistake: float = 1.0
    """Expected over real block-seconds."""
    class_: str = "normal"
    weight: int = 1

    def call(self, chance: random.Random, key: str) -> Call:
        blocks, hold_ms = chance.randint(*self.blocks), chance.randint(*self.hold_ms)
        expected = max(1, round(blocks * hold_ms / 1_000 * self.mistake))
        return Call(key, blocks, hold_ms, expected, self.weight, self.class_)


UNEQUAL = {
    "a": Habit(hold_ms=(3_000, 8_000)),
    "b": Habit(hold_ms=(10_000, 30_000)),
    "c": Habit(hold_ms=(20_000, 60_000)),
}


def keep_busy(fleet: Fleet, chance: random.Random, habits: Mapping[str, Habit], backlog: int) -> None:
    """So many calls of each key wait at any time."""

    def again(call: Call) -> None:
        if call.key in habits:
            fleet.offer(habits[call.key].call(chance, call.key))

    fleet.started = again
    for _ in range(backlog):
        for key, habit in habits.items():
            fleet.offer(habit.call(chance, key))


# -- shares -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    calls: Sequence[Call]
    mean_call_ms: float

    def held(self, key: str, begin_ms: float, end_ms: float) -> float:
        """Block-seconds; times are counted from the start."""
        span = (round(START_MS + begin_ms), round(START_MS + end_ms))
        return sum(call.held(*span) for call in self.calls if call.key == key)

    def errors(self, begin_mean_calls: float, end_mean_calls: float) -> dict[str, float]:
        """By how much of its share each key had more or less, between two multiples of the mean call time."""
        span = (begin_mean_calls * self.mean_call_ms, end_mean_calls * self.mean_call_ms)
        held = {key: self.held(key, *span) for key in WEIGHTS}
        a_weight = sum(held.values()) / sum(WEIGHTS.values())
        return {key: held[key] / (a_weight * weight) - 1 for key, weight in WEIGHTS.items()}


def shares(seed: int, habits: Mapping[str, Habit], mean_calls: int, limit: int = 200) -> Shares:
    """Three keys that always have calls waiting, for so many mean call times."""
    chance = random.Random(seed)
    fleet = Fleet(Specification(START_MS, fleet_config(REPLICAS, limit)))
    weighted = {key: _weighted(habits[key], weight) for key, weight in WEIGHTS.items()}
    keep_busy(fleet, chance, weighted, backlog=8)
    until_ms, mean_ms = 0.0, 0.0
    while until_ms <= mean_calls * mean_ms:
        until_ms += mean_ms or 10_000
        fleet.run(round(until_ms))
        ran = [call for call in fleet.calls if call.start_ms >= 0]
        mean_ms = sum(call.hold_ms for call in ran) / len(ran)
    return Shares(fleet.calls, mean_ms)


def _weighted(habit: Habit, weight: int) -> Habit:
    return Habit(habit.blocks, habit.hold_ms, habit.mistake, habit.class_, weight)


# -- one call against many --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Single:
    second: float
    """Of its arrival."""
    wait_ms: int
    longest_ms: int
    """The longest time that a call had left to run when this one came."""


def flood(
    client: "redis.Redis[bytes]", seed: int, queued: int, seconds: int, first_mistake: float = 1.0
) -> Iterator[Single]:
    """Single calls of other keys, one at a time, while so many of one key wait.

    `first_mistake` is that of the calls that run first: what they give back comes when the single ones wait.
    """
    chance = random.Random(seed)
    fleet = Fleet(RealStore(client, START_MS, fleet_config(REPLICAS, 400)))
    running = REPLICAS * 400 // 10
    for _ in range(running):
        fleet.offer(Habit((10, 10), mistake=first_mistake).call(chance, "flood"))
    keep_busy(fleet, chance, {"flood": Habit((10, 10))}, queued)
    at_ms = FULL_MS
    while at_ms < seconds * 1_000:
        at_ms += chance.randint(1, 10_000)
        fleet.run(at_ms)
        assert len(fleet.waiting) >= queued
        longest_ms = max(call.end_ms for call in fleet.running.values()) - fleet.now_ms
        call = Habit((10, 10)).call(chance, f"single-{at_ms}")
        fleet.offer(call)
        run_until_started(fleet, call)
        at_ms = fleet.now_ms - START_MS
        yield Single((call.arrival_ms - START_MS) / 1_000, call.wait_ms, longest_ms)


def run_until_started(fleet: Fleet, call: Call) -> None:
    fleet.run(fleet.now_ms - START_MS + PATIENCE_MS, lambda: call.start_ms >= 0)
    assert call.start_ms >= 0, f"waits still: {call}"


# -- heads that have to wait for their turn or for room ----------------------------------------------------------------


@dataclass(slots=True)
class Head:
    call: Call
    before_blocks: int = 0
    """Given back between its arrival and the instant at which it started, or at which a replica was held for it."""
    held_at_ms: int = -1
    """-1: no replica was ever held for it."""
    free_at_ms: int = 0
    """The end of the last call on the held replica."""

    @property
    def late_ms(self) -> int:
        """By how much it started after the held replica was free."""
        return self.call.start_ms - self.free_at_ms if self.held_at_ms >= 0 else 0


def heads(seed: int, others: Mapping[str, Habit], habit: Habit, low_share: int = 100) -> Iterator[Head]:
    """Single calls, each of a key of its own, one at a time, while the others keep the fleet busy.

    `low_share` is in thousandths.
    """
    chance = random.Random(seed)
    config = fleet_config(REPLICAS, 400, (("normal", 0), ("low", low_share)))
    ledger = Specification(START_MS, config)
    fleet = Fleet(ledger)
    keep_busy(fleet, chance, others, backlog=8)
    at_ms = FILLED_MS
    for number in range(4):
        fleet.run(at_ms + chance.randint(0, 5_000))
        head = _wait_for(fleet, ledger, habit.call(chance, f"head-{number}"))
        yield head
        at_ms = head.call.end_ms - START_MS


def _wait_for(fleet: Fleet, ledger: Specification, call: Call) -> Head:
    head = Head(call)
    drained = last = fleet.drained_blocks
    id_ = fleet.offer(call)

    def look() -> None:
        nonlocal last
        if head.held_at_ms < 0:
            head.before_blocks, last = last - drained, fleet.drained_blocks
            held = [r.name for r in ledger.books.replicas.values() if r.held_for == id_]
            if held:
                ends = [other.end_ms for other in fleet.running.values() if other.replica == held[0]]
                head.held_at_ms, head.free_at_ms = fleet.now_ms, max(ends, default=fleet.now_ms)

    fleet.stepped = look
    run_until_started(fleet, call)
    fleet.stepped = lambda: None
    return head


# -- throughput -------------------------------------------------------------------------------------------------------


def uses(client: "redis.Redis[bytes]", seed: int, large_share: float, calls: int) -> tuple[float, float]:
    """The part of all blocks in use by the order and by first fit, until all is done.

    The same calls for both, a tenth more than there is room for, some of them of half a replica and more.
    """
    config = fleet_config(REPLICAS, 400)
    ledgers: tuple[Ledger, Ledger] = (RealStore(client, START_MS, config), FirstFit(config))
    ordered, unordered = (_use(ledger, config, random.Random(seed), large_share, calls) for ledger in ledgers)
    return ordered, unordered


def _use(ledger: Ledger, config: FleetConfig, chance: random.Random, large_share: float, calls: int) -> float:
    fleet, capacity = Fleet(ledger), sum(replica.limit for replica in config.replicas)
    offered, at_ms = 0.0, 0
    for number in range(calls):
        habit = Habit((200, 400) if chance.random() < large_share else (5, 30))
        call = habit.call(chance, f"key-{number % 6}")
        offered += call.block_seconds
        at_ms = max(at_ms, round(offered / capacity / 1.1 * 1_000))
        fleet.offer(call, at_ms)
    fleet.run(FOREVER_MS, lambda: not fleet.waiting)
    end_ms = max(call.end_ms for call in fleet.calls) - START_MS
    return offered / (capacity * end_ms / 1_000)
