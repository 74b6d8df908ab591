"""One timer for all who wait for the store."""

import asyncio

from gateway.ledger.unanswered import Unanswered

SHORT = 0.01
HANG_SECONDS = 30


class Waiting:
    """Notes in `told` that it has waited in vain."""

    def __init__(self, name: str, told: list[str], over: asyncio.Event) -> None:
        self._name, self._told, self._over = name, told, over

    def not_heard(self) -> None:
        self._told.append(self._name)
        if self._name == "last":
            self._over.set()


async def told_of(seconds: float, *steps: tuple[str, str]) -> list[str]:
    """Who was told by the time that "last", which comes after these steps, was: (add or discard, name)."""
    told, over = list[str](), asyncio.Event()
    unanswered, waiting = Unanswered(seconds), dict[str, Waiting]()
    for what, name in (*steps, ("add", "last")):
        if what == "pause":
            await asyncio.sleep(seconds / 2)
            continue
        one = waiting.setdefault(name, Waiting(name, told, over))
        (unanswered.add if what == "add" else unanswered.discard)(one)
    async with asyncio.timeout(HANG_SECONDS):
        await over.wait()
    return told


async def test_who_waits_in_vain_is_told_once_in_order() -> None:
    assert await told_of(SHORT, ("add", "a"), ("add", "b")) == ["a", "b", "last"]


async def test_who_has_its_answer_is_not_told() -> None:
    steps = (("add", "a"), ("add", "b"), ("discard", "a"), ("discard", "c"))
    assert await told_of(SHORT, *steps) == ["b", "last"]


async def test_who_comes_later_waits_as_long() -> None:
    assert await told_of(SHORT, ("add", "a"), ("pause", ""), ("add", "b")) == ["a", "b", "last"]


async def test_who_asks_again_begins_to_wait_anew() -> None:
    assert await told_of(SHORT, ("add", "a"), ("add", "b"), ("add", "a")) == ["b", "a", "last"]


async def test_one_that_is_told_may_put_another_one_in() -> None:
    told, over = list[str](), asyncio.Event()
    unanswered = Unanswered(SHORT)
    last = Waiting("last", told, over)

    class First:
        def not_heard(self) -> None:
            told.append("first")
            unanswered.add(last)

    unanswered.add(First())
    async with asyncio.timeout(HANG_SECONDS):
        await over.wait()
    assert told == ["first", "last"]
