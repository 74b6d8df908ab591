"""A system prompt under thrash, with and without pinning: `python benchmarks/pinning.py [--svg docs/pinning.svg]`.

One engine (the mock's, step by step in virtual time) with more strangers than its cache holds, and every few seconds a
call that begins with a long system prompt.  The rule is `gateway/core/pins.py` as the gateway runs it: fed with the
engine's figures every two seconds.  Deterministic: the same seed gives the same picture.
"""

import argparse
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from gateway.core.pins import Page, PinBook
from gateway.loadtest.plots import Box, Line, Mark, Plot, stacked
from gateway.mock.engine import Engine, EngineConfig, Request, Sizes
from gateway.mock.pool import content

PIN, REPLICA = "system", "engine"
CONFIG = EngineConfig(blocks=4097, block_size=16, max_num_batched_tokens=2048)
SYSTEM_TOKENS = 8000
OWN_TOKENS, ANSWER_TOKENS = 64, 32
"""Of a call behind the system prompt."""
EVERY_SECONDS = 11.0
"""Between two such calls."""
PAGE_SECONDS = 2.0
STRANGER_TOKENS, STRANGER_ANSWER = 1500, 100
STRANGERS_PER_SECOND = 6.0
SECONDS = 300.0
"""Of virtual time."""
QUIET = 60.0, 100.0
"""Seconds between which there are no strangers."""
UNUSED_FROM = 240.0
"""From then on nobody has use for the system prompt."""


@dataclass(frozen=True)
class Use:
    at: float
    ttft_ms: float
    cached_tokens: int


@dataclass
class Run:
    uses: list[Use] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    """When the prefix was asked for."""
    asked_tokens: int = 0
    """That this cost the engine."""


class Thrash:
    """One run."""

    def __init__(self, seed: int, pinned: bool) -> None:
        self.engine = Engine(CONFIG)
        self.run = Run()
        self._pinned = pinned
        self._book = PinBook()
        self._chance = random.Random(seed)
        self._now = 0.0
        self._sent_at = 0
        """What had passed when the prefix was asked for last."""
        self._numbers = count()
        self._system = [f"s{number}" for number in range(SYSTEM_TOKENS)]
        self._waiting: dict[str, float] = {}
        """When each call that begins with the system prompt has come."""
        self._first: dict[str, Use] = {}

    def play(self, seconds: float = SECONDS) -> Run:
        events = iter(sorted([*self._strangers(seconds), *self._uses(seconds), *_pages(seconds)]))
        due, kind = next(events)
        while True:
            while due <= self._now:
                self._begin(kind, due)
                following = next(events, None)
                if following is None:
                    return self.run
                due, kind = following
            if not self._step():
                self._now = due

    def _strangers(self, seconds: float) -> Iterator[tuple[float, str]]:
        at = 0.0
        while (at := at + self._chance.expovariate(STRANGERS_PER_SECOND)) < seconds:
            if not QUIET[0] <= at < QUIET[1]:
                yield at, "stranger"

    def _uses(self, seconds: float) -> Iterator[tuple[float, str]]:
        at = 0.0
        while (at := at + EVERY_SECONDS) < min(seconds, UNUSED_FROM):
            yield at, "use"

    def _begin(self, kind: str, at: float) -> None:
        if kind == "page":
            self._look(at)
        elif kind == "stranger":
            self._add("stranger", self._own(STRANGER_TOKENS), STRANGER_ANSWER, at)
        else:
            self._add("use", [*self._system, *self._own(OWN_TOKENS)], ANSWER_TOKENS, at)

    def _own(self, tokens: int) -> list[str]:
        number = next(self._numbers)
        return [f"{number}.{place}" for place in range(tokens)]

    def _add(self, kind: str, pieces: list[str], output: int, at: float) -> None:
        name = f"{kind}-{next(self._numbers)}"
        self._waiting[name] = at
        sizes = Sizes(len(pieces), output, content(pieces, CONFIG.block_size))
        self.engine.add(Request(name, (sizes,)))

    def _look(self, at: float) -> None:
        engine = self.engine
        passed = engine.prompt_tokens + engine.generation_tokens
        page = Page(passed, engine.prefix_hits, engine.blocks_free * CONFIG.block_size)
        due = self._book.turn(REPLICA, page)
        if due and self._pinned and not any(name.startswith("pin") for name in self._waiting):
            self.run.asked_at.append(at)
            self._sent_at = self._book.passed(REPLICA)
            self._add("pin", self._system, 1, at)

    def _step(self) -> bool:
        """False where there is nothing to do."""
        step = self.engine.schedule()
        if step.idle:
            return False
        self._now += step.duration_ms / 1000
        for sequence in step.admitted:
            name = sequence.request_id
            if not name.startswith("stranger"):
                self._first[name] = Use(self._waiting[name], 0.0, sequence.cached_tokens)
        self.engine.complete(step)
        for token in step.tokens:
            self._see(token.request_id, token.number, last=token.last)
        return True

    def _see(self, name: str, number: int, *, last: bool) -> None:
        begun = self._first.get(name)
        if begun is not None and number == 1:
            begun = self._first[name] = Use(begun.at, 1000 * (self._now - begun.at), begun.cached_tokens)
        if not last:
            return
        del self._waiting[name]
        if begun is None:
            return
        del self._first[name]
        if name.startswith("pin"):
            self._book.asked(PIN, REPLICA, self._sent_at, SYSTEM_TOKENS, begun.cached_tokens)
            self.run.asked_tokens += SYSTEM_TOKENS - begun.cached_tokens + 1
        else:
            self._book.use(PIN, REPLICA, begun.cached_tokens)
            self.run.uses.append(begun)


def _pages(seconds: float) -> Iterator[tuple[float, str]]:
    at = 0.0
    while (at := at + PAGE_SECONDS) < seconds:
        yield at, "page"


def picture(runs: Mapping[str, Run]) -> str:
    """The time to the first token of each call that begins with the system prompt, over time."""
    lines = tuple(
        Line(number, name, [use.at for use in run.uses], [use.ttft_ms for use in run.uses])
        for number, (name, run) in enumerate(runs.items())
    )
    longest = max(use.ttft_ms for run in runs.values() for use in run.uses)
    plot = Plot(f"Time to first token behind {SYSTEM_TOKENS:,} tokens of system prompt (ms)", lines)
    marks = Mark(QUIET[0], "no strangers"), Mark(QUIET[1], "strangers again")
    title = f"A system prompt under thrash: {longest:.0f} ms without its cache"
    return stacked([plot], Box(900, 240), UNUSED_FROM, title, marks)


def told(name: str, run: Run) -> str:
    ttft = sorted(use.ttft_ms for use in run.uses[1:])
    found = sum(use.cached_tokens for use in run.uses)
    return (
        f"{name}: TTFT median {ttft[len(ttft) // 2]:.0f} ms, most {ttft[-1]:.0f} ms; {found:,} tokens found by"
        f" {len(run.uses)} calls; {len(run.asked_at)} calls of kvgate's own, which computed {run.asked_tokens:,} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="also draw the picture there")
    parsed = parser.parse_args()
    runs = {
        name: Thrash(parsed.seed, pinned).play() for name, pinned in (("plain LRU", False), ("pinned", True))
    }
    for name, run in runs.items():
        print(told(name, run))
    if parsed.svg:
        parsed.svg.write_text(picture(runs))


if __name__ == "__main__":
    main()
