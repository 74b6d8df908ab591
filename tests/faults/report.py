"""`make faults`: every fault of the catalogue on real processes; what they showed goes into `docs/reliability.md`.

The figures are kept in `docs/reliability.json`, from which the document is written: `tests/repo` compares the two, and
both with the catalogue.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults import of_books, of_engines, of_gateways, of_growth, of_stores
from tests.faults.catalogue import Fault, Part
from tests.faults.scene import FULL, GATEWAYS, HEARTBEAT_SECONDS, LEASE_SECONDS, REPLICAS

PARTS: Sequence[Part] = (of_gateways.PART, of_stores.PART, of_engines.PART, of_books.PART, of_growth.PART)
DOCS = Path(__file__).parents[2] / "docs"
FIGURES, DOCUMENT = DOCS / "reliability.json", DOCS / "reliability.md"

Row = Mapping[str, Any]

INTRODUCTION = f"""# What survives what

Written by `make faults` from what it measured. Each row is a run of its own on real processes: {GATEWAYS} gateways and
{REPLICAS} mock engines on one Valkey, a lease of {LEASE_SECONDS} s and a heartbeat of {HEARTBEAT_SECONDS} s (by default
6 s and 1 s). Streams fill the engines and calls wait at both gateways; where there is *room*, the engines have twice
the blocks and nobody waits. Then the fault strikes.

While it lasts the books in the store are read again and again, and have to keep the rules of [ledger.md](ledger.md). At
the end of a run every gateway that is left reports 0 blocks reserved, 0 calls held, waiting or in flight and no debt,
the store holds no call, the engines run none, and a new call is served.

- *complete*: every token and `[DONE]`. *connection lost*: the client's own gateway died. Codes are those of the README.
- *asked meanwhile*: calls that came while the fault lasted.
- *blocks leaked*: reserved in the store after the last client had its answer.
- *whole after*: from the end of the fault, or from its beginning where it has no end, until every gateway is ready and
  the books are exactly what clients have open.

The store's clock jumps in the `now` of the scripts, the only thing that they take from it: a proxy between gateways and
store writes it into every command.
"""
TITLES = ("what happens", "in flight", "what the clients saw", "blocks leaked", "whole after")
HEAD = f"| {' | '.join(TITLES)} |\n{'| --- ' * len(TITLES)}|"
AT_ONCE_SECONDS = 0.05
"""Less than what a look at all gateways and the store takes."""


def rendered(rows: Iterable[Row]) -> str:
    """The document."""
    sections = [INTRODUCTION]
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(_line(row))
    for title, lines in parts.items():
        sections.append("\n".join((f"## {title}\n", HEAD, *lines, "")))
    return "\n".join(sections)


def _line(row: Row) -> str:
    in_flight = ", ".join(f"{count} {group}" for group, count in row["in_flight"].items())
    seen = "; ".join(
        f"{group}: " + ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        for group, endings in row["seen"].items()
    )
    seconds = row["whole_seconds"]
    whole = "at once" if seconds < AT_ONCE_SECONDS else f"{seconds:.1f} s"
    cells = (row["fault"], in_flight, seen, row["leaked_blocks"], whole)
    return "| " + " | ".join(map(str, cells)) + " |"


async def measured(fault: Fault) -> Row | None:
    """One row; None where the fault did what it must not."""
    print(f"{fault.part}: {fault.name}", flush=True)
    try:
        found = await fault.run(FULL)
    except Exception:
        traceback.print_exc()
        print("  FAILED", flush=True)
        return None
    row = {"part": fault.part, "fault": fault.name, **asdict(found)}
    print(f"  {_line(row)}", flush=True)
    return row


def main(words: Sequence[str]) -> int:
    """0 when every fault was survived; only then the document is written.

    With words only the faults whose names contain one are played again; the other rows stay.
    """
    faults = [fault for part in PARTS for fault in part.faults]
    chosen = [fault for fault in faults if not words or any(word in fault.name for word in words)]
    with asyncio.Runner() as runner:
        rows = [runner.run(measured(fault)) for fault in chosen]
    if None in rows:
        print(f"{rows.count(None)} of {len(rows)} faults left something behind")
        return 1
    known = [] if len(chosen) == len(faults) else json.loads(FIGURES.read_text())
    by_fault = {(row["part"], row["fault"]): row for row in (*known, *filter(None, rows))}
    table = [by_fault[key] for fault in faults if (key := (fault.part, fault.name)) in by_fault]
    FIGURES.write_text(json.dumps(table, indent=1) + "\n")
    DOCUMENT.write_text(rendered(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
