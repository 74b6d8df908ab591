"""What the flow lets the ledger know of a running call, so that its end can be foreseen."""

import asyncio

import pytest

from gateway.core.forecast import KNOWN_MIN, PACED_EVENTS_MIN, Course
from tests.flow.driver import Visitor
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, Peer, chunk, event, raw_engine
from tests.flow.world import World, chat, gateway, soon

TOKENS = PACED_EVENTS_MIN + 4


class Engine:
    """All streams go to their limits; the last one stops for a cue where its pace is known."""

    def __init__(self) -> None:
        self.calls = 0
        self.cue = asyncio.Event()

    async def play(self, peer: Peer) -> None:
        self.calls += 1
        await peer.send(STREAM_HEAD, *[chunk(event())] * PACED_EVENTS_MIN)
        if self.calls > KNOWN_MIN:
            await self.cue.wait()
        await peer.send(*[chunk(event())] * (TOKENS - PACED_EVENTS_MIN), chunk(DONE) + LAST_CHUNK)


def courses(world: World) -> list[Course | None]:
    return [ask.run.course() for ask in world.ledger._asks.values() if ask.run]


def is_paced(world: World) -> bool:
    return any(course and course.events == PACED_EVENTS_MIN for course in courses(world))


async def test_a_stream_is_foreseen_by_its_own_course(store_url: str) -> None:
    engine = Engine()
    async with raw_engine(engine.play) as server, gateway(store_url, {"a": server.url}) as world:
        body = chat(stream=True, max_tokens=TOKENS)
        for _ in range(KNOWN_MIN):
            assert (await world.visit(body)).status == 200
        await world.quiet()
        visitor = Visitor(world.app, body)
        task = asyncio.create_task(visitor.run())
        await soon(lambda: is_paced(world), "its pace is known")
        (course,) = courses(world)
        assert course
        run = next(ask.run for ask in world.ledger._asks.values() if ask.run)
        pace_seconds = (course.last_at - course.first_at) / (PACED_EVENTS_MIN - 1)
        left = world.ledger.forecast.seconds_left(run, course.last_at)
        assert left == pytest.approx((TOKENS - PACED_EVENTS_MIN) * pace_seconds)
        engine.cue.set()
        await task
        await world.quiet()
        assert not courses(world)
