"""What decides who starts: the specification, the scripts on a real store, and first fit without any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import redis

from gateway.core.books import Books, FleetConfig
from gateway.ledger.records import config_arguments
from tests.conformance.twin import Scripts, pack_op

OWNER = "gateway"
RUN = "run"
Op = list[Any]


@dataclass(frozen=True, slots=True)
class Reply:
    results: list[Any]
    """One for each op."""
    outbox: list[tuple[str, str]]
    """Calls that left the queue and have not been claimed, with their replicas."""
    more: bool
    """Work is left for the next step."""


class Ledger(Protocol):
    def step(self, now_ms: int, ops: Sequence[Op]) -> Reply: ...


class Specification:
    """`core/books.py`, open for admission."""

    def __init__(self, now_ms: int, config: FleetConfig) -> None:
        self.books = Books()
        self._batch = 0
        self.books.configure(now_ms, RUN, config)
        self.books.hello(now_ms, RUN, OWNER)
        self.step(now_ms, [["Y"]])

    def step(self, now_ms: int, ops: Sequence[Op]) -> Reply:
        self._batch += 1
        return _reply(self.books.step(now_ms, RUN, OWNER, self._batch, ops))


class RealStore:
    """The scripts, which the conformance tests hold to the specification: for books too large for linear scans."""

    def __init__(self, client: "redis.Redis[bytes]", now_ms: int, config: FleetConfig) -> None:
        self._scripts = Scripts(client)
        self._batch = 0
        self._scripts.evaluate("configure", now_ms, "wake:", "fleet", *config_arguments(config))
        self._scripts.evaluate("hello", now_ms, OWNER)
        self.step(now_ms, [["Y"]])

    def step(self, now_ms: int, ops: Sequence[Op]) -> Reply:
        self._batch += 1
        packed = [pack_op(op) for op in ops]
        return _reply(self._scripts.evaluate("step", now_ms, OWNER, self._batch, "wake:", *packed))


class FirstFit:
    """Nobody's turn: whichever waiting call fits starts, the longest waiting first.  The measure of throughput."""

    def __init__(self, config: FleetConfig) -> None:
        self._free = {replica.name: replica.limit for replica in config.replicas}
        self._waiting: dict[str, int] = {}
        self._running: dict[str, tuple[str, int]] = {}
        """Replica and blocks."""

    def step(self, now_ms: int, ops: Sequence[Op]) -> Reply:
        results: list[Any] = []
        for op in ops:
            if op[0] == "S":
                replica, blocks = self._running.pop(op[1])
                self._free[replica] += blocks
            if op[0] == "A":
                self._waiting[op[1]] = op[5]
            results.append(["ticket"] if op[0] == "A" else ["ok"])
        return Reply(results, [(id_, self._running[id_][0]) for id_ in self._start()], more=False)

    def _start(self) -> list[str]:
        started = []
        for id_, blocks in self._waiting.items():
            roomiest = max(self._free, key=self._free.__getitem__)
            if blocks <= self._free[roomiest]:
                self._free[roomiest] -= blocks
                self._running[id_] = (roomiest, blocks)
                started.append(id_)
        for id_ in started:
            del self._waiting[id_]
        return started


def _reply(answer: list[Any]) -> Reply:
    assert answer[0] == "ok", answer
    _, _, _, _, more, results, outbox = answer
    return Reply(results, list(zip(outbox[::2], outbox[1::2], strict=True)), bool(more))
