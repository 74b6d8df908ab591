"""A way to the store that is slow, loses replies, breaks off or swallows everything, as a test wants it."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.ledger.scripts import KEY_NAMES

CHUNK = 1 << 18
END_SECONDS = 30.0
"""For all connections to end after the proxy."""
_NO_TIME = f":{KEY_NAMES[-1]}\r\n$0\r\n\r\n".encode()
"""In the request of a script: the last key, and `now` left to the store's own clock."""
_MESSAGE = b"*3\r\n$7\r\nmessage\r\n"
"""How a message of a subscription begins (RESP2)."""


class StoreProxy:
    """In front of the store's unix socket, on a unix socket of its own or, without a path, on a port of loopback."""

    def __init__(self, path: Path | None, target: str) -> None:
        self.url = f"unix://{path}"
        self.reply_seconds = 0.0
        """Replies are so late."""
        self.black_hole = False
        """Bytes are read and go nowhere, in both directions."""
        self.deaf = False
        """Messages of subscriptions are lost."""
        self.swallow = b""
        """The reply to a request that contains this is lost once, with its connection."""
        self.swallow_after = 0
        """Bytes of that reply that still pass."""
        self.on_swallow: Callable[[], None] = lambda: None
        """Called between those bytes and the end of the connection."""
        self.swallowed = 0
        self.clock_shift_ms = 0
        """The store's clock is so far off: every script that asks for the time gets this one."""
        self.round_trips: RoundTrips | None = None
        """Scripts that pass are noted here."""
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def open(self) -> None:
        if self._path:
            self._server = await asyncio.start_unix_server(self._accept, self._path, limit=CHUNK)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
            self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def refuse(self) -> None:
        """Nobody listens any more."""
        if self._server:
            self._server.close()
        if self._path:
            self._path.unlink(missing_ok=True)
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for link in list(self._links):
            link.close()

    async def end(self) -> None:
        """Nobody listens, no connection is left, and what was held is lost."""
        await self.refuse()
        for link in self._links:
            link.drop()
        async with asyncio.timeout(END_SECONDS):
            while self._links:
                await asyncio.sleep(0.001)

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


class RoundTrips:
    """What gateways send to the store in scripts, one after the other."""

    def __init__(self) -> None:
        self.requests: list[bytearray] = []
        self.sent_at: list[float] = []
        """When each came here, in seconds of the monotonic clock."""
        self.replied_at: list[float] = []
        """When each reply left from here."""
        self.overlaps = 0
        """Requests that did not wait for the reply to the one before."""
        self._unanswered = False

    def request(self, data: bytes) -> None:
        if _NO_TIME in data:
            self.overlaps += self._unanswered
            self._unanswered = True
            self.requests.append(bytearray())
            self.sent_at.append(time.monotonic())
        if self.requests:
            self.requests[-1] += data

    def reply(self, data: bytes) -> None:
        if not data.startswith(_MESSAGE):
            if self._unanswered:
                self.replied_at.append(time.monotonic())
            self._unanswered = False


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    def __init__(self, proxy: StoreProxy, client: Ends, store: Ends) -> None:
        self.held: asyncio.Event | None = None
        self.requests: asyncio.Task[None] | None = None
        self._replies: asyncio.Task[None] | None = None
        self._proxy = proxy
        self._client = client
        self._store = store
        self._losing = False

    async def run(self) -> None:
        self.requests = asyncio.create_task(self._pass_requests())
        self._replies = asyncio.create_task(self._pass_replies())
        try:
            await asyncio.wait([self.requests, self._replies])
        finally:
            self.close()
            self.drop()

    def close(self) -> None:
        for _, writer in (self._client, self._store):
            writer.close()

    def drop(self) -> None:
        """Pass nothing on any more, nor wait for anything."""
        for task in (self.requests, self._replies):
            if task:
                task.cancel()

    async def _pass_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._client[0].read(CHUNK):
                if self.held:
                    await self.held.wait()
                if self._proxy.black_hole:
                    continue
                if self._proxy.swallow and self._proxy.swallow in data:
                    self._proxy.swallow, self._losing = b"", True
                if self._proxy.round_trips:
                    self._proxy.round_trips.request(data)
                self._store[1].write(self._timed(data))
                await self._store[1].drain()
        with contextlib.suppress(OSError, RuntimeError):
            self._store[1].write_eof()

    def _timed(self, data: bytes) -> bytes:
        shift_ms = self._proxy.clock_shift_ms
        if not shift_ms or _NO_TIME not in data:
            return data
        now = b"%d" % (time.time() * 1000 + shift_ms)
        return data.replace(_NO_TIME, _NO_TIME[:-6] + b"$%d\r\n%s\r\n" % (len(now), now))

    async def _pass_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._store[0].read(CHUNK):
                if self._losing:
                    self._lose(data)
                    break
                if self._proxy.reply_seconds:
                    await asyncio.sleep(self._proxy.reply_seconds)
                if not self._proxy.black_hole and not (self._proxy.deaf and data.startswith(_MESSAGE)):
                    if self._proxy.round_trips:
                        self._proxy.round_trips.reply(data)
                    self._client[1].write(data)
                    await self._client[1].drain()
        self.close()

    def _lose(self, reply: bytes) -> None:
        self._client[1].write(reply[: self._proxy.swallow_after])
        self._proxy.swallowed += 1
        self._proxy.on_swallow()


@asynccontextmanager
async def store_proxy(target: str, tcp: bool = False) -> AsyncIterator[StoreProxy]:
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        proxy = StoreProxy(None if tcp else Path(folder) / "proxy.sock", target)
        await proxy.open()
        try:
            yield proxy
        finally:
            await proxy.end()
