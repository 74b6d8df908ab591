"""The mock engine in the test's own loop, and a client on bare sockets that sees bytes, order and the way of ending."""

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from gateway.mock.serve import EngineServer
from gateway.mock.server import MockServer, create_app

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
SMALL = EngineConfig(model="tiny", blocks=64, block_size=16, max_model_len=4096, enable_prefix_caching=False)


@dataclass(frozen=True)
class Answer:
    """What a client saw until its connection ended; `broken` when that was a reset or came too early."""

    head: str
    body: bytes
    broken: bool

    @property
    def status(self) -> int:
        return int(self.head.split(" ", 2)[1])

    @property
    def names(self) -> list[str]:
        return [line.split(":")[0] for line in self.head.split("\r\n")[1:]]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


class Client:
    """One connection, spoken by hand so that bytes, order and the way of ending are seen as they are."""

    opened: ClassVar[list["Client"]] = []
    """Those that a server is to be rid of before it ends, also when their test has failed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.opened.append(self)

    @classmethod
    async def connect(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, method: str, path: str, body: object = None, headers: str = "") -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: mock\r\nconnection: close\r\n{headers}"
        if body is not None:
            head += "content-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        await self._writer.drain()

    async def answer(self) -> Answer:
        raw, reset = b"", False
        try:
            while data := await self.reader.read(65536):
                raw += data
        except ConnectionResetError:
            reset = True
        head, _, rest = raw.partition(b"\r\n\r\n")
        body, complete = (unchunked if b"transfer-encoding: chunked" in head else counted)(head, rest)
        return Answer(head.decode("latin-1"), body, reset or not complete)

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def event(self) -> bytes:
        await self.reader.readuntil(b"data: ")
        return (await self.reader.readuntil(b"\n\n")).strip()

    @classmethod
    def abort_all(cls) -> None:
        for client in cls.opened:
            client._writer.transport.abort()
        cls.opened.clear()

    async def leave(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


def unchunked(head: bytes, rest: bytes) -> tuple[bytes, bool]:
    pieces: list[bytes] = []
    at = 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces), False


def counted(head: bytes, rest: bytes) -> tuple[bytes, bool]:
    lengths = [
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")
    ]
    return rest, lengths == [len(rest)]


class Mock:
    def __init__(self, app: MockServer, server: EngineServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port

    async def call(self, method: str, path: str, body: object = None, headers: str = "") -> Answer:
        client = await Client.connect(self.port)
        try:
            await client.ask(method, path, body, headers)
            return await client.answer()
        finally:
            await client.leave()

    async def begin(self, path: str, body: object) -> Client:
        client = await Client.connect(self.port)
        await client.ask("POST", path, body)
        return client

    def pool(self) -> tuple[int, int, int]:
        engine = self.app.driver.engine
        return len(engine.running), len(engine.waiting), engine.blocks_used

    async def states(self) -> list[str]:
        return [record["state"] for record in (await self.call("GET", "/mock/log")).json["requests"]]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; the time limit is only for a broken mock."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    config: EngineConfig = SMALL,
    *,
    speed: float = math.inf,
    shutdown_seconds: float = 0.0,
    send_buffer_bytes: int | None = None,
    **options: Any,
) -> AsyncIterator[Mock]:
    """A server of one engine.  `send_buffer_bytes` bounds what the kernel takes for a client that does not read."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    app = create_app(config, Options(**options), speed=speed)
    server = EngineServer(app, listener, shutdown_seconds)
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        await until(lambda: server.started)
        yield Mock(app, server, listener.getsockname()[1])
    finally:
        Client.abort_all()
        server.stop()
        await task
        listener.close()


def body(**fields: Any) -> dict[str, Any]:
    """A chat body that also serves as a completion body."""
    return {"model": "tiny", "messages": MESSAGES, "prompt": [5] * 20, "max_tokens": 3} | fields
