"""CD-04: a lease that is renewed keeps its place; one that was lost is gone, and its late release changes nothing.

Two gateways, one of which reaches the store by a way that can be stopped as TCP stops: what was sent shortly before
arrives when it opens again, what is tried meanwhile is lost.  Stream A holds 900 of 1000 blocks through that gateway,
call B at the other one needs 900, too.  The case is played once with its own times; other ways for A to end around the
loss of its lease are played four times as fast.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.proxy import StoreProxy, store_proxy
from tests.integration.watched_books import SETTLE, WatchedBooks, watched_books
from tests.processes import GatewayProcess, World
from tests.wire import Wire, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

LIMIT = 1000
PROMPT_TOKENS, MAX_TOKENS = 400, 14_001
BLOCKS = blocks_of(PROMPT_TOKENS, MAX_TOKENS)
HALF_MAX_TOKENS = 6_801
assert 2 * blocks_of(PROMPT_TOKENS, HALF_MAX_TOKENS) == BLOCKS
TOKENS = 300
"""Of every stream."""
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Times:
    lease_seconds: float
    alone_seconds: float
    """A runs so long before B arrives."""
    stopped_seconds: float
    """The way to the store."""
    stream_seconds: float


CASE = Times(5, 8, 12, 30)
FAST = Times(1.25, 2, 3, 7.5)
HEARTBEAT_SECONDS = 0.5


@dataclass
class Case:
    times: Times
    first: GatewayProcess
    """Its way to the store is `proxy`."""
    second: GatewayProcess
    proxy: StoreProxy
    books: WatchedBooks
    """What was reserved is cleared when it was judged."""
    stopped_at: float = 0.0
    held: list[Any] = field(default_factory=list)

    def stop_way(self) -> None:
        self.held = self.proxy.hold_requests()
        self.proxy.black_hole = True
        self.stopped_at = time.monotonic()

    async def open_way(self) -> None:
        """When its time is over."""
        await asyncio.sleep(self.stopped_at + self.times.stopped_seconds - time.monotonic())
        self.proxy.black_hole = False
        await self.proxy.release(self.held)

    async def ask(self, gateway: GatewayProcess, max_tokens: int) -> Wire:
        wire = await Wire.open(gateway.url)
        body = completion(PROMPT_TOKENS, max_tokens, stream=True, output_tokens=TOKENS)
        await wire.send(post(gateway.key, body))
        return wire

    async def start_a(self, max_tokens: int = MAX_TOKENS) -> tuple[Wire, str]:
        """The stream, and its id in the books."""
        before = self.books.read().calls.keys()
        wire = await self.ask(self.first, max_tokens)
        assert (await wire.head())[0] == 200
        (id_,) = self.books.read().calls.keys() - before
        return wire, id_

    async def start_b(self) -> tuple[Wire, str]:
        """It waits behind what runs."""
        before = self.states()
        wire = await self.ask(self.second, MAX_TOKENS)
        await soon(lambda: len(self.books.read().calls) > len(before), "B waits")
        (id_,) = self.books.read().calls.keys() - before.keys()
        assert self.states() == {**before, id_: "queued"}
        return wire, id_

    async def get_place(self, wire: Wire) -> None:
        """Of a call that is lost with its lease, and not before that may be over."""
        assert (await wire.head())[0] == 200
        waited_seconds = time.monotonic() - self.stopped_at
        assert waited_seconds > self.times.lease_seconds - 2 * HEARTBEAT_SECONDS
        assert self.books.reserved <= {0, BLOCKS // 2, BLOCKS}
        self.books.reserved.clear()

    async def keeps_place(self, wire: Wire, id_: str) -> None:
        """That call alone has held something since it got its place, and nothing had to be mended."""
        assert self.states() == {id_: "reserved"}
        assert self.books.reserved == {BLOCKS}
        assert await self.metrics("kvgate_healed_total") == (0, 0)
        assert await wire.event(), "it runs on"

    async def heartbeats(self, count: int) -> None:
        await asyncio.sleep(count * HEARTBEAT_SECONDS)

    async def between_heartbeats(self, id_: str) -> None:
        """Nothing of that call's owner is in flight: what it has to say now is sent at once."""
        owner = self.books.read().calls[id_].owner
        batch = self.books.read().sessions[owner].batch
        await soon(lambda: self.books.read().sessions[owner].batch > batch, "a heartbeat")
        await asyncio.sleep(HEARTBEAT_SECONDS / 5)  # the proxy passes the reply on

    def states(self) -> dict[str, str]:
        return {id_: call.state for id_, call in self.books.read().calls.items()}

    async def metrics(self, name: str) -> tuple[float, float]:
        return await asyncio.to_thread(lambda: (self.first.metric(name), self.second.metric(name)))

    async def lease_is_lost(self) -> None:
        """The first gateway was told that it lost its lease, and is itself again."""
        await soon(
            lambda: self.first.metric("kvgate_leases_expired_total") == 1 and self.first.is_ready(),
            "the gateway knows that its lease was lost",
        )
        assert await self.metrics("kvgate_leases_expired_total") == (1, 0)
        assert await self.metrics("kvgate_store_up") == (1, 1)

    async def quiet(self) -> None:
        await soon(lambda: self.first.is_quiet() and self.second.is_quiet(), "all is given back")
        assert self.books.reserved <= {0, BLOCKS}


@asynccontextmanager
async def case(world: World, times: Times) -> AsyncIterator[Case]:
    step_ms = times.stream_seconds * 1000 / TOKENS
    mock = world.mock("--blocks", str(LIMIT + 1), "--step-base-ms", f"{step_ms:g}")
    timing = {"lease_seconds": times.lease_seconds, "heartbeat_seconds": HEARTBEAT_SECONDS}
    config, (key,) = world.config([{"name": "only", "replicas": [mock.url]}], store=timing)
    path = str(world.store.socket)
    async with store_proxy(path, tcp=True) as proxy:
        first = world.gateway(config, key, wait=False, KVGATE_STORE__URL=proxy.url)
        second = world.gateway(config, key, wait=False)
        await asyncio.gather(*(asyncio.to_thread(gateway.wait_ready) for gateway in (first, second)))
        try:
            async with watched_books(path, LOOK_SECONDS) as books:
                yield Case(times, first, second, proxy, books)
        finally:
            proxy.black_hole = False
            await asyncio.to_thread(first.stop)  # while the proxy still stands


async def test_a_lease_is_lost_and_its_stream_cut(new_world: World) -> None:
    async with case(new_world, CASE) as c:
        a, a_id = await c.start_a()
        await asyncio.sleep(c.times.alone_seconds)
        b, b_id = await c.start_b()
        await c.heartbeats(1)
        assert c.states() == {a_id: "reserved", b_id: "queued"}, "more than a lease after it began"
        assert await c.metrics("kvgate_leases_expired_total") == (0, 0)
        c.stop_way()
        await c.get_place(b)
        assert c.states() == {b_id: "reserved"}
        assert await c.metrics("kvgate_store_up") == (0, 1)
        await c.open_way()
        *_, told, last = await a.events()
        assert b'"code":"lease_lost"' in told.replace(b" ", b"")
        assert last == b"data: [DONE]"
        await c.lease_is_lost()
        await c.heartbeats(2)
        await c.keeps_place(b, b_id)
        await soon(lambda: c.first.metric("kvgate_reserved_blocks") == BLOCKS, "as B holds")
        b.reset()
        await c.quiet()


async def test_a_late_release_is_nothing(new_world: World) -> None:
    """A is two streams of 450 blocks here.  One client leaves when a settle can still be sent, which arrives after B
    got the place; the other one when none can be."""
    async with case(new_world, FAST) as c:
        early, early_id = await c.start_a(HALF_MAX_TOKENS)
        late, late_id = await c.start_a(HALF_MAX_TOKENS)
        b, b_id = await c.start_b()
        await c.between_heartbeats(early_id)
        c.stop_way()
        early.reset()
        await c.get_place(b)
        late.reset()
        assert c.books.carried_out(SETTLE, early_id) == 0
        await c.open_way()
        await c.lease_is_lost()
        await c.heartbeats(2)
        assert c.books.carried_out(SETTLE, early_id) == 2, "the late one, and the same batch sent again"
        assert c.books.carried_out(SETTLE, late_id) == 0, "forgotten with the owner"
        await c.keeps_place(b, b_id)
        b.reset()
        await c.quiet()


async def test_where_there_is_room_again_the_stream_goes_on(new_world: World) -> None:
    """B is over when A's gateway comes back: A takes its place again, under another lease."""
    async with case(new_world, FAST) as c:
        a, a_id = await c.start_a()
        owner = c.books.read().calls[a_id].owner
        b, _ = await c.start_b()
        c.stop_way()
        await c.get_place(b)
        b.reset()
        await soon(lambda: not c.books.read().calls, "nothing is held")
        await c.open_way()
        await c.lease_is_lost()
        assert c.states() == {a_id: "reserved"}
        assert c.books.read().calls[a_id].owner != owner
        events = await a.events()
        assert sum(b'"text":' in event for event in events) == TOKENS
        assert events[-1] == b"data: [DONE]"
        await c.quiet()
