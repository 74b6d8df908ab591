"""Whether turns come back soon, from when calls ended and from what calls say that they go on."""

from benchmarks.experiment import returns
from benchmarks.experiment.returns import COUNTED, KNOWN, PENDING, SOON_SECONDS, Returns


def test_nothing_is_expected_before_enough_is_known() -> None:
    seen = Returns()
    for number in range(KNOWN):
        assert not seen.likely(number)
        seen.ended(str(number), number)
        assert seen.came(str(number), number)
    assert seen.likely(KNOWN)


def test_turns_that_come_late_or_never_are_not_expected() -> None:
    seen = Returns()
    for number in range(4 * KNOWN):
        seen.ended(str(number), 100.0 * number)
        late = 100.0 * number + SOON_SECONDS + 1
        assert seen.came(str(number), late) is False
        assert not seen.likely(late)


def test_an_end_is_gone_on_from_once() -> None:
    seen = Returns()
    seen.ended("a", 0)
    assert not seen.came("b", 1)
    assert seen.came("a", SOON_SECONDS)
    assert not seen.came("a", SOON_SECONDS)


def test_a_name_that_ends_again_counts_from_its_last_end() -> None:
    """Two answers to one prompt: the later one has its time from its own end."""
    seen = Returns()
    seen.ended("a", 0)
    seen.ended("b", 1)
    seen.ended("a", SOON_SECONDS - 1)
    assert seen.came("a", SOON_SECONDS + 5)
    assert not seen.came("b", SOON_SECONDS + 5)


def test_the_most_part_of_them_decides_and_what_is_new_counts_more() -> None:
    seen, at = Returns(), 0.0

    def play(calls: int, *, came: bool) -> None:
        nonlocal at
        for _ in range(calls):
            at += SOON_SECONDS + 1
            seen.ended(str(at), at)
            if came:
                assert seen.came(str(at), at + 1)

    play(10 * COUNTED, came=True)
    assert seen.likely(at + 1)
    play(2 * COUNTED, came=False)
    assert not seen.likely(at + SOON_SECONDS + 1)
    play(2 * COUNTED, came=True)
    assert seen.likely(at + SOON_SECONDS + 1)


def test_what_is_remembered_is_bounded() -> None:
    seen = Returns()
    for number in range(PENDING + 500):
        seen.ended(str(number), 0)
    assert len(seen._pending) == PENDING
    assert not seen.came("0", 0)
    assert seen.came(str(PENDING + 499), 0)
    assert returns.LIKELY == 0.5
    assert not seen.likely(0)
