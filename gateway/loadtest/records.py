"""What is noted while a run goes on: one record a call, one an attempt, and every gap between two tokens."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """How one attempt ended."""

    ANSWERED = "answered"
    """With finish_reason stop or length, and [DONE] where it streamed."""
    REFUSED = "refused"
    """With an HTTP error status."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    """The connection or the answer broke, or the answer reports a failure."""
    LEFT = "left"
    """The client closed on purpose, as planned."""
    STOPPED = "stopped"
    """Still running when the run was over."""


class Outcome(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"
    GAVE_UP = "gave_up"
    LEFT = "left"
    UNFINISHED = "unfinished"
    """Still running, or waiting to try again, when the run was over."""


@dataclass(slots=True)
class Attempt:
    """Times are seconds since the start of the run."""

    target: int
    began: float
    end: End = End.STOPPED
    reason: str = ""
    """`429 queue_full`, `headers`, `error_event`: which of the refusals, time-outs or failures."""
    status: int = 0
    """0 where no answer began."""
    sent_at: float | None = None
    """The request was handed to the socket; None where there was no connection."""
    headers_at: float | None = None
    first_token_at: float | None = None
    ended: float = 0.0
    events: int = 0
    """Token events received; a server may put several tokens into one."""
    tokens: int = 0
    """From `usage` where the answer has it, else the events."""
    worst_gap: float = 0.0
    """The longest silence after the first token, the one at a bad end included."""
    queue_ms: int | None = None
    """What the gateway says of its queue."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class CallRecord:
    number: int
    key: str
    arrival: float
    """As planned, in seconds since the start of the run."""
    lateness: float
    """Seconds by which the generator itself began too late."""
    prompt_tokens: int
    output_tokens: int
    body_bytes: int
    stream: bool
    slow: bool
    outcome: Outcome = Outcome.UNFINISHED
    attempts: list[Attempt] = field(default_factory=list)


class Gaps:
    """Seconds between token events, by the second of the run in which they ended; the last second takes the rest.

    Four bytes a gap, so that a run of a million tokens fits.
    """

    def __init__(self, seconds: int) -> None:
        self.seconds: list[array[float]] = [array("f") for _ in range(max(1, seconds))]

    def add(self, at: float, gap: float) -> None:
        self.seconds[min(int(at), len(self.seconds) - 1)].append(gap)

    def extend(self, other: "Gaps") -> None:
        for mine, theirs in zip(self.seconds, other.seconds, strict=True):
            mine.extend(theirs)

    def pooled(self) -> "array[float]":
        pooled = array("f")
        for one in self.seconds:
            pooled.extend(one)
        return pooled

    def __len__(self) -> int:
        return sum(map(len, self.seconds))


@dataclass(slots=True)
class Recording:
    """All that one process noted, or several of them together."""

    seconds: int
    """Of the time axis."""
    calls: list[CallRecord] = field(default_factory=list)
    gaps: Gaps = field(init=False)
    """Between two token events of a stream."""
    open_gaps: Gaps = field(init=False)
    """From the last token of a stream to the moment when it broke or its client gave up."""
    tokens: list[int] = field(init=False)
    """Token events per second."""
    running: list[float] = field(init=False)
    """Streams past their first token, averaged over each second."""
    lags: "array[float]" = field(default_factory=lambda: array("f"))
    """Seconds by which the event loop woke up too late."""
    cpu_seconds: float = 0.0
    sending_seconds: float = 0.0
    """From the start of the process's work to its end."""
    socket_shortage: int = 0
    """Attempts for which this machine had no socket or port left: not the target's fault."""
    own_errors: int = 0
    """Exceptions within the load generator itself."""

    def __post_init__(self) -> None:
        self.gaps, self.open_gaps = Gaps(self.seconds), Gaps(self.seconds)
        self.tokens = [0] * len(self.gaps.seconds)
        self.running = [0.0] * len(self.gaps.seconds)


def together(recordings: Iterable[Recording]) -> Recording:
    """One recording of several processes' with the same time axis."""
    parts = list(recordings)
    whole = Recording(parts[0].seconds)
    for part in parts:
        whole.calls.extend(part.calls)
        whole.gaps.extend(part.gaps)
        whole.open_gaps.extend(part.open_gaps)
        whole.tokens = [mine + theirs for mine, theirs in zip(whole.tokens, part.tokens, strict=True)]
        whole.running = [mine + theirs for mine, theirs in zip(whole.running, part.running, strict=True)]
        whole.lags.extend(part.lags)
        whole.cpu_seconds += part.cpu_seconds
        whole.sending_seconds = max(whole.sending_seconds, part.sending_seconds)
        whole.socket_shortage += part.socket_shortage
        whole.own_errors += part.own_errors
    whole.calls.sort(key=lambda call: call.number)
    return whole
