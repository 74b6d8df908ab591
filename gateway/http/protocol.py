"""uvicorn's HTTP/1.1 with the error envelope for bytes that are no request, bounds for heads, and without upgrades.

Reading and starting a request, and writing its answer, are done again here for what they cost: one write for a head
and the first of its body, no timer for each request.
"""

import asyncio
import secrets
import string
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.core.outcomes import Code, Refusal
from gateway.deadline import Deadline
from gateway.http.errors import answer_of
from gateway.http.relay import WRITER
from gateway.upstream.api import Headers

HEAD_BYTES_MAX = 512 * 1024
"""The parser keeps a head until it is complete.  Beyond anything real, since what arrives is counted by the piece."""
HEAD_SECONDS = 10.0
"""For a head to arrive, from the connection or its own first byte."""
PIPELINED_MAX = 16
"""Requests that are read while they wait behind the answer of another.  Those after them, and more of a body than a
buffer full, are not: until that answer is complete it does not show when the client leaves.
"""
UNREAD_SECONDS = 60.0
"""A client that takes no byte of what is left of an answer for so long has left."""
NOT_HTTP = Refusal(Code.INVALID_VALUE, "what arrived on this connection is not a valid HTTP/1.1 request")
_TARGET_BYTES_MAX = 128
"""Of the targets whose parts are remembered."""
_IN_NAMES = b"!#$%&'*+-.^_`|~" + string.ascii_letters.encode() + string.digits.encode()
_IN_VALUES = bytes(byte for byte in range(256) if byte == 0x09 or (byte >= 0x20 and byte != 0x7F))
_WITHOUT_BODY = frozenset({204, 304})


class Cycle(RequestResponseCycle):
    """One request and its answer.  The head goes out with the first of the body, so an application that begins an
    answer sends some of it soon.
    """

    _head = b""
    """Not written yet."""
    _in_chunks = False
    """The head is written, and the rest goes out in chunks."""
    _on_left: Callable[[], None] | None = None
    """Who wants to know that the client has left."""
    chunk_to: Callable[[bytes], None] | None = None
    """See `Writer`.  Who changes what it depends on calls `look`: to ask for each token would cost more."""

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            # They lead back here: cycles would stay until the collector comes round.
            self.scope.pop("extensions", None)
            self._on_left = None

    def take_body(self) -> bytes | None:
        """The request's body where all of it has come; None where `receive` has to be asked."""
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.message_event.clear()
        if self.flow.read_paused:
            self.flow.resume_reading()
        return body

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Call it when the client leaves, at once where it has; None: nobody wants to know any more."""
        if on_left is not None and self.disconnected:
            on_left()
            return
        self._on_left = on_left
        if self.flow.read_paused:
            self.flow.resume_reading()

    def leave(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.look()
        self.message_event.set()
        if self._on_left is not None:
            self._on_left()

    @property
    def ready(self) -> bool:
        begun = self.response_started and not self._head
        return begun and not (self.flow.write_paused or self.disconnected or self.response_complete)

    def look(self) -> None:
        """The client has stopped to read, reads again, or has left; or the answer has begun or is complete."""
        self.chunk_to = self.transport.write if self._in_chunks and self.ready else None

    def write(self, body: bytes) -> None:
        self._write(body, more_body=True)

    async def send(self, message: Any) -> None:
        """ASGI's; suspends while the client reads too slowly.  Does nothing once it has left."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"an answer begins with http.response.start, not {message['type']}")
            self._begin(message["status"], message["headers"])
        elif not self.response_complete:
            self._write(message.get("body", b""), message.get("more_body", False))

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        if self.flow.write_paused or self.disconnected or self.response_started:
            return False
        self._begin(status, headers)
        self._write(body, more_body=False)
        return True

    def _begin(self, status: int, headers: Headers) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        headers = [*self.default_headers, *headers]
        _check(headers)
        lines: list[bytes] = []
        for name, value in headers:
            if name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
                continue
            if name == b"content-length":
                self.chunked_encoding, self.expected_content_length = False, int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if has_body and self.chunked_encoding is None and self.scope["http_version"] != "1.0":
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        self._head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))

    def _write(self, body: bytes, more_body: bool) -> None:
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more_body:
                body += b"0\r\n\r\n"
        elif self.chunked_encoding is False:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the answer is longer than its content-length")
        if head or body:
            self.transport.write(head + body if head else body)
        if not more_body:
            self._complete()
        elif head and self.chunked_encoding:
            self._in_chunks = True
            self.look()

    def _complete(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("the answer is shorter than its content-length")
        self.response_complete = True
        self.look()
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _check(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """All names, and all values, at once: what is left of them without what HTTP allows."""
    names, values = zip(*headers, strict=True)
    if b"".join(names).translate(None, _IN_NAMES) or b"".join(values).translate(None, _IN_VALUES):
        raise RuntimeError("an answer has a header that HTTP does not allow")


class ProxyProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=..., ws="none")`.

    An offer to upgrade (RFC 9110, 7.8) is ignored.  The parser takes it for the end of HTTP and would drop the body:
    Java's client offers h2c with every call.  So such a request is read once more without the offer.
    """

    _reads_head = False
    """A head is expected, or incomplete."""
    _bytes_beside = 0
    """Since a head began, or since the last byte of a body: of the head, or of a body's framing."""
    _deadline: Deadline
    """Of a head; between two requests that of the connection, and at its end that of what was not read yet."""
    _unanswered: deque[Cycle]
    """The request that is being answered, and those behind it."""
    _unread_bytes = 0
    """Of answers, when last looked at."""
    _head_began = False
    """In what is being read now."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = Deadline(self.loop, self._on_late)
        self._unanswered = deque()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        for cycle in self._unanswered:
            cycle.leave()
        self._unanswered.clear()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def _look(self) -> None:
        for cycle in self._unanswered:
            cycle.look()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade():
                self._read_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._head_began:  # whole ones, which nearly all are, need no limit of time
            self._head_began = False
            if self._reads_head:
                self._deadline.set(HEAD_SECONDS)
        self._bytes_beside += len(data)
        if self._bytes_beside > HEAD_BYTES_MAX + (0 if self._reads_head else len(data)):
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        """What comes after the head is a trailer, which nobody here reads."""
        if not self._reads_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._bytes_beside = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = self._head_began = True
        self._bytes_beside = 0

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self._offers_upgrade():
            return
        self._head_is_over()
        version = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        known = _target if len(self.url) <= _TARGET_BYTES_MAX else _target.__wrapped__
        self.scope["path"], self.scope["raw_path"], self.scope["query_string"] = known(self.url)
        self.cycle = cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.scope["extensions"] = cast(Any, {WRITER: cycle})
        self._unanswered.append(cycle)
        if len(self._unanswered) == 1:
            self._start_asgi_task(cycle, self.app)
            return
        self.pipeline.appendleft((cycle, self.app))
        if len(self._unanswered) > PIPELINED_MAX:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if (self.parser.should_upgrade() and self._offers_upgrade()) or self.cycle.response_complete:
            return
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """The next request of the connection may begin, or it waits for one for `timeout_keep_alive` seconds."""
        self.server_state.total_requests += 1
        if self._unanswered:  # none after a connection that is lost
            self._unanswered.popleft()
        if self.transport.is_closing():
            return self._close()
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._reads_head:
            self._deadline.set(self.timeout_keep_alive)

    def send_400_response(self, msg: str) -> None:
        """End the connection; bytes that follow a request whose answer has begun get no answer of their own.

        A 400 in the middle of another answer would be read as a part of it.
        """
        self._head_is_over()
        if not (self._unanswered and self._unanswered[0].response_started):
            self.transport.write(_not_http())
        self._close()

    def _close(self) -> None:
        """Once the client has read what there is for it, or has stopped to read."""
        self.transport.close()
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes:
            self._deadline.set(UNREAD_SECONDS)

    def _expect_head(self) -> None:
        """Of a new connection."""
        self._reads_head = True
        self._bytes_beside = 0
        self._deadline.set(HEAD_SECONDS)

    def _head_is_over(self) -> None:
        self._reads_head = False
        self._deadline.clear()

    def _on_late(self) -> None:
        """A head that follows an answer may take as long as that, and the client as long as it reads."""
        if self._reads_head and self._unanswered:
            return self._deadline.set(HEAD_SECONDS)
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        if self._unread_bytes and (not before or self._unread_bytes < before):
            self._deadline.set(UNREAD_SECONDS)
        elif self._unread_bytes:
            self.transport.abort()
        else:
            self.transport.close()

    def _offers_upgrade(self) -> bool:
        """CONNECT is no offer: it has no body, and would be one again."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _read_again(self, rest: bytes) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join((*lines, b"", rest)))


@lru_cache(maxsize=256)
def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, raw path and query."""
    parts = httptools.parse_url(url)
    raw_path: bytes = parts.path
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path, raw_path, parts.query or b""


def _not_http() -> bytes:
    answer = answer_of(NOT_HTTP, overload_status=429, jitter=1)
    request_id = (b"x-request-id", secrets.token_hex(16).encode())
    lines = [b"%b: %b\r\n" % header for header in (*answer.headers, request_id, (b"connection", b"close"))]
    return b"".join((STATUS_LINE[answer.status], *lines, b"\r\n", answer.body))
