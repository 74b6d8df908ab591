"""DP-01 and DP-02: a client that leaves before its answer ends frees the engine and its place at once."""

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World, world
from tests.wire import Wire, ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CANCELLED = re.compile(r"^kvgate_admission_requests_total\{(.*)\} ([0-9.]+)$", re.MULTILINE)

Leave = Callable[[Wire], None]
LEAVES: tuple[Leave, ...] = (Wire.close, Wire.reset)
leaves = pytest.mark.parametrize("leave", LEAVES, ids=["fin", "rst"])


def cancelled(gateway: GatewayProcess) -> float:
    """Calls that ended by their clients leaving, by the metrics."""
    found = CANCELLED.findall(gateway.metrics())
    return sum(
        float(value)
        for labels, value in found
        if 'outcome="cancelled"' in labels and 'reason="client_disconnect"' in labels
    )


async def start(gateway: GatewayProcess, body: dict[str, Any], path: str = "/v1/completions") -> Wire:
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, body, path))
    return wire


async def expect_own_answer(gateway: GatewayProcess, output_tokens: int = 3) -> None:
    """A new call gets what it asked for and no leftovers of another one."""
    answer = await ask(gateway.url, post(gateway.key, completion(20, output_tokens)))
    assert answer.status == 200, answer
    assert answer.json()["usage"]["completion_tokens"] == output_tokens
    assert answer.json()["usage"]["prompt_tokens"] == 20


# -- DP-01: the engine is silent ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silent() -> Iterator[tuple[GatewayProcess, Mock]]:
    with world() as here:
        mock = here.mock()
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
        yield here.gateway(config, key), mock


def chat(kilobytes: int, stream: bool) -> dict[str, Any]:
    """An image makes a body large without making its prompt long."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (kilobytes * 1000)}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    script = {"hold_seconds": 60}
    return {"model": "demo", "messages": messages, "max_tokens": 100, "stream": stream, "mock": script}


@leaves
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("kilobytes", [2, 2000])
async def test_leaving_before_the_first_byte(
    silent: tuple[GatewayProcess, Mock], kilobytes: int, stream: bool, leave: Leave
) -> None:
    gateway, mock = silent
    mock.reset()
    cancelled_before = cancelled(gateway)
    wire = await start(gateway, chat(kilobytes, stream), "/v1/chat/completions")
    await asyncio.sleep(0.3)
    await soon(lambda: mock.log()["started"], "the engine has the call")
    leave(wire)
    await soon(lambda: mock.log()["aborted"], "the engine saw the abort")
    await soon(gateway.is_quiet, "nothing is held")
    assert cancelled(gateway) == cancelled_before + 1


# -- DP-02: the engine computes ----------------------------------------------------------------------------------

LONG = completion(16_000, 4_000)
"""30 s of work for the mock."""


@leaves
async def test_leaving_a_long_answer(silent: tuple[GatewayProcess, Mock], leave: Leave) -> None:
    gateway, mock = silent
    mock.reset()
    wire = await start(gateway, LONG)
    await soon(lambda: mock.log()["started"] == 1, "the engine has the call")
    leave(wire)
    await soon(lambda: mock.log()["aborted"], "the engine saw the abort")
    await soon(gateway.is_quiet, "nothing is held")
    await expect_own_answer(gateway)
    assert mock.log()["received"] == 2


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[GatewayProcess, Mock, Mock]]:
    """Two replicas; a call goes to the first one, which has more room."""
    with world() as here:
        roomy, tight = here.mock("--blocks", "3001"), here.mock("--blocks", "2001")
        config, (key,) = here.config(
            [{"name": "only", "replicas": [roomy.url, tight.url]}], store=QUICK_STORE
        )
        yield here.gateway(config, key), roomy, tight


@leaves
async def test_leaving_while_the_second_attempt_runs(
    pair: tuple[GatewayProcess, Mock, Mock], leave: Leave
) -> None:
    gateway, roomy, tight = pair
    reset(roomy, tight)
    await soon(gateway.takes_calls, "no replica rests for what an earlier test had it answer")
    roomy.fail("status:503")
    wire = await start(gateway, LONG)
    await soon(lambda: tight.log()["started"], "the second attempt runs")
    leave(wire)
    await soon(lambda: tight.log()["aborted"], "the engine saw the abort")
    await soon(gateway.is_quiet, "nothing is held")
    assert (roomy.log()["received"], tight.log()["received"]) == (1, 1)
    await expect_own_answer(gateway)


@leaves
async def test_leaving_while_the_second_attempt_waits(
    pair: tuple[GatewayProcess, Mock, Mock], leave: Leave
) -> None:
    """The other replica is full: the call moved into the queue after its first attempt failed."""
    gateway, roomy, tight = pair
    reset(roomy, tight)
    await soon(gateway.takes_calls, "no replica rests for what an earlier test had it answer")
    fills_roomy = await start(gateway, completion(20_000, 28_000, hold_seconds=60))
    await soon(lambda: roomy.log()["started"], "the roomy replica is full")
    fills_tight = await start(gateway, completion(16_000, 16_000, hold_seconds=60))
    await soon(lambda: tight.log()["started"], "the tight replica is full")
    fills_roomy.reset()
    await soon(lambda: roomy.log()["aborted"], "the roomy replica is free")
    roomy.fail("status:503")
    wire = await start(gateway, LONG)
    await soon(lambda: gateway.state()["queue"], "it waits for the second attempt")
    leave(wire)
    await soon(lambda: gateway.state()["queue"] == 0, "it left the queue")
    fills_tight.reset()
    await soon(gateway.is_quiet, "nothing is held")
    assert (roomy.log()["received"], tight.log()["received"]) == (2, 1)
    await expect_own_answer(gateway)


def reset(*mocks: Mock) -> None:
    for mock in mocks:
        mock.reset()


# -- leaving where no engine is reached yet ----------------------------------------------------------------------


async def test_leaving_the_queue(new_world: World) -> None:
    mock = new_world.mock("--blocks", "101")
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)
    runs = await start(gateway, completion(400, 1200, stream=True))
    await soon(lambda: mock.log()["started"], "the first one runs")
    waiting = [await start(gateway, completion(400, 1200, stream=number % 2 == 0)) for number in range(6)]
    await soon(lambda: gateway.state()["queue"] == 6, "all others wait")
    for number, wire in enumerate(waiting):
        LEAVES[number % 3 % 2](wire)
    await soon(lambda: gateway.state()["queue"] == 0, "nobody waits")
    assert gateway.state()["leases"] == 1
    runs.reset()
    await soon(gateway.is_quiet, "nothing is held")
    assert mock.log()["received"] == 1
    assert cancelled(gateway) == 7
    await expect_own_answer(gateway)


class Door:
    """The way to an engine; while it is shut, nobody takes the connections that arrive at its socket."""

    def __init__(self, url: str, backlog: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._engine = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._pipes: set[asyncio.Task[None]] = set()
        self._crowd: list[socket.socket] = []
        self._porter: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._porter = asyncio.create_task(self._accept())

    async def shut(self) -> None:
        assert self._porter
        self._porter.cancel()
        await asyncio.gather(self._porter, return_exceptions=True)

    async def fill(self) -> None:
        """Connect until the kernel answers no more."""
        with contextlib.suppress(TimeoutError):
            while True:
                knock = socket.socket()
                knock.setblocking(False)
                self._crowd.append(knock)
                async with asyncio.timeout(0.2):
                    await asyncio.get_running_loop().sock_connect(knock, self.listener.getsockname())

    async def take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The next connection that waits at the shut door."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        return await asyncio.open_connection(sock=connection)

    def clear(self) -> None:
        for knock in self._crowd:
            knock.close()
        self._crowd.clear()

    async def close(self) -> None:
        await self.shut()
        self.clear()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        self.listener.close()

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
            pipe = asyncio.create_task(self._join(connection))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _join(self, connection: socket.socket) -> None:
        outer, inner = (
            await asyncio.open_connection(sock=connection),
            await asyncio.open_connection(*self._engine),
        )
        try:
            await asyncio.gather(copy(outer[0], inner[1]), copy(inner[0], outer[1]))
        finally:
            outer[1].transport.abort()
            inner[1].transport.abort()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def door_to(mock: Mock, backlog: int) -> AsyncIterator[Door]:
    door = Door(mock.url, backlog)
    door.open()
    try:
        yield door
    finally:
        await door.close()


async def gateway_behind(here: World, door: Door) -> GatewayProcess:
    """Its limits are far away: what ends a call here is its client's leaving."""
    pools = [{"name": "only", "replicas": [door.url]}]
    config, (key,) = here.config(pools, upstream={"connect_seconds": 60}, store=QUICK_STORE)
    return await asyncio.to_thread(here.gateway, config, key)


async def test_leaving_an_engine_that_takes_no_connection(new_world: World) -> None:
    """The kernel completes the handshake, the engine never reads."""
    mock = new_world.mock()
    async with door_to(mock, backlog=100) as door:
        gateway = await gateway_behind(new_world, door)
        for stream, leave in itertools.product((True, False), LEAVES):
            await door.shut()
            wire = await start(gateway, completion(400, 1200, stream=stream))
            await leave_unheard(gateway, wire, leave)
            await expect_closed(door)
            door.open()
            assert mock.log()["received"] == 0
        await expect_own_answer(gateway)


async def leave_unheard(gateway: GatewayProcess, wire: Wire, leave: Leave) -> None:
    await soon(lambda: gateway.state()["reserved"], "it has its place")
    await asyncio.sleep(0.3)
    leave(wire)
    await soon(gateway.is_quiet, "nothing is held")


async def expect_closed(door: Door) -> None:
    """The call's connection is among those that wait at the door, and the gateway has closed it."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            reader, writer = await door.take()
            first = await reader.read(4)
            if first == b"POST":
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                return writer.close()
            writer.close()


async def test_leaving_while_connecting(new_world: World) -> None:
    """The engine's backlog is full: the handshake never completes."""
    mock = new_world.mock()
    async with door_to(mock, backlog=0) as door:
        gateway = await gateway_behind(new_world, door)
        await door.shut()
        await door.fill()
        for leave in LEAVES:
            await leave_unheard(gateway, await start(gateway, completion(400, 1200)), leave)
        door.clear()
        door.open()
        await asyncio.sleep(1.5)
        assert mock.log()["received"] == 0, "a lost handshake came back to life"
        await soon(gateway.is_ready, "the engine is up again")
        await expect_own_answer(gateway)
