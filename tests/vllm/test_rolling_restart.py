"""Two real engines are restarted one after the other under load: no call is lost."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.test_resting import CHAT
from tests.integration.test_rolling_restart import COMPLETION, Kind, under_load
from tests.processes import ADMIN_TOKEN, GatewayProcess, World
from tests.vllm.engine import MODEL, SLOW_MACHINE, START_SECONDS, Vllm
from tests.vllm.environment import ready_place
from tests.wire import Wire, soon

pytestmark = pytest.mark.timeout(6 * START_SECONDS)

TOKENS = 100
PATIENCE_SECONDS = 300.0
"""For one answer, and for all of an engine's: while another one starts, an engine has a part of one core."""
OPTIONS = ("--shutdown-timeout", str(round(PATIENCE_SECONDS)))
RUNNING = "vllm:num_requests_running"


def kind(path: str, stream: bool, **prompt: Any) -> Kind:
    return path, {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, **prompt}


CHATS = {"messages": [{"role": "user", "content": "hello there"}]}
TEXTS = {"prompt": list(range(100, 164))}
KINDS = [kind(CHAT, True, **CHATS), kind(CHAT, False, **CHATS), kind(COMPLETION, True, **TEXTS),
         kind(COMPLETION, False, **TEXTS)]  # fmt: skip


def replica(gateway: GatewayProcess, name: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway.state()["fleets"][MODEL]["pools"]["only"]["replicas"].get(name, {})
    return found


async def kvgate(gateway: GatewayProcess, *command: str) -> None:
    """One of the operators' commands."""
    environ = {**os.environ, "KVGATE_ADMIN_URL": gateway.url, "KVGATE_ADMIN_TOKEN": ADMIN_TOKEN}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *command, env=environ)
    assert await process.wait() == 0


async def drained(gateway: GatewayProcess, name: str, engine: Vllm) -> None:
    """An operator waits until nothing runs there."""
    await kvgate(gateway, "drain", name)
    await soon(lambda: not replica(gateway, name)["sequences"], "nothing runs there", PATIENCE_SECONDS)
    await asyncio.to_thread(engine.stop)


async def unannounced(gateway: GatewayProcess, name: str, engine: Vllm) -> None:
    """It is told to end while it runs calls, and finishes them.

    Calls that were between its server and its core just then are never answered, and keep it from ending: kvgate gives
    them to the other one after `first_event_seconds` or `headers_seconds`.
    """
    engine.process.terminate()
    await asyncio.to_thread(engine.process.wait, 2 * PATIENCE_SECONDS)
    await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("end", [drained, unannounced])
async def test_a_rolling_restart_loses_no_call(
    new_world: World, tmp_path: Path, end: Callable[[GatewayProcess, str, Vllm], Awaitable[None]]
) -> None:
    engines: dict[str, Vllm] = {}
    try:
        for name in "ab":  # two that start at once take twice their time
            engines[name] = Vllm(ready_place(os.environ), tmp_path / f"{name}.log", *OPTIONS)
            engines[name].wait_ready()
        replicas = [{"name": name, "url": engine.url} for name, engine in engines.items()]
        pools = [{"name": "only", "replicas": replicas}]
        config, (key,) = new_world.config(pools, fleet={"model": MODEL}, store=SLOW_MACHINE["store"])
        gateway = new_world.gateway(config, key)
        async with under_load([gateway], KINDS, PATIENCE_SECONDS) as load:
            for name, engine in list(engines.items()):
                await soon(lambda engine=engine: engine.metric(RUNNING), f"{name} serves", PATIENCE_SECONDS)
                await end(gateway, name, engine)
                await _start_again(gateway, name, engines, tmp_path)
        print(f"{end.__name__}: {load.answered} calls answered, {len(load.lost)} lost")
        await soon(gateway.is_quiet, "all was given back")
        assert 'outcome="failed"' not in gateway.metrics()
    finally:
        Wire.hang_up_all()
        for engine in engines.values():
            engine.stop()


async def _start_again(gateway: GatewayProcess, name: str, engines: dict[str, Vllm], logs: Path) -> None:
    """Until it serves."""
    port = urlsplit(engines[name].url).port or 0
    anew = engines[name] = Vllm(ready_place(os.environ), logs / f"{name}-again.log", *OPTIONS, port=port)
    await asyncio.to_thread(anew.wait_ready)
    await soon(
        lambda: replica(gateway, name)["state"] in ("up", "draining"), f"{name} answers", PATIENCE_SECONDS
    )
    if "drained" in replica(gateway, name)["rests"]:
        assert not anew.metric(RUNNING)
        await kvgate(gateway, "undrain", name)
    await soon(lambda: anew.metric(RUNNING), f"{name} serves again", PATIENCE_SECONDS)
