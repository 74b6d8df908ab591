"""`docs/utilisation.md` and the tables of `docs/prefixes.md`, made of `docs/utilisation.json`; its picture is played
when it is drawn."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.experiment import traces
from benchmarks.experiment.bounds import Bound, bounds, good_per_second
from benchmarks.experiment.cells import (
    CASES,
    GATES,
    SEED,
    SESSION_GATES,
    SESSION_LOADS,
    Case,
    Figures,
    Results,
    best_of,
    part_of_best,
    play_sessions,
    world_of,
)
from benchmarks.experiment.traces import Call
from benchmarks.experiment.world import World
from gateway.loadtest.plots import Box, Line, Mark, Plot, stacked

DOCUMENTS = ("utilisation.md", "prefixes.md")
OPEN_GATES = ("ungated", "watermark .05", "guaranteed", "elastic")
SHARED_GATES = (
    "guaranteed",
    "guaranteed + prefix",
    "guaranteed + soft hold",
    "elastic",
    "elastic + prefix",
    "elastic + soft hold",
)
DRAWN = Case("generous", 16_000, 450, 0)
DRAWN_SECONDS, DRAWN_SHIFT, DRAWN_CLIENTS = 480, 240, 1_300
DRAWN_SESSIONS = ("ungated", "elastic + prefix", "elastic + warm first", "elastic + soft hold")
SESSIONS_SECONDS, SESSIONS_LOAD = 900, 1.5
_PLACE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def write_document(docs: Path, results: Results) -> None:
    """Into the places that the document has for them; what was not played has no row."""
    (docs / "utilisation.json").write_text(json.dumps(results, indent=0) + "\n")
    for name in DOCUMENTS:
        document = docs / name
        document.write_text(filled(document.read_text(), results))
    (docs / "utilisation.svg").write_text(picture())
    (docs / "sessions.svg").write_text(sessions_picture(results))


def filled(text: str, results: Results) -> str:
    made = tables(results)
    return _PLACE.sub(lambda place: f"<!-- {place[1]} -->\n{made[place[1]]}\n<!-- end -->", text)


def tables(results: Results) -> dict[str, str]:
    return {
        "throughput": _table(("", "best ungated", *GATES), _throughput(results)),
        "waste": _table(("", *GATES), _waste(results)),
        "open": _table(("", *OPEN_GATES), _open(results)),
        "bursts": _table(("", *OPEN_GATES), _bursts(results)),
        "shift": _table(("", *OPEN_GATES), _shift(results)),
        "misread": _table(("", "preemptions in 10,000", "throughput", "calls"), _misread(results)),
        "sharing": _table(("", "best ungated", *SHARED_GATES), _sharing(results)),
        "sessions": _table(
            ("", *(f"load {load}" for load in SESSION_LOADS)),
            _sessions(results),
        ),
        "bounds": _table(("", "bound", "found", "calls"), map(_bound_row, all_bounds(results))),
    }


def all_bounds(results: Results) -> list[Bound]:
    return [bound for case in CASES for bound in bounds(results, case)]


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    if len(lines) == 2:
        return "*Not played yet.*"
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def _case(case: Case) -> str:
    return f"{case.trace}, {case.blocks:,}"


def _asked(results: Results, case: Case, kind: str) -> str:
    """From how many calls such figures are; those of the elastic mode may be of more."""
    prefix = f"{case.name} {kind} "
    asked = {n.removeprefix(prefix): f["asked"] for n, f in results.items() if n.startswith(prefix)}
    elastic = asked.pop("elastic", 0)
    others = max(asked.values(), default=elastic)
    return f": {others:,} calls" + (f", elastic {elastic:,}" if elastic not in (0, others) else "")


def _of_gates(
    results: Results, kind: str, gates: Sequence[str], cell: Callable[[Case, Figures], str]
) -> Iterator[tuple[Case, list[str]]]:
    """By case a cell for each gate; of cases for which any was played."""
    for case in CASES:
        found = [results.get(f"{case.name} {kind} {gate}") for gate in gates]
        if any(found):
            yield case, ["" if figures is None else cell(case, figures) for figures in found]


def _throughput(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        part = part_of_best(results, case, figures)
        return f"{part:.2f} / {_per_10k(figures)} / {figures['block_use']:.2f}"

    for case, cells in _of_gates(results, "closed", GATES, cell):
        best = best_of(results, case)
        yield [
            _case(case) + _asked(results, case, "closed"),
            f"{best['tokens_per_second']:,.0f} ({best['clients']}) / {_per_10k(best)}",
            *cells,
        ]


def _sharing(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        part = part_of_best(results, case, figures)
        return f"{part:.2f} / {_per_10k(figures)} / {figures['block_use']:.2f}"

    for case, cells in _of_gates(results, "closed", SHARED_GATES, cell):
        if case.sharing:
            best = best_of(results, case)
            yield [_case(case), f"{best['tokens_per_second']:,.0f} ({best['clients']})", *cells]


def _sessions(results: Results) -> Iterator[list[str]]:
    """A row for each gate: of sessions there is one case."""
    for case in CASES:
        for gate in SESSION_GATES if case.sessions else ():
            found = [results.get(f"{case.name} sessions {load} {gate}") for load in SESSION_LOADS]
            if any(found):
                yield [gate, *(_session_cell(results, case, figures) if figures else "" for figures in found)]


def _session_cell(results: Results, case: Case, figures: Figures) -> str:
    best = best_of(results, case)
    part = figures["tokens_per_second"] / best["tokens_per_second"]
    good = good_per_second(figures) / good_per_second(best)
    broken = 100 * figures["broken"] / max(figures["later"], 1)
    ttft = f"{figures['ttft_p50']:.1f}, {figures['ttft_p99']:.1f}"
    return f"{part:.2f} / {good:.2f} / {broken:.1f} % / {ttft} / {_per_10k(figures)}"


def _waste(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        return f"{figures['recomputed']:.3f} / {figures['gap_p99_ms']:.0f}"

    for case, cells in _of_gates(results, "closed", GATES, cell):
        yield [_case(case) + _asked(results, case, "closed"), *cells]


def _open(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        good = figures["good"] / figures["asked"]
        return f"{good:.2f} / {_per_10k(figures)} / {figures['ttft_p50']:.1f}, {figures['ttft_p99']:.1f}"

    for case, cells in _of_gates(results, "open", OPEN_GATES, cell):
        yield [_case(case) + _asked(results, case, "open"), *cells]


def _bursts(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        return f"{figures['good'] / figures['asked']:.2f} / {_per_10k(figures)}"

    for case, cells in _of_gates(results, "bursts", OPEN_GATES, cell):
        yield [f"{_case(case)}, {case.burst} at once" + _asked(results, case, "bursts"), *cells]


def _shift(results: Results) -> Iterator[list[str]]:
    def cell(case: Case, figures: Figures) -> str:
        thousands, shift = figures["preempted_at"], figures["asked"] // 2_000
        before, after = thousands[:shift], thousands[shift:]
        last = max((number for number, count in enumerate(after, 1) if count), default=0)
        if not sum(after):
            return f"{sum(before)} + 0"
        return f"{sum(before)} + {sum(after):,}, the last in thousand {last} of {len(after)}"

    for case, cells in _of_gates(results, "shift", OPEN_GATES, cell):
        yield [_case(case) + _asked(results, case, "shift"), *cells]


def _misread(results: Results) -> Iterator[list[str]]:
    for case in CASES:
        prefix = f"{case.name} misread "
        exact = results.get(f"{case.name} closed elastic")
        found = {"exact": exact} if exact and case.misread else {}
        found |= {
            name.removeprefix(prefix): figures for name, figures in results.items() if name.startswith(prefix)
        }
        for name, figures in found.items():
            part = part_of_best(results, case, figures)
            yield [f"{_case(case)}: {name}", _per_10k(figures), f"{part:.2f}", f"{figures['calls']:,}"]


def _bound_row(bound: Bound) -> list[str]:
    found = f"{bound.found:.3f}".rstrip("0").rstrip(".")
    return [bound.what, bound.limit, found if bound.holds else f"**{found}**", f"{bound.calls:,}"]


def _per_10k(figures: Figures) -> str:
    found = 10_000 * figures["preemptions"] / max(figures["calls"], 1)
    return f"{found:,.0f}" if found >= 10 or found == 0 else f"{found:.1f}"


# -- the picture ------------------------------------------------------------------------------------------------------


def picture() -> str:
    """Blocks, preemptions and tokens from an empty fleet on; in the middle outputs become three times as long."""
    runs = [(gate, _drawn(gate)) for gate in OPEN_GATES]
    plots = (
        _plot("KV blocks held", runs, 1),
        _plot("Preemptions, cumulative", runs, 2),
        _plot("Output tokens, cumulative", runs, 3),
    )
    marks = (Mark(0, "nothing learned"), Mark(DRAWN_SHIFT, "outputs become three times as long"))
    return stacked(plots, Box(900, 180), DRAWN_SECONDS, "Four ways of admitting calls, simulated", marks)


def sessions_picture(results: Results) -> str:
    """Of agents, from an empty replica on: blocks, and tokens."""
    case = next(case for case in CASES if case.sessions)
    best, runs = best_of(results, case), list[tuple[str, World]]()
    for gate in DRAWN_SESSIONS:
        world = world_of(case, gate)
        turns = SESSIONS_LOAD * best["calls"] / best["seconds"]
        play_sessions(world, turns, gate != "ungated", 0.0, SESSIONS_SECONDS)
        runs.append((gate, world))
    plots = (
        _plot("KV blocks held", runs, 1, SESSIONS_SECONDS),
        _plot("Output tokens, cumulative", runs, 3, SESSIONS_SECONDS),
    )
    title = "Agents, half as many again as fit, simulated"
    return stacked(plots, Box(900, 180), SESSIONS_SECONDS, title, ())


def _plot(title: str, runs: Sequence[tuple[str, World]], column: int, until: int = DRAWN_SECONDS) -> Plot:
    lines = []
    for number, (gate, world) in enumerate(runs):
        rows = [row for row in world.seconds if row[0] <= until][::4]
        lines.append(Line(number, gate, [row[0] for row in rows], [row[column] for row in rows]))
    return Plot(title, tuple(lines))


def _drawn(gate: str) -> World:
    world = world_of(DRAWN, gate)

    def source() -> Iterator[Call]:
        short = traces.calls(traces.generous, SEED)
        long = traces.calls(traces.longer(traces.generous), SEED)
        for one, other in zip(short, long, strict=True):
            if world.now > DRAWN_SECONDS:
                return
            yield other if world.now >= DRAWN_SHIFT else one

    world.closed_loop(source(), DRAWN_CLIENTS, 1 << 62)
    return world
