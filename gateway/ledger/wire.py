"""RESP over one socket: a command leaves at once, its reply is handed over where it arrives.

redis-py does what is not on a call's way (subscriptions, reading state).  Through its streams, locks and time-outs a
reply takes three turns of the event loop more, and under load a turn lasts a millisecond.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio.connection import parse_url

Command = tuple[str | bytes | int, ...]
Take = Callable[[Any], Any]


class StoreAway(Exception):
    """The store refused, broke off or was late."""


class Wire(asyncio.Protocol):
    """Commands and replies in order.  The first error, of the store too, ends it and everything that waits."""

    def __init__(self) -> None:
        self._replies = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[Any], Take | None]] = deque()
        self._transport: asyncio.Transport | None = None
        self._end: StoreAway | None = None

    def submit(self, command: Command, take: Take | None = None) -> asyncio.Future[Any]:
        """The reply, or what `take` makes of it in the socket's own callback.  Raises StoreAway when awaited."""
        answer = asyncio.get_running_loop().create_future()
        if self._transport is None or self._end:
            _fail(answer, self._end or StoreAway("not connected"))
            return answer
        self._waiting.append((answer, take))
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub has a tuple of one
        return answer

    def end(self, why: str) -> None:
        """Close at once; nothing that was sent is waited for any more."""
        if self._end:
            return
        self._end = StoreAway(why)
        if self._transport:
            self._transport.abort()
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                _fail(answer, self._end)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._replies.feed(data)
            while not self._end and (reply := self._replies.gets()) is not False:
                self._hand_over(reply)
        except hiredis.ProtocolError as error:
            self.end(f"ProtocolError: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"{type(exc).__name__}: {exc}" if exc else "it closed the connection")

    def _hand_over(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError) or not self._waiting:
            self.end(str(reply))
            return
        answer, take = self._waiting.popleft()
        if answer.done():  # nobody waits any more
            return
        try:
            answer.set_result(take(reply) if take else reply)
        except Exception as failure:
            _fail(answer, failure)


def _fail(answer: asyncio.Future[Any], failure: Exception) -> None:
    """Whoever still waits is told; that nobody may wait any more is no accident to be logged."""
    answer.set_exception(failure)
    answer.exception()


async def connect(url: str) -> Wire:
    """Connect and log in, as the URL says.  Raises StoreAway or OSError; the deadline is the caller's."""
    options = parse_url(url)
    wire = await _open(url, options)
    try:
        for command in _greeting(options):
            await wire.submit(command)
    except BaseException:
        wire.end("not logged in")
        raise
    return wire


async def _open(url: str, options: Any) -> Wire:
    loop = asyncio.get_running_loop()
    if "path" in options:
        _, wire = await loop.create_unix_connection(Wire, options["path"])
        return wire
    tls = ssl.create_default_context() if url.startswith("rediss:") else None
    _, wire = await loop.create_connection(Wire, options["host"], options.get("port", 6379), ssl=tls)
    return wire


def _greeting(options: Any) -> list[Command]:
    commands: list[Command] = []
    if options.get("password"):
        user = (options["username"],) if options.get("username") else ()
        commands.append(("AUTH", *user, options["password"]))
    if options.get("db"):
        commands.append(("SELECT", options["db"]))
    return commands
