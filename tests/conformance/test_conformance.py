"""The Lua on a real Valkey does what the specification says, reply and content, after every command."""

import msgspec
import pytest

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.books import read_content
from tests.conformance.machine import PARTS, BooksMachine, play
from tests.conformance.twin import FLEET, Twin, lua_content


@pytest.mark.parametrize("part", range(PARTS))
def test_lua_equals_the_specification(store_client, part):
    play(lambda: BooksMachine(store_client), part)


def test_a_malformed_op_is_an_error_of_its_own(store_client):
    """Neither its batch nor the books notice."""
    replica = ReplicaConfig("r0", "p", 20, 20, 50, 1000)
    fleet = FleetConfig(6000, 1000, 20, (("a", ("p",)),), (("normal", 0),), (replica,))
    twin, now, owner = Twin(store_client, fleet), 1_000_000, "o0"
    twin.hello(now, owner)
    good = ["A", "00000000aa", "k0", "normal", "a", 1, 1, 0, 1, 100, 1, -1, -1, 5, [], [], []]
    bad = [
        ["X"],
        ["S", "00000000aa"],
        ["S", "short", 1, 1],
        ["A", "00000000ab", "k:0", *good[3:]],
        ["A", "00000000ac", "k0", "normal:", *good[4:]],
        ["A", "00000000ad", "k0", "normal", "", *good[5:]],
        ["A", "00000000ae", *good[2:5], 0, *good[6:]],
        ["A", "00000000af", *good[2:5], 1.5, *good[6:]],
        ["A", "00000000ba", *good[2:5], 2**53, *good[6:]],
        ["A", "00000000bb", *good[2:5], float("nan"), *good[6:]],
    ]
    packed = [msgspec.msgpack.encode(op) for op in [*bad, good]]
    results = twin.evaluate("step", now, owner, 1, "wake:", *packed)[5]
    assert [r[0] for r in results[:-1]] == ["error"] * len(bad)
    assert results[-1][0] == "ticket", "the gate of a new store is closed"
    assert set(lua_content(read_content(store_client, FLEET))["calls"]) == {"00000000aa"}
