"""CD-03: whatever way streams end, no count goes below nothing, and every stream is counted once.

500 streams, each of a kind drawn at random: it finishes, its client resets it, its engine sends an error event and then
its client resets it, engine and client end it at the same moment, or its first attempt fails before the first byte and
the second one succeeds.  The two replicas have room for 40 of the 64 that are open at a time, so calls wait, too.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import redis

from gateway.upstream.fleet import TRIAL
from tests.conformance.books import assert_books_hold
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Wire, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

STREAMS, TOGETHER = 500, 64
PROMPT_TOKENS, MAX_TOKENS = 32, 609
BLOCKS = blocks_of(PROMPT_TOKENS, MAX_TOKENS)
PLACES = 20
"""On each replica."""
STEP_MS = 5
EVENTS = (2, 3, 5, 10, 20)
"""After so many a stream is ended."""
SCRAPE_SECONDS = 0.02
OUTCOMES = ("completed", "cancelled", "failed", "refused")
MAY_BE_NEGATIVE = "kvgate_estimate_error_ratio"
SAMPLE = re.compile(r"^(kvgate_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


# -- engines ---------------------------------------------------------------------------------------------------------


class Door:
    """A TCP relay to an engine.  A call with a mark fails at the first door that it comes to, by an answer or by a
    reset, and passes at any other."""

    MARK = re.compile(rb'"user": ?"fails-first-(\w+)-(\d+)"')

    def __init__(self, engine_url: str, met: "dict[bytes, Door]") -> None:
        """`met`: at which door each marked call failed; all doors share it."""
        self._engine = engine_url.removeprefix("http://").split(":")
        self._met = met
        self.url = ""
        self.trials = 0
        """The gateway's own calls, by which it judges an engine whose calls fail."""

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[Door]":
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection(*self._engine)
        ways = [
            asyncio.create_task(self._requests(reader, writer, engine_writer)),
            asyncio.create_task(_answers(engine_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        _reset(engine_writer)
        _reset(writer)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.trials += TRIAL in data
                mark = self.MARK.search(data)
                if mark is None or self._met.setdefault(mark[2], self) is not self:
                    engine.write(data)
                elif mark[1] == b"reset":
                    return
                else:
                    writer.write(BUSY)


async def _answers(engine: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await engine.read(1 << 16):
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() != -1:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# -- clients ---------------------------------------------------------------------------------------------------------


class Clients:
    def __init__(self, gateway: GatewayProcess, seed: int) -> None:
        self.gateway = gateway
        self.drawn: Counter[str] = Counter()
        self.asked = 0
        self._random = random.Random(seed)
        self._room = asyncio.Semaphore(TOGETHER)
        self._kinds: tuple[Callable[[], Awaitable[None]], ...] = (
            self.finishes,
            self.client_resets,
            self.error_then_reset,
            self.both_end,
            self.fails_first,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(self._one(self._random.choice(self._kinds)))

    async def _one(self, kind: Callable[[], Awaitable[None]]) -> None:
        async with self._room:
            self.drawn[kind.__name__] += 1
            await kind()

    async def finishes(self) -> None:
        wire = await self._stream(output_tokens=self._events())
        assert (await wire.events())[-1] == b"data: [DONE]"
        wire.close()

    async def client_resets(self) -> None:
        """Long before the engine would end it."""
        wire = await self._stream()
        await self._read(wire, self._events())
        wire.reset()

    async def error_then_reset(self) -> None:
        wire = await self._stream(fail=f"error_event:{self._events()}")
        while b'"error"' not in (event := await wire.event() or b""):
            assert event, "the error is told"
        wire.reset()

    async def both_end(self) -> None:
        """The engine ends after the event that the client waits for to leave."""
        events = self._events()
        fault = self._random.choice(("reset_after_events", "cut_after_events"))
        wire = await self._stream(fail=f"{fault}:{events}")
        await self._read(wire, events)
        wire.reset()

    async def fails_first(self) -> None:
        how = self._random.choice(("reset", "busy"))
        wire = await self._stream(
            f"fails-first-{how}-{self.drawn['fails_first']}", output_tokens=self._events()
        )
        assert (await wire.events())[-1] == b"data: [DONE]"
        wire.close()

    async def _stream(self, user: str = "", **script: object) -> Wire:
        body = completion(PROMPT_TOKENS, MAX_TOKENS, stream=True, **script) | ({"user": user} if user else {})
        wire = await Wire.open(self.gateway.url)
        self.asked += 1
        await wire.send(post(self.gateway.key, body))
        status, _ = await wire.head()
        assert status == 200
        return wire

    async def _read(self, wire: Wire, events: int) -> None:
        for _ in range(events):
            assert await wire.event()

    def _events(self) -> int:
        return self._random.choice(EVENTS)


# -- what is counted -------------------------------------------------------------------------------------------------


Sums = dict[str, float]


def sums_of(page: str) -> Sums:
    """Of each of kvgate's metrics, and the calls by outcome; no sample is negative."""
    sums: Sums = defaultdict(float)
    for name, labels, value in SAMPLE.findall(page):
        assert float(value) >= 0 or name.startswith(MAY_BE_NEGATIVE), (name, labels, value)
        sums[name] += float(value)
        if name == "kvgate_admission_requests_total":
            sums[re.findall(r'outcome="(\w+)"', labels)[0]] += float(value)
    return sums


def ended(sums: Sums) -> float:
    return sum(sums[outcome] for outcome in OUTCOMES)


class Scraper:
    """Reads metrics, the admin page and the store again and again."""

    def __init__(self, clients: Clients, store: redis.Redis) -> None:
        self.clients = clients
        self.gateway = clients.gateway
        self.store = store
        self.scrapes = 0
        self.busiest: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self.scrape)
            await asyncio.sleep(SCRAPE_SECONDS)

    def scrape(self) -> Sums:
        sums = sums_of(self.gateway.metrics())
        assert sums["kvgate_inflight_requests"] + ended(sums) <= self.clients.asked
        state = self.gateway.state()
        assert min(state[name] for name in ("reserved", "leases", "queue", "inflight", "debt")) >= 0, state
        assert_books_hold(self.store, "demo")
        self.scrapes += 1
        for name in ("reserved", "leases", "queue", "inflight"):
            self.busiest[name] = max(self.busiest[name], state[name])
        return sums

    def is_zero(self) -> bool:
        sums = self.scrape()
        return (
            sums["kvgate_inflight_requests"] == sums["kvgate_reserved_blocks"] == 0
            and self.gateway.is_quiet()
        )


@asynccontextmanager
async def gateway_behind(
    world: World, mocks: list[Mock], met: dict[bytes, Door]
) -> AsyncIterator[GatewayProcess]:
    """Its engines are the mocks, each behind a door of its own."""
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(Door(mock.url, met).open()) for mock in mocks]
        config, (key,) = world.config(
            [{"name": "only", "replicas": [door.url for door in doors]}], store=QUICK_STORE
        )
        gateway = world.gateway(config, key, wait=False)
        try:
            await asyncio.to_thread(gateway.wait_ready)
            yield gateway
        finally:
            await asyncio.to_thread(gateway.stop)  # while the doors still stand


async def test_counts_after_every_way_to_end(new_world: World) -> None:
    options = ("--blocks", str(PLACES * BLOCKS + 1), "--step-base-ms", str(STEP_MS))
    mocks = [new_world.mock(*options) for _ in range(2)]
    met: dict[bytes, Door] = {}
    with contextlib.closing(redis.Redis(unix_socket_path=str(new_world.store.socket), protocol=2)) as store:
        async with gateway_behind(new_world, mocks, met) as gateway:
            clients = Clients(gateway, seed=3)
            scraper = Scraper(clients, store)
            async with asyncio.TaskGroup() as group:
                scraping = group.create_task(scraper.run())
                await clients.run()
                scraping.cancel()
            await soon(scraper.is_zero, "inflight and reserved are 0")
            check_outcomes(clients.drawn, await asyncio.to_thread(scraper.scrape))
    assert len(met) == clients.drawn["fails_first"]
    assert len(set(met.values())) == len(mocks)
    received = sum(mock.log()["received"] for mock in mocks)
    trials = sum(door.trials for door in set(met.values()))
    assert received == STREAMS + trials, "attempts that failed first were made at the doors"
    assert scraper.scrapes >= 20
    assert scraper.busiest["reserved"] > PLACES * BLOCKS
    assert scraper.busiest["queue"] > 0


def check_outcomes(drawn: Counter[str], sums: Sums) -> None:
    """Who ended a stream first when both ended it is for the two of them: it counts once either way."""
    assert min(drawn.values()) >= STREAMS // 10, drawn
    assert ended(sums) == drawn.total() == STREAMS
    assert sums["refused"] == 0
    assert sums["completed"] == drawn["finishes"] + drawn["fails_first"]
    assert sums["cancelled"] >= drawn["client_resets"]
    assert sums["failed"] >= drawn["error_then_reset"]
