"""How long a replica takes to compute a prompt, learned from streams, for answers that show no first token."""

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

    def seconds(self, replica: str, prompt_tokens: int) -> float:
        """When a prompt of that length is computed, with the margin."""
        per_token = self._ms_per_token.get(replica, 1000 / PREFILL_TOKENS_PER_SECOND)
        return MARGIN * per_token * prompt_tokens / 1000
