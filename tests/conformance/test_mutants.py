"""The comparison notices broken Lua: each planted fault is found by some seed."""

import contextlib

import pytest
import redis

from gateway.ledger.scripts import load
from tests.conformance.mutants import MUTANTS
from tests.conformance.traffic import Traffic

SEEDS_MAX = 40


def found_at(client: "redis.Redis", texts: dict[str, str]) -> int | None:
    """The first seed whose traffic shows a difference."""
    for seed in range(SEEDS_MAX):
        try:
            Traffic(client, seed, texts).run(150)
        except (AssertionError, redis.ResponseError):
            return seed
    return None


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_found(store_client, fault: str) -> None:
    before, after = MUTANTS[fault]
    text = load("step").text
    assert before in text, "the Lua has changed: plant the fault anew"
    try:
        assert found_at(store_client, {"step": text.replace(before, after)}) is not None
    finally:
        with contextlib.suppress(redis.ResponseError):
            store_client.flushall()
