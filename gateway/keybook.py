"""Who may call: the entries of the keys file and those of the store, as one.

The file goes first: an entry of the store whose name or secret the file has too is not used, and limits that the file
gives a group are those of the group; where it gives none those of the store are.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.config import AllFleetsLimits, ConfigError, KeyEntry, Limits, parse_key
from gateway.core import quota
from gateway.core.modes import Mode
from gateway.http.auth import NO_SECRET, Key, Keyring
from gateway.ledger.api import printable

log = logging.getLogger("kvgate.keys")

DIGEST_SHOWN = 8
"""Characters: enough to tell entries apart."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_MS = 253_402_300_799_000
"""The last second of the year 9999."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Those of one source, made ready; as many as there are, so this is no work for the event loop."""

    by_name: Mapping[str, KeyEntry] = field(default_factory=dict)
    keys: Sequence[Key] = field(default=(), compare=False)
    group_limits: Mapping[str, Limits] = field(default_factory=dict, compare=False)
    """Of groups that have some."""
    limited_by: Mapping[str, Collection[str]] = field(default_factory=dict, compare=False)
    """The names of the keys that state them."""

    @classmethod
    def of(cls, entries: Sequence[KeyEntry]) -> "Entries":
        stating = [entry for entry in entries if entry.group and entry.limits != Limits()]
        limits = {entry.group: entry.limits for entry in stating if entry.group}
        names: dict[str, set[str]] = {group: set() for group in limits}
        for entry in stating:
            names[entry.group or ""].add(entry.name)
        whole = [replace(entry, limits=limits.get(entry.group or "", entry.limits)) for entry in entries]
        return cls({entry.name: entry for entry in whole}, [key_of(entry) for entry in whole], limits, names)


@dataclass(frozen=True, slots=True)
class Both:
    """The two sources as one; this too is no work for the event loop."""

    file: Entries
    stored: Entries
    keys: Sequence[Key]
    shadowed: Sequence[str]
    """Names of the store's that are not among them."""

    @classmethod
    def of(cls, file: Entries, stored: Entries) -> "Both":
        digests = {key.digest for key in file.keys} - {NO_SECRET}
        used, shadowed = [], []
        for key in stored.keys:
            if key.name in file.by_name or key.digest in digests:
                shadowed.append(key.name)
            else:
                used.append(_limited(key, stored.by_name, file.group_limits))
        left = {
            group: limits for group, limits in stored.group_limits.items() if group not in file.group_limits
        }
        filed = [_limited(key, file.by_name, left) for key in file.keys]
        return cls(file, stored, [*used, *filed], shadowed)


def _limited(key: Key, entries: Mapping[str, KeyEntry], group_limits: Mapping[str, Limits]) -> Key:
    """With the limits that the other source gives its group."""
    limits = group_limits.get(key.group or "")
    return key_of(replace(entries[key.name], limits=limits)) if limits else key


class KeyBook:
    """Keeps a keyring up to date with its two sources."""

    def __init__(self, ring: Keyring, observer: Callable[[Sequence[Key]], None] = lambda _: None) -> None:
        """`observer` is told of all keys before they are in use."""
        self.file = Entries()
        self.stored = Entries()
        """As the store has them; not all may be in use."""
        self._both = Both.of(self.file, self.stored)
        """As they were read last; the next use makes them anew where a source is another one by then."""
        self._ring = ring
        self._observer = observer
        self._told: set[str] = set()

    def read_file(self, entries: Entries) -> Entries:
        """Make them ready for `use_file`, in a thread."""
        self._both = Both.of(entries, self.stored)
        return entries

    def use_file(self, entries: Entries) -> None:
        self.file = entries
        self._use()

    def read_stored(self, raw: Mapping[str, bytes]) -> Callable[[], None]:
        """Check the store's entries, in a thread; what it returns puts them in use.  A wrong one is left out."""
        entries = Entries.of(list(_right_ones(raw)))
        self._both = Both.of(self.file, entries)
        return partial(self._use_stored, entries)

    def _use_stored(self, entries: Entries) -> None:
        self.stored = entries
        log.info("%d keys in the store", len(entries.by_name))
        self._use()

    def _use(self) -> None:
        """All at once, so that no call meets half of a change."""
        if self._both.file is not self.file or self._both.stored is not self.stored:
            self._both = Both.of(self.file, self.stored)
        self._observer(self._both.keys)
        self._ring.replace(self._both.keys)
        for name in self._both.shadowed:
            if name not in self._told:
                log.warning("key %s of the store is not used: the keys file has its name or its secret", name)
                self._told.add(name)

    # -- what an edit of the store's entries has to keep to ----------------------------------------------------------

    def check_new(self, entry: KeyEntry) -> None:
        """Raises ConfigError where it contradicts those that are there."""
        if entry.name in self.file.by_name:
            raise ConfigError("name", f"{entry.name!r} is a key of the keys file")
        groups = {other.name: other.group for other in self._all()}
        if entry.group in groups and groups[entry.group] != entry.group:
            raise ConfigError("group", f"{entry.group!r} is the name of a key outside of the group")
        if entry.group != entry.name and entry.name in {other.group for other in self._all()}:
            raise ConfigError("name", f"{entry.name!r} is the name of a group that the key is not in")
        limits = self._limits_of(entry.group)
        if limits and entry.limits not in (Limits(), limits):
            raise ConfigError("limits", f"differ from those of the group {entry.group!r}")

    def check_removal(self, name: str) -> None:
        """An entry from which the other keys of its group have their limits stays: without it they would have none."""
        group = self.stored.by_name[name].group if name in self.stored.by_name else None
        if group is None or group in self.file.group_limits or self.stored.limited_by.get(group) != {name}:
            return
        others = [entry.name for entry in self._all() if entry.group == group and entry.name != name]
        if others:
            raise ConfigError(
                "name", f"the group {group!r} has its limits from {name!r}: revoke its others first"
            )

    def _all(self) -> Sequence[KeyEntry]:
        return [*self.file.by_name.values(), *self.stored.by_name.values()]

    def _limits_of(self, group: str | None) -> Limits | None:
        return self.file.group_limits.get(group or "") or self.stored.group_limits.get(group or "")

    # -- what operators see ------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self.file.by_name or name in self.stored.by_name

    def rows(self) -> list[dict[str, Any]]:
        """Every entry with its source; limits are those of the group where it has one."""
        found = [self._row_of(entry) | {"source": "file"} for entry in self.file.by_name.values()]
        return found + [self._row_of(entry) | {"source": "store"} for entry in self.stored.by_name.values()]

    def _row_of(self, entry: KeyEntry) -> dict[str, Any]:
        limits = self._limits_of(entry.group)
        return row_of(replace(entry, limits=limits) if limits else entry)


def _right_ones(raw: Mapping[str, bytes]) -> Iterator[KeyEntry]:
    """By name; what is wrong with the others is told."""
    for name, text in sorted(raw.items()):
        try:
            entry = parse_key(msgspec.json.decode(text, type=dict))
            if entry.name != name:
                raise ConfigError("name", "is another one than it is kept under")
        except (msgspec.DecodeError, ConfigError, RecursionError) as error:
            log.error("key %s of the store is not used: %s", printable(name), error)
        else:
            yield entry


def key_of(entry: KeyEntry) -> Key:
    limits = entry.limits
    return Key(
        name=entry.name,
        class_=entry.class_,
        mode=Mode(entry.mode) if entry.mode else None,
        weight=entry.weight,
        group=entry.group,
        models=None if entry.models is None else frozenset(entry.models),
        requests_max=limits.requests_max,
        blocks_max=limits.blocks_max,
        pool_share=limits.pool_share,
        context_tokens_max=limits.context_tokens_max,
        max_output_tokens=limits.max_output_tokens,
        quotas=quota.of_limits(msgspec.structs.asdict(limits), limits.minute_burst),
        all_fleets=_over_all(limits.all_fleets),
        expires_ms=entry.expires_ms,
        cache_salt=entry.cache_salt or "",
        digest=bytes.fromhex(entry.sha256) if entry.sha256 else NO_SECRET,
    )


def _over_all(limits: AllFleetsLimits | None) -> quota.AllFleets | None:
    """None where nothing is limited: such a key's calls ask their fleet alone."""
    if limits is None:
        return None
    quotas = quota.of_limits(msgspec.structs.asdict(limits), limits.minute_burst, quota.ALL_FLEETS_LIMITS)
    if limits.requests_max is None and not quotas:
        return None
    return quota.AllFleets(limits.requests_max, quotas)


def row_of(entry: KeyEntry) -> dict[str, Any]:
    """An entry as operators see it; of the limits those that are not the default."""
    return {
        "name": entry.name,
        "class": entry.class_,
        "mode": entry.mode,
        "weight": entry.weight,
        "group": entry.group,
        "models": entry.models,
        "limits": _stated(entry.limits, Limits()),
        "cache_salt": entry.cache_salt is not None,
        "expires": None if entry.expires_ms is None else _date_text(entry.expires_ms),
        "sha256": entry.sha256 and entry.sha256[:DIGEST_SHOWN],
    }


def _stated(limits: Limits | AllFleetsLimits, default: Limits | AllFleetsLimits) -> dict[str, Any]:
    values, defaults = msgspec.structs.asdict(limits), msgspec.structs.asdict(default)
    stated = {name: value for name, value in values.items() if value != defaults[name]}
    if isinstance(limits, Limits) and limits.all_fleets:
        stated[quota.ALL_FLEETS] = _stated(limits.all_fleets, AllFleetsLimits())
    return stated


def _date_text(expires_ms: int) -> str:
    """To the second; what lies outside of the years 1970 to 9999 is shown as their end."""
    moment = EPOCH + timedelta(milliseconds=min(max(expires_ms, 0), LATEST_MS))
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
