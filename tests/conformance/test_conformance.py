"""The Lua on a real Valkey does what the specification says, reply and content, after every command."""

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.books import read_content
from tests.conformance.machine import PARTS, BooksMachine, play
from tests.conformance.twin import FLEET, IN_FULL, Twin, lua_content, pack_op


@pytest.mark.parametrize("part", range(PARTS))
def test_lua_equals_the_specification(store_client, part):
    play(lambda: BooksMachine(store_client), part)


def test_a_malformed_op_is_an_error_of_its_own(store_client):
    """Neither its batch nor the books notice."""
    replica = ReplicaConfig("r0", "p", 20, 20, 50, 1000)
    fleet = FleetConfig(6000, 1000, 20, (("a", ("p",)),), (("normal", 0),), (replica,))
    twin, now, owner = Twin(store_client, fleet), 1_000_000, "o0"
    twin.hello(now, owner)
    good = [
        "A",
        "00000000aa",
        "k0",
        "normal",
        "a",
        1,
        1,
        0,
        1,
        100,
        1,
        -1,
        -1,
        -1,
        5,
        5,
        [],
        [],
        [],
        "",
        "",
        0,
        *IN_FULL,
    ]
    bad = [
        ["X"],
        ["S", "00000000aa"],
        ["S", "short", 1, 1, [], ""],
        ["A", "00000000ab", "k:0", *good[3:]],
        ["A", "00000000ac", "k0", "normal:", *good[4:]],
        ["A", "00000000ad", "k0", "normal", "", *good[5:]],
        ["A", "00000000ae", *good[2:5], 0, *good[6:]],
        ["A", "00000000af", *good[2:5], 1.5, *good[6:]],
        ["A", "00000000ba", *good[2:5], 2**53, *good[6:]],
        ["A", "00000000bb", *good[2:5], float("nan"), *good[6:]],
    ]
    packed = [pack_op(op) for op in [*bad, good]]
    results = twin.evaluate("step", now, owner, 1, "wake:", *packed)[5]
    assert [r[0] for r in results[:-1]] == ["error"] * len(bad)
    assert results[-1][0] == "ticket", "the gate of a new store is closed"
    assert set(lua_content(read_content(store_client, FLEET))["calls"]) == {"00000000aa"}


def test_a_run_that_breaks_off_leaves_nothing_to_the_next(store_client):
    """The store refuses a write to one gateway only: what its run had changed in memory is forgotten."""
    replica = ReplicaConfig("r0", "p", 20, 20, 50, 1000)
    fleet = FleetConfig(6000, 1000, 20, (("a", ("p",)),), (("normal", 0),), (replica,))
    twin, now, owner = Twin(store_client, fleet), 1_000_000, "o0"
    twin.hello(now, owner)
    twin.step(now, owner, 1, [["Y"]])
    twin.step(now + 2000, owner, 2, [["Y"]])
    admit = [
        "A",
        "00000000aa",
        "k0",
        "normal",
        "a",
        20,
        1,
        0,
        1,
        100,
        1,
        -1,
        -1,
        -1,
        0,
        0,
        [],
        [],
        [],
        "",
        "",
        0,
        *IN_FULL,
    ]
    arguments = (twin.scripts.function("step"), len(twin.keys), *twin.keys, now + 2000, owner, 3, "wake:")
    store_client.execute_command("ACL", "SETUSER", "halved", "on", "nopass", "~*", "&*", "+@all", "-hset")
    try:
        with store_client.client() as other:
            other.execute_command("AUTH", "halved", "")
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|can.t run"):
                other.fcall(*arguments, pack_op(admit))
            other.execute_command("AUTH", "default", "")
    finally:
        store_client.execute_command("ACL", "DELUSER", "halved")
    assert twin.step(now + 2000, owner, 3, [admit])[5] == [["grant", "r0"]]
