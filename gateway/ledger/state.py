"""What the store holds of one fleet, read in pages beside the hot path."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.core.holds import counted
from gateway.ledger.address import parse
from gateway.ledger.connection import finder
from gateway.ledger.records import decode_record, decode_rests
from gateway.ledger.scripts import KEY_NAMES, fleet_keys, snapshot_script
from gateway.ledger.seats import read_learned
from gateway.ledger.wire import StoreAway, Wire, connect

PAGE_SIZE = 500
READ_SECONDS = 2.0


@asynccontextmanager
async def _reader(url: str, fleet: str) -> AsyncIterator[Wire]:
    """A connection of its own, so that a page never stands in a call's way."""
    address = parse(url)
    found = finder(address, fleet_keys(fleet)[0])
    wire = None
    try:
        async with asyncio.timeout(READ_SECONDS):
            wire = await connect(address, await found.find(""), found.make_wire)
            yield wire
    except (OSError, TimeoutError) as failure:
        raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
    finally:
        if wire is not None:
            wire.end("read")


async def _read(wire: Wire, fleet: str, name: str) -> dict[str, bytes]:
    keys, cursor = fleet_keys(fleet), b"0"
    found: dict[str, bytes] = {}
    while True:
        index = KEY_NAMES.index(name) + 1
        page = await wire.submit(("EVAL", snapshot_script(), len(keys), *keys, index, cursor, PAGE_SIZE))
        items = page[3:]
        found.update((item.decode(), value) for item, value in zip(items[::2], items[1::2], strict=True))
        cursor = page[0]
        if cursor == b"0":
            return found


async def read_state(url: str, fleet: str) -> dict[str, Any]:
    """Replicas by pool, number of reservations, waiting calls by lane and class, and what each key holds.

    The ledger keeps these sums, so no call is read one by one.  Raises StoreAway.
    """
    async with _reader(url, fleet) as wire:
        replicas = _records("replica", await _read(wire, fleet, "replicas"))
        keys = _records("key", await _read(wire, fleet, "keys"))
        meta = await _read(wire, fleet, "meta")
        calls = await wire.submit(("HLEN", fleet_keys(fleet)[KEY_NAMES.index("calls")]))
    queued = _queued(meta)
    waiting = sum(sum(classes.values()) for classes in queued.values())
    return {
        "pools": _pools(replicas, _reasons(meta), _capacities(meta)),
        "reserved": sum(row["used"] for row in replicas.values()),
        "debt": sum(map(_debt, replicas.values())),
        "leases": max(calls - waiting, 0),  # the two are read one after the other
        "queue": waiting,
        "queued": queued,
        "gate": "closed" if meta.get("shut") == b"1" else "open",
        "keys": {n: {"blocks": k["blocks"], "requests": k["calls"]} for n, k in sorted(keys.items())},
    }


def _records(kind: str, rows: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: decode_record(kind, packed) for name, packed in rows.items()}


def _capacities(meta: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """What each replica's engine has taught, of those whose metrics are being read now."""
    clock, prefix = int(meta.get("clock", 0)), "capacity:"
    rows = _records("capacity", {n.removeprefix(prefix): m for n, m in meta.items() if n.startswith(prefix)})
    return {name: row for name, row in rows.items() if row["lease_end"] > clock}


def _engine(capacity: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the engine's own metrics say, and what follows from it; None = nobody reads them, or they cannot be read."""
    learned = read_learned(capacity["told"]) if capacity else None
    if capacity is None or learned is None:
        return None
    reading = learned.engine
    return {
        "incarnation": learned.incarnation,
        "strangers": learned.strangers_blocks,
        "kv_use": reading.kv_use,
        "running": reading.running,
        "waiting": reading.waiting,
        "preemptions": reading.preemptions,
        "prefix_queries": reading.prefix_queries,
        "prefix_hits": reading.prefix_hits,
        "swaps": reading.swaps,
    }


def _reasons(meta: dict[str, bytes]) -> dict[str, list[str]]:
    """Why each replica that rests does."""
    reasons: dict[str, set[str]] = {}
    for (replica, _), why in decode_rests(meta.get("rests", b"")).items():
        reasons.setdefault(replica, set()).add(why)
    return {replica: sorted(whys) for replica, whys in reasons.items()}


def _pools(
    replicas: dict[str, dict[str, Any]],
    reasons: dict[str, list[str]],
    capacities: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    pools: dict[str, Any] = {}
    for name, row in sorted(replicas.items()):
        pool = pools.setdefault(row["pool"], {"replicas": {}})
        pool["replicas"][name] = {
            "limit": row["limit"],
            "reserved": row["used"],
            "debt": _debt(row),
            "mode": row["mode"],
            "demand": row["full"],
            "shared_blocks": row["shared"],
            "soft_blocks": counted(row["soft"], row["limit"]),
            "soft_holds": row["holds"],
            "elastic": row["elastic"],
            "sequences": row["sequences"],
            "sequences_limit": row["sequences_max"],
            "prefill_tokens": row["prefill"],
            "prefill_tokens_limit": row["prefill_max"],
            "state": row["state"],
            "rests": reasons.get(name, []),
            "engine": _engine(capacities.get(name)) if row["state"] in ("up", "draining") else None,
        }
    return pools


def _debt(replica: dict[str, Any]) -> int:
    """Blocks held above the limit: declared by force, or the limit was lowered under them."""
    return max(int(replica["used"]) - int(replica["limit"]), 0)


def _queued(meta: dict[str, bytes]) -> dict[str, dict[str, int]]:
    """Waiting calls by lane and class, from the `line` records."""
    queued: dict[str, dict[str, int]] = {}
    for name, packed in meta.items():
        kind, _, line = name.partition(":")
        if kind != "line":
            continue
        lane, class_ = line.split(":")
        if waiting := decode_record("line", packed)["waiting"]:
            queued.setdefault(lane, {})[class_] = waiting
    return queued
