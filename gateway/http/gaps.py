"""The times between tokens, for telemetry.

Gathered over all streams: reports of its own would cost each stream more than the tokens that they are about.
"""

import time

from gateway.core.events import Observer, TokenGaps

REPORTED_SECONDS = 1.0
"""How late telemetry may hear of them while tokens come; who ends a stream reports at once."""
GATHERED_MAX = 512


class Gaps:
    """Those of one kind of stream, in one pool."""

    __slots__ = ("_gaps_ms", "_observer", "_place", "_since")

    def __init__(self, observer: Observer, fleet: str, pool: str, class_: str) -> None:
        self._observer = observer
        self._place = fleet, pool, class_
        self._gaps_ms: list[float] = []
        self._since = 0.0
        """When the first of them began."""

    def next(self, before: float) -> float:
        """A token has come, the one before it at `before`: returns the time now, both of time.monotonic."""
        now, gaps_ms = time.monotonic(), self._gaps_ms
        if not gaps_ms:
            self._since = before
        gaps_ms.append((now - before) * 1000)
        if len(gaps_ms) >= GATHERED_MAX or now - self._since > REPORTED_SECONDS:
            self.report()
        return now

    def report(self) -> None:
        """Tell of those since the last report."""
        if self._gaps_ms:
            gaps_ms, self._gaps_ms = self._gaps_ms, []
            self._observer(TokenGaps(*self._place, gaps_ms))


class AllGaps:
    """One for the process; as many kinds as the settings have pools and classes."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._kinds: dict[tuple[str, str, str], Gaps] = {}

    def of(self, fleet: str, pool: str, class_: str) -> Gaps:
        found = self._kinds.get((fleet, pool, class_))
        if found is None:
            found = self._kinds[fleet, pool, class_] = Gaps(self._observer, fleet, pool, class_)
        return found
