"""The subscription that wakes a process up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from gateway.ledger.connection import listen
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import eventually, running_store


@asynccontextmanager
async def listening(url: str, heard: Callable[[], None]) -> AsyncIterator[None]:
    ears = asyncio.create_task(listen(url, "here", heard))
    try:
        yield
    finally:
        ears.cancel()
        await asyncio.wait([ears])
        await asyncio.sleep(0)


async def test_each_message_is_heard_also_while_the_connection_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once more for the subscription itself: what came before it was not heard."""
    monkeypatch.setattr("gateway.ledger.connection.LISTEN_PING_SECONDS", 0.001)
    heard: list[None] = []
    with running_store() as store, redis.Redis(unix_socket_path=str(store.socket)) as client:
        async with listening(store.url, lambda: heard.append(None)):
            await eventually(lambda: len(heard) == 1)
            for _ in range(50):
                assert client.publish("here", "") == 1
                await asyncio.sleep(0.002)
            await eventually(lambda: len(heard) == 51)


async def test_a_way_that_swallows_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.connection.LISTEN_PING_SECONDS", 0.05)
    monkeypatch.setattr("gateway.ledger.connection.REPLY_SECONDS", 0.1)
    heard: list[None] = []
    with running_store() as store:
        async with (
            store_proxy(str(store.socket)) as proxy,
            listening(proxy.url, lambda: heard.append(None)),
        ):
            await eventually(lambda: len(heard) == 1)
            proxy.black_hole = True
            await eventually(lambda: len(heard) == 2)
            proxy.black_hole = False
            proxy.cut()
            await eventually(lambda: len(heard) >= 3)
