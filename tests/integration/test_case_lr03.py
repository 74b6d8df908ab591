"""LR-03: 300 clients drop their streams at one moment, and the store, 30 ms away, soon has nothing of them.

Once while frames flow, and once while their release is on its way: the streams have ended, what gives them back has
left the gateway and has not reached the store.  A lease here is longer than the test.
"""

import asyncio

import pytest

from tests.integration.test_case_lr04 import Scene, slow_store
from tests.integration.test_shutdown import send
from tests.processes import Mock, World
from tests.wire import Wire, blocks_of, completion, soon

STREAMS = 300
PROMPT_TOKENS, OUTPUT_TOKENS = 20, 4000
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
STEP_MS = 200
DELAY_SECONDS = 0.03
FRAMES = 3
"""Read of each stream before it is dropped."""
SIGNS = ("Task was destroyed", "never awaited", "never retrieved", "Traceback")
"""In a log, of clean-up that was lost."""

pytestmark = pytest.mark.usefixtures("hang_up")


def engine(world: World) -> Mock:
    costs = ("--step-base-ms", str(STEP_MS), "--step-running-us", "0", "--step-prefill-us", "0")
    return world.mock("--blocks", str(STREAMS * BLOCKS + 1), "--max-num-seqs", str(STREAMS), *costs)


async def begin(scene: Scene, output_tokens: int) -> list[Wire]:
    """All streams start in the same steps of the engine, and so end in the same ones."""
    body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True, output_tokens=output_tokens)
    await asyncio.to_thread(scene.mock.change, "pause")
    wires = list(await asyncio.gather(*(send(scene.gateway, body) for _ in range(STREAMS))))
    await soon(lambda: scene.mock.log()["received"] == STREAMS, "the engine has all of them")
    assert len(scene.calls()) == STREAMS
    await asyncio.to_thread(scene.mock.change, "resume")
    heads = await asyncio.gather(*(wire.head() for wire in wires))
    assert [status for status, _ in heads] == [200] * STREAMS
    return wires


async def read_frames(wire: Wire, count: int) -> None:
    for _ in range(count):
        assert b'"text":' in (await wire.event() or b"")


def drop(wires: list[Wire]) -> None:
    for wire in wires:
        wire.reset()


async def all_gone(scene: Scene, ending: str) -> None:
    """From the store, the gateway and the engine; and the gateway's log tells of no clean-up that was lost."""
    await scene.given_back()
    await soon(lambda: scene.mock.log()[ending] == STREAMS, f"for the engine they are {ending}")
    await asyncio.to_thread(scene.gateway.stop)
    log = scene.gateway.log.read_text().splitlines()
    assert not [line for line in log if any(sign in line for sign in SIGNS)]


async def test_dropped_while_frames_flow(new_world: World) -> None:
    async with slow_store(new_world, engine(new_world), DELAY_SECONDS, max_num_seqs=STREAMS) as scene:
        wires = await begin(scene, OUTPUT_TOKENS)
        await asyncio.gather(*(read_frames(wire, FRAMES) for wire in wires))
        drop(wires)
        await all_gone(scene, "aborted")


async def test_dropped_while_their_release_is_in_flight(new_world: World) -> None:
    async with slow_store(new_world, engine(new_world), DELAY_SECONDS, max_num_seqs=STREAMS) as scene:
        wires = await begin(scene, FRAMES)
        await read_frames(wires[0], FRAMES - 1)
        held = scene.proxy.hold_requests()
        for events in await asyncio.gather(*(wire.events() for wire in wires)):
            assert events[-1] == b"data: [DONE]"
        assert len(scene.calls()) == STREAMS, "no release has arrived"
        drop(wires)
        for link in held:
            assert link.held
            link.held.set()
        await all_gone(scene, "finished")
