"""One call's guard on this process's side: what it asked for, what it was given, and giving it back once."""

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Admission, Grant, Lost

if TYPE_CHECKING:
    from gateway.ledger.valkey import ValkeyLedger

Result = list[Any]


class Phase(Enum):
    NEW = auto()
    """Nothing was sent."""
    ASKED = auto()
    """The admit is on its way, there or back."""
    QUEUED = auto()
    RESERVED = auto()
    MOVING = auto()
    """The move is on its way."""
    SETTLING = auto()
    """The settle is on its way; the owner of the guard has left."""
    GONE = auto()


class Ask:
    """`Reservation` of the Valkey ledger.  All methods run on the event loop; results come from the channel's task."""

    __slots__ = ("_abandoned", "_answer", "_asked_at", "_claiming", "_exclude", "_held_bytes", "_ledger", "_lost",
                 "_timer", "_used", "admission", "id", "phase", "queued", "replica")  # fmt: skip

    def __init__(self, ledger: "ValkeyLedger", id_: str, admission: Admission, lost: Lost) -> None:
        self.id = id_
        self.admission = admission
        self.phase = Phase.NEW
        self.replica = ""
        self.queued = False
        self._ledger = ledger
        self._lost = lost
        self._answer: asyncio.Future[Grant | Refusal] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asked_at = 0.0
        self._exclude: tuple[str, ...] = ()
        self._claiming = False
        self._abandoned = False
        self._used: tuple[int, int] = (-1, -1)
        self._held_bytes = 0

    # -- the request's side --------------------------------------------------------------------------------------

    async def granted(self) -> Grant | Refusal:
        refusal = self._ledger.may_ask(self)
        if refusal:
            return refusal
        self._asked_at = self._ledger.now()
        self._answer = asyncio.get_running_loop().create_future()
        self.ask()
        self._arm(self._ledger.hold_seconds, self._not_heard)
        return await self._answer

    async def moved(self, exclude: str) -> Grant | Refusal:
        if self.phase is not Phase.RESERVED:
            return self._ledger.lost_refusal()
        self._answer = asyncio.get_running_loop().create_future()
        self._exclude = (*self._exclude, exclude)
        self.phase = Phase.MOVING
        self._ledger.channel.move(["M", self.id, [exclude]], self._on_move)
        self._ledger.wake()
        self._arm(max(self._wait_left_ms() / 1000, 0), self._waited_out)
        return await self._answer

    def first_token(self) -> None:
        if self.phase is Phase.RESERVED and self.admission.prefill:
            self._ledger.channel.free(["F", self.id], self._on_claim)
            self._ledger.wake()

    def settle(self, used_blocks: int | None, cost: int | None) -> None:
        self._disarm()
        self._used = (-1 if used_blocks is None else used_blocks, -1 if cost is None else cost)
        if self.phase is Phase.NEW or (self.phase is Phase.ASKED and self._ledger.channel.drop_admit(self.id)):
            return self.forget()
        if self.phase is Phase.ASKED:
            self._abandoned = True
        elif self.phase in (Phase.QUEUED, Phase.RESERVED, Phase.MOVING):
            self._send_settle()

    # -- the channel's side --------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Put the admit in, for the first time or again under a new owner."""
        a = self.admission
        self.phase = Phase.ASKED
        self._claiming = False
        wait_ms = self._wait_left_ms()
        arguments = ["A", self.id, a.key, a.class_, a.lane, a.blocks, a.sequences, a.prefill, a.cost, wait_ms, a.weight,
                     a.blocks_max, a.requests_max, a.queue_max, [], list(self._exclude), []]  # fmt: skip
        self._ledger.channel.admit(self.id, arguments, self._on_admit)
        self._ledger.wake()

    def redeclare(self, force: bool) -> None:
        a = self.admission
        arguments = ["R", self.id, self.replica, a.key, a.class_, a.lane, a.blocks, a.sequences, 0, a.cost, a.weight,
                     a.blocks_max, a.requests_max, int(force)]  # fmt: skip
        self._ledger.channel.move(arguments, self._on_redeclare)

    def rebuild(self, force: bool) -> None:
        """The store knows nothing of this owner any more: say again what is wanted or held."""
        if self._abandoned or self.phase is Phase.SETTLING:
            self.forget()
        elif self.phase is Phase.RESERVED:
            self.redeclare(force)
        elif self.phase in (Phase.ASKED, Phase.QUEUED, Phase.MOVING):
            self.ask()

    def offered(self, replica: str) -> None:
        """The outbox lists this call: it has blocks on a replica from now on."""
        if self.phase is Phase.QUEUED:
            self.queued = True
            self._reserved(replica)
        if self.phase is Phase.RESERVED and not self._claiming:
            self._claiming = True
            self._ledger.channel.free(["K", self.id], self._on_claim)

    def forget(self) -> None:
        self._disarm()
        self.phase = Phase.GONE
        self._ledger.forget(self)

    def _on_admit(self, result: Result) -> None:
        if result[0] == "grant":
            self._ledger.claimed(self.id)
        if self._abandoned:
            if result[0] in ("grant", "ticket"):
                return self._send_settle()
            return self.forget()
        if self.phase is not Phase.ASKED:
            return
        if result[0] == "grant":
            self._claiming = True
            self._reserved(result[1])
        elif result[0] == "ticket":
            self._wait_in_queue()
        else:
            self._refused(self._ledger.refusal_of(self.admission, result))

    def _on_move(self, result: Result) -> None:
        self._ledger.unclaimed(self.id)
        self._claiming = False
        if self.phase is not Phase.MOVING:
            return
        if result[0] == "ticket":
            self.phase = Phase.QUEUED
        else:
            self._refused(self._ledger.lost_refusal())

    def _on_claim(self, result: Result) -> None:
        """Of K and F: both leave a claimed reservation behind unless it is gone."""
        if result[0] in ("grant", "ok"):
            self._ledger.claimed(self.id)

    def _on_redeclare(self, result: Result) -> None:
        if result[0] in ("same", "declared"):
            self._ledger.claimed(self.id)
            return
        if self.phase is Phase.RESERVED:
            self.forget()
            self._lost()

    def _on_settle(self, result: Result) -> None:
        self._ledger.unclaimed(self.id)
        self.forget()

    def _send_settle(self) -> None:
        self.phase = Phase.SETTLING
        self._ledger.settled_here(self.admission)
        self._ledger.channel.free(["S", self.id, *self._used], self._on_settle)
        self._ledger.wake()

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait_left_ms(self) -> int:
        waited_ms = int((self._ledger.now() - self._asked_at) * 1000)
        return max(self.admission.wait_ms - waited_ms, 0)

    def _wait_in_queue(self) -> None:
        self.phase = Phase.QUEUED
        self.queued = True
        self._arm(self._wait_left_ms() / 1000, self._waited_out)

    def _reserved(self, replica: str) -> None:
        self.phase = Phase.RESERVED
        self.replica = replica
        self._disarm()
        self._resolve(Grant(replica, int((self._ledger.now() - self._asked_at) * 1000), self.queued))

    def _refused(self, refusal: Refusal) -> None:
        self.forget()
        self._resolve(refusal)

    def _not_heard(self) -> None:
        """The store did not answer the admit in the time that a call is held for it."""
        self._resolve(self._ledger.away_refusal())

    def _waited_out(self) -> None:
        if self.phase in (Phase.QUEUED, Phase.ASKED, Phase.MOVING):
            message = f"waited {self.admission.wait_ms} ms in the queue, the longest that queue.seconds_max allows"
            retry_ms = self._ledger.retry_hint_ms
            self._resolve(Refusal(Code.QUEUE_TIMEOUT, message, retry_ms=retry_ms))

    def _resolve(self, answer: Grant | Refusal) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(answer)

    def _arm(self, seconds: float, fire: Any) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, fire)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
