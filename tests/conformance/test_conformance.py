"""The Lua on a real Valkey does what the specification says, reply and content, after every step."""

import msgspec
import pytest

from tests.conformance.traffic import Traffic


@pytest.mark.parametrize("seed", range(100))
def test_lua_equals_the_specification(store_client, seed):
    """150 generated steps."""
    Traffic(store_client, seed).run(150)


def test_a_malformed_op_is_an_error_of_its_own(store_client):
    """Neither its batch nor the books notice."""
    traffic = Traffic(store_client, 0)
    twin, owner = traffic.twin, "o0"
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
    before = twin.lua_content()["calls"]
    batch = traffic.owners[owner] + 1
    packed = [msgspec.msgpack.encode(op) for op in [*bad, good]]
    results = twin.evaluate("step", traffic.now, owner, batch, "wake:", *packed)[5]
    assert [r[0] for r in results[:-1]] == ["error"] * len(bad)
    assert results[-1][0] in ("grant", "ticket", "refused")
    assert set(twin.lua_content()["calls"]) - set(before) <= {"00000000aa"}
