"""Counting with the cl100k_base vocabulary that ships with the package; never a network access."""

import asyncio
import binascii
import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import tiktoken

from gateway.core.content import SCRIPTS, Share, json_bytes, script_of
from gateway.core.outcomes import OperatorError
from gateway.core.prompt import Text, literal_text, text_bytes
from gateway.tokens.api import Counted, Counter
from gateway.tokens.memo import Memo, literal_keys, text_key
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


_SCRIPT_BITS, _BYTES_BITS = 4, 20
"""Of a number in the memo, the lowest first; the others are tokens.  A part has four bytes a character at most."""
_SCRIPT_MASK, _BYTES_MASK = (1 << _SCRIPT_BITS) - 1, (1 << _BYTES_BITS) - 1
_TOKENS_SHIFT = _SCRIPT_BITS + _BYTES_BITS


class _Part(NamedTuple):
    """`text[start:end]`, of which nothing is known."""

    key: int
    text: str
    start: int
    end: int
    whole: bool
    """It is all of the text."""

    def pieces(self) -> Iterator[str]:
        for start in range(self.start, self.end, PIECE_CHARS):
            yield self.text[start : min(start + PIECE_CHARS, self.end)]


class _Sum:
    """Tokens and bytes, by script."""

    __slots__ = ("_by_script", "_of_texts", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._by_script: dict[int, tuple[int, int]] = {}
        self._of_texts: dict[int, _Sum] = {}
        """By the identity of texts that are counted in parts."""

    def add_of(self, text: str, known: int, whole: bool) -> None:
        """`known`: as it is in the memo, of the text or of one of its parts."""
        if whole:
            self.add(known)
        else:
            self._of_texts.setdefault(id(text), _Sum()).add(known)
            self.tokens += known >> _TOKENS_SHIFT

    def add(self, known: int) -> None:
        tokens = known >> _TOKENS_SHIFT
        self.tokens += tokens
        self._note(known & _SCRIPT_MASK, tokens, known >> _SCRIPT_BITS & _BYTES_MASK)

    def add_all(self, numbers: Iterable[int]) -> None:
        """The same of many: those of one script first become one."""
        by_script: dict[int, list[int]] = {}
        for known in numbers:
            by_script.setdefault(known & _SCRIPT_MASK, []).append(known >> _SCRIPT_BITS)
        for script, of_script in by_script.items():
            tokens = sum([number >> _BYTES_BITS for number in of_script])
            self.tokens += tokens
            self._note(script, tokens, sum([number & _BYTES_MASK for number in of_script]))

    def _note(self, script: int, tokens: int, bytes_: int) -> None:
        before = self._by_script.get(script)
        if before:
            tokens, bytes_ = tokens + before[0], bytes_ + before[1]
        self._by_script[script] = tokens, bytes_

    def counted(self) -> Counted:
        """The script that most of a text has is that of all of it."""
        for of_text in self._of_texts.values():
            shares = of_text._by_script
            main = max(shares, key=lambda script: shares[script])
            self._note(main, of_text.tokens, sum(bytes_ for _, bytes_ in shares.values()))
        self._of_texts.clear()
        found = [Share(SCRIPTS[script], *sums) for script, sums in self._by_script.items()]
        return Counted(self.tokens, True, tuple(found))


class _Found(NamedTuple):
    """What the memo says of texts."""

    sum: _Sum
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
        self._memo: Memo[int] = Memo()
        self._inline_chars_left = INLINE_CHARS_A_TURN

    async def count(self, texts: Sequence[Text]) -> Counted:
        """Tokens of all texts together."""
        if not _are_looked_up_soon(texts):
            return await self._count_off_the_loop(texts, None)
        found = self._look_up(texts)
        if found.unknown and not self._may_count_here(found.unknown):
            return await self._count_off_the_loop(texts, found)
        for part in found.unknown:
            found.sum.add_of(part.text, self._count_short(part), part.whole)
        return found.sum.counted()

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
        so_far, parts = found or self._look_up(texts)
        late_tokens = 0
        counted: dict[str, int] = {}
        for part in parts:
            tokens, exact = self._count_part(part, counted, is_late)
            if exact:
                so_far.add_of(part.text, self._remember(part, tokens), part.whole)
            else:
                late_tokens += tokens
        return Counted(so_far.tokens + late_tokens, exact=False) if late_tokens else so_far.counted()

    def _take_encoding(self) -> None:
        """With its first count a thread takes one for itself."""
        if not hasattr(self._of_thread, "encoding"):
            self._of_thread.encoding = self._for_threads.pop()

    def _count_part(self, part: _Part, counted: dict[str, int], is_late: IsLate) -> tuple[int, bool]:
        """Tokens, and whether they are exact.  `counted`: this call's pieces, of which equal ones are counted once."""
        tokens, exact = 0, True
        for piece in part.pieces():
            if piece not in counted:
                if is_late():
                    tokens += text_bytes(piece)
                    exact = False
                    continue
                counted[piece] = self._count_piece(piece)
            tokens += counted[piece]
        return tokens, exact

    # -- anywhere ------------------------------------------------------------------------------------------------

    def _look_up(self, texts: Sequence[Text]) -> _Found:
        found = _Found(_Sum(), [])
        literals = [text for text in texts if not isinstance(text, str)]
        if literals:
            self._look_up_literals(literals, found)
        for text in texts:
            if not isinstance(text, str):
                continue
            if len(text) <= PART_CHARS:
                self._look_up_part(text, text, 0, found)
            else:
                for start in range(0, len(text), PART_CHARS):
                    self._look_up_part(text[start : start + PART_CHARS], text, start, found)
        return found

    def _look_up_part(self, part: str, text: str, start: int, found: _Found) -> None:
        key = text_key(part)
        known = self._memo.get(key)
        if known is None:
            found.unknown.append(_Part(key, text, start, start + len(part), part is text))
        else:
            found.sum.add_of(text, known, part is text)

    def _look_up_literals(self, literals: Sequence[msgspec.Raw], found: _Found) -> None:
        """One is decoded only where it is not known, and remembered as a whole.  A history has hundreds."""
        keys = literal_keys(literals)
        known = self._memo.get_all(keys)
        found.sum.add_all(number for number in known if number is not None)
        for literal, key, number in zip(literals, keys, known, strict=True):
            if number is None:
                text = literal_text(literal)
                found.unknown.append(_Part(key, text, 0, len(text), whole=True))

    def _count_short(self, part: _Part) -> int:
        """Of a part of one piece, as it is remembered."""
        return self._remember(part, self._count_piece(part.text[part.start :]))

    def _remember(self, part: _Part, tokens: int) -> int:
        text = part.text[part.start : part.end]
        known = (tokens << _BYTES_BITS | json_bytes(text)) << _SCRIPT_BITS | SCRIPTS.index(script_of(text))
        self._memo.put(part.key, known)
        return known

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
    ranks = {binascii.a2b_base64(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    return [
        tiktoken.Encoding("cl100k_base", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
        for _ in range(threads)
    ]


def _are_looked_up_soon(texts: Sequence[Text]) -> bool:
    """Characters outside of ASCII are taken for the four bytes that they can have: to know would cost as much again."""
    if len(texts) > LOOKED_UP_TEXTS_MAX:
        return False
    size = 0
    for text in texts:
        is_plain = not isinstance(text, str) or text.isascii()
        size += len(text) if is_plain else 4 * len(text)
    return size <= LOOKED_UP_BYTES_MAX


def _estimate(texts: Sequence[Text], found: _Found | None) -> Counted:
    """Bytes for tokens, where tokens are not known."""
    if found is None:
        return Counted(sum(map(text_bytes, texts)), exact=False)
    return Counted(found.sum.tokens + sum(map(_part_bytes, found.unknown)), exact=False)


def _part_bytes(part: _Part) -> int:
    return text_bytes(part.text[part.start : part.end])
