"""The command `kvgate usage`: what call logs say of a period, summed up by key, group, fleet and so on."""

import argparse
import contextlib
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from gateway.config import ConfigError, load, moment
from gateway.core.outcomes import Outcome
from gateway.telemetry.calllog import CallLine, LostLine
from gateway.telemetry.callreader import NotACallLog, read_calls

BY: dict[str, Callable[[CallLine], str | None]] = {
    "key": lambda call: call.key,
    "group": lambda call: call.group,
    "fleet": lambda call: call.fleet,
    # Of what no fleet serves clients may make up any number of names.
    "model": lambda call: call.model if call.fleet else None,
    "class": lambda call: call.class_,
    "outcome": lambda call: call.outcome.value,
    "reason": lambda call: call.reason,
}
"""What calls can be summed up by."""
ROWS_MAX = 100_000
STDIN = "-"
UNKNOWN = "-"
"""In a table, where a call has no such name."""
HEADS = {
    "calls": "CALLS",
    "refused": "REFUSED",
    "charged": "CHARGED",
    "prompt_tokens": "PROMPT TOKENS",
    "cached_tokens": "CACHED",
    "output_tokens": "OUTPUT TOKENS",
    "block_seconds": "BLOCK-SECONDS",
    "estimated_tokens": "ESTIMATED",
}
_AGO = re.compile(r"(\d{1,5})([mhd])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

Label = tuple[str | None, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="call logs, packed by gzip or not; - is standard input"
    )
    parser.add_argument("--config", type=Path, help="instead of FILE: the one that this configuration names")
    parser.add_argument(
        "--by", action="append", default=[], choices=BY, help="a row for each; may be repeated"
    )
    parser.add_argument(
        "--since", metavar="WHEN", help="2026-11-01, 2026-11-01T12:00:00Z, or how long ago: 90m, 24h, 7d"
    )
    parser.add_argument("--until", metavar="WHEN", help="the same; what ended then is left out")
    formats = parser.add_mutually_exclusive_group()
    for name, text in (("json", "one document"), ("jsonl", "an object a row"), ("csv", "a line a row")):
        formats.add_argument(f"--{name}", dest="format", action="store_const", const=name, help=text)


@dataclass(slots=True)
class Sums:
    """Of the calls of one row.  Tokens are those that were charged; blocks are held by others, too."""

    calls: int = 0
    refused: int = 0
    charged: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    block_seconds: float = 0.0
    estimated_tokens: int = 0
    """Of the prompt and output tokens, those that the engine did not report."""

    def add(self, call: CallLine) -> None:
        self.calls += 1
        self.refused += call.outcome is Outcome.REFUSED
        self.block_seconds += call.block_seconds
        if not call.charged:
            return
        prompt, output = call.prompt_tokens or 0, call.output_tokens or 0
        self.charged += 1
        self.prompt_tokens += prompt
        self.cached_tokens += call.cached_tokens or 0
        self.output_tokens += output
        self.estimated_tokens += (prompt if call.prompt_estimated else 0) + (
            output if call.output_estimated else 0
        )

    def figures(self) -> dict[str, int | float]:
        """As `HEADS` orders them."""
        return {name: round(getattr(self, name), 3) for name in HEADS}


@dataclass(slots=True)
class Usage:
    """What was read of a period."""

    by: Sequence[str]
    since: datetime | None = None
    until: datetime | None = None
    rows: dict[Label, Sums] = field(default_factory=dict)
    total: Sums = field(default_factory=Sums)
    lost: int = 0
    """Calls that the logs themselves say are missing."""
    skipped: int = 0
    """Lines that could not be read."""

    def add(self, found: CallLine | LostLine | None) -> None:
        if found is None:
            self.skipped += 1
        elif not self._covers(found.time):
            return
        elif isinstance(found, LostLine):
            self.lost += found.lost
        else:
            self.total.add(found)
            self._row(tuple(BY[name](found) for name in self.by)).add(found)

    def sorted_rows(self) -> Iterator[tuple[Label, Sums]]:
        """By their names, unknown ones first."""
        for label in sorted(self.rows, key=lambda label: [name or "" for name in label]):
            yield label, self.rows[label]

    def _covers(self, time: datetime) -> bool:
        return (self.since is None or time >= self.since) and (self.until is None or time < self.until)

    def _row(self, label: Label) -> Sums:
        row = self.rows.get(label)
        if row is None:
            if len(self.rows) >= ROWS_MAX:
                raise ConfigError("--by", f"makes more than {ROWS_MAX} rows")
            row = self.rows[label] = Sums()
        return row


def run(parsed: argparse.Namespace, environ: Mapping[str, str], now: datetime | None = None) -> int:
    """Print the sums; what they leave out goes to stderr.  Raises ConfigError or NotACallLog."""
    now = now or datetime.now(UTC)
    usage = Usage(parsed.by, _period("--since", parsed.since, now), _period("--until", parsed.until, now))
    if usage.since and usage.until and usage.since >= usage.until:
        raise ConfigError("--until", "has to be after --since")
    for name in _files(parsed, environ):
        with _opened(name) as source:
            for found in read_calls(name, source):
                usage.add(found)
    print(_FORMATS[parsed.format](usage), end="")
    for note in _notes(usage):
        print(f"kvgate: note: {note}", file=sys.stderr)
    return 0


def _files(parsed: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[str]:
    files: list[str] = parsed.files
    if parsed.config is not None:
        if files:
            raise ConfigError("--config", "goes without FILE: it stands for the file of its `log.calls`")
        calls = load(parsed.config, environ).log.calls
        if calls is None:
            raise ConfigError("log.calls", f"is not set in {parsed.config.name}: it has no call log")
        return [calls]
    if not files:
        raise ConfigError("FILE", "is missing: name call logs, - for standard input, or --config")
    real = [name if name == STDIN else os.path.realpath(name) for name in files]
    for number, name in enumerate(real):
        if name in real[:number]:
            raise ConfigError(files[number], "is given twice")
    return files


@contextlib.contextmanager
def _opened(name: str) -> Iterator[io.BufferedReader]:
    if name == STDIN:
        if sys.stdin is None:  # it was closed before we began
            raise NotACallLog("standard input is closed")
        yield cast(io.BufferedReader, sys.stdin.buffer)
        return
    try:
        source = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise NotACallLog(f"{name}: cannot be read: {error.strerror}") from None
    with source:
        yield source


def _period(option: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    if ago := _AGO.fullmatch(text):
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    found = moment(text)
    if found is None or found.tzinfo is None:
        known = (
            "a date (2026-11-01), a date and time with zone (2026-11-01T12:00:00Z), or how long ago (24h, 7d)"
        )
        raise ConfigError(option, f"has to be {known}, got {text!r}")
    return found


def _notes(usage: Usage) -> Iterator[str]:
    if usage.lost:
        yield f"calls that are missing, because the log could not be written at the time: {usage.lost}"
    if usage.skipped:
        yield f"lines that cannot be read, and are left out: {usage.skipped}"


# Formats ----------------------------------------------------------------------------------------------------


def _as_table(usage: Usage) -> str:
    """For people: the last row is the total."""
    head = [*(name.upper() for name in usage.by), *HEADS.values()]
    rows = [_cells(label, sums) for label, sums in usage.sorted_rows() if usage.by]
    total = _cells(("total", *[""] * (len(usage.by) - 1)) if usage.by else (), usage.total)
    lines = [head, *rows, total]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "".join(f"{_aligned(line, widths, len(usage.by))}\n" for line in lines)


def _cells(label: Label, sums: Sums) -> list[str]:
    names = [UNKNOWN if name is None else _printable(name) for name in label]
    return names + [f"{value:,}" for value in sums.figures().values()]


def _aligned(line: Sequence[str], widths: Sequence[int], names: int) -> str:
    """Names to the left, figures to the right."""
    cells = zip(line, widths, strict=True)
    return "  ".join(
        cell.ljust(width) if column < names else cell.rjust(width)
        for column, (cell, width) in enumerate(cells)
    ).rstrip()


def _printable(name: str) -> str:
    """A log may come from anywhere, and a terminal obeys what it is shown."""
    return name if name.isprintable() else ascii(name)


def _objects(usage: Usage) -> Iterator[dict[str, Any]]:
    for label, sums in usage.sorted_rows():
        yield {**dict(zip(usage.by, label, strict=True)), **sums.figures()}


def _period_of(usage: Usage) -> dict[str, str | None]:
    bounds = (("since", usage.since), ("until", usage.until))
    return {name: None if bound is None else bound.isoformat() for name, bound in bounds}


def _as_json(usage: Usage) -> str:
    document = {
        **_period_of(usage),
        "rows": list(_objects(usage)),
        "total": usage.total.figures(),
        "lost": usage.lost,
        "skipped_lines": usage.skipped,
    }
    return json.dumps(document, indent=2) + "\n"


def _as_jsonl(usage: Usage) -> str:
    """Each row with the period that it is of: what a bill needs."""
    return "".join(json.dumps({**_period_of(usage), **row}) + "\n" for row in _objects(usage))


def _as_csv(usage: Usage) -> str:
    return _csv([*usage.by, *HEADS], (row.values() for row in _objects(usage)))


def _csv(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


_FORMATS: dict[str | None, Callable[[Usage], str]] = {
    None: _as_table,
    "json": _as_json,
    "jsonl": _as_jsonl,
    "csv": _as_csv,
}
