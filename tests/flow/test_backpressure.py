"""Clients that read slowly or not at all, and everybody else meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.core.lifecycle import Event
from gateway.core.outcomes import Code, Outcome
from gateway.http import proxy, relay
from tests.flow.driver import Visitor
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, Peer, RawEngine, chunk, event, raw_engine
from tests.flow.world import World, chat, gateway, soon

PIECE = event("x" * 16_000)
PIECES = 4_000
"""64 MB in all: more than the socket buffers on both sides can take."""
KERNEL_BYTES_MAX = 24 << 20
STALL_SECONDS = 0.2
CHECK_SECONDS = 0.02


async def endless(peer: Peer) -> None:
    await peer.send(STREAM_HEAD)
    for _ in range(PIECES):
        await peer.send(chunk(PIECE))
    await peer.send(chunk(DONE), LAST_CHUNK)


@asynccontextmanager
async def flood(store_url: str) -> AsyncIterator[tuple[RawEngine, World]]:
    async with raw_engine(endless) as engine, gateway(store_url, {"a": engine.url}) as world:
        yield engine, world


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "CLIENT_STALL_SECONDS", STALL_SECONDS)
    monkeypatch.setattr(proxy, "STALL_CHECK_SECONDS", CHECK_SECONDS)


class Clock:
    """In the place of `time` for those who watch writes: it goes on when a test says so, whatever the machine does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = time.monotonic()
        for module in (proxy, relay):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self._now

    @staticmethod
    def time() -> float:
        return time.time()

    async def pass_by(self, seconds: float) -> None:
        """And the writes are looked at."""
        self._now += seconds
        await asyncio.sleep(2 * CHECK_SECONDS)


async def blocked(peer: Peer) -> int:
    """The bytes that an engine got rid of once it cannot write any more."""
    written, still = peer.written, 0
    async with asyncio.timeout(30):
        while still < 20:
            await asyncio.sleep(0.005)
            still = still + 1 if peer.written == written else 0
            written = peer.written
    return written


async def test_a_client_that_does_not_read_stops_the_engine(store_url: str) -> None:
    """What waits, waits in the engine's process; reading again sets it going again."""
    async with flood(store_url) as (engine, world):
        visitor = Visitor(world.app, chat(stream=True), read_sends=3)
        task = asyncio.create_task(visitor.run())
        await visitor.begun.wait()
        written = await blocked(engine.peers[0])
        assert written < KERNEL_BYTES_MAX
        assert len(visitor.body) < 1 << 20
        visitor.read_on()
        await soon(lambda: engine.peers[0].written > written, "the engine goes on")
        visitor.leave()
        await task
        await soon(engine.peers[0].gone.is_set, "the engine's connection is closed")
        assert world.only_end().outcome is Outcome.CANCELLED
        await world.quiet()


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_reads_nothing_for_too_long_has_left(store_url: str) -> None:
    async with flood(store_url) as (engine, world):
        visitor = await world.visit(chat(stream=True), read_sends=3)
        assert not visitor.complete
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.CANCELLED, Code.CLIENT_DISCONNECT)
        await soon(engine.peers[0].gone.is_set, "the engine's connection is closed")
        await world.quiet()


@pytest.mark.usefixtures("impatient")
async def test_a_slow_client_is_no_stalled_client(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the limit in all, and never for one write until it does."""
    clock = Clock(monkeypatch)
    async with flood(store_url) as (_, world):
        visitor = Visitor(world.app, chat(stream=True), read_sends=2)
        task = asyncio.create_task(visitor.run())
        await visitor.begun.wait()
        for pieces in range(1, 7):
            await soon(lambda n=pieces: len(visitor.chunks) == n and visitor.unread, "another one waits")
            await clock.pass_by(0.75 * STALL_SECONDS)
            assert not task.done()
            visitor.read_on()
            visitor.stop_reading()
        await soon(lambda: len(visitor.chunks) == 7 and visitor.unread, "another one waits")
        await clock.pass_by(1.5 * STALL_SECONDS)
        await task
        assert world.only_end().reason is Code.CLIENT_DISCONNECT
        await world.quiet()


@pytest.mark.usefixtures("impatient")
async def test_a_stalled_client_cannot_keep_a_call_that_was_ended(store_url: str) -> None:
    """The last error event is not read either; its task ends all the same."""
    async with flood(store_url) as (_, world):
        visitor = Visitor(world.app, chat(stream=True), read_sends=3)
        task = asyncio.create_task(visitor.run())
        await visitor.begun.wait()
        world.calls.interrupt(Event.GRACE_OVER)
        async with asyncio.timeout(30):
            await task
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.DRAINING)
        await world.quiet()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("body", [b"{", b'{"model":"nope","messages":[{"role":"user","content":"x"}]}'])
async def test_a_refusal_that_nobody_reads_ends(store_url: str, body: bytes) -> None:
    async with flood(store_url) as (_, world):
        await world.visit(body, read_sends=1)
        assert world.only_end().outcome is Outcome.REFUSED


@pytest.mark.usefixtures("impatient")
async def test_a_refused_call_whose_answer_nobody_reads_ends(store_url: str) -> None:
    async with raw_engine(endless) as engine, gateway(store_url, {"a": engine.url}, wait_ms=0) as world:
        release = await world.hold(1000)
        await world.visit(chat(), read_sends=1)
        assert world.only_end().reason is Code.QUEUE_TIMEOUT
        release()
        await world.quiet()


async def test_a_stalled_client_does_not_delay_others(store_url: str) -> None:
    async with flood(store_url) as (engine, world):
        stalled = Visitor(world.app, chat(stream=True), read_sends=3)
        task = asyncio.create_task(stalled.run())
        await stalled.begun.wait()
        await blocked(engine.peers[0])
        other = Visitor(world.app, chat(stream=True), leave_after_sends=50)
        async with asyncio.timeout(30):
            await other.run()
        assert len(other.body) >= 48 * len(PIECE)
        stalled.leave()
        await task
        await world.quiet()
