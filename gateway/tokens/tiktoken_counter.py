"""Counting with the cl100k_base vocabulary that ships with the package; never a network access."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import tiktoken

from gateway.core.outcomes import OperatorError
from gateway.core.prompt import Text, literal_text, text_bytes
from gateway.tokens.api import Counted, Counter
from gateway.tokens.memo import Memo, text_key
from gateway.tokens.threads import THREADS, CountingThreads, IsLate

VOCABULARY = Path(__file__).parent / "data" / "cl100k_base.tiktoken"
VOCABULARY_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""How cl100k_base cuts text into words before it merges bytes (`tiktoken_ext.openai_public`)."""

PIECE_CHARS = 4096
"""Texts are counted in pieces of this length; a cut adds a token now and then.

It bounds three things: merging, which is worse than linear in the length of a word (a million emoji in one
piece: 630 ms; in pieces: 160 ms, and one piece's time where pieces are equal), the interpreter lock, which is
held while a piece's tokens become a list, and the time until a count that nobody waits for any more stops.
"""
PART_CHARS = 4 * PIECE_CHARS
"""What is remembered of a long text: the count of each part, so that one that grew is counted from its last part on."""
INLINE_CHARS = 4096
"""Up to this many unknown texts and characters are counted on the event loop: 0.3 ms of English, 0.7 ms of emoji."""
INLINE_CHARS_A_TURN = 4 * INLINE_CHARS
"""And so many in one turn of the loop, whoever asks: a call may have a thousand short prompts, a turn many calls."""
LOOKED_UP_TEXTS_MAX = 300
LOOKED_UP_BYTES_MAX = 3 << 18
"""Up to this much is looked up on the event loop: 1 us a text, as long as counting four characters takes (so every
text is looked up), and 0.3 to 0.6 us a kilobyte, all in all under 1 ms.
"""


class VocabularyError(OperatorError):
    """The packaged vocabulary is missing or damaged; one line for the operator."""


class _Part(NamedTuple):
    """`text[start:end]`, whose count is not known."""

    key: int
    text: str
    start: int
    end: int

    def pieces(self) -> Iterator[str]:
        for start in range(self.start, self.end, PIECE_CHARS):
            yield self.text[start : min(start + PIECE_CHARS, self.end)]


class _Found(NamedTuple):
    """What the memo says of texts."""

    tokens: int
    unknown: list[_Part]


class TiktokenCounter(Counter):
    """Counts ordinary text: what looks like a special token (`<|endoftext|>`) is text like any other.

    What was counted before is not tokenized again: a history that is sent again costs its hashes.  Never raises for a
    text.  Bytes stand for the tokens of what is late or has no place in a thread, which is too many but never too few,
    and is not remembered.  A cancelled count stops at its next piece.
    """

    def __init__(self, threads: CountingThreads, vocabulary: Path = VOCABULARY) -> None:
        """Raises VocabularyError."""
        self._encoding, *self._for_threads = load_encodings(vocabulary, 1 + THREADS)
        self._of_thread = threading.local()
        self._threads = threads
        self._memo = Memo()
        self._inline_chars_left = INLINE_CHARS_A_TURN

    async def count(self, texts: Sequence[Text]) -> Counted:
        """Tokens of all texts together."""
        if not _are_looked_up_soon(texts):
            return await self._count_off_the_loop(texts, None)
        found = self._look_up(texts)
        if found.unknown and not self._may_count_here(found.unknown):
            return await self._count_off_the_loop(texts, found)
        return Counted(found.tokens + sum(map(self._count_short, found.unknown)), exact=True)

    def _may_count_here(self, parts: Sequence[_Part]) -> bool:
        """Takes their part of this turn's INLINE_CHARS_A_TURN."""
        chars = sum(part.end - part.start + 1 for part in parts)
        if chars > min(INLINE_CHARS, self._inline_chars_left):
            return False
        if self._inline_chars_left == INLINE_CHARS_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._inline_chars_left -= chars
        return True

    def _begin_turn(self) -> None:
        self._inline_chars_left = INLINE_CHARS_A_TURN

    async def _count_off_the_loop(self, texts: Sequence[Text], found: _Found | None) -> Counted:
        counted = await self._threads.run(partial(self._count_long, texts, found))
        return counted or _estimate(texts, found)

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _count_long(self, texts: Sequence[Text], found: _Found | None, is_late: IsLate) -> Counted:
        if is_late():
            return _estimate(texts, found)
        self._take_encoding()
        tokens, parts = found or self._look_up(texts)
        exact = True
        counted: dict[str, int] = {}
        for part in parts:
            of_part = self._count_part(part, counted, is_late)
            tokens += of_part.tokens
            exact = exact and of_part.exact
        return Counted(tokens, exact)

    def _take_encoding(self) -> None:
        """With its first count a thread takes one for itself."""
        if not hasattr(self._of_thread, "encoding"):
            self._of_thread.encoding = self._for_threads.pop()

    def _count_part(self, part: _Part, counted: dict[str, int], is_late: IsLate) -> Counted:
        """`counted` are this call's pieces, of which equal ones are counted once."""
        tokens, exact = 0, True
        for piece in part.pieces():
            if piece not in counted:
                if is_late():
                    tokens += text_bytes(piece)
                    exact = False
                    continue
                counted[piece] = self._count_piece(piece)
            tokens += counted[piece]
        if exact:
            self._memo.put(part.key, tokens)
        return Counted(tokens, exact)

    # -- anywhere ------------------------------------------------------------------------------------------------

    def _look_up(self, texts: Sequence[Text]) -> _Found:
        tokens = 0
        unknown: list[_Part] = []
        for text in texts:
            if not isinstance(text, str):
                tokens += self._look_up_literal(text, unknown)
                continue
            for start in range(0, len(text), PART_CHARS):
                end = min(start + PART_CHARS, len(text))
                key = text_key(text[start:end])
                known = self._memo.get(key)
                if known is None:
                    unknown.append(_Part(key, text, start, end))
                else:
                    tokens += known
        return _Found(tokens, unknown)

    def _look_up_literal(self, literal: msgspec.Raw, unknown: list[_Part]) -> int:
        """It is decoded only where it is not known, and remembered as a whole."""
        key = text_key(literal)
        known = self._memo.get(key)
        if known is None:
            text = literal_text(literal)
            unknown.append(_Part(key, text, 0, len(text)))
        return known or 0

    def _count_short(self, part: _Part) -> int:
        """A part of one piece."""
        tokens = self._count_piece(part.text[part.start :])
        self._memo.put(part.key, tokens)
        return tokens

    def _count_piece(self, piece: str) -> int:
        encoding: tiktoken.Encoding = getattr(self._of_thread, "encoding", self._encoding)
        return len(encoding.encode_ordinary(piece))


def load_encoding(vocabulary: Path) -> tiktoken.Encoding:
    """The encoding of a vocabulary file whose content is exactly cl100k_base.  Raises VocabularyError."""
    return load_encodings(vocabulary, 1)[0]


def load_encodings(vocabulary: Path, threads: int) -> list[tiktoken.Encoding]:
    """As `load_encoding`, for each thread that counts: 20 MB and 65 ms each.

    An encoding serves the first thread that uses it at once, and any other through a lock at every word: a fifth more
    time.
    """
    try:
        data = vocabulary.read_bytes()
    except OSError as error:
        raise VocabularyError(
            f"cannot read the tokenizer's vocabulary {vocabulary}: {error.strerror}"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != VOCABULARY_SHA256:
        found = f"its sha256 is {digest}, not {VOCABULARY_SHA256}"
        raise VocabularyError(f"the tokenizer's vocabulary {vocabulary} is damaged: {found}")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    return [
        tiktoken.Encoding("cl100k_base", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
        for _ in range(threads)
    ]


def _are_looked_up_soon(texts: Sequence[Text]) -> bool:
    """Characters outside of ASCII are taken for the four bytes that they can have: to know would cost as much again."""
    if len(texts) > LOOKED_UP_TEXTS_MAX:
        return False
    return sum(map(_bytes_to_look_up, texts)) <= LOOKED_UP_BYTES_MAX


def _bytes_to_look_up(text: Text) -> int:
    return 4 * len(text) if isinstance(text, str) and not text.isascii() else len(text)


def _estimate(texts: Sequence[Text], found: _Found | None) -> Counted:
    """Bytes for tokens, where tokens are not known."""
    if found is None:
        return Counted(sum(map(text_bytes, texts)), exact=False)
    unknown = sum(text_bytes(part.text[part.start : part.end]) for part in found.unknown)
    return Counted(found.tokens + unknown, exact=False)
