"""A way to the store that is slow, loses replies, breaks off or swallows everything, as a test wants it."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHUNK = 1 << 18


class StoreProxy:
    """On a unix socket of its own, in front of the store's."""

    def __init__(self, path: Path, target: str) -> None:
        self.url = f"unix://{path}"
        self.reply_seconds = 0.0
        """Replies are so late."""
        self.black_hole = False
        """Bytes are read and go nowhere, in both directions."""
        self.swallow = b""
        """The reply to a request that contains this is lost once, with its connection."""
        self.swallowed = 0
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path, limit=CHUNK)

    async def refuse(self) -> None:
        """Nobody listens any more."""
        if self._server:
            self._server.close()
            self._path.unlink(missing_ok=True)
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for link in list(self._links):
            link.close()

    def hold_requests(self) -> "list[_Link]":
        """What the present connections send is kept until `release`; new ones are not concerned."""
        held = [link for link in self._links if not link.held]
        for link in held:
            link.held = asyncio.Event()
        return held

    async def release(self, held: "list[_Link]") -> None:
        """Pass on late what was held, though nobody waits for the reply any more, and wait until the store read it."""
        for link in held:
            if link.held:
                link.held.set()
        await asyncio.gather(*(link.requests for link in held if link.requests))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            store = await asyncio.open_unix_connection(self._target, limit=CHUNK)
        except OSError:
            writer.close()
            return
        link = _Link(self, (reader, writer), store)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    def __init__(self, proxy: StoreProxy, client: Ends, store: Ends) -> None:
        self.held: asyncio.Event | None = None
        self.requests: asyncio.Task[None] | None = None
        self._proxy = proxy
        self._client = client
        self._store = store
        self._losing = False

    async def run(self) -> None:
        self.requests = asyncio.create_task(self._pass_requests())
        replies = asyncio.create_task(self._pass_replies())
        try:
            await asyncio.wait([self.requests, replies])
        finally:
            self.close()
            self.requests.cancel()
            replies.cancel()

    def close(self) -> None:
        for _, writer in (self._client, self._store):
            writer.close()

    async def _pass_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._client[0].read(CHUNK):
                if self.held:
                    await self.held.wait()
                if self._proxy.black_hole:
                    continue
                if self._proxy.swallow and self._proxy.swallow in data:
                    self._proxy.swallow, self._losing = b"", True
                self._store[1].write(data)
                await self._store[1].drain()
        with contextlib.suppress(OSError, RuntimeError):
            self._store[1].write_eof()

    async def _pass_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._store[0].read(CHUNK):
                if self._losing:
                    self._proxy.swallowed += 1
                    break
                if self._proxy.reply_seconds:
                    await asyncio.sleep(self._proxy.reply_seconds)
                if not self._proxy.black_hole:
                    self._client[1].write(data)
                    await self._client[1].drain()
        self.close()


@asynccontextmanager
async def store_proxy(target: str) -> AsyncIterator[StoreProxy]:
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        proxy = StoreProxy(Path(folder) / "proxy.sock", target)
        await proxy.open()
        try:
            yield proxy
        finally:
            await proxy.refuse()
            while proxy._links:
                await asyncio.sleep(0.001)
