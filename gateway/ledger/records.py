"""The records of the store: their fields by position (`lua/lib/records.lua`), and what the scripts take and answer."""

from typing import Any, NamedTuple

import msgspec

from gateway.core.books import FleetConfig

FIELDS: dict[str, tuple[str, ...]] = {
    "replica": (
        "pool", "limit", "usable", "sequences_usable", "sequences_max", "prefill_max", "used", "sequences", "prefill",
        "state", "held_for", "mode", "full", "assured", "elastic", "base", "sums", "shared", "cache", "distrusted",
        "soft", "holds", "soft_end", "history",
    ),
    "call": (
        "state", "owner", "replica", "pool", "key", "class", "lane", "blocks", "sequences", "prefill", "prefilling",
        "cost", "deadline", "arrival", "passed", "attempt", "charged", "exclude", "prefer", "charge", "once",
        "fingerprint", "held", "asked", "base", "path", "elastic", "promised", "prefix", "past", "yields_until",
    ),
    "key": ("weight", "blocks_max", "requests_max", "pool_share", "blocks", "calls", "quotas", "pools"),
    "flow": ("tag", "waiting", "blocks", "weight", "parked", "owed", "resume", "later", "returned", "warm"),
    "session": ("batch", "told", "declared", "count", "sum"),
    "forecast": ("ends",),
    "once": ("id",),
    "node": ("nodes",),
    "hold": ("replica", "blocks", "due"),
    "line": ("virtual", "waiting", "blocks", "weights", "credit", "warm"),
    "lane": ("blocked", "book", "since"),
    "capacity": (
        "limit", "sequences_max", "prefill_max", "limit_learned", "sequences_learned", "prefill_learned", "scraper",
        "lease_end", "number", "told",
    ),
    "drain": ("start", "current", "previous", "last"),
}  # fmt: skip


NODE_WIDTH = 6
"""Values of each node in a record of nodes: replica, number of its cache, blocks, holders, newcomers, and the id of the
call whose own it is."""
_BYTES = {"replica": "sums", "call": "path"}
"""The field of a record that is no text: Lua has one kind of string for both."""
_STR_8, _STR_0 = b"\xd9", b"\xa0"
"""How msgpack begins a string of up to 255 bytes, and an empty one."""


_unpack = msgspec.msgpack.Decoder().decode


def decode_record(kind: str, packed: bytes) -> dict[str, Any]:
    if kind not in _BYTES:
        return dict(zip(FIELDS[kind], msgspec.msgpack.decode(packed), strict=True))
    values = zip(FIELDS[kind], msgspec.msgpack.decode(packed, type=list[msgspec.Raw]), strict=True)
    return {
        name: string_of(value) if name == _BYTES[kind] else msgspec.msgpack.decode(value)
        for name, value in values
    }


def path_argument(path: bytes) -> msgspec.Raw:
    """A path as an argument of an op: the scripts do not read msgpack's kind of bytes."""
    assert len(path) < 256, "a string of this kind says its length in one byte"
    return msgspec.Raw(_STR_8 + bytes([len(path)]) + path if path else _STR_0)


def string_of(packed: msgspec.Raw) -> bytes:
    """What Lua, or `path_argument`, has packed as a string.  Raises ValueError where it is none, or a long one."""
    raw = bytes(packed)
    if raw == _STR_0:
        return b""
    if raw[:1] != _STR_8 or raw[1:2] != bytes([len(raw) - 2]):
        raise ValueError("not a string of up to 255 bytes")
    return raw[2:]


def decode_rests(packed: bytes) -> dict[tuple[str, str], str]:
    """Replica and who says that it rests -> why."""
    if not packed:
        return {}
    found = msgspec.msgpack.decode(packed, type=list[tuple[str, str, str]])
    return {(replica, teller): why for replica, teller, why in found}


def config_arguments(config: FleetConfig) -> tuple[bytes, bytes]:
    """The two packed arguments of `configure.lua`."""
    fleet = [config.lease_ms, config.heartbeat_ms, config.overtake_blocks, config.lanes, config.classes]
    replicas = [
        [r.name, r.pool, r.limit, r.usable, r.sequences_max, r.prefill_max, r.mode] for r in config.replicas
    ]
    return msgspec.msgpack.encode(fleet), msgspec.msgpack.encode(replicas)


class Place(NamedTuple):
    """Where a call is, as the store tells."""

    replica: str
    """Empty where its ticket went to another key."""
    joined: int = 0
    """How many of its segments it shares, of a call that asks for it, and the number of the cache that has them."""
    cache: int = 0
    warm: int = 0
    """1 = its conversation was held softly when it came."""


def place_of(told: str | list[Any]) -> Place:
    return Place(told) if isinstance(told, str) else Place(*told)


def decode_step(reply: list[Any]) -> list[Any]:
    """A reply of `step` with the results of its ops, each a list."""
    told = [decode_text(item) for item in reply[:5]]
    if len(reply) > 5:
        told += [_unpack(reply[5]), decode_text(reply[6])]
    return told


def decode_text(reply: Any) -> Any:
    """A reply's byte strings as text; only for replies that carry no packed records."""
    if isinstance(reply, bytes):
        return reply.decode()
    if isinstance(reply, list):
        return [decode_text(item) for item in reply]
    return reply
