"""A time limit that is moved often passes when its last time is over; another one forgives our own slowness."""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.deadline import Deadline, patience


class Loop:
    """A clock that is moved by hand, and its timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.made = 0
        self._timers: list[tuple[float, int, Handle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> "Handle":
        self.made += 1
        handle = Handle(call)
        heapq.heappush(self._timers, (when, self.made, handle))
        return handle

    def move(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled:
                handle.call()
        self.now = until

    @property
    def pending(self) -> int:
        return sum(not handle.cancelled for _, _, handle in self._timers)


class Handle:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Limit:
    def __init__(self) -> None:
        self.loop = Loop()
        self.passed: list[float] = []
        self.deadline = Deadline(cast(asyncio.AbstractEventLoop, self.loop), self._note)

    def _note(self) -> None:
        self.passed.append(self.loop.now)


@pytest.fixture
def limit() -> Limit:
    return Limit()


def test_it_passes_once_when_its_time_is_over(limit: Limit) -> None:
    limit.deadline.set(5)
    assert limit.deadline.is_set
    limit.loop.move(4.9)
    assert limit.passed == []
    limit.loop.move(100)
    assert limit.passed == [105.0]
    assert not limit.deadline.is_set


def test_moved_later_it_makes_no_timer_and_passes_at_its_last_time(limit: Limit) -> None:
    for _ in range(100):
        limit.deadline.set(5)
        limit.loop.move(0.01)
    assert limit.loop.made == 1
    limit.loop.move(100)
    assert limit.passed == [pytest.approx(100 + 0.99 + 5)]
    assert limit.loop.made == 2


def test_moved_sooner_it_passes_sooner(limit: Limit) -> None:
    limit.deadline.set(60)
    limit.deadline.set(1)
    limit.loop.move(100)
    assert limit.passed == [101.0]
    assert limit.loop.pending == 0


@pytest.mark.parametrize("end", ["clear", "close"])
def test_it_does_not_pass_once_it_is_ended(limit: Limit, end: str) -> None:
    limit.deadline.set(1)
    getattr(limit.deadline, end)()
    limit.loop.move(100)
    assert limit.passed == []


def test_a_cleared_one_can_be_set_again_and_uses_its_timer(limit: Limit) -> None:
    limit.deadline.set(5)
    limit.deadline.clear()
    limit.loop.move(1)
    limit.deadline.set(9)
    assert limit.loop.made == 1
    limit.loop.move(100)
    assert limit.passed == [110.0]


def test_what_it_calls_may_set_it_again(limit: Limit) -> None:
    again = iter((2.0, 3.0))

    def passed() -> None:
        limit.passed.append(limit.loop.now)
        for seconds in again:
            deadline.set(seconds)
            break

    deadline = Deadline(cast(Any, limit.loop), passed)
    deadline.set(1)
    limit.loop.move(100)
    assert limit.passed == [101.0, 103.0, 106.0]


def test_a_closed_one_leaves_no_timer(limit: Limit) -> None:
    limit.deadline.set(1)
    limit.deadline.close()
    assert limit.loop.pending == 0


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_patience_ends() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()


async def test_long_turns_of_our_own_use_up_a_tenth_of_a_patience_each() -> None:
    """Nine of them, each as long as the whole limit."""

    def hold_up() -> None:
        time.sleep(0.02)
        nonlocal busy
        busy = loop.call_soon(hold_up)

    loop = asyncio.get_running_loop()
    busy = loop.call_soon(hold_up)
    async with patience(0.02):
        await turns(9)
    with pytest.raises(TimeoutError):
        async with patience(0.02):
            await turns(100)
    busy.cancel()


async def test_a_patience_that_is_over_leaves_no_timer() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with patience(0.01):
        pass
    await asyncio.sleep(0.03)
    assert not failures
