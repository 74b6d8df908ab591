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
    """Both, side by side: the engine has to preempt those that are elastic first.  The books know it, settings do not:
    whether an engine does cannot be seen."""


POOL_MODES = (Mode.GUARANTEED, Mode.ELASTIC)
"""That settings may say."""
PROMISES = (Mode.GUARANTEED, Mode.ELASTIC)
"""What a key or class may say; without a word it has what its pool does."""


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
