"""What makes two calls the same for the ledger, which never gets a body: whose they are, their route, their bytes."""

import hashlib
import re

from gateway.core.outcomes import Code, Refusal

IDEMPOTENCY_KEY = b"idempotency-key"
"""Header: at most one call of a key is admitted under one value at a time."""
IDEMPOTENCY_KEY_CHARS_MAX = 255
INLINE_BYTES_MAX = 512 * 1024
"""0.4 ms of hashing, 1 ms on a slow processor; longer bodies are hashed off the event loop."""

_PRINTABLE = re.compile(rb"[ -~]{1,%d}" % IDEMPOTENCY_KEY_CHARS_MAX)


class Identity:
    """Of one call; its fingerprint is made when it is first needed.

    Equal on all gateways.  SHA-256, cut to 64 bits: what it stands for belongs to one key, so whoever searches for a
    collision finds a place of their own.
    """

    __slots__ = ("_body", "_caller", "_fingerprint", "_route")

    def __init__(self, caller: str, route: str, body: bytes) -> None:
        self._caller = caller
        self._route = route
        self._body = body
        self._fingerprint = ""

    @property
    def known(self) -> str:
        """The fingerprint, '' as long as it was not made."""
        return self._fingerprint

    @property
    def is_quick(self) -> bool:
        """`fingerprint` takes no time that an event loop would notice."""
        return bool(self._fingerprint) or len(self._body) <= INLINE_BYTES_MAX

    @property
    def body_bytes(self) -> int:
        return len(self._body)

    def fingerprint(self) -> str:
        if not self._fingerprint:
            self._fingerprint = _hashed(self._caller, self._route, self._body)
        return self._fingerprint


def hashed_idempotency_key(caller: str, value: bytes) -> str:
    return _hashed(caller, "", value)


def read_idempotency_key(raw: bytes | None) -> bytes | Refusal:
    """The value, empty where the client sends none."""
    if raw is None:
        return b""
    value = raw.strip(b" \t")
    if _PRINTABLE.fullmatch(value):
        return value
    message = f"`Idempotency-Key` must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters."
    return Refusal(Code.INVALID_VALUE, message, "Idempotency-Key")


def _hashed(caller: str, route: str, content: bytes) -> str:
    """No two different triples are hashed as the same bytes: names have no line ends."""
    state = hashlib.sha256(f"{caller}\n{route}\n".encode())
    state.update(content)
    return state.hexdigest()[:16]
