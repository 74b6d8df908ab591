"""Counting prompt tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.core.content import Share
from gateway.core.prefixes import PromptCount
from gateway.core.prompt import Text
from gateway.core.request import GenerationRequest


class Counted(NamedTuple):
    tokens: int
    exact: bool
    """False where bytes had to stand for tokens, because too much was being counted: too many, never too few."""
    shares: tuple[Share, ...] = ()
    """By script, where texts were counted; of what is not exact, nothing is known of it."""
    points: bytes = b""
    """How it begins, as `PromptCount` has it."""


class Counter(Protocol):
    async def count(self, texts: Sequence[Text]) -> Counted:
        """Tokens of all texts together; special tokens count as text.

        Long texts are counted off the event loop.  It suspends before that begins: a coroutine that is closed there
        has cost nothing.
        """
        ...


class ModelCounter(Protocol):
    """Counts as a fleet's engines do."""

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        """Of each of the request's prompts, in their order; None where that cannot be told, or not soon.

        `block_size`: for which their beginnings are wanted, too; 0 = they are not.
        It suspends before it costs anything but a look at the size.
        """
        ...


class IdReader(Protocol):
    """Reads prompts that are token ids."""

    async def points(self, request: GenerationRequest, block_size: int) -> bytes:
        """How the only prompt of a completion begins, as `PromptCount` has it; empty where that cannot be told soon."""
        ...
