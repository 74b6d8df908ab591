"""Scripted behaviour: what one call, or the next calls, do other than a healthy engine.

Mock-only.  A call scripts itself by the body field `mock`, an object of

    output_tokens   tokens of each sequence; fewer than its limit end it with finish_reason "stop"
    hold_seconds    no first token before this time has passed since arrival, while the prompt's blocks are held
    late_busy       true: the engine's queue limits are met after the headers, so 200, an error event and [DONE]
    fail            "kind" or "kind:number"

`POST /mock/faults {"fail", "count"}` scripts the next `count` calls that do not script a failure themselves.  Kinds
that end the call (N counts data events sent before):

    reset_before_headers    TCP reset instead of an answer
    reset_after_headers     TCP reset after the status line and headers
    reset_after_events:N    TCP reset after N events
    cut_after_events:N      orderly close without the last chunk after N events
    error_event[:N]         after N (0) events an error event and [DONE]; not streaming: 503
    done_only               200 and nothing but [DONE]; not streaming: an empty choice that says "abort"
    finish_abort[:N]        after N (1) events every choice ends with finish_reason "abort"
    status:S                the answer is an error with status S
    hang[:N]                no byte at all; with N: headers and N events, then silence until the client leaves
    garbage                 200 and a body that is neither JSON nor server-sent events
    gzip                    the answer is compressed although nobody asked

Kinds that befall the whole engine (N as above; a call that does not stream brings them about at its start).  The call
goes on and meets what it brought about, as every other call does:

    crash[:N]               the EngineCore is killed: streams get an error event and [DONE], whole answers 500,
                            /health 503, and then the port is closed
    drain[:N]               SIGTERM with a shutdown timeout: what is in flight finishes, new calls are turned away
    sleep[:N]               as /sleep?level=1&mode=keep: everything stands still, without a byte, until it is woken
    slow:F                  from now on steps take F times as long

`POST /mock/state {"state", ...}` brings the same about without a call: see `control`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

SCRIPTS_MAX = 1000
"""Global scripts waiting at most."""
HOLD_SECONDS_MAX = 3600.0
_SCRIPT_FIELDS = {"output_tokens", "hold_seconds", "fail", "late_busy"}


class Kind(StrEnum):
    RESET_BEFORE_HEADERS = "reset_before_headers"
    RESET_AFTER_HEADERS = "reset_after_headers"
    RESET_AFTER_EVENTS = "reset_after_events"
    CUT_AFTER_EVENTS = "cut_after_events"
    ERROR_EVENT = "error_event"
    DONE_ONLY = "done_only"
    FINISH_ABORT = "finish_abort"
    STATUS = "status"
    HANG = "hang"
    GARBAGE = "garbage"
    GZIP = "gzip"
    CRASH = "crash"
    DRAIN = "drain"
    SLEEP = "sleep"
    SLOW = "slow"


ENGINE_WIDE = {Kind.CRASH, Kind.DRAIN, Kind.SLEEP, Kind.SLOW}
_NEEDS_NUMBER = {Kind.RESET_AFTER_EVENTS, Kind.CUT_AFTER_EVENTS, Kind.STATUS, Kind.SLOW}
_MAY_HAVE_NUMBER = {Kind.ERROR_EVENT, Kind.FINISH_ABORT, Kind.HANG} | _NEEDS_NUMBER | ENGINE_WIDE
_WHOLE_ANSWER = {Kind.RESET_BEFORE_HEADERS, Kind.STATUS, Kind.GZIP}
_EXAMPLES = {Kind.STATUS: 503, Kind.SLOW: 10}
_EVENTS_DEFAULT = {Kind.FINISH_ABORT: 1}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    number: int | None = None

    @property
    def engine_wide(self) -> bool:
        """True when the call goes on after it."""
        return self.kind in ENGINE_WIDE

    @property
    def silent(self) -> bool:
        """True for a hang before the headers."""
        return self.kind is Kind.HANG and self.number is None

    @property
    def strikes_after_events(self) -> int | None:
        """Events of a stream that go out before the fault; None when it does not strike within a stream."""
        if self.kind in _WHOLE_ANSWER or self.silent:
            return None
        if self.kind is Kind.SLOW:
            return 0
        return self.number if self.number is not None else _EVENTS_DEFAULT.get(self.kind, 0)


@dataclass(frozen=True, slots=True)
class Script:
    """The `mock` field of one call."""

    output_tokens: int | None = None
    """Tokens per sequence; fewer than the limit end with finish_reason "stop"."""
    hold_seconds: float = 0.0
    """No first token before this time has passed since arrival, while the prompt's blocks are held."""
    fault: Fault | None = None
    late_busy: bool = False
    """The engine's queue limits are met after the headers."""


def parse_fault(text: object) -> Fault:
    """Read `kind` or `kind:number`.  Raises ValueError naming what is wrong."""
    if not isinstance(text, str):
        raise ValueError(f"fail must be a string, got {text!r}")
    name, colon, digits = text.partition(":")
    if name not in Kind.__members__.values():
        raise ValueError(f"fail {name!r} is not one of {', '.join(Kind)}")
    kind = Kind(name)
    if bool(colon) and (kind not in _MAY_HAVE_NUMBER or not digits.isdecimal()):
        raise ValueError(f"fail {text!r}: {kind} takes {'a' if kind in _MAY_HAVE_NUMBER else 'no'} number")
    if not colon and kind in _NEEDS_NUMBER:
        raise ValueError(f"fail {text!r} needs a number, as in {kind}:{_EXAMPLES.get(kind, 3)}")
    if kind is Kind.STATUS and not 400 <= int(digits) <= 599:
        raise ValueError(f"fail {text!r}: the status must be 400 to 599")
    if kind is Kind.SLOW and int(digits) < 1:
        raise ValueError(f"fail {text!r}: steps take at least 1 times as long")
    return Fault(kind, int(digits) if colon else None)


def parse_script(value: object) -> Script:
    """Read the body field `mock`.  Raises ValueError naming what is wrong."""
    if value is None:
        return Script()
    if not isinstance(value, Mapping):
        raise ValueError("mock must be an object")
    unknown = sorted(set(value) - _SCRIPT_FIELDS)
    if unknown:
        raise ValueError(f"mock has no field {unknown[0]!r}")
    output_tokens, hold_seconds = value.get("output_tokens"), value.get("hold_seconds", 0)
    if output_tokens is not None and (type(output_tokens) is not int or output_tokens < 1):
        raise ValueError(f"mock.output_tokens must be an integer of at least 1, got {output_tokens!r}")
    if type(hold_seconds) not in (int, float) or not 0 <= hold_seconds <= HOLD_SECONDS_MAX:
        raise ValueError(f"mock.hold_seconds must be 0 to {HOLD_SECONDS_MAX:.0f}, got {hold_seconds!r}")
    if not isinstance(value.get("late_busy", False), bool):
        raise ValueError(f"mock.late_busy must be true or false, got {value['late_busy']!r}")
    fault = None if value.get("fail") is None else parse_fault(value["fail"])
    return Script(output_tokens, float(hold_seconds), fault, value.get("late_busy", False))


class Faults:
    """Global scripts, first in first out, one per call."""

    def __init__(self) -> None:
        self._waiting: deque[Fault] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, fault: Fault, count: int) -> None:
        """Script the next `count` calls.  Raises ValueError when more than `SCRIPTS_MAX` would wait."""
        if count < 1 or len(self._waiting) + count > SCRIPTS_MAX:
            raise ValueError(f"count must be at least 1 and {SCRIPTS_MAX} scripts may wait, got {count}")
        self._waiting.extend([fault] * count)

    def take(self) -> Fault | None:
        return self._waiting.popleft() if self._waiting else None

    def clear(self) -> None:
        self._waiting.clear()
