"""One connection to the store.  Any error and any late reply closes it: what was sent may or may not have happened."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Never, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.events import Observer, StoreAnswered
from gateway.ledger.address import Address, Kind, Server, parse
from gateway.ledger.cluster import Cluster
from gateway.ledger.scripts import library
from gateway.ledger.sentinel import Sentinels
from gateway.ledger.wire import StoreAway, Take, Wire, connect

log = logging.getLogger(__name__)

REPLY_SECONDS = 1.0
"""A store that has not answered by then is away; commands are idempotent, so they are simply sent again."""
LISTEN_AGAIN_SECONDS = 0.25
LISTEN_PING_SECONDS = 15.0
_RUN_ID = re.compile(rb"run_id:(\w+)")


class Finder(Protocol):
    """Knows where the store of a fleet is now."""

    make_wire: type[Wire]

    async def find(self, why: str, /) -> Server:
        """`why`: what ended the last connection.  Raises StoreAway or OSError; the deadline is the caller's."""

    def watch(self, moved: Callable[[], None], /) -> Sequence["asyncio.Task[Never]"]:
        """Tasks that call `moved` when the store is somewhere else than it was found; to be cancelled."""


class _One:
    """A URL that names the server itself."""

    make_wire: type[Wire] = Wire

    def __init__(self, server: Server) -> None:
        self._server = server

    async def find(self, _why: str) -> Server:
        return self._server

    def watch(self, _moved: Callable[[], None]) -> Sequence["asyncio.Task[Never]"]:
        return ()


def finder(address: Address, key: str) -> Finder:
    """`key`: any name with the fleet's hash tag."""
    match address.kind:
        case Kind.SENTINEL:
            return Sentinels(address)
        case Kind.CLUSTER:
            return Cluster(address, key)
        case Kind.STORE:
            return _One(address.servers[0])


def new_client(url: str, key: str = "") -> redis.asyncio.Redis:
    """`key`: any name with the fleet's hash tag; in a cluster it says which node is meant.  Raises ValueError.

    redis-py's own retries are off: they would run a script twice behind the batch numbers.
    Its socket time-out is off too: every command has our own deadline, and a subscription waits for ever.
    """
    address = parse(url)
    scheme, options = _reach(address, key)
    return redis.asyncio.Redis.from_url(
        f"{scheme}://",
        username=address.username or None,
        password=address.password or None,
        db=address.database,
        single_connection_client=True,
        socket_timeout=None,
        socket_connect_timeout=REPLY_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
        **options,
    )


def _reach(address: Address, key: str) -> tuple[str, dict[str, Any]]:
    """redis-py's scheme and options for it."""
    if address.kind is not Kind.STORE:
        return "redis", {"connection_class": _FoundConnection, "finder": finder(address, key)}
    server = address.servers[0]
    if server.path:
        return "unix", {"path": server.path}
    where = {"host": server.host, "port": server.port}
    if not address.tls:
        return "redis", where
    # The name was not checked by default before redis-py 6.0.
    return "rediss", {**where, "ssl_ca_certs": address.ca_file or None, "ssl_check_hostname": True}


class _FoundConnection(redis.asyncio.Connection):
    """Asks where the store is at each connect."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        super().__init__(**options)
        self._finder = finder

    async def connect(self) -> None:
        """Raises StoreAway beside redis-py's own errors."""
        if not self.is_connected:
            async with asyncio.timeout(REPLY_SECONDS):
                server = await self._finder.find("")
            self.host, self.port = server.host, server.port
        await super().connect()  # type: ignore[no-untyped-call]


async def close_client(client: redis.asyncio.Redis) -> None:
    """Never raises: nobody is left to care."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(REPLY_SECONDS):
            await client.aclose()


class _Ears(Wire):
    """A subscribed connection: what is published arrives between the replies."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self._heard = heard

    def _hand_over(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == b"message":
            self._heard()
        else:
            super()._hand_over(reply)


async def listen(url: str, channel: str, heard: Callable[[], None]) -> None:
    """Call `heard` for each message, once the subscription stands, and when it breaks off; until cancelled.

    A store that ends closes this connection, so an idle process learns of it at once and not at its next heartbeat.
    In a cluster the subscription may stay where it is when the slot moves: PUBLISH goes to all nodes.
    """
    address = parse(url)
    found = finder(address, channel)
    while True:
        try:
            await _follow(address, found, channel, heard)
        except (StoreAway, OSError, TimeoutError):
            heard()
        except Exception:
            log.exception("the subscription to %s failed", channel)
        await asyncio.sleep(LISTEN_AGAIN_SECONDS)


async def _follow(address: Address, found: Finder, channel: str, heard: Callable[[], None]) -> Never:
    """Raises when the connection breaks off.

    It is tried now and then, for nothing tells one who only listens that the way is gone.
    """
    async with asyncio.timeout(REPLY_SECONDS):
        wire = await connect(address, await found.find(""), lambda: _Ears(heard))
    try:
        async with asyncio.timeout(REPLY_SECONDS):
            await wire.submit(("SUBSCRIBE", channel))
        heard()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LISTEN_PING_SECONDS):
                    await wire.ended()
            async with asyncio.timeout(REPLY_SECONDS):
                await wire.submit(("PING",))
    finally:
        wire.end("closed by this side")


class Connection:
    """Used by one task at a time, but for `evaluate` itself, which only sends."""

    def __init__(
        self, url: str, keys: Sequence[str], observer: Observer, reply_seconds: float = REPLY_SECONDS
    ) -> None:
        """`keys`: what the scripts work on; one hash tag, which in a cluster says which node is meant."""
        self.run_id = ""
        """Of the server process at the other end; another one than before may have lost its data."""
        self._address = parse(url)
        self._keys = keys
        self._finder = finder(self._address, self._keys[0])
        self._watching: Sequence[asyncio.Task[Never]] = ()
        self._observer = observer
        self._reply_seconds = reply_seconds
        self._wire = Wire()

    async def open(self) -> None:
        """Find the store, connect, load the scripts and learn the run id.  Raises StoreAway."""
        self.close()
        try:
            async with asyncio.timeout(self._reply_seconds):
                info = await self._connect()
        except StoreAway:
            self.close()
            raise
        except (OSError, TimeoutError) as failure:
            self.close()
            raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
        self.run_id = _RUN_ID.findall(info)[0].decode()
        self._watching = self._finder.watch(lambda: self._wire.end("the primary is another server now"))

    async def _connect(self) -> bytes:
        """In one round trip where the library is loaded; the answer is what it says of itself."""
        server = await self._finder.find(self._wire.why)
        wire = self._wire = await connect(self._address, server, self._finder.make_wire)
        listed = wire.submit(("FUNCTION", "LIST", "LIBRARYNAME", library().name))
        info = await wire.submit(("INFO", "server", "replication"))
        if b"role:master" not in info:
            raise StoreAway("it is a replica")
        if not await listed:
            # Another gateway may have been quicker; replacing a library by the same one changes nothing.
            await wire.submit(("FUNCTION", "LOAD", "REPLACE", library().text))
        return bytes(info)

    def close(self) -> None:
        self._wire.end("closed by this side")
        for task in self._watching:
            task.cancel()
        self._watching = ()

    def evaluate(self, script: str, *arguments: Any, take: Take | None = None) -> Awaitable[Any]:
        """Run a script on the keys; it is sent before this returns.

        `take` gets the reply as it arrives, its result is what the caller awaits.  Raises StoreAway when awaited.
        """
        command = ("FCALL", library().function(script), len(self._keys), *self._keys, *arguments)
        loop, wire, started = asyncio.get_running_loop(), self._wire, time.monotonic()
        late = loop.call_later(self._reply_seconds, wire.end, f"no reply within {self._reply_seconds:g} s")

        def taken(reply: Any) -> Any:
            late.cancel()
            self._observer(StoreAnswered((time.monotonic() - started) * 1000))
            return take(reply) if take else reply

        answer = wire.submit(command, taken)
        answer.add_done_callback(lambda _: late.cancel())
        return answer
