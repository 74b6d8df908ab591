"""How many tokens a prompt may be, from cheap bounds to a count, and what a call asks of a fleet."""

import math
from fractions import Fraction
from functools import lru_cache

import msgspec

from gateway.core.prompt import Prompt, PromptTokens
from gateway.core.quota import Units
from gateway.core.request import GenerationRequest

LONGEST_TOKEN_BYTES = 128
"""The longest token of cl100k_base, which is 128 spaces."""
PREFILL_TOKENS_MIN = 512
"""Shorter prompts delay nobody and are not charged against a replica's prefill budget."""
PREFILL_TOKENS_PER_SECOND = 2000
OUTPUT_TOKENS_PER_SECOND = 40
"""Speeds that the cost of a call assumes until they are learned."""


class Demand(msgspec.Struct, frozen=True):
    """What one call needs of a replica."""

    lane: str
    sequences: int
    prompt_tokens: int
    """Of all its prompts together."""
    longest_prompt_tokens: int
    """Of its longest prompt: what context limits and lanes are judged by."""
    output_tokens: int
    """The most that each sequence may generate, clamped to the context; written into the forwarded body."""
    blocks: int
    """What is reserved."""
    block_size: int
    unshared_blocks: int
    """The same without sharing of a prompt among its sequences: what fairness and a key's cap count."""
    prefill: int
    """Prompt tokens charged against the prefill budget; 0 for short prompts."""
    cost: int
    """Block-seconds."""
    exclude: tuple[str, ...] = ()
    """Replicas of its lane where too much of its prompt would have to be computed."""

    @property
    def units(self) -> Units:
        """What a key's rate quotas count of it before it runs: the most that it may take."""
        return Units(1, self.prompt_tokens, self.output_tokens * self.sequences)


def apply_factor(tokens: int, factor: float) -> int:
    """A count by the packaged vocabulary as a count by the served model's, rounded up."""
    numerator, denominator = _ratio(factor)
    return -(-tokens * numerator // denominator)


@lru_cache(maxsize=64)
def _ratio(factor: float) -> tuple[int, int]:
    """As the operator wrote it: 1.1 is 11/10."""
    return Fraction(str(factor)).as_integer_ratio()


def prompt_tokens(prompt: Prompt, counted: int, factor: float) -> int:
    """Tokens of a prompt whose texts count `counted`; ids are exact and take neither count nor factor."""
    if isinstance(prompt, PromptTokens):
        return prompt.tokens
    return apply_factor(counted, factor) + prompt.fixed_tokens


def token_bounds(request: GenerationRequest, factor: float) -> tuple[int, int]:
    """Least and most that `prompt_tokens` can say of the longest prompt, from the lengths of its texts alone.

    A token of a byte-level vocabulary covers 1 to LONGEST_TOKEN_BYTES bytes.
    """
    low = [prompt_tokens(p, -(-_least_bytes(p) // LONGEST_TOKEN_BYTES), factor) for p in request.prompts]
    high = [prompt_tokens(p, _most_bytes(p), factor) for p in request.prompts]
    return max(request.prompt_tokens(low)), max(request.prompt_tokens(high))


def prefill_share(tokens: int) -> int:
    return tokens if tokens >= PREFILL_TOKENS_MIN else 0


def call_cost(blocks: int, tokens: int, output_tokens: int) -> int:
    """Block-seconds: `max(1, blocks x ceil(p / 2000 + m / 40))`."""
    work = tokens * OUTPUT_TOKENS_PER_SECOND + output_tokens * PREFILL_TOKENS_PER_SECOND
    seconds = -(-work // (PREFILL_TOKENS_PER_SECOND * OUTPUT_TOKENS_PER_SECOND))
    return max(1, blocks * seconds)


def held_cost(blocks: int, seconds: float) -> int:
    """Block-seconds that a call has really held."""
    return max(1, math.ceil(blocks * seconds))


def _least_bytes(prompt: Prompt) -> int:
    return 0 if isinstance(prompt, PromptTokens) else prompt.utf8_bytes - prompt.escape_bytes


def _most_bytes(prompt: Prompt) -> int:
    return 0 if isinstance(prompt, PromptTokens) else prompt.utf8_bytes
