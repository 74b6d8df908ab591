"""What the store holds of one fleet, read in pages beside the hot path."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from gateway.ledger.connection import REPLY_SECONDS, StoreAway, new_client
from gateway.ledger.records import decode_record
from gateway.ledger.scripts import KEY_NAMES, fleet_keys, load

PAGE_SIZE = 500
READ_SECONDS = 5.0


@asynccontextmanager
async def _reader(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = new_client(url)
    try:
        async with asyncio.timeout(READ_SECONDS):
            yield client
    except (RedisError, OSError, TimeoutError) as failure:
        raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
    finally:
        async with asyncio.timeout(REPLY_SECONDS):
            await client.aclose()


async def _read(client: redis.asyncio.Redis, fleet: str, name: str) -> dict[str, bytes]:
    script, keys, cursor = load("snapshot"), fleet_keys(fleet), b"0"
    found: dict[str, bytes] = {}
    while True:
        index = KEY_NAMES.index(name) + 1
        page = await client.execute_command(  # type: ignore[no-untyped-call]
            "EVAL", script.text, len(keys), *keys, index, cursor, PAGE_SIZE
        )
        items = page[3:]
        found.update((item.decode(), value) for item, value in zip(items[::2], items[1::2], strict=True))
        cursor = page[0]
        if cursor == b"0":
            return found


async def read_state(url: str, fleet: str) -> dict[str, Any]:
    """Replicas by pool, number of reservations, waiting calls by lane and class, and what each key holds.

    Raises StoreAway.
    """
    async with _reader(url) as client:
        replicas = {
            n: decode_record("replica", v) for n, v in (await _read(client, fleet, "replicas")).items()
        }
        calls = [decode_record("call", v) for v in (await _read(client, fleet, "calls")).values()]
        keys = {n: decode_record("key", v) for n, v in (await _read(client, fleet, "keys")).items()}
    pools: dict[str, Any] = {}
    for name, row in sorted(replicas.items()):
        pool = pools.setdefault(row["pool"], {"replicas": {}})
        pool["replicas"][name] = {
            "limit": row["limit"],
            "reserved": row["used"],
            "sequences": row["sequences"],
            "prefill_tokens": row["prefill"],
            "state": row["state"],
        }
    queue: dict[str, dict[str, int]] = {}
    for call in calls:
        if call["state"] == "queued":
            lane = queue.setdefault(call["lane"], {})
            lane[call["class"]] = lane.get(call["class"], 0) + 1
    return {
        "pools": pools,
        "reserved": sum(row["used"] for row in replicas.values()),
        "leases": sum(1 for call in calls if call["state"] != "queued"),
        "queued": sum(1 for call in calls if call["state"] == "queued"),
        "queue": queue,
        "keys": {n: {"blocks": k["blocks"], "requests": k["calls"]} for n, k in sorted(keys.items())},
    }
