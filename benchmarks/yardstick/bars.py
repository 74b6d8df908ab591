"""What the figures have to be: bars, verdicts, tables and the part of `docs/performance.md` that is made from them.

Pure: a run is a mapping from peers to their figures, as `measures.py` names them.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Run = Mapping[str, Mapping[str, float]]
Value = Callable[[Run], float | None]
"""None where what it needs was not measured."""

TESTS = {
    "a": "calls that are not streamed: 64 connections, and 200 calls a second",
    "b": "prompts of 256 KB: a known history and a short new turn, and text never sent before",
    "d": "2,400 streams of 10 tokens a second",
    "D": "4,800 streams of 10 tokens a second",
    "g": "2,400 streams of twice the length, which kvgate charges as they grow",
    "e": "refusals, with 1,200 streams running",
    "f": "100 clients leave: within a stream, before its first token, and before a whole answer",
    "s": "the store's processor time for admit, first token and settle",
    "t": "the first token of 200 streams a second",
}
PEERS = ("direct", "nginx", "envoy", "vllm-router", "naive", "kvgate")
BEGIN, END = "<!-- tables: made by `make bench` -->\n", "<!-- end of the tables -->\n"
EVENTS_SHARE_MIN = 0.995
"""Of what is offered: a stream that begins some milliseconds later has its next ones later, too."""


@dataclass(frozen=True)
class Bar:
    """A figure of kvgate and what it must and should be.  A limit that is None is not asked for."""

    test: str
    what: str
    figure: Value
    must: Value
    aim: Value
    at_least: bool = False

    def holds(self, found: float, limit: float) -> bool:
        return found >= limit if self.at_least else found <= limit


@dataclass(frozen=True)
class Verdict:
    """A bar in one run; figures are None where they could not be had."""

    bar: Bar
    found: float | None
    must: float | None
    aim: float | None

    @property
    def holds(self) -> bool | None:
        if self.found is None or self.must is None:
            return None
        return self.bar.holds(self.found, self.must)

    @property
    def reaches_aim(self) -> bool | None:
        if self.found is None or self.aim is None:
            return None
        return self.bar.holds(self.found, self.aim)


# -- figures -------------------------------------------------------------------------------------------------------


def of(peer: str, name: str) -> Value:
    return lambda run: run.get(peer, {}).get(name)


def fixed(value: float) -> Value:
    return lambda _: value


def none(_: Run) -> None:
    return None


def ratio(above: Value, below: Value) -> Value:
    def value(run: Run) -> float | None:
        top, bottom = above(run), below(run)
        return None if top is None or not bottom else top / bottom

    return value


def less(value: Value, from_it: Value) -> Value:
    def difference(run: Run) -> float | None:
        whole, part = value(run), from_it(run)
        return None if whole is None or part is None else whole - part

    return difference


def over(peer: str, name: str) -> Value:
    """kvgate's figure as a multiple of a peer's."""
    return ratio(of("kvgate", name), of(peer, name))


def added(peer: str, name: str) -> Value:
    """What a peer adds to the same without one."""
    return less(of(peer, name), of("direct", name))


def largest(*values: Value) -> Value:
    def value(run: Run) -> float | None:
        found = [each for each in (value(run) for value in values) if each is not None]
        return max(found) if len(found) == len(values) else None

    return value


def smallest(*values: Value) -> Value:
    def value(run: Run) -> float | None:
        found = [each for each in (value(run) for value in values) if each is not None]
        return min(found) if len(found) == len(values) else None

    return value


def ours(name: str) -> Value:
    return of("kvgate", name)


def streams(test: str, which: str = "") -> Sequence[Bar]:
    """Of 2,400 streams."""
    events, errors, gap, transit, cost, memory = (
        f"{test}_{name}"
        for name in ("events_share", "errors", "gap_p99_ms", "transit_p99_ms", "event_us", "stream_kb")
    )
    above_direct, nginx_above = added("kvgate", gap), added("nginx", gap)
    cost_ratio = over("vllm-router", cost)
    return (
        Bar(test, f"events that arrived{which}", ours(events), fixed(EVENTS_SHARE_MIN), none, True),
        Bar(test, f"streams with errors{which}", ours(errors), fixed(0), none),
        Bar(test, f"gap p99, ms above direct{which}", above_direct, fixed(2), nginx_above),
        Bar(test, f"transit p99, ms{which}", ours(transit), fixed(3), none),
        Bar(test, f"CPU of an event, of vllm-router's{which}", cost_ratio, fixed(1.15), fixed(1)),
        Bar(test, f"memory of a stream, KB{which}", ours(memory), fixed(60), none),
    )


WAYS = ("stream", "prefill", "whole")
BARS: Sequence[Bar] = (
    Bar("a", "calls/s, 64 connections, of naive's", over("naive", "a_calls_s"), fixed(12), none, True),
    Bar("a", "... of vllm-router's", over("vllm-router", "a_calls_s"), fixed(0.4), fixed(1), True),
    Bar(
        "a",
        "p50 added at 200 calls/s, of what nginx adds",
        ratio(added("kvgate", "a_calm_p50_ms"), added("nginx", "a_calm_p50_ms")),
        fixed(3),
        ratio(added("envoy", "a_calm_p50_ms"), added("nginx", "a_calm_p50_ms")),
    ),
    Bar(
        "b",
        "calls/s, 256 KB known, of nginx's",
        over("nginx", "b_known_calls_s"),
        fixed(0.25),
        fixed(0.5),
        True,
    ),
    Bar("b", "CPU of a call, 256 KB new, of tiktoken's", over("tiktoken", "b_new_us"), fixed(1.3), none),
    *streams("d"),
    Bar(
        "D",
        "gap p99, ms",
        ours("D_gap_p99_ms"),
        of("envoy", "D_gap_p99_ms"),
        of("vllm-router", "D_gap_p99_ms"),
    ),
    *streams("g", ", growing"),
    Bar("e", "refusal p99, small, ms", ours("e_small_p99_ms"), fixed(2), of("envoy", "e_small_p99_ms")),
    Bar("e", "refusal p99, 256 KB, ms", ours("e_large_p99_ms"), fixed(5), of("envoy", "e_large_p99_ms")),
    Bar(
        "e",
        "refused of those that had to be",
        smallest(ours("e_small_refused_share"), ours("e_large_refused_share")),
        fixed(1),
        none,
        True,
    ),
    Bar(
        "e",
        "streams' gap p99, ms more than alone",
        less(largest(ours("e_small_gap_p99_ms"), ours("e_large_gap_p99_ms")), ours("e_alone_gap_p99_ms")),
        fixed(1),
        none,
    ),
    Bar(
        "f",
        "leavers that the engine sees, the worst way",
        smallest(*(ours(f"f_{way}_seen") for way in WAYS)),
        fixed(100),
        none,
        True,
    ),
    Bar(
        "f", "p99 until it does, ms", largest(*(ours(f"f_{way}_p99_ms") for way in WAYS)), fixed(5), fixed(1)
    ),
    Bar("s", "store CPU of a call, us", ours("s_store_us"), fixed(45), fixed(31)),
    Bar(
        "t",
        "first token added, p50, ms",
        added("kvgate", "t_first_p50_ms"),
        fixed(0.5),
        added("vllm-router", "t_first_p50_ms"),
    ),
)


def verdicts(run: Run, tests: Sequence[str] = tuple(TESTS)) -> list[Verdict]:
    return [Verdict(bar, bar.figure(run), bar.must(run), bar.aim(run)) for bar in BARS if bar.test in tests]


def merged(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Medians of every figure over the runs that have it."""
    names: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for peer, figures in run.items():
            for name, value in figures.items():
                names.setdefault(peer, {}).setdefault(name, []).append(value)
    return {
        peer: {name: statistics.median(values) for name, values in figures.items()}
        for peer, figures in names.items()
    }


# -- tables --------------------------------------------------------------------------------------------------------


def shown(value: float | None) -> str:
    """Three figures that count; tenths below a thousand, where gaps differ by them."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    decimals = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def word(holds: bool | None) -> str:
    return "-" if holds is None else "ok" if holds else "NO"


def limit(bar: Bar, value: float | None) -> str:
    return "-" if value is None else f"{'>=' if bar.at_least else '<='} {shown(value)}"


def bar_rows(runs: Sequence[Run], before: Sequence[Run] = ()) -> Iterator[list[str]]:
    """A head and a row for each bar: its limits, each run, whether all hold, and what it was before.

    A limit that is another peer's figure is shown as the first run has it, and judged in each run by its own.
    """
    was = merged(before)
    runs_head = [f"run {number}" for number in range(1, len(runs) + 1)]
    yield ["test", "", "must", "aim", *runs_head, "held", "reached", *(["stored"] if before else [])]
    by_run = [verdicts(run) for run in runs]
    for row in zip(*by_run, strict=True):
        bar = row[0].bar
        held = word(_all(verdict.holds for verdict in row))
        aimed = word(_all(verdict.reaches_aim for verdict in row))
        cells = [bar.test, bar.what, limit(bar, row[0].must), limit(bar, row[0].aim)]
        stored = [shown(bar.figure(was))] if before else []
        yield [*cells, *(shown(verdict.found) for verdict in row), held, aimed, *stored]


def _all(answers: Iterator[bool | None]) -> bool | None:
    """Whether all that were measured hold; None where none was."""
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None


ROWS = {
    "a_calls_s": "a: calls/s, 64 connections",
    "a_call_us": "a: CPU of a call, us",
    "a_p99_ms": "a: p99 of 64 connections, ms",
    "a_calm_p50_ms": "a: p50 at 200 calls/s, ms",
    "a_calm_p99_ms": "a: p99 at 200 calls/s, ms",
    "t_first_p50_ms": "t: first token p50, ms",
    "t_first_p99_ms": "t: first token p99, ms",
    "b_known_calls_s": "b: calls/s, 256 KB known",
    "b_known_us": "b: CPU of a call, 256 KB known, us",
    "b_new_calls_s": "b: calls/s, 256 KB new",
    "b_new_us": "b: CPU of a call, 256 KB new, us",
    "d_events_share": "d: events that arrived",
    "d_gap_p99_ms": "d: gap p99, ms",
    "d_transit_p99_ms": "d: transit p99, ms",
    "d_event_us": "d: CPU of an event, us",
    "d_stream_kb": "d: memory of a stream, KB",
    "D_events_share": "D: events that arrived",
    "D_gap_p99_ms": "D: gap p99, ms",
    "D_event_us": "D: CPU of an event, us",
    "g_events_share": "g: events that arrived",
    "g_gap_p99_ms": "g: gap p99, ms",
    "g_transit_p99_ms": "g: transit p99, ms",
    "g_event_us": "g: CPU of an event, us",
    "g_stream_kb": "g: memory of a stream, KB",
    "e_small_p99_ms": "e: refusal p99, small, ms",
    "e_large_p99_ms": "e: refusal p99, 256 KB, ms",
    "e_events_share": "e: events of the streams that arrived",
    "e_alone_gap_p99_ms": "e: gap p99 of the streams alone, ms",
    "e_small_gap_p99_ms": "e: ... with small refusals, ms",
    "e_large_gap_p99_ms": "e: ... with refusals of 256 KB, ms",
    "f_stream_seen": "f: seen to leave within a stream",
    "f_prefill_seen": "f: ... before the first token",
    "f_whole_seen": "f: ... before a whole answer",
    "f_stream_p99_ms": "f: p99 until seen, within a stream, ms",
    "f_prefill_p99_ms": "f: ... before the first token, ms",
    "f_whole_p99_ms": "f: ... before a whole answer, ms",
    "s_store_us": "s: store CPU of a call, us",
    "foreign_share": "of a core used by others, at most",
}


def peer_rows(runs: Sequence[Run]) -> Iterator[list[str]]:
    """A head and a row for each figure: medians, and how many times kvgate's a peer's is."""
    medians = merged(runs)
    present = [peer for peer in PEERS if peer in medians]
    yield ["", *present]
    for name, title in ROWS.items():
        if any(name in medians[peer] for peer in present):
            ours_ = medians.get("kvgate", {}).get(name)
            yield [title, *(_cell(peer, name, medians[peer].get(name), ours_) for peer in present)]


def _cell(peer: str, name: str, value: float | None, ours_: float | None) -> str:
    counted = name.endswith(("_share", "_seen"))
    if value is None or not ours_ or counted or peer == "kvgate":
        return shown(value)
    return f"{shown(value)} ({value / ours_:.2f})"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """For a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def in_markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((head, "| --- " * len(rows[0]) + "|", *rest))


# -- the document --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What `results.json` and `docs/performance.json` hold."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    runs: Sequence[Run]


def tables(results: Results) -> str:
    """What stands between the markers of the document."""
    if not results.runs:
        return "Nothing is measured yet.\n"
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in results.versions.items() if value)
    parts = (
        f"{len(results.runs)} run{'s' if len(results.runs) > 1 else ''}; {machine}; {versions}.",
        "### Bars",
        in_markdown(list(bar_rows(results.runs))),
        "### Figures",
        "Medians of the runs. In brackets: how many times kvgate's figure it is.",
        in_markdown(list(peer_rows(results.runs))),
    )
    return "\n\n".join(parts) + "\n"


def with_tables(document: str, results: Results) -> str:
    """The document with the tables of these results.  Raises ValueError where a marker is missing."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the document has lost the markers of its tables")
    return f"{head}{begin}\n{tables(results)}\n{end}{tail}"
