"""The KV blocks of one engine: reference counts, and the prefix cache over blocks that nobody holds.

As vLLM V1 does it (`vllm/v1/core/block_pool.py`, `kv_cache_utils.py` of 0.32.0):

- a full block is named by a hash chained over everything before it, and found by that name as long as its tokens are
  in it, also after its last holder has left; such a block counts as free;
- who needs new blocks gets empty ones first, then the cached one that was left longest ago, which is forgotten then;
- a sequence gives its blocks back from the last to the first, so of one sequence the tail is forgotten first;
- blocks are found, never merged: where one was computed twice, the copy that was cached first is found as long as it
  is not forgotten, whoever holds it.  Two copies come only of a sequence that looked a block up and did not find it
  before another one cached it (both were in the middle of their prompts), that read nothing (prompt logprobs), or that
  computed the block of its prompt's last token.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """What prefix caching knows of a prompt.  The empty one is unknown: it is never cached nor found."""

    hashes: tuple[int, ...] = ()
    """Of every full block, each chained to the one before."""
    tail: tuple[str, ...] = ()
    """Texts of the tokens after the last full block."""
    root: int = 0
    """What the first hash is chained to."""

    @property
    def end(self) -> int:
        """What the hash of the next block is chained to."""
        return self.hashes[-1] if self.hashes else self.root


EMPTY = Content()


def content(pieces: Sequence[str], block_size: int, salt: str = "") -> Content:
    """Of a prompt given as token texts.  Prompts under another salt (cache_salt, LoRA adapter) share nothing with it.

    Hashes are good within one process.
    """
    full = len(pieces) - len(pieces) % block_size
    end = root = hash(salt)
    hashes: list[int] = []
    for start in range(0, full, block_size):
        end = chained(end, pieces[start : start + block_size])
        hashes.append(end)
    return Content(tuple(hashes), tuple(pieces[full:]), root)


def chained(previous: int, pieces: Sequence[str]) -> int:
    """The hash of a full block behind the one that has the hash `previous`."""
    return hash((previous, *pieces))


class Block:
    """`block_size` token slots.  Free when nobody holds it; `hash` is 0 until the block is full and cached."""

    __slots__ = ("hash", "holders")

    def __init__(self) -> None:
        self.holders = 0
        self.hash = 0


class BlockPool:
    """All blocks of an engine but the null block.  Blocks are made when first taken."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self.used = 0
        """Blocks that somebody holds."""
        self._made = 0
        self._blank: list[Block] = []
        self._left: OrderedDict[Block, None] = OrderedDict()  # cached and held by nobody, longest ago first
        self._cached: dict[int, list[Block]] = {}

    @property
    def free(self) -> int:
        return self.size - self.used

    def find(self, hashes: Iterable[int]) -> list[Block]:
        """The cached blocks of the longest prefix that is there; they are not held yet."""
        found: list[Block] = []
        for name in hashes:
            blocks = self._cached.get(name)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    @staticmethod
    def free_among(blocks: Iterable[Block]) -> int:
        """How many of found blocks count as free now, and will not when they are shared."""
        return sum(block.holders == 0 for block in blocks)

    def share(self, blocks: Iterable[Block]) -> None:
        """Hold found blocks beside whoever holds them."""
        for block in blocks:
            if block.holders == 0:
                del self._left[block]
                self.used += 1
            block.holders += 1

    def take(self, count: int) -> list[Block]:
        """Hold `count` blocks with nothing in them; what was cached in them is forgotten."""
        assert 0 <= count <= self.free, (count, self.free)
        self.used += count
        taken = [self._empty_block() for _ in range(count)]
        for block in taken:
            block.holders = 1
        return taken

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Leave the blocks of one sequence, given in its order."""
        for block in reversed(blocks):
            assert block.holders > 0
            block.holders -= 1
            if block.holders:
                continue
            self.used -= 1
            if block.hash:
                self._left[block] = None
            else:
                self._blank.append(block)

    def cache(self, block: Block, name: int) -> None:
        """Make a held block findable, now that all its tokens are known."""
        assert block.holders
        assert not block.hash
        if not name:
            return  # one hash in 2^64 is 0: that block is not cached
        block.hash = name
        self._cached.setdefault(name, []).append(block)

    def reset(self) -> bool:
        """Forget everything cached; False, and nothing done, while blocks are held."""
        if self.used:
            return False
        for block in self._left:
            block.hash = 0
        self._blank.extend(self._left)
        self._left.clear()
        self._cached.clear()
        return True

    def _empty_block(self) -> Block:
        if self._blank:
            return self._blank.pop()
        if self._made < self.size:
            self._made += 1
            return Block()
        block, _ = self._left.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: Block) -> None:
        same = self._cached[block.hash]
        same.remove(block)
        if not same:
            del self._cached[block.hash]
        block.hash = 0
