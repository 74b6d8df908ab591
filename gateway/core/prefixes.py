"""How prompts begin: where their beginnings may be cut, and what names the pieces, without keeping any prompt.

Calls whose prompts begin alike hold the same blocks of an engine's cache.  Which beginnings are shared is known only
from the prompts themselves, so of each one a hash is taken at every point of a fixed grid, and it is remembered how
often which of them came.  A call is cut where prompts have been seen to branch; two processes that have seen different
prompts, and so cut differently, share less, never wrongly.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from gateway.core.prompt import Text
from gateway.core.segments import SEGMENTS_MAX, Segment

FIRST_BLOCKS = 8
"""Where the grid begins: less is not worth a place in the books."""
_POINTS_PER_OCTAVE = 4
_OCTAVES = 20
GRID = tuple(
    (FIRST_BLOCKS << octave) * (_POINTS_PER_OCTAVE + step) // _POINTS_PER_OCTAVE
    for octave in range(_OCTAVES)
    for step in range(_POINTS_PER_OCTAVE)
)
"""Blocks: 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on.  A cut at the next lower point loses a fifth at most."""
POINT_BYTES = 16
_SALT_BYTES = 16
"""BLAKE2b's own."""
_ID_BYTES = array("Q").itemsize
"""Of a token id: vLLM's are numbers of any size to it."""
MOMENT_SECONDS = 900
TEXT_BYTES = 64
TEXT_BYTES_MAX = 1 << 19
_TEXT_CUTS = tuple(blocks * TEXT_BYTES for blocks in GRID if blocks * TEXT_BYTES <= TEXT_BYTES_MAX)

BRANCH_CALLS_MIN = 3
"""So many prompts have to have come to a point before it counts that fewer than half of them went on alike."""
GENERATION_POINTS_MAX = 1 << 15
"""A point takes 170 bytes: 11 MB for both generations, which are the points of some 2,500 different long prompts."""


class PromptCount(NamedTuple):
    """What is known of one prompt that was counted as its engine counts it."""

    tokens: int
    points: bytes = b""
    """As `points` has them, where they were asked for and its tokens are known."""


class Salt(NamedTuple):
    """What decides beside its tokens whether a block of one call is that of another."""

    fleet: str
    """Fleets of one process share its memory."""
    adapter: str
    """The LoRA adapter, '' for the model itself, under whatever name it was asked for."""
    cache_salt: str
    block_size: int
    shown: bytes = b""
    """Fields that may change how an engine shows a prompt, where that is not known here."""

    def digest(self) -> bytes:
        """16 bytes."""
        texts = (
            self.fleet.encode(),
            self.adapter.encode(),
            self.cache_salt.encode(errors="surrogatepass"),
            self.shown,
        )
        lengths = b",".join(b"%d" % number for number in (self.block_size, *map(len, texts)))
        return blake2b(lengths + b":" + b"".join(texts), digest_size=POINT_BYTES).digest()


def shareable_blocks(tokens: int, block_size: int) -> int:
    """Of a prompt, at most: an engine always computes the last token itself, and so never takes its block."""
    return max(tokens - 1, 0) // block_size


def tokens_min(block_size: int) -> int:
    """The shortest prompt that has a point."""
    return FIRST_BLOCKS * block_size + 1


def moment_of(seconds: float, beside: bytes = b"") -> bytes:
    """What no two prompts have in common that may show different dates, from `seconds` since the epoch, or that differ
    in `beside`.

    An engine's midnight is at the begin of a quarter of an hour, wherever it is.
    """
    moment = b"%d" % (seconds // MOMENT_SECONDS)
    return blake2b(b"%b:%b" % (moment, beside), digest_size=_SALT_BYTES).digest() if beside else moment


def points(ids: Sequence[int], block_size: int, moment: bytes = b"") -> bytes:
    """The hash of all token ids up to each point of the grid, 16 bytes each; empty for a short prompt.

    `moment`: of a prompt that its engine will show anew, maybe with another date.
    BLAKE2b of the ids, as a stranger must not be able to make two beginnings look alike.  Takes 10 us for 1,000 ids.
    Raises OverflowError or TypeError for what is no token id.
    """
    blocks = shareable_blocks(len(ids), block_size)
    cuts = GRID[: bisect_right(GRID, blocks)]
    if not cuts:
        return b""
    data = memoryview(array("Q", ids[: cuts[-1] * block_size])).cast("B")
    hasher, before, found = blake2b(digest_size=POINT_BYTES, salt=moment[:_SALT_BYTES]), 0, []
    for cut in cuts:
        end = cut * block_size * _ID_BYTES
        hasher.update(data[before:end])
        found.append(hasher.copy().digest())
        before = end
    return b"".join(found)


def text_points(texts: Sequence[Text]) -> bytes:
    """As `points`, of a prompt of which only the texts are known; nothing may be charged by it.

    A point of the grid stands for TEXT_BYTES in place of each block.  Of a very long prompt the first TEXT_BYTES_MAX
    count, so that this takes less than a millisecond.
    """
    hasher, found, at = blake2b(digest_size=POINT_BYTES), [], 0
    cuts = iter(_TEXT_CUTS)
    cut = next(cuts)
    for text in texts:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text)
        data, start = b"%d:%b" % (len(data), data), 0
        while at + len(data) - start >= cut:
            hasher.update(data[start : start + cut - at])
            start, at = start + cut - at, cut
            found.append(hasher.copy().digest())
            if (cut := next(cuts, 0)) == 0:
                return b"".join(found)
        hasher.update(data[start:])
        at += len(data) - start
    return b"".join(found)


def keys_of(salt: bytes, found: bytes) -> list[bytes]:
    """One for each of a prompt's points: equal where all is equal up to there, and nowhere else.

    `salt`: a `Salt`'s digest; `found`: as `points` or `text_points` has them.
    """
    return [salt + found[at : at + POINT_BYTES] for at in range(0, len(found), POINT_BYTES)]


def segments(keys: Sequence[bytes], cuts: Sequence[int]) -> tuple[Segment, ...]:
    """The pieces between points; `cuts` are indices into its points, rising."""
    found, begin = [], 0
    for cut in cuts:
        end = GRID[cut]
        name = blake2b(keys[cut] + begin.to_bytes(_ID_BYTES, "big"), digest_size=POINT_BYTES).hexdigest()
        found.append(Segment(name, end - begin))
        begin = end
    return tuple(found)


class _Known(NamedTuple):
    """Of one point."""

    calls: int
    """How many prompts came to it."""
    begin: int
    """Where the piece began that was last cut to end here: an index into the grid, _START for a prompt's start."""


_START, _NEVER_CUT = -1, -2


class SeenPoints:
    """How often which beginnings came lately, and where they were cut.  Not for threads.

    Of what was not asked for while GENERATION_POINTS_MAX others came nothing is known any more.
    """

    def __init__(self, generation_max: int = GENERATION_POINTS_MAX) -> None:
        self._young: dict[bytes, _Known] = {}
        self._old: dict[bytes, _Known] = {}
        self._generation_max = generation_max

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def cut(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Where to cut a prompt that has these points, as indices, rising, SEGMENTS_MAX at most; it is noted.

        Pieces are shared by who cuts them alike from the start on.  So where others were cut before a prompt is cut
        there, too, as long as that comes to each point where prompts branch; else at those alone.  The last cuts are
        at the deepest point that was seen before, and beyond it, for those who may come after it.
        """
        known = self._known(keys)
        cuts = _cuts(known, len(keys))
        begins = dict(zip(cuts, (_START, *cuts), strict=False))
        for at, key in enumerate(keys):
            calls, begin = known[at] if at < len(known) else (0, _NEVER_CUT)
            self._put(key, _Known(calls + 1, begins.get(at, begin)))
        return cuts

    def _known(self, keys: Sequence[bytes]) -> list[_Known]:
        """Of the points that were seen: of a chain the first ones."""
        found: list[_Known] = []
        for key in keys:
            known = self._young.get(key) or self._old.get(key)
            if known is None:
                break
            found.append(known)
        return found

    def _put(self, key: bytes, known: _Known) -> None:
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, {}
        self._young[key] = known


def _cuts(known: Sequence[_Known], points_count: int) -> tuple[int, ...]:
    deepest = len(known) - 1
    before, branches = _as_before(known)[: SEGMENTS_MAX - 1], _branches(known)
    cuts = before if set(branches) <= {*before, deepest} else branches[: SEGMENTS_MAX - 1]
    if deepest >= 0 and deepest not in cuts:
        cuts.append(deepest)
    return (*cuts, *_beyond(deepest, points_count, SEGMENTS_MAX - len(cuts)))


def _branches(known: Sequence[_Known]) -> list[int]:
    """Points that many came to, and half of them or fewer went on alike."""
    calls = [point.calls for point in known] + [0]
    return [
        at
        for at, (here, next_) in enumerate(pairwise(calls))
        if here >= BRANCH_CALLS_MIN and 2 * next_ <= here
    ]


def _as_before(known: Sequence[_Known]) -> list[int]:
    """Along the pieces of those who were cut before: from each end the longest one that begins there."""
    longest = {point.begin: at for at, point in enumerate(known) if point.begin != _NEVER_CUT}
    found: list[int] = []
    end = longest.get(_START)
    while end is not None:
        found.append(end)
        end = longest.get(end)
    return found


def _beyond(deepest: int, points_count: int, count: int) -> list[int]:
    """So many points after the deepest one that was seen: a prompt's last one, and others at half the way to the next.

    Nothing says where others will branch off: however long what they have in common with it is, half of that is cut.
    """
    found: list[int] = []
    at = points_count - 1
    while len(found) < count and at > deepest:
        found.append(at)
        at -= _POINTS_PER_OCTAVE
    return found[::-1]
