"""What `GET /mock/log` tells: every generation call as it arrived and what became of it."""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

RECORDS_MAX = 1000
BODY_BYTES_KEPT = 65536
"""A larger body is logged by its hash alone, so the journal keeps at most 64 MB."""


class State(StrEnum):
    RECEIVED = "received"
    STARTED = "started"
    """The engine has given it blocks."""
    FINISHED = "finished"
    ABORTED = "aborted"
    """The client left, or the engine was stopped."""
    REFUSED = "refused"
    """Answered with an error of vLLM's own."""
    FAILED = "failed"
    """Ended by a fault script."""


@dataclass(slots=True)
class Record:
    path: str
    headers: list[tuple[str, str]]
    body: InitVar[bytes]
    id: str | None = None
    """The id in the answer; None for a refused call."""
    state: State = State.RECEIVED
    prompt_tokens: int = 0
    counts: Sequence[int] = ()
    """Output tokens of each sequence: the list that the answer counts in."""
    cached_tokens: int = 0
    preemptions: int = 0
    """Of all its sequences."""
    times: dict[str, float] = field(default_factory=dict)
    """Unix time in seconds of "received", "started" (the engine gave it blocks), "first_token" and "ended"."""
    sha256: str = field(init=False)
    body_bytes: int = field(init=False)
    _kept: bytes = field(init=False)

    def __post_init__(self, body: bytes) -> None:
        self.sha256 = sha256(body).hexdigest()
        self.body_bytes = len(body)
        self._kept = body if len(body) <= BODY_BYTES_KEPT else b""

    def shown(self) -> dict[str, Any]:
        """As JSON; the body parsed, or null when it is not JSON or was not kept."""
        return {
            "id": self.id,
            "path": self.path,
            "state": self.state,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(self.counts),
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "times": self.times,
            "headers": self.headers,
            "body": self._parsed(),
            "body_bytes": self.body_bytes,
            "sha256": self.sha256,
        }

    def _parsed(self) -> object:
        try:
            return json.loads(self._kept)
        except (ValueError, RecursionError):
            return None


class Journal:
    """Counts since the last clear, and the last `RECORDS_MAX` calls, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._counts = dict.fromkeys(State, 0)
        self._records: deque[Record] = deque(maxlen=RECORDS_MAX)

    def receive(self, record: Record) -> None:
        record.times["received"] = self._clock()
        self._records.append(record)
        self._counts[State.RECEIVED] += 1

    def move(self, record: Record, state: State) -> None:
        record.state = state
        record.times["started" if state is State.STARTED else "ended"] = self._clock()
        self._counts[state] += 1

    def note_first_token(self, record: Record, seconds: float) -> None:
        """So long after its arrival, by the loop's clock, which is coarser than this one."""
        earliest = record.times.get("started", record.times["received"])
        record.times["first_token"] = min(max(record.times["received"] + seconds, earliest), self._clock())

    def shown(self) -> dict[str, Any]:
        counts = {str(state): number for state, number in self._counts.items()}
        return counts | {"requests": [record.shown() for record in self._records]}
