"""What was found out before: of each text a number, or more."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from gateway.core.prompt import Text

ENTRY_BYTES = 100
"""What CPython needs for one entry: a key 36, a number 32, its share of a table that is just full 30."""
MEMO_BYTES_MAX = 8 << 20
"""84,000 texts: the histories of some eight hundred conversations of a hundred messages."""
GENERATION_ENTRIES_MAX = MEMO_BYTES_MAX // ENTRY_BYTES // 2
"""A table of this length is grown or dropped in half a millisecond, which an event loop can spare."""

V = TypeVar("V")

_LITERAL, _DECODED = secrets.token_bytes(32), secrets.token_bytes(32)
"""As long as SipHash's state, so that they hide it also where PYTHONHASHSEED, the hash's own key, is set.  They differ
because a text may look like the JSON of another.
"""


class Memo(Generic[V]):
    """What is known by the `text_key` of their text, of which nothing else is kept.

    It forgets what was not asked for while `generation_max` others were added or asked for again.  Threads
    share it without a lock: an entry never changes, every step on a table is one of the interpreter's, and the worst
    that two threads do to each other is to forget a generation early or to overfill it by one entry each.
    """

    def __init__(self, generation_max: int = GENERATION_ENTRIES_MAX) -> None:
        self._young: dict[int, V] = {}
        self._old: dict[int, V] = {}
        self._generation_max = generation_max

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> V | None:
        """What was put for the text whose `text_key` this is; None where nothing is known."""
        known = self._young.get(key)
        if known is None:
            known = self._old.get(key)
            if known is not None:
                self.put(key, known)
        return known

    def get_all(self, keys: Sequence[int]) -> list[V | None]:
        """The same of many."""
        found = map(self._young.get, keys)
        return [self.get(key) if known is None else known for key, known in zip(keys, found, strict=True)]

    def put(self, key: int, known: V) -> None:
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, {}
        self._young[key] = known


def text_key(text: Text) -> int:
    """64 bits that nobody outside of this process can know or make two texts share: a long prompt would be admitted at
    the count of a short one.

    CPython's hash of bytes is SipHash-1-3 (PEP 456), a keyed function made for tables that strangers fill.  At these
    lengths it needs a third of SHA-256's time, and it keeps the interpreter lock: to get that back beside threads that
    count would take the event loop longer than the hash.  Of texts it would be no such key: texts of characters of one
    byte and of two can have the same bytes in memory.
    """
    if isinstance(text, str):
        return hash(_DECODED + text.encode(errors="surrogatepass"))
    return hash(_LITERAL + text)


def literal_keys(literals: Iterable[msgspec.Raw]) -> list[int]:
    """The `text_key` of each."""
    return [hash(_LITERAL + literal) for literal in literals]
