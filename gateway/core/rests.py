"""Why a replica that answers gets no new calls."""

from enum import StrEnum


class Why(StrEnum):
    """Kept in the store, shown by `kvgate status`, and a label of metrics."""

    DRAINED = "drained"
    """An operator wants it."""
    ASLEEP = "asleep"
    """Its metrics say so; `/health` does not."""
    ENDING = "ending"
    """It ends calls by itself, as an engine does that shuts down."""
    FAILING = "failing"
    """Call after call failed there."""
    SUSPECT = "suspect"
    """A call got no answer in time, and nothing has ended there since."""
