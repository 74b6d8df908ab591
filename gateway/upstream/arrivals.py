"""An engine's step makes a token of every call at once: they are passed on in several turns of the event loop, so that
others - a reply of the store, a client's request - get a word in between.

Traced with eight engines of 63 streams each on a machine that was busy: a reply of the store that came later than after
4 ms, and up to 16, had waited behind 62 to 250 tokens.
"""

import asyncio
from collections import deque
from typing import Protocol

READS_A_TURN = 16
"""Some 0.5 ms of work."""
WAITING_MAX = 1024
"""Reads that may wait; more come only where the loop is late anyway, and then each makes room for itself."""
SMALL_BYTES_MAX = 16_384
"""Larger reads hold no single tokens, and would fill the memory if they waited."""


class Sink(Protocol):
    """Takes what a connection has read, in order."""

    waiting: int
    """Reads of it that wait here."""

    def take(self, data: bytes) -> None: ...


class Arrivals:
    """What was read from engines; one for the process.  Reads of one connection are never overtaken by later ones.

    Where a turn ends is asked of the loop only when its reads are used up: to ask costs the loop a turn of its own with
    a system call, and while little comes nobody has to wait.  So a turn may have less than all of its reads left.
    """

    __slots__ = ("_ending", "_reads", "_waiting", "left")

    def __init__(self, reads: int = READS_A_TURN) -> None:
        self._reads = reads
        self.left = reads
        """Reads that may be passed on before others get a word; 0 while any wait."""
        self._waiting: deque[tuple[Sink, bytes]] = deque()
        self._ending: asyncio.Handle | None = None
        """There while nothing is left of the turn."""

    def add(self, sink: Sink, data: bytes) -> None:
        """Pass it on now where this turn has room, else in one of the next.

        While `left` is above 1 the caller may as well count it down itself.
        """
        if self.left:
            self._count()
            sink.take(data)
        elif len(data) > SMALL_BYTES_MAX:
            self.flush(sink)
            sink.take(data)
        else:
            sink.waiting += 1
            self._waiting.append((sink, data))
            if len(self._waiting) > WAITING_MAX:
                self._pass_on()

    def flush(self, sink: Sink) -> None:
        """Pass on what waits of one connection."""
        if not sink.waiting:
            return
        own = [data for other, data in self._waiting if other is sink]
        self._waiting = deque(read for read in self._waiting if read[0] is not sink)
        sink.waiting = 0
        for data in own:
            sink.take(data)

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            self._ending = asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        """A turn is over: those who wait are the first in the next."""
        self._ending = None
        reads = self._reads
        try:
            while self._waiting and reads:
                reads -= 1
                self._pass_on()
        finally:
            self.left = 0 if self._waiting else reads
            if not self.left:
                self._ending = asyncio.get_running_loop().call_soon(self._end)

    def _pass_on(self) -> None:
        sink, data = self._waiting.popleft()
        sink.waiting -= 1
        sink.take(data)
