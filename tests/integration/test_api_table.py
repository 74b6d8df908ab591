"""What arrives at an engine through a gateway, by the mock's journal, is what the table of `tests/api` says."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.core.outcomes import STATUS, Refusal
from gateway.core.request import Endpoint, forward
from tests.api.judge import FORM_TYPE, body_of, encoded, expected, request_of
from tests.api.rows import Field, Form, Route, Way, Written
from tests.api.table import CONTEXT, EXAMPLES, FORMS, HEADERS, PASSED, ROUTES
from tests.processes import QUICK_STORE, GatewayProcess, Mock, world

pytestmark = pytest.mark.timeout(120)
Running = tuple[GatewayProcess, Mock]
SIZE = ("--blocks", "1001", "--max-model-len", str(CONTEXT), "--speed", "inf")


def running(*options: str) -> Iterator[Running]:
    with world() as here:
        mock = here.mock(*SIZE, *options)
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
        yield here.gateway(config, key), mock


@pytest.fixture(scope="module")
def generating() -> Iterator[Running]:
    yield from running()


@pytest.fixture(scope="module")
def pooling() -> Iterator[Running]:
    yield from running("--runner", "pooling")


@pytest.fixture(scope="module")
def listening() -> Iterator[Running]:
    yield from running("--listens")


PATHS = [(path, form) for form in FORMS for path in form.paths]


def rows_of(form: Form) -> list[Field]:
    return [*form.fields, *(Field(name, EXAMPLES[name]) for name in form.plain)]


def engine_of(path: str) -> str:
    endpoint = Endpoint(path)
    if endpoint.takes_form:
        return "listening"
    return "generating" if endpoint.generates else "pooling"


@pytest.mark.parametrize(("path", "form"), PATHS, ids=[path for path, _ in PATHS])
def test_what_arrives_is_what_the_table_says(request: pytest.FixtureRequest, path: str, form: Form) -> None:
    gateway, mock = request.getfixturevalue(engine_of(path))
    kind = {"content-type": "application/json" if form.is_json else FORM_TYPE}
    for row in rows_of(form):
        mock.reset()
        sent = body_of(form, row)
        answer = gateway.client.post(path, content=encoded(form, sent), headers=kind)
        what = f"{row.name}={row.value!r}: {answer.status_code} {answer.text[:300]}"
        arrived = mock.log()["requests"]
        if row.refused:
            assert answer.status_code == STATUS[row.refused][0], what
            assert (answer.headers["x-kvgate-reason"], arrived) == (row.refused, []), what
            continue
        assert len(arrived) == 1, what
        assert "x-kvgate-reason" not in answer.headers, what
        limit = int(answer.headers["x-kvgate-output-limit"])
        if form.is_json:
            assert arrived[0]["body"] == with_id(expected(sent, row, limit), arrived[0]["body"]), what
        else:  # of a form the journal has the hash; what `forward` makes of it the unit test reads
            read = request_of(path, form, sent)
            assert not isinstance(read, Refusal), what
            assert arrived[0]["sha256"] == hashlib.sha256(forward(read, limit)).hexdigest(), what


def with_id(wanted: dict[str, Any], arrived: dict[str, Any]) -> dict[str, Any]:
    """With the id that was written, which has to be one of ours."""
    ids = [name for name, value in wanted.items() if value is Written.ID]
    assert all(arrived[name].startswith("resp_") for name in ids)
    return wanted | {name: arrived[name] for name in ids}


def test_what_is_passed_on_arrives_as_it_came(generating: Running) -> None:
    """The mock answers them from its tokenizer, and keeps no journal of that: what it answers has to be right."""
    gateway, mock = generating
    mock.reset()
    counted = gateway.client.post("/tokenize", json=PASSED["/tokenize"]).json()
    assert counted["count"] == len(counted["token_strs"])
    assert "prompt" in gateway.client.post("/detokenize", json=PASSED["/detokenize"]).json()
    path = "/v1/messages/count_tokens"
    assert gateway.client.post(path, json=PASSED[path]).json()["input_tokens"] > 0
    assert gateway.state()["reserved"] == 0


@pytest.mark.parametrize("route", [route for route in ROUTES if route.way in (Way.OWN, Way.CLOSED)],
                         ids=lambda route: f"{route.method} {route.path}")  # fmt: skip
def test_no_other_route_leads_to_an_engine(generating: Running, route: Route) -> None:
    gateway, mock = generating
    mock.reset()
    answer = gateway.client.request(route.method, route.path, json={} if route.method == "POST" else None)
    stranger = gateway.client.request(route.method, route.path, headers={"authorization": ""})
    if route.way is Way.CLOSED:
        assert answer.status_code in (404, 405)
        assert stranger.status_code in (401, 404, 405)
    else:
        assert answer.status_code == 200
        assert stranger.status_code == (200 if route.public else 401)
    assert mock.log()["received"] == 0


def test_headers_pass_as_the_table_says(generating: Running) -> None:
    gateway, mock = generating
    mock.reset()
    secret = {"authorization": f"Bearer {gateway.key}", "x-data-parallel-rank": "0"}
    sent = {name: row[0] for name, row in HEADERS.items() if name != "x-api-key"} | secret
    form = FORMS[0]
    answer = gateway.client.post(form.paths[0], content=json.dumps(form.body), headers=sent)
    assert answer.status_code == 200, answer.text
    (record,) = mock.log()["requests"]
    arrived: dict[str, Any] = dict(record["headers"])
    for name, value in sent.items():
        assert (arrived.get(name) == value) == HEADERS[name][1], name
    assert answer.headers["x-request-id"] == sent["x-request-id"]
