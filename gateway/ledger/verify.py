"""Whether a live store's books hold: read whole beside the hot path, and judged by `core/invariants.py`.

One read is a row of MULTI transactions, each a page of every key, so that the store is busy with one for a few
milliseconds at most.  Every script writes `meta`, and a batch its session: a read counts only when both stayed the same
from its first page to its last, for then no script ran between and the pages are one snapshot.  Books of up to a page
are read in one transaction, whatever the traffic; larger ones need a moment without a script, and get larger pages when
none comes.  A violation is reported when two such reads have it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from gateway.core.books import Call, FleetConfig, Key, Replica
from gateway.core.holds import Hold
from gateway.core.invariants import (
    Flow,
    FlowName,
    Line,
    LineName,
    SessionRecord,
    Snapshot,
    Violation,
    violations,
)
from gateway.core.nodes import Node, NodeName
from gateway.core.order import LAYOUT
from gateway.core.outcomes import OperatorError
from gateway.ledger.connection import close_client, new_client
from gateway.ledger.records import NODE_WIDTH, decode_record, decode_rests
from gateway.ledger.scripts import fleet_keys
from gateway.ledger.wire import StoreAway

PAGE_SIZES = (1_000, 1_000, 2_000, 4_000)
"""Entries of each key that one transaction reads, by attempt; the last one repeats.  With as many calls as waiters a
page of 1,000 keeps the store for 1.1 ms, one of 4,000 for 6 ms (Valkey 9.1)."""
READS_MAX = 40
PAUSE_SECONDS = 0.02
"""Between reads."""
PAGE_SECONDS = 2.0
"""A store that has not answered a page by then is away."""
_HASHES = ("replicas", "calls", "keys", "flows", "once", "prefixes", "holds")
_ZSETS = (
    "queue",
    "order",
    "parked",
    "owners",
    "owned",
    "outbox",
    "deadlines",
    "backlog",
    "places",
    "place_ends",
    "hold_ends",
)
_INDEXES = ("queue", "order", "parked", "owned", "outbox", "backlog", "places")

Content = Mapping[str, Mapping[bytes, Any]]
"""By name of the key: a hash's fields with their values, a sorted set's members with their scores."""
T = TypeVar("T")


class NotVerified(OperatorError):
    """Nothing can be said about the books; the message is one line for the operator."""


class NotKnown(NotVerified):
    """The store has no books of that name."""


@dataclass(frozen=True, slots=True)
class Report:
    fleet: str
    violations: tuple[Violation, ...]
    held: int
    """Calls that hold a place."""
    waiting: int
    replicas: int
    debts: Mapping[str, int]
    """Blocks above the limit by replica: no violation, for limits are lowered and calls are declared by force."""


async def verify(url: str, fleet: str) -> Report:
    """Read until two whole reads have a violation in common, or one has none.  Raises NotVerified.

    `fleet` is a fleet's name, or `core.quota.ALL_FLEETS`."""
    client = _client(url, fleet)
    try:
        return await _judge(client, fleet)
    except (RedisError, OSError, TimeoutError, StoreAway) as failure:
        raise NotVerified(f"the store does not answer: {type(failure).__name__}: {failure}") from failure
    finally:
        await close_client(client)


def _client(url: str, fleet: str) -> redis.asyncio.Redis:
    try:
        return new_client(url, fleet_keys(fleet)[0])
    except ValueError as error:
        raise NotVerified(f"the URL of the store is wrong: {error}") from error


async def _judge(client: redis.asyncio.Redis, fleet: str) -> Report:
    suspected: set[tuple[str, str]] = set()
    for attempt in range(READS_MAX):
        content = await _read(client, fleet, PAGE_SIZES[min(attempt, len(PAGE_SIZES) - 1)])
        if content is not None:
            books = snapshot_of(content)
            found = violations(books)
            confirmed = tuple(v for v in found if (v.rule, v.about) in suspected)
            if confirmed or not found:
                return _report(fleet, books, confirmed)
            suspected = {(v.rule, v.about) for v in found}
        await asyncio.sleep(PAUSE_SECONDS)
    raise NotVerified(
        f"fleet {fleet}: the books changed during each of {READS_MAX} reads; try in a quieter moment"
    )


def _report(fleet: str, books: Snapshot, found: tuple[Violation, ...]) -> Report:
    waiting = sum(call.state == "queued" for call in books.calls.values())
    debts = {name: r.used - r.limit for name, r in sorted(books.replicas.items()) if r.used > r.limit}
    return Report(fleet, found, len(books.calls) - waiting, waiting, len(books.replicas), debts)


# -- reading ---------------------------------------------------------------------------------------------------------


async def _read(client: redis.asyncio.Redis, fleet: str, page_size: int) -> Content | None:
    """The whole content, or None when a script ran between its pages.  Raises NotVerified."""
    cursors = dict.fromkeys((*_HASHES, *_ZSETS), 0)
    content: dict[str, dict[bytes, Any]] = {name: {} for name in cursors}
    version: tuple[Any, Any] | None = None
    while cursors:
        async with asyncio.timeout(PAGE_SECONDS):
            meta, sessions, *pages = await _transaction(client, fleet, cursors, page_size)
        _check_configured(fleet, meta)
        if version not in (None, (meta, sessions)):
            return None
        version = (meta, sessions)
        for name, (cursor, page) in zip(tuple(cursors), pages, strict=True):
            content[name].update(page)
            cursors[name] = cursor
            if not cursor:
                del cursors[name]
    assert version is not None
    return {**content, "meta": version[0], "sessions": version[1]}


async def _transaction(
    client: redis.asyncio.Redis, fleet: str, cursors: Mapping[str, int], page_size: int
) -> list[Any]:
    """`meta` and `sessions`, which say whether anything happened, and the next page of every key not yet done."""
    keys = {key.rpartition(":")[2]: key for key in fleet_keys(fleet)}
    pipeline = client.pipeline(transaction=True)
    pipeline.hgetall(keys["meta"])
    pipeline.hgetall(keys["sessions"])
    for name, cursor in cursors.items():
        scan = pipeline.hscan if name in _HASHES else pipeline.zscan
        scan(keys[name], cursor, count=page_size)
    replies: list[Any] = await pipeline.execute()
    return replies


def _check_configured(fleet: str, meta: Mapping[bytes, bytes]) -> None:
    layout = int(meta.get(b"layout", LAYOUT))
    if layout != LAYOUT:
        raise NotVerified(
            f"fleet {fleet}: the store holds layout {layout}, this kvgate reads layout {LAYOUT}"
        )
    if b"config" not in meta:
        raise NotKnown(f"fleet {fleet}: the store does not know it; no gateway has configured it there")


# -- decoding --------------------------------------------------------------------------------------------------------


def snapshot_of(content: Content) -> Snapshot:
    """The store's content as invariants read it; what cannot be read is named in `unreadable`."""
    reader = _Reader(content)
    lanes = reader.table("meta", "lane", _Lane, prefix="lane:")
    return Snapshot(
        fleet=_fleet(content["meta"][b"config"]),
        epoch=reader.scalar("epoch"),
        clock=reader.scalar("clock"),
        opens_at=reader.scalar("opens_at"),
        arrivals=reader.scalar("arrivals"),
        dirty=bool(reader.scalar("dirty")),
        replicas=reader.table("replicas", "replica", Replica),
        calls=reader.table("calls", "call", Call),
        keys=reader.table("keys", "key", Key),
        flows={_flow_name(name): row for name, row in reader.table("flows", "flow", Flow, parts=3).items()},
        lines={
            _line_name(name): row
            for name, row in reader.table("meta", "line", Line, prefix="line:", parts=2).items()
        },
        blocked={name: lane.blocked for name, lane in lanes.items() if lane.blocked},
        owners=_scores(content["owners"]),
        sessions=reader.table("sessions", "session", SessionRecord),
        indexes=_indexes(content),
        place_ends=_scores(content["place_ends"]),
        nodes=reader.nodes(),
        holds=reader.table("holds", "hold", Hold),
        hold_ends=frozenset(member.decode() for member in content["hold_ends"]),
        once={name: row.id for name, row in reader.table("once", "once", _Once).items()},
        rests=reader.rests(),
        unreadable=tuple(reader.unreadable),
    )


class _Reader:
    """Decodes records, and names those that are not what the layout says."""

    def __init__(self, content: Content) -> None:
        self.unreadable: list[str] = []
        self._content = content

    def scalar(self, name: str) -> int:
        try:
            return int(self._content["meta"][name.encode()])
        except (KeyError, ValueError):
            self.unreadable.append(f"meta {name}")
            return 0

    def rests(self) -> dict[tuple[str, str], str]:
        try:
            return decode_rests(self._content["meta"].get(b"rests", b""))
        except msgspec.MsgspecError:
            self.unreadable.append("meta rests")
            return {}

    def nodes(self) -> dict[NodeName, Node]:
        """A segment's nodes on all replicas are one record."""
        found: dict[NodeName, Node] = {}
        for id_, row in self.table("prefixes", "node", _Row).items():
            each = zip(*(iter(row.nodes),) * NODE_WIDTH, strict=True)
            try:
                parts = msgspec.convert(list(each), list[tuple[str, int, int, int, int, str]])
            except (ValueError, msgspec.MsgspecError):
                self.unreadable.append(f"prefixes {id_}")
                continue
            found |= {
                (id_, name, cache, blocks): Node(holders, newcomers, own)
                for name, cache, blocks, holders, newcomers, own in parts
            }
        return found

    def table(self, key: str, kind: str, type_: type[T], prefix: str = "", parts: int = 1) -> dict[str, T]:
        """The records of a hash by field without the prefix; a field has so many parts between colons."""
        found: dict[str, T] = {}
        for field, packed in self._content[key].items():
            text = field.decode(errors="replace")
            if not text.startswith(prefix):
                continue
            name = text.removeprefix(prefix)
            try:
                if len(name.split(":")) != parts:
                    raise ValueError(name)
                found[name] = _record(kind, name, packed, type_)
            except (ValueError, msgspec.MsgspecError):
                self.unreadable.append(f"{key} {text}")
        return found


def _flow_name(text: str) -> FlowName:
    lane, class_, key = text.split(":")
    return lane, class_, key


def _line_name(text: str) -> LineName:
    lane, class_ = text.split(":")
    return lane, class_


@dataclass(frozen=True, slots=True)
class _Lane:
    blocked: str
    book: int
    since: int


@dataclass(frozen=True, slots=True)
class _Once:
    id: str


@dataclass(frozen=True, slots=True)
class _Row:
    nodes: list[Any]


def _record(kind: str, name: str, packed: bytes, type_: type[T]) -> T:
    """One record with its types checked.  Raises ValueError or msgspec.MsgspecError."""
    row = decode_record(kind, packed)
    if kind == "call":
        row |= {"id": name, "class_": row.pop("class"), "prefix": row["prefix"] or ()}
    if kind == "replica":
        row["name"] = name
    return msgspec.convert(row, type_)


def _fleet(packed: bytes) -> FleetConfig:
    """What `records.config_arguments` packed; a snapshot has its replicas in their own records."""
    lease_ms, heartbeat_ms, overtake_blocks, lanes, classes, *_ = msgspec.msgpack.decode(packed)
    return FleetConfig(
        lease_ms,
        heartbeat_ms,
        overtake_blocks,
        tuple((name, tuple(pools)) for name, pools in lanes),
        tuple((name, share) for name, share in classes),
        replicas=(),
    )


def _scores(members: Mapping[bytes, Any]) -> dict[str, int]:
    return {member.decode(): int(score) for member, score in members.items()}


def _indexes(content: Content) -> dict[str, frozenset[str]]:
    indexes = {name: frozenset(member.decode() for member in content[name]) for name in _INDEXES}
    deadlines = (f"{id_}:{deadline}" for id_, deadline in _scores(content["deadlines"]).items())
    return {**indexes, "deadlines": frozenset(deadlines)}
