"""The gateway's side of a call: every pair of phase and event, against the design's table written out once more."""

import pytest

from gateway.core.lifecycle import TABLE, Action, Event, Phase, Step, step
from gateway.core.outcomes import Code, Outcome

Cell = tuple[Phase, Action, Code | None, Outcome | None]
P, E, A = Phase, Event, Action


def go_on(phase: Phase) -> Cell:
    return phase, A.GO_ON, None, None


def answer(code: Code | None, outcome: Outcome) -> Cell:
    return P.SETTLED, A.ANSWER, code, outcome


def error_event(code: Code) -> Cell:
    return P.SETTLED, A.ERROR_EVENT, code, Outcome.FAILED


LEFT: Cell = (P.SETTLED, A.STOP, Code.CLIENT_DISCONNECT, Outcome.CANCELLED)
REFUSED = answer(None, Outcome.REFUSED)
DRAINED = answer(Code.DRAINING, Outcome.REFUSED)
MOVED: Cell = (P.WAITING, A.MOVE, None, None)

CUT = answer(Code.CUT, Outcome.FAILED)
BEFORE_A_REPLICA = {E.REFUSED: REFUSED, E.LEFT: LEFT, E.DRAINED: DRAINED, E.GRACE_OVER: DRAINED, E.CUT: CUT}
"""Nothing runs yet: whoever is still there gets an answer."""

DESIGN: dict[Phase, dict[Event, Cell]] = {
    P.READING: {E.READ: go_on(P.ESTIMATING), **BEFORE_A_REPLICA},
    P.ESTIMATING: {E.COUNTED: go_on(P.WAITING), **BEFORE_A_REPLICA},
    P.WAITING: {
        E.GRANTED: go_on(P.CONNECTING),
        E.LEASE_LOST: answer(Code.LEASE_LOST, Outcome.FAILED),
        **BEFORE_A_REPLICA,
    },
    P.CONNECTING: {
        E.FORWARDED: go_on(P.STREAMING),
        E.DRAINED: go_on(P.CONNECTING),
        E.FAILED: MOVED,
        E.TIMED_OUT: MOVED,
        E.FAILED_FOR_GOOD: answer(Code.UPSTREAM_ERROR, Outcome.FAILED),
        E.TIMED_OUT_FOR_GOOD: answer(Code.UPSTREAM_TIMEOUT, Outcome.FAILED),
        E.BUSY_FOR_GOOD: answer(Code.NO_BACKEND, Outcome.FAILED),
        E.LEFT: LEFT,
        E.LEASE_LOST: answer(Code.LEASE_LOST, Outcome.FAILED),
        E.GRACE_OVER: answer(Code.DRAINING, Outcome.FAILED),
        E.CUT: CUT,
    },
    P.STREAMING: {
        E.ENDED: (P.SETTLED, A.STOP, None, Outcome.COMPLETED),
        E.DRAINED: go_on(P.STREAMING),
        E.FAILED_FOR_GOOD: error_event(Code.UPSTREAM_ERROR),
        E.TIMED_OUT_FOR_GOOD: error_event(Code.UPSTREAM_TIMEOUT),
        E.LEFT: LEFT,
        E.LEASE_LOST: error_event(Code.LEASE_LOST),
        E.GRACE_OVER: error_event(Code.DRAINING),
        E.CUT: error_event(Code.CUT),
        E.STOPPED: (P.SETTLED, A.ERROR_EVENT, Code.RESPONSE_CANCELLED, Outcome.CANCELLED),
    },
    P.SETTLED: dict.fromkeys(Event, (P.SETTLED, A.STOP, None, None)),
}
"""Phase by phase as the design has it; what is not listed cannot happen.

A phase of the design may be two here or half of one: `admitting` and `queued` are WAITING (which of them it is, the
reservation knows), `connecting` and `sent` are CONNECTING, `first data event` and `streaming` are STREAMING.
"""

PAIRS = [(phase, event) for phase in Phase for event in Event]


@pytest.mark.parametrize(("phase", "event"), PAIRS, ids=[f"{p.name}-{e.name}" for p, e in PAIRS])
def test_every_pair(phase: Phase, event: Event) -> None:
    expected = DESIGN[phase].get(event)
    if expected is None:
        with pytest.raises(AssertionError, match=phase.value):
            step(phase, event)
    else:
        assert step(phase, event) == Step(*expected)


def test_the_table_has_no_pair_beyond_the_design() -> None:
    assert set(TABLE) == {(phase, event) for phase, cells in DESIGN.items() for event in cells}


@pytest.mark.parametrize("phase", [P.READING, P.ESTIMATING, P.WAITING, P.CONNECTING, P.STREAMING])
def test_a_client_may_leave_and_a_shutdown_may_end_in_every_phase(phase: Phase) -> None:
    for event in (E.LEFT, E.GRACE_OVER):
        assert step(phase, event).phase is P.SETTLED


def test_a_settled_call_has_an_outcome_and_its_failures_a_code() -> None:
    for (phase, event), taken in TABLE.items():
        if phase is P.SETTLED or taken.phase is not P.SETTLED:
            assert taken.outcome is None, (phase, event)
            continue
        assert taken.outcome is not None, (phase, event)
        told = taken.action is not A.STOP or taken.outcome is Outcome.CANCELLED
        assert (taken.code is not None) == (told and event is not E.REFUSED), (phase, event)


def test_nothing_is_answered_whole_once_a_byte_was_forwarded() -> None:
    actions = {cell.action for (phase, _), cell in TABLE.items() if phase is P.STREAMING}
    assert actions == {A.GO_ON, A.STOP, A.ERROR_EVENT}


def test_only_a_call_of_which_nothing_was_forwarded_moves() -> None:
    assert {phase for (phase, _), cell in TABLE.items() if cell.action is A.MOVE} == {P.CONNECTING}
