"""Who waits for the store's first answer: all for the same time, so one timer does for all."""

import asyncio
from typing import Protocol


class Waiting(Protocol):
    def not_heard(self) -> None:
        """It has waited in vain, and waits no more."""
        ...


class Unanswered:
    """In the order in which they began to wait.  A timer for each would cost as much as asking for it does."""

    def __init__(self, seconds: float) -> None:
        """`seconds` that each waits."""
        self._seconds = seconds
        self._due: dict[Waiting, float] = {}
        """When each has waited in vain, in the time of the event loop."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Waiting) -> None:
        """From now on, as the last; it may have been here before."""
        self._due.pop(waiting, None)
        loop = asyncio.get_running_loop()
        self._due[waiting] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def discard(self, waiting: Waiting) -> None:
        """It has its answer, or has left."""
        self._due.pop(waiting, None)

    def _look(self) -> None:
        """One timer at most is under way, for the first one that waited when it was set."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        over = [waiting for waiting, due in self._due.items() if due <= now]
        for waiting in over:
            del self._due[waiting]
        if self._due:
            self._timer = loop.call_at(next(iter(self._due.values())), self._look)
        for waiting in over:
            waiting.not_heard()
