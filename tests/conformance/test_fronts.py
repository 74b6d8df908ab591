"""More flows than a script reads at a time, and more grants in it than it looks ahead, on both implementations."""

from itertools import count

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.twin import Op, Twin

OWNER = "o0"
BLOCKS, EACH = 100, 4
KEYS = 24
"""Half as many again as are read together (`lua/lib/fronts.lua`)."""


@pytest.mark.parametrize("calls", [1, 2])
def test_one_release_starts_more_flows_than_are_read_at_a_time(
    store_client: "redis.Redis[bytes]", calls: int
) -> None:
    """With a second call each, who had a turn goes behind those that were not read yet."""
    replica = ReplicaConfig("r0", "p", BLOCKS, BLOCKS, 50, 1000)
    config = FleetConfig(6000, 1000, 100 * BLOCKS, (("a", ("p",)),), (("normal", 0),), (replica,))
    twin, batches, ids = Twin(store_client, config), count(1), count(1)
    twin.hello(1_000_000, OWNER)

    def step(now_ms: int, *ops: Op) -> list[str]:
        """Who has got a place and was not told before."""
        return [str(id_) for id_ in twin.step(now_ms, OWNER, next(batches), ops)[6][::2]]

    def admit(key: str, blocks: int) -> Op:
        call = [key, "normal", "a", blocks, 1, 0, 10 * blocks, 3_600_000, 1, -1, -1, -1, 100, 50]
        return ["A", f"{next(ids):010x}", *call, [], [], [], "", "", 0]

    for pause_ms in range(0, 2_500, 500):
        step(1_000_000 + pause_ms, ["Y"])
    whole = admit("whole", BLOCKS)
    step(1_002_500, whole)
    for _ in range(calls):
        step(1_002_500, *(admit(f"k{number:02}", EACH) for number in range(KEYS)))
    started = step(1_003_000, ["S", whole[1], -1, -1, [], ""])
    assert len(started) == min(calls * KEYS, BLOCKS // EACH)
    assert {twin.books.calls[id_].key for id_ in started} == {f"k{number:02}" for number in range(KEYS)}
