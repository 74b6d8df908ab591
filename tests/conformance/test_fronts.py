"""What a script knows from one moment of its run does not hold in the next, on both implementations."""

from itertools import count

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER = "o0"
BLOCKS, EACH = 100, 4
KEYS = 24
"""Half as many again as are read together (`lua/lib/fronts.lua`)."""


class Fleet:
    """One replica of BLOCKS blocks, open."""

    def __init__(self, client: "redis.Redis[bytes]") -> None:
        replica = ReplicaConfig("r0", "p", BLOCKS, BLOCKS, 50, 1000)
        config = FleetConfig(6000, 1000, 100 * BLOCKS, (("a", ("p",)),), (("normal", 0),), (replica,))
        self.twin, self._batches, self._ids = Twin(client, config), count(1), count(1)
        self._now_ms = 1_000_000
        self.twin.hello(self._now_ms, OWNER)
        for _ in range(5):
            self.step(["Y"])

    def step(self, *ops: Op) -> list[str]:
        """Who has got a place and was not told before."""
        self._now_ms += 500
        return [str(id_) for id_ in self.twin.step(self._now_ms, OWNER, next(self._batches), ops)[6][::2]]

    def admit(self, key: str, blocks: int, blocks_max: int = -1) -> Op:
        call = [key, "normal", "a", blocks, 1, 0, 10 * blocks, 3_600_000, 1, blocks_max, -1, -1, 100, 50]
        return ["A", f"{next(self._ids):010x}", *call, [], [], [], "", "", 0, *IN_FULL]


@pytest.mark.parametrize("calls", [1, 2])
def test_one_release_starts_more_flows_than_are_read_at_a_time(
    store_client: "redis.Redis[bytes]", calls: int
) -> None:
    """With a second call each, who had a turn goes behind those that were not read yet."""
    fleet = Fleet(store_client)
    whole = fleet.admit("whole", BLOCKS)
    fleet.step(whole)
    for _ in range(calls):
        fleet.step(*(fleet.admit(f"k{number:02}", EACH) for number in range(KEYS)))
    started = fleet.step(["S", whole[1], -1, -1, [], ""])
    assert len(started) == min(calls * KEYS, BLOCKS // EACH)
    assert {fleet.twin.books.calls[id_].key for id_ in started} == {f"k{number:02}" for number in range(KEYS)}


def test_what_found_no_room_starts_when_the_same_batch_gives_some_back(
    store_client: "redis.Redis[bytes]",
) -> None:
    fleet = Fleet(store_client)
    running, late = fleet.admit("k0", 60), fleet.admit("k1", 50)
    fleet.step(running)
    assert fleet.step(late, ["S", running[1], -1, -1, [], ""]) == [late[1]]


def test_who_was_parked_starts_when_the_same_batch_gives_its_key_room(
    store_client: "redis.Redis[bytes]",
) -> None:
    """The batch begins when nobody is parked."""
    fleet = Fleet(store_client)
    other, own, parked = fleet.admit("k0", 1), fleet.admit("k1", 10, 10), fleet.admit("k1", 5, 10)
    fleet.step(other, own, fleet.admit("k2", 1), fleet.admit("k3", BLOCKS))
    ends = [["S", call[1], -1, -1, [], ""] for call in (other, own)]
    started = fleet.step(ends[0], parked, fleet.admit("k4", 1), ends[1])
    assert parked[1] in started
