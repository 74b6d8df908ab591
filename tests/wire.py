"""A client on bare sockets: it sends exactly what it is told and leaves whenever it wants, by FIN or by RST."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tests.processes import HANG_SECONDS

ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error envelope."""
        return str(self.json()["error"]["code"])


class Wire:
    """One connection; calls on it one after the other."""

    opened: ClassVar[list["Wire"]] = []
    """Since the last `hang_up_all`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer_seconds: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer_seconds = answer_seconds
        self._headers: dict[str, str] = {}
        self._unread = b""
        self._body_over = False

    @classmethod
    async def open(cls, url: str, limit: int = 1 << 24, answer_seconds: float = ANSWER_SECONDS) -> "Wire":
        """`limit`: bytes that are taken from the system before they are read; twice as many at most.
        `answer_seconds`: to an answer's head, and to each part of its body.
        """
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=limit)
        wire = cls(reader, writer, answer_seconds)
        cls.opened.append(wire)
        return wire

    @classmethod
    def hang_up_all(cls) -> None:
        for wire in cls.opened:
            wire.reset()
        cls.opened.clear()

    async def send(self, request: bytes) -> None:
        self._writer.write(request)
        await self._writer.drain()

    async def ask(self, request: bytes) -> Answer:
        """Send, and the whole answer."""
        await self.send(request)
        return await self.answer()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer, nothing of its body."""
        async with asyncio.timeout(self._answer_seconds):
            raw = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines if line)
        self._headers = {name.lower(): value.strip() for name, _, value in fields}
        self._unread, self._body_over = b"", False
        return int(first.split(" ")[1]), self._headers

    async def answer(self) -> Answer:
        status, headers = await self.head()
        parts = [part async for part in self._parts()]
        return Answer(status, headers, b"".join(parts))

    async def rest(self) -> Any:
        """The JSON of an answer whose head was read."""
        return json.loads(b"".join([part async for part in self._parts()]))

    async def event(self) -> bytes | None:
        """The next server-sent event without its end; None when the body is over.  After `head`."""
        while b"\n\n" not in self._unread:
            part = await self._part()
            if part is None:
                return None
            self._unread += part
        event, _, self._unread = self._unread.partition(b"\n\n")
        return event

    async def raw(self) -> AsyncIterator[bytes]:
        """What comes, as it comes, until the server closes: its head, too, and however long it takes."""
        while part := await self._reader.read(1 << 16):
            yield part

    async def events(self) -> list[bytes]:
        """All that are left."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    def close(self) -> None:
        """Leave in good order: FIN."""
        self._writer.close()

    def reset(self) -> None:
        """Leave at once: RST, whatever was not read is dropped."""
        connection = self._writer.get_extra_info("socket")
        if connection is not None and connection.fileno() != -1:  # uvloop has none for a closed one
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _parts(self) -> AsyncIterator[bytes]:
        while (part := await self._part()) is not None:
            yield part

    async def _part(self) -> bytes | None:
        """A chunk of the body, or all of one with a length."""
        if self._body_over:
            return None
        async with asyncio.timeout(self._answer_seconds):
            if self._headers.get("transfer-encoding") != "chunked":
                self._body_over = True
                return await self._reader.readexactly(int(self._headers.get("content-length", "0")))
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            chunk = await self._reader.readexactly(size + 2)
        self._body_over = size == 0
        return None if self._body_over else chunk[:-2]


def post(
    key: str, body: dict[str, Any] | bytes, path: str = "/v1/completions", *, alone: bool = False
) -> bytes:
    """A whole POST request; `alone`: the only one on its connection, which the server closes then."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = "connection: close\r\n" if alone else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: kvgate\r\nauthorization: Bearer {key}\r\n{connection}"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def completion(prompt_tokens: int, max_tokens: int, stream: bool = False, **script: Any) -> dict[str, Any]:
    """A body whose prompt counts exactly; `script` is the mock engine's (see `gateway/mock/faults.py`)."""
    body: dict[str, Any] = {"model": "demo", "prompt": [7] * prompt_tokens, "max_tokens": max_tokens}
    return body | ({"stream": True} if stream else {}) | ({"mock": script} if script else {})


def blocks_of(prompt_tokens: int, max_tokens: int, block_size: int = 16) -> int:
    """What one sequence holds at most: the last token's KV is never written."""
    return -(-(prompt_tokens + max_tokens - 1) // block_size)


async def ask(url: str, request: bytes, answer_seconds: float = ANSWER_SECONDS) -> Answer:
    """One call on a connection of its own."""
    wire = await Wire.open(url, answer_seconds=answer_seconds)
    try:
        return await wire.ask(request)
    finally:
        wire.close()


async def soon(condition: Callable[[], Any], what: str, seconds: float = HANG_SECONDS) -> Any:
    """The first true value of the condition; fails the test when a look that begins after that time finds none.

    So no look is missed because this process stood still over the end of the time.
    """
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not (value := await asyncio.to_thread(condition)):
        assert began < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
        began = time.monotonic()
    return value
