"""Reading a request's body within a limit of bytes and of time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from gateway.core.outcomes import Code, Refusal
from gateway.steps import Begun

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_UNUSUAL = frozenset({b"transfer-encoding", b"content-encoding"})
"""Headers that say more of a body than its length."""


class _Limit(NamedTuple):
    bytes_max: int
    setting: str


class ClientLeft(Exception):
    """The client closed the connection; nobody is there to be answered."""


class Incoming:
    """ASGI's `receive`, and whether more of the body may come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.over = False

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self.over = not message.get("more_body", False)
        return message


async def discard_body(incoming: Incoming, seconds: float, bytes_max: int) -> None:
    """Take what a client still sends although it has its refusal, within a limit of bytes and of time.

    A connection that is closed with bytes unread is reset, and a reset may overtake the answer (RFC 9112, 9.6).
    """
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not incoming.over and taken <= bytes_max:
                taken += len((await incoming()).get("body", b""))


class BodyBudget:
    """Bytes of bodies that this process holds, being read or with their calls; one for the process."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._held = 0

    def share(self) -> "BodyShare":
        return BodyShare(self)

    def take(self, count: int) -> bool:
        if self._held + count > self.bytes_max:
            return False
        self._held += count
        return True

    def give_back(self, count: int) -> None:
        self._held -= count


class BodyShare:
    """What one request holds of the budget.  Whoever opened it gives it back when the request ends."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    @property
    def bytes_max(self) -> int:
        return self._budget.bytes_max

    def take(self, count: int) -> bool:
        if not self._budget.take(count):
            return False
        self._held += count
        return True

    def give_back(self) -> None:
        if self._held:
            self._budget.give_back(self._held)
            self._held = 0


def accept_body(
    scope: Scope,
    headers: Mapping[bytes, bytes],
    body: bytes,
    limit_bytes: int,
    share: BodyShare,
    setting: str = "server.body_bytes_max",
) -> bytes | Refusal:
    """As `read_body`, of one that has come; `headers` are those of the scope by name."""
    declared = headers.get(b"content-length", b"")
    plain = len(headers) == len(scope["headers"]) and _UNUSUAL.isdisjoint(headers)
    if not (plain and declared == b"%d" % len(body) and len(body) <= limit_bytes):
        limit = _Limit(limit_bytes, setting)
        found = _declared_bytes(scope["headers"], limit)
        if isinstance(found, Refusal):
            return found
        if len(body) > limit_bytes:
            return _too_large("the request body", limit)
        if found is not None and found != len(body):
            return _not_as_declared(found, body)
    return body if share.take(len(body)) else _no_memory(share.bytes_max)


async def read_body(
    scope: Scope,
    receive: Receive,
    limit_bytes: int,
    seconds: float,
    share: BodyShare,
    setting: str = "server.body_bytes_max",
) -> bytes | Refusal:
    """The whole body, or why it is not taken; `setting` is where `limit_bytes` comes from.  Raises ClientLeft.

    A refusal may come before all was read: its answer has to close the connection, or what is left would be parsed
    as the next request.  Holds at most `limit_bytes` and one chunk, twice for a moment at the end.
    """
    limit = _Limit(limit_bytes, setting)
    declared = _declared_bytes(scope["headers"], limit)
    if isinstance(declared, Refusal):
        return declared
    collected = Begun(_collect(receive, limit, share))
    try:
        body = await _in_time(collected, seconds) if collected.suspended else collected.result
    except TimeoutError:
        return Refusal(
            Code.BODY_TIMEOUT, f"the request body did not arrive within server.body_seconds ({seconds:g} s)"
        )
    if isinstance(body, bytes) and declared is not None and len(body) != declared:
        return _not_as_declared(declared, body)
    return body


async def _in_time(collected: Begun[bytes | Refusal], seconds: float) -> bytes | Refusal:
    """A body that is here already needs no timer."""
    async with asyncio.timeout(seconds):
        return await collected.rest()


async def _collect(receive: Receive, limit: _Limit, share: BodyShare) -> bytes | Refusal:
    collected: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit.bytes_max:
            return _too_large("the request body", limit)
        if not share.take(len(chunk)):
            return _no_memory(share.bytes_max)
        if chunk:
            collected.append(chunk)
        if not message.get("more_body", False):
            return collected[0] if len(collected) == 1 else b"".join(collected)


def _declared_bytes(headers: Iterable[tuple[bytes, bytes]], limit: _Limit) -> int | Refusal | None:
    """What the headers say of the body's length, None where they leave it open."""
    lengths = set()
    chunked = False
    for name, value in headers:
        if name == b"content-length":
            lengths.add(value)
        elif name == b"transfer-encoding":
            chunked = True
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return Refusal(
                Code.UNSUPPORTED_ENCODING, "content-encoding has to be identity", "content-encoding"
            )
    if not lengths:
        return None
    length = lengths.pop()
    if lengths or chunked or not length.isdigit():
        return _invalid("content-length has to be one whole number, and alone")
    digits = length.lstrip(b"0") or b"0"
    if len(digits) > 18 or int(digits) > limit.bytes_max:
        return _too_large(
            f"a request body of {digits[:18].decode()}{'...' * (len(digits) > 18)} bytes", limit
        )
    return int(digits)


def _no_memory(bytes_max: int) -> Refusal:
    words = f"the bodies of all requests together have reached server.bodies_bytes_max ({bytes_max} bytes)"
    return Refusal(Code.CAPACITY_EXCEEDED, words, retry_ms=1_000)


def _too_large(what: str, limit: _Limit) -> Refusal:
    return Refusal(Code.BODY_TOO_LARGE, f"{what} is over {limit.setting} ({limit.bytes_max} bytes)")


def _not_as_declared(declared: int, body: bytes) -> Refusal:
    return _invalid(f"content-length is {declared}, but the body has {len(body)} bytes")


def _invalid(message: str) -> Refusal:
    return Refusal(Code.INVALID_VALUE, message, "content-length")
