"""Fingerprints without a gap in the event loop: a crowd that leaves the queue, or returns, needs them all at once."""

import asyncio
from collections import deque
from collections.abc import Callable

from gateway.core.identity import INLINE_BYTES_MAX, Identity

TURN_BYTES_MAX = INLINE_BYTES_MAX
"""Hashed in one turn of the loop, but for what is left of the last body.

Threads for these would cost the loop more: each of many that end gets in its way for the interpreter lock.
"""

Then = Callable[[], None]


class Fingerprints:
    """Made in their order; so much a turn of the loop, and of long bodies one at a time in a thread."""

    def __init__(self) -> None:
        self._quick: deque[tuple[Identity, Then]] = deque()
        self._long: deque[tuple[Identity, Then]] = deque()
        self._left_bytes = 0
        """Of this turn."""
        self._turn: asyncio.Handle | None = None
        """Its end, while there is something to count."""
        self._hashing = False
        """A thread is at work."""

    def make(self, identity: Identity, then: Then) -> None:
        """Call `then` when it is known: at once where this turn has room for it."""
        if identity.known:
            then()
        elif identity.is_quick:
            self._quick.append((identity, then))
            self._begin_turn()
            self._go_on()
        else:
            self._long.append((identity, then))
            self._hash_beside()

    def _begin_turn(self) -> None:
        if self._turn is None:
            self._left_bytes = TURN_BYTES_MAX
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn = None
        if self._quick:
            self._begin_turn()
            self._go_on()

    def _go_on(self) -> None:
        while self._quick and self._left_bytes > 0:
            identity, then = self._quick.popleft()
            self._left_bytes -= identity.body_bytes
            identity.fingerprint()
            then()

    def _hash_beside(self) -> None:
        if self._hashing or not self._long:
            return
        self._hashing = True
        identity, then = self._long.popleft()
        made = asyncio.get_running_loop().run_in_executor(None, identity.fingerprint)
        made.add_done_callback(lambda _: self._hashed(then))

    def _hashed(self, then: Then) -> None:
        self._hashing = False
        self._hash_beside()
        then()
