"""The way of one fleet's ops to the store: gathered while the last batch is in flight, in the order that the ledger
needs, numbered, and sent again as they were after any failure."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.order import BATCH_OPS
from gateway.ledger.connection import Connection
from gateway.ledger.records import Place, decode_step, place_of

log = logging.getLogger(__name__)

Result = list[Any]
Done = Callable[[Result], None]


_pack = msgspec.msgpack.Encoder().encode


class Op:
    """One question or word to the store."""

    __slots__ = ("arguments", "done", "packed")

    def __init__(self, arguments: list[Any], done: Done) -> None:
        """`done` gets the result where the reply arrives; it must not block.

        Raises what msgspec does where an argument cannot be packed: then it never gets into a batch.
        """
        self.arguments = arguments
        self.done = done
        self.packed = _pack(arguments)

    def finish(self, result: Result) -> None:
        """A failure here is this op's own: the results of the others are handed out all the same."""
        try:
            self.done(result)
        except Exception:
            log.exception("the result of an op %s could not be taken", self.arguments[0])


@dataclass(slots=True)
class Reply:
    status: str
    policy: int = 0
    """Number of the settings that the store has now."""
    more: bool = False


@dataclass(slots=True)
class _Batch:
    number: int
    ops: list[Op]


class Channel:
    """Ops go in from request tasks, synchronously; `send` is called while no other batch is on its way.

    A settle is only put in after `drop` took back what was not sent of its id, so that no op of an id follows its
    settle, and an admit and the settle of one id never share a batch.
    """

    def __init__(self, wake_prefix: str, offer: Callable[[str, Place], None]) -> None:
        """`offer` gets the outbox, grants not claimed yet, after a batch's results: id and place."""
        self._wake_prefix = wake_prefix
        self._offer = offer
        self._frees: deque[Op] = deque()
        self._growths: dict[str, Op] = {}
        self._moves: dict[tuple[str, str], Op] = {}
        self._admits: dict[str, Op] = {}
        self._asks: deque[Op] = deque()
        self._declare: Done | None = None
        self._batch: _Batch | None = None
        self._number = 0

    @property
    def busy(self) -> bool:
        """Something is waiting to be sent, or was sent without an answer."""
        return bool(
            self._batch
            or self._frees
            or self._growths
            or self._moves
            or self._admits
            or self._asks
            or self._declare
        )

    @property
    def gathered(self) -> int:
        """Ops of calls that wait to be sent, but for those that move."""
        return len(self._frees) + len(self._growths) + len(self._admits) + len(self._asks)

    @property
    def unanswered(self) -> bool:
        """A batch was sent, and what the store made of it is not known."""
        return self._batch is not None

    def free(self, arguments: list[Any], done: Done) -> None:
        """S, F and K: go first, in order."""
        self._frees.append(Op(arguments, done))

    def grow(self, arguments: list[Any], done: Done) -> None:
        """Z: before all that asks for room.  The last one of an id counts."""
        self._growths[arguments[1]] = Op(arguments, done)

    def move(self, arguments: list[Any], done: Done) -> None:
        """M and R, one of each for an id."""
        self._moves[arguments[0], arguments[1]] = Op(arguments, done)

    def declare(self, done: Done) -> None:
        """Y: after the last R."""
        self._declare = done

    def admit(self, arguments: list[Any], done: Done) -> None:
        self._admits[arguments[1]] = Op(arguments, done)

    def ask(self, arguments: list[Any], done: Done) -> None:
        """Q: last.  After a restart it has no answer."""
        self._asks.append(Op(arguments, done))

    def drop(self, id_: str) -> bool:
        """Take back what was not sent yet of an id; True when that was its admit."""
        if self._growths:
            self._growths.pop(id_, None)
        if self._moves:
            self._moves.pop(("R", id_), None)
            self._moves.pop(("M", id_), None)
        return self._admits.pop(id_, None) is not None

    def declares(self, id_: str) -> bool:
        """An R of that id is waiting to be sent."""
        return ("R", id_) in self._moves

    def carries(self, id_: str) -> bool:
        """An op of that id is in the batch whose answer is missing."""
        return self._batch is not None and any(op.arguments[1:2] == [id_] for op in self._batch.ops)

    def restart(self) -> None:
        """A new owner: nothing that was meant for the old one is sent."""
        self._frees.clear()
        self._growths.clear()
        self._moves.clear()
        self._admits.clear()
        self._asks.clear()
        self._declare = None
        self._batch = None
        self._number = 0

    def send(
        self, connection: Connection, owner: str, heartbeat: Callable[[], Op | None]
    ) -> Awaitable[Reply]:
        """Send one batch now, the unanswered one if there is one.  Its results are handed out where the reply arrives,
        before the caller's own task runs.  Raises StoreAway when awaited.
        """
        if self._batch is None:
            self._number += 1
            self._batch = _Batch(self._number, self._gather(heartbeat()))
        packed = [op.packed for op in self._batch.ops]
        return connection.evaluate(
            "step", "", owner, self._batch.number, self._wake_prefix, *packed, take=self._take
        )

    def _take(self, raw: Any) -> Reply:
        assert self._batch is not None
        batch, reply = self._batch, decode_step(raw)
        if reply[0] == "epoch":
            batch.ops = [op for op in batch.ops if op.arguments[0] != "Y"]  # it spoke of the epoch before
        if reply[0] != "ok":
            return Reply(reply[0])
        _, _epoch, _clock, policy, more, results, outbox = reply
        paired = list(zip(batch.ops, results, strict=True))
        self._batch = None
        for op, result in paired:
            op.finish(result)
        for id_, told in zip(outbox[::2], outbox[1::2], strict=True):
            self._offer(id_, place_of(told))
        return Reply("ok", policy, bool(more))

    def _gather(self, heartbeat: Op | None) -> list[Op]:
        ops = [heartbeat] if heartbeat else []
        _move(self._frees, ops)
        while self._growths and len(ops) < BATCH_OPS:
            ops.append(self._growths.pop(next(iter(self._growths))))
        while self._moves and len(ops) < BATCH_OPS:
            ops.append(self._moves.pop(next(iter(self._moves))))
        if self._declare and not self._moves and len(ops) < BATCH_OPS:
            ops.append(Op(["Y"], self._declare))
            self._declare = None
        if len(ops) + len(self._admits) <= BATCH_OPS:
            ops += self._admits.values()
            self._admits.clear()
        while self._admits and len(ops) < BATCH_OPS:
            ops.append(self._admits.pop(next(iter(self._admits))))
        _move(self._asks, ops)
        return ops


def _move(waiting: deque[Op], ops: list[Op]) -> None:
    """The first of them, as many as a batch has room for."""
    if len(ops) + len(waiting) <= BATCH_OPS:
        ops += waiting
        waiting.clear()
    while waiting and len(ops) < BATCH_OPS:
        ops.append(waiting.popleft())
