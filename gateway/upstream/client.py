"""The upstream client: HTTP/1.1 to engines on httptools, with a pool of kept connections.

Its own, because it is the path of every token: passing an event on costs a general client several times what it costs
here (`exchange.py`), and one more call costs httpx 9 ms when 2,400 streams are open.
"""

import asyncio
import ssl
import time
from functools import cached_property, lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.deadline import Deadline
from gateway.upstream.api import Receiver, Upstream, UpstreamFailed, UpstreamRequest
from gateway.upstream.arrivals import Arrivals
from gateway.upstream.exchange import Exchange
from gateway.upstream.limits import IDLE_CONNECTIONS_MAX, KEEPALIVE_SECONDS, UpstreamLimits

STALE_SECONDS = 0.05
"""A kept connection that is closed this soon after a request, without a byte, was most likely being closed already: the
request is sent once more.  An engine that had begun with it ends it with its connection."""
_ONE_WRITE_BYTES_MAX = 65_536
"""A smaller body goes out with its head; a larger one is not copied."""


class Origin(NamedTuple):
    """Where an engine's base URL points."""

    tls: bool
    host: str
    port: int
    authority: bytes
    """The Host header."""
    path: str
    """Prefix of every path, without a slash at its end."""


_Door = tuple[Origin, ssl.SSLContext | None]
"""A connection is kept for those who would open one in the same way."""


def tls_context(
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
) -> ssl.SSLContext:
    """For connections to engines.  All files are PEM.

    `ca_file`: whom to trust, None = the system's authorities.  `cert_file`: with what to prove who we are, and its key
    where that is in no file of its own.  Raises OSError where one cannot be read or used.
    """
    context = ssl.create_default_context(cafile=ca_file)
    if cert_file:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    return context


def _no_password() -> str:
    """A key that needs one is refused, where a terminal would be asked."""
    return ""


class EngineConnection(asyncio.Protocol):
    """One connection, used by one exchange at a time."""

    __slots__ = ("_arrivals", "_deadline", "_exchange", "_idle", "_transport", "stale", "waiting")

    def __init__(self, idle: "dict[EngineConnection, None]", arrivals: Arrivals) -> None:
        self._idle = idle
        """The kept connections to the same engine."""
        self._arrivals = arrivals
        self.waiting = 0
        """Reads that have not come to the exchange yet."""
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._deadline = Deadline(asyncio.get_running_loop(), self._on_late)
        self.stale = False
        """The last request met a connection that the engine was, most likely, already closing."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(
        self, head: bytes, request: UpstreamRequest, receiver: Receiver, limits: UpstreamLimits
    ) -> None:
        """Send, and pass the answer on.  The connection is kept when it is fit for another call, else closed."""
        assert self._transport is not None
        exchange = self._exchange = Exchange(self._transport, receiver, limits, self._deadline)
        sent_at = time.monotonic()
        try:
            if len(request.body) <= _ONE_WRITE_BYTES_MAX:
                self._transport.write(head + request.body)
            else:
                self._transport.write(head)
                self._transport.write(request.body)
            await exchange.finish()
        finally:
            self._exchange = None
            self.stale = exchange.unheard and time.monotonic() - sent_at < STALE_SECONDS
            fit = exchange.reusable and self.usable and not self.waiting and not request.alone
            if fit and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._keep()
            else:
                self.abort()

    def abort(self) -> None:
        """Close at once; what is still unsent is dropped, and so is the engine's work."""
        self._deadline.close()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        arrivals, exchange = self._arrivals, self._exchange
        if arrivals.left > 1 and exchange is not None:
            arrivals.left -= 1
            exchange.feed(data)
        else:
            arrivals.add(self, data)

    def take(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.feed(data)
        else:
            self._drop()  # an answer that nobody asked for: whose is it?

    def eof_received(self) -> None:
        """The engine sends no more.  Returning None closes our side too."""
        self._arrivals.flush(self)
        if self._exchange is not None:
            self._exchange.lost(None)
        else:
            self._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrivals.flush(self)
        if self._exchange is not None:
            self._exchange.lost(exc)
        self._drop()

    def _keep(self) -> None:
        self._idle[self] = None
        self._deadline.set(KEEPALIVE_SECONDS)

    def _on_late(self) -> None:
        if self._exchange is not None:
            self._exchange.late()
        else:
            self._drop()

    def _drop(self) -> None:
        self._idle.pop(self, None)
        self.abort()


class EngineClient(Upstream):
    """Implements `Upstream`.

    Connections are not limited here: admission bounds the calls, and so the connections.  A call is sent once, again
    only where a kept connection was being closed as it left; to try elsewhere is the caller's decision.  The proxy
    settings of the environment and cookies are ignored; a redirect is a failure.
    """

    def __init__(self, limits: UpstreamLimits) -> None:
        self._limits = limits
        self._idle: dict[_Door, dict[EngineConnection, None]] = {}
        self._busy: set[EngineConnection] = set()
        self._arrivals = Arrivals()
        self._closed = False

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """For requests that bring none: it takes 8 ms, and few clients have such."""
        return tls_context()

    async def exchange(self, request: UpstreamRequest, receiver: Receiver) -> None:
        """See the protocol.  While the receiver is suspended no limit runs: it bounds its own waits."""
        if self._closed:
            raise UpstreamFailed("the upstream client is closed", connecting=True)
        origin = _origin(request.url)
        door = origin, (request.tls or self._tls) if origin.tls else None
        kept = None if request.alone else self._kept(door)
        if kept is not None:
            try:
                return await self._exchange(kept, origin, request, receiver)
            except UpstreamFailed:
                if not kept.stale:
                    raise
        await self._exchange(await self._connect(door), origin, request, receiver)

    async def _exchange(
        self, connection: EngineConnection, origin: Origin, request: UpstreamRequest, receiver: Receiver
    ) -> None:
        self._busy.add(connection)
        try:
            await connection.exchange(_head(origin, request), request, receiver, self._limits)
        finally:
            self._busy.discard(connection)

    async def close(self) -> None:
        """Close every connection; calls still running fail."""
        self._closed = True
        for connection in [*self._busy, *(kept for idle in self._idle.values() for kept in idle)]:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    def _kept(self, door: _Door) -> EngineConnection | None:
        """The one that was used last."""
        idle = self._idle.setdefault(door, {})
        while idle:
            connection, _ = idle.popitem()
            if connection.usable:
                return connection
        return None

    async def _connect(self, door: _Door) -> EngineConnection:
        idle, (origin, tls) = self._idle.setdefault(door, {}), door
        seconds = self._limits.connect_seconds
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(idle, self._arrivals),
                    origin.host,
                    origin.port,
                    ssl=tls,
                )
        except TimeoutError as error:
            detail = f"no connection within {seconds:g} s"
            raise UpstreamFailed(detail, timed_out=True, connecting=True) from error
        except (OSError, UnicodeError) as error:
            raise UpstreamFailed(f"{type(error).__name__}: {error}"[:200], connecting=True) from error
        if self._closed:
            connection.abort()
            raise UpstreamFailed("the upstream client is closed", connecting=True)
        if not connection.usable:
            raise UpstreamFailed("the connection was closed at once", connecting=True)
        return connection


@lru_cache(maxsize=1024)
def _origin(url: str) -> Origin:
    """Raises UpstreamFailed for a URL that names no host or port; configuration refuses those."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if tls else 80)
    except ValueError as error:
        raise UpstreamFailed(f"{url}: {error}", connecting=True) from error
    if not parts.hostname:
        raise UpstreamFailed(f"{url} names no host", connecting=True)
    authority = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
    return Origin(tls, parts.hostname, port, authority, parts.path.rstrip("/"))


def _head(origin: Origin, request: UpstreamRequest) -> bytes:
    lines = [_first_lines(origin, request.method, request.path)]
    lines += [b"%b: %b\r\n" % header for header in request.headers]
    if request.body or request.method == "POST":
        lines.append(b"content-length: %d\r\n" % len(request.body))
    lines.append(b"\r\n")
    return b"".join(lines)


@lru_cache(maxsize=256)
def _first_lines(origin: Origin, method: str, path: str) -> bytes:
    target = f"{method} {origin.path}{path} HTTP/1.1\r\n"
    return b"%bhost: %b\r\n" % (target.encode("ascii"), origin.authority)
