"""EL-02: callers leave while their connection to an engine is made or just used, and no connection is lost by it.

A regression test of the client in `gateway/upstream`, which has no pool that could run out: what it can lose are
sockets.  In front of the engine is a door where every connection waits for 20 ms: before anything of the request is
read, or, where the engine speaks TLS, before the handshake, so that the gateway's connection is not made yet.

The case cancels for 10 s; here it is 3 s, unless KVGATE_TEST_LONG is set.  Where a machine is so busy that hardly a
call reached the door by then, it goes on until enough did.
"""

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from gateway.upstream.limits import KEEPALIVE_SECONDS
from tests.ops.redis_server import HOST, make_certificates
from tests.processes import QUICK_STORE, GatewayProcess, World, sum_of
from tests.wire import Wire, ask, completion, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(150)]

LONG = bool(os.environ.get("KVGATE_TEST_LONG"))
STORM_SECONDS = 10.0 if LONG else 3.0
REACH_SECONDS = 30
CALLERS = 150
STAY_SECONDS_MAX = 0.012
STAY_FOR_ARRIVAL_SECONDS = 1.0
PAUSE_SECONDS_MAX = 0.2
"""Of a caller before its next call: without it this process, in which the door is, has no time left to open it."""
SLOW_SECONDS = 0.02
LOOK_SECONDS = 0.1
QUIET_SECONDS = 1.0
CLOSED_SECONDS = KEEPALIVE_SECONDS - QUIET_SECONDS - 1.0
"""After that; before a kept connection would be closed."""
CALLS = 100
IDLE_SECONDS = KEEPALIVE_SECONDS + 4
"""A kept connection is closed by then, on a busy machine too."""
SCRAPE_CONNECTIONS = 1
"""The gateway's own look at the engine, which comes and goes."""
CLOSE_SECONDS = 1.0
CHUNK = 1 << 16
BODY = completion(16, 4)


class SlowDoor:
    """In front of an engine; every connection waits at it."""

    def __init__(self, target: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.arrived = 0
        self.expected: deque[asyncio.Event] = deque()
        """Set one by one, each at an arrival."""
        self.open: set[asyncio.Task[None]] = set()
        """Connections that the gateway has not closed yet."""

    async def accept(self) -> None:
        """Until cancelled; then every connection is closed."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                self.arrived += 1
                if self.expected:
                    self.expected.popleft().set()
                task = asyncio.create_task(self._serve(connection))
                self.open.add(task)
                task.add_done_callback(self.open.discard)
        finally:
            self._listener.close()
            for task in self.open:
                task.cancel()
            await asyncio.gather(*self.open, return_exceptions=True)

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):  # the gateway may leave at any time
            await asyncio.sleep(SLOW_SECONDS)
            reader = asyncio.StreamReader(limit=CHUNK)
            protocol = asyncio.StreamReaderProtocol(
                reader
            )  # uvloop answers with another one where there is TLS
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                await self._join(reader, writer)
                writer.close()  # what was written goes out before
                async with asyncio.timeout(CLOSE_SECONDS):
                    await reader.read()
            finally:
                writer.close()
                transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection(*self._target)
        ways = [
            asyncio.create_task(_copy(reader, engine_writer)),
            asyncio.create_task(_copy(engine_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            engine_writer.close()
            engine_writer.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(CHUNK):
        writer.write(piece)
        await writer.drain()


@contextlib.asynccontextmanager
async def scene(world: World, with_tls: bool) -> AsyncIterator["Scene"]:
    """A gateway, a slow door, and an engine that takes no time."""
    mock = world.mock("--speed", "inf", "--blocks", "20001", "--max-num-seqs", "1000")
    certificates = make_certificates(world.folder) if with_tls else None
    tls = None
    if certificates:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificates.certificate, certificates.key)
    door = SlowDoor(mock.url, tls)
    accepting = asyncio.create_task(door.accept())
    url = f"https://{HOST}:{door.port}" if with_tls else f"http://127.0.0.1:{door.port}"
    # A hundred handshakes at once take a busy machine longer than the two seconds that a connection has.
    upstream = {"connect_seconds": 20} | ({"ca_file": str(certificates.ca_file)} if certificates else {})
    config, (key,) = world.config([{"name": "only", "replicas": [url]}], store=QUICK_STORE, upstream=upstream)
    try:
        # The door is in this process, so that nothing here may stop its loop.
        gateway = world.gateway(config, key, wait=False)
        await soon(gateway.is_ready, "the gateway is ready")
        yield Scene(door, gateway)
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


class Scene:
    def __init__(self, door: SlowDoor, gateway: GatewayProcess) -> None:
        self.door = door
        self.gateway = gateway
        self._request = post(gateway.key, BODY)
        self._storms = True
        self._up = asyncio.Event()

    async def storm(self) -> None:
        """For its time, and until more calls reached the door than there are callers."""
        watch = asyncio.create_task(self._watch())
        callers = [asyncio.create_task(self._come_and_go(number)) for number in range(CALLERS)]
        enough = self.door.arrived + CALLERS
        try:
            await asyncio.sleep(STORM_SECONDS)
            await soon(lambda: self.door.arrived > enough, "the storm reached the engine", REACH_SECONDS)
        finally:
            self._storms = False
            watch.cancel()
            self._up.set()
            await asyncio.gather(*callers)

    async def _watch(self) -> None:
        """Door and callers are one process: where it is so busy that a probe of the engine is too late, and the engine
        taken for down, callers wait until the next one comes through.  Else none of them would get there any more."""
        while True:
            up = await asyncio.to_thread(self.gateway.is_ready)
            self._up.set() if up else self._up.clear()
            await asyncio.sleep(LOOK_SECONDS)

    async def _come_and_go(self, number: int) -> None:
        """Every other caller counts its time from when a call reached the door: a busy machine's calls take longer
        than 12 ms to get there, and none would be cancelled while it has a connection.
        """
        chance = random.Random(number)
        while self._storms:
            await self._up.wait()
            wire = await Wire.open(self.gateway.url)
            await wire.send(self._request)
            if number % 2:
                await self._arrival()
            await asyncio.sleep(chance.uniform(0, STAY_SECONDS_MAX))
            wire.reset()
            await asyncio.sleep(chance.uniform(0, PAUSE_SECONDS_MAX))

    async def _arrival(self) -> None:
        """Of one connection for each that asks, so most likely its own."""
        arrival = asyncio.Event()
        self.door.expected.append(arrival)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STAY_FOR_ARRIVAL_SECONDS):
                await arrival.wait()

    async def statuses(self) -> list[int]:
        answers = await asyncio.gather(*(ask(self.gateway.url, self._request) for _ in range(CALLS)))
        return [answer.status for answer in answers]

    def completed(self) -> float:
        """Calls that had their whole answer."""
        lines = [line for line in self.gateway.metrics().splitlines() if 'outcome="completed"' in line]
        return sum_of("kvgate_admission_requests_total", "\n".join(lines))

    async def rest(self) -> float:
        """Wait until no connection is kept any more.  Descriptors that the gateway then has."""
        await soon(
            lambda: len(self.door.open) <= SCRAPE_CONNECTIONS, "what nobody uses is closed", IDLE_SECONDS
        )
        assert await asyncio.to_thread(self.gateway.is_quiet)
        return await asyncio.to_thread(self.gateway.metric, "process_open_fds")


@pytest.mark.parametrize("with_tls", [False, True], ids=["used", "being made"])
async def test_calls_that_are_cancelled_lose_no_connection(new_world: World, with_tls: bool) -> None:
    async with scene(new_world, with_tls) as here:
        assert await here.statuses() == [200] * CALLS
        before = await here.rest()
        completed = here.completed()
        await here.storm()
        await asyncio.sleep(QUIET_SECONDS)
        # A busy machine holds up a caller now and then until it has its answer; only such a connection is kept.
        kept = await asyncio.to_thread(here.completed) - completed
        await soon(
            lambda: len(here.door.open) <= kept + SCRAPE_CONNECTIONS,
            "cancelled calls have closed theirs",
            CLOSED_SECONDS,
        )
        # On a busy machine the gateway's probe of the engine may be late.
        await soon(here.gateway.is_ready, "the engine is seen to be well")
        assert await here.statuses() == [200] * CALLS
        await here.rest()
        await soon(
            lambda: here.gateway.metric("process_open_fds") <= before + SCRAPE_CONNECTIONS,
            "no descriptor is left over",
        )
