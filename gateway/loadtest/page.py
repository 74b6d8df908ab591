"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.  Pure."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from gateway.loadtest.plots import (
    DARK,
    LIGHT,
    NARROW,
    STYLE,
    WIDE,
    end_seconds,
    fitted,
    nameless,
    phase_marks,
    plot_svg,
    plots,
)
from gateway.loadtest.report import heads, table, why_none_admitted

Document = Mapping[str, Any]

_STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}{STYLE}"
    "body{margin:0 auto;max-width:1120px;padding:24px 16px;background:var(--page);color:var(--ink);"
    "font:15px/1.5 system-ui,sans-serif}h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}"
    "p{margin:4px 0}.soft{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:3px 14px 3px 0;border-bottom:1px solid var(--grid)}"
    "td{font-variant-numeric:tabular-nums}tbody th{font-weight:400;color:var(--soft);min-width:8em}"
    "tr.section th{padding-top:16px;color:var(--ink);font-weight:600}"
    "svg{display:block;width:100%;height:auto;margin:0 0 14px}.narrow{display:none}"
    "@media(max-width:640px){.wide{display:none}.narrow{display:block}}"
    + "".join(f"b.r{n}{{color:var(--r{n})}}" for n in range(6))
)


def page(documents: Sequence[Document]) -> str:
    """One run, or several side by side."""
    names = " / ".join(dict.fromkeys(str(document["scenario"]["name"]) for document in documents))
    parts = [
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Load test: {escape(names)}</title>',
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>',
        f"<header><h1>Load test: {escape(names)}</h1>",
        *_heads(documents),
        "</header><main><h2>Figures</h2>",
        *_table(documents),
        "<h2>Over time</h2>",
        *_plots(documents),
        "<h2>How to read it</h2>",
        _NOTES,
        "</main></html>",
    ]
    return "\n".join(parts) + "\n"


_NOTES = (
    '<p class="soft">Open loop: calls arrive at their times whatever became of earlier ones. An answer is in time '
    "when its first token and its longest silence both hold the targets. Gaps are those of all streams, also of "
    "streams that came to nothing. The pooled percentile is that of vLLM's own benchmark and hides stalls: a stream "
    "that stands still for 3 s has one gap where a hundred tokens should have come. The corrected one counts the "
    "tokens that were due. Rates are over the time of arrivals.</p>"
)


def _heads(documents: Sequence[Document]) -> Iterator[str]:
    for description in dict.fromkeys(document["scenario"]["description"] for document in documents):
        yield f"<p>{escape(description)}</p>"
    for number, document in enumerate(documents):
        targets = escape(", ".join(document["targets"]))
        yield (
            f'<p><b class="r{number}">{escape(str(document["label"]))}</b> '
            f'<span class="soft">{escape(document["began"])}, {targets}</span><br>{_verdicts(document)}</p>'
        )


def _verdicts(document: Document) -> str:
    figures = document["figures"]
    kept_up, why = figures["generator"]["kept_up"], why_none_admitted(figures)
    found = [] if why is None else [(False, f"no call was answered: mostly {escape(why)}")]
    found.append((kept_up, "load generator kept up" if kept_up else "load generator did not keep up"))
    preemptions = figures["engines"]["preemptions"]
    if preemptions is not None:
        found.append((preemptions == 0, f"{preemptions:,.0f} preemptions"))
    if figures["kvgate"]:
        clean = figures["kvgate"]["clean"]
        found.append((clean, "nothing leaked" if clean else "reservations or calls left over"))
    return " · ".join(f'<span class="{"good" if good else "bad"}">{text}</span>' for good, text in found)


def _table(documents: Sequence[Document]) -> Iterator[str]:
    span = len(documents) + 1
    yield '<div class="scroll"><table><thead>'
    for label, cells in heads(documents):
        titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells)
        yield f"<tr><td>{label.capitalize()}</td>{titles}</tr>"
    yield "</thead><tbody>"
    for section, rows in table(documents):
        yield f'<tr class="section"><th colspan="{span}" scope="rowgroup">{escape(section.capitalize())}</th></tr>'
        for label, cells in rows:
            shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f'<tr><th scope="row">{escape(label)}</th>{shown}</tr>'
    yield "</tbody></table></div>"


def _plots(documents: Sequence[Document]) -> Iterator[str]:
    """Each twice: the width of the window decides which is shown."""
    seconds, marks, wide = end_seconds(documents), phase_marks(documents), fitted(WIDE, documents)
    for number, plot in enumerate(plots(documents)):
        yield f'<div class="wide">{plot_svg(plot, wide, seconds, f"w{number}", marks)}</div>'
        yield f'<div class="narrow">{plot_svg(plot, NARROW, seconds, f"n{number}", marks)}</div>'
        marks = nameless(marks)
