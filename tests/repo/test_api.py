"""docs/api.md is what the table says now."""

from tests.api.document import DOCUMENT, written


def test_the_document_is_not_stale() -> None:
    assert DOCUMENT.read_text() == written(), "python -m tests.api writes it anew"
