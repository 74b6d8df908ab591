"""Whether one engine answers behind a URL, or several take turns.

A process that starts again starts later than the one before, and its counters begin at 0: once.  A start that goes
back is that of another process that runs beside; so are counters that went back twice in less time than an engine
takes to start, where no start is told.
"""

from gateway.core.capacity import Reading, is_another, went_back

RESTART_MS = 15_000
"""An engine takes at least so long to answer after its start (vLLM 0.32: 18 s, measured)."""
SINGLE_READINGS = 12
"""So often in a row the same process has to answer, until it is taken for the only one."""


class Lineage:
    """The processes that were seen at one URL."""

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._went_back_at: int | None = None
        self._single_left = 0

    def see(self, reading: Reading, now_ms: int) -> bool:
        """One more reading; True = there are several, or there were a moment ago."""
        last, self._last = self._last, reading
        if last is None:
            return False
        if self._beside(last, reading, now_ms):
            self._single_left = SINGLE_READINGS
        elif is_another(last, reading):
            self._single_left = SINGLE_READINGS if self._single_left else 0
        else:
            self._single_left = max(self._single_left - 1, 0)
        return self._single_left > 0

    def _beside(self, last: Reading, reading: Reading, now_ms: int) -> bool:
        if last.started_at is not None and reading.started_at is not None:
            return reading.started_at < last.started_at
        if not went_back(last, reading):
            return False
        before, self._went_back_at = self._went_back_at, now_ms
        return before is not None and now_ms - before < RESTART_MS
