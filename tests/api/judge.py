"""What really becomes of a row: the demand that its body has, and the body that an engine gets."""

import json
from collections.abc import Mapping
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from gateway.core.audio import parse_audio
from gateway.core.estimate import Demand, prompt_tokens
from gateway.core.media import USUAL
from gateway.core.outcomes import Refusal
from gateway.core.prompt import PromptTokens
from gateway.core.request import Endpoint, GenerationRequest, forward, parse
from gateway.core.route import FleetShape, KeyLimits, PoolShape, route
from tests.api.rows import Counts, Field, Form, Written
from tests.api.table import CONTEXT

N_MAX = 16
NEW_ID = "resp_of_a_test"
BOUNDARY = "a-boundary-of-the-tests"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
FLEET = FleetShape(
    name="demo",
    model="demo",
    names=frozenset({"demo"}),
    default_output_tokens=64,
    max_output_tokens=None,
    token_factor=1.0,
    speculative_tokens=0,
    share_prompt_of_n=False,
    pools=(PoolShape("only", None, CONTEXT, 16, 4096, 256, CONTEXT),),
    lanes={"only": ("only",)},
)


def body_of(form: Form, row: Field) -> dict[str, Any]:
    return _base(form, row) | {row.name: row.value}


def _base(form: Form, row: Field) -> dict[str, Any]:
    return {name: value for name, value in form.body.items() if name not in row.without} | dict(row.beside)


def encoded(form: Form, body: Mapping[str, Any]) -> bytes:
    if form.is_json:
        return json.dumps(body).encode()
    return b"".join([*(_part(name, value) for name, value in body.items()), f"--{BOUNDARY}--\r\n".encode()])


def _part(name: str, value: Any) -> bytes:
    content = (
        value
        if isinstance(value, bytes)
        else (value if isinstance(value, str) else json.dumps(value)).encode()
    )
    file = '; filename="a.wav"\r\ncontent-type: audio/wav' if isinstance(value, bytes) else ""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def decoded(form: Form, raw: bytes) -> dict[str, Any]:
    """By another reader than the gateway's."""
    if form.is_json:
        found: dict[str, Any] = json.loads(raw)
        return found
    message = BytesParser(policy=HTTP).parsebytes(f"content-type: {FORM_TYPE}\r\n\r\n".encode() + raw)
    parts = [
        (str(part.get_param("name", header="content-disposition")), part) for part in message.iter_parts()
    ]
    return {
        name: part.get_payload(decode=True) if part.get_filename() else part.get_payload()
        for name, part in parts
    }


def request_of(path: str, form: Form, body: Mapping[str, Any]) -> GenerationRequest | Refusal:
    raw = encoded(form, body)
    if form.is_json:
        return parse(Endpoint(path), raw, N_MAX)
    return parse_audio(Endpoint(path), FORM_TYPE.encode(), raw, N_MAX)


def judged(path: str, form: Form, body: Mapping[str, Any]) -> tuple[GenerationRequest, Demand] | Refusal:
    """With a token for every byte of text."""
    read = request_of(path, form, body)
    if isinstance(read, Refusal):
        return read
    refusal = read.not_taken(USUAL)
    if refusal:
        return refusal
    request = read.by_rule(USUAL)
    counts = [
        prompt_tokens(prompt, 0 if isinstance(prompt, PromptTokens) else prompt.utf8_bytes, 1.0)
        for prompt in request.prompts
    ]
    demand = route(FLEET, request, request.prompt_tokens(counts), KeyLimits())
    return demand if isinstance(demand, Refusal) else (request, demand)


def counted(path: str, form: Form, row: Field) -> set[Counts]:
    """What the row's field changes, beside a usual body."""
    usual = judged(path, form, _base(form, row))
    with_it = judged(path, form, body_of(form, row))
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
    written = {name: limit if value is Written.LIMIT else value for name, value in row.writes.items()}
    both = {"max_tokens", "max_completion_tokens"} & sent.keys()
    if Written.LIMIT in row.writes.values() and len(both) > 1:  # the engine may read either
        written |= dict.fromkeys(both, limit)
    return {**sent, **written}


def forwarded(path: str, form: Form, sent: Mapping[str, Any]) -> tuple[bytes, int]:
    """What is sent on, and the output limit."""
    found = judged(path, form, sent)
    assert not isinstance(found, Refusal), found
    request, demand = found
    return forward(request, demand.output_tokens, NEW_ID), demand.output_tokens
