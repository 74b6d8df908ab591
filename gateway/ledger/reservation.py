"""One call's guard on this process's side: what it asked for, what it was given, and giving it back once."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.core import quota
from gateway.core.forecast import Run
from gateway.core.outcomes import Refusal
from gateway.ledger.api import Admission, Grant, Lost
from gateway.ledger.channel import Result
from gateway.ledger.records import Place, path_argument, place_of

if TYPE_CHECKING:
    from gateway.ledger.valkey import ValkeyLedger


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

    __slots__ = (
        "_answer", "_asked_at", "_cache", "_claiming", "_computed", "_grown", "_is_expected", "_joined", "_leaves",
        "_ledger", "_left", "_lost", "_name", "_position", "_predicted_ms", "_timer", "_unheard", "_used", "_warm",
        "abandoned", "admission", "base", "by_force", "exclude", "held", "id", "net", "path", "phase", "prefill",
        "queued", "replica", "run", "started_at",
    )  # fmt: skip

    def __init__(self, ledger: "ValkeyLedger", id_: str, admission: Admission, lost: Lost) -> None:
        self.id = id_
        self.admission = admission
        self.phase = Phase.NEW
        self.replica = ""
        self.run: Run | None = None
        """While it holds blocks, of a call whose end can be foreseen."""
        self.queued = False
        self.abandoned = False
        """The owner of the guard has left while the admit was under way."""
        self.by_force = False
        """Its next declaration takes its place whether there is room or not."""
        self._ledger = ledger
        self._lost = lost
        self._answer: asyncio.Future[Grant | Refusal] | None = None
        self._is_expected = False
        """The time for which it is held for the store's answer is running."""
        self._timer: asyncio.TimerHandle | None = None
        self.started_at = 0.0
        """When the call began to be willing to wait; a move does not give it more time."""
        self._asked_at = 0.0
        self.exclude = admission.exclude
        self.prefill = admission.prefill
        """What it holds of a prefill budget until its first token."""
        self.held, self.base, self.path = admission.held, admission.base, admission.path
        """What it said last of what it holds and may hold."""
        self.net = 0
        """Blocks of that which are not in the path."""
        self._joined = self._cache = 0
        """How many of its segments it shares, as the store has told, and the number of the cache that has them."""
        self._computed = False
        """It is past its first token."""
        self._grown = False
        """That is not what it was admitted with."""
        self._claiming = False
        self._leaves = False
        """Its owner has left while it was waiting: its place is remembered."""
        self._left: tuple[quota.Left, ...] = ()
        self._position = 0
        self._predicted_ms: int | None = None
        self._unheard = False
        """Admitted here while the store was away, which has answered nothing about this id yet."""
        self._used: tuple[int, int, list[int]] = (-1, -1, [])
        self._name = ""
        """Of the conversation whose blocks are held softly at its end."""
        self._warm = False

    @property
    def shared(self) -> int:
        """Blocks of its prompt that it holds together with others, as far as the store has told."""
        joined = self.admission.segments[: self._joined]
        return sum(segment.blocks for segment in joined) if joined else 0

    @property
    def unanswered(self) -> bool:
        """Its owner waits to be told."""
        return self._answer is not None and not self._answer.done()

    # -- the request's side --------------------------------------------------------------------------------------

    async def granted(self) -> Grant | Refusal:
        refusal = self._ledger.may_ask(self.admission)
        if refusal:
            return refusal
        self.started_at = self._ledger.now() - self.admission.waited_ms / 1000
        answer = self._expect()
        if not self._ledger.sharing.admit(self):
            self.ask()
        return await answer

    async def moved(self, exclude: str) -> Grant | Refusal:
        if self.phase is not Phase.RESERVED:
            return self._ledger.lost_refusal()
        self.exclude = (*self.exclude, exclude)
        self.prefill = self.admission.prefill
        self._joined, self._cache, self._computed = 0, 0, False
        self.run = None
        self.phase = Phase.MOVING
        answer = self._expect()
        self._ledger.channel.move(["M", self.id, [exclude]], partial(self._on_move, self.id))
        self._ledger.wake()
        self._ledger.sharing.move(self)
        return await answer

    def first_token(self) -> None:
        if self.phase is not Phase.RESERVED or self._computed:
            return
        self._computed = True
        if not self.prefill and not self.admission.segments:
            return
        self.prefill = 0
        self._ledger.sharing.first_token(self.id)
        if self._ledger.channel.declares(self.id):  # an F would overtake it, and find nothing
            self.redeclare(self.by_force)
        else:
            self._ledger.channel.free(["F", self.id], partial(self._on_first_token, self.id))
        self._ledger.wake()

    def grow(self, held: int, base: int, path: bytes, net: int = 0) -> None:
        said = (self.held, self.base, self.path, self.net)
        if self.phase is not Phase.RESERVED or (held, base, path, net) == said:
            return
        self.held, self.base, self.path, self.net = held, base, path, net
        self._grown = True
        self._tell_growth()
        self._ledger.wake_for_growth()

    def _tell_growth(self) -> None:
        if self._ledger.channel.declares(self.id):  # a Z would overtake it, and that says something older
            self.redeclare(self.by_force)
        else:
            growth = ["Z", self.id, self.held, self.base, path_argument(self.path), self.net]
            self._ledger.channel.grow(growth, partial(self._on_grow, self.id))

    def settle(
        self, used_blocks: int | None, cost: int | None, used: quota.Units | None = None, name: str = ""
    ) -> None:
        if self.phase in (Phase.SETTLING, Phase.GONE):
            return
        if self.run:
            self._ledger.forecast.ended(self.run, self._ledger.now())
        if self._is_expected or self._timer:
            self._disarm()
        self._leaves = self._answer is None or not self._answer.done() or self._answer.cancelled()
        if self.unanswered:
            self._resolve(self._ledger.draining_refusal())
        corrections = [] if used is None else quota.corrections(self.admission.charges, used)
        self._used = (-1 if used_blocks is None else used_blocks, -1 if cost is None else cost, corrections)
        self._name = name
        if self._recall():
            self.forget()
        elif self.phase is Phase.ASKED:
            self.abandoned = True
        else:
            self._leaves = self._leaves and self.phase is not Phase.RESERVED
            self._send_settle()
        self._ledger.sharing.give_back(self.id)

    def _recall(self) -> bool:
        """Take back what was not sent; True when the store has never heard of this id then."""
        channel = self._ledger.channel
        unheard = self._unheard and channel.declares(self.id) and not channel.carries(self.id)
        dropped = channel.drop(self.id)
        return unheard or self.phase is Phase.NEW or (self.phase is Phase.ASKED and dropped)

    # -- the channel's side --------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Put the admit in, for the first time or under a new owner."""
        self.phase = Phase.ASKED
        self._claiming = False
        self.ask_again()
        self._ledger.wake()

    def ask_again(self) -> None:
        """Where the store knows the call already, an admit only says what became of it."""
        a = self.admission
        arguments = [
            "A", self.id, a.key, a.class_, a.lane, a.blocks, a.sequences, a.prefill, a.cost, self._wait_left_ms(),
            a.weight, a.blocks_max, a.requests_max, a.pool_share, a.queue_max, a.queue_key_max, list(a.prefer),
            list(self.exclude), quota.arguments(a.charges) if a.charges else [], self._fingerprint(), a.once,
            0 if self.queued else a.standing, self.held, self.base,
            path_argument(self.path) if self.path else "", int(a.promised),
            self._beginning() if a.segments else "", *([a.past] if a.past else []),
        ]  # fmt: skip
        self._ledger.channel.admit(arguments, partial(self._on_admit, self.id))

    def _fingerprint(self) -> str:
        """Of who has to be the only one; of others when the store has asked for it."""
        identity = self.admission.identity
        return identity.fingerprint() if self.admission.once else identity.known

    def redeclare(self, force: bool) -> None:
        a = self.admission
        self.by_force = self.by_force or force
        arguments = [
            "R", self.id, self.replica, a.key, a.class_, a.lane, a.blocks, a.sequences, self.prefill, a.cost, a.weight,
            a.blocks_max, a.requests_max, a.pool_share, int(self.by_force), self._fingerprint(), a.once,
            self.held, self.base, path_argument(self.path), int(a.promised), self._prefix(),
        ]  # fmt: skip
        self._ledger.channel.move(arguments, partial(self._on_redeclare, self.id))

    def _beginning(self) -> list[Any]:
        """How its prompt begins, of a call that has grown also what its path is net of."""
        a = self.admission
        return [a.block_size, a.segments, 0, 0, 0, self.net] if self.net else [a.block_size, a.segments]

    def _prefix(self) -> list[Any]:
        """How its prompt begins, and what of it the store said that it shares."""
        a = self.admission
        if not a.segments:
            return []
        return [a.block_size, a.segments, self._cache, self._joined, int(self._computed), self.net]

    def rebuild(self, force: bool) -> None:
        """The store knows nothing of this owner any more: say again what is wanted or held."""
        if self.abandoned or self.phase is Phase.SETTLING:
            self.forget()
        elif self.phase is Phase.RESERVED:
            self.redeclare(force)
        elif self.phase in (Phase.ASKED, Phase.QUEUED, Phase.MOVING):
            self.ask()

    def run_on(self, replica: str) -> None:
        """Admitted by this process alone, and declared by force as soon as the store is back.

        What the store may hold of the call by then, a ticket or a place elsewhere, is given back under the old id.
        """
        if not self._recall():
            self._ledger.rename(self)
        self._unheard = True
        self._reserved(replica)
        self.redeclare(force=True)

    def refuse(self, refusal: Refusal) -> None:
        self._resolve(refusal)

    def offered(self, place: Place) -> None:
        """The outbox lists this call: it has blocks on a replica from now on, or its ticket went to another key."""
        if not place.replica:
            return self._displaced()
        if self.phase is Phase.QUEUED:
            self._take_place(place)
        if self.phase is Phase.RESERVED and not self._claiming:
            self._claiming = True
            self._ledger.channel.free(["K", self.id], partial(self._on_claim, self.id))

    def _displaced(self) -> None:
        if self.phase is Phase.QUEUED:
            self._resolve(self._ledger.displaced_refusal(self.admission))
            self._send_settle()

    def forget(self) -> None:
        if self._is_expected or self._timer:
            self._disarm()
        self.phase = Phase.GONE
        self._ledger.forget(self)

    # Each result comes with the id that was asked about: the call may have another one by then.

    def _on_admit(self, id_: str, result: Result) -> None:
        if result[0] == "grant":
            self._ledger.claimed(id_)
        if id_ != self.id:
            return
        if self.abandoned:
            self._end_abandoned(result)
        elif self.phase in (Phase.ASKED, Phase.QUEUED):
            self._take_answer(result)

    def _end_abandoned(self, result: Result) -> None:
        if result[0] not in ("grant", "ticket"):
            return self.forget()
        self._leaves = self._leaves and result[0] == "ticket"
        self._send_settle()

    def _take_answer(self, result: Result) -> None:
        if result[0] == "grant":
            self._claiming = True
            if self.admission.charges:
                self._left = quota.lefts(self.admission.charges, result[2:]) or self._left
            self._take_place(place_of(result[1]))
        elif result[0] == "ticket":
            self._note_ticket(*result[1:])
            self._wait_in_queue()
        elif result[0] == "fingerprint":
            self._identified(self._ask_identified)
        else:
            self._refused(result)

    def _ask_identified(self) -> None:
        if self.abandoned:
            self.forget()
        elif self.phase in (Phase.ASKED, Phase.QUEUED):
            self.ask_again()
            self._ledger.wake()

    def _identified(self, then: Callable[[], None]) -> None:
        """Go on when the fingerprint is known."""
        self._ledger.fingerprints.make(self.admission.identity, then)

    def _note_ticket(self, position: int, wait_ms: int, *missing_us: int) -> None:
        """Of the first one: asked again, the store only says that the call still waits."""
        if self.queued:
            return
        self._left = quota.lefts(self.admission.charges, missing_us)
        self._position = position
        self._predicted_ms = None if wait_ms < 0 else wait_ms

    def _on_move(self, id_: str, result: Result) -> None:
        self._ledger.unclaimed(id_)
        if id_ != self.id or self.phase is not Phase.MOVING:
            return
        self._claiming = False
        if result[0] == "ticket":
            self._wait_in_queue()
        else:
            self.ask()

    def _on_first_token(self, id_: str, result: Result) -> None:
        if result[0] == "ok":
            self._ledger.claimed(id_)
        if id_ == self.id and self._computed and len(result) > 1:
            self._joined = result[1]

    def _on_claim(self, id_: str, result: Result) -> None:
        if result[0] == "grant":
            self._ledger.claimed(id_)

    def _on_grow(self, id_: str, result: Result) -> None:
        if result[0] == "error":
            self._ledger.op_failed(result)
        elif result[0] != "gone":
            self._ledger.claimed(id_)
        if result[0] == "over":
            self._ledger.overdrawn(self.replica, result[1])

    def _on_redeclare(self, id_: str, result: Result) -> None:
        declared = result[0] in ("same", "declared")
        if declared:
            self._ledger.claimed(id_)
        if id_ != self.id:
            return
        self._unheard = self.by_force = False
        if declared or self.phase is not Phase.RESERVED:
            return
        if result[0] == "error":
            self._ledger.op_failed(result)
            self._send_settle()
        else:
            self.forget()
        self._lost()

    def _on_settle(self, result: Result) -> None:
        if result[0] == "error":
            self._ledger.op_failed(result)
        self._ledger.unclaimed(self.id)
        self.forget()

    def _send_settle(self) -> None:
        if self._is_expected or self._timer:
            self._disarm()
        self.phase = Phase.SETTLING
        self._ledger.settled_here(self.admission)
        if self._leaves:
            self._identified(self._put_settle)
        else:
            self._put_settle()

    def _put_settle(self) -> None:
        fingerprint = self.admission.identity.known if self._leaves else ""
        settle = ["S", self.id, *self._used, fingerprint, *([self._name] if self._name else [])]
        self._ledger.channel.free(settle, self._on_settle)
        self._ledger.wake()

    # -- waiting -------------------------------------------------------------------------------------------------

    def _expect(self) -> "asyncio.Future[Grant | Refusal]":
        """An answer within the time that a call is held for the store."""
        self._asked_at = self._ledger.now()
        self._answer = asyncio.get_running_loop().create_future()
        self._is_expected = True
        self._ledger.unanswered.add(self)
        return self._answer

    def _wait_left_ms(self) -> int:
        waited_ms = int((self._ledger.now() - self.started_at) * 1000)
        return max(self.admission.wait_ms - waited_ms, 0)

    def _wait_in_queue(self) -> None:
        """A ticket of no time left is only good for a grant that comes in the same reply."""
        self.phase = Phase.QUEUED
        self.queued = True
        self._arm(self._wait_left_ms() / 1000, self._waited_out)

    def _take_place(self, place: Place) -> None:
        self._joined, self._cache, self._warm = place.joined, place.cache, place.warm > 0
        self._reserved(place.replica)

    def _reserved(self, replica: str) -> None:
        self.phase = Phase.RESERVED
        self.replica = replica
        self.run = self._ledger.new_run(replica, self.admission)
        self._disarm()
        if self._grown:  # the store may have given it a place with what it held before
            self._tell_growth()
        waited_ms = int((self._ledger.now() - self._asked_at) * 1000)
        self._resolve(
            Grant(
                replica, waited_ms, self.queued, self._position, self._predicted_ms, self._left,
                shared=self.shared, cache=self._cache, warm=self._warm,
            )
        )  # fmt: skip

    def _refused(self, result: Result) -> None:
        """After an error it is not known what the store holds of the call."""
        refusal = self._ledger.refusal_of(self.admission, result)
        if result[0] == "refused":
            self.forget()
        else:
            self._send_settle()
        self._resolve(refusal)

    def not_heard(self) -> None:
        """The store has not answered within the time that a call is held for it."""
        self._resolve(self._ledger.away_refusal())

    def _waited_out(self) -> None:
        waited_ms = int((self._ledger.now() - self.started_at) * 1000)
        self._resolve(self._ledger.waited_out_refusal(waited_ms, self.admission))

    def _resolve(self, answer: Grant | Refusal) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(answer)

    def _arm(self, seconds: float, fire: Callable[[], None]) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, fire)

    def _disarm(self) -> None:
        if self._is_expected:
            self._is_expected = False
            self._ledger.unanswered.discard(self)
        if self._timer:
            self._timer.cancel()
            self._timer = None
