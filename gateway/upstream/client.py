"""The upstream on aiohttp.

aiohttp because one more call costs it 0.1 ms however many streams are open, where httpx needs 9 ms at 2,400
streams and its bounded pool does not recover from a wave of cancelled calls.
"""

import asyncio
import io
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from gateway.core.headers import answer_headers
from gateway.upstream.api import Receiver, Upstream, UpstreamFailed, UpstreamRequest

READ_BYTES = 65_536
"""Above twice this many unread bytes of an answer its socket is not read."""

HEADER_BYTES_MAX = 16_384
"""The longest status line, header name or value of an answer."""

HEADERS_MAX = 100
"""The most headers of an answer."""

KEEPALIVE_SECONDS = 4.0
"""Below the 5 s of uvicorn, which serves vLLM: a call must not start on a connection just being closed."""

DNS_SECONDS = 10
"""How long an address is remembered; a rescheduled pod is found again within it."""

_WHOLE_BODY_BYTES_MAX = 1_048_576

_DETAIL_CHARS_MAX = 200

_CODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
"""Content codings that aiohttp decodes, or refuses itself where the decoder is not installed."""

_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

_BROKEN = (aiohttp.ClientError, HttpProcessingError, OSError)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """How long an engine may take for each part of an answer; all in seconds."""

    connect_seconds: float = 2
    """Address look-up, TCP and TLS together."""
    headers_seconds: float = 120
    """From sending the request to the answer's head."""
    first_event_seconds: float = 120
    """From the head of a stream to its first data event; comments do not count."""
    idle_seconds: float = 60
    """Between two pieces of a body."""


class _Attempt:
    """One request on its way out, as tracing sees it."""

    __slots__ = ("deadline", "headers_seconds", "sent")

    def __init__(self, headers_seconds: float) -> None:
        self.sent = False
        """From here on the engine may know of the call."""
        self.deadline = asyncio.timeout(None)
        """For the head; it runs from the sending."""
        self.headers_seconds = headers_seconds


class _Answer(aiohttp.ClientResponse):
    """A response whose `close` drops what is still unsent; the parent's would first flush the request body."""

    def close(self) -> None:
        connection = self.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        super().close()


class AiohttpUpstream(Upstream):
    """One pool of keep-alive connections to all engines.

    Connections are not limited here: admission bounds the calls, and so the connections.  A call is sent
    once: aiohttp repeats only idempotent methods, and whether to try elsewhere is the caller's decision.  The
    proxy settings of the environment and cookies are ignored; a redirect is a failure.
    """

    def __init__(self, limits: UpstreamLimits, *, ca_file: str | None = None) -> None:
        """`ca_file` holds PEM certificates, None trusts the system's; OSError or ssl.SSLError if unreadable."""
        self._limits = limits
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file is not None else None
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def exchange(self, request: UpstreamRequest, receiver: Receiver) -> None:
        """See the protocol.  While the receiver is suspended no limit runs: it bounds its own waits."""
        answer = await self._send(request)
        try:
            _check_head(answer)
            with _reader_told_of_bad_framing(answer):
                await receiver.head(answer.status, answer_headers(answer.raw_headers))
                await self._relay(answer, receiver)
        finally:
            answer.close()

    async def close(self) -> None:
        """Close every connection; calls still running fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(self, request: UpstreamRequest) -> aiohttp.ClientResponse:
        """Send the request and wait for the head of its answer."""
        if self._closed:
            raise UpstreamFailed("the upstream client is closed", connecting=True)
        attempt = _Attempt(self._limits.headers_seconds)
        try:
            async with attempt.deadline:
                return await self._open_session().post(
                    URL(request.url + request.path, encoded=True),
                    data=_sendable(request.body),
                    headers=[
                        (name.decode("ascii"), value.decode("ascii")) for name, value in request.headers
                    ],
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                )
        except TimeoutError as error:
            raise self._too_slow(attempt) from error
        except _BROKEN as error:
            raise UpstreamFailed(_words(error), connecting=not attempt.sent) from error

    def _too_slow(self, attempt: _Attempt) -> UpstreamFailed:
        if attempt.sent:
            return UpstreamFailed(f"no answer within {self._limits.headers_seconds:g} s", timed_out=True)
        detail = f"no connection within {self._limits.connect_seconds:g} s"
        return UpstreamFailed(detail, timed_out=True, connecting=True)

    async def _relay(self, answer: aiohttp.ClientResponse, receiver: Receiver) -> None:
        """Pass the body on, piece by piece, to its proper end."""
        limits = self._limits
        now = asyncio.get_running_loop().time
        streams = answer.content_type == "text/event-stream"
        first_event_due = now() + limits.first_event_seconds
        no_first_event = f"no first event within {limits.first_event_seconds:g} s"
        idle = f"nothing for {limits.idle_seconds:g} s"
        while True:
            if streams and not receiver.started:
                data = await _read(answer.content, first_event_due, no_first_event)
            else:
                data = await _read(answer.content, now() + limits.idle_seconds, idle)
            if not data:
                return
            await receiver.body(data)

    def _open_session(self) -> aiohttp.ClientSession:
        """The session, made by the first call because it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    ttl_dns_cache=DNS_SECONDS,
                    keepalive_timeout=KEEPALIVE_SECONDS,
                    ssl=self._tls if self._tls is not None else True,
                ),
                response_class=_Answer,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_seconds),
                read_bufsize=READ_BYTES,
                skip_auto_headers=_AUTO_HEADERS,
                max_line_size=HEADER_BYTES_MAX,
                max_field_size=HEADER_BYTES_MAX,
                max_headers=HEADERS_MAX,
                trace_configs=[_tracing()],
            )
        return self._session


def _tracing() -> aiohttp.TraceConfig:
    config = aiohttp.TraceConfig()
    config.on_request_headers_sent.append(_note_sent)
    return config


async def _note_sent(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    attempt: _Attempt = context.trace_request_ctx
    attempt.sent = True
    attempt.deadline.reschedule(asyncio.get_running_loop().time() + attempt.headers_seconds)


def _sendable(body: bytes) -> bytes | io.BytesIO:
    """A large body is written in pieces: aiohttp warns that one write of it would hold the event loop."""
    return body if len(body) <= _WHOLE_BODY_BYTES_MAX else io.BytesIO(body)


def _check_head(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 200 or 300 <= answer.status < 400:
        raise UpstreamFailed(f"unexpected status {answer.status}")
    coding = answer.headers.get("Content-Encoding", "").strip().lower()
    if coding not in _CODINGS:
        raise UpstreamFailed("the answer has an unknown content encoding")


async def _read(content: aiohttp.StreamReader, due: float, late: str) -> bytes:
    """The next bytes of a body, empty at its end; `due` is a time of the loop's clock."""
    try:
        async with asyncio.timeout_at(due):
            return await content.readany()
    except TimeoutError as error:
        raise UpstreamFailed(late, timed_out=True) from error
    except (*_BROKEN, RuntimeError) as error:
        raise UpstreamFailed(_words(error)) from error


@contextmanager
def _reader_told_of_bad_framing(answer: aiohttp.ClientResponse) -> Iterator[None]:
    """aiohttp tells of a malformed chunk the connection alone: whoever reads the body would wait for its idle limit."""
    connection = answer.connection
    protocol = connection.protocol if connection is not None else None
    if protocol is None:
        yield
        return

    def tell(_: object = None) -> None:
        error = protocol.exception()
        if isinstance(error, HttpProcessingError) and not answer.content.is_eof():
            answer.content.set_exception(error)

    closed = protocol.closed
    if closed is None:
        tell()
        yield
        return
    closed.add_done_callback(tell)
    try:
        yield
    finally:
        closed.remove_done_callback(tell)
        closed.remove_done_callback(_retrieve)  # the connection may serve many calls, and one is enough
        closed.add_done_callback(_retrieve)


def _retrieve(closed: "asyncio.Future[None]") -> None:
    """An idle connection that is reset is nobody's failure; without this the loop would log it as one."""
    if not closed.cancelled():
        closed.exception()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_DETAIL_CHARS_MAX]
