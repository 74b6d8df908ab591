"""One HTTP exchange: the body in, an answer with vLLM's headers out, and the ways to break it.

Chunks of a stream go straight to the transport.  A client that reads slowly fills the transport's buffer and then
is waited for; what the engine samples meanwhile waits as tokens, in a stream that its call bounds.
"""

import asyncio
import socket
import struct
import uuid
import zlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.mock.bodies import check_media_type
from gateway.mock.progress import dump

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Result = TypeVar("Result")

BODY_BYTES_MAX = 64 * 1024 * 1024
CONNECTION = "mock.connection"
"""ASGI extension: the `BreakableProtocol` that carries the exchange."""
JSON = b"application/json"
OCTETS = b"application/octet-stream"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class BreakableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, which lets an exchange write chunks itself and break its connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]

    def reset(self) -> None:
        """Answer with TCP's RST; what was not sent is dropped."""
        linger = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def cut(self) -> None:
        """Close in good order, mid-answer or not."""
        self.transport.close()

    def write_chunks(self, pieces: Sequence[bytes]) -> bool:
        """Send each piece as one chunk; False when the client is behind and `drained` should be awaited."""
        if not self.transport.is_closing():
            chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
            self.transport.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        return not self.flow.write_paused

    async def drained(self) -> None:
        await self.flow.drain()


class BodyTooLarge(Exception):
    """The request body is over `BODY_BYTES_MAX`."""


class ClientLeft(Exception):
    """The client left before its request was complete."""


class Exchange:
    """One request and its answer.  `gzip` compresses whatever is answered from then on."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, request_id_header: bool = False
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        self.request_id = self.header(b"x-request-id")
        self.gzip = False
        self._query: bytes = scope.get("query_string", b"")
        self._shows_request_id = request_id_header
        self._connection: BreakableProtocol | None = (scope.get("extensions") or {}).get(CONNECTION)
        self._receive = receive
        self._send = send
        self._deflate: Any = None

    def header(self, name: bytes) -> str:
        """The first header of that lower-case name, or an empty string."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    def query(self, name: str) -> list[str]:
        """The values of a query parameter."""
        return parse_qs(self._query.decode("latin-1")).get(name, [])

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

    def check_json(self) -> None:
        """Raises Refusal unless the body is announced as JSON, which vLLM asks of every body that it reads."""
        check_media_type(self.header(b"content-type"))

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

    async def preflight(self, status: int, headers: Headers, text: bytes) -> None:
        """The answer of a CORS middleware, which names its own `vary`."""
        length = (b"content-length", str(len(text)).encode())
        headers = [*headers, length, (b"content-type", b"text/plain; charset=utf-8"), *self._request_ids()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": text, "more_body": False})

    async def start_stream(self, content_type: bytes = EVENT_STREAM, extra: Headers | None = None) -> None:
        if self.gzip:
            self._deflate = zlib.compressobj(wbits=31)
        await self._start(200, content_type, [*(extra or [])])

    async def start_promising(self, content_type: bytes, length: int) -> None:
        """Headers that promise more bytes than will come."""
        await self._start(200, content_type, [(b"content-length", str(length).encode())])

    async def write(self, data: bytes) -> None:
        """A part of an answer that has a length."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def push(self, events: Sequence[bytes]) -> bool:
        """Send each event as one chunk; False when the client is behind and `drained` is to be awaited."""
        if self._deflate is not None:
            events = [self._deflate.compress(one) + self._deflate.flush(zlib.Z_SYNC_FLUSH) for one in events]
        return self._connected().write_chunks(events)

    async def drained(self) -> None:
        """Returns when the client has taken enough of what was sent."""
        await self._connected().drained()

    def interject(self, data: bytes) -> None:
        """A chunk between events; left out while the client is behind."""
        connection = self._connected()
        if self._deflate is None and not connection.flow.write_paused:
            connection.write_chunks([data])

    async def end(self) -> None:
        rest = b"" if self._deflate is None else self._deflate.flush()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    def reset(self) -> None:
        """Break the connection off."""
        self._connected().reset()

    def cut(self) -> None:
        """Close the connection in good order, mid-answer or not."""
        self._connected().cut()

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

    def _connected(self) -> BreakableProtocol:
        """Raises ConnectionResetError under a server that speaks another protocol."""
        if self._connection is None:
            raise ConnectionResetError("streams need a BreakableProtocol")
        return self._connection

    async def _start(self, status: int, content_type: bytes, headers: Headers) -> None:
        if content_type:
            headers.append((b"content-type", content_type))
        if self.gzip:
            headers.append((b"content-encoding", b"gzip"))
        headers += [(b"vary", b"Origin"), *self._request_ids()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _request_ids(self) -> Headers:
        if not self._shows_request_id:
            return []
        request_id = self.request_id or uuid.uuid4().hex
        return [(b"x-request-id", request_id.encode("latin-1"))]
