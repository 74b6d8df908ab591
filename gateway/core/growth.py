"""How one elastic call's hold on its replica grows with what it writes: when, to how many blocks, and by which path.

Only what the engine reports of its tokens counts: how many are in an event it alone knows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gateway.core.elastic import SCALE, Survival, blocks_at, next_growth, pack, path_of
from gateway.core.estimate import Demand

AHEAD_TOKENS = 8
"""So many before it needs more blocks a call asks for them: what it reports and what the store hears comes later."""
NEVER = 2**53
"""More tokens than any call writes."""


class Holding(NamedTuple):
    """What a call has of its replica."""

    held: int = -1
    """Blocks; -1 = all of its demand."""
    base: int = 0
    """The size of replica that the path is made for."""
    path: bytes = b""
    """As the store has it (`elastic.pack`); empty = it holds all of its demand until its end."""
    net: int = 0
    """Blocks of `held` that are not in the path, since the call shares them."""


IN_FULL = Holding()


@dataclass(frozen=True, slots=True)
class Law:
    """What is known beforehand of a call that may grow."""

    survival: Survival
    base: int
    ahead: int
    """Speculative tokens."""


def start(demand: Demand, law: Law) -> Holding:
    """What a call of one sequence holds that has written nothing."""
    return _holding(demand, law, demand.longest_prompt_tokens, 0, 0)


class Growth:
    """Follows one call of one sequence.  It never holds more than its demand."""

    __slots__ = ("_demand", "_law", "_prompt_tokens", "_shared", "due")

    def __init__(self, demand: Demand, law: Law, shared: int = 0) -> None:
        """`shared`: blocks that it shares as long as it runs."""
        self.due = 0
        """Tokens written from which on `note` may have an answer; at first it may correct the prompt's tokens, and tell
        the path of what the call does not share."""
        self._shared = shared
        self._demand = demand
        self._law = law
        self._prompt_tokens = demand.longest_prompt_tokens

    def note(self, prompt_tokens: int, written: int) -> Holding | None:
        """What the call holds from now on, its engine having counted so many tokens; None = what it held before.

        The first count of the prompt's tokens replaces the estimate, in either direction.
        """
        if self.due and written < self.due:
            return None
        first, estimated = not self.due, self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        due = _due(written, self._demand.output_tokens)
        if first:
            self.due = _due(0, self._demand.output_tokens)
            known = not self._shared and self._held_at_first(prompt_tokens) == self._held_at_first(estimated)
            if written < self.due and known:
                return None
        self.due = due
        return _holding(self._demand, self._law, prompt_tokens, written, self._shared)

    def in_full(self) -> Holding:
        """Nothing is known of how far it is: it holds all of its demand from now on."""
        self.due = NEVER
        return Holding(self._demand.blocks)

    def _held_at_first(self, prompt_tokens: int) -> int:
        """Without the path, which costs more than all else that is done with an event."""
        return _held(self._demand, self._law, prompt_tokens, next_growth(0, self._demand.output_tokens))


def _due(written: int, output_tokens: int) -> int:
    grown = next_growth(written, output_tokens)
    return NEVER if grown >= output_tokens else max(grown - AHEAD_TOKENS, 1)


def _holding(demand: Demand, law: Law, prompt_tokens: int, written: int, shared: int) -> Holding:
    output_tokens, most = demand.output_tokens, (demand.blocks - shared) * SCALE
    held = _held(demand, law, prompt_tokens, next_growth(written, output_tokens))
    rest_tokens = max(prompt_tokens - shared * demand.block_size, 1)
    path = path_of(rest_tokens, output_tokens, written, law.survival, demand.block_size, law.base, law.ahead)
    if max(path) > most:
        path = tuple([min(point, most) for point in path])
    return Holding(held, law.base, pack(path), shared)


def _held(demand: Demand, law: Law, prompt_tokens: int, grown: int) -> int:
    return min(demand.blocks, blocks_at(prompt_tokens, grown, demand.block_size, law.ahead))
