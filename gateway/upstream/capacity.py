"""Reads an engine's metrics for the closed loop of `core/capacity.py`, where this gateway is the one that does."""

import time
from collections.abc import Awaitable, Callable

from gateway.core.capacity import CapacityBooks, Reading, Rules, Seat, is_young, learn
from gateway.upstream.metrics_text import EnginePage
from gateway.upstream.scraper import Unusable


class Meter:
    """For one fleet.  One reading of a replica at a time."""

    def __init__(
        self,
        books: CapacityBooks,
        rules: Callable[[], Rules],
        others_are_warm: Callable[[str], bool],
        holds_more: Callable[[str, int], None],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`others_are_warm`: whether there are warm replicas beside this one, so that it may start slowly.
        `holds_more` is told of each one that was seen to hold more blocks than the ledger, and how many more, whoever
        saw it.
        """
        self._books = books
        self._rules = rules
        self._others_are_warm = others_are_warm
        self._holds_more = holds_more
        self._now = now
        self._wall = wall
        self.mine: set[str] = set()
        """Replicas whose metrics this gateway reads for all."""
        self._offer_at: dict[str, float] = {}
        """By replica: before that another gateway has its seat."""

    async def measure(self, replica: str, read: Callable[[], Awaitable[EnginePage]]) -> EnginePage:
        """The page, and the ledger has what it teaches.  Raises what `read` does.

        The ledger is asked before and after: what came or went meanwhile is nobody else's.
        """
        before = await self._seat(replica)
        (self.mine.add if before and before.mine else self.mine.discard)(replica)
        try:
            page = await read()
        except Unusable:
            self._stand_back(replica, before)
            raise
        if before and before.mine:
            await self._learn(replica, before, page.reading)
        return page

    async def _seat(self, replica: str) -> Seat | None:
        if self._now() < self._offer_at.get(replica, 0.0):
            return None
        seat = await self._books.seat(replica)
        if seat and seat.learned and seat.learned.strangers:
            self._holds_more(replica, seat.learned.strangers_blocks)
        if seat and not seat.mine:
            self._stand_back(replica, seat)
        return seat

    def _stand_back(self, replica: str, seat: Seat | None) -> None:
        """Until the seat is free: of one that this gateway has and cannot read for, another may."""
        now = self._now()
        self._offer_at = {name: at for name, at in self._offer_at.items() if at > now}
        if seat:
            self._offer_at[replica] = now + (seat.lease_ms + 1) / 1000

    async def _learn(self, replica: str, before: Seat, reading: Reading) -> None:
        seat = await self._books.seat(replica)
        if seat is None or not seat.mine:
            return
        held = before.held.most(seat.held)
        cold = is_young(reading, self._wall()) and self._others_are_warm(replica)
        learned = learn(seat.learned, seat.clock, seat.configured, held, reading, self._rules(), cold)
        await self._books.learn(replica, seat.number + 1, learned, seat.configured)
