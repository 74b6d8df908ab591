"""Lines over time as SVG: pure, without scripts, readable in light and dark."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

Document = Mapping[str, Any]

STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--ink)}text.t{font-weight:600;font-size:13px}"
    "text.n{fill:var(--soft)}.g{stroke:var(--grid)}.l{fill:none;stroke-width:1.8;stroke-linejoin:round}"
    ".second{stroke-dasharray:5 3;stroke-width:1.4}.third{stroke-dasharray:1 3;stroke-width:1.4}"
    + "".join(f".r{n}{{stroke:var(--r{n})}}text.r{n}{{stroke:none;fill:var(--r{n})}}" for n in range(6))
)
LIGHT = "--ink:#1c2228;--soft:#66707a;--grid:#e3e7ea;--page:#fff;--good:#1b6e46;--bad:#b3261e;" + (
    "--r0:#0b6bcb;--r1:#c2410c;--r2:#15803d;--r3:#7e22ce;--r4:#a16207;--r5:#0f766e"
)
DARK = "--ink:#e4e8eb;--soft:#98a2ab;--grid:#2d343a;--page:#14181b;--good:#6fcf97;--bad:#ff8a80;" + (
    "--r0:#6cb2ff;--r1:#ff9e64;--r2:#6fd08c;--r3:#cfa3ff;--r4:#e3c35a;--r5:#5fd3c4"
)
"""Contrast of at least 4.5 to 1 against each page."""

KINDS = ("", "second", "third")
_CHAR_WIDTH = 6.6
_LABEL_HEIGHT = 13.0
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Line:
    """`values` at `seconds`; None is a hole.  `kind` 0 is solid, 1 dashed, 2 dotted."""

    run: int
    label: str
    seconds: Sequence[float]
    values: Sequence[float | None]
    kind: int = 0

    def points(self) -> Iterator[tuple[float, float | None]]:
        return zip(self.seconds, self.values, strict=True)

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    """With the unit."""
    lines: tuple[Line, ...]
    log: bool = False
    kinds: str = ""
    """What solid, dashed and dotted lines are, where there is no room for it beside them."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a plot is drawn: `left`, `right`, `top`, `bottom` are margins."""

    width: int
    height: int
    left: int = 46
    right: int = 150
    top: int = 26
    bottom: int = 22

    @property
    def labels_outside(self) -> bool:
        """Beside the ends of their lines; else in a row under the title."""
        return self.right > 100


WIDE = Box(1_120, 190)
NARROW = Box(360, 200, right=16, top=54)


def plots(documents: Sequence[Document]) -> list[Plot]:
    """Everything that the page shows over time; plots without a value are left out."""
    wanted = [
        Plot("Inter-token p99, corrected for stalls (ms)",
             _per_second(documents, "gap_corrected_p99_ms"), log=True),
        Plot("Inter-token p99, all gaps pooled (ms)", _per_second(documents, "gap_p99_ms"), log=True),
        Plot("Preemptions, cumulative", _sampled(documents, "engines", "preemptions")),
        Plot("KV blocks: used, reserved, limit", _blocks(documents), kinds="dashed: reserved, dotted: limit"),
        Plot("Streams running, and calls that wait", _running(documents),
             kinds="dashed: wait in engines, dotted: in kvgate"),
        Plot("Refusals per second", _per_second(documents, "refusals")),
        Plot("Timed out or failed attempts per second", _per_second(documents, "timed_out_or_failed")),
        Plot("Output tokens streamed per second", _per_second(documents, "tokens")),
        Plot("Completed output tokens, cumulative", _per_second(documents, "completed_tokens", total=True)),
        Plot("Calls answered in time, cumulative", _per_second(documents, "answered_in_time", total=True)),
    ]  # fmt: skip
    return [plot for plot in wanted if any(any(line.known) for line in plot.lines)]


def end_seconds(documents: Sequence[Document]) -> float:
    """Of the common time axis."""
    return max(len(document["series"]["per_second"]["tokens"]) for document in documents)


def picture(documents: Sequence[Document], titles: Sequence[str] = ()) -> str:
    """One static SVG of several runs for a document: by default gaps, preemptions, blocks, completed tokens."""
    starts = tuple(titles) or ("Inter-token p99, corr", "Preemptions", "KV blocks", "Completed output")
    chosen = [plot for plot in plots(documents) if plot.title.startswith(starts)]
    box = Box(900, 180)
    height = box.height * len(chosen)
    drawn = "".join(
        f'<g transform="translate(0 {box.height * number})">{_inside(plot, box, end_seconds(documents))}</g>'
        for number, plot in enumerate(chosen)
    )
    names = escape(" and ".join(str(document["label"]) for document in documents))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box.width} {height}" width="{box.width}" '
        f'height="{height}" role="img" aria-labelledby="t d"><title id="t">Load test: {names}</title>'
        f'<desc id="d">{escape(" ".join(describe(plot) for plot in chosen))}</desc>'
        f"<style>svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="var(--page)"/>{drawn}</svg>\n'
    )


def plot_svg(plot: Plot, box: Box, seconds: float, ident: str) -> str:
    """One plot, to be put into a page that has `STYLE`.  `ident` makes its ids unique there."""
    return (
        f'<svg viewBox="0 0 {box.width} {box.height}" role="img" aria-labelledby="{ident}t {ident}d">'
        f'<title id="{ident}t">{escape(plot.title)}</title><desc id="{ident}d">{escape(describe(plot))}</desc>'
        f"{_inside(plot, box, seconds)}</svg>"
    )


def describe(plot: Plot) -> str:
    """What the lines show, in words."""
    parts = [
        f"{line.label}: most {short(max(line.known))}, last {short(line.known[-1])}"
        for line in plot.lines
        if line.known
    ]
    return f"{plot.title}. {'; '.join(parts)}."


def short(value: float) -> str:
    """`12.3k` for 12,345."""
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def linear_ticks(top: float, count: int = 4) -> list[float]:
    """0 and round numbers up to the first that is not below `top`."""
    rough = max(top, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)] if top > 0 else [0.0, 1.0]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around both."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


# -- lines out of documents -------------------------------------------------------------------------------------------


def _per_second(documents: Sequence[Document], name: str, *, total: bool = False) -> tuple[Line, ...]:
    lines = []
    for run, document in enumerate(documents):
        values = document["series"]["per_second"][name]
        values = list(accumulate(values)) if total else values
        lines.append(
            Line(run, str(document["label"]), [second + 0.5 for second in range(len(values))], values)
        )
    return tuple(lines)


def _sampled(
    documents: Sequence[Document], place: str, name: str, what: str = "", kind: int = 0
) -> tuple[Line, ...]:
    return tuple(
        Line(run, f"{document['label']}{what}", series["at_seconds"], series[name], kind)
        for run, document in enumerate(documents)
        if (series := document["series"][place])["at_seconds"]
    )


def _blocks(documents: Sequence[Document]) -> tuple[Line, ...]:
    used = _sampled(documents, "engines", "blocks_used", ", used")
    reserved = _sampled(documents, "kvgate", "reserved", ", reserved", 1)
    return used + reserved + _sampled(documents, "kvgate", "limit", ", limit", 2)


def _running(documents: Sequence[Document]) -> tuple[Line, ...]:
    running = tuple(
        Line(line.run, f"{line.label}, running", line.seconds, line.values)
        for line in _per_second(documents, "running")
    )
    waiting = _sampled(documents, "engines", "waiting", ", waiting in engines", 1)
    return running + waiting + _sampled(documents, "kvgate", "queue", ", queued in kvgate", 2)


# -- drawing ----------------------------------------------------------------------------------------------------------


def _inside(plot: Plot, box: Box, seconds: float) -> str:
    known = [value for line in plot.lines for value in line.known]
    positive = [value for value in known if value > 0]
    ticks = log_ticks(min(positive), max(positive)) if plot.log else linear_ticks(max(known))
    frame = _Frame(box, seconds, ticks, plot.log)
    return "".join(
        [
            f'<text class="t" x="{box.left}" y="15">{escape(plot.title)}</text>',
            *frame.axes(),
            *(frame.path(line) for line in plot.lines),
            *frame.labels(plot),
        ]
    )


class _Frame:
    """Turns seconds and values into places."""

    def __init__(self, box: Box, seconds: float, ticks: Sequence[float], log: bool) -> None:
        self._box = box
        self._seconds = seconds
        self._ticks = ticks
        self._log = log
        self._inner_width = box.width - box.left - box.right
        self._inner_height = box.height - box.top - box.bottom

    def x(self, second: float) -> float:
        return self._box.left + self._inner_width * min(max(second / self._seconds, 0.0), 1.0)

    def y(self, value: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        if self._log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self._box.top + self._inner_height * (1 - (value - low) / (high - low))

    def axes(self) -> Iterator[str]:
        box, base = self._box, self._box.height - self._box.bottom
        for tick in self._ticks:
            y = self.y(tick)
            yield f'<path class="g" d="M{box.left} {y:.1f}h{self._inner_width}"/>'
            yield f'<text class="n" x="{box.left - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        for second in linear_ticks(self._seconds, max(2, self._inner_width // 120)):
            if second <= self._seconds:
                x = self.x(second)
                anchor = "end" if x > box.width - 20 else "middle"
                yield f'<text class="n" x="{x:.1f}" y="{base + 16}" text-anchor="{anchor}">{second:g} s</text>'

    def path(self, line: Line) -> str:
        steps, pen_up = [], True
        for second, value in line.points():
            if value is None or second < 0:
                pen_up = True
                continue
            steps.append(f"{'M' if pen_up else 'L'}{self.x(second):.1f} {self.y(value):.1f}")
            if pen_up:
                steps.append("h.1")  # a lone point shows too
            pen_up = False
        return f'<path class="l r{line.run} {KINDS[line.kind]}" d="{"".join(steps)}"/>'

    def labels(self, plot: Plot) -> Iterator[str]:
        lines = [line for line in plot.lines if line.known]
        if self._box.labels_outside:
            yield from self._beside(lines)
            return
        yield from self._above(lines)
        if any(line.kind for line in lines):
            yield f'<text class="n" x="{self._box.left}" y="46">{escape(plot.kinds)}</text>'

    def _beside(self, lines: Sequence[Line]) -> Iterator[str]:
        """At the height of each line's end, moved down where two would touch, then up from the frame's end."""
        placed = sorted((self.y(line.known[-1]) + 4, number) for number, line in enumerate(lines))
        bottom = self._box.height - self._box.bottom + 4 - _LABEL_HEIGHT * (len(placed) - 1)
        at = 0.0
        x = self._box.width - self._box.right + 8
        room = int((self._box.right - 8) / _CHAR_WIDTH)
        for order, (wanted, number) in enumerate(placed):
            at = min(max(wanted, at + _LABEL_HEIGHT if order else wanted), bottom + _LABEL_HEIGHT * order)
            line = lines[number]
            yield f'<text class="r{line.run}" x="{x}" y="{at:.1f}">{escape(cut(line.label, room))}</text>'

    def _above(self, lines: Sequence[Line]) -> Iterator[str]:
        """One row: the names of the runs, each in its colour."""
        x, seen = float(self._box.left), set()
        for line in lines:
            name = line.label.partition(", ")[0]
            if line.run not in seen and x < self._box.width - 40:
                yield f'<text class="r{line.run}" x="{x:.0f}" y="31">{escape(cut(name, 18))}</text>'
                x += _CHAR_WIDTH * min(len(name), 18) + 14
            seen.add(line.run)


def cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"
