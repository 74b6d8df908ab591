"""RESP over one socket: a command leaves at once, its reply is handed over where it arrives.

redis-py's grammar of URLs is used, and its client by the command line.  Through its streams, locks and time-outs a
reply takes three turns of the event loop more, and under load a turn lasts a millisecond; making one of its clients
takes several.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import hiredis

from gateway.ledger.address import Address, Server

Command = tuple[str | bytes | int, ...]
Take = Callable[[Any], Any]
Asked = TypeVar("Asked")

SURVEY_SECONDS = 0.1
"""How long the answer of every server is waited for; after that the first one has to do."""


class StoreAway(Exception):
    """The store refused, broke off or was late."""


class Wire(asyncio.Protocol):
    """Commands and replies in order.  The first error, of the store too, ends it and everything that waits."""

    def __init__(self) -> None:
        self._replies = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[Any], Take | None]] = deque()
        self._transport: asyncio.Transport | None = None
        self._end: StoreAway | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_reading = False

    def submit(self, command: Command, take: Take | None = None) -> asyncio.Future[Any]:
        """The reply, or what `take` makes of it in the socket's own callback.  Raises StoreAway when awaited."""
        answer = asyncio.get_running_loop().create_future()
        if self._transport is None or self._end:
            _fail(answer, self._end or StoreAway("not connected"))
            return answer
        self._send(self._transport, command, answer, take)
        return answer

    def _send(
        self,
        transport: asyncio.Transport,
        command: Command,
        answer: asyncio.Future[Any],
        take: Take | None,
    ) -> None:
        self._waiting.append((answer, take))
        transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub has a tuple of one

    @property
    def why(self) -> str:
        """What ended it; nothing before that."""
        return str(self._end) if self._end else ""

    async def ended(self) -> None:
        """Return when it has ended.  One task at a time."""
        if self._end:
            return
        self._ended = asyncio.get_running_loop().create_future()
        await self._ended

    def end(self, why: str) -> None:
        """Close at once; nothing that was sent is waited for any more."""
        if self._end:
            return
        self._end = StoreAway(why)
        if self._transport and self._is_reading:
            # uvloop's TLS writes once more when its reader returns, and tells the loop of a closed transport.
            asyncio.get_running_loop().call_soon(self._transport.abort)
        elif self._transport:
            self._transport.abort()
        if self._ended and not self._ended.done():
            self._ended.set_result(None)
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                _fail(answer, self._end)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._is_reading = True
        try:
            self._replies.feed(data)
            while not self._end and (reply := self._replies.gets()) is not False:
                self._hand_over(reply)
        except hiredis.ProtocolError as error:
            self.end(f"ProtocolError: {error}")
        finally:
            self._is_reading = False

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


async def connect(address: Address, server: Server | None = None, make: Callable[[], Wire] = Wire) -> Wire:
    """Connect and log in, to the address's only server where none is named.

    Raises StoreAway or OSError; the deadline is the caller's.
    """
    wire = await _open(address, server or address.servers[0], make)
    try:
        for command in _greeting(address):
            await wire.submit(command)
    except BaseException:
        wire.end("not logged in")
        raise
    return wire


async def _open(address: Address, server: Server, make: Callable[[], Wire]) -> Wire:
    loop = asyncio.get_running_loop()
    if server.path:
        _, wire = await loop.create_unix_connection(make, server.path)
        return wire
    tls = ssl.create_default_context(cafile=address.ca_file or None) if address.tls else None
    _, wire = await loop.create_connection(make, server.host, server.port, ssl=tls)
    return wire


def _greeting(address: Address) -> list[Command]:
    commands: list[Command] = []
    if address.password:
        user = (address.username,) if address.username else ()
        commands.append(("AUTH", *user, address.password))
    if address.database:
        commands.append(("SELECT", address.database))
    return commands


async def survey(servers: Sequence[Server], ask: Callable[[Server], Awaitable[Asked]]) -> list[Asked]:
    """What the servers answer, asked all at once: one that does not answer delays the others by SURVEY_SECONDS.

    Raises StoreAway when none answers; the deadline is the caller's.
    """
    tasks = [asyncio.ensure_future(ask(server)) for server in servers]
    try:
        _, late = await asyncio.wait(tasks, timeout=SURVEY_SECONDS)
        while late and not _answers(tasks):
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        if answers := _answers(tasks):
            return answers
        raise StoreAway("; ".join(_told(*pair) for pair in zip(servers, tasks, strict=True)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _answers(tasks: Sequence[asyncio.Future[Asked]]) -> list[Asked]:
    """Of those that are done; their failures count as heard."""
    return [task.result() for task in tasks if task.done() and not task.exception()]


def _told(server: Server, task: asyncio.Future[Asked]) -> str:
    failure = task.exception()
    return f"{server}: {failure if isinstance(failure, StoreAway) else repr(failure)}"
