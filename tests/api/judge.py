"""What really becomes of a row: the demand that its body has, and the body that an engine gets."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.core.estimate import Demand, prompt_tokens
from gateway.core.outcomes import Refusal
from gateway.core.prompt import PromptTokens
from gateway.core.request import Endpoint, GenerationRequest, forward, parse
from gateway.core.route import FleetShape, KeyLimits, PoolShape, route
from tests.api.rows import Counts, Field, Form, Written
from tests.api.table import CONTEXT

N_MAX = 16
NEW_ID = "resp_of_a_test"
FLEET = FleetShape(
    name="demo",
    model="demo",
    names=frozenset({"demo"}),
    default_output_tokens=64,
    max_output_tokens=None,
    token_factor=1.0,
    exact_above=0.7,
    learns=False,
    speculative_tokens=0,
    share_prompt_of_n=False,
    pools=(PoolShape("only", None, CONTEXT, 16, 4096, 256, CONTEXT),),
    lanes={"only": ("only",)},
    complete=True,
)


def body_of(form: Form, row: Field) -> dict[str, Any]:
    return _base(form, row) | {row.name: row.value}


def _base(form: Form, row: Field) -> dict[str, Any]:
    return {name: value for name, value in form.body.items() if name not in row.without} | dict(row.beside)


def request_of(path: str, body: Mapping[str, Any]) -> GenerationRequest | Refusal:
    return parse(Endpoint(path), json.dumps(body).encode(), N_MAX)


def demand_of(request: GenerationRequest) -> Demand | Refusal:
    """With a token for every byte of text."""
    counts = [
        prompt_tokens(prompt, 0 if isinstance(prompt, PromptTokens) else prompt.utf8_bytes, 1.0)
        for prompt in request.prompts
    ]
    return route(FLEET, request, request.prompt_tokens(counts), KeyLimits(None, None, None))


def judged(path: str, body: Mapping[str, Any]) -> tuple[GenerationRequest, Demand] | Refusal:
    request = request_of(path, body)
    if isinstance(request, Refusal):
        return request
    demand = demand_of(request)
    return demand if isinstance(demand, Refusal) else (request, demand)


def counted(path: str, form: Form, row: Field) -> set[Counts]:
    """What the row's field changes, beside a usual body."""
    usual = judged(path, form.body if row.without else _base(form, row))
    with_it = judged(path, body_of(form, row))
    assert not isinstance(usual, Refusal), usual
    assert not isinstance(with_it, Refusal), with_it
    (before_request, before), (request, after) = usual, with_it
    found = {
        Counts.PROMPT: after.prompt_tokens > before.prompt_tokens,
        Counts.CUT: after.prompt_tokens < before.prompt_tokens,
        Counts.SEQUENCES: after.sequences != before.sequences,
        Counts.OUTPUT: after.output_tokens != before.output_tokens,
        Counts.CLASS: request.priority > before_request.priority,
    }
    return {counts for counts, changed in found.items() if changed}


def expected(sent: Mapping[str, Any], row: Field, limit: int) -> dict[str, Any]:
    """The body that an engine has to get.  An id of ours stands in it as `Written.ID`."""
    written = {
        name: limit if value is Written.LIMIT else value
        for name, value in row.writes.items()
    }  # fmt: skip
    both = {"max_tokens", "max_completion_tokens"} & sent.keys()
    if Written.LIMIT in row.writes.values() and len(both) > 1:
        written |= dict.fromkeys(both, limit)
    return {**sent, **written}


def forwarded(path: str, sent: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """What is sent on, and the output limit."""
    found = judged(path, sent)
    assert not isinstance(found, Refusal), found
    request, demand = found
    body: dict[str, Any] = json.loads(forward(request, demand.output_tokens, NEW_ID))
    return body, demand.output_tokens
