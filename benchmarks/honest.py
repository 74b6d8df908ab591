"""Refusals that are quick and appointments that are kept.

The gateway has core 0 for itself; its store, the engines and the clients share core 1, as with the yardstick: they are
ten processes that would wait for each other on the gateway's time.

    python benchmarks/honest.py [--report build/honest] [--short]

*Flood*: eight mock engines with a step of 200 ms run 500 streams, which fill them.  Three times without and three times
with 20 prompts of 64k tokens a second on top, all of different text: how long refusals take, and what the streams
notice.

*Overload*: two mock engines with a step of 100 ms get half a minute's work at once and then for 50 s 1.25 and 1.5 times
what they can do, which is measured first, with the queue's default settings: what becomes of refused clients that come
back when they were asked to.

The exit status is 1 where a bound below does not hold.  `--short` plays each once and in less time, and proves that it
runs, not that the bounds hold.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import Bound, Fleet, Gateway, Pool, all_hold, fleet, gateway, kept_up, load
from yardstick import machine

from gateway.loadtest import scenario

FULL_POOLS, SLOW_POOLS = (Pool("only", 8),), (Pool("only", 2),)
KEYS = ("ada", "bob", "cyd", "dan")
FULL_ENGINE = (
    *("--model", "demo", "--blocks", "4096", "--block-size", "16", "--max-model-len", "131072"),
    *("--max-num-seqs", "512", "--max-num-batched-tokens", "16384"),
    *("--step-base-ms", "200", "--step-prefill-us", "0", "--step-running-us", "0"),
)
"""63 streams of 65 blocks fill it; the some 4,060 blocks of a prompt of 64k tokens would fit into an idle one."""
FULL_SETTINGS: dict[str, Any] = {"queue": {"depth_max": 10}, "fleet": {"safe_fraction": 1.0}}
SLOW_ENGINE = (
    *("--model", "demo", "--blocks", "1001", "--block-size", "16"),
    *("--step-base-ms", "100", "--step-prefill-us", "0", "--step-running-us", "0"),
)
DEFAULT_QUEUE: dict[str, Any] = {"fleet": {"safe_fraction": 1.0}}
STREAMS = 500
ROUNDS = 3
LOADS = (1.25, 1.5)
FULL_AFTER_SECONDS, CAPACITY_SECONDS = 8, 22
"""Of the run in which the capacity is measured: calls that end after the first, until the second."""
QUEUE_SECONDS, OVERLOAD_SECONDS = 30, 50
REFUSALS_MIN = 50
"""Fewer would say nothing."""

Report = dict[str, Any]


# -- flood ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flooded:
    """A run of the streams beside a flood."""

    crowd: Report
    flood: Report


def run_calm(folder: Path, number: int, options: Sequence[str]) -> Report:
    with fleet(FULL_POOLS, *FULL_ENGINE) as engines, on_its_core(engines, FULL_SETTINGS) as gate:
        return play(folder, "crowd", f"calm {number}", engines, gate, options)


def run_flooded(folder: Path, number: int, options: Sequence[str]) -> Flooded:
    with (
        fleet(FULL_POOLS, *FULL_ENGINE) as engines,
        on_its_core(engines, FULL_SETTINGS) as gate,
        ThreadPoolExecutor() as threads,
    ):
        flood = threads.submit(play, folder, "flood", f"flood {number}", engines, gate, options)
        crowd = play(folder, "crowd", f"flooded {number}", engines, gate, options)
        return Flooded(crowd, flood.result())


def flood_bounds(calm: Sequence[Report], flooded: Sequence[Flooded]) -> Iterator[Bound]:
    crowds = [*calm, *(run.crowd for run in flooded)]
    for run in (*crowds, *(run.flood for run in flooded)):
        yield kept_up(run)
    most = min(max(run["series"]["per_second"]["running"]) for run in crowds)
    yield Bound(f"at least {STREAMS - 20} streams at once, in every run", f"{most:.0f}", most >= STREAMS - 20)
    yield from refusal_bounds([run.flood for run in flooded])
    without, with_flood = (
        [run["figures"]["gap_corrected_ms"]["p99"] for run in runs]
        for runs in (calm, [run.crowd for run in flooded])
    )
    ratio = statistics.median(with_flood) / statistics.median(without)
    text = f"{ratio:.3f} ({listed(with_flood)} against {listed(without)} ms)"
    yield Bound("inter-token p99 with the flood at most 1.1 of that without, medians", text, ratio <= 1.1)


def refusal_bounds(runs: Sequence[Report]) -> Iterator[Bound]:
    """By the gateway's own measure, from the body's last byte to the answer's, of calls that never waited."""
    found = [reason for run in runs for reason in run["figures"]["kvgate"]["refusal_ms"].values()]
    count, quick = (sum(reason[name] for reason in found) for name in ("count", "in_5_ms"))
    p50_ms = listed([reason["p50_at_most"] or float("inf") for reason in found])
    yield Bound(f"flood: at least {REFUSALS_MIN} refusals", f"{count}", count >= REFUSALS_MIN)
    text = f"{quick} of {count} (medians of the runs <= {p50_ms} ms)"
    yield Bound("flood: 99 % of refusals in 5 ms", text, quick >= 0.99 * count)


# -- overload ---------------------------------------------------------------------------------------------------------


def measure_capacity(folder: Path) -> float:
    """Calls that end in a second while far more are offered."""
    scenario_file = write_overload(folder, "capacity", [(CAPACITY_SECONDS, 80.0)], drain_seconds=0)
    run = run_overload(folder, scenario_file, "capacity")
    ended = run["series"]["per_second"]["answered"][FULL_AFTER_SECONDS:CAPACITY_SECONDS]
    return sum(ended) / len(ended)


def play_overload(folder: Path, capacity: float, times: float, seconds: float) -> Report:
    """First what waits for as long as anything may: from then on calls have to be refused."""
    rush = (10.0, capacity * (1 + QUEUE_SECONDS / 10))
    label = f"{times:g} times the capacity"
    scenario_file = write_overload(folder, f"overload-{times:g}", [rush, (seconds, capacity * times)])
    return run_overload(folder, scenario_file, label)


def write_overload(
    folder: Path, name: str, phases: Sequence[tuple[float, float]], drain_seconds: float | None = None
) -> Path:
    """The packaged scenario at other rates."""
    packaged, _ = scenario.load("overload")
    document = scenario.to_json(packaged) | {"name": name}
    document["phases"] = [{"seconds": seconds, "calls_per_second": rate} for seconds, rate in phases]
    if drain_seconds is not None:
        document["drain_seconds"] = drain_seconds
    file = folder / f"{name}.json"
    file.write_text(json.dumps(document))
    return file


def run_overload(folder: Path, scenario_file: Path, label: str) -> Report:
    with fleet(SLOW_POOLS, *SLOW_ENGINE) as engines, on_its_core(engines, DEFAULT_QUEUE) as gate:
        return play(folder, str(scenario_file), label, engines, gate, ())


def overload_bounds(run: Report) -> Iterator[Bound]:
    yield kept_up(run)
    back = run["figures"]["attempts"]["back_after_refusal"]
    found = f"{back['granted_or_queued']} of {back['count']}"
    enough = back["count"] >= REFUSALS_MIN
    yield Bound(f"{run['label']}: at least {REFUSALS_MIN} came back", str(back["count"]), enough)
    share = back["share"] or 0.0
    what = f"{run['label']}: granted or queued when back at least 80 %"
    yield Bound(what, f"{share:.0%} ({found})", share >= 0.8)


# -- both -------------------------------------------------------------------------------------------------------------


@contextmanager
def on_its_core(engines: Fleet, settings: dict[str, Any]) -> Iterator[Gateway]:
    with gateway(engines, KEYS, settings) as gate:
        machine.move_to_measured_core(gate.pid)
        yield gate


def play(
    folder: Path, name: str, label: str, engines: Fleet, gate: Gateway, options: Sequence[str]
) -> Report:
    watched = [option for url in engines.all_urls for option in ("--engine", url)]
    return load(name, folder / label, label, *watched, *options, gate=gate)


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def measure(folder: Path, short: bool) -> Iterator[Bound]:
    calm: list[Report] = []
    flooded: list[Flooded] = []
    options = ("--seconds-scale", "0.5") if short else ()
    for number in range(1, 2 if short else ROUNDS + 1):
        calm.append(run_calm(folder, number, options))
        flooded.append(run_flooded(folder, number, options))
    yield from flood_bounds(calm, flooded)
    capacity = measure_capacity(folder)
    print(f"capacity: {capacity:.1f} calls/s", file=sys.stderr)
    for times in LOADS[-1:] if short else LOADS:
        yield from overload_bounds(play_overload(folder, capacity, times, 15 if short else OVERLOAD_SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=Path("build/honest"), help="default build/honest")
    parser.add_argument("--short", action="store_true", help="each once, in less time")
    parsed = parser.parse_args()
    machine.stay_on_the_other_core()
    folder: Path = parsed.report
    folder.mkdir(parents=True, exist_ok=True)
    return 0 if all_hold(measure(folder, parsed.short)) or parsed.short else 1


if __name__ == "__main__":
    sys.exit(main())
