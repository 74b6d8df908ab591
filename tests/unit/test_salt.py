"""What a key's salt makes of a body."""

import json

import pytest

from gateway.core.outcomes import Refusal
from gateway.core.request import Endpoint, GenerationRequest, forward, parse

MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
BODIES = {
    Endpoint.CHAT: MESSAGES,
    Endpoint.MESSAGES: MESSAGES,
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "hi", "max_tokens": 5},
    Endpoint.RESPONSES: {"model": "m", "input": "hi"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"},
}


def forwarded(endpoint: Endpoint, salt: str, **fields: object) -> dict[str, object]:
    request = parse(endpoint, json.dumps({**BODIES[endpoint], **fields}).encode(), 1)
    assert isinstance(request, GenerationRequest), request
    found = json.loads(forward(request, 5, "id", salt=salt))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("endpoint", BODIES)
def test_it_is_written_and_nothing_else(endpoint: Endpoint) -> None:
    without, salted = forwarded(endpoint, ""), forwarded(endpoint, "pepper")
    salt = salted.pop("cache_salt")
    assert isinstance(salt, str)
    assert len(salt) == 64
    assert "pepper" not in salt
    assert salted == without
    assert forwarded(endpoint, "pepper")["cache_salt"] == salt
    assert forwarded(endpoint, "salt")["cache_salt"] != salt


def test_a_client_cannot_write_that_of_another_key() -> None:
    own = forwarded(Endpoint.CHAT, "pepper")["cache_salt"]
    mine, again, other = (
        forwarded(Endpoint.CHAT, "salt", cache_salt=s)["cache_salt"] for s in ("a", "a", own)
    )
    assert mine == again
    assert len({own, mine, other, forwarded(Endpoint.CHAT, "salt")["cache_salt"]}) == 4
    assert forwarded(Endpoint.CHAT, "salt", cache_salt=None) == forwarded(Endpoint.CHAT, "salt")


@pytest.mark.parametrize("given", ["", 1, [], {}])
def test_what_no_engine_takes_is_left_to_it(given: object) -> None:
    assert forwarded(Endpoint.CHAT, "pepper", cache_salt=given)["cache_salt"] == given


def test_it_is_no_way_around_a_field_that_is_there_twice() -> None:
    body = b'{"model":"m","prompt":"hi","cache_salt":"a","cache_salt":"b"}'
    assert isinstance(parse(Endpoint.COMPLETIONS, body, 1), Refusal)
