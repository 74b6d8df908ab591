"""Counting prompt tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.core.content import Share
from gateway.core.prompt import Text
from gateway.core.request import GenerationRequest


class Counted(NamedTuple):
    tokens: int
    exact: bool
    """False where bytes had to stand for tokens, because too much was being counted: too many, never too few."""
    shares: tuple[Share, ...] = ()
    """By script, where texts were counted; of what is not exact, nothing is known of it."""


class Counter(Protocol):
    async def count(self, texts: Sequence[Text]) -> Counted:
        """Tokens of all texts together; special tokens count as text.

        Long texts are counted off the event loop.  It suspends before that begins: a coroutine that is closed there
        has cost nothing.
        """
        ...


class ModelCounter(Protocol):
    """Counts as a fleet's engines do."""

    async def count(self, request: GenerationRequest) -> list[int] | None:
        """Tokens of each of the request's prompts, in their order; None where that cannot be told, or not soon.

        It suspends before it costs anything but a look at the size.
        """
        ...
