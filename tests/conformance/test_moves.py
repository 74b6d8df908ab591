"""Calls whose replica failed, on both implementations and with a given clock."""

import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.twin import IN_FULL, Twin

OWNER, CALL, BLOCKS = "o0", "00000000aa", 10


def test_a_late_copy_moves_nothing_again(store_client: "redis.Redis[bytes]") -> None:
    """The call runs elsewhere already, where a second move would leave it without a place."""
    replicas = tuple(ReplicaConfig(name, "p", BLOCKS, BLOCKS, 50, 1000) for name in ("r0", "r1"))
    config = FleetConfig(6000, 1000, BLOCKS, (("a", ("p",)),), (("normal", 0),), replicas)
    twin = Twin(store_client, config)
    now_ms = 1_000_000
    twin.hello(now_ms, OWNER)
    for batch in range(1, 4):
        now_ms += 1000
        twin.step(now_ms, OWNER, batch, [["Y"]])
    limits = [600_000, 1, -1, -1, -1, 9, 9]
    admit = ["A", CALL, "k", "normal", "a", BLOCKS, 1, 0, 1, *limits, [], [], [], "", "", 0, *IN_FULL]
    assert twin.step(now_ms, OWNER, 4, [admit])[5] == [["grant", "r0"]]
    assert twin.step(now_ms, OWNER, 5, [["M", CALL, ["r0"]]])[5][0][0] == "ticket"
    assert twin.books.calls[CALL].replica == "r1"
    assert twin.step(now_ms, OWNER, 6, [["K", CALL]])[5] == [["grant", "r1"]]
    assert twin.step(now_ms, OWNER, 7, [["M", CALL, ["r0"]]])[5] == [["grant", "r1"]]
    assert twin.books.calls[CALL].replica == "r1"
