"""Whether an operator has closed the fleet, for calls that ask the store for nothing else."""

import asyncio
from collections.abc import Callable

from gateway.ledger.connection import Connection
from gateway.ledger.share import read_hash
from gateway.ledger.wire import StoreAway

KNOWN_SECONDS = 1.0
"""How long an answer is good for: as a change of the configuration, the word counts within a second."""
ANSWER_SECONDS = 0.25


class Closed:
    """Asks when somebody wants to know, once for all who do."""

    def __init__(self, connection: Connection, now: Callable[[], float]) -> None:
        self._connection = connection
        self._now = now
        self._known = False
        self._until = 0.0

    async def __call__(self) -> bool:
        """As the store said last; it never raises.  While the store is away the last word counts."""
        now = self._now()
        if now >= self._until:
            self._until = now + KNOWN_SECONDS  # who comes while the store is asked does not ask too
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    meta = await read_hash(self._connection, "meta")
                self._known = meta.get(b"shut") == b"1"
            except (StoreAway, TimeoutError):
                pass
        return self._known
