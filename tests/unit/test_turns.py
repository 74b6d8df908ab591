"""A crowd begins in several turns of the event loop, in its order."""

import asyncio

from gateway.turns import Turns


async def begin(turns: Turns, name: int, began: list[int]) -> None:
    await turns.take()
    began.append(name)


async def test_a_crowd_begins_in_turns_and_in_order() -> None:
    turns, began = Turns(3), list[int]()
    tasks = [asyncio.create_task(begin(turns, name, began)) for name in range(10)]
    seen = []
    while len(began) < 10:
        await asyncio.sleep(0)
        seen.append(len(began))
    assert began == list(range(10))
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert max(steps) == 3
    await asyncio.gather(*tasks)


async def test_who_comes_alone_does_not_wait() -> None:
    turns = Turns(1)
    for _ in range(3):
        call = turns.take()
        try:
            call.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waits")
        await asyncio.sleep(0)


async def test_who_comes_later_does_not_overtake() -> None:
    turns, began = Turns(2), list[int]()
    tasks = [asyncio.create_task(begin(turns, name, began)) for name in range(6)]
    while not began:
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(begin(turns, name, began)) for name in range(6, 9)]
    await asyncio.gather(*tasks)
    assert began == list(range(9))


async def test_who_has_left_takes_no_room() -> None:
    turns, began = Turns(2), list[int]()
    tasks = [asyncio.create_task(begin(turns, name, began)) for name in range(8)]
    while not began:
        await asyncio.sleep(0)
    for task in tasks[2:6]:
        task.cancel()
    seen = 0
    while len(began) < 4:
        await asyncio.sleep(0)
        seen += 1
    assert began == [0, 1, 6, 7]
    assert seen <= 3
