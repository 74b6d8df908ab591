"""A fleet's books in a real store, whole: for every test that looks at what calls left behind."""

from typing import Any

import redis

from gateway.core.invariants import Snapshot, violations
from gateway.ledger.scripts import KEY_NAMES, fleet_keys
from gateway.ledger.verify import Content, snapshot_of

ZSETS = frozenset(
    ("queue", "order", "parked", "owners", "owned", "outbox", "deadlines", "backlog", "places", "place_ends")
)
READ = (*KEY_NAMES[:13], *KEY_NAMES[14:])
"""The keys that have a content."""


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


def assert_books_hold(client: "redis.Redis[bytes]", fleet: str) -> Snapshot:
    """The books, which violate no invariant."""
    books = snapshot_of(read_content(client, fleet))
    found = violations(books)
    assert not found, "\n".join(map(str, found))
    return books
