"""What one elastic call comes to hold, and what it teaches, as its engine reports the tokens of its stream."""

from collections.abc import Callable

from gateway.core.growth import NEVER, Growth
from gateway.core.learned import LearnedLengths
from gateway.core.lengths import AGES, Watched, bucket_of
from gateway.core.sse import Usage
from gateway.ledger.api import Reservation


class Meter:
    """Of one attempt.  Whoever made it calls `end` once; before that its reservation is not settled."""

    __slots__ = (
        "_growth",
        "_kind",
        "_lengths",
        "_lost",
        "_next_age",
        "_reservation",
        "_unmetered",
        "_watched",
        "due",
    )

    def __init__(
        self,
        growth: Growth,
        reservation: Reservation,
        lengths: LearnedLengths,
        kind: str,
        unmetered: Callable[[], None],
    ) -> None:
        """`kind`: of call, to `lengths`.  `unmetered` is told once where the engine does not report tokens."""
        self.due = 0
        """Tokens written from which on `note` wants to hear of them; only saves time."""
        self._growth = growth
        self._reservation = reservation
        self._lengths = lengths
        self._kind = kind
        self._unmetered = unmetered
        self._watched: Watched | None = None
        self._next_age = 0
        self._lost = False

    def note(self, usage: Usage) -> None:
        """The engine has counted so many tokens until now."""
        written = usage.completion_tokens
        if written is None or self._lost:
            return
        holding = self._growth.note(usage.prompt_tokens, written)
        if holding is not None:
            self._reservation.grow(*holding)
        if written >= self._next_age:
            self._reached(written)
        self.due = min(self._growth.due, self._next_age)

    def lose(self) -> None:
        """An event came without its tokens: the call holds all of its demand from now on, and teaches nothing more."""
        if self._lost:
            return
        self._lost, self.due = True, NEVER
        self._reservation.grow(*self._growth.in_full())
        self._unmetered()

    def lose_sight(self) -> None:
        """The engine writes on and is not read: the call holds all of its demand from now on, and teaches as before.

        It stays so when the engine is read again: how much of what it has written is still on its way is not known.
        """
        if not self._lost:
            self._reservation.grow(*self._growth.in_full())

    def end(self, usage: Usage | None, of_itself: bool) -> None:
        """`of_itself`: neither its limit ended it, nor its client, nor a failure."""
        if self._watched is None:  # nothing of it was seen
            return
        news: dict[int, tuple[int, int]] = {}
        written = usage.completion_tokens if usage else None
        if self._lost or written is None:
            self._watched.end(self._watched_tokens, False, news)
        else:
            self._watched.end(written, of_itself, news)
        self._lengths.observe(self._kind, news)
        self._watched = None

    @property
    def _watched_tokens(self) -> int:
        """Within the last age that was reached."""
        return max(self._next_age - 1, 0)

    def _reached(self, written: int) -> None:
        self._watched = self._watched or Watched()
        news: dict[int, tuple[int, int]] = {}
        self._watched.advance(written, news)
        self._lengths.observe(self._kind, news)
        following = bucket_of(written) + 1
        self._next_age = AGES[following] if following < len(AGES) else NEVER
