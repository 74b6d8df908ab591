"""A finished run as a table: the same rows for the terminal and the page, one column a run.  Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
Row = tuple[str, str, str]
"""Section, label and text of one cell."""

NOTHING = "-"


def rows(document: Document) -> Iterator[Row]:
    """All figures of one run as text."""
    figures = document["figures"]
    yield from _verdicts(figures)
    yield from _calls(figures, document["scenario"]["targets"])
    yield from _attempts(figures["attempts"])
    yield from _refusals(figures)
    yield from _latencies(figures)
    yield from _work(figures)
    yield from _engines(figures["engines"])
    yield from _gateway(figures["kvgate"])
    for name, key in figures["keys"].items():
        yield "keys", name, f"{key['answered']} of {key['offered']} answered, {_whole(key['tokens'])} tokens"
    yield from _generator(figures["generator"])


def table(documents: Sequence[Document]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Sections of rows of cells: a row that one run lacks has a dash there."""
    cells: dict[str, dict[str, dict[int, str]]] = {}
    for column, document in enumerate(documents):
        for section, label, text in rows(document):
            cells.setdefault(section, {}).setdefault(label, {})[column] = text
    columns = range(len(documents))
    return [
        (
            section,
            [(label, [found.get(column, NOTHING) for column in columns]) for label, found in of.items()],
        )
        for section, of in cells.items()
    ]


def terminal(documents: Sequence[Document]) -> str:
    """For a terminal of any width; columns are as wide as their widest cell."""
    sections = table(documents)
    labels = [label for _, found in sections for label, _ in found]
    wide = max(map(len, labels))
    above = heads(documents) if len(documents) > 1 else []
    every = above + [row for _, found in sections for row in found]
    widths = [max(len(cells[column]) for _, cells in every) for column in range(len(documents))]
    lines = [_line(label, cells, wide, widths) for label, cells in above]
    for section, found in sections:
        lines += ["", section.upper()]
        lines += [_line(label, cells, wide, widths) for label, cells in found]
    return "\n".join(lines).strip("\n")


def heads(documents: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """What stands above the columns: the names of the runs, and their scenarios where these are not the same one."""
    found = [("", [str(document["label"]) for document in documents])]
    if any(document["scenario"] != documents[0]["scenario"] for document in documents):
        found.append(("DIFFERENT SCENARIOS", [str(document["scenario"]["name"]) for document in documents]))
    return found


def why_none_admitted(figures: Document) -> str | None:
    """The most frequent end of the attempts where calls were offered and none was admitted; else None."""
    attempts = figures["attempts"]
    if attempts["admitted"] or not figures["calls"]["offered"]:
        return None
    ends: dict[str, int] = {code: found["count"] for code, found in figures["refused"].items()}
    ends |= {f"timed out: {_words(stage)}": count for stage, count in attempts["timed_out_by_stage"].items()}
    ends |= {f"failed: {_words(kind)}": count for kind, count in attempts["failed_by_kind"].items()}
    ends |= _still_open(attempts)
    return max(ends, key=ends.__getitem__)


def _still_open(attempts: Document) -> dict[str, int]:
    """By stage; reports of older versions know only their sum."""
    stages = attempts.get("stopped_by_stage", {"open": attempts["stopped"]})
    return {f"still {stage} at the end": count for stage, count in stages.items()}


def _words(name: str) -> str:
    return name.replace("_", " ")


def _line(label: str, cells: Sequence[str], wide: int, widths: Sequence[int]) -> str:
    shown = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"  {label.ljust(wide)}  {'  '.join(shown)}".rstrip()


def _verdicts(figures: Document) -> Iterator[Row]:
    generator, why = figures["generator"], why_none_admitted(figures)
    if why is not None:
        yield "verdicts", "no call was answered", f"mostly {why}"
    yield "verdicts", "load generator kept up", "yes" if generator["kept_up"] else "NO: not a measurement"
    yield "verdicts", "preemptions", _whole(figures["engines"]["preemptions"])
    if figures["kvgate"]:
        left = figures["kvgate"]["leaked"]
        leaked = ", ".join(f"{count if count >= 0 else '?'} {name}" for name, count in left.items() if count)
        yield "verdicts", "leaked at the end", leaked or "nothing"


def _calls(figures: Document, targets: Document) -> Iterator[Row]:
    calls, section = figures["calls"], "calls"
    limits = f"{targets['first_token_seconds']:g} s, {targets['gap_seconds'] * 1_000:g} ms"
    yield section, "offered", _whole(calls["offered"])
    yield section, "answered", _part(calls["answered"], calls["offered"])
    yield section, f"answered in time ({limits})", _part(calls["in_time"], calls["offered"])
    yield section, "the same from arrival", _part(calls["in_time_from_arrival"], calls["offered"])
    for name in ("gave_up", "left", "unfinished", "retried"):
        yield section, _words(name), _whole(calls[name])


def _attempts(attempts: Document) -> Iterator[Row]:
    """All rows up to those that are still open add up to `made`; the rest says more of them."""
    for name in ("made", "answered", "left", "refused", "timed_out", "failed"):
        yield "attempts", _words(name), _whole(attempts[name])
    for label, count in _still_open(attempts).items():
        if count:
            yield "attempts", label, _whole(count)
    yield "attempts", "of all, admitted", _whole(attempts["admitted"])
    if attempts["queue_ms"]["count"]:
        yield "attempts", "queued", _whole(attempts["queued"])
        yield "attempts", "wait for blocks, p50 / p90 / p99 / max", _summary(attempts["queue_ms"])
    for stage, count in attempts["timed_out_by_stage"].items():
        yield "attempts", f"timed out: {_words(stage)}", _whole(count)
    for kind, count in attempts["failed_by_kind"].items():
        yield "attempts", f"failed: {_words(kind)}", _whole(count)
    back = attempts.get("back_after_refusal", {})
    if back.get("count"):
        text = f"{_whole(back['granted_or_queued'])} of {_whole(back['count'])}"
        yield "attempts", "granted or queued when back after a refusal", text


def _refusals(figures: Document) -> Iterator[Row]:
    section = "refusals: count, p50 / p90 / p99 / max"
    for code, found in figures["refused"].items():
        yield section, code, f"{_whole(found['count'])}: {_summary(found['latency_ms'])}"
        for size, label in (("under", "under 16 KB"), ("from", "16 KB and more")):
            sized = found[f"latency_ms_{size}_16_kb"]
            if sized["count"]:
                yield section, f"{code}, {label}", f"{_whole(sized['count'])}: {_summary(sized)}"
    for reason, found in (figures["kvgate"] or {}).get("refusal_ms", {}).items():
        bounds = f"p50 <= {_ms(found['p50_at_most'])}, p99 <= {_ms(found['p99_at_most'])}"
        yield section, f"in the gateway: {reason}", f"{_whole(found['count'])}: {bounds}"


def _latencies(figures: Document) -> Iterator[Row]:
    first, section = figures["first_token_ms"], "first token: p50 / p90 / p99 / max"
    yield section, "from arrival, queue and retries included", _summary(first["from_arrival"])
    yield section, "of each attempt", _summary(first["per_attempt"])
    yield section, "calls without one", _whole(first["calls_without"])
    section = "between tokens: p50 / p99 / p99.9 / max"
    corrected = figures["gap_corrected_ms"]
    yield section, "all gaps pooled", _summary(figures["gap_ms"])
    yield section, "corrected for coordinated omission", _summary(corrected)
    yield section, "interval of the correction", _ms(corrected["expected_ms"])
    yield section, "worst of each call, p50 / p90 / p99 / max", _summary(figures["worst_gap_ms"])


def _work(figures: Document) -> Iterator[Row]:
    tokens, goodput = figures["tokens"], figures["goodput"]
    per_second = f"{_whole(tokens['completed'])} ({tokens['completed_per_second']:,.0f}/s)"
    yield "work", "completed output tokens", per_second
    yield "work", "wasted output tokens", _whole(tokens["wasted"])
    good = f"{goodput['calls_per_second']:.2f} calls/s, {goodput['tokens_per_second']:,.0f} tokens/s"
    yield "work", "goodput (in time)", good
    good = f"{goodput['calls_per_second_from_arrival']:.2f} calls/s, "
    good += f"{goodput['tokens_per_second_from_arrival']:,.0f} tokens/s"
    yield "work", "goodput, in time from arrival", good


def _engines(engines: Document) -> Iterator[Row]:
    section = "engines"
    if not engines["each"]:
        return
    yield section, "preemptions", _whole(engines["preemptions"])
    recomputed = engines["recomputed_tokens"]
    yield section, "recomputed tokens", "not visible" if recomputed is None else _whole(recomputed)
    for number, engine in enumerate(engines["each"].values(), 1):
        use = engine["kv_use_share_max"]
        shown = NOTHING if use is None else f"{use:.1%}"
        text = f"KV use up to {shown}, running {_whole(engine['running_max'])}"
        text += f", waiting {_whole(engine['waiting_max'])}, preemptions {_whole(engine['preemptions'])}"
        yield section, f"engine {number}", text + (", RESTARTED" if engine["restarts"] else "")
    if engines["scrapes_missed"]:
        yield section, "scrapes missed", _whole(engines["scrapes_missed"])


def _gateway(gateway: Document | None) -> Iterator[Row]:
    if not gateway:
        return
    yield "kvgate", "queue, most", _whole(gateway["queue_max"])
    for pool, share in gateway["reserved_share_while_queued"].items():
        text = f"mean {share['mean']:.1%}, min {share['min']:.1%} of {share['samples']} samples"
        yield "kvgate", f"reserved / limit while queued, {pool}", text
    waits = gateway.get("real_over_predicted_wait", {})
    if waits.get("count"):
        shown = (bound for bound in ("0.5", "0.8", "1.25", "2") if f"at_most_{bound}" in waits)
        shares = ", ".join(f"{waits[f'at_most_{bound}']:.1%} <= {bound}" for bound in shown)
        yield "kvgate", "real / predicted wait", f"{_whole(waits['count'])}: {shares}"


def _generator(generator: Document) -> Iterator[Row]:
    section, bounds = "load generator", generator["bounds"]
    for name in ("lateness_ms", "lag_ms"):
        label = f"{name.removesuffix('_ms')}, p99 / max (bound {bounds[f'{name}_p99']:g} ms)"
        yield section, label, f"{_ms(generator[name]['p99'])} / {_ms(generator[name]['max'])}"
    seconds, events = generator["cpu_seconds"], generator["events"]
    share = "" if generator["cpu_share"] is None else f", {generator['cpu_share']:.0%} of a core"
    each = f", {seconds / events * 1e6:.0f} us an event" if events else ""
    yield section, "CPU", f"{seconds:.1f} s{share}{each}"


def _summary(found: Document) -> str:
    if not found["count"]:
        return NOTHING
    values = [value for name, value in found.items() if name not in ("count", "expected_ms")]
    return " / ".join(_number(value) for value in values) + " ms"


def _number(value: float) -> str:
    """About three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{_number(value)} ms"


def _whole(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _part(value: int, whole: int) -> str:
    return f"{value:,} ({value / whole:.1%})" if whole else f"{value:,}"
