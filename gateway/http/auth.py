"""Who is calling: API keys, found by the SHA-256 of the secret that a client sends, or named by somebody trusted.

Keys carry 160 random bits, so a plain digest cannot be guessed back, and looking a digest up tells an attacker by
its timing nothing about another digest.
"""

import base64
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Protocol

from gateway.core.modes import Mode
from gateway.core.quota import AllFleets, Quota
from gateway.http.body import Scope

SECRET_PREFIX = "kvg_"
SECRET_BYTES_MAX = 512
"""Longer credentials are wrong without being hashed."""
NO_SECRET = b""
"""In place of a digest; no secret has it."""
Address = IPv4Address | IPv6Address
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Key:
    """What a caller may do.  None = no limit."""

    name: str
    class_: str
    mode: Mode | None = None
    """None = as its class."""
    weight: int = 1
    group: str | None = None
    """Keys of one group share their limits."""
    models: frozenset[str] | None = None
    requests_max: int | None = None
    blocks_max: int | None = None
    pool_share: float | None = None
    context_tokens_max: int | None = None
    max_output_tokens: int | None = None
    quotas: tuple[Quota, ...] = ()
    all_fleets: AllFleets | None = None
    """What holds over all fleets together; the limits above hold for each by itself."""
    expires_ms: int | None = None
    """Epoch milliseconds."""
    cache_salt: str = field(default="", repr=False)
    """'' = its prefixes are everybody's."""
    digest: bytes = field(default=NO_SECRET, repr=False)
    """SHA-256 of the secret; `NO_SECRET` where only a trusted header or a signed token can name the key."""


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
        return self._valid(self._by_digest.get(hashlib.sha256(secret).digest()), now_ms)

    def named(self, name: str, now_ms: int) -> Key | None:
        """As `find`, of a name that somebody vouches for."""
        return self._valid(self._by_name.get(name), now_ms)

    def knows(self, secret: bytes) -> bool:
        return len(secret) <= SECRET_BYTES_MAX and hashlib.sha256(secret).digest() in self._by_digest

    def _valid(self, key: Key | None, now_ms: int) -> Key | None:
        if key is None or (key.expires_ms is not None and now_ms >= key.expires_ms):
            return self._anonymous
        return key

    def replace(self, keys: Iterable[Key]) -> None:
        """From now on these keys are valid, and no others; of two with the same name or secret the last."""
        self._by_name = {key.name: key for key in keys}
        self._by_digest = {key.digest: key for key in self._by_name.values()}


class TrustedHeader:
    """A proxy's word for whose call it is, taken from the proxy's own addresses only."""

    def __init__(self, name: str, networks: Iterable[str]) -> None:
        self._name = name.encode()
        self._networks = [ip_network(text) for text in networks]

    def name_in(self, headers: Headers, peer: str | None) -> str | None:
        """The name, `""` where it is given more than once, which nobody is called; None where nobody names any."""
        given = [value for name, value in headers if name == self._name]
        if not given or not self._trusts(peer):
            return None
        return given[0].decode("latin-1") if len(given) == 1 else ""

    def _trusts(self, peer: str | None) -> bool:
        """A unix socket has no address, and is not trusted."""
        try:
            address: Address = ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


class Tokens(Protocol):
    def name_in(self, token: bytes, now_ms: int, /) -> str | None:
        """The name in a signed token; None where it is no valid one."""
        ...


class Callers:
    """Whose call it is: a trusted header, else a signed token, else a secret says so."""

    def __init__(
        self, ring: Keyring, header: TrustedHeader | None = None, tokens: Tokens | None = None
    ) -> None:
        self.tokens = tokens
        """May be replaced."""
        self._ring = ring
        self._header = header

    def find(self, scope: Scope, headers: Mapping[bytes, bytes], now_ms: int) -> Key | None:
        """None means 401.  `headers` are those of the scope by name; `now_ms` is epoch milliseconds."""
        authorization = headers.get(b"authorization")
        name = None
        if self._header is not None or self.tokens is not None:
            name = self._name_from_outside(scope, authorization, now_ms)
        if name is None:
            return self._ring.find(authorization, headers.get(b"x-api-key"), now_ms)
        return self._ring.named(name, now_ms)

    def _name_from_outside(self, scope: Scope, authorization: bytes | None, now_ms: int) -> str | None:
        if self._header:
            name = self._header.name_in(scope["headers"], (scope.get("client") or (None,))[0])
            if name is not None:
                return name
        if self.tokens is None:
            return None
        token = _bearer(authorization)
        if not token or token.count(b".") != 2 or self._ring.knows(token):
            return None
        return self.tokens.name_in(token, now_ms)


def _bearer(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
