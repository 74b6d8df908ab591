"""2,400 sessions at once, against 240: what kvgate adds between two tokens when it carries ten times as many.

    python benchmarks/peak.py [--report build/peak]

Four mock engines with a step of 200 ms take 256 sequences each, so 1,024 calls run and the others wait.  The exit
status is 1 where a bound below does not hold.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage import KVGATE, Bound, Pool, all_hold, fleet, gateway, kept_up, load

POOLS = (Pool("only", 4),)
ENGINE = (
    *("--model", "demo", "--blocks", "4096", "--block-size", "16", "--max-num-seqs", "256"),
    *("--step-base-ms", "200", "--step-prefill-us", "0", "--step-running-us", "0"),
)
KEYS = ("ada", "bob", "cyd", "dan")
SETTINGS: dict[str, Any] = {
    "queue": {"depth_max": 1000, "seconds_max": 110},
    "fleet": {"safe_fraction": 1.0},
}

Report = dict[str, Any]


def run(folder: Path, scenario: str, label: str) -> Report:
    with fleet(POOLS, *ENGINE) as engines, gateway(engines, KEYS, SETTINGS) as gate:
        watched = [option for url in engines.all_urls for option in ("--engine", url)]
        return load(scenario, folder / scenario, label, *watched, gate=gate)


def bounds(tenth: Report, whole: Report) -> Iterator[Bound]:
    few, many = tenth["figures"], whole["figures"]
    running = max(whole["series"]["per_second"]["running"])
    yield Bound("at least 960 of 2,400 run at once", f"{running:.0f}", running >= 960)
    ratio = many["gap_corrected_ms"]["p99"] / few["gap_corrected_ms"]["p99"]
    yield Bound("inter-token p99 at most 1.2 of that with 240 sessions", f"{ratio:.2f}", ratio <= 1.2)
    preemptions = many["engines"]["preemptions"]
    yield Bound("preemptions 0", f"{preemptions:.0f}", preemptions == 0)
    leaked = sum(map(abs, many["kvgate"]["leaked"].values()))
    yield Bound("leaked 0", f"{leaked:.0f}", leaked == 0)
    yield kept_up(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=Path("build/peak"), help="default build/peak")
    folder: Path = parser.parse_args().report
    folder.mkdir(parents=True, exist_ok=True)
    runs = run(folder, "peak-tenth", "240 sessions"), run(folder, "peak", "2,400 sessions")
    files = [folder / name / "report.json" for name in ("peak-tenth", "peak")]
    subprocess.run([*KVGATE, "loadtest", "--compare", *files, "--report", folder], check=True)
    return 0 if all_hold(bounds(*runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
