"""Small real servers for clients to meet: each connection gets the next of a list of behaviours."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-kvgate-queue-ms: 12\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**choice: Any) -> bytes:
    shown = json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}, separators=(",", ":"))
    return chunk(b"data: " + shown.encode() + b"\n\n")


ROLE = event(delta={"role": "assistant", "content": ""})
WORD = event(delta={"content": " lorem"})
LAST = event(delta={"content": " lorem"}, finish_reason="length")
ABORT = event(delta={"content": ""}, finish_reason="abort")
USAGE = chunk(b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n')
ERROR = chunk(b'data: {"error":{"message":"m","type":"InternalServerError","code":500}}\n\n')
DONE = chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"
GOOD = ROLE + WORD + WORD + LAST + USAGE + DONE + END


def refusal(status: int, code: str, *headers: str) -> bytes:
    body = json.dumps({"error": {"code": code}}).encode()
    lines = [f"HTTP/1.1 {status} No", f"content-length: {len(body)}", f"x-kvgate-reason: {code}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Peer:
    """The server's end of one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    request: dict[str, Any]
    headers: dict[str, str]

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def gone(self) -> bool:
        """Wait until the client has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass
        return True

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Peer], Awaitable[Any]]


def saying(*parts: bytes) -> Behaviour:
    async def behave(peer: Peer) -> None:
        await peer.send(*parts)

    return behave


@dataclass
class Server:
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def server(behaviours: Sequence[Behaviour]) -> AsyncIterator[Server]:
    """One behaviour per request, the last one again and again; a connection is closed after a request unless kept."""
    found = Server()
    tasks: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks[task] = writer
        found.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                peer = await _request(reader, writer)
                number = min(len(found.requests), len(behaviours) - 1)
                found.requests.append(peer.request)
                found.headers.append(peer.headers)
                if await behaviours[number](peer) == "close":
                    break
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        listener.close()
        for task, writer in tasks.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for the transports to see their ends


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return Peer(reader, writer, json.loads(body), headers)
