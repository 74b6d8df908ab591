"""What the runs on real engines judge: how full they were, and whether the ledger ever held less than an engine."""

import pytest

from tests.vllm.beside import Cancelled, Look, Shortfall, Sight, fed, filled, shortfalls


def sight(used: int, reserved: int) -> Sight:
    return Sight(used=used, reserved=reserved, reserved_least=reserved, limit=100)


def looks(*rows: tuple[float, int, int], name: str = "a", queue: int = 1) -> list[Look]:
    """Time, used, reserved."""
    return [Look(at, queue, {name: sight(used, reserved)}) for at, used, reserved in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0.0, 50, 50), (0.1, 40, 50)], []),
        ([(0.0, 51, 50), (0.1, 50, 50)], [Shortfall(0.0, 1, 1)]),
        ([(0.0, 50, 50), (0.1, 52, 50), (0.2, 55, 50), (0.5, 51, 50), (0.6, 1, 1)], [Shortfall(0.4, 3, 5)]),
        ([(0.0, 9, 8), (0.5, 9, 8)], [Shortfall(0.5, 2, 1)]),
        ([(0.0, 9, 8), (0.5, 8, 8), (1.0, 9, 8)], [Shortfall(0.0, 1, 1), Shortfall(0.0, 1, 1)]),
    ],
    ids=["never", "once", "long", "to the end", "twice"],
)
def test_shortfalls(rows: list[tuple[float, int, int]], expected: list[Shortfall]) -> None:
    found = shortfalls(looks(*rows), [])
    assert [(one.looks, one.blocks) for one in found] == [(one.looks, one.blocks) for one in expected]
    assert [one.seconds for one in found] == pytest.approx([one.seconds for one in expected])


def test_one_is_long_only_where_it_was_seen_all_the_while() -> None:
    assert Shortfall(0.3, 4, 1).is_long
    assert not Shortfall(0.2, 4, 1).is_long
    assert not Shortfall(9.0, 2, 1).is_long


FALLS = looks((10.05, 40, 40), (10.15, 60, 40), (10.3, 60, 40), (10.6, 60, 40), (10.7, 40, 40))


@pytest.mark.parametrize(
    ("cancelled", "missing"),
    [
        ([Cancelled(10.0, "a", 20)], 0),
        ([Cancelled(10.0, "a", 15), Cancelled(10.1, "a", 5)], 0),
        ([Cancelled(10.0, "a", 19)], 1),
        ([Cancelled(10.0, "b", 20)], 20),
        ([Cancelled(9.0, "a", 20)], 20),
    ],
    ids=["it", "two", "too small", "elsewhere", "long ago"],
)
def test_what_was_cancelled_is_no_part_of_it(cancelled: list[Cancelled], missing: int) -> None:
    found = shortfalls(FALLS, cancelled)
    assert [one.blocks for one in found] == ([missing] if missing else [])


def test_a_later_cancel_excuses_only_what_follows() -> None:
    found = shortfalls(FALLS, [Cancelled(10.5, "a", 20)])
    assert [(one.looks, one.blocks) for one in found] == [(2, 20)]


def test_an_excused_time_ends_when_the_engine_holds_no_more() -> None:
    again = looks((10.8, 60, 40), (10.9, 60, 40))
    found = shortfalls([*FALLS, *again], [Cancelled(10.0, "a", 20)])
    assert [(one.looks, one.blocks) for one in found] == [(2, 20)]


def test_each_replica_by_itself() -> None:
    both = [Look(0.1 * tick, 0, {"a": sight(5, 9), "b": sight(5, 4)}) for tick in range(3)]
    assert [(one.looks, one.blocks) for one in shortfalls(both, [])] == [(3, 1)]


def test_how_full_is_the_average_over_the_time_in_which_calls_waited() -> None:
    seen = [
        *looks((0.0, 0, 0), queue=0),
        *looks((4.0, 0, 100), (5.0, 0, 60)),
        *looks((8.0, 0, 7), queue=0),
    ]
    assert filled(seen, 100) == pytest.approx((1 * 100 + 3 * 60) / 4 / 100)
    assert fed(seen) == 1
    assert fed([*seen, *looks((10.0, 0, 7), (12.0, 0, 7), queue=0)]) == pytest.approx(0.5)
