"""Soft holds: what is kept of conversations that were answered a moment ago and are likely to go on.

An engine that evicts the history of a session that thinks has to compute it again for the next turn, and once most
sessions find theirs gone, half of its time goes into that (`docs/prefixes.md`).  So the blocks of such an answer count
against new conversations for a while, on the replica where they are.  They are reserved for nobody: a hold that is
forgotten or that nobody comes for delays others by HOLD_MS at most.

A hold has the name of its conversation, all messages that were sent, as a hash.  Who goes on with that is *warm*: it
counts no holds, and its own ends when it is admitted.
"""

from dataclasses import dataclass, field

from gateway.core.order import HISTORIES, HISTORY_WEIGHT, HOLD_MS, HOLD_PART, HOLDS_MAX

WARM = -1
"""In the place of the clock until which a call lets warm ones go before it: it is one."""


@dataclass(frozen=True, slots=True)
class Hold:
    replica: str
    blocks: int
    due: int
    """The clock at which it ends."""


@dataclass(slots=True)
class Holds:
    """Of all replicas of a fleet, by name: one of each conversation."""

    holds: dict[str, Hold] = field(default_factory=dict)

    def find(self, name: str) -> Hold | None:
        return self.holds.get(name) if name else None

    def of(self, replica: str) -> list[tuple[str, Hold]]:
        """In the order of their ends."""
        found = [(name, hold) for name, hold in self.holds.items() if hold.replica == replica]
        return sorted(found, key=lambda item: (item[1].due, item[0]))

    def keep(self, name: str, replica: str, blocks: int, clock: int) -> Hold:
        hold = self.holds[name] = Hold(replica, blocks, clock + HOLD_MS)
        return hold

    def oldest_to_go(self, replica: str) -> str | None:
        """The name of the hold that makes room for one more there, where it has so many."""
        found = self.of(replica)
        return found[0][0] if len(found) >= HOLDS_MAX else None


def counted(soft: int, limit: int) -> int:
    """Blocks that are held softly, as others than warm calls count them: a part of the replica's limit at most."""
    return min(soft, limit // HOLD_PART)


def averaged(history: int, blocks: int) -> int:
    """The moving average, in parts of HISTORY_WEIGHT of a block, with one answer more; 0 before the first."""
    return history + blocks - history // HISTORY_WEIGHT if history else blocks * HISTORY_WEIGHT


def is_large(limit: int, history: int) -> bool:
    """Whether a replica has room for so many average histories: holds on a smaller one do harm."""
    return limit * HISTORY_WEIGHT >= HISTORIES * history
