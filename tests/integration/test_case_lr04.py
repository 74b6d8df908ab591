"""LR-04: a client that leaves before the store has answered its reserve leaves nothing behind.

The store's replies are 200 ms late.  Each of 50 clients leaves 100 ms after the store has its reserve and needs 100 of
1,000 blocks, so ten that stayed would fill the engine.  A lease here is longer than the test: what comes back was given
back.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from gateway.ledger.verify import snapshot_of
from tests.conformance.books import read_content
from tests.faults.proxy import StoreProxy, store_proxy
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World, sum_of
from tests.wire import Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CLIENTS = 50
CLIENTS_MAX = 100
"""With those that a busy machine let leave too late."""
REPLY_SECONDS, LEAVE_SECONDS = 0.2, 0.1
BUDGET = 1000
HUNDRED, THOUSAND = (100, 1501), (1000, 15_001)
"""Prompt and output tokens of calls that need so many blocks."""
LONG_LEASE = QUICK_STORE | {"lease_seconds": 300}
LOOK_SECONDS = 0.005


class Scene:
    """A gateway with a slow way to the store, and a straight way to look at it."""

    def __init__(self, gateway: GatewayProcess, mock: Mock, proxy: StoreProxy, store: redis.Redis) -> None:
        self.gateway = gateway
        self.mock = mock
        self.proxy = proxy
        self._store = store

    def calls(self) -> set[str]:
        """Ids of all that the store holds."""
        return set(snapshot_of(read_content(self._store, "demo")).calls)

    async def given_back(self) -> None:
        """The store holds nothing any more, and no lease and no comparison of the books was needed for it."""
        await soon(lambda: not self.calls(), "the store holds nothing")
        await soon(self.gateway.is_quiet, "the gateway holds nothing")
        # In a thread: the page is made of what the store says, by a proxy that is in this loop.
        page = await asyncio.to_thread(self.gateway.metrics)
        assert sum_of("kvgate_leases_expired_total", page) == 0
        assert sum_of("kvgate_healed_total", page) == 0


@asynccontextmanager
async def slow_store(world: World, mock: Mock, reply_seconds: float, **replica: Any) -> AsyncIterator[Scene]:
    pools = [{"name": "only", "replicas": [{"url": mock.url, **replica}]}]
    config, (key,) = world.config(pools, store=LONG_LEASE)
    async with store_proxy(str(world.store.socket), tcp=True) as proxy:
        gateway = world.gateway(config, key, wait=False, KVGATE_STORE__URL=proxy.url)
        try:
            await asyncio.to_thread(gateway.wait_ready)
            proxy.reply_seconds = reply_seconds
            with redis.Redis(unix_socket_path=str(world.store.socket), protocol=2) as store:
                yield Scene(gateway, mock, proxy, store)
        finally:
            await asyncio.to_thread(gateway.stop)  # while its way to the store stands


async def leave_before_the_reply(scene: Scene) -> bool:
    """False where the machine was so busy that the reply may have come first."""
    known, not_asked_at = scene.calls(), time.monotonic()
    wire = await Wire.open(scene.gateway.url)
    await wire.send(post(scene.gateway.key, completion(*HUNDRED)))
    async with asyncio.timeout(HANG_SECONDS):
        while scene.calls() <= known:
            not_asked_at = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(LEAVE_SECONDS)
    wire.reset()
    return time.monotonic() - not_asked_at < REPLY_SECONDS


async def test_clients_leave_before_the_reply(new_world: World) -> None:
    assert (blocks_of(*HUNDRED), blocks_of(*THOUSAND)) == (100, BUDGET)
    mock = new_world.mock("--blocks", str(BUDGET + 1), "--max-model-len", str(sum(THOUSAND)))
    async with slow_store(new_world, mock, REPLY_SECONDS) as scene:
        left = [await leave_before_the_reply(scene)]
        while left.count(True) < CLIENTS:
            assert len(left) < CLIENTS_MAX
            left.append(await leave_before_the_reply(scene))
        await scene.given_back()
        assert mock.log()["received"] <= left.count(False), "who left in time never reached the engine"
        answer = await ask(scene.gateway.url, post(scene.gateway.key, completion(*THOUSAND, output_tokens=1)))
        assert answer.status == 200, answer
        assert answer.headers["x-kvgate-queue-ms"] == "0"
        assert answer.headers["x-kvgate-reserved-blocks"] == str(BUDGET)
        await scene.given_back()
