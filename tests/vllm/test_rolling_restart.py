"""Two real engines are restarted one after the other under load: no call is lost."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.test_admin_keys import admin_of
from tests.integration.test_drain import replicas_of, state_of
from tests.integration.test_resting import CHAT
from tests.integration.test_rolling_restart import COMPLETION, Kind, under_load
from tests.processes import GatewayProcess, World
from tests.vllm.engine import MODEL, START_SECONDS, Vllm
from tests.vllm.environment import place
from tests.wire import Wire, soon

pytestmark = pytest.mark.timeout(900)

TOKENS = 200
SHUTDOWN_SECONDS = 60
OPTIONS = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
RUNNING = "vllm:num_requests_running"


def kind(path: str, stream: bool, **prompt: Any) -> Kind:
    return path, {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, **prompt}


CHATS = {"messages": [{"role": "user", "content": "hello there"}]}
TEXTS = {"prompt": list(range(100, 164))}
KINDS = [kind(CHAT, True, **CHATS), kind(CHAT, False, **CHATS), kind(COMPLETION, True, **TEXTS),
         kind(COMPLETION, False, **TEXTS)]  # fmt: skip


async def drained(gateway: GatewayProcess, name: str, engine: Vllm) -> None:
    """An operator waits until nothing runs there."""
    with admin_of(gateway) as admin:
        await asyncio.to_thread(admin, "POST", "/drain", json={"replica": name})
    await soon(lambda: not replicas_of(gateway)[name]["sequences"], "nothing runs there", 60)
    await asyncio.to_thread(engine.stop)


async def unannounced(gateway: GatewayProcess, name: str, engine: Vllm) -> None:
    """It is told to end while it runs calls, and finishes them."""
    engine.process.terminate()
    await asyncio.to_thread(engine.process.wait, 2 * SHUTDOWN_SECONDS)


@pytest.mark.parametrize("end", [drained, unannounced])
async def test_a_rolling_restart_loses_no_call(
    new_world: World, tmp_path: Path, end: Callable[[GatewayProcess, str, Vllm], Awaitable[None]]
) -> None:
    engines: dict[str, Vllm] = {}
    try:
        for name in "ab":  # two that start at once take twice their time
            engines[name] = Vllm(place(os.environ), tmp_path / f"{name}.log", *OPTIONS)
            engines[name].wait_ready()
        replicas = [{"name": name, "url": engine.url} for name, engine in engines.items()]
        config, (key,) = new_world.config([{"name": "only", "replicas": replicas}], fleet={"model": MODEL})
        gateway = new_world.gateway(config, key)
        async with under_load([gateway], KINDS) as load:
            for name, engine in list(engines.items()):
                await soon(lambda engine=engine: engine.metric(RUNNING), f"{name} serves", 60)
                await end(gateway, name, engine)
                await _start_again(gateway, name, engines, tmp_path)
        print(f"{end.__name__}: {load.answered} calls answered, {len(load.lost)} lost")
    finally:
        Wire.hang_up_all()
        for engine in engines.values():
            engine.stop()


async def _start_again(gateway: GatewayProcess, name: str, engines: dict[str, Vllm], logs: Path) -> None:
    """Until it serves."""
    port = urlsplit(engines[name].url).port or 0
    anew = engines[name] = Vllm(place(os.environ), logs / f"{name}-again.log", *OPTIONS, port=port)
    await asyncio.to_thread(anew.wait_ready)
    await soon(lambda: state_of(gateway, name)[0] in ("up", "draining"), f"{name} answers", START_SECONDS)
    if "drained" in state_of(gateway, name)[1]:
        with admin_of(gateway) as admin:
            await asyncio.to_thread(admin, "POST", "/undrain", json={"replica": name})
    await soon(lambda: anew.metric(RUNNING), f"{name} serves again", START_SECONDS)
