"""A call's share of the prefill budget ends when its prompt has been computed, and no sooner."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.flow.driver import Visitor
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, Peer, chunk, event, raw_engine, whole
from tests.flow.world import World, chat, gateway, soon_true

PROMPT = [{"role": "user", "content": "word " * 600}]
ANSWER = (
    b'{"choices":[{"index":0,"finish_reason":"stop"}],"usage":{"prompt_tokens":600,"completion_tokens":1}}'
)


class Cues:
    """Lets a test say when the engine sends its next part."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.cues = [asyncio.Event() for _ in parts]

    async def play(self, peer: Peer) -> None:
        for cue, part in zip(self.cues, self.parts, strict=True):
            await cue.wait()
            await peer.send(part)
        await peer.until_gone()


@asynccontextmanager
async def running(store_url: str, cues: Cues, **fields: object) -> AsyncIterator[tuple[World, Visitor]]:
    """One call with a long prompt whose engine waits for cues."""
    async with raw_engine(cues.play) as engine, gateway(store_url, {"a": engine.url}) as world:
        visitor = Visitor(world.app, chat(messages=PROMPT, **fields))
        task = asyncio.create_task(visitor.run())
        await soon_true(lambda: holds(world, 1), "the call is running")
        yield world, visitor
        async with asyncio.timeout(30):
            await task
        assert visitor.status == 200
        await world.quiet()


async def row(world: World) -> dict[str, int]:
    found: dict[str, int] = (await world.ledger.state())["pools"]["short"]["replicas"]["a"]
    return found


async def holds(world: World, sequences: int) -> bool:
    return (await row(world))["sequences"] == sequences


async def is_computed(world: World) -> bool:
    return (await row(world))["prefill_tokens"] == 0


async def test_a_stream_ends_its_share_with_its_first_data_event(store_url: str) -> None:
    """Neither headers nor comments say that anything was computed."""
    cues = Cues(STREAM_HEAD, chunk(b": wait\n\n"), chunk(event()), chunk(event() + DONE) + LAST_CHUNK)
    async with running(store_url, cues, stream=True) as (world, visitor):
        for cue in cues.cues[:2]:
            cue.set()
            for _ in range(5):
                assert (await row(world))["prefill_tokens"] > 600
        cues.cues[2].set()
        await visitor.begun.wait()
        await soon_true(lambda: is_computed(world), "the share has ended")
        assert await holds(world, 1)
        cues.cues[3].set()


async def test_an_answer_that_is_no_stream_ends_its_share_after_a_time(store_url: str) -> None:
    cues = Cues(whole(200, ANSWER))
    async with running(store_url, cues) as (world, _):
        assert (await row(world))["prefill_tokens"] > 600
        await soon_true(lambda: is_computed(world), "the share has ended")
        assert await holds(world, 1)
        cues.cues[0].set()


async def test_the_share_bounds_what_is_in_prefill(store_url: str) -> None:
    """A second long prompt waits for the first data event of the first, though blocks are free."""
    cues = Cues(STREAM_HEAD, chunk(event()), chunk(event() + DONE) + LAST_CHUNK)
    async with (
        raw_engine(cues.play) as engine,
        gateway(store_url, {"a": engine.url}, prefill_tokens=1000) as world,
    ):
        first, second = (Visitor(world.app, chat(messages=PROMPT, stream=True)) for _ in range(2))
        tasks = [asyncio.create_task(first.run())]
        await soon_true(lambda: holds(world, 1), "the first call is running")
        tasks.append(asyncio.create_task(second.run()))
        await world.queued(1)
        cues.cues[0].set()
        cues.cues[1].set()
        await soon_true(lambda: holds(world, 2), "the second call is running")
        cues.cues[2].set()
        await asyncio.gather(*tasks)
        assert (first.status, second.status) == (200, 200)
        await world.quiet()
