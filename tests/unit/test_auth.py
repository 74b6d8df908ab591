"""API keys: who is let in."""

import re
from hashlib import sha256
from typing import Any

import pytest

from gateway.http.auth import Callers, Key, Keyring, TrustedHeader, anonymous, new_key

ANYBODY = anonymous("normal")


def key(secret: str, **more: object) -> Key:
    return Key(name=secret, class_="normal", digest=sha256(secret.encode()).digest(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("authorization", "api_key", "name"),
    [
        (b"Bearer one", None, "one"),
        (b"bearer  one ", None, "one"),
        (None, b"two", "two"),
        (b"Bearer one", b"two", "one"),
        (b"Bearer wrong", b"two", None),
        (b"Basic one", None, None),
        (b"Basic dTpw", b"two", "two"),
        (b"one", None, None),
        (b"Bearer", None, None),
        (b"Bearer ", b"", None),
        (b"Bearer \xff\xfe", None, None),
        (b"Bearer " + b"o" * 100_000, None, None),
        (None, None, None),
    ],
)
def test_a_key_is_found_by_its_secret(
    authorization: bytes | None, api_key: bytes | None, name: str | None
) -> None:
    found = Keyring([key("one"), key("two")], None).find(authorization, api_key, 0)
    assert (found.name if found else None) == name


def test_a_credential_of_unusual_length_is_not_even_hashed() -> None:
    ring = Keyring([key("o" * 512), key("o" * 513)], None)
    assert ring.find(None, b"o" * 512, 0) is not None
    assert ring.find(None, b"o" * 513, 0) is None


def test_a_key_ends_at_its_expiry() -> None:
    ring = Keyring([key("one", expires_ms=1_000)], None)
    assert ring.find(b"Bearer one", None, 999) is not None
    assert ring.find(b"Bearer one", None, 1_000) is None


def test_no_keys_let_nobody_in() -> None:
    ring = Keyring([], None)
    assert ring.find(None, None, 0) is None
    assert ring.find(b"Bearer ", None, 0) is None


def test_where_no_key_is_required_the_others_are_anonymous() -> None:
    ring = Keyring([key("one", expires_ms=10)], ANYBODY)
    assert ring.find(None, None, 0) is ANYBODY
    assert ring.find(b"Bearer wrong", None, 0) is ANYBODY
    assert ring.find(b"Bearer one", None, 10) is ANYBODY
    assert ring.find(b"Bearer one", None, 9) is not ANYBODY


def test_a_new_key_opens_its_own_entry() -> None:
    secret, digest = new_key()
    assert re.fullmatch(r"kvg_[a-z2-7]{32}", secret)
    ring = Keyring([Key(name="new", class_="normal", digest=bytes.fromhex(digest))], None)
    assert ring.find(b"Bearer " + secret.encode(), None, 0) is not None
    assert new_key()[0] != secret


def test_a_key_does_not_show_its_digest() -> None:
    assert "digest" not in repr(key("one"))


def test_replaced_keys_are_the_only_ones() -> None:
    ring = Keyring([key("one")], None)
    ring.replace([key("two")])
    assert ring.find(b"Bearer one", None, 0) is None
    assert ring.find(b"Bearer two", None, 0) is not None


# -- named from outside ------------------------------------------------------------------------------------------

HEADER = "x-consumer-username"


def asked(*headers: tuple[bytes, bytes], peer: str | None = "10.1.2.3") -> dict[str, Any]:
    return {"headers": list(headers), "client": peer and (peer, 1)}


def found_by(callers: Callers, scope: dict[str, Any], now_ms: int = 0) -> str | None:
    found = callers.find(scope, dict(scope["headers"]), now_ms)
    return found.name if found else None


def trusting(*networks: str) -> Callers:
    ring = Keyring([key("one"), Key("two", "normal")], None)
    return Callers(ring, TrustedHeader(HEADER, networks or ("10.0.0.0/8", "2001:db8::/32")))


def named(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(HEADER.encode(), value) for value in values]


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("10.0.0.0", "two"),
        ("10.255.255.255", "two"),
        ("11.0.0.0", None),
        ("9.255.255.255", None),
        ("::ffff:10.1.2.3", "two"),
        ("::ffff:11.1.2.3", None),
        ("2001:db8::1", "two"),
        ("2001:db9::1", None),
        ("fe80::1%eth0", None),
        ("", None),
        ("/run/a.sock", None),
        (None, None),
    ],
)
def test_a_header_is_believed_from_trusted_addresses_only(peer: str | None, name: str | None) -> None:
    assert found_by(trusting(), asked(*named(b"two"), peer=peer)) == name


def test_from_anybody_else_the_header_is_as_if_it_were_not_there() -> None:
    secret = (b"authorization", b"Bearer one")
    assert found_by(trusting(), asked(*named(b"two"), secret, peer="11.0.0.1")) == "one"


def test_the_header_decides_alone() -> None:
    secret = (b"authorization", b"Bearer one")
    assert found_by(trusting(), asked(*named(b"two"), secret)) == "two"
    assert found_by(trusting(), asked(*named(b"nobody"), secret)) is None
    assert found_by(trusting(), asked(*named(b""), secret)) is None
    assert found_by(trusting(), asked(secret)) == "one"


@pytest.mark.parametrize(
    "values", [(b"two", b"two"), (b"one", b"two"), (b"two,one",), (b"\xff",), (b" two",)]
)
def test_a_header_that_is_not_one_name(values: tuple[bytes, ...]) -> None:
    assert found_by(trusting(), asked(*named(*values))) is None


def test_no_header_is_trusted_where_none_is_configured() -> None:
    assert found_by(Callers(Keyring([key("one")], None)), asked(*named(b"one"))) is None


def test_who_is_named_has_an_expiry_too() -> None:
    ring = Keyring([Key("two", "normal", expires_ms=1_000)], None)
    callers = Callers(ring, TrustedHeader(HEADER, ["10.0.0.0/8"]))
    assert found_by(callers, asked(*named(b"two")), 999) == "two"
    assert found_by(callers, asked(*named(b"two")), 1_000) is None


def test_a_key_without_a_secret_has_none_that_could_be_sent() -> None:
    ring = Keyring([Key("two", "normal"), Key("three", "normal")], None)
    for secret in (b"", b"two", b"\x00"):
        assert ring.find(b"Bearer " + secret, secret, 0) is None
    assert ring.named("two", 0)
    assert ring.named("three", 0)


class Words:
    """Tokens that are words: `a.b.NAME` names NAME."""

    def __init__(self) -> None:
        self.read = 0

    def name_in(self, token: bytes, now_ms: int) -> str | None:
        self.read += 1
        first, _, name = token.split(b".")
        return name.decode() if first == b"good" else None


@pytest.mark.parametrize(
    ("headers", "name", "read"),
    [
        ([(b"authorization", b"Bearer good.b.two")], "two", 1),
        ([(b"authorization", b"Bearer good.b.nobody")], None, 1),
        ([(b"authorization", b"Bearer bad.b.two")], None, 1),
        ([(b"authorization", b"Bearer one")], "one", 0),
        ([(b"authorization", b"Bearer a.b.c")], "a.b.c", 0),
        ([(b"authorization", b"Basic good.b.two")], None, 0),
        ([(b"x-api-key", b"good.b.two")], None, 0),
        ([(b"authorization", b"Bearer good.b.two.c")], None, 0),
        ([], None, 0),
    ],
)
def test_a_token_is_read_where_no_key_has_that_secret(
    headers: list[tuple[bytes, bytes]], name: str | None, read: int
) -> None:
    words = Words()
    ring = Keyring([key("one"), key("a.b.c"), Key("two", "normal")], None)
    assert found_by(Callers(ring, tokens=words), asked(*headers)) == name
    assert words.read == read


def test_where_no_key_is_required_an_unknown_name_is_anonymous() -> None:
    callers = Callers(Keyring([key("one")], ANYBODY), TrustedHeader(HEADER, ["10.0.0.0/8"]), Words())
    assert found_by(callers, asked(*named(b"nobody"))) == ANYBODY.name
    assert found_by(callers, asked((b"authorization", b"Bearer bad.b.one"))) == ANYBODY.name
