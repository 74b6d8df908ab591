"""A batch that follows another one at once waits two turns of the loop for more."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.core.books import FleetConfig
from gateway.ledger.channel import Channel
from gateway.ledger.keeper import GATHER_TURNS, GATHERED_ENOUGH, Keeper
from gateway.ledger.valkey import HoldLimits, ValkeyLedger


@pytest.fixture
def ledger() -> ValkeyLedger:
    """Of a store that nobody asks for anything."""
    config = FleetConfig(
        lease_ms=6000, heartbeat_ms=1000, overtake_blocks=1, lanes=(), classes=(), replicas=()
    )
    return ValkeyLedger("redis://127.0.0.1:1", "fleet", lambda: config, HoldLimits(1, 1, 1), lambda _: None)


def settle(channel: Channel) -> None:
    channel.free(["S", "0123456789", -1, -1, [], ""], lambda _: None)


def after(turns: int, act: Callable[[], None]) -> None:
    """In the loop's turn of that number from now."""
    following = act if turns == 1 else lambda: after(turns - 1, act)
    asyncio.get_running_loop().call_soon(following)


def keeper_of(ledger: ValkeyLedger) -> Keeper:
    return ledger._keeper


async def test_what_comes_within_two_turns_shares_the_batch(ledger: ValkeyLedger) -> None:
    settle(ledger.channel)
    for turns in range(1, GATHER_TURNS + 2):
        after(turns, lambda: settle(ledger.channel))
    await keeper_of(ledger)._gather()
    assert ledger.channel.gathered == 1 + GATHER_TURNS


async def test_enough_waits_for_no_more(ledger: ValkeyLedger) -> None:
    for _ in range(GATHERED_ENOUGH):
        settle(ledger.channel)
    after(1, lambda: settle(ledger.channel))
    await keeper_of(ledger)._gather()
    assert ledger.channel.gathered == GATHERED_ENOUGH


async def test_nothing_waits_for_nothing(ledger: ValkeyLedger) -> None:
    after(1, lambda: settle(ledger.channel))
    await keeper_of(ledger)._gather()
    assert ledger.channel.gathered == 0
