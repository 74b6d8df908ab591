"""The records of the store: their fields by position (`lua/lib/records.lua`), and what the scripts take and answer."""

from typing import Any

import msgspec

from gateway.core.books import FleetConfig

FIELDS: dict[str, tuple[str, ...]] = {
    "replica": (
        "pool", "limit", "usable", "sequences_usable", "sequences_max", "prefill_max", "used", "sequences", "prefill",
        "state", "held_for",
    ),
    "call": (
        "state", "owner", "replica", "pool", "key", "class", "lane", "blocks", "sequences", "prefill", "prefilling",
        "cost", "deadline", "arrival", "passed", "attempt", "charged", "exclude", "prefer", "charge", "once",
        "fingerprint",
    ),
    "key": ("weight", "blocks_max", "requests_max", "pool_share", "blocks", "calls", "quotas", "pools"),
    "flow": ("tag", "waiting", "blocks", "weight", "parked", "owed", "resume", "later", "returned"),
    "session": ("batch", "told", "declared", "count", "sum"),
    "forecast": ("ends",),
    "once": ("id",),
    "line": ("virtual", "waiting", "blocks", "weights", "credit"),
    "lane": ("blocked", "book", "since"),
    "capacity": (
        "limit", "sequences_max", "prefill_max", "limit_learned", "sequences_learned", "prefill_learned", "scraper",
        "lease_end", "number", "told",
    ),
    "drain": ("start", "current", "previous", "last"),
}  # fmt: skip


def decode_record(kind: str, packed: bytes) -> dict[str, Any]:
    return dict(zip(FIELDS[kind], msgspec.msgpack.decode(packed), strict=True))


def decode_rests(packed: bytes) -> dict[tuple[str, str], str]:
    """Replica and who says that it rests -> why."""
    if not packed:
        return {}
    found = msgspec.msgpack.decode(packed, type=list[tuple[str, str, str]])
    return {(replica, teller): why for replica, teller, why in found}


def config_arguments(config: FleetConfig) -> tuple[bytes, bytes]:
    """The two packed arguments of `configure.lua`."""
    fleet = [config.lease_ms, config.heartbeat_ms, config.overtake_blocks, config.lanes, config.classes]
    replicas = [[r.name, r.pool, r.limit, r.usable, r.sequences_max, r.prefill_max] for r in config.replicas]
    return msgspec.msgpack.encode(fleet), msgspec.msgpack.encode(replicas)


def decode_step(reply: list[Any]) -> list[Any]:
    """A reply of `step` with the results of its ops, each a list."""
    told = [decode_text(item) for item in reply[:5]]
    if len(reply) > 5:
        told += [msgspec.msgpack.decode(reply[5]), decode_text(reply[6])]
    return told


def decode_text(reply: Any) -> Any:
    """A reply's byte strings as text; only for replies that carry no packed records."""
    if isinstance(reply, bytes):
        return reply.decode()
    if isinstance(reply, list):
        return [decode_text(item) for item in reply]
    return reply
