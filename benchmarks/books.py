"""What the ledger's scripts cost the store: of one call, and when the books are large.

    python benchmarks/books.py [--json FILE] [--against CHECKOUT]

A real Valkey of its own, one connection, time as an argument.  Figures are processor time of the store's main thread,
network included, so that neighbours count little; each is the median of 5 rounds that take turns with what they are
compared with.  `--against` puts the scripts of another checkout beside, in the same run.  The exit status is 1 where a
bound does not hold.
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
from gateway.core.order import BATCH_OPS, DIGEST_MODULUS, FORECAST_ENDS
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.records import config_arguments, decode_step
from gateway.ledger.scripts import Library, fleet_keys, library

ROUNDS = 5
STEPS = 20  # of a kind in a round
BLOCKS = 10  # of every call
REPLICAS, KEYS, LIVE, WAITERS = 64, 1_000, 10_000, 10_000
LOST = 5_000  # calls of the owner that is reaped
LEASE_MS, HEARTBEAT_MS = 6_000, 1_000
UNLIMITED = 10**9

Op = list[Any]


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
    """One fleet in the store, and owners that send batches."""

    def __init__(self, client: "redis.Redis", name: str, scripts: Library, replicas: int, limit: int) -> None:
        self._client = client
        self._random = random.Random(name)
        self._batches: dict[str, int] = {}
        self._function = scripts.function
        client.function_load(scripts.text, replace=True)
        self._reading_us = median([-self._used_us() + self._used_us() for _ in range(STEPS)])
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
        assert self.step("a", [["Y"]])[0][5] == [["open"]]

    def _evaluate(self, script: str, *arguments: Any) -> Any:
        return self._client.fcall(self._function(script), len(self.keys), *self.keys, self.now, *arguments)

    def hello(self, owner: str) -> None:
        self._evaluate("hello", owner)
        self._batches[owner] = 0

    def _used_us(self) -> float:
        used = self._client.info("cpu")
        return 1e6 * float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])

    def steps(self, owner: str, batches: Sequence[Sequence[Op]]) -> tuple[list[Any], float]:
        """Sent in one go, as the batches of many gateways come: the replies, and the store's microseconds for each."""
        pipeline = self._client.pipeline(transaction=False)
        for ops in batches:
            self._batches[owner] += 1
            packed = [msgspec.msgpack.encode(op) for op in ops]
            arguments = (self.now, owner, self._batches[owner], "wake:", *packed)
            pipeline.fcall(self._function("step"), len(self.keys), *self.keys, *arguments)
        before = self._used_us()
        replies = pipeline.execute()
        used = self._used_us() - before - self._reading_us
        replies = [decode_step(reply) for reply in replies]
        for reply in replies:
            assert reply[0] == "ok", reply
            assert not [result for result in reply[5] if result[0] in ("error", "refused")], reply[5]
        return replies, max(used, 0.0) / len(batches)

    def step(self, owner: str, ops: Sequence[Op]) -> tuple[Any, float]:
        replies, us = self.steps(owner, [ops])
        return replies[0], us

    def admit(self, keys: int = KEYS) -> Op:
        id_ = f"{self._random.getrandbits(40):010x}"
        key, lane = f"key-{self._random.randrange(keys)}", self._random.choice(("short", "long"))
        return [
            "A", id_, key, "normal", lane, BLOCKS, 1, 300, 40, UNLIMITED, 1, -1, -1, -1, UNLIMITED, UNLIMITED,
            [], [], [], "", "", 0, -1, 0, "", 0, "",
        ]  # fmt: skip

    def fill(self, owner: str, calls: int) -> list[str]:
        """Admit that many, in batches; their ids."""
        ids: list[str] = []
        while len(ids) < calls:
            batch = [self.admit() for _ in range(min(BATCH_OPS, calls - len(ids)))]
            self.step(owner, batch)
            ids += [op[1] for op in batch]
        return ids

    def claim(self, owner: str) -> list[str]:
        """Claim what lies in the owner's outbox."""
        claimed: list[str] = []
        while outbox := self.step(owner, [])[0][6]:
            ids = outbox[::2]
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
        "a step with one settle": [[["S", op[1], BLOCKS, 40, [], ""]] for op in admits],
    }
    costs = {name: fleet.steps("a", each)[1] for name, each in batches.items()}
    for size in (16, 32, 64):
        calls = _call_batches(fleet, size // 3)
        us = fleet.steps("a", calls)[1] * len(calls)
        costs[f"a call (A, F, S) in batches of {size}"] = us / (size // 3) / STEPS
    return costs


def _call_batches(fleet: Fleet, calls: int) -> list[list[Op]]:
    """As under load: a batch settles some calls, has the first tokens of others, and admits as many."""
    admits = [[fleet.admit(8) for _ in range(calls)] for _ in range(STEPS)]
    firsts = [[["F", op[1]] for op in batch] for batch in admits]
    settles = [[["S", op[1], BLOCKS, 40, [], ""] for op in batch] for batch in admits]
    nothing: list[list[Op]] = [[], []]
    return [s + f + a for s, f, a in zip(nothing + settles, [[], *firsts, []], admits + nothing, strict=True)]


def cost(client: "redis.Redis", ours: Library, theirs: Library | None) -> Iterator[Figure]:
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

    def __init__(self, client: "redis.Redis", name: str, waiters: int) -> None:
        self.fleet = Fleet(client, name, library(), REPLICAS, LIVE // REPLICAS * BLOCKS)
        empty = self.fleet.bytes_used()
        self.running = self.fleet.fill("a", LIVE // REPLICAS * REPLICAS)
        reserved = self.fleet.bytes_used()
        self.waiting = self.fleet.fill("a", waiters)
        self.reservation_bytes = (reserved - empty) / len(self.running)
        self.ticket_bytes = (self.fleet.bytes_used() - reserved) / waiters

    def settle(self, calls: int = 1) -> float:
        """Settle running calls, whose places go to waiters; afterwards as many run and wait as before."""
        ended, self.running = self.running[:calls], self.running[calls:]
        reply, us = self.fleet.step("a", [["S", id_, BLOCKS, 30, [], ""] for id_ in ended])
        assert reply[5] == [["settled"]] * calls
        self.running += self.fleet.claim("a")
        self.fleet.fill("a", calls)
        return us

    def settles(self) -> float:
        return median([self.settle() for _ in range(STEPS)])

    def heartbeats(self) -> float:
        digest = ["H", len(self.running), sum(int(id_, 16) for id_ in self.running) % DIGEST_MODULUS, []]
        replies, us = self.fleet.steps("a", [[digest]] * STEPS)
        assert all(reply[5] == [["same"]] for reply in replies)
        return us


class Roomy:
    """Room on all replicas, and so many calls run."""

    def __init__(self, client: "redis.Redis", name: str, live: int) -> None:
        self.fleet = Fleet(client, name, library(), REPLICAS, UNLIMITED)
        self.fleet.fill("a", live)

    def admits_and_settles(self) -> float:
        admits = [self.fleet.admit() for _ in range(STEPS)]
        _, admit_us = self.fleet.steps("a", [[op] for op in admits])
        _, settle_us = self.fleet.steps("a", [[["S", op[1], BLOCKS, 40, [], ""]] for op in admits])
        return admit_us + settle_us

    def heartbeats(self) -> float:
        return self.fleet.steps("a", [[["H", 0, 0, []]]] * STEPS)[1]


class Foreseen:
    """All replicas full, few calls wait, and so many owners foresee the next ends of those that run."""

    def __init__(self, client: "redis.Redis", waiters: int, owners: int) -> None:
        self.fleet = Fleet(client, "foreseen", library(), REPLICAS, LIVE // REPLICAS * BLOCKS)
        self.fleet.fill("a", LIVE // REPLICAS * REPLICAS)
        for owner in range(owners):
            dues = [100 * i + owner + 1 for i in range(FORECAST_ENDS)]
            ends = [item for due in dues for item in (due, f"vllm-{due % REPLICAS}", BLOCKS)]
            self.fleet.hello(f"owner-{owner}")
            self.fleet.step(f"owner-{owner}", [["H", 0, 0, ends]])
        self.fleet.fill("a", waiters)

    def tickets(self, calls: int) -> float:
        """They leave the queue again."""
        admits = [self.fleet.admit() for _ in range(calls)]
        reply, us = self.fleet.step("a", admits)
        assert reply[5][0][2] > 0, reply[5]
        self.fleet.step("a", [["S", op[1], -1, -1, [], ""] for op in admits])
        return us


def scale(client: "redis.Redis") -> Iterator[Figure]:
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
    yield from longest(client, many)
    yield from reap(many.fleet, "waiting")
    yield from reap(busy.fleet, "running")


def longest(client: "redis.Redis", full: Full) -> Iterator[Figure]:
    """Batches of 64 ops; each script is done 5 times."""

    def again(script: Callable[[], float]) -> float:
        return median([script() for _ in range(ROUNDS)])

    def moves() -> float:
        ids = full.running[:BATCH_OPS]
        places = full.fleet.step("a", [["K", id_] for id_ in ids])[0][5]
        names = [["M", id_, [place]] for id_, (_, place) in zip(ids, places, strict=True)]
        reply, us = full.fleet.step("a", names)
        assert {result[0] for result in reply[5]} == {"ticket"}, reply[5]
        full.running = full.running[BATCH_OPS:] + full.fleet.claim("a")
        return us

    yield Figure(f"64 settles beside {WAITERS:,} waiters", again(lambda: full.settle(BATCH_OPS)), "us", 5_000)
    tickets = again(lambda: full.fleet.step("a", [full.fleet.admit() for _ in range(BATCH_OPS)])[1])
    yield Figure("64 tickets", tickets, "us", 5_000)
    foreseen = Foreseen(client, waiters=20, owners=8)
    one, most = compare(lambda: foreseen.tickets(1), lambda: foreseen.tickets(BATCH_OPS))
    yield Figure("a ticket behind 20, foreseen by 8 gateways", one, "us")
    yield Figure("64 tickets behind 20, foreseen by 8 gateways", most, "us", 5_000)
    yield Figure(f"64 moves beside {WAITERS:,} waiters", again(moves), "us", 5_000)


def reap(fleet: Fleet, what: str) -> Iterator[Figure]:
    """An owner of many calls is lost; another one's scripts give them back."""
    fleet.hello("b")
    fleet.fill("b", LOST)
    found: list[float] = []
    for _ in range(LEASE_MS // HEARTBEAT_MS - 1):
        fleet.now += HEARTBEAT_MS
        fleet.step("a", [])
    fleet.now += HEARTBEAT_MS
    more = True
    while more:
        reply, us = fleet.step("a", [])
        found.append(us)
        more = bool(reply[4])
    yield Figure(f"longest script while an owner of {LOST:,} {what} calls is reaped", max(found), "us", 5_000)
    yield Figure(f"scripts until an owner of {LOST:,} {what} calls was", len(found), "")


# -- the command ---------------------------------------------------------------------------------------------------


def library_of(folder: Path) -> Library:
    """The scripts of another checkout, put together by its own loader."""
    spec = importlib.util.spec_from_file_location("other_scripts", folder / "gateway/ledger/scripts.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return Library(module.library().name, module.library().text)


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
    store = EmbeddedStore()
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    try:
        figures = show(cost(client, library(), options.against and library_of(options.against)))
        figures += show(scale(client))
    finally:
        client.close()
        store.stop()
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
