"""Whether calls of one kind come back soon with what was said before: agents do, people and single questions do not.

Who ended is remembered by a name of all that it was sent.  A call that goes on says the same name of all that came
before the answer it was given, so it needs no tokens and no session id.  Blocks kept for turns that never come are
lost to all others, so they are kept only where most of the last calls came back.

A conversation may go on in another process, which knows only by what was kept that it does.  So something is kept of a
few calls even where it is not likely to be of use, and each process compares how many it has kept with how many it has
seen go on from what was kept: over all processes the two are of the same conversations.
"""

from collections import OrderedDict

SOON_SECONDS = 10.0
"""From the end of an answer until the next turn."""
LIKELY = 0.5
"""The part of calls that must have come back."""
KNOWN = 8
"""Calls that are kept at first, whatever is known; so many must have come back or not before anything is expected."""
PROBED = 16
"""One call in so many is kept where it is not likely to come back."""
COUNTED = 128
"""Calls; from there on all counts are halved."""
PENDING = 4_096
"""Ends that are remembered; beyond it the first is forgotten as if it had not come back."""
KINDS = 1_024
"""Of calls; the one that was not asked about for longest is forgotten."""


class Returns:
    """Of calls of one kind, as of a key and class."""

    def __init__(self, soon_seconds: float = SOON_SECONDS) -> None:
        self._soon = soon_seconds
        self._pending: OrderedDict[str, float] = OrderedDict()
        """In order of their ends, in seconds."""
        self._over = 0.0
        """Calls that were kept and have come back, or not in time."""
        self._came = 0.0
        self._kept = self._passed = 0

    def ended(self, name: str, now: float) -> bool:
        """A call was answered whose whole prompt has that name; whether something of it is to be kept."""
        if not self.likely(now) and self._kept >= KNOWN:
            self._passed += 1
            if self._passed % PROBED:
                return False
        self._kept += 1
        self._pending[name] = now
        self._pending.move_to_end(name)
        if len(self._pending) > PENDING:
            self._pending.popitem(last=False)
            self._end()
        return True

    def came(self, name: str, now: float) -> bool:
        """A call says that it goes on from there; whether that ended here lately, and was kept."""
        self._forget(now)
        if self._pending.pop(name, None) is None:
            return False
        self._came += 1
        self._end()
        return True

    def came_from_elsewhere(self) -> None:
        """A call goes on from what was kept, and did not end here."""
        self._came += 1

    def likely(self, now: float) -> bool:
        """Whether the next one that ends will come back soon."""
        self._forget(now)
        return self._over >= KNOWN and self._came >= LIKELY * self._over

    def _forget(self, now: float) -> None:
        while self._pending and next(iter(self._pending.values())) < now - self._soon:
            self._pending.popitem(last=False)
            self._end()

    def _end(self) -> None:
        """Of one that was kept it is known whether it came back."""
        self._over += 1
        if self._over >= COUNTED:
            self._over /= 2
            self._came /= 2


class ReturnsByKind:
    """Of all kinds of a fleet's calls.  Not for threads."""

    def __init__(self, kinds_max: int = KINDS) -> None:
        self._kinds: OrderedDict[tuple[str, str], Returns] = OrderedDict()
        self._kinds_max = kinds_max

    def __len__(self) -> int:
        return len(self._kinds)

    def of(self, key: str, class_: str) -> Returns:
        kind = (key, class_)
        found = self._kinds.pop(kind, None) or Returns()
        self._kinds[kind] = found
        if len(self._kinds) > self._kinds_max:
            self._kinds.popitem(last=False)
        return found
