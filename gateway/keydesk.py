"""What operators do to keys while gateways run: list them, and make, renew and end those of the store.

Edits are judged by the entries as they are in the store at that moment; every gateway takes them over.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from gateway.config import KEY_NAME, SECRETLESS, Auth, ConfigError, parse_key
from gateway.core.outcomes import Code, Refusal
from gateway.http.auth import new_key
from gateway.keybook import KeyBook
from gateway.ledger.api import Edit, SharedKeys

log = logging.getLogger("kvgate.keys")

ENTRIES_MAX = 10_000
"""Every process reads all of them after each change."""
ENTRY_BYTES_MAX = 4096

Answer = dict[str, Any]
Decide = Callable[[Mapping[str, bytes]], Edit | Refusal]


class KeyDesk:
    """Implements the admin API's `Desk`."""

    def __init__(
        self,
        book: KeyBook,
        shared: SharedKeys,
        auth: Auth,
        classes: Collection[str],
        models: Collection[str],
    ) -> None:
        """`models`: the names that clients may use, as of now."""
        self._book = book
        self._shared = shared
        self._auth = auth
        self._classes = classes
        self._models = models

    def rows(self) -> list[Answer]:
        return self._book.rows()

    async def create(self, fields: Mapping[str, Any]) -> Answer | Refusal:
        """The new key's secret is nowhere else, and is not shown again; with `secret: false` it has none."""
        wanted = fields.get("secret", True)
        if not isinstance(wanted, bool):
            return _invalid(ConfigError("secret", f"is true or false, got {wanted!r}"))
        if not wanted and not self._auth.names_from_outside:
            return _invalid(ConfigError("secret", SECRETLESS))
        if "sha256" in fields:
            return _invalid(ConfigError("sha256", "is made here, with the secret"))
        secret, digest = new_key()
        entry = {name: value for name, value in fields.items() if name != "secret"}
        entry |= {"sha256": digest} if wanted else {}
        done = await self._change(lambda entries: self._new_entry(entry, entries))
        if isinstance(done, Refusal):
            return done
        log.info("key %s was created", fields["name"])
        return {"name": fields["name"]} | ({"secret": secret} if wanted else {})

    def _new_entry(self, fields: Mapping[str, Any], entries: Mapping[str, bytes]) -> Edit:
        entry = parse_key(fields)
        if entry.name in (".", ".."):
            raise ConfigError("name", f"{entry.name!r} cannot be part of a path")
        if entry.name in entries:
            raise ConfigError("name", f"{entry.name!r} is a key already")
        self._book.check_new(entry)
        if entry.class_ not in self._classes:
            known = ", ".join(self._classes)
            raise ConfigError("class", f"there is no class {entry.class_!r}, known are {known}")
        for model in entry.models or ():
            if model not in self._models:
                raise ConfigError("models", f"no fleet has the model {model!r}")
        if len(entries) >= ENTRIES_MAX:
            raise ConfigError(
                "name", f"the store has {len(entries)} keys, at most {ENTRIES_MAX} are kept there"
            )
        return Edit(entry.name, _packed(fields))

    async def rotate(self, name: str) -> Answer | Refusal:
        """A new secret under the same name; the old one ends at once."""
        secret, digest = new_key()
        done = await self._change(lambda entries: self._new_secret(name, digest, entries))
        if isinstance(done, Refusal):
            return done
        log.info("key %s has a new secret", name)
        return {"name": name, "secret": secret}

    def _new_secret(self, name: str, digest: str, entries: Mapping[str, bytes]) -> Edit | Refusal:
        if name not in entries:
            return self._unknown(name)
        if name not in self._book.stored.by_name:
            raise ConfigError(
                "name", f"the entry of {name!r} in the store is wrong, the log says why: revoke it"
            )
        if self._book.stored.by_name[name].sha256 is None:
            raise ConfigError(
                "name", f"{name!r} has no secret that could be renewed: it is named from outside"
            )
        fields = msgspec.json.decode(entries[name], type=dict[str, Any])
        return Edit(name, _packed({**fields, "sha256": digest}))

    async def revoke(self, name: str, cut: bool) -> Answer | Refusal:
        """`cut`: its running and waiting calls end."""
        ended = await self._change(lambda entries: self._removal(name, cut, entries))
        if isinstance(ended, Refusal):
            return ended
        log.info("key %s was revoked", name)
        return {"name": name, "calls_cut_here": ended} if cut else {"name": name}

    def _removal(self, name: str, cut: bool, entries: Mapping[str, bytes]) -> Edit | Refusal:
        if name not in entries:
            return self._unknown(name)
        self._book.check_removal(name)
        return Edit(name, None, cut)

    async def cut(self, fields: Mapping[str, Any]) -> Answer | Refusal:
        """End what runs and waits of a key of either source, or of one that was revoked before."""
        name = fields.get("key")
        if unknown := set(fields) - {"key"}:
            return _invalid(ConfigError(min(unknown), "unknown field, there is `key` only"))
        if not isinstance(name, str) or not re.match(KEY_NAME, name):
            return _invalid(ConfigError("key", f"the name of a key is needed, got {name!r}"))
        ended = await self._shared.cut(name)
        if isinstance(ended, Refusal):
            return ended
        return {"key": name, "calls_cut_here": ended, "is_a_key": self._book.has(name)}

    def _unknown(self, name: str) -> Refusal:
        if name in self._book.file.by_name:
            return _invalid(
                ConfigError(
                    "name", f"{name!r} is a key of the keys file, which `kvgate keys` changes with --file"
                )
            )
        return Refusal(Code.NOT_FOUND, f"the store has no key {name!r}", "name")

    async def _change(self, decide: Decide) -> int | Refusal:
        if not self._auth.keys_in_store:
            return _invalid(ConfigError("auth.keys_in_store", "is off: keys are those of the keys file"))
        try:
            return await self._shared.change(decide)
        except ConfigError as error:
            return _invalid(error)


def _packed(fields: Mapping[str, Any]) -> bytes:
    entry = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    if len(entry) > ENTRY_BYTES_MAX:
        raise ConfigError("", f"the entry has {len(entry)} bytes, at most {ENTRY_BYTES_MAX} are kept")
    return entry


def _invalid(error: ConfigError) -> Refusal:
    return Refusal(Code.INVALID_VALUE, str(error), error.path or None)
