"""Generated traffic, biased towards what breaks books: sizes at the edges, waits to the next expiry, live ids."""

import random
from typing import Any

from gateway.core.books import Call, FleetConfig, ReplicaConfig
from gateway.core.order import DIGEST_MODULUS, ID_BITS
from tests.conformance.twin import Twin

Op = list[Any]

LANES = (
    (("a", ("p",)), ("b", ("q",))),
    (("a", ("p", "q")), ("b", ("q",))),
    (("a", ("q", "p")), ("b", ("p", "q"))),
)
"""Biased towards replicas that lanes share."""


class Traffic:
    """A world by seed: a fleet, three owners, some keys; `run` plays steps on a twin."""

    def __init__(self, client: Any, seed: int, script_texts: dict[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.limit = self.random.choice([20, 100])
        self.config = self._config()
        self.twin = Twin(client, self.config, script_texts)
        self.now = 1_000_000
        self.owners = {f"o{i}": 0 for i in range(3)}
        self.policies = {f"k{i}": self._policy() for i in range(self.random.choice([1, 3, 12]))}
        for owner in self.owners:
            self.twin.hello(self.now, owner)
        for owner in self.owners if self.random.random() < 0.9 else []:
            self._send(owner, [["Y"]])

    def _config(self) -> FleetConfig:
        pick = self.random.choice
        prefill = pick([30, 1000])
        replicas = tuple(
            ReplicaConfig(
                f"r{i}", pick(["p", "q"]), self.limit, self.limit + pick([0, 5]), pick([4, 50]), prefill
            )
            for i in range(pick([1, 2, 4]))
        )
        return FleetConfig(
            lease_ms=6000,
            heartbeat_ms=1000,
            overtake_blocks=pick([0, self.limit // 2, 2 * self.limit]),
            lanes=pick(LANES),
            classes=(("high", 0), ("normal", 200), ("low", 100)),
            replicas=replicas,
        )  # fmt: skip

    def _policy(self) -> tuple[int, int, int]:
        pick = self.random.choice
        return pick([1, 2, 4]), pick([-1, -1, self.limit // 2]), pick([-1, -1, 2])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._pass_time()
            self._one()

    def _pass_time(self) -> None:
        pick = self.random.choice
        if self.random.random() < 0.8:
            self.now += pick([0, 1])
            return
        books = self.twin.books
        ends = [
            t - books.clock for t in (*books.owners.values(), *(c.deadline for c in books.calls.values()))
        ]
        soon = [end + pick([-1, 0, 1]) for end in ends if 0 < end <= 2000]
        self.now += pick([50, 500, 1999, 2001, 5000, 6001, -100, *soon])

    def _one(self) -> None:
        chance = self.random.random()
        if chance < 0.03:
            return self._operate()
        if chance < 0.04:
            return self.twin.restart_store()
        if chance < 0.05:
            self.owners[f"o{len(self.owners)}"] = 0
            return self.twin.hello(self.now, f"o{len(self.owners) - 1}")
        owner = self.random.choice(sorted(self.owners)[-3:])
        self._send(owner, self._batch(owner))

    def _operate(self) -> None:
        """What operators and watchers do: replicas come and go, limits change."""
        pick = self.random.choice
        if self.random.random() < 0.5:
            return self.twin.observe(self.now, f"r{pick(range(4))}", pick([True, True, False]))
        replicas = list(self.config.replicas)
        for i, replica in enumerate(replicas):
            limit = pick([self.limit, self.limit, self.limit // 2, -1])
            replicas[i] = ReplicaConfig(
                replica.name, replica.pool, limit, replica.usable, replica.sequences_max, replica.prefill_max
            )
        if len(replicas) > 1 and self.random.random() < 0.3:
            replicas.pop()
        config = FleetConfig(
            self.config.lease_ms,
            self.config.heartbeat_ms,
            self.config.overtake_blocks,
            self.config.lanes,
            self.config.classes,
            tuple(replicas),
        )
        self.twin.configure(self.now, config)

    def _send(self, owner: str, ops: list[Op]) -> None:
        batch = self.owners[owner] + self.random.choice([1, 1, 1, 1, 1, 1, 0, -1])
        if batch == self.owners[owner] and ops and ops[0][0] != "H":
            batch += 1
        reply = self.twin.step(self.now, owner, batch, ops)
        self.owners[owner] = max(self.owners[owner], batch)
        if reply[0] == "fenced" and self.random.random() < 0.5:
            self.owners[owner] = 0
            self.twin.hello(self.now, owner)

    def _batch(self, owner: str) -> list[Op]:
        used: set[str] = set()
        ops: list[Op] = []
        if self.random.random() < 0.1:
            ops.append(self._heartbeat(owner))
        for _ in range(self.random.choice([1, 1, 2, 6, 12])):
            op = self._op(owner, used)
            if op:
                ops.append(op)
        return ops

    def _op(self, owner: str, used: set[str]) -> Op | None:
        chance = self.random.random()
        if chance < 0.45:
            return self._admit(used)
        if chance < 0.5:
            return self._admit_again(owner, used)
        if chance < 0.75:
            call = self._pick(owner, used, "reserved")
            return call and [
                "S",
                call.id,
                self.random.choice([-1, 1]),
                self.random.choice([-1, 0, 1, call.cost * 2]),
            ]
        if chance < 0.76:
            return self._touch_foreign(owner)
        if chance < 0.81:
            call = self._pick(owner, used, "queued", "unclaimed")
            return call and ["S", call.id, -1, -1]
        if chance < 0.9:
            call = self._pick(owner, used, "reserved", "unclaimed", "queued")
            return call and [self.random.choice("FKK"), call.id]
        if chance < 0.93:
            call = self._pick(owner, used, "reserved", "unclaimed")
            return call and [
                "Z",
                call.id,
                self.random.choice([1, call.blocks + 1, call.blocks * 2, self.limit]),
            ]
        if chance < 0.96:
            call = self._pick(owner, used, "reserved", "unclaimed", "queued")
            return call and ["M", call.id, self.random.choice([[], [call.replica or "r0"]])]
        if chance < 0.99:
            return self._redeclare(owner, used)
        return ["Y"]

    def _pick(self, owner: str, used: set[str], *states: str) -> Call | None:
        books = self.twin.books
        mine = [
            c for c in books.calls.values() if c.owner == owner and c.state in states and c.id not in used
        ]
        if not mine:
            return None
        call = self.random.choice(sorted(mine, key=lambda c: c.id))
        used.add(call.id)
        return call

    def _blocks(self) -> int:
        edge = [1, 2, self.limit // 4, self.limit // 2, self.limit, self.limit + 3, self.limit + 9]
        return self.random.choice(edge if self.random.random() < 0.5 else [1, 3, 7])

    def _admit(self, used: set[str]) -> Op:
        pick = self.random.choice
        id_ = f"{self.random.getrandbits(ID_BITS):010x}"
        used.add(id_)
        key = pick(sorted(self.policies))
        if self.random.random() < 0.02:
            self.policies[key] = self._policy()
        blocks = self._blocks()
        class_ = pick(["high", "normal", "low"]) if self.random.random() < 0.5 else "normal"
        lane = pick("ab")
        if self.random.random() < 0.02:
            class_, lane = pick([("gone", lane), (class_, "gone")])
        return ["A", id_, key, class_, lane, blocks, pick([1, 1, 2]), pick([0, 5, 20, 40]),
                blocks * pick([1, 5]), pick([0, 1, 100, 5000, 10**6]), *self.policies[key], pick([0, 2, 100, 100]),
                pick([[], [], ["r1"], ["r0", "r2"]]), pick([[], [], [], ["r0"]]), []]  # fmt: skip

    def _admit_again(self, owner: str, used: set[str]) -> Op | None:
        """The same call, from its owner or from another one."""
        known = sorted(set(self.twin.books.calls) - used)
        if not known:
            return None
        call = self.twin.books.calls[self.random.choice(known)]
        used.add(call.id)
        return ["A", call.id, call.key, call.class_, call.lane, call.blocks, call.sequences, call.prefill, call.cost,
                1000, *self.policies[call.key], 100, [], [], []]  # fmt: skip

    def _touch_foreign(self, owner: str) -> Op | None:
        foreign = sorted(c.id for c in self.twin.books.calls.values() if c.owner != owner)
        if not foreign:
            return None
        id_ = self.random.choice(foreign)
        return self.random.choice([["S", id_, -1, -1], ["F", id_], ["K", id_], ["M", id_, []], ["Z", id_, 1]])

    def _redeclare(self, owner: str, used: set[str]) -> Op:
        pick = self.random.choice
        known = sorted(set(self.twin.books.calls) - used)
        id_ = (
            pick(known)
            if known and self.random.random() < 0.5
            else f"{self.random.getrandbits(ID_BITS):010x}"
        )
        used.add(id_)
        key = pick(sorted(self.policies))
        return ["R", id_, f"r{pick(range(5))}", key, "normal", pick("abbac"), self._blocks(), 1, pick([0, 5]), 7,
                *self.policies[key], pick([0, 1])]  # fmt: skip

    def _heartbeat(self, owner: str) -> Op:
        books = self.twin.books
        mine = [int(c.id, 16) for c in books.calls.values() if c.owner == owner and c.state == "reserved"]
        return ["H", len(mine) + self.random.choice([0, 0, 1]), sum(mine) % DIGEST_MODULUS]
