"""Writes docs/api.md: `python -m tests.api`."""

from tests.api.document import DOCUMENT, written

DOCUMENT.write_text(written())
