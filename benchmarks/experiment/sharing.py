"""Books that charge what calls share once, and keep the histories of sessions that come back.

What all calls of a trace begin with is one piece, which the trace knows and `gateway` has to find.  Whoever is admitted
while somebody past its first token holds it needs its blocks less, as in `gateway.core.nodes`: of calls with paths the
first one's piece is its own until the second has computed it.  A session's next turn is warm while its last one's
blocks are held softly: they count against cold calls only, by the rules of the books themselves
(`gateway/core/holds.py`).
"""

from collections import deque
from dataclasses import dataclass

from benchmarks.experiment.gates import PREFILL_MIN, Books, Held
from benchmarks.experiment.traces import BLOCK_SIZE, Turn
from gateway.core import elastic, holds
from gateway.core.order import HOLD_MS, YIELD_MS
from gateway.core.returns import Returns


@dataclass(slots=True)
class Node:
    """A piece that is held once for all calls in it."""

    blocks: int
    holders: int = 0
    """Past their first token."""
    newcomers: int = 0
    """Granted because it was there, and not that far."""
    own: Held | None = None
    """In whose charge it is: of one call that has a path."""


class SharingBooks(Books):
    def __init__(self, limit: int, *, warm_first: bool = False, soft: bool = False) -> None:
        super().__init__(limit)
        self.nodes: dict[str, Node] = {}
        self.warm: deque[Held] = deque()
        self.soft_blocks = 0
        self._warm_first, self._holds = warm_first, soft
        self._soft: dict[str, tuple[int, float]] = {}
        """By what was said until then, in order of their ends: blocks, and until when."""
        self._history = 0
        self._returns = Returns()

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.warm)

    def admit(self, held: Held, now: float) -> list[Held]:
        held.arrived = now
        self._expire(now)
        self._returns.came(before(held), now)
        held.warm = before(held) in self._soft
        (self.warm if held.warm and self._warm_first else self.queue).append(held)
        return self._dispatch(now)

    def first_token(self, held: Held, now: float) -> list[Held]:
        """What it computed of the piece is everybody's from here on, and its copy of what another had computed first
        is none: either way it holds the piece no longer by itself."""
        self.prefill -= held.prefill
        held.prefill, held.told = 0, True
        name, blocks = held.call.piece
        if held.inside:
            self.nodes[name].newcomers -= 1
        elif name not in self.nodes and held.path is not None:
            self.nodes[name] = Node(blocks, own=held)
        else:
            self._share(self.nodes.get(name), held)
        held.inside = True
        self.nodes[name].holders += 1
        return self._dispatch(now)

    def _share(self, node: Node | None, held: Held) -> None:
        """It has computed what is there already, perhaps in another one's charge, or makes it."""
        name, blocks = held.call.piece
        theirs = [held]
        if node is None or node.own is not None:
            theirs += [node.own] if node is not None and node.own is not None else []
            self._count(blocks)
        if node is None:
            self.nodes[name] = Node(blocks)
        else:
            node.own = None
        for each in theirs:
            self._leave(each)
            self._narrow(each, blocks)
            self._enter(each)

    def settle(self, held: Held, now: float) -> list[Held]:
        self._leave(held)
        if held.inside:
            name, node = held.call.piece[0], self.nodes[held.call.piece[0]]
            node.holders -= held.told
            node.newcomers -= not held.told
            if not node.holders + node.newcomers:
                del self.nodes[name]
                if node.own is None:
                    self._count(-node.blocks)
        self._keep(held, now)
        return self._dispatch(now)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> list[Held]:
        self._expire(now)
        granted: list[Held] = []
        while True:
            for queue in (self.warm, self.queue):
                while queue and queue[0].deadline < now:
                    self.dropped.append(queue.popleft())
            patient = not self.queue or self.queue[0].arrived > now - YIELD_MS / 1000
            queue = self.warm if self.warm and patient else self.queue
            if not queue or not self._fits(queue[0]):
                return granted
            granted.append(queue.popleft())
            self._take(granted[-1])

    def _fits(self, held: Held) -> bool:
        soft = 0 if held.warm else holds.counted(self.soft_blocks, self.limit)
        return self._has_room(held, self._there(held), self.limit - soft)

    def _take(self, held: Held) -> None:
        if there := self._there(held):
            self._narrow(held, there)
            held.there, held.inside = there, True
            self.nodes[held.call.piece[0]].newcomers += 1
        self._end_hold(before(held))
        super()._take(held)

    # -- what is shared -----------------------------------------------------------------------------------------------

    def _there(self, held: Held) -> int:
        """Blocks of it that somebody has computed and holds."""
        node = self.nodes.get(held.call.piece[0])
        return node.blocks if node is not None and node.holders and node.own is None else 0

    def _narrow(self, held: Held, blocks: int) -> None:
        held.shared = blocks
        held.held -= blocks
        held.blocks -= blocks
        left = held.prefill - blocks * BLOCK_SIZE
        held.prefill = left if left >= PREFILL_MIN else 0
        held.path = held.beside(held.shared)

    def _count(self, blocks: int) -> None:
        """A piece: there for as long as anybody is in it."""
        self.used += blocks
        self.full += blocks
        self.assured += blocks

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _keep(self, held: Held, now: float) -> None:
        """A finished turn's blocks, where it is expected back."""
        call = held.call
        blocks = elastic.blocks_at(call.prompt_tokens, call.output_tokens, BLOCK_SIZE, 0) - held.shared
        self._history = holds.averaged(self._history, blocks)
        expected = self._returns.ended(after(held), now)
        if expected and holds.is_large(self.limit, self._history):
            counted = blocks if self._holds else 0
            self._soft[after(held)] = (counted, now + HOLD_MS / 1000)
            self.soft_blocks += counted

    def _end_hold(self, name: str) -> None:
        blocks, _ = self._soft.pop(name, (0, 0.0))
        self.soft_blocks -= blocks

    def _expire(self, now: float) -> None:
        while self._soft:
            name, (_, until) = next(iter(self._soft.items()))
            if until >= now:
                return
            self._end_hold(name)


def before(held: Held) -> str:
    """A name of all that was said before the last answer."""
    call = held.call
    return f"{call.session} {call.turn - 1}" if isinstance(call, Turn) else ""


def after(held: Held) -> str:
    """A name of all that it was sent."""
    call = held.call
    return f"{call.session} {call.turn}" if isinstance(call, Turn) else str(call.number)
