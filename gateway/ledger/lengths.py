"""What a fleet's gateways learn of how much its calls write, shared through the store: it survives a restart, and its
loss."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.core.events import LengthSurprise
from gateway.core.learned import SEPARATOR, LearnedLengths, Row
from gateway.core.lengths import BUCKETS, News
from gateway.ledger.connection import REPLY_SECONDS, Connection
from gateway.ledger.scripts import key_prefix
from gateway.ledger.wire import StoreAway

log = logging.getLogger("kvgate.lengths")

NEWS_SECONDS = 1.0
"""How often what is news is told, and what the others know is heard."""
QUIET_SECONDS = 10.0
"""The same without news."""


class SharedLengths:
    """Hands on what this process has learned and takes what the others have.

    A store that is away costs nothing but that; one that lost its data gets back what is known here.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        lengths: LearnedLengths,
        observer: Callable[[LengthSurprise], None],
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        self._fleet = fleet
        self._lengths = lengths
        self._observer = observer
        self._connection = Connection(url, (key_prefix(fleet) + "lengths",), lambda _: None, reply_seconds)
        self._connected = False

    async def run(self, wanted: Callable[[], bool]) -> None:
        """Until cancelled; while it is not `wanted`, and nothing is news, the store is left alone."""
        loop, at = asyncio.get_running_loop(), -math.inf
        try:
            while True:
                quiet = loop.time() - at >= QUIET_SECONDS
                if self._lengths.has_news or (quiet and wanted()):
                    at = loop.time()
                    await self._try_exchange()
                await asyncio.sleep(NEWS_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()
        self._connected = False

    async def _try_exchange(self) -> None:
        try:
            await self.exchange()
        except Exception:  # a bug of ours: calls go on with what is known
            log.exception("what is learned of lengths could not be shared")

    async def exchange(self) -> None:
        """Once; nobody waits for it."""
        taken = self._lengths.take_news()
        news = dict(taken)
        try:
            if not self._connected:
                await self._connection.open()
                news |= self._lost(await self._share({}))
                self._connected = True
            known = await self._share(news)
        except StoreAway:
            self._connected = False
            self._lengths.give_back(taken)
        else:
            self._lengths.learn(known)

    def _lost(self, known: Mapping[str, list[Row]]) -> dict[str, News]:
        """What is known here of kinds that the store knows nothing of, their news included."""
        return {kind: self._all_of(kind) for kind in self._kinds() if kind not in known}

    def _kinds(self) -> list[str]:
        return [f"{class_}{SEPARATOR}{model}" for class_, model, _ in self._lengths]

    def _all_of(self, kind: str) -> News:
        return {bucket: (entered, left) for bucket, entered, left in self._lengths.rows(kind)}

    async def _share(self, news: Mapping[str, News]) -> dict[str, list[Row]]:
        arguments = [
            part
            for kind, of_kind in news.items()
            for bucket, (entered, left) in sorted(of_kind.items())
            for part in (kind, bucket, entered, left)
        ]
        surprises, flat = await self._connection.evaluate("lengths_share", *arguments)
        for kind in surprises:
            self._tell(kind.decode(errors="replace"))
        return dict(_rows(flat))

    def _tell(self, kind: str) -> None:
        class_, _, model = kind.partition(SEPARATOR)
        log.warning("calls of class %s for %s write more than was learned", class_, model or "any model")
        self._observer(LengthSurprise(self._fleet, class_))


def _rows(flat: Sequence[Any]) -> Iterator[tuple[str, list[Row]]]:
    """What is not ours is left out."""
    for kind, row in zip(flat[::2], flat[1::2], strict=True):
        parts = row.split()
        if len(parts) != 4 or SEPARATOR.encode() not in kind:
            continue
        entries, exits = (part.split(b",") for part in parts[:2])
        if len(entries) == len(exits) == BUCKETS and all(each.isdigit() for each in (*entries, *exits)):
            counts = zip(map(int, entries), map(int, exits), strict=True)
            yield kind.decode(errors="replace"), [(at, *each) for at, each in enumerate(counts)]
