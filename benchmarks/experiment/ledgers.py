"""The real books, the scripts on a Valkey, behind the calls of `gates`: to show that both decide the same.

One key, one lane, one replica, and a blocked head that nobody may pass: then the order is that of arrival, as in
`gates.Books`.  Time is an argument, in whole milliseconds.
"""

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import msgspec
import redis

from benchmarks.experiment import traces
from benchmarks.experiment.cells import ENGINE, SEED, Case, Figures
from benchmarks.experiment.gates import PREFILL_TOKENS, SEQUENCES, Books, Elastic, Held
from benchmarks.experiment.world import World
from gateway.core import elastic
from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.ledger.records import config_arguments, decode_step, path_argument
from gateway.ledger.scripts import fleet_keys, library

OWNER, FLEET = "gateway", "experiment"
UNLIMITED = 10**9
Op = list[Any]


class RealBooks(Books):
    """Takes part in a world as `Books` do.  Only what it is told counts: nothing is decided here."""

    def __init__(self, client: "redis.Redis", limit: int) -> None:
        super().__init__(limit)
        self._client = client
        client.flushall()
        scripts = library()
        client.function_load(scripts.text, replace=True)
        self._function, self._keys = scripts.function, fleet_keys(FLEET)
        self._batch = 0
        self._held: dict[str, Held] = {}
        replica = ReplicaConfig("r", "pool", limit, limit, SEQUENCES, PREFILL_TOKENS, elastic.ELASTIC)
        config = FleetConfig(UNLIMITED, 1_000, 0, (("lane", ("pool",)),), (("normal", 0),), (replica,))
        self._evaluate("configure", 0.0, "wake:", "fleet", *config_arguments(config))
        self._evaluate("hello", 0.0, OWNER)
        self._step(-5.0, ["Y"])
        self._step(0.0, ["H", 0, 0, []])

    def admit(self, held: Held, now: float) -> list[Held]:
        id_ = _id(held)
        self._held[id_] = held
        path = b"" if held.path is None else elastic.pack(held.path)
        results, granted = self._step(
            now,
            [
                "A", id_, "key", "normal", "lane", held.blocks, 1, held.prefill, 1, UNLIMITED, 1, -1, -1, -1,
                UNLIMITED, UNLIMITED, [], [], [], "", "", 0, held.held, self.base, path_argument(path), 0, [],
            ],
        )  # fmt: skip
        assert results[0][0] in ("grant", "ticket"), results
        return [*([held] if results[0][0] == "grant" else []), *granted]

    def first_token(self, held: Held, now: float) -> list[Held]:
        return self._step(now, ["F", _id(held)])[1]

    def grow(self, held: Held, blocks: int, path: elastic.Path, now: float) -> list[Held]:
        held.held, held.path = blocks, path
        packed = path_argument(elastic.pack(path))
        results, granted = self._step(now, ["Z", _id(held), blocks, self.base, packed, 0])
        self.overdrafts += results[0][0] == "over"
        return granted

    def settle(self, held: Held, now: float) -> list[Held]:
        del self._held[_id(held)]
        return self._step(now, ["S", _id(held), held.held, 1, [], ""])[1]

    def _step(self, now: float, op: Op) -> tuple[list[Any], list[Held]]:
        """The op's results, and who was granted by it: in the outbox until they are claimed."""
        results, granted, ops = [], [], [op]
        while ops:
            self._batch += 1
            packed = [msgspec.msgpack.encode(op) for op in ops]
            answer = self._evaluate("step", now, OWNER, self._batch, "wake:", *packed)
            assert answer[0] == "ok", answer
            assert all(result[0] != "error" for result in answer[5]), answer[5]
            results += answer[5]
            taken = [self._held[id_] for id_ in answer[6][::2]]
            granted += taken
            ops = [["K", _id(held)] for held in taken]
            if not ops and answer[4]:
                ops = [["H", 0, 0, []]]
        return results, granted

    def _evaluate(self, script: str, now: float, *arguments: Any) -> Any:
        milliseconds = 10_000 + int(now * 1_000)
        reply = self._client.fcall(
            self._function(script), len(self._keys), *self._keys, milliseconds, *arguments
        )
        return decode_step(reply) if script == "step" else reply


def _id(held: Held) -> str:
    return f"{held.call.number:010x}"


class Noted:
    """Other books, and who was granted when."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.granted: list[tuple[int, float]] = []

    @property
    def overdrafts(self) -> int:
        return self.books.overdrafts

    def admit(self, held: Held, now: float) -> list[Held]:
        return self._note(self.books.admit(held, now), now)

    def first_token(self, held: Held, now: float) -> list[Held]:
        return self._note(self.books.first_token(held, now), now)

    def grow(self, held: Held, blocks: int, path: elastic.Path, now: float) -> list[Held]:
        return self._note(self.books.grow(held, blocks, path, now), now)

    def settle(self, held: Held, now: float) -> list[Held]:
        return self._note(self.books.settle(held, now), now)

    def _note(self, granted: list[Held], now: float) -> list[Held]:
        self.granted += [(held.call.number, now) for held in granted]
        return granted


def compared(client: "redis.Redis", case: Case, clients: int, calls: int) -> Figures:
    """The same calls through both books: how many grants, and how many of them differ in call or moment."""
    notes = []
    for books in (Books(case.blocks), RealBooks(client, case.blocks)):
        noted = Noted(books)
        world = World(replace(ENGINE, blocks=case.blocks + 1), Elastic(noted, books.base))
        found = world.closed_loop(traces.calls(traces.TRACES[case.trace], SEED), clients, calls)
        notes.append([*noted.granted, (found.overdrafts, found.seconds)])
    differ = sum(one != other for one, other in zip_longest(*notes))
    return {"calls": calls, "grants": len(notes[0]) - 1, "differ": differ}
