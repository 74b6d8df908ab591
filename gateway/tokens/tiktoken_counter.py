"""Counting with the cl100k_base vocabulary that ships with the package; never a network access."""

import asyncio
import base64
import hashlib
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tiktoken

from gateway.tokens.api import Counted, Counter

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
INLINE_CHARS = 4096
"""Up to this many texts and characters are counted on the event loop: 0.3 ms of English, 0.7 ms of emoji."""
THREADS = 2
JOBS_MAX = 256
"""Counts that run or wait for a thread; beyond it the bytes are the estimate."""
COUNT_SECONDS_MAX = 2.0
"""What is not counted by then, waiting included, is estimated by its bytes."""


class VocabularyError(Exception):
    """The packaged vocabulary is missing or damaged; one line for the operator."""


class TiktokenCounter(Counter):
    """Counts ordinary text: what looks like a special token (`<|endoftext|>`) is text like any other.

    Never raises for a text, and answers within COUNT_SECONDS_MAX: bytes stand for the tokens of what was not
    counted by then, which is too many but never too few.  A cancelled count stops at its next piece.
    """

    def __init__(self, vocabulary: Path = VOCABULARY, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises VocabularyError."""
        self._encoding = load_encoding(vocabulary)
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvgate-tokens")
        self._places = threading.BoundedSemaphore(JOBS_MAX)
        self._closed = threading.Event()

    async def count(self, texts: Sequence[str]) -> Counted:
        """Tokens of all texts together."""
        if len(texts) + sum(map(len, texts)) <= INLINE_CHARS:
            return Counted(sum(map(self._count_piece, texts)), exact=True)
        if self._closed.is_set() or not self._places.acquire(blocking=False):
            return Counted(sum(map(utf8_bytes, texts)), exact=False)
        stop = threading.Event()
        job = self._threads.submit(self._count_pieces, texts, self._clock() + COUNT_SECONDS_MAX, stop)
        job.add_done_callback(lambda _: self._places.release())
        try:
            # Shielded: a job cancelled while it waits would keep its texts in the queue, but not its place.
            return await asyncio.shield(asyncio.wrap_future(job))
        finally:
            stop.set()

    def close(self) -> None:
        """From now on bytes are the estimate, also for counts under way; the threads end."""
        self._closed.set()
        self._threads.shutdown(wait=False)

    def _count_pieces(self, texts: Sequence[str], deadline: float, stop: threading.Event) -> Counted:
        total, exact = 0, True
        for piece, times in Tally(_pieces(texts)).items():
            if stop.is_set():
                break
            late = self._closed.is_set() or self._clock() >= deadline
            exact = exact and not late
            total += times * (utf8_bytes(piece) if late else self._count_piece(piece))
        return Counted(total, exact)

    def _count_piece(self, piece: str) -> int:
        return len(self._encoding.encode_ordinary(piece))


def load_encoding(vocabulary: Path) -> tiktoken.Encoding:
    """The encoding of a vocabulary file whose content is exactly cl100k_base.  Raises VocabularyError."""
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
    return tiktoken.Encoding("cl100k_base", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _pieces(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            yield text[start : start + PIECE_CHARS]
