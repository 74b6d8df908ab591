"""Why a replica that answers gets no new calls."""

from email.utils import parsedate_to_datetime
from enum import StrEnum

_DIGITS_MAX = 9
"""Of a number of seconds; more are more than any limit here."""


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
    BUSY = "busy"
    """It answered 429 or 503: load, no fault.  It is left alone for as long as it asks for."""


BUSY_SECONDS = 1.0
"""For which a replica is left alone that says it is busy and not for how long."""
BUSY_SECONDS_MAX = 60.0
"""However long it asks for: nobody else says when it has room again."""


def read_retry_after(value: bytes | None, now: float) -> float | None:
    """Seconds for which an engine asks to be left alone, 0 to BUSY_SECONDS_MAX; None where it does not say.

    Whole seconds, or a date that is compared with `now` (Unix time in seconds).  Source: RFC 9110, 10.2.3.
    """
    text = (value or b"").decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:_DIGITS_MAX]), BUSY_SECONDS_MAX))
    try:
        at = parsedate_to_datetime(text)
        return min(max(at.timestamp() - now, 0.0), BUSY_SECONDS_MAX)
    except (ValueError, OverflowError):
        return None


def busy_seconds(asked: float | None) -> float:
    """For how long a busy replica is left alone."""
    return BUSY_SECONDS if asked is None else max(asked, BUSY_SECONDS)
