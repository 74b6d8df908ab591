"""What a fleet's gateways learn of its estimates, shared through the store: it survives a restart, and its loss."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence

from gateway.core.factors import Factors
from gateway.ledger.connection import REPLY_SECONDS, Connection
from gateway.ledger.scripts import key_prefix
from gateway.ledger.wire import StoreAway

log = logging.getLogger("kvgate.factors")

EXCHANGE_SECONDS = 10.0


class SharedFactors:
    """Hands on what this process has learned and takes what the others have.

    A store that is away costs nothing but that; one that lost its data gets back what is known here.
    """

    def __init__(self, url: str, fleet: str, factors: Factors, reply_seconds: float = REPLY_SECONDS) -> None:
        self._factors = factors
        self._connection = Connection(url, (key_prefix(fleet) + "factors",), lambda _: None, reply_seconds)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.exchange()
            except Exception:  # a bug of ours: estimates go on with what is known
                log.exception("what is learned of estimates could not be shared")
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def exchange(self) -> None:
        """On a connection of its own, for as long as it takes: nobody waits for it."""
        news = self._factors.take_news()
        try:
            await self._connection.open()
            known = await self._share((kind, bin_, count) for (kind, bin_), count in news.items())
            if sum(count for _, _, count in known) < self._factors.total / 2:
                known = await self._share(list(self._factors.rows()))
        except StoreAway:
            self._factors.give_back(news)
        else:
            self._factors.learn(known)
        finally:
            self._connection.close()

    async def _share(self, rows: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        flat = await self._connection.evaluate("factors_share", *(part for row in rows for part in row))
        return list(_rows(flat))


def _rows(flat: Sequence[bytes]) -> Iterator[tuple[str, int, int]]:
    """What is not ours is left out."""
    for field, count in zip(flat[::2], flat[1::2], strict=True):
        kind, _, bin_ = field.decode(errors="replace").rpartition(":")
        if kind and bin_.lstrip("-").isdecimal() and count.isdigit():
            yield kind, int(bin_), int(count)
