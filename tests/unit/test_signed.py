"""Tokens that name a caller: what is accepted, and everything that is not."""

import base64
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from gateway.http import signed
from gateway.http.signed import LEEWAY_SECONDS, PublicKey, Rules, SignedTokens, read_jwks, read_public_key

ISSUER, AUDIENCE = "https://login.example", "kvgate"
ALL = ("RS256", "PS256", "ES256", "ES384", "EdDSA")
PLAIN: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "sub": "team-a"}


@cache
def private(kind: str) -> Any:
    """Made once: an RSA key takes a tenth of a second."""
    match kind:
        case "PS256":
            return private("RS256")
        case "RS256" | "RS256 other":
            return rsa.generate_private_key(65537, 2048)
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "ES384":
            return ec.generate_private_key(ec.SECP384R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
    raise AssertionError(kind)


def pem(kind: str) -> str:
    key = private(kind).public_key()
    return str(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def jwk(kind: str, **fields: Any) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name(kind.split(maxsplit=1)[0])
    return {**algorithm.to_jwk(private(kind).public_key(), as_dict=True), **fields}


def jwks(*rows: dict[str, Any]) -> str:
    return json.dumps({"keys": rows})


def now() -> int:
    return int(time.time())


@dataclass(frozen=True)
class Now:
    """So many seconds from when it is told."""

    seconds: float


def told(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: now() + value.seconds if isinstance(value, Now) else value for name, value in changes.items()
    }


def token(kind: str = "RS256", header: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """A change to None takes a claim out."""
    claims = {**PLAIN, "exp": now() + 300, **changes}
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, private(kind), kind.split(maxsplit=1)[0], header).encode()


def tokens(
    *keys: PublicKey, algorithms: tuple[str, ...] = ALL, claim: str = "sub", text: str | None = None
) -> SignedTokens:
    found = keys or read_public_key(text or pem("RS256"))
    return SignedTokens(Rules(algorithms, ISSUER, AUDIENCE, claim), found)


def name_in(checked: SignedTokens, raw: bytes) -> str | None:
    return checked.name_in(raw, now() * 1000)


# -- what is accepted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_a_signature_of_each_kind(kind: str) -> None:
    assert name_in(tokens(text=pem(kind)), token(kind)) == "team-a"
    assert name_in(tokens(*read_jwks(jwks(jwk(kind)))), token(kind)) == "team-a"


def test_the_claim_that_is_asked_for() -> None:
    assert name_in(tokens(claim="client"), token(client="other")) == "other"
    assert name_in(tokens(claim="client"), token()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": Now(-3)},
        {"nbf": Now(3)},
        {"iat": Now(3)},
        {"aud": ["other", AUDIENCE]},
        {"exp": Now(300.5)},
        {"more": {"nested": [1, 2]}},
    ],
    ids=str,
)
def test_what_is_still_right(changes: dict[str, Any]) -> None:
    assert name_in(tokens(), token(**told(changes))) == "team-a"


# -- what is not -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": None},
        {"iss": None},
        {"aud": None},
        {"sub": None},
        {"exp": Now(-LEEWAY_SECONDS - 1)},
        {"exp": "soon"},
        {"exp": True},
        {"exp": [9999999999]},
        {"exp": {}},
        {"exp": float("inf")},
        {"exp": float("nan")},
        {"exp": -1},
        {"nbf": Now(60)},
        {"nbf": "x"},
        {"iat": Now(60)},
        {"iss": "https://login.example/"},
        {"iss": [ISSUER]},
        {"aud": "kvgate2"},
        {"aud": []},
        {"aud": {"kvgate": 1}},
        {"sub": 5},
        {"sub": ["team-a"]},
        {"sub": {}},
    ],
    ids=str,
)
def test_a_claim_that_is_wrong(changes: dict[str, Any]) -> None:
    header = {"alg": "RS256", "typ": "JWT"}
    claims = {
        name: value
        for name, value in ({**PLAIN, "exp": now() + 300} | told(changes)).items()
        if value is not None
    }
    assert name_in(tokens(), by_hand(header, claims)) is None


def by_hand(header: dict[str, Any], claims: Any, kind: str = "RS256") -> bytes:
    """Signed whatever it says, where a library would refuse to."""
    signed_part = b".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
    algorithm = jwt.get_algorithm_by_name(kind)
    return signed_part + b"." + _base64(algorithm.sign(signed_part, private(kind)))


def _base64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def test_made_by_hand_is_right_too() -> None:
    assert name_in(tokens(), by_hand({"alg": "RS256"}, {**PLAIN, "exp": now() + 300})) == "team-a"


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none"},
        {"alg": "None"},
        {"alg": "HS256"},
        {"alg": "rs256"},
        {"alg": "RS512"},
        {"alg": ["RS256"]},
        {"alg": None},
        {},
        {"alg": "ES256"},
        {"alg": "RS256", "crit": ["exp"]},
        {"alg": "RS256", "crit": ["b64"], "b64": False},
        {"alg": "RS256", "kid": 5},
        {"alg": "RS256", "kid": {}},
    ],
    ids=str,
)
def test_a_header_that_is_wrong(header: dict[str, Any]) -> None:
    assert name_in(tokens(), by_hand(header, {**PLAIN, "exp": now() + 300})) is None


@pytest.mark.parametrize("secret", ["pem", "der", "empty"])
def test_a_public_key_is_no_secret(secret: str) -> None:
    """The confusion of algorithms: HMAC with what everybody knows."""
    public = private("RS256").public_key()
    known = {
        "pem": pem("RS256").encode(),
        "der": public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        "empty": b"",
    }[secret]
    claims = json.dumps({**PLAIN, "exp": now() + 300}).encode()
    for header in ({"alg": "HS256", "typ": "JWT"}, {"alg": "RS256", "typ": "JWT"}):
        part = _base64(json.dumps(header).encode()) + b"." + _base64(claims)
        forged = part + b"." + _base64(hmac.new(known, part, hashlib.sha256).digest())
        assert name_in(tokens(), forged) is None
        assert name_in(tokens(), part + b".") is None


def test_another_ones_key() -> None:
    assert name_in(tokens(), token("RS256 other")) is None
    assert name_in(tokens(text=pem("ES256")), token("RS256")) is None
    assert name_in(tokens(text=pem("RS256")), token("ES256")) is None


def test_an_algorithm_that_is_not_allowed() -> None:
    assert name_in(tokens(algorithms=("PS256",)), token("RS256")) is None
    assert name_in(tokens(algorithms=("PS256",)), token("PS256")) == "team-a"


def test_every_byte_counts() -> None:
    good = token()
    checked = tokens()
    for at in range(0, good.rindex(b"."), 7):
        other = b"A" if good[at : at + 1] != b"A" else b"B"
        assert name_in(checked, good[:at] + other + good[at + 1 :]) is None


@given(st.binary(max_size=300))
def test_any_bytes(raw: bytes) -> None:
    assert name_in(tokens(), raw) is None
    assert name_in(tokens(), b"eyJhbGciOiJSUzI1NiJ9." + raw + b".AAAA") is None


def test_nested_without_end_and_too_long() -> None:
    deep = b"[" * 3000 + b"]" * 3000
    assert name_in(tokens(), _base64(deep) + b"." + _base64(deep) + b".AAAA") is None
    long = token(filling="x" * 8192)
    assert name_in(tokens(), long) is None
    assert name_in(tokens(), token(filling="x" * 3000)) == "team-a"


# -- which key ---------------------------------------------------------------------------------------------------


def test_the_tokens_word_chooses_among_keys() -> None:
    found = read_jwks(jwks(jwk("RS256", kid="one"), jwk("RS256 other", kid="two"), jwk("ES256", kid="three")))
    checked = tokens(*found)
    assert name_in(checked, token("RS256", {"kid": "one"})) == "team-a"
    assert name_in(checked, token("RS256 other", {"kid": "two"})) == "team-a"
    assert name_in(checked, token("RS256", {"kid": "two"})) is None
    assert name_in(checked, token("RS256", {"kid": "nobody"})) is None
    assert name_in(checked, token("RS256")) is None, "either may be meant"
    assert name_in(checked, token("ES256")) == "team-a", "only one can be meant"


def test_a_key_says_what_it_is_for() -> None:
    found = read_jwks(jwks(jwk("RS256", alg="PS256"), jwk("RS256 other", use="enc")))
    assert len(found) == 1
    assert name_in(tokens(*found), token("RS256")) is None
    assert name_in(tokens(*found), token("PS256")) == "team-a"


def small_rsa() -> dict[str, Any]:
    key = rsa.generate_private_key(65537, 1024).public_key()
    return dict(jwt.get_algorithm_by_name("RS256").to_jwk(key, as_dict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON Web Key Set"),
        ("[]", "is no JSON Web Key Set"),
        ('{"keys": 5}', "is no JSON Web Key Set"),
        ('{"keys": [5]}', "is no JSON Web Key Set"),
        ("{}", "is no JSON Web Key Set"),
        (jwks(), "has 0 keys"),
        (jwks(*[{"kty": "EC"}] * 65), "has 65 keys"),
        (jwks(jwk("RS256", use="enc")), "has 0 keys"),
        (jwks(jwk("RS256"), {"kty": "oct", "k": "c2VjcmV0"}), r"keys\[1\] is a secret"),
        (jwks({**jwk("RS256"), "d": "AQAB"}), r"keys\[0\] is a secret"),
        (jwks({"kty": "RSA"}), r"keys\[0\] is no public key"),
        (jwks({"kty": "nope"}), r"keys\[0\] is no public key"),
        (jwks(jwk("RS256", use="enc"), {"kty": "nope"}), r"keys\[1\] is no public key"),
        (jwks(jwk("RS256", alg="none")), r"keys\[0\] is no public key"),
        ("[" * 5_000, "is no JSON Web Key Set"),
        (jwks({"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"}), r"keys\[0\] is no public key"),
        (jwks(jwk("RS256", alg="ES256")), "no known signature|is no public key"),
        (jwks(small_rsa()), "1024 bits"),
    ],
    ids=lambda text: text[:40],
)
def test_a_set_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as wrong:
        read_jwks(text)
    assert "c2VjcmV0" not in str(wrong.value)


def test_a_key_of_an_unknown_kind_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """An issuer that begins to use one must not lock out the tokens of the others."""
    unknown = {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA", "kid": "new"}
    found = read_jwks(jwks(unknown, jwk("RS256", kid="one"), small_rsa()))
    assert [key.id for key in found] == ["one"]
    assert name_in(tokens(*found), token("RS256", {"kid": "one"})) == "team-a"
    assert "keys[0] is no public key that can be read" in caplog.text
    assert "keys[2] has an RSA key of 1024 bits" in caplog.text


def test_a_file_that_is_no_public_key() -> None:
    secret = private("ES256").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    for text in ("", "x", secret, pem("ES256")[:60], "\x00é"):
        with pytest.raises(ValueError, match="is no public key"):
            read_public_key(text)


def test_equal_files_are_equal_keys() -> None:
    """So that a file that was only touched changes nothing."""
    text = jwks(jwk("RS256", kid="one"))
    assert read_jwks(text) == read_jwks(text)
    assert read_jwks(text) != read_jwks(jwks(jwk("RS256 other", kid="one")))
    assert read_public_key(pem("RS256")) != read_public_key(pem("RS256 other"))


# -- what is remembered ------------------------------------------------------------------------------------------


class Counting(SignedTokens):
    checks = 0

    def _claims(self, token: bytes) -> dict[str, Any]:
        self.checks += 1
        return super()._claims(token)


@pytest.fixture
def counting() -> Counting:
    return Counting(Rules(ALL, ISSUER, AUDIENCE, "sub"), read_public_key(pem("RS256")))


def test_a_valid_token_is_checked_once_until_it_ends(counting: Counting) -> None:
    exp = now() + 300
    good = token(exp=exp)
    for _ in range(3):
        assert name_in(counting, good) == "team-a"
    ends_ms = (exp + LEEWAY_SECONDS) * 1000
    assert counting.name_in(good, ends_ms - 1) == "team-a"
    assert counting.checks == 1
    assert counting.name_in(good, ends_ms) is None
    assert counting.name_in(good, ends_ms) is None


def test_a_wrong_token_is_never_remembered(counting: Counting) -> None:
    bad = token("RS256 other")
    for _ in range(3):
        assert name_in(counting, bad) is None
    assert counting.checks == 3


def test_what_is_remembered_is_bounded(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed, "REMEMBERED_MAX", 2)
    given_ = [token(sub=f"team-{number}") for number in range(3)]
    for number, raw in enumerate(given_):
        assert name_in(counting, raw) == f"team-{number}"
    assert name_in(counting, given_[2]) == "team-2"
    assert counting.checks == 3
    assert name_in(counting, given_[0]) == "team-0"
    assert counting.checks == 4, "the oldest was forgotten"
