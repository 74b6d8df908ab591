"""`python -m benchmarks.experiment`: plays all runs, writes build/experiment/results.json, and checks the bounds.

Runs that are in that file already are not played again, unless `--fresh`.  `--doc` writes the tables and pictures of
`docs/utilisation.md`.  The exit status is 1 where a bound does not hold.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import redis

from benchmarks.experiment import cells
from benchmarks.experiment.bounds import bounds
from benchmarks.experiment.ledgers import compared
from benchmarks.experiment.report import write_document
from gateway.ledger.embedded import EmbeddedStore

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build/experiment/results.json"
SHORT_RESULTS = ROOT / "build/experiment/short.json"
SHORT_SLACK = 0.1
SMALL, COMPARED_CALLS = 2_000, 1_500
"""Cases with so many blocks are also played through the real books."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiment", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--short", action="store_true", help="two cases with few calls, within two minutes")
    parser.add_argument(
        "--most",
        type=int,
        default=1 << 62,
        metavar="CALLS",
        help="of each run; a later one without it, or with more, plays those again",
    )
    parser.add_argument("--fresh", action="store_true", help="play everything again")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="runs whose name begins so, as `chat 8000` or `chat 8000 closed elastic`",
    )
    parser.add_argument("--doc", action="store_true", help="write docs/utilisation.md's tables and pictures")
    options = parser.parse_args()
    path = SHORT_RESULTS if options.short else RESULTS
    results: cells.Results = {}
    if path.exists() and not options.fresh:
        results = json.loads(path.read_text())
    begun = time.process_time()

    def keep(name: str, figures: cells.Figures) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=0))
        figure = f"{figures['tokens_per_second']:.0f} tokens/s, {figures['preemptions']} preemptions"
        print(f"{time.process_time() - begun:6.0f} s  {name}: {figure}", flush=True)

    def wanted(name: str) -> bool:
        return f"{name} ".startswith(f"{options.only} ") or not options.only

    chosen = [
        case
        for case in (cells.SHORT if options.short else cells.CASES)
        if wanted(case.name) or options.only.startswith(f"{case.name} ")
    ]
    player = cells.Player(results, keep, options.most, wanted)
    for case in chosen:
        player.case(case)
    for case in chosen:
        name = f"{case.name} real books"
        if case.blocks == SMALL and wanted(name) and name not in results:
            results[name] = alike(case)
            path.write_text(json.dumps(results, indent=0))
    slack = SHORT_SLACK if options.short else 0.0
    found = [bound for case in chosen for bound in bounds(results, case, slack)]
    print(*found, sep="\n")
    if options.doc:
        write_document(ROOT / "docs", results)
    return 0 if found and all(bound.holds for bound in found) else 1


def alike(case: cells.Case) -> cells.Figures:
    """The books of the experiment and the real ones, on a store of their own."""
    store = EmbeddedStore()
    store.start()
    try:
        with redis.Redis(unix_socket_path=str(store.socket), protocol=2) as client:
            return compared(client, case, 3 * case.streams, COMPARED_CALLS)
    finally:
        store.stop()


if __name__ == "__main__":
    sys.exit(main())
