"""HTTP/1.1 exchanges over plain asyncio transports: no task, future or copy between the socket and the reader."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from gateway.loadtest.targets import Target

IDLE_SECONDS = 2.0
"""An idle connection is kept for less than any server does (uvicorn: 5), so that none closes under a request."""
IDLE_MAX = 4_096
"""Idle connections of one target."""
SLOW_BUFFER_BYTES = 4_096
"""The socket buffer of a client that reads slowly."""
HEAD_BYTES_MAX = 256 << 10
"""Of an answer, counted by the piece while the head is incomplete."""


class Reader(Protocol):
    """Takes one answer.  `now` is set before each batch of calls: when its bytes were read."""

    now: float

    def on_head(self, status: int, headers: dict[str, str]) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, error: Exception | None) -> None: ...


class _Answer:
    """What the parser calls: collects the head, then hands the body straight to the reader."""

    def __init__(self, reader: Reader, over: Callable[[], None]) -> None:
        self._reader = reader
        self._over = over
        self._headers: dict[str, str] = {}
        self.head_bytes: int | None = 0
        """None when the head is complete."""
        self.on_body = reader.on_body
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200:
            self.head_bytes = None
            self._reader.on_head(status, self._headers)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self._over()
        self._headers = {}


class Connection(asyncio.Protocol):
    """One socket; one exchange at a time."""

    def __init__(self, give_back: Callable[["Connection"], None]) -> None:
        self._give_back = give_back
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._answer: _Answer | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have another base class

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes, reader: Reader) -> None:
        """Begin an exchange on an idle connection."""
        assert self._transport is not None
        assert self._reader is None
        self._reader = reader
        self._answer = _Answer(reader, self._over)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        reader, answer = self._reader, self._answer
        if reader is None or answer is None:
            self.close()  # nobody asked for it
            return
        reader.now = time.monotonic()
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of the reader, not of the other end
        except httptools.HttpParserError as error:
            self._lose(error)
        if answer.head_bytes is not None:
            answer.head_bytes += len(data)
            if answer.head_bytes > HEAD_BYTES_MAX:
                self._lose(ValueError("the head of the answer is too long"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lose(exc)

    def close(self) -> None:
        """Close the socket for real; no more calls to the reader."""
        self._reader = self._answer = None
        if self._transport is not None:
            self._transport.close()

    def read_slowly(self) -> None:
        """Shrink the kernel's buffer, so that not reading is felt at the other end."""
        assert self._transport is not None
        own: socket.socket = self._transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _over(self) -> None:
        reader, answer = self._reader, self._answer
        if reader is None or answer is None:
            return
        self._reader = self._answer = None
        if answer.parser.should_keep_alive() and not self.closed:
            self._give_back(self)
        elif self._transport is not None:
            self._transport.close()
        reader.on_end()

    def _lose(self, error: Exception | None) -> None:
        """The exchange is lost: the other end closed, or sent what is no HTTP."""
        reader = self._reader
        self.close()
        if reader is not None:
            reader.now = time.monotonic()
            reader.on_lost(error)


class Pool:
    """Connections to one target: an idle one is taken again, else a new one is made."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tls = target.tls()
        self._idle: deque[Connection] = deque()

    async def take(self) -> Connection:
        """Raises OSError.  The caller bounds the time; given back by itself when an exchange is over."""
        while self._idle:
            connection = self._idle.pop()
            fresh = time.monotonic() - connection.idle_since < IDLE_SECONDS
            if fresh and not connection.closed:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._put), self._target.host, self._target.port, ssl=self._tls
        )
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _put(self, connection: Connection) -> None:
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > IDLE_MAX or connection.idle_since - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.popleft().close()
