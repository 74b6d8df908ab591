"""Rate quotas in the ledger, on both implementations and with a given clock."""

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.quota import MINUTE_US
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER = "o0"
NOW_MS = 1_003_000
TOKENS = 2
CALL = "00000000aa"


def admit(id_: str, cost_us: int, queue_max: int = 0) -> Op:
    charge = [TOKENS, cost_us, MINUTE_US]
    return [
        "A",
        id_,
        "k",
        "normal",
        "a",
        1,
        1,
        0,
        1,
        5000,
        1,
        -1,
        -1,
        -1,
        queue_max,
        queue_max,
        [],
        [],
        charge,
        "",
        "",
        0,
        *IN_FULL,
    ]


@pytest.fixture
def twin(store_client: "redis.Redis[bytes]") -> Twin:
    """An open fleet of two replicas; the owners' next batches have the number 3."""
    replicas = tuple(ReplicaConfig(name, "p", 20, 20, 50, 1000) for name in ("r0", "r1"))
    built = Twin(store_client, FleetConfig(6000, 1000, 20, (("a", ("p",)),), (("normal", 0),), replicas))
    built.hello(NOW_MS - 3000, OWNER)
    built.step(NOW_MS - 3000, OWNER, 1, [["Y"]])
    built.step(NOW_MS, OWNER, 2, [["Y"]])
    return built


def test_what_was_used_above_the_charge_is_waited_for_and_told(twin: Twin) -> None:
    """What is left is negative by then: a client is told when the bucket is really full."""
    twin.step(NOW_MS, OWNER, 3, [admit(CALL, MINUTE_US)])
    twin.step(NOW_MS, OWNER, 4, [["S", CALL, -1, -1, [TOKENS, 2 * MINUTE_US], ""]])
    refused = twin.step(NOW_MS, OWNER, 5, [admit("00000000ab", MINUTE_US // 2)])[5][0]
    assert refused == ["refused", "quota_exceeded", "quota", TOKENS, -2 * MINUTE_US, 150_000]
