"""How far a fleet's estimates are off, learned for each kind of content from what its engines report.

For each kind the distribution of `reported / estimated` is kept, in steps of 1 %.  From it follows the smallest factor
under which too little is reserved rarely (1 call in 50) and by little (0.2 % of the tokens on average).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.content import Part

STEP = math.log(1.01)
"""Of a bin's logarithm."""
BINS = 150
"""To each side of 1: from 0.22 to 4.4."""
PURE = 0.9
"""From this part of its tokens on a prompt is of one kind."""
KINDS_MAX = 256
"""Beyond it only the coarse kinds learn, of which there are few."""
OBSERVED_MIN = 8
"""Before a kind has been seen so often it may only raise an estimate."""
FEW_PART = 32
"""A factor is derived anew when this part more calls were seen, or one that it falls short of."""
OBSERVED_MAX = 4000
"""Then what was seen of a kind counts half: its old outliers go, and a fleet may change its model."""
RARELY = 50
SHORTFALL = 0.002

Counts = dict[int, int]
"""Calls by bin."""
Delta = Mapping[tuple[str, int], int]
"""Calls by kind and bin."""


@dataclass(slots=True)
class _Kind:
    counts: Counts = field(default_factory=dict)
    total: int = 0
    factor: float | None = None
    """None = to be derived."""
    derived_at: int = 0
    """Calls of which it was."""

    @property
    def mean(self) -> float:
        """Of the ratio."""
        return sum(count * upper(bin_) for bin_, count in self.counts.items()) / self.total

    def add(self, bin_: int, count: int) -> None:
        self.counts[bin_] = self.counts.get(bin_, 0) + count
        self.total += count
        many = self.total > self.derived_at + self.derived_at // FEW_PART
        if self.factor is not None and (many or _UPPER[bin_ + BINS] > self.factor):
            self.factor = None

    def halve(self) -> None:
        self.counts = {bin_: count // 2 for bin_, count in self.counts.items() if count > 1}
        self.total = sum(self.counts.values())
        self.factor = None


class Factors:
    """What one process knows of one fleet; `news` is what others do not know yet."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._news: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def total(self) -> int:
        """Calls that it knows of, however often they count."""
        return sum(kind.total for kind in self._kinds.values())

    def estimate(self, parts: Sequence[Part]) -> int:
        """Tokens of a prompt of these parts, so that it seldom has more."""
        exact, coarse, expected = self._expect(parts)
        return math.ceil(expected * self._factor(exact, coarse))

    def observe(self, parts: Sequence[Part], reported: int) -> None:
        """One call: what it was estimated at without any factor, and what its engine counted."""
        exact, coarse, expected = self._expect(parts)
        bin_ = bin_of(reported / max(expected, 1))
        for kind in (exact, coarse):
            if self._add(kind, bin_, 1):
                self._news[kind, bin_] = self._news.get((kind, bin_), 0) + 1

    def _expect(self, parts: Sequence[Part]) -> tuple[str, str, float]:
        """Under which kinds a prompt is known, exact and coarse, and its tokens as far as its parts tell.

        What is nearly all of one kind goes by that; of a mixture each part goes by the mean of its kind.
        """
        if len(parts) == 1:  # as nearly always
            (main,) = parts
            return main.exact, main.coarse, main.tokens
        total = sum(part.tokens for part in parts)
        main = max(parts, key=lambda part: part.tokens)
        if main.tokens >= PURE * total:
            return main.exact, main.coarse, total
        expected = sum(part.tokens * self._mean(part) for part in parts)
        return f"mixed-{main.coarse}", f"mixed/{main.coarse.partition('/')[2]}", expected

    def _mean(self, part: Part) -> float:
        for name in (part.exact, part.coarse):
            kind = self._kinds.get(name)
            if kind is not None and kind.total >= OBSERVED_MIN:
                return kind.mean
        return 1.0

    def _factor(self, exact: str, coarse: str) -> float:
        """A kind that was seen rarely goes by the coarse one, but not below what was seen of itself."""
        own, script = self._derived(exact), self._derived(coarse)
        if own is not None and self._kinds[exact].total >= OBSERVED_MIN:
            return own
        if script is None or self._kinds[coarse].total < OBSERVED_MIN:
            script = max(script or 1.0, 1.0)
        return max(script, own or 0.0)

    def take_news(self) -> Delta:
        """What was observed since the last time; whoever takes it hands it on, or gives it back."""
        news, self._news = self._news, {}
        return news

    def give_back(self, news: Delta) -> None:
        for at, count in news.items():
            self._news[at] = self._news.get(at, 0) + count

    def learn(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """All that gateways know together: kind, bin, calls.  What is news here is added to it."""
        self._kinds = {}
        for kind, bin_, count in rows:
            self._add(kind, bin_, count)
        for (kind, bin_), count in self._news.items():
            self._add(kind, bin_, count)

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """All that is known here."""
        for name, kind in self._kinds.items():
            for bin_, count in kind.counts.items():
                yield name, bin_, count

    def _add(self, name: str, bin_: int, count: int) -> bool:
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX and is_fine(name):
                return False
            kind = self._kinds[name] = _Kind()
        kind.add(max(-BINS, min(BINS, bin_)), count)
        if kind.total > OBSERVED_MAX:
            kind.halve()
        return True

    def _derived(self, name: str) -> float | None:
        kind = self._kinds.get(name)
        if kind is None or not kind.total:
            return None
        if kind.factor is None:
            kind.factor, kind.derived_at = factor_of(kind.counts), kind.total
        return kind.factor


def is_fine(kind: str) -> bool:
    """True for an exact kind, False for a coarse one, which has no density."""
    script = kind.partition("/")[0]
    return "-" in script or script[-1].isdigit()


def bin_of(ratio: float) -> int:
    return max(-BINS, min(BINS, math.ceil(math.log(ratio) / STEP - 1e-9))) if ratio > 0 else -BINS


def upper(bin_: int) -> float:
    """The largest ratio in a bin."""
    return _UPPER[bin_ + BINS]


_UPPER = tuple(math.exp(bin_ * STEP) for bin_ in range(-BINS, BINS + 1))
"""By bin."""


def factor_of(counts: Counts) -> float:
    """The upper bound of the lowest bin over which there are few calls, and little of their tokens."""
    total = sum(counts.values())
    chosen, above, weight = max(counts), 0, 0.0
    for bin_ in sorted(counts, reverse=True):
        short = above - upper(bin_) * weight
        if above > total // RARELY or short > SHORTFALL * total:
            break
        chosen = bin_
        above += counts[bin_]
        weight += counts[bin_] / upper(bin_)
    return upper(chosen)
