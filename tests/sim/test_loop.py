"""The virtual loop and network: what everything else in the simulation rests on."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.sim.loop import Process, Stuck, VirtualLoop
from tests.sim.network import Network


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


class Notes(asyncio.Protocol):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(type(exc))


def test_time_passes_only_where_nothing_can_run(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600


def test_waiting_for_nothing_is_found(loop: VirtualLoop) -> None:
    with pytest.raises(Stuck, match="no timer"):
        loop.run_until_complete(loop.create_future())


def test_a_loop_that_never_waits_is_found(loop: VirtualLoop) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    with pytest.raises(Stuck, match="stands still"):
        loop.run_until_complete(task)
    loop.call_later(1, task.cancel)
    loop._callbacks_at_once = 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)


def test_a_stopped_process_goes_on_later_and_in_order(loop: VirtualLoop) -> None:
    process, ran = Process("p"), []

    async def note(number: int) -> None:
        await asyncio.sleep(number)
        ran.append((number, loop.time()))

    async def story() -> None:
        tasks = [loop.create_task(note(n), context=process.context.copy()) for n in (1, 2, 3)]
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(5)
        assert len(ran) == 1
        process.go_on(loop)
        await asyncio.gather(*tasks)

    loop.run_until_complete(story())
    assert ran == [(1, 1), (2, 6.5), (3, 6.5)]


async def _connected(network: Network, process: Process) -> tuple[Notes, Notes]:
    server = Notes()
    network.listen("host", lambda: server, Process("server").context)
    made = asyncio.get_running_loop().create_task(
        network.connect(Notes, "host", 1), context=process.context.copy()
    )
    _, client = await made
    return client, server


@pytest.mark.parametrize("breaks", [0.0, 1.0])
def test_what_was_sent_arrives_even_if_its_connection_breaks(loop: VirtualLoop, breaks: float) -> None:
    async def story() -> tuple[Notes, Notes]:
        network, process = Network(loop, "seed"), Process("p")
        client, server = await _connected(network, process)
        network.route("p", "host").breaks = breaks
        client.transport.write(b"one")  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return client, server

    client, server = loop.run_until_complete(story())
    assert server.heard[0] == b"one"
    assert client.heard == ([ConnectionResetError] if breaks else [])


def test_a_parted_way_keeps_what_is_on_it(loop: VirtualLoop) -> None:
    async def story() -> None:
        network, process = Network(loop, "seed"), Process("p")
        client, server = await _connected(network, process)
        route = network.route("p", "host")
        route.up_held = True
        client.transport.write(b"one")  # type: ignore[attr-defined]
        client.transport.write(b"two")  # type: ignore[attr-defined]
        await asyncio.sleep(10)
        assert server.heard == []
        route.up_held = False
        network.release()
        await asyncio.sleep(0.01)
        assert server.heard == [b"one", b"two"]

    loop.run_until_complete(story())
