"""How many connections gateways have to their store, as the store counts them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import redis

OF_A_GATEWAY = 2
"""One for batches and one for wake-ups: docs/ledger.md."""
OF_KEYS = 1
"""Beside them, of a process that follows keys and cuts."""
OF_ESTIMATES = 1
"""For a moment every ten seconds, of each fleet: what is learned of estimates."""
LOOK_SECONDS = 0.01


class StoreClients:
    """Those that came after this one."""

    def __init__(self, path: str) -> None:
        self.now = self.most = 0
        """As of the last look, and the most of all looks."""
        self._client = redis.Redis(unix_socket_path=path, protocol=2)
        self._before = len(self._client.client_list())

    async def watch(self) -> None:
        """The only one that asks: two at once would need two connections."""
        with closing(self._client):
            while True:
                self.now = len(await asyncio.to_thread(self._client.client_list)) - self._before
                self.most = max(self.most, self.now)
                await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def counting(path: str) -> AsyncIterator[StoreClients]:
    """On the store at this socket, looked at all the time until it is left."""
    clients = StoreClients(path)
    task = asyncio.create_task(clients.watch())
    try:
        yield clients
    finally:
        task.cancel()
        await asyncio.wait([task])
