"""The part of a key's traffic that may be retries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.order import APPOINTMENT_MAX_MS
from gateway.core.retries import (
    APPOINTMENTS_MAX,
    FEW,
    INVITED_MS,
    KEYS_MAX,
    RECENT_MS,
    Appointments,
    RetryBudgets,
    read_retry_count,
)

SHARE = 0.2


def granted(budgets: RetryBudgets, attempts: int, retry_count: int = 1, now_ms: int = 0) -> int:
    return sum(budgets.take("k", retry_count, now_ms) for _ in range(attempts))


def test_a_few_retries_are_there_without_any_first_attempt() -> None:
    assert granted(RetryBudgets(SHARE), 100) == FEW


def test_first_attempts_earn_their_part_and_are_never_out_of_budget() -> None:
    budgets = RetryBudgets(SHARE)
    assert granted(budgets, 100, retry_count=0) == 100
    assert granted(budgets, 1000) == FEW + 100 * SHARE
    assert budgets.take("k", 0, 0)


def test_what_was_tried_most_often_is_the_first_to_be_out() -> None:
    """Seven of it are spent: a third attempt's three fit, a fourth's do not."""
    budgets = RetryBudgets(0.0)
    granted(budgets, 7)
    assert not budgets.take("k", 4, 0)
    assert budgets.take("k", 3, 0)
    assert not budgets.take("k", 1, 0)


def test_who_was_told_when_to_come_back_may_come() -> None:
    """However often it had to try; others are out of budget as before."""
    budgets = RetryBudgets(0.0)
    granted(budgets, FEW)
    budgets.invite("k", 3, 0)
    assert budgets.take("k", 3, 0)
    assert not budgets.take("k", 1, 0)


@pytest.mark.parametrize("refused_ms", [0, 1, INVITED_MS // 2, INVITED_MS - 1])
def test_an_invitation_holds_until_the_latest_time_that_anybody_is_told(refused_ms: int) -> None:
    """Whenever it was made, for one retry, and not for ever."""
    budgets = RetryBudgets(0.0)
    budgets.take("k", 0, 0)
    for _ in range(50):
        budgets.invite("k", 1, refused_ms)
    back_ms = refused_ms + INVITED_MS
    assert granted(budgets, 100, now_ms=back_ms) == 50 + FEW
    for _ in range(50):
        budgets.invite("k", 1, back_ms)
    assert granted(budgets, 100, now_ms=back_ms + 2 * INVITED_MS) == FEW


def test_who_was_told_when_to_come_back_takes_nothing_from_the_others() -> None:
    budgets = RetryBudgets(0.0)
    budgets.invite("k", 3, 0)
    assert budgets.take("k", 3, 0)
    assert granted(budgets, 100) == FEW


def test_the_appointments_of_a_fleet_are_kept() -> None:
    assert INVITED_MS >= APPOINTMENT_MAX_MS


def test_each_key_has_its_own() -> None:
    budgets = RetryBudgets(SHARE)
    granted(budgets, 100)
    assert budgets.take("other", 1, 0)


@pytest.mark.parametrize(
    ("later_ms", "back"),
    [(RECENT_MS - 1, 0), (RECENT_MS + RECENT_MS // 2, FEW // 2), (2 * RECENT_MS, FEW), (10**12, FEW)],
)
def test_what_was_spent_is_forgotten_in_time(later_ms: int, back: int) -> None:
    budgets = RetryBudgets(0.0)
    assert granted(budgets, FEW) == FEW
    assert granted(budgets, 100, now_ms=later_ms) == back


def test_what_was_earned_is_forgotten_in_time() -> None:
    budgets = RetryBudgets(1.0)
    granted(budgets, 500, retry_count=0)
    assert granted(budgets, 1000, now_ms=2 * RECENT_MS) == FEW


def test_the_key_that_asked_longest_ago_is_forgotten_first() -> None:
    """As if it had never asked; how many keys are remembered is bounded."""
    budgets = RetryBudgets(0.0)
    granted(budgets, FEW)
    for number in range(KEYS_MAX - 1):
        budgets.take(f"k{number}", 1, 0)
    assert not budgets.take("k", 1, 0)
    for number in range(KEYS_MAX):
        budgets.take(f"k{number}", 1, 0)
    assert budgets.take("k", 1, 0)


def test_an_appointment_is_kept_once_and_not_before_its_time() -> None:
    """Nor by another key, nor when it is long over."""
    appointments = Appointments()
    for due_ms in (2_000, 1_000):
        appointments.make("k", due_ms)
    assert not appointments.keep("k", 999)
    assert not appointments.keep("other", 1_000)
    assert appointments.keep("k", 1_000)
    assert not appointments.keep("k", 1_999)
    assert not appointments.keep("k", 2_001 + INVITED_MS)
    assert not appointments.keep("k", 2_000)


def test_appointments_are_bounded_for_a_key_and_by_the_number_of_keys() -> None:
    appointments = Appointments()
    for due_ms in range(APPOINTMENTS_MAX + 1):
        appointments.make("k", due_ms)
    assert sum(appointments.keep("k", 10_000) for _ in range(2 * APPOINTMENTS_MAX)) == APPOINTMENTS_MAX
    appointments.make("k", 0)
    for number in range(KEYS_MAX):
        appointments.make(f"k{number}", 0)
    assert not appointments.keep("k", 0)
    assert appointments.keep("k0", 0)


@pytest.mark.parametrize(
    ("raw", "count"),
    [(None, 0), (b"0", 0), (b"2", 2), (b" 2 ", 2), (b"", 0), (b"-1", 0), (b"1.5", 0), (b"two", 0), (b"9" * 30, 0),
     ("٣".encode(), 0), (b"+1", 0), (b"1_0", 0)],
)  # fmt: skip
def test_junk_is_a_first_attempt(raw: bytes | None, count: int) -> None:
    assert read_retry_count(raw) == count


ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from((0, 1, 1000, RECENT_MS // 2, RECENT_MS, 3 * RECENT_MS)))
)


@given(ATTEMPTS, st.floats(0, 2))
def test_retries_are_never_more_than_their_part_and_a_few(
    attempts: list[tuple[int, int]], share: float
) -> None:
    """In every RECENT_MS that begins with an attempt: of two windows of that length at most."""
    budgets, now_ms = RetryBudgets(share), 0
    spent: list[tuple[int, int]] = []
    firsts: list[int] = []
    for retry_count, pause_ms in attempts:
        now_ms += pause_ms
        fits = budgets.take("k", retry_count, now_ms)
        assert fits or retry_count
        if retry_count == 0:
            firsts.append(now_ms)
        elif fits:
            spent.append((now_ms, retry_count))
        recent = sum(count for at_ms, count in spent if at_ms > now_ms - RECENT_MS)
        earned = share * sum(at_ms > now_ms - 3 * RECENT_MS for at_ms in firsts)
        assert recent <= 2 * FEW + 2 * earned + len(firsts) / 1000
