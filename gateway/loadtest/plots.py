"""Lines over time as SVG: pure, without scripts, readable in light and dark."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from typing import Any

Document = Mapping[str, Any]

STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--ink)}text.t{font-weight:600;font-size:13px}"
    "text.n{fill:var(--soft)}.m{stroke:var(--soft);stroke-width:.8}.g{stroke:var(--grid)}.l{fill:none;stroke-width:1.8;stroke-linejoin:round}"
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
KIND_NAMES = ("solid", "dashed", "dotted")
_CHAR_WIDTH = 6.6
_TITLE_CHAR_WIDTH = 7.6
_MARK_CHAR_WIDTH = 6.2
_LABEL_HEIGHT = 13.0
_ABOVE_CHARS_MIN, _ABOVE_CHARS_MAX = 4, 18
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Line:
    """`values` at `seconds`; None is a hole.  `kind` 0 is solid, 1 dashed, 2 dotted."""

    run: int
    name: str
    """Of the run."""
    seconds: Sequence[float]
    values: Sequence[float | None]
    kind: int = 0
    what: str = ""
    """Which of several lines of its run it is."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.what}" if self.what else self.name

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
    kinds: tuple[str, ...] = ()
    """What solid, dashed and dotted lines are."""

    @property
    def key(self) -> str:
        """Of the kinds of lines that are there."""
        there = {line.kind for line in self.lines if line.known}
        named = zip(KIND_NAMES, self.kinds, strict=False)
        return ", ".join(f"{kind} {name}" for number, (kind, name) in enumerate(named) if number in there)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that is worth a vertical line."""

    second: float
    name: str


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
_LABEL_MARGIN = 8
_MARK_MARGIN = 4
_RIGHT_MIN, _RIGHT_MAX = 110, 260
"""Of a box with its labels outside."""


def fitted(box: Box, documents: Sequence[Document]) -> Box:
    """With room at the right for the names of the runs."""
    longest = max(len(str(document["label"])) for document in documents)
    right = math.ceil(longest * _CHAR_WIDTH) + _LABEL_MARGIN + 1
    return replace(box, right=min(max(right, _RIGHT_MIN), _RIGHT_MAX))


def phase_marks(documents: Sequence[Document]) -> tuple[Mark, ...]:
    """Where phases with calls begin, and where the last ends; none where runs have different phases."""
    phases = documents[0]["scenario"]["phases"]
    if not phases or any(document["scenario"]["phases"] != phases for document in documents):
        return ()
    marks, begin = [], 0.0
    for phase in phases:
        count, unit = phase["sessions"], "sessions"
        if count is None:
            count, unit = phase["calls_per_second"], "calls/s"
        if count:
            marks.append(Mark(begin, f"{count:g} {unit}"))
        begin += phase["seconds"]
    return (*marks, Mark(begin, "no new calls"))


def nameless(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """For the plots under the first."""
    return tuple(replace(mark, name="") for mark in marks)


def plots(documents: Sequence[Document]) -> list[Plot]:
    """Everything that the page shows over time; plots without a value are left out."""
    wanted = [
        Plot("Inter-token p99, corrected for stalls (ms)",
             _per_second(documents, "gap_corrected_p99_ms"), log=True),
        Plot("Inter-token p99, all gaps pooled (ms)", _per_second(documents, "gap_p99_ms"), log=True),
        Plot("Preemptions, cumulative", _sampled(documents, "engines", "preemptions")),
        Plot("KV blocks: used, reserved, limit", _blocks(documents), kinds=("used", "reserved", "limit")),
        Plot("Streams running, and calls that wait", _running(documents),
             kinds=("run", "wait in engines", "in kvgate")),
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
    names = " and ".join(str(document["label"]) for document in documents)
    box = fitted(Box(900, 180), documents)
    return stacked(chosen, box, end_seconds(documents), f"Load test: {names}", phase_marks(documents))


def stacked(chosen: Sequence[Plot], box: Box, seconds: float, title: str, marks: Sequence[Mark] = ()) -> str:
    """Plots over one time axis, one under the other, as a file of its own."""
    height = box.height * len(chosen)
    drawn = ""
    for number, plot in enumerate(chosen):
        drawn += f'<g transform="translate(0 {box.height * number})">{_inside(plot, box, seconds, marks)}</g>'
        marks = nameless(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box.width} {height}" width="{box.width}" '
        f'height="{height}" role="img" aria-labelledby="t d"><title id="t">{escape(title)}</title>'
        f'<desc id="d">{escape(" ".join(describe(plot) for plot in chosen))}</desc>'
        f"<style>svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="var(--page)"/>{drawn}</svg>\n'
    )


def plot_svg(plot: Plot, box: Box, seconds: float, ident: str, marks: Sequence[Mark] = ()) -> str:
    """One plot, to be put into a page that has `STYLE`.  `ident` makes its ids unique there."""
    return (
        f'<svg viewBox="0 0 {box.width} {box.height}" role="img" aria-labelledby="{ident}t {ident}d">'
        f'<title id="{ident}t">{escape(plot.title)}</title><desc id="{ident}d">{escape(describe(plot))}</desc>'
        f"{_inside(plot, box, seconds, marks)}</svg>"
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
        Line(run, str(document["label"]), series["at_seconds"], series[name], kind, what)
        for run, document in enumerate(documents)
        if (series := document["series"][place])["at_seconds"]
    )


def _blocks(documents: Sequence[Document]) -> tuple[Line, ...]:
    used = _sampled(documents, "engines", "blocks_used", "used")
    reserved = _sampled(documents, "kvgate", "reserved", "reserved", 1)
    return used + reserved + _sampled(documents, "kvgate", "limit", "limit", 2)


def _running(documents: Sequence[Document]) -> tuple[Line, ...]:
    running = tuple(replace(line, what="running") for line in _per_second(documents, "running"))
    waiting = _sampled(documents, "engines", "waiting", "waiting in engines", 1)
    return running + waiting + _sampled(documents, "kvgate", "queue", "queued in kvgate", 2)


# -- drawing ----------------------------------------------------------------------------------------------------------


def _inside(plot: Plot, box: Box, seconds: float, marks: Sequence[Mark]) -> str:
    known = [value for line in plot.lines for value in line.known]
    positive = [value for value in known if value > 0]
    ticks = log_ticks(min(positive), max(positive)) if plot.log else linear_ticks(max(known))
    frame = _Frame(box, seconds, ticks, plot.log)
    return "".join(
        [
            f'<text class="t" x="{box.left}" y="15">{escape(plot.title)}</text>',
            *frame.axes(),
            *frame.mark_lines(marks),
            *(frame.path(line) for line in plot.lines),
            *frame.mark_names(marks),
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

    def mark_lines(self, marks: Sequence[Mark]) -> Iterator[str]:
        for mark in self._visible(marks):
            yield f'<path class="m" d="M{self.x(mark.second):.1f} {self._box.top}v{self._inner_height}"/>'

    def mark_names(self, marks: Sequence[Mark]) -> Iterator[str]:
        """Right of their lines where there is room up to the next one; the last may stand left of its line."""
        visible = self._visible(marks)
        places = [self.x(mark.second) for mark in visible]
        before = [float(self._box.left), *places]
        after = [*places[1:], float(self._box.width - self._box.right)]
        for mark, x, left, right in zip(visible, places, before, after, strict=False):
            room = _MARK_CHAR_WIDTH * len(mark.name) + 2 * _MARK_MARGIN
            last = mark is visible[-1]
            if mark.name and (room <= right - x or (last and room <= x - left)):
                at = x + _MARK_MARGIN if room <= right - x else x - room + _MARK_MARGIN
                yield f'<text class="n" x="{at:.1f}" y="{self._box.top + 12}">{escape(mark.name)}</text>'

    def _visible(self, marks: Sequence[Mark]) -> list[Mark]:
        return [mark for mark in marks if mark.second <= self._seconds]

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
        """Each run by its name and colour once; what its kinds of lines are says the key."""
        runs: dict[int, Line] = {}
        for line in sorted(plot.lines, key=lambda line: line.kind):
            if line.known:
                runs.setdefault(line.run, line)
        yield from (
            self._beside(list(runs.values())) if self._box.labels_outside else self._above(runs.values())
        )
        if self._box.labels_outside:
            x, y = self._box.left + _TITLE_CHAR_WIDTH * len(plot.title) + 10, 15
        else:
            x, y = self._box.left, 46
        if plot.key:
            yield f'<text class="n" x="{x:.0f}" y="{y}">{escape(plot.key)}</text>'

    def _beside(self, lines: Sequence[Line]) -> Iterator[str]:
        """At the height of each line's end, moved down where two would touch, then up from the frame's end."""
        placed = sorted((self.y(line.known[-1]) + 4, number) for number, line in enumerate(lines))
        bottom = self._box.height - self._box.bottom + 4 - _LABEL_HEIGHT * (len(placed) - 1)
        at = 0.0
        x = self._box.width - self._box.right + _LABEL_MARGIN
        room = int((self._box.right - _LABEL_MARGIN) / _CHAR_WIDTH)
        for order, (wanted, number) in enumerate(placed):
            at = min(max(wanted, at + _LABEL_HEIGHT if order else wanted), bottom + _LABEL_HEIGHT * order)
            line = lines[number]
            yield f'<text class="r{line.run}" x="{x}" y="{at:.1f}">{_name(line.name, room)}</text>'

    def _above(self, lines: Iterable[Line]) -> Iterator[str]:
        """One row."""
        x = float(self._box.left)
        for line in lines:
            room = min(_ABOVE_CHARS_MAX, int((self._box.width - x) / _CHAR_WIDTH))
            if room >= _ABOVE_CHARS_MIN:
                yield f'<text class="r{line.run}" x="{x:.0f}" y="31">{_name(line.name, room)}</text>'
            x += _CHAR_WIDTH * min(len(line.name), room) + 14


def _name(text: str, chars: int) -> str:
    """The whole of a name that is cut is its tooltip."""
    whole = f"<title>{escape(text)}</title>" if len(text) > chars else ""
    return f"{whole}{escape(cut(text, chars))}"


def cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"
