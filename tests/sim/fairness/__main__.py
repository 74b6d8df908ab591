"""`python -m tests.sim.fairness`: every bound of `docs/fairness.md` beside the worst that many seeds found.

`--svg docs/fairness.svg` draws the shares of three keys, and what single calls wait while 10,000 of another key do.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import redis

from gateway.ledger.embedded import EmbeddedStore
from gateway.loadtest.plots import Box, Line, Plot, stacked
from tests.sim.fairness.scenes import (
    UNEQUAL,
    WEIGHTS,
    Habit,
    Head,
    Shares,
    Single,
    flood,
    heads,
    shares,
    uses,
)

SEEDS = range(4)
OVERTAKE_BLOCKS = 400
SECONDS = 360
QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class Bound:
    what: str
    found: float
    most: float | None = None
    """None: told without a bound."""

    @property
    def holds(self) -> bool:
        return self.most is None or self.found <= self.most

    def __str__(self) -> str:
        verdict = "   " if self.most is None else "ok " if self.holds else "NO "
        bound = "" if self.most is None else f" (at most {self.most:g})"
        return f"{verdict}{self.what}: {self.found:.3f}{bound}"


def of_shares() -> Iterator[Bound]:
    equal = [shares(seed, UNEQUAL, 60) for seed in SEEDS]
    yield Bound("shares, 0 to 20 mean call times", _worst(equal, 0, 20), 0.05)
    orders = [dict(zip(WEIGHTS, order, strict=True)) for order in permutations(UNEQUAL.values())]
    found = [shares(seed, habits, 60) for habits in orders for seed in SEEDS]
    yield Bound("the same, whichever key has the long calls", _worst(found, 0, 20))
    yield Bound("shares, 20 to 60, whichever key has them", _worst(found, 20, 60), 0.05)
    wrong = [{**UNEQUAL, key: replace(UNEQUAL[key], mistake=4.0)} for key in WEIGHTS]
    found = [shares(seed, habits, 60) for habits in wrong for seed in SEEDS]
    yield Bound("shares, 20 to 60, one key's estimates 4 times too high", _worst(found, 20, 60), 0.05)
    yield Bound("the same, 0 to 20", _worst(found, 0, 20))
    low = {key: Habit(hold_ms=(500, 1_500), mistake=0.25) for key in WEIGHTS}
    found = [shares(seed, low, 60) for seed in SEEDS]
    yield Bound("shares, 20 to 60, all estimates 4 times too low", _worst(found, 20, 60))
    for what, sizes in (
        ("of 5 to 30 blocks", ((5, 30),) * 3),
        ("of 10, 20, 40 by key", ((10, 10), (20, 20), (40, 40))),
    ):
        sized = {key: replace(UNEQUAL[key], blocks=size) for key, size in zip(WEIGHTS, sizes, strict=True)}
        found = [shares(seed, sized, 60) for seed in SEEDS]
        yield Bound(f"shares, 20 to 60, calls {what}", _worst(found, 20, 60))


def _worst(found: Sequence[Shares], begin: int, end: int) -> float:
    return max(abs(error) for each in found for error in each.errors(begin, end).values())


def of_singles(singles: list[Single]) -> Iterator[Bound]:
    over = max((single.wait_ms - single.longest_ms) / 1_000 for single in singles)
    yield Bound("a single call: seconds over the longest remaining time", over, 1.0)
    yield Bound("a single call: longest wait in seconds", max(single.wait_ms for single in singles) / 1_000)


def of_heads() -> Iterator[Bound]:
    equal = {key: Habit((10, 10)) for key in "pqr"}
    mixed = {key: Habit((5, 30)) for key in "pqr"}
    low = list(_heads(equal, Habit((10, 10), class_="low")))
    yield Bound("a lower class: drained before its head starts, of cost / share",
                max(head.before_blocks / (head.call.blocks * 10) for head in low), 1.0)  # fmt: skip
    large = list(_heads(equal, Habit((100, 400))))
    yield Bound(
        "a large head: drained before its replica is held, of overtake_blocks", _overtaken(large), 1.0
    )
    among = list(_heads(mixed, Habit((100, 400))))
    yield Bound("the same among calls of 5 to 30 blocks", _overtaken(among), 1 + 30 / OVERTAKE_BLOCKS)
    late = max(head.late_ms for head in (*large, *among)) / 1_000
    yield Bound("a large head: seconds over the longest remaining time once held", late, 0.0)


def _heads(others: Mapping[str, Habit], habit: Habit) -> Iterator[Head]:
    for seed in SEEDS:
        yield from heads(seed, others, habit)


def _overtaken(found: list[Head]) -> float:
    return max(head.before_blocks for head in found) / OVERTAKE_BLOCKS


def of_throughput(client: "redis.Redis[bytes]") -> Iterator[Bound]:
    for large_share, bound in ((0.01, 0.04), (0.03, 0.04), (0.1, None)):
        found = [uses(client, seed, large_share, calls=2_000) for seed in range(3)]
        ordered, unordered = (sum(part) for part in zip(*found, strict=True))
        what = f"throughput lost to the order, {large_share:.0%} large calls"
        yield Bound(what, 1 - ordered / unordered, bound)


def picture(singles: list[Single]) -> str:
    found = shares(1, UNEQUAL, 20)
    seconds = list(range(0, SECONDS + 1, 5))
    lines = tuple(
        Line(run, f"key {key}, weight {weight}", seconds, [found.held(key, 0, 1_000 * s) for s in seconds])
        for run, (key, weight) in enumerate(WEIGHTS.items())
    )
    at = [single.second for single in singles]
    waits = (
        Line(3, "longest running call", at, [single.longest_ms / 1_000 for single in singles]),
        Line(4, "single call", at, [single.wait_ms / 1_000 for single in singles]),
    )
    plots = (
        Plot("Block-seconds held, cumulative: calls of 5, 20 and 40 s", lines),
        Plot(
            "Wait of a single call while 10,000 of another key wait, and the longest remaining time (s)",
            waits,
        ),
    )
    return stacked(plots, Box(900, 200), SECONDS, "Fairness, simulated")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, help="also draw the picture there")
    options = parser.parse_args()
    store = EmbeddedStore()
    store.start()
    try:
        with redis.Redis(unix_socket_path=str(store.socket), protocol=2) as client:
            singles = list(flood(client, 1, QUEUED, SECONDS))
            corrected = list(flood(client, 2, QUEUED, SECONDS, first_mistake=50.0))
            bounds = [*of_shares(), *of_singles(singles + corrected), *of_heads(), *of_throughput(client)]
    finally:
        store.stop()
    print(*bounds, sep="\n")
    if options.svg:
        options.svg.write_text(picture(singles))
    return 0 if all(bound.holds for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
