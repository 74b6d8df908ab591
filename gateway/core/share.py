"""What one process may admit on its own while the store is away (`store.on_outage: share`).

At each reading of the books a process notes its portion of every replica: what it holds there plus an equal part of
what is free, `held + floor(free / owners)`.  Over all owners the portions of one reading sum to at most the replica's
limit, so processes that keep within theirs need not speak to each other.  Sizes are blocks, sequences and tokens.

Every call counts with all that it may ever need: how much calls write together is known in the store alone.  Where some
are charged by their paths and all may need more than the limit, a process has that part of the limit which it has of
their demands.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.core.books import Replica
from gateway.core.elastic import ELASTIC
from gateway.core.order import POOL_SHARE_SCALE
from gateway.core.outcomes import Code


@dataclass(frozen=True, slots=True)
class Holding:
    """What one running call of this process takes."""

    key: str
    replica: str
    blocks: int
    """Its whole demand."""
    sequences: int
    prefill: int
    """0 once its prompt is computed."""
    shared: int = 0
    """Blocks of the demand that it holds together with others: they count for its key alone, for they stay when it
    ends."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The most of one replica that this process may hold."""

    pool: str
    up: bool
    usable: int
    """Blocks that one call may hold alone."""
    blocks: int
    sequences: int
    prefill: int
    elastic: bool = False
    """No call that was promised the guarantee runs there."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One call's demand, and where it may run."""

    key: str
    blocks: int
    sequences: int
    prefill: int
    blocks_max: int
    """The key's caps, -1 for none: judged against what this process holds of the key."""
    requests_max: int
    pools: tuple[str, ...]
    """In order of preference."""
    exclude: Collection[str] = ()
    pool_share: int = -1
    """Millionths that the key may hold of what this process may hold of each pool; -1 for all of it."""
    promised: bool = False
    """It was promised the guarantee."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Why the share has no place for a call."""

    code: Code
    knob: str
    measured: int
    limit: int


@dataclass(slots=True)
class _Sum:
    blocks: int = 0
    sequences: int = 0
    prefill: int = 0
    calls: int = 0

    def add(self, holding: Holding, direction: int = 1, *, own: bool = True) -> None:
        """`own`: without what it shares."""
        self.blocks += direction * (holding.blocks - (holding.shared if own else 0))
        self.sequences += direction * holding.sequences
        self.prefill += direction * holding.prefill
        self.calls += direction


def portions(replicas: Iterable[Replica], owners: int, running: Iterable[Holding]) -> dict[str, Portion]:
    """By replica; `owners` live ones, this process among them, and `running` what it holds, all of one reading."""
    assert owners > 0
    held: dict[str, _Sum] = {}
    for holding in running:
        held.setdefault(holding.replica, _Sum()).add(holding)
    return {
        replica.name: _portion(replica, owners, held.get(replica.name, _Sum()))
        for replica in replicas
        if replica.state != "removed"
    }


def _portion(replica: Replica, owners: int, own: _Sum) -> Portion:
    def part(most: int, used: int) -> int:
        return max(most - used, 0) // owners

    blocks = own.blocks + part(replica.limit, replica.full)
    if replica.elastic and replica.full > replica.limit:
        blocks = own.blocks * replica.limit // replica.full
    return Portion(
        pool=replica.pool,
        up=replica.state == "up",
        usable=replica.usable,
        blocks=blocks,
        sequences=own.sequences + part(replica.sequences_max, replica.sequences),
        prefill=own.prefill + part(replica.prefill_max, replica.prefill),
        elastic=replica.mode == ELASTIC,
    )


class Share:
    """The books of one process during one outage: its portions, and what it holds of them."""

    def __init__(self, mine: Mapping[str, Portion], running: Mapping[str, Holding]) -> None:
        """`running`: by id, what this process holds as the outage begins, within its portions or not."""
        self._portions = mine
        self._running: dict[str, Holding] = {}
        self._held = {name: _Sum() for name in mine}
        self._keys: dict[str, _Sum] = {}
        for id_, holding in running.items():
            self.take(id_, holding)

    def choose(self, wanted: Wanted, seen: Mapping[str, bool]) -> str | Denied:
        """A replica with room: in the first pool that has one, there where most of the portion is free, then by name.

        `seen`: whether a replica answers, for those of which this process knows it better than the reading.
        """
        capped = self._capped(wanted)
        if capped:
            return capped
        able = [name for name in self._portions if self._could_run(name, wanted, seen)]
        for pool in wanted.pools:
            in_pool = (
                [n for n in able if self._portions[n].pool == pool] if self._within_part(wanted, pool) else []
            )
            room = [n for n in in_pool if self._fits(n, wanted)]
            if room:
                return min(room, key=lambda name: (-self._free(name), name))
        if not able:
            return Denied(Code.NO_BACKEND, "", 0, 0)
        most = max(self._free(name) for name in able)
        return Denied(Code.STORE_UNAVAILABLE, "share", wanted.blocks, max(most, 0))

    def take(self, id_: str, holding: Holding) -> None:
        """What runs on a replica without a portion counts for its key alone."""
        assert id_ not in self._running
        self._running[id_] = holding
        if holding.replica in self._held:
            self._held[holding.replica].add(holding)
        self._keys.setdefault(holding.key, _Sum()).add(holding, own=False)

    def first_token(self, id_: str) -> None:
        holding = self._running.get(id_)
        if holding and holding.prefill:
            self.give_back(id_)
            self.take(id_, replace(holding, prefill=0))

    def give_back(self, id_: str) -> None:
        """The freed part may be used again.  An id that this share does not know changes nothing."""
        holding = self._running.pop(id_, None)
        if holding is None:
            return
        if holding.replica in self._held:
            self._held[holding.replica].add(holding, -1)
        key = self._keys[holding.key]
        key.add(holding, -1, own=False)
        if not key.calls:
            del self._keys[holding.key]

    def _capped(self, wanted: Wanted) -> Denied | None:
        key = self._keys.get(wanted.key, _Sum())
        if 0 <= wanted.requests_max < key.calls + 1:
            return Denied(Code.QUOTA_EXCEEDED, "requests_max", key.calls + 1, wanted.requests_max)
        if 0 <= wanted.blocks_max < key.blocks + wanted.blocks:
            return Denied(Code.QUOTA_EXCEEDED, "blocks_max", key.blocks + wanted.blocks, wanted.blocks_max)
        if wanted.pools and not any(self._within_part(wanted, pool) for pool in wanted.pools):
            held, part = self._part_of(wanted, wanted.pools[0])
            return Denied(Code.QUOTA_EXCEEDED, "pool_share", held + wanted.blocks, part)
        return None

    def _within_part(self, wanted: Wanted, pool: str) -> bool:
        if wanted.pool_share < 0:
            return True
        held, part = self._part_of(wanted, pool)
        return held + wanted.blocks <= part

    def _part_of(self, wanted: Wanted, pool: str) -> tuple[int, int]:
        """Blocks of a pool that the key holds, and the most that it may hold."""
        replicas = {name: portion for name, portion in self._portions.items() if portion.pool == pool}
        held = sum(h.blocks for h in self._running.values() if h.key == wanted.key and h.replica in replicas)
        most = sum(portion.blocks for portion in replicas.values() if portion.up)
        return held, most * wanted.pool_share // POOL_SHARE_SCALE

    def _could_run(self, name: str, wanted: Wanted, seen: Mapping[str, bool]) -> bool:
        portion = self._portions[name]
        return (
            portion.pool in wanted.pools
            and name not in wanted.exclude
            and seen.get(name, portion.up)
            and wanted.blocks <= portion.usable
            and not (wanted.promised and portion.elastic)
        )

    def _fits(self, name: str, wanted: Wanted) -> bool:
        """A prompt may be larger than the part of the prefill budget, then it is computed while no other of ours is."""
        portion, held = self._portions[name], self._held[name]
        prefills = held.prefill + wanted.prefill <= portion.prefill or 0 in (held.prefill, wanted.prefill)
        return (
            held.blocks + wanted.blocks <= portion.blocks
            and held.sequences + wanted.sequences <= portion.sequences
            and prefills
        )

    def _free(self, name: str) -> int:
        return self._portions[name].blocks - self._held[name].blocks
