"""Who reads which engine's metrics, and what was learned from them, in the store."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.core.capacity import Budgets, Learned, Seat
from gateway.ledger.wire import StoreAway

ASK_SECONDS = 1.0
"""A later answer is of no use: the reading would be old."""


class Seats:
    """Implements `CapacityBooks`.  No error leaves it: a store that is away has nothing to tell."""

    def __init__(self, ask: Callable[..., "asyncio.Future[Any]"]) -> None:
        """`ask`: the answer of `configure` to these arguments."""
        self._ask = ask
        self._scraper = secrets.token_hex(8)

    async def seat(self, replica: str) -> Seat | None:
        return _seat(await self._answer("seat", self._scraper, replica))

    async def learn(self, replica: str, number: int, learned: Learned, configured: Budgets) -> bool:
        allowed = learned.budgets(configured)
        told = msgspec.json.encode(learned).decode()
        answer = await self._answer(
            "learn", self._scraper, replica, number, *_lowered(allowed, configured), told, learned.cache
        )
        return _seat(answer) is not None

    async def _answer(self, *arguments: str | int) -> list[Any]:
        answer = self._ask(*arguments)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await asyncio.wait([answer])
        except TimeoutError:
            answer.cancel()
            return []
        if answer.cancelled() or isinstance(answer.exception(), StoreAway):
            return []
        reply: list[Any] = answer.result()
        return reply


def _lowered(allowed: Budgets, configured: Budgets) -> list[int]:
    """-1 = as configured."""
    pairs = zip(msgspec.structs.astuple(allowed), msgspec.structs.astuple(configured), strict=True)
    return [-1 if now == normally else now for now, normally in pairs]


def _seat(answer: list[Any]) -> Seat | None:
    if not answer or answer[0] != "seat":
        return None
    _, clock, mine, lease_ms, number, held, configured, told = answer
    return Seat(bool(mine), lease_ms, clock, number, Budgets(*held), Budgets(*configured), read_learned(told))


def read_learned(told: str) -> Learned | None:
    """What another gateway wrote, perhaps of another version: None where it cannot be read."""
    try:
        return msgspec.json.decode(told, type=Learned)
    except msgspec.MsgspecError:
        return None
