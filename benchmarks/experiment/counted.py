"""The mock's engine for long runs: its decisions, step by step, from counts alone.

`gateway.mock.engine.Engine` touches every sequence in every step.  Here a step costs the same however many run: all
that decode gain a token, and how many of them need a block next is known from their tokens modulo the block size.
Only in a step without enough free blocks those that lose theirs are looked at.  `tests/experiment` compares both
after every step.  First come, first served, no prefix cache, one sequence a call, prompts cut by the step's budget
alone: who was preempted waits before all that came later, so that those that run are in order of arrival, and only
the last can have a prompt that is not yet computed.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gateway.mock.config import EngineConfig


class Served:
    """One call in an engine."""

    __slots__ = (
        "arrival",
        "born",
        "call",
        "computed",
        "computed_before",
        "decoding",
        "due",
        "mark",
        "output_tokens",
        "outputs",
        "preemptions",
        "prompt_tokens",
    )

    def __init__(self, call: Any, prompt_tokens: int, output_tokens: int) -> None:
        self.call = call
        """Whatever belongs to it outside the engine."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.mark = 1
        """Told of when it has sampled so many tokens, and at its end."""
        self.outputs = 0
        """Tokens sampled, while it does not decode."""
        self.computed = 0
        """Tokens stored, while it does not decode."""
        self.computed_before = 0
        self.decoding = False
        self.born = 0
        """While it decodes: the step in which it would have sampled token 0, had every step given it one."""
        self.due = -1
        """While it decodes: the step at whose end it is told of."""
        self.arrival = 0
        self.preemptions = 0

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.outputs


class Counted:
    """`schedule` takes a step's blocks and returns its milliseconds, 0 where nothing moves; `complete` ends it."""

    def __init__(self, config: EngineConfig, told: Callable[[Served, int], int]) -> None:
        """`told` hears of each call that reaches its mark or its end, with its output tokens, and returns the next
        mark."""
        if config.max_num_seqs >= config.max_num_batched_tokens or config.long_prefill_token_threshold:
            raise ValueError("a step must have room for every sequence and one prompt")
        self.config = config
        self.used = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0
        self.running: dict[Served, None] = {}
        """In order of arrival; at most the last one does not decode."""
        self.waiting: list[Served] = []
        """By arrival."""
        self._told = told
        self._size = config.usable_blocks
        self._block = config.block_size
        self._clock = 0
        """Steps so far."""
        self._crossings = [0] * config.block_size
        """How many of those that decode need a block in the steps with that remainder."""
        self._decoding = 0
        self._stored = 0
        """Tokens that those that decode have stored."""
        self._partial: Served | None = None
        """Admitted, its prompt not yet computed."""
        self._due: defaultdict[int, list[Served]] = defaultdict(list)
        self._arrivals = 0
        self._prefilled: list[tuple[Served, int]] = []
        """Of the open step: who gets how many tokens computed beside those that decode."""

    @property
    def waits(self) -> int:
        return len(self.waiting)

    def add(self, served: Served) -> None:
        self._arrivals += 1
        served.arrival = self._arrivals
        insort(self.waiting, served, key=_arrival)

    def computed_of(self, served: Served) -> int:
        """Tokens that it has stored, between two steps."""
        if not served.decoding:
            return served.computed
        return self._clock - served.born + served.prompt_tokens - 1

    def schedule(self) -> float:
        self._prefilled = []
        partial, count = self._partial, 0
        budget = self.config.max_num_batched_tokens - self._decoding
        missing = self._missing()
        if partial is not None:
            count = min(partial.known - partial.computed, budget)
            missing += self._blocks(partial.computed + count) - self._blocks(partial.computed)
        preempted = missing > self._size - self.used
        if preempted:
            self._squeeze()
        else:
            self.used += missing
            if partial is not None:
                self._prefilled.append((partial, count))
            self._admit(budget - count)
        return self._milliseconds() if self._decoding or self._prefilled or preempted else 0.0

    def complete(self) -> None:
        self._clock += 1
        clock = self._clock
        self._stored += self._decoding
        self.generated_tokens += self._decoding
        for served in self._due.pop(clock, ()):
            if served.due == clock:
                self._tell(served, clock - served.born)
        self._partial = None
        for served, count in self._prefilled:
            served.computed += count
            if served.computed < served.known:
                self._partial = served
                continue
            served.outputs += 1
            self.generated_tokens += 1
            self._begin_decoding(served)
            if served.outputs >= min(served.mark, served.output_tokens):
                self._tell(served, served.outputs)
            else:
                self._remind(served)

    def _milliseconds(self) -> float:
        config, decoding = self.config, self._decoding
        stored, tokens = self._stored + decoding, 0
        for served, count in self._prefilled:
            stored += served.computed + count
            if not (served.outputs and served.known - served.computed == 1):
                tokens += count
        microseconds = config.step_prefill_us * tokens + config.step_running_us * (
            decoding + len(self._prefilled)
        )
        return config.step_base_ms + (microseconds + config.step_kv_us * stored) / 1000

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def _admit(self, budget: int) -> None:
        config, waiting = self.config, self.waiting
        while waiting and len(self.running) < config.max_num_seqs and budget > 0:
            served = waiting[0]
            spare = config.watermark_blocks if self.running else 0
            if self._blocks(served.known) + spare > self._size - self.used:
                return
            del waiting[0]
            self.recomputed_tokens += served.computed_before
            self.running[served] = None
            count = min(served.known, budget)
            self.used += self._blocks(count)
            budget -= count
            self._prefilled.append((served, count))

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _begin_decoding(self, served: Served) -> None:
        """It has just sampled: all that it knew is stored, but for that token."""
        served.decoding = True
        served.born = self._clock - served.outputs
        self._crossings[(self._clock - served.computed) % self._block] += 1
        self._decoding += 1
        self._stored += served.computed

    def _end_decoding(self, served: Served) -> None:
        """Its counts are its own again."""
        served.decoding = False
        served.due = -1
        served.outputs = self._clock - served.born
        served.computed = served.known - 1
        self._crossings[(self._clock - served.computed) % self._block] -= 1
        self._decoding -= 1
        self._stored -= served.computed

    def _remind(self, served: Served) -> None:
        served.due = served.born + min(served.mark, served.output_tokens)
        self._due[served.due].append(served)

    def _tell(self, served: Served, outputs: int) -> None:
        if outputs >= served.output_tokens:
            self._end_decoding(served)
            self._leave(served, self._blocks(served.computed))
            self._told(served, outputs)
        else:
            served.mark = self._told(served, outputs)
            self._remind(served)

    def _leave(self, served: Served, blocks: int) -> None:
        del self.running[served]
        self.used -= blocks

    # -- a step without enough free blocks ----------------------------------------------------------------------------

    def _missing(self) -> int:
        """Blocks that those that decode need in this step."""
        return self._crossings[self._clock % self._block]

    def _squeeze(self) -> None:
        """The youngest go until the others have what they need; nothing is admitted, and no prompt computed.

        The mock preempts the last that runs whenever one in its order finds no block, itself in the end: who stays is
        the longest beginning of `running` whose needs are met.  One with a prompt to compute is the last.
        """
        if self._partial is not None:
            self._preempt(self._partial)
        while self._missing() > self._size - self.used:
            self._preempt(next(reversed(self.running)))
        self.used += self._missing()

    def _preempt(self, victim: Served) -> None:
        if victim.decoding:
            self._end_decoding(victim)
        self._leave(victim, self._blocks(victim.computed))
        victim.computed_before = victim.computed
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, victim, key=_arrival)


def _arrival(served: Served) -> int:
    return served.arrival
