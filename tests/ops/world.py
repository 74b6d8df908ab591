"""A fleet whose store moves: its gateways, and calls in flight meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

from gateway.ledger.api import Grant
from tests.integration.ledger_world import Member, World, eventually, world
from tests.ops.servers import Node

MOVE_SECONDS = 30.0
"""For a failover, with the sentinels' own patience."""
LIMIT = 100


T = TypeVar("T")


@asynccontextmanager
async def beside(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """What takes its time to start and to stop, while the loop serves."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def look_into(w: World, node: Node) -> None:
    """What the world says of the books is from this server now."""
    w.store.close()
    w.store = node.client


@asynccontextmanager
async def fleet(node: Node, *limits: int, lease_ms: int = 3000) -> AsyncIterator[World]:
    """Its store is on that server for now.  Gateways join with the URL that is to be tested."""
    async with world(str(node.store.socket), *limits, lease_ms=lease_ms, heartbeat_ms=200) as w:
        look_into(w, node)
        yield w


class Traffic:
    """Short calls of one gateway, one after the other; refusals are tried again after a moment."""

    def __init__(self, member: Member, blocks: int = 1) -> None:
        self._member = member
        self._blocks = blocks
        self.granted_at: list[float] = []
        """By the loop's clock, when each call got its place."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            ask = self._member.open(self._blocks)
            try:
                if isinstance(await ask.granted(), Grant):
                    self.granted_at.append(now())
                await asyncio.sleep(0.005)
            finally:
                ask.settle(None, None)

    async def more(self, count: int = 3) -> None:
        """So many new grants from now on."""
        wanted = len(self.granted_at) + count
        await eventually(lambda: len(self.granted_at) >= wanted, MOVE_SECONDS)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled()


@asynccontextmanager
async def traffic(*members: Member) -> AsyncIterator[list[Traffic]]:
    running = [Traffic(member) for member in members]
    try:
        yield running
    finally:
        for each in running:
            await each.stop()


async def all_ready(*members: Member, still: Callable[[], bool] = lambda: True) -> None:
    await eventually(lambda: still() and all(m.ledger.ready for m in members), MOVE_SECONDS)


def is_quiet(w: World, *members: Member) -> bool:
    """Nothing is held in the store and nothing is in flight here."""
    return w.empty() and not any(m.ledger.inflight for m in members)
