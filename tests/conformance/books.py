"""A fleet's books in a real store, whole: for every test that looks at what calls left behind."""

from collections.abc import Mapping
from typing import Any

import msgspec
import redis

from gateway.core.invariants import Snapshot, violations
from gateway.ledger.records import FIELDS, path_argument
from gateway.ledger.scripts import KEY_NAMES, fleet_keys
from gateway.ledger.verify import Content, snapshot_of

ZSETS = frozenset(
    ("queue", "order", "parked", "owners", "owned", "outbox", "deadlines", "backlog", "places", "place_ends",
     "hold_ends")
)  # fmt: skip
READ = KEY_NAMES


def read_content(client: "redis.Redis[bytes]", fleet: str) -> Content:
    """All keys in one transaction."""
    pipeline = client.pipeline(transaction=True)
    keys = dict(zip(KEY_NAMES, fleet_keys(fleet), strict=True))
    for name in READ:
        key = keys[name]
        if name in ZSETS:
            pipeline.zrange(key, 0, -1, withscores=True)
        else:
            pipeline.hgetall(key)
    replies: list[Any] = pipeline.execute()
    return {name: dict(reply) for name, reply in zip(READ, replies, strict=True)}


def pack_record(kind: str, row: Mapping[str, Any]) -> bytes:
    """As the scripts write it: the inverse of `decode_record`."""
    values = (row[field] for field in FIELDS[kind])
    return msgspec.msgpack.encode([path_argument(v) if isinstance(v, bytes) else v for v in values])


def assert_books_hold(client: "redis.Redis[bytes]", fleet: str) -> Snapshot:
    """The books, which violate no invariant."""
    books = snapshot_of(read_content(client, fleet))
    found = violations(books)
    assert not found, "\n".join(map(str, found))
    return books
