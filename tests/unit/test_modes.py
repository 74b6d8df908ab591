"""Which calls grow, and where those go that were promised not to be preempted."""

import pytest

from gateway.core.modes import Mode, can_keep, growing_yield, is_elastic

G, E, S = Mode.GUARANTEED, Mode.ELASTIC, Mode.SHARED


@pytest.mark.parametrize(
    ("asked", "pools", "elastic", "kept"),
    [
        (None, (G,), False, True),
        (None, (E,), True, True),
        (None, (S,), True, True),
        (None, (G, E), True, True),
        (E, (G,), False, True),
        (E, (E,), True, True),
        (G, (G,), False, True),
        (G, (E,), False, False),
        (G, (E, E), False, False),
        (G, (E, G), False, True),
        (G, (S,), False, True),
    ],
)
def test_table(asked: Mode | None, pools: tuple[Mode, ...], elastic: bool, kept: bool) -> None:
    assert (is_elastic(asked, pools), can_keep(asked, pools)) == (elastic, kept)


@pytest.mark.parametrize("pool", Mode)
def test_who_may_fall_short_yields_where_others_hold_all(pool: Mode) -> None:
    assert growing_yield(pool) == (pool is S)
