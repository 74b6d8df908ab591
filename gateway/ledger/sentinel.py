"""The primary that sentinels name: asked at each connect, and watched while a connection stands.

Sentinels disagree while a failover spreads, and one that is cut off with an old primary never hears of it, so they are
all asked and the answer of the highest configuration epoch counts: every failover raises it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Never

from gateway.ledger.address import Address, Server
from gateway.ledger.wire import StoreAway, Wire, connect, survey

WATCH_SECONDS = 15.0
"""After that a sentinel is asked anew, so one that went without a word is missed no longer."""
WATCH_AGAIN_SECONDS = 1.0
ASK_SECONDS = 1.0
"""For one sentinel's answer, while a connection stands."""


@dataclass(frozen=True, slots=True)
class Primary:
    epoch: int
    server: Server


class Sentinels:
    """Finds the primary of one name."""

    make_wire: type[Wire] = Wire

    def __init__(self, address: Address) -> None:
        self._servers = address.servers
        self._name = address.primary
        self._login = replace(address, database=0)
        self._known: Primary | None = None

    async def find(self, _why: str) -> Server:
        """Raises StoreAway; the deadline is the caller's."""
        found = await survey(self._servers, self._ask)
        self._known = max(found, key=lambda primary: primary.epoch)
        return self._known.server

    def watch(self, moved: Callable[[], None]) -> Sequence["asyncio.Task[Never]"]:
        """Tasks that call `moved` when a sentinel names another primary than `find` last did; to be cancelled."""
        return [asyncio.create_task(self._watch(server, moved)) for server in self._servers]

    async def _watch(self, sentinel: Server, moved: Callable[[], None]) -> Never:
        while True:
            with contextlib.suppress(StoreAway, OSError, TimeoutError):
                await self._follow(sentinel, moved)
            await asyncio.sleep(WATCH_AGAIN_SECONDS)

    async def _follow(self, sentinel: Server, moved: Callable[[], None]) -> None:
        """Asks when the subscription stands, so that no failover falls between, and again when it ends.

        A message is a reply that nobody waits for, so it ends the wire.
        """
        async with asyncio.timeout(ASK_SECONDS):
            wire = await self._connect(sentinel)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await wire.submit(("SUBSCRIBE", "+switch-master"))
                await self._compare(sentinel, moved)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await wire.ended()
        finally:
            wire.end("heard enough")
        async with asyncio.timeout(ASK_SECONDS):
            await self._compare(sentinel, moved)

    async def _compare(self, sentinel: Server, moved: Callable[[], None]) -> None:
        said, known = await self._ask(sentinel), self._known
        if known and said.epoch > known.epoch and said.server != known.server:
            moved()

    async def _ask(self, sentinel: Server) -> Primary:
        """The address is the new one from the moment of its promotion, the record only at the failover's end."""
        wire = await self._connect(sentinel)
        try:
            address = wire.submit(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name))
            record = wire.submit(("SENTINEL", "MASTER", self._name))
            if not (named := await address):
                raise StoreAway(f"no primary of the name {self._name}")
            fields = await record
        finally:
            wire.end("answered")
        try:
            epoch = dict(zip(fields[::2], fields[1::2], strict=True))[b"config-epoch"]
            return Primary(int(epoch), Server(named[0].decode(), int(named[1])))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as failure:
            raise StoreAway(f"{sentinel} does not answer as a sentinel") from failure

    async def _connect(self, sentinel: Server) -> Wire:
        """The URL's user and password are the store's; a sentinel gets them where it asks for some."""
        wire = await connect(replace(self._login, password=""), sentinel)
        try:
            await wire.submit(("PING",))
        except BaseException as refusal:
            wire.end("not logged in")
            if "NOAUTH" not in str(refusal) or not self._login.password:
                raise
            return await connect(self._login, sentinel)
        return wire
