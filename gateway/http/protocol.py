"""uvicorn's HTTP/1.1 with the error envelope for bytes that are no request, bounds for heads, and without upgrades."""

import asyncio
import secrets

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.core.outcomes import Code, Refusal
from gateway.http.errors import answer_of

HEAD_BYTES_MAX = 512 * 1024
"""The parser keeps a head until it is complete.  Beyond anything real, since what arrives is counted by the piece."""
HEAD_SECONDS = 10.0
"""For a head to arrive, from the connection or its own first byte."""
NOT_HTTP = Refusal(Code.INVALID_VALUE, "what arrived on this connection is not a valid HTTP/1.1 request")


class ProxyProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=..., ws="none")`.

    An offer to upgrade (RFC 9110, 7.8) is ignored.  The parser takes it for the end of HTTP and would drop the body:
    Java's client offers h2c with every call.  So such a request is read once more without the offer.
    """

    _head_timer: asyncio.TimerHandle | None = None
    """Set while a head is incomplete."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade():
                self._read_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._head_timer:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        if not self._offers_upgrade():
            self._head_is_over()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """End the connection; bytes that follow a request whose answer has begun get no answer of their own.

        A 400 in the middle of another answer would be read as a part of it.
        """
        self._head_is_over()
        if not (_is_due(self.cycle) and self.cycle.response_started):
            self.transport.write(_not_http())
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_is_over()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def _head_is_over(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        """The answer before it may take as long as it wants."""
        if _is_due(self.cycle):
            self._expect_head()
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


def _is_due(answer: RequestResponseCycle | None) -> bool:
    """A request is complete and its answer is not; None before a connection's first request."""
    return answer is not None and not answer.response_complete


def _not_http() -> bytes:
    answer = answer_of(NOT_HTTP, overload_status=429, jitter=1)
    request_id = (b"x-request-id", secrets.token_hex(16).encode())
    lines = [b"%b: %b\r\n" % header for header in (*answer.headers, request_id, (b"connection", b"close"))]
    return b"".join((STATUS_LINE[answer.status], *lines, b"\r\n", answer.body))
