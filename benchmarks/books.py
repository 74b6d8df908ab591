"""What the ledger's scripts cost the store: of one call, and when the books are large.

    python benchmarks/books.py [--json FILE] [--against CHECKOUT]

A real Valkey of its own, one connection, time as an argument.  A figure is the server's own duration of a script
(SLOWLOG), the median of 5 rounds that take turns with what they are compared with.  `--against` puts the scripts of
another checkout beside, in the same run.  The exit status is 1 where a bound does not hold.
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.order import BATCH_OPS, DIGEST_MODULUS
from gateway.ledger import scripts
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.records import config_arguments
from gateway.ledger.scripts import fleet_keys

ROUNDS = 5
STEPS = 20  # of a kind in a round
LOG_FROM_US = 20
"""Shorter than any step.  What a script calls is shorter still: to log that too would cost as much as it does."""
BLOCKS = 10  # of every call
REPLICAS, KEYS, LIVE, WAITERS = 64, 1_000, 10_000, 10_000
LOST = 5_000  # calls of the owner that is reaped
LEASE_MS, HEARTBEAT_MS = 6_000, 1_000
UNLIMITED = 10**9

Op = list[Any]
Texts = Callable[[str], str]
"""A script's text by its name."""


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def holds(self) -> bool:
        return self.bound is None or self.value <= self.bound


class Fleet:
    """One fleet in the store, and owners that send batches; `step` gives back the reply and the microseconds."""

    def __init__(
        self, client: "redis.Redis[bytes]", name: str, texts: Texts, replicas: int, limit: int
    ) -> None:
        self._client = client
        self._random = random.Random(name)
        self._batches: dict[str, int] = {}
        self._shas = {script: client.script_load(texts(script)) for script in ("step", "hello", "configure")}
        self.keys = fleet_keys(name)
        self.now = 1_000_000
        config = FleetConfig(
            lease_ms=LEASE_MS,
            heartbeat_ms=HEARTBEAT_MS,
            overtake_blocks=limit,
            lanes=(("short", ("short", "long")), ("long", ("long",))),
            classes=(("high", 0), ("normal", 200), ("low", 100)),
            replicas=tuple(
                ReplicaConfig(f"vllm-{i}", ("short", "long")[i % 2], limit, limit, UNLIMITED, UNLIMITED)
                for i in range(replicas)
            ),
        )
        self._evaluate("configure", "wake:", "fleet", *config_arguments(config))
        self.hello("a")
        self.now += 2 * HEARTBEAT_MS
        assert self.step("a", [["Y"]])[0][5] == [[b"open"]]

    def _evaluate(self, script: str, *arguments: Any) -> Any:
        return self._client.evalsha(self._shas[script], len(self.keys), *self.keys, self.now, *arguments)

    def hello(self, owner: str) -> None:
        self._evaluate("hello", owner)
        self._batches[owner] = 0

    def steps(self, owner: str, batches: Sequence[Sequence[Op]]) -> list[tuple[Any, float]]:
        """Sent in one go, as the batches of many gateways come: the reply to each, and its microseconds."""
        self._client.slowlog_reset()
        pipeline = self._client.pipeline(transaction=False)
        for ops in batches:
            self._batches[owner] += 1
            packed = [msgspec.msgpack.encode(op) for op in ops]
            pipeline.evalsha(
                self._shas["step"], len(self.keys), *self.keys, self.now, owner, self._batches[owner], "wake:", *packed
            )  # fmt: skip
        replies = pipeline.execute()
        for reply in replies:
            assert reply[0] == b"ok", reply
            assert not [result for result in reply[5] if result[0] in (b"error", b"refused")], reply[5]
        log = self._client.slowlog_get(1000)
        found = [float(entry["duration"]) for entry in log if entry["command"].startswith(b"EVALSHA")]
        return list(zip(replies, reversed(found), strict=True))

    def step(self, owner: str, ops: Sequence[Op]) -> tuple[Any, float]:
        return self.steps(owner, [ops])[0]

    def admit(self, keys: int = KEYS, class_: str = "normal") -> Op:
        pick = self._random
        id_, key, lane = (
            f"{pick.getrandbits(40):010x}",
            f"key-{pick.randrange(keys)}",
            pick.choice(("short", "long")),
        )
        return ["A", id_, key, class_, lane, BLOCKS, 1, 300, 40, UNLIMITED, 1, -1, -1, UNLIMITED, [], [], []]

    def fill(self, owner: str, calls: int, **admission: Any) -> list[str]:
        """Admit that many, in batches; their ids."""
        ids: list[str] = []
        while len(ids) < calls:
            batch = [self.admit(**admission) for _ in range(min(BATCH_OPS, calls - len(ids)))]
            self.step(owner, batch)
            ids += [op[1] for op in batch]
        return ids

    def settle(self, owner: str, ids: Sequence[str]) -> None:
        for i in range(0, len(ids), BATCH_OPS):
            self.step(owner, [["S", id_, -1, -1] for id_ in ids[i : i + BATCH_OPS]])

    def claim(self, owner: str) -> list[str]:
        """Claim what lies in the owner's outbox."""
        claimed: list[str] = []
        while outbox := self.step(owner, [])[0][6]:
            ids = [id_.decode() for id_ in outbox[::2]]
            self.step(owner, [["K", id_] for id_ in ids])
            claimed += ids
        return claimed

    def bytes_used(self) -> int:
        return sum(self._client.memory_usage(key, samples=0) or 0 for key in self.keys)


def median(figures: Sequence[float]) -> float:
    return statistics.median(figures)


# -- the cost of a call --------------------------------------------------------------------------------------------


def cost_round(fleet: Fleet) -> dict[str, float]:
    """Microseconds on an idle fleet: of a step with one op, and of admit + first token + settle in batches."""
    admits = [fleet.admit(8) for _ in range(STEPS)]
    batches: dict[str, list[list[Op]]] = {
        "a step without ops": [[] for _ in admits],
        "a step with one admit": [[op] for op in admits],
        "a step with one first token": [[["F", op[1]]] for op in admits],
        "a step with one settle": [[["S", op[1], BLOCKS, 40]] for op in admits],
    }
    costs = {name: median([us for _, us in fleet.steps("a", each)]) for name, each in batches.items()}
    for size in (16, 32, 64):
        calls = size // 3
        whole = [us for _, us in fleet.steps("a", _call_batches(fleet, calls))]
        costs[f"a call (A, F, S) in batches of {size}"] = median(whole[2:-2]) / calls
    return costs


def _call_batches(fleet: Fleet, calls: int) -> list[list[Op]]:
    """As under load: a batch settles some calls, has the first tokens of others, and admits as many."""
    admits = [[fleet.admit(8) for _ in range(calls)] for _ in range(STEPS)]
    firsts = [[["F", op[1]] for op in batch] for batch in admits]
    settles = [[["S", op[1], BLOCKS, 40] for op in batch] for batch in admits]
    nothing: list[list[Op]] = [[], []]
    return [s + f + a for s, f, a in zip(nothing + settles, [[], *firsts, []], admits + nothing, strict=True)]


def cost(client: "redis.Redis[bytes]", ours: Texts, theirs: Texts | None) -> Iterator[Figure]:
    sides = {"": Fleet(client, "cost", ours, 4, UNLIMITED)}
    if theirs:
        sides[", the other checkout"] = Fleet(client, "cost-other", theirs, 4, UNLIMITED)
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, fleet in sides.items():
            rounds[side].append(cost_round(fleet))
    for name in rounds[""][0]:
        for side, found in rounds.items():
            yield Figure(name + side, median([r[name] for r in found]), "us")


# -- large books ---------------------------------------------------------------------------------------------------


def compare(small: Callable[[], float], large: Callable[[], float]) -> tuple[float, float]:
    """Medians of both, taken in turns."""
    pairs = [(small(), large()) for _ in range(ROUNDS)]
    return median([pair[0] for pair in pairs]), median([pair[1] for pair in pairs])


class Full:
    """All replicas full, and so many calls wait."""

    def __init__(self, client: "redis.Redis[bytes]", name: str, waiters: int) -> None:
        self.fleet = Fleet(client, name, product_text, REPLICAS, LIVE // REPLICAS * BLOCKS)
        empty = self.fleet.bytes_used()
        self.running = self.fleet.fill("a", LIVE // REPLICAS * REPLICAS)
        reserved = self.fleet.bytes_used()
        self.waiting = self.fleet.fill("a", waiters)
        self.reservation_bytes = (reserved - empty) / len(self.running)
        self.ticket_bytes = (self.fleet.bytes_used() - reserved) / waiters

    def settle(self, calls: int = 1) -> float:
        """Settle running calls, whose places go to waiters; afterwards as many run and wait as before."""
        ended, self.running = self.running[:calls], self.running[calls:]
        _, us = self.fleet.step("a", [["S", id_, BLOCKS, 40] for id_ in ended])
        self.running += self.fleet.claim("a")
        self.fleet.fill("a", calls)
        return us

    def settles(self) -> float:
        return median([self.settle() for _ in range(STEPS)])

    def heartbeats(self) -> float:
        digest = ["H", len(self.running), sum(int(id_, 16) for id_ in self.running) % DIGEST_MODULUS]
        steps = [self.fleet.step("a", [digest]) for _ in range(STEPS)]
        assert all(reply[5] == [[b"same"]] for reply, _ in steps)
        return median([us for _, us in steps])


class Roomy:
    """Room on all replicas, and so many calls run."""

    def __init__(self, client: "redis.Redis[bytes]", name: str, live: int) -> None:
        self.fleet = Fleet(client, name, product_text, REPLICAS, UNLIMITED)
        self.fleet.fill("a", live)

    def admits_and_settles(self) -> float:
        found = []
        for _ in range(STEPS):
            admit = self.fleet.admit()
            found.append(
                self.fleet.step("a", [admit])[1] + self.fleet.step("a", [["S", admit[1], BLOCKS, 40]])[1]
            )
        return median(found)

    def heartbeats(self) -> float:
        return median([self.fleet.step("a", [["H", 0, 0]])[1] for _ in range(STEPS)])


def scale(client: "redis.Redis[bytes]") -> Iterator[Figure]:
    few, many = Full(client, "few", WAITERS // 10), Full(client, "many", WAITERS)
    small, large = compare(few.settles, many.settles)
    yield Figure(f"a settle that starts a waiter, {WAITERS // 10:,} wait", small, "us")
    yield Figure(f"a settle that starts a waiter, {WAITERS:,} wait", large, "us", 1.3 * small)
    idle, busy = Roomy(client, "idle", LIVE // 100), Roomy(client, "busy", LIVE)
    small, large = compare(idle.admits_and_settles, busy.admits_and_settles)
    yield Figure(f"admit and settle, {LIVE // 100:,} live, nobody waits", small, "us")
    yield Figure(f"admit and settle, {LIVE:,} live, nobody waits", large, "us", 1.2 * small)
    small, large = compare(idle.heartbeats, many.heartbeats)
    yield Figure(f"heartbeat, {LIVE // 100:,} live, nobody waits", small, "us")
    yield Figure(f"heartbeat, {LIVE:,} live, {WAITERS:,} wait", large, "us", 1.5 * small)
    yield Figure("memory of a reservation", many.reservation_bytes, "bytes")
    yield Figure("memory of a ticket", many.ticket_bytes, "bytes")
    yield from longest(many)
    yield from reap(many.fleet, "waiting")
    yield from reap(busy.fleet, "running")


def longest(full: Full) -> Iterator[Figure]:
    """Batches of 64 ops; each script is done 5 times."""

    def again(script: Callable[[], float]) -> float:
        return median([script() for _ in range(ROUNDS)])

    def moves() -> float:
        names = [["M", id_, ["vllm-0"]] for id_ in full.running[:BATCH_OPS]]
        us = full.fleet.step("a", names)[1]
        moved = {op[1] for op in names}
        full.running = [id_ for id_ in full.running if id_ not in moved] + full.fleet.claim("a")
        return us

    yield Figure("64 settles that start 64 waiters", again(lambda: full.settle(BATCH_OPS)), "us", 5_000)
    tickets = again(lambda: full.fleet.step("a", [full.fleet.admit() for _ in range(BATCH_OPS)])[1])
    yield Figure("64 tickets", tickets, "us", 5_000)
    yield Figure("64 moves", again(moves), "us", 5_000)


def reap(fleet: Fleet, what: str) -> Iterator[Figure]:
    """An owner of many calls is lost; another one's scripts give them back."""
    fleet.hello("b")
    fleet.fill("b", LOST)
    for _ in range(LEASE_MS // HEARTBEAT_MS):
        fleet.now += HEARTBEAT_MS
        reply, us = fleet.step("a", [])
    found = [us]
    while reply[4]:
        reply, us = fleet.step("a", [])
        found.append(us)
    yield Figure(f"longest script while an owner of {LOST:,} {what} calls is reaped", max(found), "us", 5_000)
    yield Figure(f"scripts until an owner of {LOST:,} {what} calls was", len(found), "")


# -- the command ---------------------------------------------------------------------------------------------------


def product_text(name: str) -> str:
    return scripts.load(name).text


def checkout_text(folder: Path) -> Texts:
    """The scripts of another checkout, put together by its own loader."""
    spec = importlib.util.spec_from_file_location("other_scripts", folder / "gateway/ledger/scripts.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return lambda name: str(module.load(name).text)


def show(figures: Iterator[Figure]) -> list[Figure]:
    shown = []
    for figure in figures:
        shown.append(figure)
        bound = (
            "" if figure.bound is None else f"  {'ok' if figure.holds else 'NO'}, at most {figure.bound:,.0f}"
        )
        print(f"{figure.what:66} {figure.value:8,.0f} {figure.unit:5}{bound}", flush=True)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--against", type=Path, help="the root of another checkout, whose scripts are measured too"
    )
    options = parser.parse_args()
    store = EmbeddedStore("--slowlog-log-slower-than", str(LOG_FROM_US), "--slowlog-max-len", "1000")
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    try:
        figures = show(cost(client, product_text, options.against and checkout_text(options.against)))
        figures += show(scale(client))
    finally:
        client.close()
        store.stop()
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
