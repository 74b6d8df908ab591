"""One fleet in virtual time: calls arrive, wait, hold their blocks and give them back.  Milliseconds and blocks."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.estimate import held_cost
from gateway.core.order import BATCH_OPS
from tests.sim.fairness.ledgers import Ledger, Op, Reply

HEARTBEAT_MS = 1_000
START_MS = 1_000_000
PATIENT_MS = 10**9
UNLIMITED = 10**9
_SETTLE, _ADMIT, _BEAT = range(3)
"""In the order of one batch: what gives back goes before what takes."""


@dataclass(slots=True)
class Call:
    key: str
    blocks: int
    hold_ms: int
    """From its start to its end."""
    expected_cost: int
    """Block-seconds that its estimate says."""
    weight: int = 1
    class_: str = "normal"
    arrival_ms: int = -1
    start_ms: int = -1
    replica: str = ""

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.hold_ms

    @property
    def block_seconds(self) -> float:
        return self.blocks * self.hold_ms / 1_000

    @property
    def wait_ms(self) -> int:
        return self.start_ms - self.arrival_ms

    def held(self, begin_ms: int, end_ms: int) -> float:
        """Block-seconds in that time."""
        if self.start_ms < 0:
            return 0.0
        return self.blocks * max(min(self.end_ms, end_ms) - max(self.start_ms, begin_ms), 0) / 1_000


class Fleet:
    """Carries the time from one event to the next; a batch for all that happens in one millisecond."""

    def __init__(self, ledger: Ledger) -> None:
        self.now_ms = START_MS
        self.calls: list[Call] = []
        """All that ever arrived, in that order."""
        self.running: dict[str, Call] = {}
        self.waiting: dict[str, Call] = {}
        self.drained_blocks = 0
        """Given back so far; the drain of a time is how many come back in it."""
        self.started: Callable[[Call], None] = lambda call: None
        """Told of every start; may offer more."""
        self.stepped: Callable[[], None] = lambda: None
        """Told after every step of the ledger."""
        self._ledger = ledger
        self._due: list[tuple[int, int, int, str]] = [(START_MS, _BEAT, 0, "")]
        self._numbers = count(1)

    def offer(self, call: Call, after_ms: int = 0) -> str:
        """Its id."""
        number = next(self._numbers)
        call.arrival_ms = self.now_ms + after_ms
        self.calls.append(call)
        self.waiting[_id(number)] = call
        heapq.heappush(self._due, (call.arrival_ms, _ADMIT, number, _id(number)))
        return _id(number)

    def run(self, until_ms: int, done: Callable[[], bool] = lambda: False) -> None:
        """`until_ms` is counted from the start."""
        while self._due[0][0] <= START_MS + until_ms and not done():
            self.now_ms = self._due[0][0]
            self._step(self._ops_due())

    def _ops_due(self) -> list[Op]:
        ops: list[Op] = []
        while self._due[0][0] == self.now_ms and len(ops) < BATCH_OPS:
            _, kind, number, id_ = heapq.heappop(self._due)
            if kind == _BEAT:
                heapq.heappush(self._due, (self.now_ms + HEARTBEAT_MS, _BEAT, number, ""))
            else:
                ops.append(self._settle(id_) if kind == _SETTLE else _admit(id_, self.waiting[id_]))
        return ops

    def _settle(self, id_: str) -> Op:
        call = self.running.pop(id_)
        self.drained_blocks += call.blocks
        return ["S", id_, call.blocks, held_cost(call.blocks, call.hold_ms / 1_000), [], ""]

    def _step(self, ops: list[Op]) -> None:
        reply = self._ledger.step(self.now_ms, ops)
        self._read(ops, reply)
        while reply.outbox or reply.more:
            claims: list[Op] = [["K", id_] for id_, _ in reply.outbox]
            reply = self._ledger.step(self.now_ms, claims)
            self._read(claims, reply)
        self.stepped()

    def _read(self, ops: list[Op], reply: Reply) -> None:
        for op, result in zip(ops, reply.results, strict=True):
            assert result[0] not in ("refused", "gone", "error"), (op, result)
            if result[0] == "grant" and op[1] in self.waiting:
                self._start(op[1], result[1])
        for id_, replica in reply.outbox:
            if id_ in self.waiting:
                self._start(id_, replica)

    def _start(self, id_: str, replica: str) -> None:
        call = self.running[id_] = self.waiting.pop(id_)
        call.start_ms, call.replica = self.now_ms, replica
        heapq.heappush(self._due, (call.end_ms, _SETTLE, next(self._numbers), id_))
        self.started(call)


def fleet_config(
    replicas: int,
    limit: int,
    classes: tuple[tuple[str, int], ...] = (("high", 0), ("normal", 200), ("low", 100)),
) -> FleetConfig:
    """One lane of equal replicas; one replica's limit may overtake a head, as by default in the product."""
    return FleetConfig(
        lease_ms=6 * HEARTBEAT_MS,
        heartbeat_ms=HEARTBEAT_MS,
        overtake_blocks=limit,
        lanes=(("all", ("all",)),),
        classes=classes,
        replicas=tuple(
            ReplicaConfig(f"r{number}", "all", limit, limit, UNLIMITED, UNLIMITED)
            for number in range(replicas)
        ),
    )


def _id(number: int) -> str:
    return f"{number:010x}"


def _admit(id_: str, call: Call) -> Op:
    return [
        "A", id_, call.key, call.class_, "all", call.blocks, 1, 0, call.expected_cost, PATIENT_MS, call.weight,
        -1, -1, -1, UNLIMITED, UNLIMITED, [], [], [], "", "", 0, -1, 0, "", 0, [],
    ]  # fmt: skip
