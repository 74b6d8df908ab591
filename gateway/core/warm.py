"""Which replicas are likely to have a prompt's beginning in their cache, and whether what is expected is found."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gateway.core.sse import Usage

WARM_SECONDS = 300.0
"""For which a replica is remembered.  Nobody says here what an engine has dropped meanwhile: where others need its
blocks it is gone sooner, and then a call has come to a replica that was as good as any."""
REPLICAS_MAX = 4
"""Of one point: those that had it last."""
GENERATION_POINTS_MAX = 1 << 14
"""A point takes 150 bytes, and 400 where four replicas had it: 13 MB for both generations."""
EXCLUDED_MAX = 64
"""Replicas that a call may be kept from because they have too little of its prompt: the store compares each of them
with each replica."""

JUDGED_CALLS = 20
"""So many are judged together."""
SEEN_PART_MIN = 0.5
"""Of what these were to find."""
JUDGED_MAX = 10_000
"""Names that are judged at a time; when more come all begin anew."""
MISCOUNTED_KEYS_MAX = 3
"""Where the prompts of so many keys are miscounted, all are."""


class _Visit(NamedTuple):
    replica: str
    at: float


class WarmPlaces:
    """Where calls ran lately, by the keys of their beginnings (`core/prefixes.py`).  Not for threads."""

    def __init__(self, generation_max: int = GENERATION_POINTS_MAX) -> None:
        self._young: dict[bytes, tuple[_Visit, ...]] = {}
        self._old: dict[bytes, tuple[_Visit, ...]] = {}
        self._generation_max = generation_max

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, keys: Sequence[bytes], replica: str, now: float) -> None:
        """A call that begins so runs, or has run, there.  `now`: seconds of any clock."""
        visit = _Visit(replica, now)
        for key in keys:
            others = [other for other in self._of(key) if other.replica != replica]
            if len(self._young) >= self._generation_max:
                self._old, self._young = self._young, {}
            self._young[key] = (visit, *others[: REPLICAS_MAX - 1])

    def depths(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """By replica so many of the points lately had a call there that came to them; those with most first, of these
        the last one first."""
        found: dict[str, int] = {}
        for count in range(len(keys), 0, -1):
            for visit in self._of(keys[count - 1]):
                if visit.replica not in found and now - visit.at < WARM_SECONDS:
                    found[visit.replica] = count
        return found

    def _of(self, key: bytes) -> tuple[_Visit, ...]:
        return self._young.get(key) or self._old.get(key) or ()


def warmest(depths: Mapping[str, int]) -> tuple[str, ...]:
    """Those that have most, in their order."""
    most = max(depths.values(), default=0)
    return tuple(replica for replica, depth in depths.items() if depth == most and most)


class Reach(NamedTuple):
    """A pool for one range of prompt lengths."""

    tokens_max: int | None
    """The longest prompt that is sent there, as far as its replicas have to compute it; None = any."""
    replicas: Sequence[str]


def cold_replicas(
    own: Reach, others: Sequence[Reach], tokens: int, cached: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The replicas of a lane that a prompt of so many tokens has to be kept from, if it goes to the lane of the pool
    `own` for what is warm there; None where it should not.

    They are those with more to compute than their pool allows.  It goes only where it need not wait for one warm
    replica: one of the lane's pools, `own` or one of the `others`, has to be open to it as a whole.
    """
    cold: list[str] = []
    is_warm = is_open = False
    for pool in (own, *others):
        most = tokens if pool.tokens_max is None else pool.tokens_max
        kept = [name for name in pool.replicas if tokens - cached.get(name, 0) > most]
        is_warm = is_warm or (pool is own and len(kept) < len(pool.replicas))
        is_open = is_open or (bool(pool.replicas) and not kept)
        cold += kept
    return tuple(cold) if is_warm and is_open and len(cold) <= EXCLUDED_MAX else None


class _Sums(NamedTuple):
    calls: int = 0
    expected: int = 0
    seen: int = 0


class Trust:
    """Whether what was expected is found, each time by whoever tells; by name."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def note(self, name: str, expected: int, seen: int) -> bool:
        """One more time `seen` of `expected` was found there; True = it is not what it should be.

        JUDGED_CALLS times are judged together, and then the next ones: more than expected makes up for nothing.
        """
        if len(self._sums) >= JUDGED_MAX and name not in self._sums:
            self._sums.clear()
        sums = self._sums.get(name, _Sums())
        sums = _Sums(sums.calls + 1, sums.expected + expected, sums.seen + min(seen, expected))
        if sums.calls < JUDGED_CALLS:
            self._sums[name] = sums
            return False
        self._sums.pop(name, None)
        return sums.seen < SEEN_PART_MIN * sums.expected

    def forget(self, name: str) -> None:
        self._sums.pop(name, None)


class Counts:
    """Whether prompts have as many tokens as their engines say, by route and by the key that sends them: what one key
    asks for may be shown otherwise by engines than is known here, which says nothing of the prompts of others."""

    def __init__(self) -> None:
        self._trust = Trust()
        self._wrong: dict[str, set[str]] = {}

    def note(self, route: str, key: str, is_right: bool) -> bool:
        """One more was counted; True = as from now on is known, those of this key are not counted as they should be."""
        if self.are_wrong(route, key) or not self._trust.note(f"{route} {key}", 1, int(is_right)):
            return False
        self._wrong.setdefault(route, set()).add(key)
        return True

    def are_wrong(self, route: str, key: str = "") -> bool:
        """Of that key; without one of all keys."""
        wrong = self._wrong.get(route, ())
        return key in wrong or len(wrong) >= MISCOUNTED_KEYS_MAX


class _Cache(NamedTuple):
    number: int
    tells: bool = False
    """Its engine has told of some call what it found."""
    shared: bool = False
    """A call was to find something there that others hold."""


class Found(NamedTuple):
    """Of one call that was to find in a cache what others hold."""

    tokens: int
    """That it found of what it was to find."""
    doubted: bool
    """With what the calls before it found that is less than it should be."""


class SharedCaches:
    """What calls found in the caches of a fleet's replicas.  An engine's new process has a new cache, of which nothing
    is known."""

    def __init__(self) -> None:
        self._known: dict[str, _Cache] = {}
        self._trust = Trust()

    def note(self, replica: str, cache: int, expected: int, usage: Usage | None) -> Found | None:
        """A call has ended in that cache, where it was to find so many tokens that others hold.

        Older releases do not say that they found nothing: of an engine that has told before, a `usage` without it says
        so.  Returns None where nothing was to be found, or where it is not known what was.
        """
        known = self._known.get(replica)
        if known is None or known.number != cache:
            self._trust.forget(replica)
            known = _Cache(cache)
        told = usage.cached_tokens if usage else None
        known = _Cache(cache, known.tells or told is not None, known.shared or expected > 0)
        self._known[replica] = known
        if not expected or usage is None or not known.tells:
            return None
        found = min(told or 0, expected)
        return Found(found, self._trust.note(replica, expected, found))

    def suspect(self, replica: str) -> int:
        """Its engine holds more than it should: the number of the cache where calls have shared since it was suspected
        last, 0 = they have not."""
        known = self._known.get(replica)
        if known is None or not known.shared:
            return 0
        self._known[replica] = known._replace(shared=False)
        return known.number

    def keep_only(self, replicas: Collection[str]) -> None:
        """Forget all others."""
        for name in [name for name in self._known if name not in replicas]:
            del self._known[name]
            self._trust.forget(name)
