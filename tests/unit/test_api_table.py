"""The table of `tests/api` says what the parsing of requests does, and knows every route and field of vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.headers import request_headers
from gateway.core.media import USUAL
from gateway.core.outcomes import Refusal
from gateway.core.prompt import PromptText
from gateway.core.request import UNRESERVED, Endpoint
from gateway.http.routes import find_route
from tests.api.judge import (
    NEW_ID,
    body_of,
    counted,
    decoded,
    encoded,
    expected,
    forwarded,
    judged,
    request_of,
)
from tests.api.rows import As, Field, Form, Way, Written
from tests.api.table import EXAMPLES, FORMS, HEADERS, PARTS, PASSED, ROUTES

VLLM = json.loads((Path(__file__).parents[1] / "fixtures/vllm/request_fields.json").read_text())


def rows() -> Iterator[Any]:
    """Of every path."""
    for form in FORMS:
        for path in form.paths:
            plain = [Field(name, EXAMPLES[name]) for name in form.plain]
            for row in (*form.fields, *plain):
                shown = repr(row.value)[:30]
                yield pytest.param(path, form, row, id=f"{path} {row.name}={shown}")


@pytest.mark.parametrize(("path", "form", "row"), list(rows()))
def test_a_field_counts_and_passes_as_the_table_says(path: str, form: Form, row: Field) -> None:
    sent = body_of(form, row)
    if row.refused:
        refusal = judged(path, form, sent)
        assert isinstance(refusal, Refusal)
        assert (refusal.code, refusal.param) == (row.refused, row.name)
        return
    if not row.without:
        assert counted(path, form, row) == set(row.counts)
    raw, limit = forwarded(path, form, sent)
    wanted = expected(sent, row, limit)
    wanted = {name: NEW_ID if value is Written.ID else value for name, value in wanted.items()}
    assert decoded(form, raw) == decoded(form, encoded(form, wanted))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.paths[0])
def test_a_usual_body_passes_as_it_came(form: Form) -> None:
    for path in form.paths:
        assert forwarded(path, form, form.body)[0] == encoded(form, form.body)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.paths[0])
def test_every_field_of_vllms_has_a_row(form: Form) -> None:
    """And what else is there is told apart from them."""
    told = {row.name.removesuffix("[]") for row in (*form.fields, *map(_plain, form.plain))}
    vllms = set(VLLM["fields"][form.paths[0]])
    named = {name for name in vllms if f"`{name}`" in form.words}
    assert vllms <= told | named
    assert told - vllms <= OTHERS


def _plain(name: str) -> Field:
    return Field(name, EXAMPLES[name])


OTHERS = {
    *("an_unknown_field", "best_of", "functions", "max_completion_tokens", "n", "priority"),
    *("kv_transfer_params", "ec_transfer_params", "seed", "stream", "text", "tools", "top_logprobs"),
}
"""Fields of other routes and releases, which clients send here as well."""


def test_every_route_of_vllms_has_a_row() -> None:
    told = {f"{route.method} {route.path}" for route in ROUTES}
    assert set(VLLM["routes"]) <= told
    assert len(told) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_route_leads_where_the_table_says(route: Any) -> None:
    path = route.path.replace("{response_id}", "resp_1")
    found = find_route(path.encode(), ())
    if route.way in (Way.OWN, Way.CLOSED):
        assert found is None
        return
    assert found is not None
    assert route.method in found.methods
    assert (found.endpoint is not None) == (route.way is Way.ADMITTED)


def test_every_route_of_ours_has_a_row() -> None:
    told = {route.path for route in ROUTES if route.way in (Way.ADMITTED, Way.UNRESERVED)}
    assert {endpoint.value for endpoint in Endpoint} | set(UNRESERVED) <= told
    assert {path for form in FORMS for path in form.paths} == {endpoint.value for endpoint in Endpoint}
    assert set(PASSED) == set(UNRESERVED)


@pytest.mark.parametrize(("part", "counts_as"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_part_counts_as_the_table_says(path: str, part: dict[str, Any], counts_as: As) -> None:
    form = next(form for form in FORMS if path in form.paths)
    name = "input" if path == "/v1/responses" else "messages"
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
    request = request_of(path, form, form.body | {name: said})
    assert not isinstance(request, Refusal)
    if counts_as is As.NOTHING:
        refusal = request.not_taken(USUAL)
        assert refusal is not None
        assert refusal.param == part["type"]
        return
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    assert (prompt.media_tokens > 0) == (counts_as is As.MEDIA)
    alone = request_of(path, form, form.body | {name: [{"role": "user", "content": "hi"}]})
    assert not isinstance(alone, Refusal)
    assert isinstance(alone.prompts[0], PromptText)
    assert (
        prompt.utf8_bytes + prompt.fixed_tokens > alone.prompts[0].utf8_bytes + alone.prompts[0].fixed_tokens
    )


@pytest.mark.parametrize(("name", "value", "passes"), [(name, *row[:2]) for name, row in HEADERS.items()])
def test_a_header_passes_as_the_table_says(name: str, value: str, passes: bool) -> None:
    sent = (name.encode(), value.encode())
    assert (sent in request_headers([sent], "ours")) == passes
