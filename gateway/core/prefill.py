"""How long a replica takes to compute a prompt, learned from streams, for answers that show no first token."""

import math
from collections.abc import Iterable

from gateway.core.estimate import PREFILL_TOKENS_PER_SECOND

MARGIN = 2
"""The share of the prefill budget ends after this many times the expected time."""
WEIGHT = 0.2
"""Of the newest observation in the running average."""


class PrefillTimes:
    """Milliseconds per prompt token of each replica, from what it is sent until its first data event.

    That includes what the call waited inside the engine, so the average errs on the long side, which is safe.
    """

    def __init__(self) -> None:
        self._ms_per_token: dict[str, float] = {}

    def observe(self, replica: str, prompt_tokens: int, milliseconds: float) -> None:
        """Only prompts that are charged against the budget tell anything."""
        seen = milliseconds / prompt_tokens
        known = self._ms_per_token.get(replica, seen)
        self._ms_per_token[replica] = known + WEIGHT * (seen - known)

    def expected_ms(self, replicas: Iterable[str], prompt_tokens: int) -> int:
        """In which time a prompt of that length is computed on one of these, on average, without a margin."""
        usual = 1000 / PREFILL_TOKENS_PER_SECOND
        paces = [self._ms_per_token.get(replica, usual) for replica in replicas] or [usual]
        return math.ceil(prompt_tokens * sum(paces) / len(paces))

    def seconds(self, replica: str, prompt_tokens: int) -> float:
        """When a prompt of that length is computed, with the margin."""
        per_token = self._ms_per_token.get(replica, 1000 / PREFILL_TOKENS_PER_SECOND)
        return MARGIN * per_token * prompt_tokens / 1000


def wait_for_first_token_ms(wait_ms: int, ttft_ms: int | None, passed_ms: int, prefill_ms: int) -> int:
    """How long a call is willing to wait for its place, so that its first token comes in time.

    A place that it gets at the end of `ttft_ms` would be no use: its prompt has to be computed in what is left.
    `passed_ms` are gone already.  One that cannot be in time any more takes a place that is free at once.
    """
    if ttft_ms is None:
        return wait_ms
    return min(wait_ms, max(ttft_ms - passed_ms - prefill_ms, 0))
