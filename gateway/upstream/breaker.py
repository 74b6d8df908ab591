"""Whether a replica that answers its probes should get calls: one replica, as one process sees it.

It rests while it says that it is asleep or ending, while calls fail there one after the other, and while one that it
left without an answer may still be in it.  What ends a rest is what the engine says of itself, or a trial: a call of
one token that the watch sends.  Refusals of a client's own making say nothing against a replica, and those of load
only that it is busy: it is left alone for a moment, or for as long as it asks for, and is no worse afterwards.
"""

from enum import StrEnum

from gateway.core.rests import Why
from gateway.core.sse import Failure, inspect_answer
from gateway.upstream.api import Trouble
from gateway.upstream.metrics_text import Vitals

FAILURES_MAX = 5
"""Calls that fail in a row, without one that succeeds between them, until it rests."""
DOUBT_FAILURES = 2
"""Of these, for a trial: an engine that shuts down answers a chat with 500 or a reset, a completion with the truth."""


TOLD_BY_CALLS = frozenset({Why.ENDING, Why.FAILING})
"""What ends these is a trial."""


class Verdict(StrEnum):
    """What a trial came to."""

    GOOD = "good"
    NEUTRAL = "neutral"
    """It is busy, so it says nothing: the next trial may."""
    ENDING = "ending"
    BAD = "bad"


_VERDICTS = {
    Failure.ABORTED: Verdict.ENDING,
    Failure.EMPTY: Verdict.ENDING,
    Failure.BUSY: Verdict.NEUTRAL,
}


def verdict_of(status: int, body: bytes) -> Verdict:
    """Of the answer to a trial.  An engine that refuses it, as one that serves embeddings does, is at work."""
    if status in (429, 503):
        return Verdict.NEUTRAL
    if status != 200:
        return Verdict.BAD if status >= 500 else Verdict.GOOD
    failure = inspect_answer(body).failure
    return Verdict.GOOD if failure is None else _VERDICTS.get(failure, Verdict.BAD)


class Breaker:
    """Takes in what happens at a replica; `reasons` says why it should rest."""

    def __init__(self) -> None:
        self._asleep = False
        self._ending = False
        self._failures = 0
        self._suspect = False
        self._running_most: int | None = None
        """Of those that ran in a suspect."""
        self._aborted: int | None = None
        """Calls that the engine has ended by itself since it began."""
        self.doubtful = False
        """It may be ending: a trial has to tell."""
        self._busy = False
        self.asks_for_rest = False
        """It is busy and said for how long: so it rests, whoever else is there."""

    @property
    def reasons(self) -> list[Why]:
        """All there are, the one to tell first."""
        found = {
            Why.ASLEEP: self._asleep,
            Why.ENDING: self._ending,
            Why.FAILING: self._failures >= FAILURES_MAX,
            Why.SUSPECT: self._suspect,
            Why.BUSY: self._busy,
        }
        return [why for why, holds in found.items() if holds]

    def wants_trial(self, another: bool) -> bool:
        """`another` replica takes calls; else only a suspect is tried, which does not say how many calls run in it."""
        if self._suspect and self._running_most is None:
            return True
        return another and (self.doubtful or not TOLD_BY_CALLS.isdisjoint(self.reasons))

    def succeeded(self) -> None:
        """A call was answered, which did not begin before a rest."""
        self._failures = 0

    def rested(self) -> None:
        """The time of a busy one is over."""
        self._busy = self.asks_for_rest = False

    def failed(self, trouble: Trouble, rest_seconds: float | None = None) -> None:
        """A call failed there.  Whoever reports a busy one calls `rested` when its time is over."""
        if trouble is Trouble.BUSY:
            self._busy = True
            self.asks_for_rest = self.asks_for_rest or rest_seconds is not None
        elif trouble is Trouble.ENDING:
            self._ending = True
        elif trouble in (Trouble.BROKEN, Trouble.SLOW):
            self._failures += 1
            self.doubtful = self.doubtful or self._failures == DOUBT_FAILURES
        if trouble is Trouble.SLOW and not self._suspect:
            self._suspect, self._running_most = True, None

    def saw(self, vitals: Vitals) -> None:
        """What its metrics say; what they do not state is not known."""
        self._asleep = vitals.awake is False
        before, self._aborted = self._aborted, vitals.aborted
        if before is not None and vitals.aborted is not None:
            self.doubtful = self.doubtful or vitals.aborted > before
        if self._suspect and vitals.running is not None:
            self._look_for_ends(vitals.running)

    def _look_for_ends(self, running: int) -> None:
        if running == 0 or running < (self._running_most or 0):
            self._suspect = False
        self._running_most = running

    def tried(self, verdict: Verdict) -> None:
        if verdict is Verdict.NEUTRAL:
            return
        self.doubtful = False
        if verdict is Verdict.GOOD:
            self._ending, self._failures = False, 0
            self._suspect = self._suspect and self._running_most is not None
        elif verdict is Verdict.ENDING:
            self._ending = True
