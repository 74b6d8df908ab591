"""Engines on loopback sockets in the test's own loop: the real mock, and servers that send exact bytes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import uvicorn

from gateway.mock.engine import EngineConfig
from gateway.mock.exchange import BreakableProtocol
from gateway.mock.journal import State
from gateway.mock.options import Options
from gateway.mock.server import MockServer, create_app

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str = "x", finish: str | None = None) -> bytes:
    """A frame of a chat stream, with the text unescaped."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    frame = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "demo",
        "choices": [choice],
    }
    return b"data: " + json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> bytes:
    """An answer with a length."""
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    )
    return head.encode() + body


class Peer:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = b""
        """Of the request."""
        self.written = 0
        """Bytes that the transport and the kernel have taken off us."""
        self.gone = asyncio.Event()

    async def request(self) -> tuple[str, bytes]:
        """Read one request whole; returns its first line and its body."""
        self.head = await self.reader.readuntil(b"\r\n\r\n")
        line, *head = self.head.split(b"\r\n")
        lengths = [int(field[15:]) for field in head if field.lower().startswith(b"content-length:")]
        return line.decode(), await self.reader.readexactly(sum(lengths))

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            self.written += len(part)

    async def until_gone(self) -> None:
        """Returns when the other side has closed."""
        with suppress(OSError):
            while await self.reader.read(65_536):
                pass
        self.gone.set()

    def reset(self) -> None:
        """Close with a TCP reset."""
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class RawEngine:
    server: asyncio.Server

    def __init__(self, url: str) -> None:
        self.url = url
        self.peers: list[Peer] = []
        self.bodies: list[bytes] = []
        """Of the requests, in the order of arrival."""
        self.lines: list[str] = []
        """The first line of each."""


@asynccontextmanager
async def raw_engine(script: Script) -> AsyncIterator[RawEngine]:
    """A server that reads one request on each connection and then plays `script`."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        here.peers.append(peer)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            line, body = await peer.request()
            here.lines.append(line)
            here.bodies.append(body)
            await script(peer)
        peer.gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    here = RawEngine(f"http://{host}:{port}")
    here.server = server
    try:
        yield here
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes the sockets one turn later


class MockEngine:
    """The mock behind uvicorn, in this loop."""

    def __init__(self, app: MockServer, url: str) -> None:
        self.app = app
        self.url = url

    def count(self, state: State) -> int:
        found: int = self.app.journal.shown()[state]
        return found

    @property
    def open_calls(self) -> int:
        """Calls that it received and that have not ended."""
        ended = (State.FINISHED, State.ABORTED, State.REFUSED, State.FAILED)
        return self.count(State.RECEIVED) - sum(self.count(state) for state in ended)


@asynccontextmanager
async def mock_engine(
    sizes: EngineConfig, *, speed: float, options: Options | None = None
) -> AsyncIterator[MockEngine]:
    """A mock engine; its steps take no time where `speed` is infinite."""
    app = create_app(sizes, options, speed=speed)
    config = uvicorn.Config(
        app, http=BreakableProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        host, port = listener.getsockname()[:2]
        await server.startup([listener])  # `serve` would take the signals, and end only at its next tick
        try:
            yield MockEngine(app, f"http://{host}:{port}")
        finally:
            app.driver.stop()
            await server.shutdown([listener])
