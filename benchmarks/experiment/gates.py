"""What lets calls into the engine: nothing, the whole demand, or the elastic rule, by the product's own pure code.

The books are those of one replica in plain integers, so that a run of 100,000 calls takes minutes; `ledgers` has the
real ones behind the same four calls, and one cell shows that both decide the same.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.experiment.traces import BLOCK_SIZE, Call
from gateway.core import elastic
from gateway.core.growth import AHEAD_TOKENS
from gateway.core.lengths import AGES, Lengths, Surprise, Watched, bucket_of, merge

PREFILL_TOKENS = 16_384
PREFILL_MIN = 512
"""The product's default budget, and the prompt below which nothing is charged to it."""
SEQUENCES = 1_024


@dataclass(slots=True, eq=False)
class Held:
    """One call in the books."""

    call: Call
    blocks: int
    held: int
    path: elastic.Path | None
    """None: charged in full."""
    prefill: int
    deadline: float
    """Until when it may wait, in seconds."""
    granted: bool = False
    until: int = 0
    """Up to which output token it holds blocks."""
    told: bool = False
    """Past its first token."""
    shared: int = 0
    """Blocks of it that are counted once for all who share them; what it holds is the rest."""
    there: int = 0
    """Blocks that it shared as it was granted."""
    said: elastic.Path | None = None
    """Its path, without `net` blocks of it; `path` is without all that are shared."""
    net: int = 0
    inside: bool = False
    """In a piece that others may hold, too."""
    arrived: float = 0.0
    warm: bool = False
    """What was said before is kept for it."""
    course: Any = None
    """Of who asked for it."""

    def beside(self, shared: int) -> elastic.Path | None:
        """Its path where so many blocks are shared."""
        if self.said is None:
            return None
        held, blocks = self.held + self.shared, self.blocks + self.shared
        return elastic.narrowed(self.said, self.net, shared, held, blocks, BLOCK_SIZE)


class Ledger(Protocol):
    def admit(self, held: Held, now: float) -> list[Held]:
        """Queue it; who is granted by that."""

    def first_token(self, held: Held, now: float) -> list[Held]: ...

    def grow(self, held: Held, blocks: int, path: elastic.Path, now: float) -> list[Held]: ...

    def settle(self, held: Held, now: float) -> list[Held]: ...

    @property
    def overdrafts(self) -> int:
        """Growths that found no room and were written all the same."""


class Books:
    """First come, first served, of one replica."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.full = 0
        self.assured = 0
        self.sequences = 0
        self.prefill = 0
        self.sums = [0] * elastic.POINTS
        self.base = elastic.base_of(limit)
        self.overdrafts = 0
        self.queue: deque[Held] = deque()
        self.dropped: list[Held] = []
        """That waited for too long."""

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def admit(self, held: Held, now: float) -> list[Held]:
        self.queue.append(held)
        return self._dispatch(now) if self.queue[0] is held else []

    def first_token(self, held: Held, now: float) -> list[Held]:
        if not held.prefill:
            return []
        self.prefill -= held.prefill
        held.prefill = 0
        return self._dispatch(now)

    def grow(self, held: Held, blocks: int, path: elastic.Path, now: float) -> list[Held]:
        """It holds so many blocks from now on, without those that are shared."""
        assert held.path is not None
        self.used += blocks - held.held
        self._add_path(path, held.path)
        held.held, held.path = blocks, path
        self.overdrafts += self.used > self.limit
        return self._dispatch(now)

    def settle(self, held: Held, now: float) -> list[Held]:
        self._leave(held)
        return self._dispatch(now)

    def _dispatch(self, now: float) -> list[Held]:
        granted: list[Held] = []
        while self.queue:
            head = self.queue[0]
            if head.deadline < now:
                self.dropped.append(self.queue.popleft())
            elif self._fits(head):
                self._take(self.queue.popleft())
                granted.append(head)
            else:
                break
        return granted

    def _fits(self, held: Held) -> bool:
        return self._has_room(held, 0, self.limit)

    def _has_room(self, held: Held, shared: int, limit: int) -> bool:
        """With so many of its blocks counted already."""
        prefill = max(held.prefill - shared * BLOCK_SIZE, 0)
        if self.sequences >= SEQUENCES or (self.prefill and self.prefill + prefill > PREFILL_TOKENS):
            return False
        if self.used == 0:
            return True
        if self.used + held.held - shared > limit:
            return False
        path = held.beside(shared) or elastic.flat(held.blocks - shared)
        return self.full + held.blocks - shared <= limit or elastic.bound_holds(
            self.sums, path, self.assured, limit, self.base
        )

    def _take(self, held: Held) -> None:
        held.granted = True
        self._enter(held)

    def _enter(self, held: Held) -> None:
        self.used += held.held
        self.full += held.blocks
        self.sequences += 1
        self.prefill += held.prefill
        if held.path is None:
            self.assured += held.blocks
        else:
            self._add_path(held.path, (0,) * elastic.POINTS)

    def _leave(self, held: Held) -> None:
        self.used -= held.held
        self.full -= held.blocks
        self.sequences -= 1
        self.prefill -= held.prefill
        if held.path is None:
            self.assured -= held.blocks
        else:
            self._add_path((0,) * elastic.POINTS, held.path)

    def _add_path(self, new: Iterable[int], old: Iterable[int]) -> None:
        self.sums = [total + added - gone for total, added, gone in zip(self.sums, new, old, strict=True)]


class Guaranteed:
    """Every call holds its whole demand from the beginning."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def hold(self, call: Call, deadline: float) -> Held:
        blocks, prefill = call.blocks, call.prompt_tokens if call.prompt_tokens >= PREFILL_MIN else 0
        return Held(call, blocks, blocks, None, prefill, deadline)

    def written(self, held: Held, tokens: int, now: float) -> tuple[int, list[Held]]:
        """It has written so many tokens: when to tell next, and who is granted."""
        granted = self.ledger.first_token(held, now) if tokens == 1 else []
        return 1 << 62, granted

    def ended(self, held: Held, now: float) -> list[Held]:
        return self.ledger.settle(held, now)

    def second(self) -> bool:
        """Once a second; whether what was learned turned out wrong."""
        return False


class Elastic(Guaranteed):
    """A call holds what it needs until its next growth, and its path stands for the rest.

    What is learned goes to the store and back every second, as between gateways.  `misread` is what a prompt's tokens
    are taken for until its first token tells them.
    """

    def __init__(self, ledger: Ledger, base: int, misread: Callable[[Call], int] | None = None) -> None:
        super().__init__(ledger)
        self._base = base
        self._misread = misread or (lambda call: call.prompt_tokens)
        self.known = Lengths()
        self._stored, self._surprise = Lengths(), Surprise()
        self._news: dict[int, tuple[int, int]] = {}
        self._watched: dict[Held, Watched] = {}

    def hold(self, call: Call, deadline: float) -> Held:
        held = super().hold(call, deadline)
        prompt = self._misread(call)
        held.blocks = max(1, -(-(prompt + call.limit - 1) // BLOCK_SIZE))
        held.until, held.held, held.path = self._path(call, prompt, 0, 0)
        held.said = held.path
        return held

    def written(self, held: Held, tokens: int, now: float) -> tuple[int, list[Held]]:
        granted, call = [], held.call
        if tokens == 1:
            self._watched[held] = Watched()
            granted = self.ledger.first_token(held, now)
        self._watched[held].advance(tokens, self._news)
        corrected = tokens == 1 and (held.there > 0 or self._misread(call) != call.prompt_tokens)
        if corrected or (tokens >= held.until - AHEAD_TOKENS and held.until < call.limit):
            held.until, blocks, held.said = self._path(call, call.prompt_tokens, tokens, held.there)
            held.net = held.there
            path = elastic.narrowed(held.said, held.net, held.shared, blocks, call.blocks, BLOCK_SIZE)
            granted += self.ledger.grow(held, blocks - held.shared, path, now)
        age = AGES[min(bucket_of(tokens) + 1, len(AGES) - 1)]
        growth = held.until - AHEAD_TOKENS if held.until < call.limit else 1 << 62
        return max(min(growth, age if age > tokens else 1 << 62), tokens + 1), granted

    def ended(self, held: Held, now: float) -> list[Held]:
        call = held.call
        watched = self._watched.pop(held, None) or Watched()
        watched.end(call.output_tokens, call.output_tokens < call.limit, self._news)
        return super().ended(held, now)

    def second(self) -> bool:
        surprised = bool(self._news) and merge(self._stored, self._surprise, self._news)
        self._news = {}
        rows = zip(range(len(AGES)), self._stored.entries, self._stored.exits, strict=True)
        self.known.replace(rows)
        return surprised

    def _path(self, call: Call, prompt: int, written: int, net: int) -> tuple[int, int, elastic.Path]:
        """Until when it holds how many blocks, and its path without `net` of them."""
        rest = prompt - net * BLOCK_SIZE
        until = elastic.next_growth(written, call.limit)
        blocks = elastic.blocks_at(prompt, until, BLOCK_SIZE, 0)
        path = elastic.path_of(rest, call.limit, written, self.known.survival, BLOCK_SIZE, self._base)
        return until, blocks, path
