"""`docs/reliability.md` is what `make faults` writes, for the faults that there are."""

import json

from tests.faults.report import DOCUMENT, FIGURES, PARTS, rendered

ROWS = json.loads(FIGURES.read_text())


def test_the_document_is_written_from_the_figures() -> None:
    assert DOCUMENT.read_text() == rendered(ROWS)


def test_every_fault_was_measured() -> None:
    """Whoever adds or renames a fault runs `make faults` again."""
    measured = [(row["part"], row["fault"]) for row in ROWS]
    assert measured == [(fault.part, fault.name) for part in PARTS for fault in part.faults]


def test_nothing_leaked() -> None:
    assert {row["leaked_blocks"] for row in ROWS} == {0}
