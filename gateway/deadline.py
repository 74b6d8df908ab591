"""Time limits: one that is moved with every request and hardly ever met, and one that forgives our own slowness."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LOOKS = 10


class Deadline:
    """Moving it later costs an assignment: a timer that comes too early finds out and waits for the rest.

    A timer of its own for each request would cost more than reading the request.  Whoever made it closes it.
    """

    __slots__ = ("_due", "_loop", "_passed", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        """`passed` is called once when a time that was set is over; it may set another one."""
        self._loop = loop
        self._passed = passed
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def is_set(self) -> bool:
        return self._due < math.inf

    def set(self, seconds: float) -> None:
        """From now on; in place of the one before."""
        self._due = self._loop.time() + seconds
        if self._due < self._timer_at:
            self._start_timer()

    def clear(self) -> None:
        self._due = math.inf

    def close(self) -> None:
        """For good.  It lets go of whoever made it: the two would stay until the collector comes round."""
        self._due = self._timer_at = math.inf
        self._passed = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._due
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._due == math.inf:
            return
        if self._loop.time() < self._due:
            self._start_timer()
            return
        self._due = math.inf
        self._passed()


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """A limit for what another process does: raises TimeoutError once it is over.

    A turn of our own loop counts for a tenth of it at most, however long it was: what came meanwhile was not read yet,
    and an engine that answers is not to be taken for dead because this process is busy.
    """
    loop = asyncio.get_running_loop()
    looks_left = LOOKS
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal looks_left, timer
        looks_left -= 1
        if looks_left:
            timer = loop.call_later(seconds / LOOKS, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / LOOKS, look)
        try:
            yield
        finally:
            timer.cancel()


def _nothing() -> None:
    """Of a closed deadline."""
