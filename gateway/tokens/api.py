"""Counting prompt tokens."""

from collections.abc import Sequence
from typing import Protocol


class Counter(Protocol):
    async def count(self, texts: Sequence[str]) -> int:
        """Tokens of all texts together.  Long texts are counted off the event loop; special tokens count as text."""
        ...
