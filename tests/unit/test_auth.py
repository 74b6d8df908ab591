"""API keys: who is let in."""

import re
from hashlib import sha256

import pytest

from gateway.http.auth import Key, Keyring, anonymous, new_key

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
