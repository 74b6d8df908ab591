"""What makes two calls the same, and what a client may give as its `Idempotency-Key`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.identity import (
    IDEMPOTENCY_KEY_CHARS_MAX,
    INLINE_BYTES_MAX,
    Identity,
    hashed_idempotency_key,
    read_idempotency_key,
)
from gateway.core.outcomes import Code, Refusal

ROUTE = "/v1/completions"
NAMES = st.from_regex(r"\A[A-Za-z0-9._@-]{1,8}\Z")
TRIPLES = st.tuples(NAMES, st.sampled_from((ROUTE, "/v1/chat/completions")), st.binary(max_size=40))


def test_it_is_the_same_on_every_gateway() -> None:
    """Of two versions too, side by side on one store: a changed fingerprint needs another layout."""
    assert Identity("team-a", ROUTE, b'{"prompt":"hi"}').fingerprint() == "13ba6c7e53a590a5"
    assert hashed_idempotency_key("team-a", b"order-1") == "e096135acc5464b1"


@given(TRIPLES, TRIPLES)
def test_equal_fingerprints_are_of_equal_calls(
    one: tuple[str, str, bytes], other: tuple[str, str, bytes]
) -> None:
    assert (Identity(*one).fingerprint() == Identity(*other).fingerprint()) == (one == other)


def test_a_long_body_is_left_to_whoever_has_time() -> None:
    short, long = Identity("k", ROUTE, b"x"), Identity("k", ROUTE, bytes(INLINE_BYTES_MAX + 1))
    assert short.is_quick
    assert not long.is_quick
    assert long.known == ""
    assert long.fingerprint() == long.known
    assert long.is_quick


@pytest.mark.parametrize(
    ("raw", "value"),
    [(None, b""), (b"a", b"a"), (b" order 1\t", b"order 1"), (b"~" * IDEMPOTENCY_KEY_CHARS_MAX,) * 2],
)
def test_an_idempotency_key(raw: bytes | None, value: bytes) -> None:
    assert read_idempotency_key(raw) == value


@pytest.mark.parametrize(
    "raw", [b"", b" ", b"~" * (IDEMPOTENCY_KEY_CHARS_MAX + 1), b"a\x00b", b"\x7f", "é".encode()]
)
def test_an_idempotency_key_that_is_none(raw: bytes) -> None:
    refusal = read_idempotency_key(raw)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "Idempotency-Key")
