"""The threads that count tokens: few of them, and a bounded line before them."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
JOBS_MAX = 256
"""Counts that run or wait for a thread."""
COUNT_SECONDS_MAX = 2.0
"""When a count is late, waiting included."""

T = TypeVar("T")
IsLate = Callable[[], bool]
"""Nobody waits for the count any more, or not for longer; asked now and then by whoever counts."""


class CountingThreads:
    """Shared by all counters of a process; whoever made them closes them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(THREADS, "kvgate-tokens")
        self._places = threading.BoundedSemaphore(JOBS_MAX)
        self._closed = threading.Event()

    async def run(self, count: Callable[[IsLate], T]) -> T | None:
        """What `count` returns; None where JOBS_MAX others are before it, or all is closed.

        It suspends before anything begins: a coroutine that is closed there has cost nothing.
        """
        await asyncio.sleep(0)
        if self._closed.is_set() or not self._places.acquire(blocking=False):
            return None
        stop = threading.Event()
        deadline = self._clock() + COUNT_SECONDS_MAX

        def is_late() -> bool:
            return stop.is_set() or self._closed.is_set() or self._clock() >= deadline

        job = self._pool.submit(count, is_late)
        job.add_done_callback(lambda _: self._places.release())
        try:
            # Shielded: a job cancelled while it waits would keep its texts in the queue, but not its place.
            return await asyncio.shield(asyncio.wrap_future(job))
        finally:
            stop.set()

    def close(self) -> None:
        """From now on every count is late; the threads end."""
        self._closed.set()
        self._pool.shutdown(wait=False)
