"""Whether and when a client tries again: as the OpenAI Python SDK does (`_should_retry`, `_calculate_retry_timeout`).

The SDK decides until an answer begins.  A stream that breaks later is the application's matter; here it is tried again
in the same way, as applications do, out of the same number of retries.
"""

import math
from collections.abc import Mapping

from gateway.loadtest.records import Attempt, End
from gateway.loadtest.scenario import Client

JITTER = 0.25
"""A delay of the client's own is shortened by up to this share."""


def retry_delay_seconds(
    client: Client, attempt: Attempt, headers: Mapping[str, str], retries_done: int, chance: float
) -> float | None:
    """Seconds until the next attempt, or None where there is none.  `chance` is in [0, 1)."""
    if attempt.end in (End.ANSWERED, End.LEFT, End.STOPPED) or retries_done >= client.retries:
        return None
    asked = _asked_seconds(client, headers) if attempt.end is End.REFUSED else None
    if attempt.end is End.REFUSED and not _may_retry(client, attempt.status, headers, asked):
        return None
    if asked is not None and asked > 0:
        return asked
    backoff = min(client.backoff_seconds * 2.0**retries_done, client.backoff_seconds_max)
    return backoff * (1 - JITTER * chance)


def _may_retry(client: Client, status: int, headers: Mapping[str, str], asked: float | None) -> bool:
    if asked is not None and asked > client.retry_after_seconds_max:
        return False
    told = headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    return status in (408, 409, 429) or status >= 500


def _asked_seconds(client: Client, headers: Mapping[str, str]) -> float | None:
    """The first of `retry-after-ms` and `retry-after` that is a number; a date in the latter is not read."""
    if not client.honour_retry_after:
        return None
    for name, per_second in (("retry-after-ms", 1_000), ("retry-after", 1)):
        try:
            asked = float(headers[name]) / per_second
        except (KeyError, ValueError):
            continue
        return asked if math.isfinite(asked) else None
    return None
