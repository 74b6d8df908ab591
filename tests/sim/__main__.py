"""`python -m tests.sim`: many worlds, one after the other; says of one that fails how to see it again."""

import argparse
import contextlib
import sys
import time
from collections import Counter

from tests.sim.plants import PLANTS
from tests.sim.world import Story, play

PROGRESS_SECONDS = 5.0


def main() -> int:
    options = _options()
    plant = PLANTS[options.plant] if options.plant else contextlib.nullcontext
    with plant():
        if options.seed is not None:
            return _show(play(options.seed, options.trace, options.only), options)
        return _play_all(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="worlds to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="play one world only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument(
        "--plant", choices=sorted(PLANTS), help="play with a fault planted, until it is found"
    )
    parser.add_argument("--only", default="", help="one kind of fault, e.g. late_copies or gateway_killed")
    return parser.parse_args()


def _play_all(options: argparse.Namespace) -> int:
    began, told_at = time.monotonic(), time.monotonic()
    facts: Counter[str] = Counter()
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        story = play(seed, only=options.only)
        facts.update(story.facts)
        if story.violation:
            failed += 1
            _show(story, options)
            if options.plant:
                return 1
        if time.monotonic() - told_at > PROGRESS_SECONDS:
            told_at = time.monotonic()
            print(f"{seed + 1 - options.first} of {options.seeds} seeds, {failed} failed", flush=True)
    print(f"{options.seeds} seeds in {time.monotonic() - began:.0f} s, {failed} failed")
    print("  " + ", ".join(f"{name} {count}" for name, count in sorted(facts.items())))
    return int(failed > 0)


def _show(story: Story, options: argparse.Namespace) -> int:
    for line in story.trace:
        print(line)
    if not story.violation:
        print(f"seed {story.seed}: clean after {story.virtual_seconds:.0f} virtual seconds, {story.facts}")
        return 0
    chosen = {"--plant": options.plant, "--only": options.only}
    more = "".join(f" {option} {value}" for option, value in chosen.items() if value)
    print(f"seed {story.seed} FAILED {story.violation}")
    print(f"  replay: python -m tests.sim --seed {story.seed} --trace{more}", flush=True)
    return 1


sys.exit(main())
