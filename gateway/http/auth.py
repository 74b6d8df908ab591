"""Who is calling: API keys, found by the SHA-256 of the secret that a client sends.

Keys carry 160 random bits, so a plain digest cannot be guessed back, and looking a digest up tells an attacker by
its timing nothing about another digest.
"""

import base64
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.core.quota import Quota

SECRET_PREFIX = "kvg_"
SECRET_BYTES_MAX = 512
"""Longer credentials are wrong without being hashed."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a caller may do.  None = no limit."""

    name: str
    class_: str
    weight: int = 1
    group: str | None = None
    """Keys of one group share their limits."""
    models: frozenset[str] | None = None
    requests_max: int | None = None
    blocks_max: int | None = None
    context_tokens_max: int | None = None
    max_output_tokens: int | None = None
    quotas: tuple[Quota, ...] = ()
    expires_ms: int | None = None
    """Epoch milliseconds."""
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of the secret."""


def anonymous(class_: str) -> Key:
    """The caller without a key, where none is required."""
    return Key(name="anonymous", class_=class_)


def new_key() -> tuple[str, str]:
    """A new secret (160 random bits in base32) and its SHA-256 as the keys file has it."""
    secret = SECRET_PREFIX + base64.b32encode(secrets.token_bytes(20)).decode().lower()
    return secret, hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """Those who may call.  Without keys and without an anonymous caller it lets nobody in."""

    def __init__(self, keys: Iterable[Key], anonymous: Key | None) -> None:
        """`anonymous` is who a caller without a valid key is; None where a key is required."""
        self._anonymous = anonymous
        self.replace(keys)

    def find(self, authorization: bytes | None, api_key: bytes | None, now_ms: int) -> Key | None:
        """The caller behind the values of `Authorization` and `x-api-key`; None means 401.

        `now_ms` is epoch milliseconds.  A bearer token that is not empty decides alone, whatever `x-api-key` says.
        """
        secret = _bearer(authorization) or api_key
        if not secret or len(secret) > SECRET_BYTES_MAX:
            return self._anonymous
        key = self._keys.get(hashlib.sha256(secret).digest())
        if key is None or (key.expires_ms is not None and now_ms >= key.expires_ms):
            return self._anonymous
        return key

    def replace(self, keys: Iterable[Key]) -> None:
        """From now on these keys are valid, and no others."""
        self._keys = {key.digest: key for key in keys}


def _bearer(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
