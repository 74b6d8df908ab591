"""The node of a cluster that owns a fleet's slot, and a wire that waits while the slot moves.

All keys of a fleet have one hash tag, so one connection to one node is all that a fleet needs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never

import hiredis
from redis.crc import key_slot

from gateway.ledger.address import Address, Server
from gateway.ledger.wire import Command, StoreAway, Take, Wire, connect, survey

NODES_MAX = 32
"""Nodes that are asked: those of the URL, and others while there is room."""
MIGRATION_PAUSE_SECONDS = 0.02
_MIGRATING = ("TRYAGAIN ", "ASK ")


class ClusterWire(Wire):
    """A command that meets a slot on its way to another node is sent again until whoever waits ends the wire.

    A refusal of that kind comes before anything is done.  `ASK` names the other node, which could not serve it either:
    a script declares keys that do not exist, and a node that is still receiving a slot says TRYAGAIN to those.
    When all keys have arrived this node says MOVED, which ends the wire.
    """

    def __init__(self) -> None:
        super().__init__()
        self._commands: deque[Command] = deque()

    def _send(
        self, transport: asyncio.Transport, command: Command, answer: asyncio.Future[Any], take: Take | None
    ) -> None:
        self._commands.append(command)
        super()._send(transport, command, answer, take)

    def _hand_over(self, reply: Any) -> None:
        command = self._commands.popleft() if self._commands else ()
        if command and isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_MIGRATING):
            answer, take = self._waiting.popleft()
            asyncio.get_running_loop().call_later(
                MIGRATION_PAUSE_SECONDS, self._send_again, command, answer, take
            )
            return
        super()._hand_over(reply)

    def _send_again(self, command: Command, answer: asyncio.Future[Any], take: Take | None) -> None:
        if answer.done():
            return
        if self._end or self._transport is None:
            answer.set_exception(self._end or StoreAway("not connected"))
            answer.exception()
            return
        self._send(self._transport, command, answer, take)


@dataclass(frozen=True, slots=True)
class View:
    """What one node believes."""

    healthy: bool
    epoch: int
    owner: Server | None
    nodes: tuple[Server, ...]


class Cluster:
    """Finds the owner of one key's slot."""

    make_wire: type[Wire] = ClusterWire

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._slot = key_slot(key.encode())
        self._nodes = address.servers[:NODES_MAX]

    async def find(self, why: str) -> Server:
        """`why`: what ended the last connection; a node that names the slot's new owner is believed.

        Raises StoreAway; the deadline is the caller's.
        """
        if owner := self._named_in(why):
            return owner
        views = await survey(self._nodes, self._ask)
        found = max(views, key=lambda view: (view.healthy, view.epoch))
        named = dict.fromkeys((*self._address.servers, *found.nodes))
        self._nodes = tuple(named)[:NODES_MAX]
        if found.owner is None:
            raise StoreAway(f"no node of the cluster owns slot {self._slot}")
        return found.owner

    def watch(self, _moved: Callable[[], None]) -> Sequence["asyncio.Task[Never]"]:
        """Nothing to do: a node that loses the slot or the majority refuses the next command."""
        return ()

    def _named_in(self, why: str) -> Server | None:
        """From `MOVED slot host:port`; the host may be left out, then it is not known."""
        words = why.split()
        if len(words) != 3 or words[0] != "MOVED" or words[1] != str(self._slot):
            return None
        host, _, port = words[2].rpartition(":")
        return Server(host, int(port)) if host else None

    async def _ask(self, node: Server) -> View:
        wire = await connect(self._address, node)
        try:
            info = wire.submit(("CLUSTER", "INFO"))
            slots = wire.submit(("CLUSTER", "SLOTS"))
            state = dict(line.split(":", 1) for line in (await info).decode().splitlines() if ":" in line)
            ranges = [(first, last, _server(owner, node)) for first, last, owner, *_ in await slots]
        finally:
            wire.end("answered")
        owners = [server for first, last, server in ranges if first <= self._slot <= last]
        return View(
            healthy=state["cluster_state"] == "ok",
            epoch=int(state["cluster_current_epoch"]),
            owner=owners[0] if owners else None,
            nodes=tuple(server for _, _, server in ranges),
        )


def _server(entry: list[Any], asked: Server) -> Server:
    """A node that does not know its own name, or may not tell it, is where it was asked."""
    host = (entry[0] or b"").decode()
    return Server(asked.host if host in ("", "?") else host, entry[1])
