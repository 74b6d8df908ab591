"""The incident, three times: without a gateway, with vLLM's own limits, and through kvgate.

    python benchmarks/incident.py [--report build/incident] [--svg docs/incident.svg] [--short]

Four mock engines of 4,096 blocks of 16 tokens in two pools, a step of 20 ms and 2,048 tokens in it, meet the scenario
`incident` of `kvgate loadtest`.  The exit status is 1 where a bound below does not hold.  `--short` takes a fifth of
the time and proves that it runs, not that the bounds hold.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage import KVGATE, Bound, Fleet, Pool, all_hold, fleet, gateway, kept_up, load

POOLS = (Pool("short", 2, max_prompt_tokens=2048), Pool("long", 2))
ENGINE = (
    *("--model", "demo", "--blocks", "4096", "--block-size", "16", "--max-model-len", "65536"),
    *(
        "--max-num-batched-tokens",
        "2048",
        "--step-base-ms",
        "20",
        "--step-prefill-us",
        "0",
        "--step-running-us",
        "0",
    ),
)
OWN_LIMITS = ("--watermark", "0.1", "--max-num-queued-reqs", "40")
"""vLLM's: a tenth of the blocks stays free for what runs, and about ten calls wait behind thirty that run."""
KEYS = ("ada", "bob", "cyd", "dan")
SETTINGS: dict[str, Any] = {
    "queue": {"depth_max": 10, "seconds_max": 2.5},  # below the clients' 3 s: they hear when to come back
    "fleet": {"safe_fraction": 1.0, "lanes": {"short": ["short", "long"], "long": ["long"]}},
}

Report = dict[str, Any]


def run_idle(folder: Path, options: list[str]) -> Report:
    with fleet(POOLS, *ENGINE) as engines:
        return load("idle", folder / "idle", "an idle engine", *direct(engines), *options)


def run_direct(folder: Path, label: str, engine_options: tuple[str, ...], options: list[str]) -> Report:
    with fleet(POOLS, *ENGINE, *engine_options) as engines:
        return load("incident", folder / label, label, *direct(engines), *options)


def run_gated(folder: Path, scenario: str, label: str, options: list[str]) -> Report:
    with fleet(POOLS, *ENGINE) as engines, gateway(engines, KEYS, SETTINGS) as gate:
        watched = [option for url in engines.all_urls for option in ("--engine", url)]
        return load(scenario, folder / label, label, *watched, *options, gate=gate)


def direct(engines: Fleet) -> list[str]:
    return [option for target in engines.targets() for option in ("--target", target)]


def bounds(
    idle: Report, bare: Report, limits: Report, gated: Report, surges: list[Report]
) -> Iterator[Bound]:
    idle_ms = idle["figures"]["gap_ms"]["p99"]
    bare_ms, gated_ms = (run["figures"]["gap_corrected_ms"]["p99"] for run in (bare, gated))
    for run in (idle, bare, limits, gated, *surges):
        yield kept_up(run)
    preemptions = bare["figures"]["engines"]["preemptions"]
    yield Bound("no gateway: preemptions over 100", f"{preemptions:.0f}", preemptions > 100)
    ratio = bare_ms / idle_ms
    yield Bound("no gateway: inter-token p99 over 10 times the idle one", f"{ratio:.1f}", ratio > 10)
    preemptions = gated["figures"]["engines"]["preemptions"]
    yield Bound("kvgate: preemptions 0", f"{preemptions:.0f}", preemptions == 0)
    leaked = sum(map(abs, gated["figures"]["kvgate"]["leaked"].values()))
    yield Bound("kvgate: leaked 0", f"{leaked:.0f}", leaked == 0)
    ratio = gated_ms / idle_ms
    yield Bound("kvgate: inter-token p99 at most 1.2 of the idle one", f"{ratio:.2f}", ratio <= 1.2)
    yield from gateway_bounds(gated, surges)
    best, ours = (
        max(run["figures"]["calls"]["in_time"] for run in some) for some in ((bare, limits), (gated,))
    )
    late = [run["figures"]["calls"]["in_time_from_arrival"] for run in (bare, limits, gated)]
    text = f"{ours} (first token from the first attempt on: {late[2]}; the others {late[0]} and {late[1]})"
    yield Bound(f"kvgate: answers in time at least {best}", text, ours >= best)


def gateway_bounds(gated: Report, surges: list[Report]) -> Iterator[Bound]:
    for pool, share in gated["figures"]["kvgate"]["reserved_share_while_queued"].items():
        what = f"kvgate: reserved/limit while queued at least 0.85, {pool}"
        yield Bound(what, f"{share['min']:.3f}", share["min"] >= 0.85)
    for name, key in gated["figures"]["keys"].items():
        text = f"{key['answered']} of {key['offered']}"
        yield Bound(f"kvgate: key {name} finishes work", text, key["answered"] > 0)
    for run in surges:
        for reason, found in run["figures"]["kvgate"]["refusal_ms"].items():
            p99_ms = found["p99_at_most"] or float("inf")
            text = f"{found['count']:.0f}, p99 <= {p99_ms:g} ms"
            yield Bound(f"{run['label']}: refusal p99 at most 5 ms, {reason}", text, p99_ms <= 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=Path("build/incident"), help="default build/incident")
    parser.add_argument("--svg", type=Path, help="also draw the picture there")
    parser.add_argument("--short", action="store_true", help="a fifth of the time")
    parsed = parser.parse_args()
    options = ["--seconds-scale", "0.2"] if parsed.short else []
    folder: Path = parsed.report
    folder.mkdir(parents=True, exist_ok=True)
    idle = run_idle(folder, options)
    runs = [
        run_direct(folder, "no gateway", (), options),
        run_direct(folder, "vLLM's own limits", OWN_LIMITS, options),
        run_gated(folder, "incident", "kvgate", options),
    ]
    surges = [run_gated(folder, name, name, options) for name in ("surge", "surge-large")]
    files = [str(folder / run["label"] / "report.json") for run in runs]
    picture = ["--picture", str(parsed.svg)] if parsed.svg else []
    subprocess.run([*KVGATE, "loadtest", "--compare", *files, "--report", str(folder), *picture], check=True)
    return 0 if all_hold(bounds(idle, *runs, surges)) or parsed.short else 1


if __name__ == "__main__":
    sys.exit(main())
