"""A network that falls apart: proxies on TCP ports that leave out whom a test wants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.proxy import CHUNK, StoreProxy, _Link
from tests.processes import free_port


class TcpProxy(StoreProxy):
    """In front of a server on a TCP port.

    Who is cut off is told by the address that the other side comes from: bytes on the way stay there in both
    directions, and new connections get no answer, as in a network that drops packets.
    """

    def __init__(self, target: str) -> None:
        super().__init__(None, target)
        self.port = free_port()
        self._cut_off: set[str] = set()
        self._unheard: list[asyncio.StreamWriter] = []

    @property
    def host_and_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK)

    def cut_off(self, address: str) -> None:
        self._cut_off.add(address)
        for link in self._links:
            if _peer(link._client[1]) == address:
                for _, writer in (link._client, link._store):
                    writer.transport.pause_reading()  # type: ignore[attr-defined]

    def heal(self) -> None:
        """What was cut off has to connect anew."""
        for link in list(self._links):
            if _peer(link._client[1]) in self._cut_off:
                link.close()
        for writer in self._unheard:
            writer.close()
        self._unheard.clear()
        self._cut_off.clear()

    async def stop(self) -> None:
        """Nobody gets through any more, and no task of it is left."""
        self.heal()
        await self.end()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _peer(writer) in self._cut_off:
            self._unheard.append(writer)
            return
        try:
            store = await asyncio.open_connection(*self._target.split(":"), limit=CHUNK)
        except OSError:
            writer.close()
            return
        link = _Link(self, (reader, writer), store)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


def _peer(writer: asyncio.StreamWriter) -> str:
    """The address that it comes from."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.stop()
