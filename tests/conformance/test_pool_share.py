"""The part of a pool that a key may hold (`limits.pool_share`), on both implementations and with a given clock."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.order import POOL_SHARE_SCALE, SLICE
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER = "o0"
LIMIT = 20
HALF = POOL_SHARE_SCALE // 2
PAUSE_MS = 500
OVERTAKE = 5


class Fleet:
    """Pool p of the replicas r0 and r1, pool q of r2; lane a may use both, in that order, and lane b q alone."""

    def __init__(self, client: "redis.Redis[bytes]", limit: int = LIMIT) -> None:
        replicas = tuple(
            ReplicaConfig(name, pool, limit, limit, 500, 1000)
            for name, pool in (("r0", "p"), ("r1", "p"), ("r2", "q"))
        )
        lanes = (("a", ("p", "q")), ("b", ("q",)))
        self.config = FleetConfig(600_000, 1000, OVERTAKE, lanes, (("high", 0), ("normal", 0)), replicas)
        self.twin = Twin(client, self.config)
        self._now_ms, self._batches, self._ids = 1_000_000, count(1), count(1)
        self.twin.hello(self._now_ms, OWNER)
        for _ in range(5):
            self.step(["Y"])

    def step(self, *ops: Op) -> list[Op]:
        self._now_ms += PAUSE_MS
        reply = self.twin.step(self._now_ms, OWNER, next(self._batches), ops)
        results: list[Op] = reply[5]
        return results

    def scripts(self) -> int:
        """How many it takes until there is no more to do."""
        for scripts in count(1):
            self._now_ms += 1
            if not self.twin.step(self._now_ms, OWNER, next(self._batches), [])[4]:
                return scripts
        raise AssertionError

    def ask(
        self, blocks: int, key: str = "k", lane: str = "a", class_: str = "normal", queue_max: int = 100,
        share: int = HALF,
    ) -> str:  # fmt: skip
        """The call's id, and what became of it in `answer`."""
        id_ = f"{next(self._ids):010x}"
        policy, places = [1, -1, -1, share], [[], [], [], "", "", 0, *IN_FULL]
        op = ["A", id_, key, class_, lane, blocks, 1, 0, 1, 600_000, *policy, queue_max, queue_max, *places]
        (self.answer,) = self.step(op)
        return id_

    def run(self, blocks: int, replica: str, **options: str | int) -> str:
        """A call that starts there at once."""
        id_ = self.ask(blocks, **options)  # type: ignore[arg-type]
        assert self.answer == ["grant", replica]
        return id_

    def wait(self, blocks: int, **options: str | int) -> str:
        id_ = self.ask(blocks, **options)  # type: ignore[arg-type]
        assert self.answer[0] == "ticket"
        return id_

    def settle(self, *ids: str) -> None:
        self.step(*(["S", id_, -1, -1, [], ""] for id_ in ids))

    def state(self, id_: str) -> str:
        return self.twin.books.calls[id_].state

    def pools(self, key: str = "k") -> tuple[object, ...]:
        return self.twin.books.keys[key].pools

    def observe(self, replica: str, up: bool) -> None:
        self.twin.observe(self._now_ms, replica, up)

    def configure(self, *limits: int, pools: Sequence[str] = "ppq") -> None:
        replicas = tuple(
            replace(known, limit=limit, usable=limit, pool=pool)
            for known, limit, pool in zip(self.config.replicas, limits, pools, strict=True)
        )
        self.twin.configure(self._now_ms, replace(self.config, replicas=replicas))

    def learn(self, replica: str, number: int, limit: int) -> None:
        """`limit`: -1 = as configured."""
        self.twin.seat(self._now_ms, "g", replica)
        self.twin.learn(self._now_ms, "g", replica, number, [limit, -1, -1], "")


def test_at_its_part_of_a_pool_a_call_goes_to_the_next(store_client: "redis.Redis[bytes]") -> None:
    """Half of two replicas of 20 is 20, of one it is 10."""
    fleet = Fleet(store_client)
    fleet.run(15, "r0")
    fleet.run(6, "r2")
    fleet.run(5, "r1")
    assert fleet.pools() == ("p", 20, "q", 6)
    fleet.run(4, "r2")
    fleet.wait(1)
    fleet.run(15, "r1", key="other", share=-1)


def test_a_key_at_its_part_of_every_pool_is_parked_and_woken(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    full = fleet.run(10, "r2", lane="b")
    parked = fleet.wait(4, lane="b")
    assert fleet.twin.books.parked == {("b", "normal", "k")}
    other = fleet.run(10, "r2", lane="b", key="other")
    assert fleet.state(parked) == "queued"
    fleet.settle(other)
    assert fleet.state(parked) == "queued", "the room of others is not its own"
    fleet.settle(full)
    assert (fleet.state(parked), fleet.pools()) == ("unclaimed", ("q", 4))


def test_a_call_that_moves_gives_its_part_back_and_one_that_grows_takes_none(
    store_client: "redis.Redis[bytes]",
) -> None:
    fleet = Fleet(store_client)
    """Its part is counted in whole demands."""
    full = fleet.run(10, "r2", lane="b")
    fleet.step(["Z", full, 3, 16, bytes(132), 0])
    assert fleet.pools() == ("q", 10)
    moved = fleet.run(20, "r0")
    fleet.step(["M", moved, ["r0"]])
    assert fleet.twin.books.calls[moved].replica == "r1"
    assert fleet.pools() == ("q", 10, "p", 20)


def test_larger_than_the_part_of_an_idle_pool_never_fits(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    fleet.ask(11, lane="b")
    assert fleet.answer == ["refused", "key_cap_exceeded", "pool_share", 11, 10, 0]
    fleet.run(20, "r0")
    fleet.ask(21)
    assert fleet.answer[1] == "context_length_exceeded", "and the larger of two reasons comes first"


def test_a_replica_that_is_down_makes_nobody_too_large(store_client: "redis.Redis[bytes]") -> None:
    """While it is down there is no more than half of the other's blocks; who needs more waits."""
    fleet = Fleet(store_client)
    fleet.observe("r1", up=False)
    parked = fleet.wait(14)
    assert fleet.twin.books.parked
    fleet.observe("r1", up=True)
    assert fleet.state(parked) == "unclaimed"


def test_an_engine_whose_size_is_not_known_makes_nobody_too_large(
    store_client: "redis.Redis[bytes]",
) -> None:
    fleet = Fleet(store_client)
    unknown = ReplicaConfig("r3", "q")
    config = replace(fleet.config, replicas=(*fleet.config.replicas, unknown))
    fleet.twin.configure(1_010_000, config)
    fleet.wait(11, lane="b")


def test_with_the_queue_off_the_part_is_named(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    fleet.run(6, "r2", lane="b")
    fleet.ask(5, lane="b", queue_max=0)
    assert fleet.answer[:5] == ["refused", "quota_exceeded", "pool_share", 11, 10]


def test_a_higher_limit_wakes_all_that_are_parked_a_slice_a_script(
    store_client: "redis.Redis[bytes]",
) -> None:
    """More flows than one script looks at, and none of them has a release of its own to come."""
    keys = [f"k{i:03}" for i in range(SLICE + 8)]
    fleet = Fleet(store_client, limit=400)
    part = POOL_SHARE_SCALE // 40  # 10 blocks of q
    for key in keys:
        fleet.ask(10, key=key, lane="b", share=part)
    waiting = [fleet.wait(10, key=key, lane="b", share=part) for key in keys]
    fleet.scripts()
    assert len(fleet.twin.books.parked) == len(keys)
    fleet.configure(400, 400, 800)
    assert fleet.scripts() > 1
    assert {fleet.state(id_) for id_ in waiting} == {"unclaimed"}


def test_a_lower_limit_parks_who_was_in_the_order(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    other = fleet.run(20, "r2", key="other", share=-1, lane="b")
    fleet.wait(8, lane="b")
    assert not fleet.twin.books.parked, "it waits for room, and not for its key"
    fleet.configure(20, 20, 12)
    assert fleet.twin.books.parked
    fleet.settle(other)
    assert fleet.twin.books.parked
    fleet.configure(20, 20, 20)
    assert not fleet.twin.books.parked


def test_a_learned_limit_that_is_raised_wakes_who_is_parked(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    fleet.learn("r2", 1, 12)
    fleet.run(6, "r2", lane="b")
    waiting = fleet.wait(4, lane="b")
    assert fleet.twin.books.parked
    fleet.learn("r2", 2, -1)
    assert not fleet.twin.books.parked
    assert fleet.state(waiting) == "unclaimed"


def test_a_learned_limit_that_is_raised_starts_who_waits_for_room(
    store_client: "redis.Redis[bytes]",
) -> None:
    fleet = Fleet(store_client)
    fleet.learn("r2", 1, 12)
    fleet.run(10, "r2", share=-1, lane="b")
    waiting = fleet.wait(4, share=-1, lane="b")
    assert not fleet.twin.books.parked
    fleet.learn("r2", 2, -1)
    assert fleet.state(waiting) == "unclaimed"


def test_another_share_counts_at_once(store_client: "redis.Redis[bytes]") -> None:
    """Also for a call that waits for the second pool of its lane, whose first one its key has its part of."""
    fleet = Fleet(store_client)
    fleet.run(20, "r0")
    fleet.run(20, "r2", key="other", share=-1, lane="b")
    waiting = fleet.wait(8)
    assert not fleet.twin.books.parked
    fleet.run(1, "r1", share=2 * HALF, class_="high")
    assert fleet.state(waiting) == "unclaimed"


def test_what_runs_counts_from_its_declaration_on(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client)
    declared = ["R", "00000000ff", "r2", "k", "normal", "b", 9, 1, 0, 1, 1, -1, -1, HALF, 0, "", "", *IN_FULL]
    assert fleet.step(declared) == [["declared"]]
    assert fleet.pools() == ("q", 9)
    fleet.wait(2, lane="b")
    fleet.run(1, "r2", lane="b", class_="high")


def test_who_runs_counts_in_its_pool_when_its_replica_changes_to_another(
    store_client: "redis.Redis[bytes]",
) -> None:
    fleet = Fleet(store_client)
    running = fleet.run(15, "r0")
    fleet.configure(20, 20, 20, pools="qpq")
    assert fleet.pools() == ("p", 15)
    fleet.settle(running)
    assert fleet.pools() == ()


def test_no_replica_is_held_where_its_call_may_not_go(store_client: "redis.Redis[bytes]") -> None:
    """It was held before the key came to its part of the pool by a call of another class."""
    fleet = Fleet(store_client)
    fleet.run(20, "r2", key="other", share=-1, lane="b")
    fleet.run(18, "r0", key="other", share=-1)
    fleet.run(16, "r1", key="other", share=-1)
    head = fleet.wait(10)
    for blocks in (2, 1, 2):
        fleet.wait(blocks, key="other", share=-1)
    replicas = fleet.twin.books.replicas
    held = next(name for name, replica in replicas.items() if replica.held_for == head)
    free = "r1" if held == "r0" else "r0"
    higher = fleet.wait(12, class_="high")
    fleet.settle(*(c.id for c in fleet.twin.books.calls.values() if c.replica == free))
    assert fleet.twin.books.calls[higher].replica == free
    assert replicas[held].held_for == ""
    assert fleet.state(head) == "queued"
