"""One HTTP exchange over plain ASGI: the body in, an answer with vLLM's headers out, and the ways to break it."""

import asyncio
import socket
import struct
import uuid
import zlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.mock.openai import dump

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Result = TypeVar("Result")

BODY_BYTES_MAX = 64 * 1024 * 1024
RESET = "mock.reset"
"""ASGI extension: a callable that resets the connection (RST)."""
CUT = "mock.cut"
"""ASGI extension: a callable that closes the connection in good order, mid-answer or not."""
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class BreakableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with the two extensions above."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {RESET: self._reset, CUT: self.transport.close}  # type: ignore[dict-item]

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # close at once, unsent data dropped: TCP answers with RST
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


class BodyTooLarge(Exception):
    """The request body is over `BODY_BYTES_MAX`."""


class ClientLeft(Exception):
    """The client left before its request was complete."""


class Exchange:
    """One request and its answer.  `gzip` compresses whatever is answered from then on."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        self.request_id = self.header(b"x-request-id")
        self.gzip = False
        self._extensions = scope.get("extensions") or {}
        self._receive = receive
        self._send = send
        self._deflate: Any = None

    def header(self, name: bytes) -> str:
        """The first header of that lower-case name, or an empty string."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    async def body(self) -> bytes:
        """The whole request body.  Raises BodyTooLarge or ClientLeft."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > BODY_BYTES_MAX:
                raise BodyTooLarge
            if not message.get("more_body", False):
                return b"".join(parts)

    async def json(self, status: int, value: object, extra: Headers | None = None) -> None:
        await self.answer(status, JSON, dump(value), extra)

    async def answer(
        self, status: int, content_type: bytes, body: bytes, extra: Headers | None = None
    ) -> None:
        """A whole answer; an empty content type leaves that header out."""
        if self.gzip:
            body = zlib.compress(body, wbits=31)
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, content_type, [*(extra or []), length])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self, content_type: bytes = EVENT_STREAM) -> None:
        if self.gzip:
            self._deflate = zlib.compressobj(wbits=31)
        await self._start(200, content_type, [])

    async def start_promising(self, content_type: bytes, length: int) -> None:
        """Headers that promise more bytes than will come."""
        await self._start(200, content_type, [(b"content-length", str(length).encode())])

    async def write(self, data: bytes) -> None:
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        rest = b"" if self._deflate is None else self._deflate.flush()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    def break_off(self, how: str) -> None:
        """Reset or cut the connection.  Raises ConnectionResetError where the server offers no such extension."""
        if how not in self._extensions:
            raise ConnectionResetError(how)
        self._extensions[how]()

    async def unless_left(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of `work`, or None when the client left first: then it is cancelled.

        To be called when the request body has been read.
        """
        worker = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            return worker.result() if worker.done() else None
        finally:
            worker.cancel()
            watcher.cancel()
            await asyncio.gather(worker, watcher, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, content_type: bytes, headers: Headers) -> None:
        if content_type:
            headers.append((b"content-type", content_type))
        if self.gzip:
            headers.append((b"content-encoding", b"gzip"))
        request_id = self.request_id or uuid.uuid4().hex
        headers += [(b"vary", b"Origin"), (b"x-request-id", request_id.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
