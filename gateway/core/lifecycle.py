"""The life of one call on the gateway's side: one table from phase and event to what has to be done.

Everything that can end or turn a call is an event.  A pair that is not in the table cannot happen: meeting one is a
bug of ours, answered with 500 and settled like any other end.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from gateway.core.outcomes import Code, Outcome


class Phase(StrEnum):
    READING = "reading"
    """The body is being read; nothing is held."""
    ESTIMATING = "estimating"
    WAITING = "waiting"
    """The ledger was asked; whether it holds a ticket by now is the reservation's business."""
    CONNECTING = "connecting"
    """A replica was granted and nothing was forwarded to the client yet."""
    STREAMING = "streaming"
    SETTLED = "settled"


class Event(StrEnum):
    READ = "the body was read"
    COUNTED = "the demand is known"
    LEFT = "the client left"
    DRAINED = "the process is draining"
    REFUSED = "the call was refused"
    GRANTED = "a replica was granted"
    FAILED = "the engine failed"
    TIMED_OUT = "the engine was too slow"
    FAILED_FOR_GOOD = "the engine failed, and no other may be tried"
    TIMED_OUT_FOR_GOOD = "the engine was too slow, and no other may be tried"
    BUSY_FOR_GOOD = "the engine has no room for the call, and no other may be tried"
    FORWARDED = "the first byte went to the client"
    ENDED = "the answer is complete"
    LEASE_LOST = "the place was given to somebody else"
    GRACE_OVER = "the grace period of the shutdown is over"
    CUT = "an operator ended the key's calls"
    STOPPED = "its response was ended from elsewhere"


class Action(Enum):
    GO_ON = auto()
    ANSWER = auto()
    """A whole answer with the step's code; for a refusal, with the refusal's own."""
    MOVE = auto()
    """Ask for a place elsewhere.  The connection to the engine is closed before."""
    ERROR_EVENT = auto()
    """The stream began: one event with the error, then `[DONE]`."""
    STOP = auto()
    """Nobody is there to be told."""


@dataclass(frozen=True, slots=True)
class Step:
    """Every step into SETTLED closes the engine's connection first and then gives everything back."""

    phase: Phase
    action: Action
    code: Code | None = None
    outcome: Outcome | None = None


_LEFT = Step(Phase.SETTLED, Action.STOP, Code.CLIENT_DISCONNECT, Outcome.CANCELLED)
_REFUSED = Step(Phase.SETTLED, Action.ANSWER, None, Outcome.REFUSED)
_DRAINED = Step(Phase.SETTLED, Action.ANSWER, Code.DRAINING, Outcome.REFUSED)


def _answer(code: Code) -> Step:
    return Step(Phase.SETTLED, Action.ANSWER, code, Outcome.FAILED)


def _error_event(code: Code) -> Step:
    return Step(Phase.SETTLED, Action.ERROR_EVENT, code, Outcome.FAILED)


def _go_on(phase: Phase) -> Step:
    return Step(phase, Action.GO_ON)


_P, _E = Phase, Event

TABLE: dict[tuple[Phase, Event], Step] = {
    (_P.READING, _E.READ): _go_on(_P.ESTIMATING),
    (_P.READING, _E.REFUSED): _REFUSED,
    (_P.READING, _E.LEFT): _LEFT,
    (_P.READING, _E.DRAINED): _DRAINED,
    (_P.READING, _E.GRACE_OVER): _DRAINED,
    (_P.READING, _E.CUT): _answer(Code.CUT),
    (_P.ESTIMATING, _E.COUNTED): _go_on(_P.WAITING),
    (_P.ESTIMATING, _E.REFUSED): _REFUSED,
    (_P.ESTIMATING, _E.LEFT): _LEFT,
    (_P.ESTIMATING, _E.DRAINED): _DRAINED,
    (_P.ESTIMATING, _E.GRACE_OVER): _DRAINED,
    (_P.ESTIMATING, _E.CUT): _answer(Code.CUT),
    (_P.WAITING, _E.GRANTED): _go_on(_P.CONNECTING),
    (_P.WAITING, _E.REFUSED): _REFUSED,
    (_P.WAITING, _E.LEFT): _LEFT,
    (_P.WAITING, _E.LEASE_LOST): _answer(Code.LEASE_LOST),
    (_P.WAITING, _E.DRAINED): _DRAINED,
    (_P.WAITING, _E.GRACE_OVER): _DRAINED,
    (_P.WAITING, _E.CUT): _answer(Code.CUT),
    (_P.CONNECTING, _E.FAILED): Step(_P.WAITING, Action.MOVE),
    (_P.CONNECTING, _E.TIMED_OUT): Step(_P.WAITING, Action.MOVE),
    (_P.CONNECTING, _E.FAILED_FOR_GOOD): _answer(Code.UPSTREAM_ERROR),
    (_P.CONNECTING, _E.TIMED_OUT_FOR_GOOD): _answer(Code.UPSTREAM_TIMEOUT),
    (_P.CONNECTING, _E.BUSY_FOR_GOOD): _answer(Code.NO_BACKEND),
    (_P.CONNECTING, _E.FORWARDED): _go_on(_P.STREAMING),
    (_P.CONNECTING, _E.LEFT): _LEFT,
    (_P.CONNECTING, _E.DRAINED): _go_on(_P.CONNECTING),
    (_P.CONNECTING, _E.LEASE_LOST): _answer(Code.LEASE_LOST),
    (_P.CONNECTING, _E.GRACE_OVER): _answer(Code.DRAINING),
    (_P.CONNECTING, _E.CUT): _answer(Code.CUT),
    (_P.STREAMING, _E.ENDED): Step(_P.SETTLED, Action.STOP, None, Outcome.COMPLETED),
    (_P.STREAMING, _E.FAILED_FOR_GOOD): _error_event(Code.UPSTREAM_ERROR),
    (_P.STREAMING, _E.TIMED_OUT_FOR_GOOD): _error_event(Code.UPSTREAM_TIMEOUT),
    (_P.STREAMING, _E.LEFT): _LEFT,
    (_P.STREAMING, _E.DRAINED): _go_on(_P.STREAMING),
    (_P.STREAMING, _E.LEASE_LOST): _error_event(Code.LEASE_LOST),
    (_P.STREAMING, _E.GRACE_OVER): _error_event(Code.DRAINING),
    (_P.STREAMING, _E.CUT): _error_event(Code.CUT),
    (_P.STREAMING, _E.STOPPED): Step(
        Phase.SETTLED, Action.ERROR_EVENT, Code.RESPONSE_CANCELLED, Outcome.CANCELLED
    ),
    **{(_P.SETTLED, event): Step(_P.SETTLED, Action.STOP) for event in Event},
}


def step(phase: Phase, event: Event) -> Step:
    """What the event means in that phase.  Raises AssertionError for a pair that cannot happen."""
    found = TABLE.get((phase, event))
    assert found is not None, f"{event} while {phase}"
    return found
