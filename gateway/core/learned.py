"""What one process knows of how much the calls of a fleet write, by class and model; `news` is what others do not know.

The store adds up what all gateways see, halves what is old, and forgets nearly all of a kind of call that surprises it
(`lua/lengths.lua`).
"""

from collections.abc import Iterable, Iterator, Mapping

from gateway.core.lengths import AGES, BUCKETS, HALF, Lengths, News

KINDS_MAX = 64
"""Of one fleet; beyond it calls are told apart by their class alone, of which there are 8 at most."""
SEPARATOR = ":"
"""Between the class, which has none, and the model, which may."""
QUANTILES = (0.5, 0.9)

Row = tuple[int, int, int]
"""A bucket, its entries and its exits, in halves."""


class LearnedLengths:
    """By kind of call.  What `of` gives is the same object for ever, and knows what is known at the moment."""

    def __init__(self) -> None:
        self._known: dict[str, Lengths] = {}
        self._news: dict[str, dict[int, tuple[int, int]]] = {}

    def kind(self, class_: str, model: str) -> str:
        """Under which name such calls are known."""
        name = f"{class_}{SEPARATOR}{model}"
        if name in self._known or len(self._known) < KINDS_MAX:
            return name
        return class_ + SEPARATOR

    def of(self, kind: str) -> Lengths:
        return self._known.setdefault(kind, Lengths())

    def observe(self, kind: str, news: News) -> None:
        """From what one call did."""
        self.of(kind).add(news)
        self._merge(kind, news)

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> Mapping[str, News]:
        """What was observed since the last time; whoever takes it hands it on, or gives it back."""
        news, self._news = self._news, {}
        return news

    def give_back(self, news: Mapping[str, News]) -> None:
        for kind, of_kind in news.items():
            self._merge(kind, of_kind)

    def learn(self, known: Mapping[str, Iterable[Row]]) -> None:
        """All that gateways know together, by kind.  What is news here is added to it; what they lack stays."""
        for kind, rows in known.items():
            if kind in self._known or len(self._known) < 2 * KINDS_MAX:
                lengths = self.of(kind)
                lengths.replace(rows)
                lengths.add(self._news.get(kind, {}))

    def rows(self, kind: str) -> list[Row]:
        """All that is known here of one kind."""
        lengths = self.of(kind)
        return [(at, *counts) for at, counts in enumerate(zip(lengths.entries, lengths.exits, strict=True))]

    def __iter__(self) -> Iterator[tuple[str, str, Lengths]]:
        """Class, model and what is known, of every kind that was seen."""
        for kind, lengths in self._known.items():
            if any(lengths.entries):
                class_, _, model = kind.partition(SEPARATOR)
                yield class_, model, lengths

    def _merge(self, kind: str, news: News) -> None:
        mine = self._news.setdefault(kind, {})
        for bucket, (entered, left) in news.items():
            before = mine.get(bucket, (0, 0))
            mine[bucket] = (before[0] + entered, before[1] + left)


def ages(lengths: Lengths) -> list[dict[str, float]]:
    """For operators: of each age that was seen how many calls reached it, ended within it, and the part that does."""
    seen = [k for k in range(BUCKETS) if lengths.entries[k]]
    return [
        {
            "tokens": AGES[k],
            "entered": lengths.entries[k] / HALF,
            "ended": lengths.exits[k] / HALF,
            "survival": lengths.survival(AGES[k]),
        }
        for k in seen
    ]


def quantile(lengths: Lengths, part: float) -> int | None:
    """Tokens that this part of the calls stays within; None where too few were seen to end for that."""
    survivors = 1 - part
    if lengths.survival(AGES[-1]) > survivors:
        return None
    low, high = 0, AGES[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lengths.survival(middle) > survivors else (low, middle)
    return high
