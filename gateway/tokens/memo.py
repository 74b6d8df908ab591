"""Counts of texts that were counted before."""

from hashlib import sha256

ENTRY_BYTES = 160
"""What CPython needs for one entry: a digest 80, a count 32, its share of the table 40."""
MEMO_BYTES_MAX = 10 << 20
"""65,536 texts: the histories of some six hundred conversations of a hundred messages."""
GENERATION_ENTRIES_MAX = MEMO_BYTES_MAX // ENTRY_BYTES // 2
"""A table of this length is grown or dropped in half a millisecond, which an event loop can spare."""

HASHED_AT_ONCE_BYTES = 2047
"""From 2,048 bytes on hashlib lets go of the interpreter lock.  To get it back beside threads that count took the event
loop longer than the hash: its longest gap among twelve new prompts of 64k tokens was 32 ms that way, 21 ms this way.
"""


class Memo:
    """Token counts by the SHA-256 of their text, of which nothing else is kept.

    It forgets what was not asked for while GENERATION_ENTRIES_MAX others were added or asked for again.  Threads
    share it without a lock: an entry never changes, every step on a table is one of the interpreter's, and the worst
    that two threads do to each other is to forget a generation early or to overfill it by one entry each.
    """

    def __init__(self) -> None:
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: bytes) -> int | None:
        """The tokens of the text whose `text_key` this is; None where they are not known."""
        tokens = self._young.get(key)
        if tokens is None:
            tokens = self._old.get(key)
            if tokens is not None:
                self.put(key, tokens)
        return tokens

    def put(self, key: bytes, tokens: int) -> None:
        if len(self._young) >= GENERATION_ENTRIES_MAX:
            self._old, self._young = self._young, {}
        self._young[key] = tokens


def text_key(text: str) -> bytes:
    """The text's SHA-256.  A cheaper hash would do for honest texts; with one that two texts can be made to share, a
    long prompt would be admitted at the count of a short one.
    """
    data = text.encode(errors="surrogatepass")
    digest = sha256(data[:HASHED_AT_ONCE_BYTES])
    for start in range(HASHED_AT_ONCE_BYTES, len(data), HASHED_AT_ONCE_BYTES):
        digest.update(data[start : start + HASHED_AT_ONCE_BYTES])
    return digest.digest()
