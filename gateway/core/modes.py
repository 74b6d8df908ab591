"""What a pool holds for its calls from their beginning on, and what keys and classes were promised."""

from collections.abc import Collection
from enum import StrEnum

from gateway.core import elastic


class Mode(StrEnum):
    GUARANTEED = elastic.GUARANTEED
    """All that a call may come to need: nothing that runs there is ever preempted."""
    ELASTIC = elastic.ELASTIC
    """What a call may need until it grows: more calls run at once, and a preemption is rare, not impossible."""
    SHARED = elastic.SHARED
    """Both, side by side: its engines have to heed `priority`, and preempt those that are elastic first.  Whether one
    does cannot be seen from outside: vLLM 0.32 answers a call of any `priority` with 200 under either policy."""


PROMISES = (Mode.GUARANTEED, Mode.ELASTIC)
"""What a key or class may say; without a word it has what its pool does."""


def growing_yield(pool: Mode) -> bool:
    """Whether calls that grow have to be preempted there before those that hold all of their demand."""
    return pool is Mode.SHARED


def is_promised(asked: Mode | None) -> bool:
    """The call may go to no pool that does not keep it."""
    return asked is Mode.GUARANTEED


def keeps(pool: Mode) -> bool:
    """Whether a call that was promised `guaranteed` may go there."""
    return pool is not Mode.ELASTIC


def can_keep(asked: Mode | None, pools: Collection[Mode]) -> bool:
    """Whether some pool of a lane may take the call; `pools` are their modes."""
    return not is_promised(asked) or any(keeps(pool) for pool in pools)


def is_elastic(asked: Mode | None, pools: Collection[Mode]) -> bool:
    """Whether the call grows in some pool of a lane; in those that are guaranteed it holds all from the beginning."""
    return not is_promised(asked) and any(pool is not Mode.GUARANTEED for pool in pools)
