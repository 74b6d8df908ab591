"""How much calls write, learned from those that are still writing, too: of each age how many ended at it.

A histogram of finished calls would say too little at first, since the short ones finish first.  Here every call that
reaches an age counts as soon as it does (the estimator of Kaplan and Meier), and an age that was never seen counts as
one that nobody ends at: without any data every call is expected to write all that it may.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

AGES = (
    0, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 5120, 6144,
    8192, 12288, 16384, 32768,
)  # fmt: skip
"""Output tokens at which each bucket begins; the last one has no end."""
BUCKETS = len(AGES)
PRIOR = 2
"""Calls that are taken to have passed through every bucket before the first one was seen.

With more, late buckets, which few reach, are long taken for longer than they are: with 8 a small replica under heavy
tails loses a fifth of its throughput in its first 10,000 calls.
"""
HALF = 2
"""Counts are in halves: a call that was stopped by its limit in a bucket counts as half a passage."""
ENTRIES_MAX = 1000
"""Then what was seen of a bucket counts half: what calls write changes."""
HAZARD_MAX = 0.98
SURPRISE_DECAY = 0.98
"""Of what was seen before, with each end that was expected: passages that say nothing let nothing fade."""
SURPRISE_SIGMAS = 3.5
SURPRISE_ENDS = 4
"""Both are what Bernstein's inequality asks for a chance of 6 in a million; the variance of the average is half of the
average of the variances."""
SURPRISE_LEFT = 10
"""After a surprise the counts are divided by it, which is nearly back to knowing nothing."""


def bucket_of(written: int) -> int:
    return bisect_right(AGES, written) - 1


@dataclass(slots=True)
class Lengths:
    """What is known of one kind of call; counts are in halves."""

    entries: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    exits: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    _logs: list[float] | None = None

    @property
    def seen(self) -> int:
        """Calls, as far as they still count."""
        return self.entries[0] // HALF

    def hazard(self, bucket: int) -> float:
        """The part of the calls that reach a bucket which end in it of themselves."""
        found = self.exits[bucket] / (self.entries[bucket] + PRIOR * HALF)
        return min(max(found, 0.0), HAZARD_MAX)

    def survival(self, written: int) -> float:
        """The part of calls that write more than so many tokens; in a bucket it falls evenly in its logarithm."""
        logs = self._survived()
        bucket = bucket_of(written)
        if bucket == BUCKETS - 1:
            return math.exp(logs[bucket])
        passed = (written - AGES[bucket]) / (AGES[bucket + 1] - AGES[bucket])
        return math.exp(logs[bucket] + passed * (logs[bucket + 1] - logs[bucket]))

    def _survived(self) -> list[float]:
        """By bucket the logarithm of the part that reaches it."""
        if self._logs is None:
            self._logs = [0.0]
            for bucket in range(BUCKETS - 1):
                self._logs.append(self._logs[-1] + math.log1p(-self.hazard(bucket)))
        return self._logs

    def add(self, news: "News") -> None:
        for bucket, (entered, left) in news.items():
            self.entries[bucket] = max(self.entries[bucket] + entered, 0)
            self.exits[bucket] = max(self.exits[bucket] + left, 0)
        self._logs = None

    def divide(self, buckets: Iterable[int], by: int) -> None:
        """What was seen of these buckets counts that much less."""
        for bucket in buckets:
            self.entries[bucket] //= by
            self.exits[bucket] //= by
        self._logs = None

    def replace(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """All that is known: bucket, entries, exits."""
        self.entries, self.exits = [0] * BUCKETS, [0] * BUCKETS
        for bucket, entered, left in rows:
            self.entries[bucket], self.exits[bucket] = entered, left
        self._logs = None


News = Mapping[int, tuple[int, int]]
"""By bucket what came to its entries and exits, in halves."""


@dataclass(slots=True)
class Surprise:
    """How many more calls go on writing than was expected of them, lately: sums that fade with every expected end.

    Only calls that have left a bucket count, by ending in it or by reaching the next one: those still in it may end.
    """

    missing: float = 0.0
    """Ends that were expected and did not come; below 0 where more ended than expected."""
    variance: float = 0.0
    """Of that, if what is expected is true."""

    def observe(self, calls: float, ended: float, hazard: float) -> None:
        """So many calls left a bucket, of which so many ended there, where the part `hazard` was expected to.

        As if they had come one by one, the ended ones spread evenly among them.
        """
        expected = calls * hazard
        fading = -expected * math.log(SURPRISE_DECAY)
        kept, weight = math.exp(-fading), -math.expm1(-fading) / fading if fading > 0 else 1.0
        self.missing = self.missing * kept + weight * (expected - ended)
        self.variance = self.variance * kept + weight * expected * (1 - hazard)

    @property
    def alarming(self) -> bool:
        return self.missing > SURPRISE_SIGMAS * math.sqrt(self.variance) + SURPRISE_ENDS


def merge(known: Lengths, surprise: Surprise, news: News) -> bool:
    """What the store does with the news of a gateway, of one kind of call.  True where it was surprised.

    News are judged by what was known before them.  A surprise leaves little of that and forgets itself.
    """
    for bucket in range(BUCKETS - 1):
        ended, went_on = news.get(bucket, (0, 0))[1], news.get(bucket + 1, (0, 0))[0]
        surprise.observe((ended + max(went_on, 0)) / HALF, ended / HALF, known.hazard(bucket))
    surprised = surprise.alarming
    if surprised:
        known.divide(range(BUCKETS), SURPRISE_LEFT)
        surprise.missing = surprise.variance = 0.0
    known.add(news)
    known.divide([bucket for bucket in news if known.entries[bucket] > ENTRIES_MAX * HALF], 2)
    return surprised


class Watched:
    """One call on its way through the ages: what each step of it teaches."""

    __slots__ = ("_bucket",)

    def __init__(self) -> None:
        self._bucket = -1

    def advance(self, written: int, news: dict[int, tuple[int, int]]) -> None:
        """It has written so many tokens."""
        reached = bucket_of(written)
        while self._bucket < reached:
            self._bucket += 1
            _count(news, self._bucket, HALF, 0)

    def end(self, written: int, of_itself: bool, news: dict[int, tuple[int, int]]) -> None:
        """`of_itself`: it was not stopped by its limit, nor by who asked for it, nor by a failure."""
        self.advance(written, news)
        if of_itself:
            _count(news, self._bucket, 0, HALF)
        else:
            _count(news, self._bucket, -(HALF // 2), 0)


def _count(news: dict[int, tuple[int, int]], bucket: int, entered: int, left: int) -> None:
    before = news.get(bucket, (0, 0))
    news[bucket] = (before[0] + entered, before[1] + left)
