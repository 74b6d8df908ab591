"""The books of the fleet `demo` in a real store, looked at again and again while a case is played."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis

from gateway.core.invariants import Snapshot
from tests.conformance.books import assert_books_hold

ADMIT, SETTLE = b"\xa1A\xaa", b"\xa1S\xaa"
"""How these ops begin on the wire; the call's id follows."""
COMMANDS_MAX = 100_000
"""That the store remembers."""


class WatchedBooks:
    def __init__(self, path: str) -> None:
        self.reserved: set[int] = set()
        """Blocks of all replicas together, as they were ever seen; a test may clear it."""
        self._store = redis.Redis(unix_socket_path=path, protocol=2)
        self._store.config_set("slowlog-max-len", COMMANDS_MAX)
        self._store.config_set("slowlog-log-slower-than", 0)

    def read(self) -> Snapshot:
        """They violate no invariant."""
        books = assert_books_hold(self._store, "demo")
        self.reserved.add(reserved(books))
        return books

    def carried_out(self, op: bytes, id_: str) -> int:
        """How often the store has run this op."""
        commands = (entry["command"] for entry in self._store.slowlog_get(COMMANDS_MAX))
        return sum(op + id_.encode() in command for command in commands)

    async def watch(self, pause_seconds: float) -> None:
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(pause_seconds)

    def close(self) -> None:
        self._store.close()


def reserved(books: Snapshot) -> int:
    return sum(replica.used for replica in books.replicas.values())


@asynccontextmanager
async def watched_books(path: str, pause_seconds: float) -> AsyncIterator[WatchedBooks]:
    """On the store at this socket, where a gateway is ready; on leaving, every look has found them whole."""
    books = WatchedBooks(path)
    watching = asyncio.create_task(books.watch(pause_seconds))
    try:
        yield books
        assert not watching.done(), watching.exception()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        books.close()
