"""How a gateway process ends: told once, told twice, or killed; alone, beside another, or as one of several workers."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.ledger.state import read_state
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Answer, Wire, ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

GRACE_SECONDS = 8.0
LONG_GRACE_SECONDS = 60
"""Longer than a test may take."""
AT_ONCE_SECONDS = GRACE_SECONDS - 1.0
"""Nobody waits for the grace period; a busy machine stands still for seconds."""
ENGINE = ("--blocks", "201", "--step-base-ms", "10", "--step-running-us", "0")
"""Room for two of the calls below; a token takes 10 ms."""


def half(max_tokens: int = 1200, stream: bool = True, **script: Any) -> dict[str, Any]:
    """A call that holds half of the engine."""
    return completion(1601 - max_tokens, max_tokens, stream, **script)


async def send(gateway: GatewayProcess, body: dict[str, Any]) -> Wire:
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, body))
    return wire


async def open_stream(gateway: GatewayProcess, body: dict[str, Any]) -> Wire:
    """A stream whose first token has arrived."""
    wire = await send(gateway, body)
    status, _ = await wire.head()
    assert status == 200
    return wire


def one_pool(world: World, **settings: Any) -> tuple[Mock, Path, str]:
    mock = world.mock(*ENGINE)
    store = QUICK_STORE | settings.pop("store", {})
    config, (key,) = world.config([{"name": "only", "replicas": [mock.url]}], store=store, **settings)
    return mock, config, key


async def wait_for_exit(gateway: GatewayProcess, seconds: float = HANG_SECONDS) -> int:
    return int(await asyncio.to_thread(gateway.process.wait, seconds))


def assert_draining(answer: Answer) -> None:
    assert (answer.status, answer.code) == (503, "draining")
    assert int(answer.headers["retry-after"]) >= 1


def assert_cut(events: list[bytes]) -> None:
    """The end of a stream that no client takes for a success."""
    assert b'"code":"draining"' in events[-2]
    assert events[-1] == b"data: [DONE]"


async def assert_books_empty(world: World) -> None:
    state = await read_state(world.store.url, "demo")
    assert (state["reserved"], state["leases"], state["queue"]) == (0, 0, 0)


async def test_told_once(new_world: World) -> None:
    """What waits is sent away, what runs may finish within the grace period, the rest is cut in good order."""
    mock, config, key = one_pool(new_world, server={"grace_seconds": GRACE_SECONDS})
    gateway = new_world.gateway(config, key)
    short, endless = await open_stream(gateway, half(100)), await open_stream(gateway, half())
    waiting = [await send(gateway, half(stream=stream)) for stream in (True, False)]
    await soon(lambda: gateway.state()["queue"] == 2, "two calls wait")
    uploading = await Wire.open(gateway.url)
    await uploading.send(post(key, half())[:-10])

    told = time.monotonic()
    gateway.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(AT_ONCE_SECONDS):
        for wire in (*waiting, uploading):
            assert_draining(await wire.answer())
        assert (await ask(gateway.url, b"GET /health/ready HTTP/1.1\r\nhost: kvgate\r\n\r\n")).status == 503
        assert_draining(await ask(gateway.url, post(key, half())))
    assert (await short.events())[-1] == b"data: [DONE]"
    assert time.monotonic() - told < GRACE_SECONDS
    await soon(lambda: mock.log()["finished"] == 1, "the engine has ended it")
    assert_cut(await endless.events())
    assert time.monotonic() - told >= GRACE_SECONDS
    assert await wait_for_exit(gateway) == 0
    await soon(lambda: mock.log()["aborted"] == 1, "the engine saw the cut")
    assert mock.log()["received"] == 2
    await assert_books_empty(new_world)


async def test_cut_calls_without_a_stream_are_answered(new_world: World) -> None:
    """No answer of the engine had begun: a whole 503 says so."""
    mock, config, key = one_pool(new_world, server={"grace_seconds": 0.5})
    gateway = new_world.gateway(config, key)
    wires = [await send(gateway, half(stream=stream, hold_seconds=60)) for stream in (True, False)]
    await soon(lambda: mock.log()["started"] == 2, "both run")
    gateway.process.send_signal(signal.SIGTERM)
    for wire in wires:
        assert_draining(await wire.answer())
    assert await wait_for_exit(gateway) == 0
    await soon(lambda: mock.log()["aborted"] == 2, "the engine saw the cuts")
    await assert_books_empty(new_world)


async def test_finished_early(new_world: World) -> None:
    """A process does not sit out its grace period when nothing runs any more."""
    mock, config, key = one_pool(new_world, server={"grace_seconds": LONG_GRACE_SECONDS})
    gateway = new_world.gateway(config, key)
    stream = await open_stream(gateway, half(50))
    gateway.process.send_signal(signal.SIGTERM)
    assert (await stream.events())[-1] == b"data: [DONE]"
    assert await wait_for_exit(gateway) == 0
    await soon(lambda: mock.log()["finished"] == 1, "the engine has ended it")
    await assert_books_empty(new_world)


async def test_told_twice(new_world: World) -> None:
    mock, config, key = one_pool(new_world, server={"grace_seconds": LONG_GRACE_SECONDS})
    gateway = new_world.gateway(config, key)
    stream = await open_stream(gateway, half())
    gateway.process.send_signal(signal.SIGTERM)
    await soon(lambda: not is_ready(gateway), "it drains")
    gateway.process.send_signal(signal.SIGTERM)
    assert_cut(await stream.events())
    assert await wait_for_exit(gateway) == 0
    await soon(lambda: mock.log()["aborted"] == 1, "the engine saw the cut")
    await assert_books_empty(new_world)


def is_ready(gateway: GatewayProcess) -> bool:
    return gateway.client.get("/health/ready").status_code == 200


async def test_killed_beside_another(new_world: World) -> None:
    """What the killed one held comes back when its lease is over, and goes to who waits at the other."""
    lease_seconds = 2
    mock, config, key = one_pool(new_world, store={"lease_seconds": lease_seconds})
    killed, other = new_world.gateway(config, key), new_world.gateway(config, key)
    lost = [await open_stream(killed, half()) for _ in range(2)]
    lost_in_queue = await send(killed, half())
    await soon(lambda: other.state()["queue"] == 1, "one waits at the first")
    waiting = await send(other, half(20))
    await soon(lambda: other.state()["queue"] == 2, "one waits at the other")

    killed.process.kill()
    assert await wait_for_exit(killed) == -signal.SIGKILL
    status, headers = await waiting.head()
    assert status == 200
    assert int(headers["x-kvgate-queue-ms"]) > 0
    assert (await waiting.events())[-1] == b"data: [DONE]"
    await soon(other.is_quiet, "nothing is held")
    await soon(lambda: mock.log()["finished"] == 1, "the engine has ended it")
    assert mock.log()["aborted"] == 2
    for wire in (*lost, lost_in_queue):
        wire.reset()


# -- several workers ---------------------------------------------------------------------------------------------


def workers_of(gateway: GatewayProcess) -> set[int]:
    """Its child processes that are gateways, too (the store is another child)."""
    pid = gateway.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children if b"gateway" in Path(f"/proc/{child}/cmdline").read_bytes()}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_workers(new_world: World) -> None:
    """Two share the port and the budget; a killed one is replaced; one signal ends all."""
    mock = new_world.mock(*ENGINE)
    short_lease = QUICK_STORE | {"url": "embedded", "lease_seconds": 2}
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = new_world.config(pools, store=short_lease, queue={"depth_max": 0})
    gateway = new_world.gateway(config, key, "--workers", "2")
    await soon(lambda: len(workers_of(gateway)) == 2, "two workers run")
    await rush(gateway)

    killed, kept = sorted(workers_of(gateway))
    os.kill(killed, signal.SIGKILL)
    await soon(lambda: kept in workers_of(gateway) and len(workers_of(gateway) - {killed}) == 2, "replaced")
    await soon(gateway.is_quiet, "the store has nothing of the killed one")
    await rush(gateway)

    family = workers_of(gateway) | {gateway.process.pid}
    stream = await open_stream(gateway, half(100))
    gateway.process.send_signal(signal.SIGTERM)
    assert (await stream.events())[-1] == b"data: [DONE]"
    assert await wait_for_exit(gateway) == 0
    assert not any(map(is_alive, family))


async def rush(gateway: GatewayProcess) -> None:
    """Of calls on many connections at once, and so through all workers, two are served, as the engine has room."""
    calls = [ask(gateway.url, post(gateway.key, half(50, stream=False))) for _ in range(16)]
    statuses = [answer.status for answer in await asyncio.gather(*calls)]
    assert sorted(statuses) == [200] * 2 + [429] * 14


async def test_terminal_interrupts_workers(new_world: World) -> None:
    """A terminal signals the whole process group: once is the grace period, twice is its end, for workers too."""
    mock, config, key = one_pool(new_world, server={"grace_seconds": LONG_GRACE_SECONDS})
    gateway = new_world.gateway(config, key, "--workers", "2")
    short, endless = await open_stream(gateway, half(50)), await open_stream(gateway, half())
    os.killpg(gateway.process.pid, signal.SIGINT)
    assert (await short.events())[-1] == b"data: [DONE]"
    os.killpg(gateway.process.pid, signal.SIGINT)
    assert_cut(await endless.events())
    assert await wait_for_exit(gateway) == 0
    await soon(lambda: mock.log()["aborted"] == 1, "the engine saw the cut")
    await assert_books_empty(new_world)
