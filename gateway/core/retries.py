"""How much of a key's traffic may be retries: beyond that a fleet is busy with calls that were given up.

As Envoy and Finagle have it, retries may be a part of the recent first attempts, and a few more.  A call that is tried
for the nth time takes n of it, so that what was tried most often is the first to be out.  Who is told when to come back
is asked to, and gets what that takes.  One process's own view.
"""

import re
from bisect import insort
from dataclasses import dataclass, field

RETRY_COUNT = b"x-stainless-retry-count"
"""Header of the OpenAI and Anthropic clients: 0 on the first attempt."""
RECENT_MS = 60_000
INVITED_MS = 120_000
"""Nobody is asked to come back later than that: appointments are a minute at most, and quotas that take longer say
that coming back is in vain."""
FEW = 10
"""What a key may spend in that time that asks nothing for the first time."""
KEYS_MAX = 10_000
"""Whose traffic is remembered: those that asked last."""
APPOINTMENTS_MAX = 1_000
"""Of one key that are remembered."""
SCALE = 1_000
"""Parts of one retry."""

_NUMBER = re.compile(rb"[0-9]{1,9}")


def read_retry_count(raw: bytes | None) -> int:
    """0 for a first attempt, and for what is no number."""
    if raw is None or not _NUMBER.fullmatch(raw.strip()):
        return 0
    return int(raw)


@dataclass(slots=True)
class _Windows:
    """Two sums: over a window and over the one before."""

    length_ms: int
    start_ms: int
    current: int = 0
    previous: int = 0

    def add(self, now_ms: int, amount: int) -> None:
        self.turn(now_ms)
        self.current += amount

    def turn(self, now_ms: int) -> None:
        age_ms = now_ms - self.start_ms
        if age_ms < self.length_ms:
            return
        self.previous = self.current if age_ms < 2 * self.length_ms else 0
        self.current = 0
        self.start_ms = now_ms - age_ms % self.length_ms


class _Recent(_Windows):
    """A sum over the last window's length: this one and the part of the one before that still counts."""

    def total(self, now_ms: int) -> int:
        self.turn(now_ms)
        return self.current + self.previous * (self.length_ms - (now_ms - self.start_ms)) // self.length_ms


class _Stock(_Windows):
    """What is used up, and kept for a window's length at least and twice that at most."""

    def total(self, now_ms: int) -> int:
        self.turn(now_ms)
        return self.current + self.previous

    def use(self, amount: int) -> None:
        """The oldest first."""
        old = min(amount, self.previous)
        self.previous -= old
        self.current -= amount - old


@dataclass(slots=True)
class _Account:
    """In parts of a retry."""

    earned: _Recent
    """By first attempts."""
    invited: _Stock
    spent: _Recent
    """By retries that nobody asked for."""


@dataclass(slots=True)
class RetryBudgets:
    """Of every key; times are milliseconds of a clock that never goes back."""

    share: float
    """Retries that one first attempt earns."""
    _accounts: dict[str, _Account] = field(default_factory=dict)
    """Those that asked last are the last."""

    def take(self, key: str, retry_count: int, now_ms: int) -> bool:
        """Note an attempt; False when it is a retry that the key has nothing left for, which then takes nothing."""
        account = self._account(key, now_ms)
        if retry_count == 0:
            account.earned.add(now_ms, round(self.share * SCALE))
            return True
        price = retry_count * SCALE
        asked_for = min(price, account.invited.total(now_ms))
        own = price - asked_for
        if own and account.spent.total(now_ms) + own > FEW * SCALE + account.earned.total(now_ms):
            return False
        account.invited.use(asked_for)
        account.spent.add(now_ms, own)
        return True

    def invite(self, key: str, retry_count: int, now_ms: int) -> None:
        """An attempt was refused with a time to come back: the retry of that number is asked for."""
        self._account(key, now_ms).invited.add(now_ms, retry_count * SCALE)

    def _account(self, key: str, now_ms: int) -> _Account:
        account = self._accounts.pop(key, None) or _new_account(now_ms)
        self._accounts[key] = account
        if len(self._accounts) > KEYS_MAX:
            del self._accounts[next(iter(self._accounts))]
        return account


@dataclass(slots=True)
class Appointments:
    """When clients of each key were told to come back, in this process; times as above.

    Whose call it is that comes then is not known: any retry of the key keeps the appointment that is due longest.
    """

    _due: dict[str, list[int]] = field(default_factory=dict)
    """In order of time; keys that asked last are the last."""

    def make(self, key: str, due_ms: int) -> None:
        due = self._due.pop(key, [])
        if len(due) < APPOINTMENTS_MAX:
            insort(due, due_ms)
        self._due[key] = due
        if len(self._due) > KEYS_MAX:
            del self._due[next(iter(self._due))]

    def keep(self, key: str, now_ms: int) -> bool:
        """A retry has come; False when nobody was told to come by now."""
        due = self._due.get(key, [])
        while due and due[0] < now_ms - INVITED_MS:
            del due[0]
        if not due or due[0] > now_ms:
            return False
        del due[0]
        return True


def _new_account(now_ms: int) -> _Account:
    return _Account(_Recent(RECENT_MS, now_ms), _Stock(INVITED_MS, now_ms), _Recent(RECENT_MS, now_ms))
