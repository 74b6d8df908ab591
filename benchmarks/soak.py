"""The same minute again and again: what a gateway and its store keep of it has to stay flat.

    python benchmarks/soak.py [--minutes 30] [--report build/soak]

Two mock engines, a real Valkey and one gateway meet `soak.yaml` once a minute; after each, when nothing runs, memory,
descriptors and the store's keys are read.  The last third of the rounds is compared with the first third, without the
first round, which warms up.  The exit status is 1 where a bound below does not hold.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis
from stage import Bound, Gateway, Pool, all_hold, fleet, gateway, load

from gateway.ledger.embedded import EmbeddedStore

POOLS = (Pool("only", 2),)
ENGINE = (
    *("--model", "demo", "--blocks", "1024", "--block-size", "16", "--max-model-len", "8192"),
    *("--step-base-ms", "20", "--step-prefill-us", "0", "--step-running-us", "0"),
)
KEYS = ("ada", "bob")
QUEUE = {"depth_max": 20, "seconds_max": 4}
SCENARIO = Path(__file__).with_name("soak.yaml")
QUIET_SECONDS = 3.0
"""Kept connections to engines are closed after 4 s, the load test's own drain included."""
ROUNDS_MIN = 4


@dataclass(frozen=True)
class Round:
    """What was there after one minute."""

    resident_mb: float
    descriptors: int
    store_keys: int
    store_mb: float
    gap_p99_ms: float
    leaked: float
    answered: int
    refused: int


def look(gate: Gateway, store: "redis.Redis", report: dict[str, Any]) -> Round:
    figures = report["figures"]
    process = Path("/proc", str(gate.pid))
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Round(
        resident_mb=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(list((process / "fd").iterdir())),
        store_keys=int(store.dbsize()),
        store_mb=store.info("memory")["used_memory"] / 2**20,
        gap_p99_ms=figures["gap_corrected_ms"]["p99"],
        leaked=sum(map(abs, figures["kvgate"]["leaked"].values())),
        answered=figures["calls"]["answered"],
        refused=sum(r["count"] for r in figures["kvgate"]["refusal_ms"].values()),
    )


def rounds(minutes: float, folder: Path) -> Iterator[Round]:
    store = EmbeddedStore()
    store.start()
    settings = {"queue": QUEUE, "store": {"url": store.url}}
    try:
        with fleet(POOLS, *ENGINE) as engines, gateway(engines, KEYS, settings) as gate:
            watched = [option for url in engines.all_urls for option in ("--engine", url)]
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until:
                report = load(str(SCENARIO), folder, "soak", *watched, gate=gate)
                time.sleep(QUIET_SECONDS)
                with redis.Redis(unix_socket_path=str(store.socket)) as client:
                    yield look(gate, client, report)
    finally:
        store.stop()


def bounds(found: Sequence[Round]) -> Iterator[Bound]:
    third = max(1, (len(found) - 1) // 3)
    early, late = found[1 : 1 + third], found[-third:]

    def both(value: Callable[[Round], float]) -> tuple[float, float]:
        return statistics.median(map(value, early)), statistics.median(map(value, late))

    for what, value, factor, slack in (
        ("memory, MB", lambda r: r.resident_mb, 1.05, 2.0),
        ("file descriptors", lambda r: r.descriptors, 1.0, 2.0),
        ("the store's keys", lambda r: r.store_keys, 1.0, 0.0),
        ("the store's memory, MB", lambda r: r.store_mb, 1.05, 0.5),
        ("inter-token p99, ms", lambda r: r.gap_p99_ms, 1.15, 0.0),
    ):
        before, after = both(value)
        yield Bound(f"{what} stays flat", f"{before:.1f} -> {after:.1f}", after <= before * factor + slack)
    leaked = sum(r.leaked for r in found)
    yield Bound("leaked 0 after every minute", f"{leaked:.0f}", leaked == 0)
    worked = all(r.answered and r.refused for r in found)
    yield Bound(
        "every minute answered and refused calls", f"{sum(r.answered for r in found)} answered", worked
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="default 30")
    parser.add_argument("--report", type=Path, default=Path("build/soak"), help="default build/soak")
    options = parser.parse_args()
    options.report.mkdir(parents=True, exist_ok=True)
    found: list[Round] = []
    for one in rounds(options.minutes, options.report):
        found.append(one)
        print(f"{len(found):3d}  " + "  ".join(f"{k} {v:g}" for k, v in asdict(one).items()), flush=True)
    (options.report / "rounds.json").write_text(json.dumps([asdict(one) for one in found], indent=1))
    if len(found) < ROUNDS_MIN:
        raise SystemExit(f"{len(found)} rounds show nothing, {ROUNDS_MIN} are needed: use more --minutes")
    return 0 if all_hold(bounds(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
