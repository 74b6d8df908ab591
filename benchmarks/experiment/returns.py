"""Whether calls of one kind come back soon with what was said before: agents do, people and single questions do not.

Who ended is remembered by a name of all that it was sent.  A call that goes on says the same name of all that came
before the answer it was given, so it needs no tokens and no session id.  Blocks kept for turns that never come are
lost to all others, so they are kept only where most of the last calls came back.
"""

from collections import OrderedDict

SOON_SECONDS = 10.0
"""From the end of an answer until the next turn."""
LIKELY = 0.5
"""The part of calls that must have come back."""
KNOWN = 8
"""Calls that must have ended, and come back or not, before anything is expected of the next."""
COUNTED = 128
"""Calls; from there on all counts are halved."""
PENDING = 4_096
"""Ends that are remembered; beyond it the first is forgotten as if it had not come back."""


class Returns:
    """Of calls of one kind, as of a key and class."""

    def __init__(self, soon_seconds: float = SOON_SECONDS) -> None:
        self._soon = soon_seconds
        self._pending: OrderedDict[str, float] = OrderedDict()
        """In order of their ends, in seconds."""
        self._came = 0.0
        self._went = 0.0

    def ended(self, name: str, now: float) -> None:
        """A call was answered whose whole prompt has that name."""
        self._forget(now)
        self._pending[name] = now
        self._pending.move_to_end(name)
        if len(self._pending) > PENDING:
            self._pending.popitem(last=False)
            self._count(came=False)

    def came(self, name: str, now: float) -> bool:
        """A call says that it goes on from there; whether that had ended lately."""
        self._forget(now)
        if self._pending.pop(name, None) is None:
            return False
        self._count(came=True)
        return True

    def likely(self, now: float) -> bool:
        """Whether the next one that ends will come back soon."""
        self._forget(now)
        ended = self._came + self._went
        return ended >= KNOWN and self._came >= LIKELY * ended

    def _forget(self, now: float) -> None:
        while self._pending and next(iter(self._pending.values())) < now - self._soon:
            self._pending.popitem(last=False)
            self._count(came=False)

    def _count(self, *, came: bool) -> None:
        self._came += came
        self._went += not came
        if self._came + self._went >= COUNTED:
            self._came /= 2
            self._went /= 2
