"""Who is calling: API keys, found by the SHA-256 of the secret that a client sends.

Keys carry 160 random bits, so a plain digest cannot be guessed back, and looking a digest up tells an attacker by
its timing nothing about another digest.
"""

import asyncio
import base64
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

SECRET_PREFIX = "kvg_"
SECRET_BYTES_MAX = 512
"""Longer credentials are wrong without being hashed."""

log = logging.getLogger("kvgate.auth")


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
    """A fixed set of keys.  Without keys and without an anonymous caller it lets nobody in."""

    def __init__(self, keys: Iterable[Key], anonymous: Key | None) -> None:
        """`anonymous` is who a caller without a valid key is; None where a key is required."""
        self._keys = {key.digest: key for key in keys}
        self._anonymous = anonymous

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

    def with_keys(self, keys: Iterable[Key]) -> "Keyring":
        return Keyring(keys, self._anonymous)


def _bearer(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


Stamp = tuple[int, int, int] | None
"""Inode, bytes and time of change: differs whenever a file was written or replaced.  None = no such file."""


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class KeyringWatch:
    """A keyring that follows its file.  The last good one stays while the file is missing or wrong.

    `read` returns the keys of the file and raises ValueError, with a text fit for logs, or OSError; it runs in a
    thread.  Whoever starts `run` as a task cancels it at the end.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Iterable[Key]],
        anonymous: Key | None,
        failed: Callable[[], None],
        reload_seconds: float = 0.4,
    ) -> None:
        """Reads the file once; what `read` raises passes through.

        `failed` is called once for each change that could not be read.  With the default period a new or withdrawn
        key counts within one second.
        """
        self._path = path
        self._read = read
        self._failed = failed
        self._reload_seconds = reload_seconds
        self._turn = asyncio.Lock()
        self._read_stamp = self._noticed_stamp = _stamp(path)
        self._keyring = Keyring(read(), anonymous)

    def find(self, authorization: bytes | None, api_key: bytes | None, now_ms: int) -> Key | None:
        """As `Keyring.find`, on the keys of now."""
        return self._keyring.find(authorization, api_key, now_ms)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(self._reload_seconds)
            await self.poll()

    async def poll(self) -> None:
        """Read the file once a change has been seen twice, so that a file being written is left alone."""
        stamp = await asyncio.to_thread(_stamp, self._path)
        settled = stamp == self._noticed_stamp
        self._noticed_stamp = stamp
        if settled and stamp != self._read_stamp:
            await self.reload()

    async def reload(self) -> bool:
        """Read the file now; False if it cannot be used and the keys stay as they were."""
        async with self._turn:
            self._read_stamp, keys, problem = await asyncio.to_thread(self._attempt)
            if keys is None:
                log.error("keys file not reloaded, the last good keys stay: %s", problem)
                self._failed()
                return False
            self._keyring = self._keyring.with_keys(keys)
            log.info("keys file reloaded: %d keys", len(keys))
            return True

    def _attempt(self) -> tuple[Stamp, tuple[Key, ...] | None, str]:
        """The stamp is older than what was read, so a write in between is noticed by the next poll."""
        stamp = _stamp(self._path)
        try:
            return stamp, tuple(self._read()), ""
        except (ValueError, OSError) as error:
            return stamp, None, str(error)
