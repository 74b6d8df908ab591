"""Whether turns come back soon, from when calls ended and from what calls say that they go on."""

import random

from gateway.core import returns
from gateway.core.returns import COUNTED, KNOWN, PENDING, PROBED, SOON_SECONDS, Returns, ReturnsByKind


def test_nothing_is_expected_before_enough_is_known() -> None:
    seen = Returns()
    for number in range(KNOWN):
        assert not seen.likely(number)
        assert seen.ended(str(number), number), "it is kept to find out"
        assert seen.came(str(number), number)
    assert seen.likely(KNOWN)


def test_turns_that_come_late_or_never_are_not_expected() -> None:
    seen = Returns()
    for number in range(4 * KNOWN):
        seen.ended(str(number), 100.0 * number)
        late = 100.0 * number + SOON_SECONDS + 1
        assert seen.came(str(number), late) is False
        assert not seen.likely(late)


def test_of_what_is_not_expected_a_few_are_kept() -> None:
    seen, at, kept = Returns(), 0.0, 0
    for number in range(KNOWN + 10 * PROBED):
        at += SOON_SECONDS + 1
        kept += seen.ended(str(number), at)
    assert kept == KNOWN + 10


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
            kept = seen.ended(str(at), at)
            if came:
                assert seen.came(str(at), at + 1) is kept

    play(10 * COUNTED, came=True)
    assert seen.likely(at + 1)
    play(2 * COUNTED, came=False)
    assert not seen.likely(at + SOON_SECONDS + 1)
    play(10 * COUNTED, came=True)
    assert seen.likely(at + SOON_SECONDS + 1)


def test_processes_that_see_each_others_turns_come_to_expect_them() -> None:
    """Each turn goes to any of eight; what was kept is known to whoever it comes to."""
    lots = random.Random(5)
    processes, kept, at = [Returns() for _ in range(8)], dict[str, bool](), 0.0
    for number in range(3_000):
        at += 0.01
        ended, comes = lots.choice(processes), lots.choice(processes)
        kept[str(number)] = ended.ended(str(number), at)
        name = str(number - 100)
        if kept.get(name) and not comes.came(name, at):
            comes.came_from_elsewhere()
    assert all(seen.likely(at) for seen in processes)
    assert sum(kept[str(number)] for number in range(2_000, 3_000)) == 1_000


def test_processes_expect_nothing_that_does_not_come() -> None:
    """One conversation in five goes on."""
    lots = random.Random(5)
    processes, kept, at = [Returns() for _ in range(8)], dict[str, bool](), 0.0
    for number in range(10_000):
        at += 0.1
        ended, comes = lots.choice(processes), lots.choice(processes)
        kept[str(number)] = ended.ended(str(number), at)
        name = str(number - 20)
        if kept.get(name) and lots.random() < 0.2 and not comes.came(name, at):
            comes.came_from_elsewhere()
    assert not any(seen.likely(at + SOON_SECONDS + 1) for seen in processes)
    assert sum(kept[str(number)] for number in range(9_000, 10_000)) < 100


def test_what_is_remembered_is_bounded() -> None:
    seen = Returns()
    for number in range(KNOWN):
        seen.ended(str(number), 0)
        seen.came(str(number), 0)
    for number in range(KNOWN, PENDING + 500):
        seen._came = 2.0 * COUNTED  # all are expected back
        seen.ended(str(number), 0)
    assert len(seen._pending) == PENDING
    assert not seen.came(str(KNOWN), 0)
    assert seen.came(str(PENDING + 499), 0)
    assert returns.LIKELY == 0.5


def test_kinds_are_kept_apart_and_are_bounded() -> None:
    kinds = ReturnsByKind(kinds_max=2)
    first = kinds.of("a", "normal")
    assert kinds.of("a", "low") is not first
    assert kinds.of("a", "normal") is first
    kinds.of("b", "low")
    assert kinds.of("a", "normal") is first
    assert len(kinds) == 2
