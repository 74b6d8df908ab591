"""kvgate beside other proxies on one core, by the yardstick: figures, ratios, and whether the bars hold.

    python benchmarks/bench.py [--tests a,b,d,D,g,e,f,s,t] [--peers nginx,envoy,vllm-router,naive] [--runs 1]
                               [--results FILE ...] [--write-doc]

What is measured has core 0, everything else, kvgate's store as well, has core 1.  All tests with all peers take about
15 minutes a run.  `build/bench/results.json` has the figures; `--results` takes the runs of such files instead of
measuring, `--write-doc` puts them into `docs/performance.json` and its tables into `docs/performance.md`.  The exit
status is 1 where a bar does not hold.  `sh benchmarks/peers.sh` installs peers.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from yardstick import bars, bodies, machine, measures, peers
from yardstick.bars import Results
from yardstick.measures import Figures, Yard
from yardstick.peers import Peer, Standing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/bench"
STORED, DOCUMENT = ROOT / "docs/performance.json", ROOT / "docs/performance.md"
REPLICAS = 4
"""Of the test of the store."""
OPEN_FILES = 12_000
"""A proxy has two connections for each of 4,800 streams."""

Measure = Callable[[Yard, Standing], Figures]
EVERYWHERE: Sequence[tuple[str, frozenset[str], Measure]] = (
    ("a", frozenset({"nginx", "envoy", "vllm-router", "naive", "kvgate"}), measures.small_calls),
    ("a", frozenset({"direct"}), measures.calm_calls),
    ("t", frozenset({"direct", "nginx", "envoy", "vllm-router", "naive", "kvgate"}), measures.first_token),
    ("b", frozenset({"nginx", "envoy", "vllm-router", "kvgate"}), measures.known_prompts),
    ("b", frozenset({"nginx", "kvgate"}), measures.new_prompts),
    (
        "d",
        frozenset({"direct", "nginx", "envoy", "vllm-router", "kvgate"}),
        lambda yard, at: measures.many_streams(yard, at, 2400, "d"),
    ),
    (
        "D",
        frozenset({"nginx", "envoy", "vllm-router", "kvgate"}),
        lambda yard, at: measures.many_streams(yard, at, 4800, "D"),
    ),
    ("g", frozenset({"direct", "nginx", "vllm-router"}), measures.growing_streams),
    ("f", frozenset({"nginx", "envoy", "vllm-router", "naive", "kvgate"}), measures.leavers),
)
"""Test, the peers that it tells something about, and how it is measured."""


def build(folder: Path) -> None:
    """The yardstick's programs and bodies."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise SystemExit("make bench needs a C compiler: install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    sources = Path(peers.__file__).parent
    subprocess.run(["make", "-s", "-C", str(sources), f"BUILD={folder}"], check=True)
    bodies.write(folder)


def figures_of(peer: Peer, tests: Sequence[str], yard: Yard) -> Figures:
    figures: Figures = {}
    yard.foreign.clear()
    wanted = [measure for test, of, measure in EVERYWHERE if test in tests and peer.name in of]
    if wanted:
        with peers.standing(peer, yard.folder) as at:
            measures.warm_up(yard, at)
            for measure in wanted:
                figures |= told(peer, measure(yard, at))
    if "e" in tests and (peer.refusing or peer.name == "kvgate"):
        rounds = measures.INTERLEAVED if peer.name == "kvgate" else 1
        with peers.standing(peer, yard.folder, refusing=True) as at:
            measures.warm_up(yard, at)
            figures |= told(peer, measures.refusals(yard, at, rounds))
    if "g" in tests and peer.name == "kvgate":
        with peers.standing(peer, yard.folder, elastic=True) as at:
            measures.warm_up(yard, at)
            figures |= told(peer, measures.growing_streams(yard, at))
    if "s" in tests and peer.name == "kvgate":
        with peers.standing(peer, yard.folder, replicas=REPLICAS) as at:
            measures.warm_up(yard, at)
            figures |= told(peer, measures.store_cost(yard, at))
    if yard.foreign:
        figures["foreign_share"] = max(yard.foreign)
    return figures


def told(peer: Peer, figures: Figures) -> Figures:
    line = "  ".join(f"{name} {bars.shown(value)}" for name, value in figures.items())
    print(f"{time.strftime('%H:%M:%S')}  {peer.name:12s} {line}", flush=True)
    return figures


def one_run(chosen: Mapping[str, Peer], tests: Sequence[str], yard: Yard) -> dict[str, Figures]:
    run: dict[str, Figures] = {}
    for name, peer in chosen.items():
        try:
            run[name] = figures_of(peer, tests, yard)
        except peers.PeerError as error:
            if name == "kvgate":
                raise SystemExit(f"kvgate: {error}") from None
            print(f"{name} is left out: {error}", flush=True)
    if "b" in tests:
        run["tiktoken"] = measures.tiktoken_alone()
    return {name: figures for name, figures in run.items() if figures}


def measured(tests: Sequence[str], wanted: Sequence[str], runs: int, yard: Yard) -> Iterator[Results]:
    """What is known after each run."""
    machine.stay_on_the_other_core()
    machine.allow_open_files(OPEN_FILES)
    build(yard.folder)
    found, missing = peers.found(yard.folder)
    for line in missing:
        print(line, flush=True)
    chosen = {name: peer for name, peer in found.items() if name in ("direct", "kvgate", *wanted)}
    versions = {name: peer.version for name, peer in chosen.items()}
    done: list[dict[str, Figures]] = []
    for _ in range(runs):
        done.append(one_run(chosen, tests, yard))
        yield Results(machine.description(), versions, done)


def read(files: Sequence[Path]) -> Results:
    """The runs of several files, in their order; machine and versions are the last one's."""
    found = [json.loads(file.read_text()) for file in files]
    return Results(found[-1]["machine"], found[-1]["versions"], [run for one in found for run in one["runs"]])


def write(file: Path, results: Results) -> None:
    file.write_text(json.dumps(asdict(results), indent=1) + "\n")


def write_document(results: Results) -> None:
    """Raises SystemExit where a bar was not measured: the document is about all of them."""
    unknown = {
        verdict.bar.what
        for run in results.runs
        for verdict in bars.verdicts(run)
        if verdict.found is None or verdict.must is None
    }
    if unknown:
        raise SystemExit(f"not written, some bars were not measured: {', '.join(sorted(unknown))}")
    document = bars.with_tables(DOCUMENT.read_text(), results)
    write(STORED, results)
    DOCUMENT.write_text(document)
    print(f"written: {STORED.relative_to(ROOT)}, {DOCUMENT.relative_to(ROOT)}")


def report(results: Results) -> bool:
    """Print the tables beside the stored result; whether no bar was missed."""
    before = read([STORED]).runs if STORED.exists() else []
    print("\n" + bars.in_columns(list(bars.peer_rows(results.runs))))
    measured_rows = [row for row in bars.bar_rows(results.runs, before) if set(row[4:]) != {"-"}]
    print("\nBARS\n" + bars.in_columns(measured_rows))
    return all(verdict.holds is not False for run in results.runs for verdict in bars.verdicts(run))


def arguments() -> argparse.Namespace:
    names = [name for name in bars.PEERS if name not in ("direct", "kvgate")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tests = "; ".join(f"{name}: {what}" for name, what in bars.TESTS.items())
    parser.add_argument("--tests", default=",".join(bars.TESTS), help=tests)
    parser.add_argument("--peers", default=",".join(names), help=f"default {','.join(names)}")
    parser.add_argument("--runs", type=int, default=1, help="default 1")
    parser.add_argument(
        "--quiet-seconds", type=float, default=20, help="to wait for a quiet machine, default 20"
    )
    parser.add_argument("--tries", type=int, default=3, help="of a load while others use a core, default 3")
    parser.add_argument("--results", type=Path, nargs="+", help="files with runs, instead of measuring")
    parser.add_argument("--write-doc", action="store_true", help="write docs/performance.json and its tables")
    found = parser.parse_args()
    for option, known in (("tests", bars.TESTS), ("peers", names)):
        words = [word for word in getattr(found, option).split(",") if word]
        if strange := [word for word in words if word not in known]:
            parser.error(f"--{option}: no such thing as {', '.join(strange)}")
        setattr(found, option, words)
    return found


def main() -> int:
    options = arguments()
    if options.results:
        results = read(options.results)
    else:
        results = Results({}, {}, [])
        yard = Yard(FOLDER, options.quiet_seconds, options.tries)
        for results in measured(options.tests, options.peers, options.runs, yard):
            write(FOLDER / "results.json", results)
    holds = report(results)
    if options.write_doc:
        write_document(results)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
