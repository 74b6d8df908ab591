"""docs/api.md, made of the table."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.core.media import MEDIA_TOKENS
from tests.api.rows import Field, Form, Route, Way, Written
from tests.api.table import CONTEXT, FORMS, HEADERS, PARTS, ROUTES

DOCUMENT = Path(__file__).parents[2] / "docs/api.md"
SHOWN_CHARS_MAX = 48
HEAD = (
    "# Routes and fields\n\n"
    "What kvgate makes of each route and each field of vLLM 0.32: how it counts, and how it passes. This document is "
    "written by `python -m tests.api` from the table in `tests/api/table.py`, which the tests hold against the parsing "
    "of requests and against what arrives at an engine; `make check` fails where it is stale.\n\n"
    "- *Counts*: what of the call's demand the field changes. A demand is made of sequences, the tokens of each prompt "
    "and the output limit, and becomes blocks: for each sequence `ceil((prompt + limit - 1) / block size)`, the limit "
    "clamped to what the prompt leaves of the context; for what generates nothing `ceil(prompt / block size)`.\n"
    "- *Passes*: what the engine gets. Every field is there as the client sent it, byte for byte, unless it says "
    "otherwise. Where a body has no output limit it is written beside the rest.\n"
    "- A field that comes twice is 400 `duplicate_field`; null is as absent. Numbers have to be numbers: strings and "
    "booleans are 400 `invalid_value`, 10.0 is 10.\n\n"
    f"Examples are for engines with a context of {CONTEXT:,} tokens.\n"
)


def written() -> str:
    parts = [HEAD, *_routes(), *(line for form in FORMS for line in _form(form)), *_parts(), *_headers()]
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _routes() -> Iterator[str]:
    yield "## Routes\n"
    ways = (
        (Way.ADMITTED, "reserves what its body asks for"),
        (Way.UNRESERVED, "reserves nothing, and works while the fleet is full"),
        (Way.OWN, "is answered by kvgate, not by an engine"),
    )
    rows = [
        [f"`{route.method} {route.path}`", words, _key(route)]
        for way, words in ways
        for route in ROUTES
        if route.way is way
    ]
    yield from _table(("route", "", ""), rows)
    closed = ", ".join(f"`{route.method} {route.path}`" for route in ROUTES if route.way is Way.CLOSED)
    yield (
        f"Every other path is 404 (or 405), among them {closed}. `routes.pass_through` lets some through by name: "
        "nothing is reserved for them.\n"
    )


def _key(route: Route) -> str:
    words = "" if route.way is Way.ADMITTED else route.words
    return "; ".join(filter(None, (words, "needs no key" if route.public else "")))


def _form(form: Form) -> Iterator[str]:
    yield f"## {', '.join(f'`{path}`' for path in form.paths)}\n"
    told = [row for row in form.fields if row.counts or row.words or row.writes or row.refused]
    rows = [
        [f"`{row.name}`", _shown(row.value), ", ".join(row.counts), _passes(row), row.words] for row in told
    ]
    yield from _table(("field", "for example", "counts", "passes", ""), rows)
    others = {row.name for row in form.fields} - {row.name for row in told}
    names = sorted({*form.plain, *others} - {"an_unknown_field"})
    plain = ", ".join(f"`{name}`" for name in names)
    yield f"Count nothing and pass untouched: {plain}, and fields that are not vLLM's.\n"
    if form.words:
        yield f"{form.words}\n"


def _shown(value: Any) -> str:
    text = f"{len(value):,} bytes" if isinstance(value, bytes) else json.dumps(value)
    if len(text) > SHOWN_CHARS_MAX:
        text = text[:SHOWN_CHARS_MAX] + " ..."
    return f"`{text}`"


def _passes(row: Field) -> str:
    if row.refused:
        return f"refused: `{row.refused}`"
    if not row.writes:
        return "untouched"
    said = []
    for name, value in row.writes.items():
        what = value.value if isinstance(value, Written) else f"`{json.dumps(value)}`"
        said.append(f"{'replaced by' if name == row.name else f'`{name}` is'} {what}")
    return "; ".join(said)


def _parts() -> Iterator[str]:
    yield "## Parts of a message's `content`\n"
    yield from _table(("`type`", "counts"), [[name, as_] for name, (_, as_) in PARTS.items()])
    yield (
        f"Images, sounds and videos count {MEDIA_TOKENS:,} tokens each where the fleet says nothing else, and a part "
        "of an unknown type as the dearest of them. `media.hosts` says from where they may come.\n"
    )


def _headers() -> Iterator[str]:
    yield "## Headers of a request\n"
    rows = [
        [f"`{name}`", "untouched" if passes else "not passed", words]
        for name, (_, passes, words) in HEADERS.items()
    ]
    yield from _table(("header", "passes", ""), rows)
    yield "Those of the answer are in the [README](../README.md#answers).\n"
