"""A call may make itself less urgent than its key, and never more."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.outcomes import Code, Refusal
from gateway.core.request import INTEGER_MAX, Endpoint, GenerationRequest, forward, parse
from gateway.core.urgency import DEADLINE_MS_MAX, YIELDING, lowered_class, read_deadline

CLASSES = ("high", "normal", "low")


@pytest.mark.parametrize(
    ("own", "asked", "priority", "got"),
    [
        ("normal", None, 0, "normal"),
        ("normal", b"low", 0, "low"),
        ("normal", b" low ", 0, "low"),
        ("normal", b"high", 0, "normal"),
        ("normal", None, 1, "low"),
        ("high", None, 1, "normal"),
        ("high", None, 9, "low"),
        ("normal", None, -5, "normal"),
        ("high", b"normal", 2, "low"),
        ("high", b"low", 1, "low"),
    ],
)
def test_the_lower_of_what_is_asked(own: str, asked: bytes | None, priority: int, got: str) -> None:
    assert lowered_class(own, CLASSES, asked, priority) == got


@given(st.sampled_from(CLASSES), st.sampled_from([None, *CLASSES]), st.integers())
def test_nothing_raises_a_call(own: str, asked: str | None, priority: int) -> None:
    got = lowered_class(own, CLASSES, asked and asked.encode(), priority)
    assert isinstance(got, str)
    assert not isinstance(got, Refusal)
    assert CLASSES.index(got) >= CLASSES.index(own)


def test_an_unknown_class_is_named() -> None:
    refusal = lowered_class("normal", CLASSES, b"urgent\xff", 0)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "x-kvgate-priority")
    assert refusal.message == "`x-kvgate-priority` is 'urgent�'; the classes are high, normal, low."


@pytest.mark.parametrize(
    ("raw", "got"), [(None, None), (b"1", 1), (b" 250 ", 250), (b"86400000", DEADLINE_MS_MAX)]
)
def test_a_deadline(raw: bytes | None, got: int | None) -> None:
    assert read_deadline(raw) == got


@pytest.mark.parametrize(
    "raw", [b"", b"0", b"-1", b"1.5", b"1e3", b"86400001", b"9" * 50, b"\xff", "٣".encode()]
)
def test_a_bad_deadline_is_named(raw: bytes) -> None:
    refusal = read_deadline(raw)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "x-kvgate-deadline-ms")
    assert "from 1 to 86400000, got '" in refusal.message


OWN = st.sampled_from([{}, {"priority": None}]) | st.fixed_dictionaries(
    {"priority": st.integers(-INTEGER_MAX, INTEGER_MAX)}
)


def forwarded(own: dict[str, int | None], yields: bool) -> dict[str, object]:
    body = json.dumps({"model": "m", **own, "prompt": "hi", "max_tokens": 5}).encode()
    request = parse(Endpoint.COMPLETIONS, body, 1)
    assert isinstance(request, GenerationRequest)
    found = json.loads(forward(request, 5, yields=yields))
    assert isinstance(found, dict)
    return found


@given(OWN, OWN)
def test_who_yields_comes_after_all_who_do_not_whatever_clients_say(
    own: dict[str, int | None], other: dict[str, int | None]
) -> None:
    """An engine takes 64 bits; among those that yield the clients' own numbers decide."""
    yielding, ahead = forwarded(own, True), forwarded(other, False)
    assert ahead == {"model": "m", "prompt": "hi", "max_tokens": 5} | other
    first, second = ahead.get("priority") or 0, yielding["priority"]
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert first < second < 2**63
    assert second - (own.get("priority") or 0) == YIELDING
    assert yielding | {"priority": None} == forwarded({"priority": None} | own, False) | {"priority": None}
