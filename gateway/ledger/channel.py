"""The way of one fleet's ops to the store: gathered while the last batch is in flight, in the order that the ledger
needs, numbered, and sent again as they were after any failure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.order import BATCH_OPS
from gateway.ledger.connection import Connection
from gateway.ledger.records import decode_text

Result = list[Any]
Done = Callable[[Result], None]


@dataclass(slots=True)
class Op:
    arguments: list[Any]
    done: Done
    """Gets the result on the channel's task; must not raise or block."""


@dataclass(slots=True)
class Reply:
    status: str
    epoch: int = 0
    more: bool = False
    outbox: list[tuple[str, str]] = field(default_factory=list)
    """Grants not claimed yet: id and replica."""


@dataclass(slots=True)
class _Batch:
    number: int
    ops: list[Op]


class Channel:
    """Ops go in from request tasks, synchronously; `exchange` is called by one task only.

    An admit and the settle of its id never share a batch: the settle is only put in after the admit's result.
    """

    def __init__(self, wake_prefix: str) -> None:
        self._wake_prefix = wake_prefix
        self._frees: deque[Op] = deque()
        self._moves: deque[Op] = deque()
        self._admits: dict[str, Op] = {}
        self._declare: Done | None = None
        self._batch: _Batch | None = None
        self._number = 0

    @property
    def busy(self) -> bool:
        """Something is waiting to be sent, or was sent without an answer."""
        return bool(self._batch or self._frees or self._moves or self._admits or self._declare)

    def free(self, arguments: list[Any], done: Done) -> None:
        """S, F, K and Z: go first, in order."""
        self._frees.append(Op(arguments, done))

    def move(self, arguments: list[Any], done: Done) -> None:
        """M and R."""
        self._moves.append(Op(arguments, done))

    def declare(self, done: Done) -> None:
        """Y: after the last R."""
        self._declare = done

    def admit(self, id_: str, arguments: list[Any], done: Done) -> None:
        self._admits[id_] = Op(arguments, done)

    def drop_admit(self, id_: str) -> bool:
        """True when the admit was not sent yet, and now never will be."""
        return self._admits.pop(id_, None) is not None

    def restart(self) -> None:
        """A new owner: nothing that was meant for the old one is sent."""
        self._frees.clear()
        self._moves.clear()
        self._admits.clear()
        self._declare = None
        self._batch = None
        self._number = 0

    async def exchange(self, connection: Connection, owner: str, heartbeat: Op | None) -> Reply:
        """Send one batch, the unanswered one if there is one, and hand its results out.  Raises StoreAway."""
        if self._batch is None:
            self._number += 1
            self._batch = _Batch(self._number, self._gather(heartbeat))
        batch = self._batch
        packed = [msgspec.msgpack.encode(op.arguments) for op in batch.ops]
        raw = await connection.evaluate("step", "", owner, batch.number, self._wake_prefix, *packed)
        reply = decode_text(raw)
        if reply[0] != "ok":
            return Reply(reply[0], epoch=reply[1] if len(reply) > 1 else 0)
        self._batch = None
        _, epoch, _clock, _policy, more, results, outbox = reply
        for op, result in zip(batch.ops, results, strict=True):
            op.done(result)
        return Reply("ok", epoch, bool(more), list(zip(outbox[::2], outbox[1::2], strict=True)))

    def _gather(self, heartbeat: Op | None) -> list[Op]:
        ops = [heartbeat] if heartbeat else []
        for queue in (self._frees, self._moves):
            while queue and len(ops) < BATCH_OPS:
                ops.append(queue.popleft())
        if self._declare and not self._moves and len(ops) < BATCH_OPS:
            ops.append(Op(["Y"], self._declare))
            self._declare = None
        while self._admits and len(ops) < BATCH_OPS:
            ops.append(self._admits.pop(next(iter(self._admits))))
        return ops
