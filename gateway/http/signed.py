"""Callers named by a claim of a signed token (JWT, RFC 7519).

PyJWT checks them; it is an extra, and imported only here, where tokens are configured.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jwt.types import Options

log = logging.getLogger("kvgate.keys")

TOKEN_BYTES_MAX = 8192
"""Longer ones are wrong without being looked at."""
LEEWAY_SECONDS = 10
"""By which clocks of issuers may differ from ours."""
REMEMBERED_MAX = 4096
"""Valid tokens whose signature is not checked again: that takes 0.1 ms."""
KEYS_MAX = 64
RSA_BITS_MIN = 2048
MISSING = "needs PyJWT: pip install 'kvgate[jwt]'"
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_OF_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})


@dataclass(frozen=True, slots=True)
class Rules:
    """What a token has to be."""

    algorithms: Sequence[str]
    """Asymmetric ones only."""
    issuer: str
    audience: str
    claim: str
    """Whose value is the name of a key."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    id: str | None
    """None = signs whatever a token says of its key."""
    key: Any = field(compare=False)
    algorithms: frozenset[str]
    text: str = field(repr=False)
    """What it was made from."""


def read_jwks(text: str) -> tuple[PublicKey, ...]:
    """The signing keys of a JSON Web Key Set (RFC 7517).  Raises ValueError, with a text fit for logs; ImportError.

    A key of a kind that is not known here is left out (section 5): an issuer may begin to use one beside the others.
    """
    try:
        listed = json.loads(text)["keys"]
        found = [(number, row) for number, row in enumerate(listed) if row.get("use", "sig") == "sig"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("is no JSON Web Key Set") from None
    if not 1 <= len(found) <= KEYS_MAX:
        raise ValueError(f"has {len(found)} keys for signatures, 1 to {KEYS_MAX} are needed")
    keys, problems = [], []
    for number, row in found:
        if row.get("kty") == "oct" or "d" in row:
            raise ValueError(f"keys[{number}] is a secret: only public keys belong there")
        try:
            keys.append(_read_jwk(row))
        except ValueError as error:
            problems.append(f"keys[{number}] {error}")
    if not keys:
        raise ValueError(problems[0])
    for problem in problems:
        log.warning("%s in the JSON Web Key Set, and is left out", problem)
    return tuple(keys)


def _read_jwk(row: dict[str, Any]) -> PublicKey:
    """Raises ValueError."""
    import jwt  # noqa: PLC0415 - an extra

    try:
        key = jwt.PyJWK.from_dict(row).key
    except (jwt.PyJWTError, ValueError, TypeError, NotImplementedError):
        raise ValueError("is no public key that can be read") from None
    return _checked(key, row.get("kid"), row.get("alg"), json.dumps(row, sort_keys=True))


def read_public_key(text: str) -> tuple[PublicKey, ...]:
    """One key in PEM.  Raises ValueError, with a text fit for logs; ImportError."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is no public key (PEM, `BEGIN PUBLIC KEY`)") from None
    return (_checked(key, None, None, text),)


def _checked(key: Any, id_: object, algorithm: object, text: str) -> PublicKey:
    fitting = _algorithms_of(key)
    if algorithm is not None:
        fitting &= {str(algorithm)}
    if not fitting:
        raise ValueError("has a key that no known signature is made with")
    return PublicKey(None if id_ is None else str(id_), key, fitting, text)


def _algorithms_of(key: Any) -> frozenset[str]:
    """A key is used for its own kind only, whatever a token says."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa  # noqa: PLC0415 - an extra

    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < RSA_BITS_MIN:
            raise ValueError(f"has an RSA key of {key.key_size} bits, {RSA_BITS_MIN} are needed")
        return _OF_RSA
    if isinstance(key, ec.EllipticCurvePublicKey):
        return frozenset({_CURVES[key.curve.name]} if key.curve.name in _CURVES else ())
    return frozenset({"EdDSA"} if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey) else ())


class SignedTokens:
    """Implements `Tokens`, with one set of public keys."""

    def __init__(self, rules: Rules, keys: Sequence[PublicKey]) -> None:
        """Raises ImportError."""
        import jwt  # noqa: PLC0415 - an extra

        self._jwt = jwt
        self._rules = rules
        self._keys = keys
        self._remembered: dict[bytes, tuple[str, int]] = {}
        """Name and last millisecond of valid tokens by their SHA-256; the oldest first."""

    def name_in(self, token: bytes, now_ms: int) -> str | None:
        if len(token) > TOKEN_BYTES_MAX:
            return None
        digest = hashlib.sha256(token).digest()
        known = self._remembered.get(digest)
        if known and now_ms < known[1]:
            return known[0]
        claims = self._claims(token)
        name = claims.get(self._rules.claim)
        if not isinstance(name, str):
            return None
        until_ms = (int(claims["exp"]) + LEEWAY_SECONDS) * 1000
        if now_ms >= until_ms:
            return None
        self._remember(digest, name, until_ms)
        return name

    def _claims(self, token: bytes) -> dict[str, Any]:
        """Nothing where anything is wrong with the token."""
        rules = self._rules
        options: Options = {"require": ["exp", "iss", "aud", rules.claim]}
        try:
            header = self._jwt.get_unverified_header(token)
            key = self._key_for(header)
            if key is None:
                return {}
            return self._jwt.decode(
                token,
                key.key,
                algorithms=[header["alg"]],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=LEEWAY_SECONDS,
                options=options,
            )
        except (self._jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            return {}

    def _key_for(self, header: dict[str, Any]) -> PublicKey | None:
        """The only key that may have signed it; a token that needs more than we understand has none (`crit`)."""
        algorithm, id_ = header.get("alg"), header.get("kid")
        if algorithm not in self._rules.algorithms or "crit" in header:
            return None
        fitting = [
            key
            for key in self._keys
            if algorithm in key.algorithms and (id_ is None or key.id is None or key.id == id_)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _remember(self, digest: bytes, name: str, until_ms: int) -> None:
        self._remembered.pop(digest, None)
        if len(self._remembered) >= REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[digest] = name, until_ms
