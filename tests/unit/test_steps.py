"""Coroutines that are begun without a task."""

import asyncio

import pytest

from gateway.steps import Begun


async def test_one_that_never_waits_is_finished_at_once() -> None:
    async def at_once() -> int:
        return 7

    begun = Begun(at_once())
    assert (begun.suspended, begun.result) == (False, 7)
    assert await begun.rest() == 7


async def test_one_that_waits_is_finished_by_whoever_awaits_the_rest() -> None:
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def waits() -> list[int]:
        return [await first, await second]

    begun = Begun(waits())
    assert begun.suspended
    asyncio.get_running_loop().call_soon(first.set_result, 1)
    asyncio.get_running_loop().call_later(0.001, second.set_result, 2)
    assert await begun.rest() == [1, 2]
    assert not begun.suspended


async def test_a_bare_turn_of_the_loop_is_waited_for_too() -> None:
    begun = Begun(asyncio.sleep(0, "result"))
    assert begun.suspended
    assert await begun.rest() == "result"


async def test_what_it_raises_passes() -> None:
    async def fails(late: bool) -> None:
        if late:
            await asyncio.sleep(0)
        raise ValueError(late)

    with pytest.raises(ValueError, match="False"):
        Begun(fails(late=False))
    with pytest.raises(ValueError, match="True"):
        await Begun(fails(late=True)).rest()


async def test_cancelling_the_rest_cancels_what_it_waits_for_and_cleans_up() -> None:
    waited_for = asyncio.get_running_loop().create_future()
    cleaned: list[bool] = []

    async def waits() -> None:
        try:
            await waited_for
        finally:
            cleaned.append(True)

    task = asyncio.create_task(Begun(waits()).rest())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waited_for.cancelled()
    assert cleaned == [True]


async def test_one_that_is_closed_cleans_up() -> None:
    cleaned: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    begun = Begun(waits())
    begun.close()
    assert cleaned == [True]
    await asyncio.sleep(0)
