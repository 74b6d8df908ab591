"""The calls: what production traces look like, in five kinds.  Everything follows from the seed."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from gateway.mock.pool import Content, chained
from gateway.mock.tokenizer import word

LARGEST_PROMPT = 14_000
"""Of chats: with the largest output limit just below 1,900 blocks, so that every call fits the smallest pool."""
SHARED_TOKENS = 2_048
"""That all prompts of RAG begin with."""
BLOCK_SIZE = 16
AGENT_TOKENS = 4_096
"""That all sessions of agents begin with."""
AGENT_LIMIT = 4_096
LONGEST_HISTORY = 30_000
"""Of a session: what it would send beyond that ends it.  With its output limit just below 2,200 blocks."""
THINK_SECONDS = 3.0
"""Between an answer and the next turn, on average; at random, as what tools do takes long or not."""


@dataclass(slots=True, eq=False)
class Call:
    number: int
    prompt_tokens: int
    output_tokens: int
    """What it will write, which nobody knows before."""
    limit: int
    """Of its output, as its client states it."""

    @property
    def blocks(self) -> int:
        """Its whole demand."""
        return max(1, -(-(self.prompt_tokens + self.limit - 1) // BLOCK_SIZE))

    @property
    def piece(self) -> tuple[str, int]:
        """What a RAG prompt begins with as all others do: a name, and blocks."""
        return "documents", SHARED_TOKENS // BLOCK_SIZE

    @property
    def content(self) -> Content:
        """Of a RAG prompt: the same beginning as all, the rest its own."""
        full, tail = divmod(self.prompt_tokens, BLOCK_SIZE)
        shared = SHARED_TOKENS // BLOCK_SIZE
        own = range((self.number + 1) << 20, ((self.number + 1) << 20) + full - shared)
        return Content((*range(1, shared + 1), *own), ("x",) * tail)


@dataclass(slots=True, eq=False)
class Turn(Call):
    """Of a session."""

    said: Content
    session: int
    turn: int
    """From 0 on."""
    think: float
    """Seconds from its end until the next turn."""

    @property
    def piece(self) -> tuple[str, int]:
        return "tools", AGENT_TOKENS // BLOCK_SIZE

    @property
    def content(self) -> Content:
        return self.said


Sizes = Callable[[random.Random], tuple[int, int, int]]
"""Prompt, output, limit."""


def chat(chance: random.Random) -> tuple[int, int, int]:
    """Output with a median of 317 and p99 of 7,551 tokens, as in a production trace; limits far above."""
    prompt = _lognormal(chance, 800, 0.9, 16, LARGEST_PROMPT)
    limit = chance.choices((2_048, 4_096, 8_192, 16_384), (10, 35, 35, 20))[0]
    return prompt, _lognormal(chance, 317, math.log(7_551 / 317) / 2.3263, 1, limit), limit


def rag(chance: random.Random) -> tuple[int, int, int]:
    prompt = round(math.exp(chance.uniform(math.log(8_000), math.log(62_000))))
    return prompt, _lognormal(chance, 280, 0.5, 1, 1_024), 1_024


def benign(chance: random.Random) -> tuple[int, int, int]:
    """Limits that are nearly what is needed: nothing to gain."""
    output = chance.randint(100, 500)
    return chance.randint(500, 2_000), output, math.ceil(output * chance.uniform(1.0, 1.2))


def generous(chance: random.Random) -> tuple[int, int, int]:
    """Short, predictable answers under a large limit."""
    return chance.randint(200, 400), chance.randint(300, 700), 4_096


def longer(sizes: Sizes) -> Sizes:
    """Three times the output, within the same limits."""

    def tripled(chance: random.Random) -> tuple[int, int, int]:
        prompt, output, limit = sizes(chance)
        return prompt, min(3 * output, limit), limit

    return tripled


TRACES: dict[str, Sizes] = {"chat": chat, "rag": rag, "benign": benign, "generous": generous}


def calls(sizes: Sizes, seed: int, shift: int | None = None) -> Iterator[Call]:
    """Endless; from call `shift` on with three times the output."""
    chance, tripled = random.Random(seed), longer(sizes)
    for number in count():
        later = shift is not None and number >= shift
        yield Call(number, *(tripled if later else sizes)(chance))


def sessions(seed: int) -> Iterator[Iterator[Call]]:
    """Endless, of agents: 4 to 20 turns, each of which sends all that was said before, and the answers."""
    numbers = count()
    for number in count():
        yield _session(random.Random(f"session {seed} {number}"), number, numbers)


def _session(chance: random.Random, session: int, numbers: Iterator[int]) -> Iterator[Call]:
    said = Content(tuple(range(1, AGENT_TOKENS // BLOCK_SIZE + 1)))
    fresh = _lognormal(chance, 1_500, 0.7, 100, 8_000)
    for turn in range(chance.randint(4, 20)):
        said = _extended(said, [f"{session} {turn} {place}" for place in range(fresh)])
        prompt_tokens = len(said.hashes) * BLOCK_SIZE + len(said.tail)
        if prompt_tokens > LONGEST_HISTORY:
            return
        output = _lognormal(chance, 280, 0.7, 50, 1_500)
        think = chance.expovariate(1 / THINK_SECONDS)
        yield Turn(next(numbers), prompt_tokens, output, AGENT_LIMIT, said, session, turn, think)
        said = _extended(said, [word(place + 1) for place in range(output)])
        fresh = _lognormal(chance, 700, 0.8, 50, 4_000)


def _extended(said: Content, pieces: list[str]) -> Content:
    """As the engine names the blocks of what it has computed, so that it finds them again."""
    pieces, end, hashes = [*said.tail, *pieces], said.end, list(said.hashes)
    full = len(pieces) - len(pieces) % BLOCK_SIZE
    for start in range(0, full, BLOCK_SIZE):
        end = chained(end, pieces[start : start + BLOCK_SIZE])
        hashes.append(end)
    return Content(tuple(hashes), tuple(pieces[full:]), said.root)


def steady(seed: int, per_second: float) -> Iterator[float]:
    """Moments of arrival in seconds, one by one at random."""
    chance, at = random.Random(f"arrivals {seed}"), 0.0
    while True:
        at += chance.expovariate(per_second)
        yield at


def bursts(seed: int, per_second: float, together: int) -> Iterator[float]:
    """The same rate, so many at once."""
    for at in steady(seed, per_second / together):
        for _ in range(together):
            yield at


def _lognormal(chance: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(max(round(chance.lognormvariate(math.log(median), sigma)), low), high)
