"""What `GET /mock/log` tells: every generation call as it arrived and what became of it."""

import json
from collections import deque
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

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._counts = dict.fromkeys(State, 0)
        self._records: deque[Record] = deque(maxlen=RECORDS_MAX)

    def receive(self, record: Record) -> None:
        self._records.append(record)
        self._counts[State.RECEIVED] += 1

    def move(self, record: Record, state: State) -> None:
        record.state = state
        self._counts[state] += 1

    def shown(self) -> dict[str, Any]:
        counts = {str(state): number for state, number in self._counts.items()}
        return counts | {"requests": [record.shown() for record in self._records]}
