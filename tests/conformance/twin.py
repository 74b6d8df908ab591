"""The specification and the Lua side by side: every command goes to both, replies and content must be equal."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import msgspec
import redis

from gateway.core.books import Books, Call, FleetConfig
from gateway.core.invariants import Snapshot, step_violations, violations
from gateway.core.nodes import Prefix
from gateway.ledger.records import (
    FIELDS,
    config_arguments,
    decode_record,
    decode_rests,
    decode_step,
    decode_text,
    path_argument,
)
from gateway.ledger.scripts import Library, fleet_keys, library
from gateway.ledger.verify import Content, snapshot_of
from tests.conformance.books import read_content

FLEET = "t"
IDLE_LANE = {"blocked": "", "book": 0, "since": -1}
IN_FULL = (-1, 0, b"", 0, [])
"""Last arguments of A, Q and R, of a call that is charged in full and shares nothing: held, base, path, promised and
prefix."""
Op = list[Any]
Saved = tuple[dict[bytes, bytes | None], Books]


class Scripts:
    """The ledger's scripts on a real server, which is emptied first.  `now` is an argument of each call."""

    def __init__(self, client: "redis.Redis[bytes]", scripts: Library | None = None):
        self.client = client
        client.flushall()
        self.scripts = scripts or library()
        client.function_load(self.scripts.text, replace=True)
        self.keys = fleet_keys(FLEET)

    def evaluate(self, script: str, *arguments: Any) -> Any:
        reply = self.client.fcall(self.scripts.function(script), len(self.keys), *self.keys, *arguments)
        return decode_step(reply) if script == "step" else decode_text(reply)


class Twin(Scripts):
    """One fleet in two implementations.  `now` is handed to both; the run id is the real server's."""

    def __init__(self, client: "redis.Redis[bytes]", config: FleetConfig, scripts: Library | None = None):
        super().__init__(client, scripts)
        self.run = str(client.info("server")["run_id"])
        self.books = Books()
        self.snapshot: Snapshot | None = None
        self.compared = 0
        self.configure(1_000_000, config)

    def configure(self, now: int, config: FleetConfig) -> None:
        self.compare(
            self.evaluate("configure", now, "wake:", "fleet", *config_arguments(config)),
            self.books.configure(now, self.run, config),
        )

    def observe(self, now: int, replica: str, up: bool) -> None:
        self.compare(
            self.evaluate("configure", now, "wake:", "replica", replica, int(up)),
            self.books.observe(now, self.run, replica, up),
        )

    def seat(self, now: int, scraper: str, replica: str) -> Any:
        reply = self.books.seat(now, self.run, scraper, replica)
        self.compare(self.evaluate("configure", now, "wake:", "seat", scraper, replica), reply)
        return reply

    def learn(
        self,
        now: int,
        scraper: str,
        replica: str,
        number: int,
        learned: Sequence[int],
        told: str,
        cache: int = 0,
    ) -> Any:
        reply = self.books.learn(now, self.run, scraper, replica, number, learned, told, cache)
        got = self.evaluate(
            "configure", now, "wake:", "learn", scraper, replica, number, *learned, told, cache
        )
        self.compare(got, reply)
        return reply

    def distrust(self, now: int, replica: str, cache: int) -> None:
        self.compare(
            self.evaluate("configure", now, "wake:", "distrust", replica, cache),
            self.books.distrust(now, self.run, replica, cache),
        )

    def set_shut(self, now: int, shut: bool) -> None:
        self.compare(
            self.evaluate("configure", now, "wake:", "shut", int(shut)),
            self.books.set_shut(now, self.run, shut),
        )

    def rest(self, now: int, teller: str, replica: str, why: str) -> None:
        self.compare(
            self.evaluate("configure", now, "wake:", "rest", teller, replica, why),
            self.books.rest(now, self.run, teller, replica, why),
        )

    def hello(self, now: int, owner: str) -> None:
        self.compare(self.evaluate("hello", now, owner), self.books.hello(now, self.run, owner))

    def step(self, now: int, owner: str, batch: int, ops: Sequence[Op], malformed: Op | None = None) -> Any:
        """The specification takes no malformed op; the Lua gets it first and has to answer an error for it alone."""
        packed = [pack_op(op) for op in ([malformed, *ops] if malformed else ops)]
        reply = self.books.step(now, self.run, owner, batch, ops)
        got = self.evaluate("step", now, owner, batch, "wake:", *packed)
        if malformed and got[0] == "ok":
            assert got[5].pop(0)[0] == "error", malformed
        self.compare(got, reply)
        return reply

    def restart_store(self) -> None:
        """The next script sees a run id that is not the books' own."""
        self.client.hset(self.keys[0], "run", "another")
        self.books.run = "another"

    def save(self) -> Saved:
        """Both contents, for `go_back`."""
        contents = {key: self.client.dump(key) for key in self.client.scan_iter()}
        return contents, copy.deepcopy(self.books)

    def go_back(self, saved: Saved) -> None:
        """The server process goes on with older content, as one does that was a replica meanwhile."""
        contents, books = saved
        self.client.flushall()
        for key, content in contents.items():
            self.client.restore(key, 0, content)
        self.books, self.snapshot = copy.deepcopy(books), None

    def compare(self, lua: Any, spec: Any) -> None:
        self.compared += 1
        assert lua == spec
        content = read_content(self.client, FLEET)
        got, wanted = lua_content(content), spec_content(self.books)
        for name in wanted:
            assert got[name] == wanted[name], name
        before, self.snapshot = self.snapshot, snapshot_of(content)
        found = violations(self.snapshot)
        if before:
            found += step_violations(before, self.snapshot)
        assert not found, "\n".join(map(str, found))


def pack_op(op: Op) -> bytes:
    """As a gateway packs it."""
    return msgspec.msgpack.encode([path_argument(item) if isinstance(item, bytes) else item for item in op])


def lua_content(content: Content) -> dict[str, Any]:
    """The store's records as the specification has them: without flows that say nothing and empty rows."""
    meta = {_text(k): v for k, v in content["meta"].items()}
    rows = {
        kind: {
            k.split(":", 1)[1]: decode_record(kind, v) for k, v in meta.items() if k.startswith(kind + ":")
        }
        for kind in ("line", "lane", "drain", "capacity")
    }
    virtual = {name: row["virtual"] for name, row in rows["line"].items()}
    flows = {
        name: row
        for name, row in _hash(content, "flows").items()
        if row["waiting"] or row["resume"] >= 0 or row["tag"] > virtual.get(name.rsplit(":", 1)[0], 0)
    }
    scalars = ("epoch", "policy", "clock", "wall", "skipped", "opens_after", "opens_at", "arrivals", "dirty")
    return {
        "meta": {name: int(meta.get(name, 0)) for name in scalars}
        | {
            "recheck": _text(meta.get("recheck", "")),
            "rests": decode_rests(meta.get("rests", b"")),
            "shut": meta.get("shut") == b"1",
        },
        "replicas": _hash(content, "replicas"),
        "calls": _hash(content, "calls"),
        "keys": _hash(content, "keys"),
        "flows": flows,
        "lines": {n: r for n, r in rows["line"].items() if any(r.values())},
        "lanes": {n: r for n, r in rows["lane"].items() if r != IDLE_LANE},
        "drains": rows["drain"],
        "capacities": rows["capacity"],
        "sessions": _hash(content, "sessions"),
        **{
            name: sorted(map(_text, content[name]))
            for name in ("queue", "order", "parked", "owned", "outbox", "backlog", "places")
        },
        **{name: _scores(content, name) for name in ("owners", "deadlines", "place_ends")},
        "forecast": {_text(k): decode_record("forecast", v)["ends"] for k, v in content["forecast"].items()},
        "once": {_text(k): decode_record("once", v)["id"] for k, v in content["once"].items()},
        "nodes": {name: astuple(node) for name, node in snapshot_of(content).nodes.items()},
        "holds": _hash(content, "holds"),
        "hold_ends": sorted(map(_text, content["hold_ends"])),
    }


def _hash(content: Content, name: str) -> dict[str, dict[str, Any]]:
    """The records of a hash, whose kind is the singular of its name."""
    return {_text(k): decode_record(name.removesuffix("s"), v) for k, v in content[name].items()}


def _scores(content: Content, name: str) -> dict[str, int]:
    return {_text(member): int(score) for member, score in content[name].items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def spec_content(books: Books) -> dict[str, Any]:
    """The content of the Lua's keys, derived from the specification by scanning."""
    queued = [c for c in books.calls.values() if c.state == "queued"]
    flow_names = {(c.lane, c.class_, c.key) for c in queued} | set(books.tags) | set(books.resume)
    flows: dict[str, Any] = {}
    for flow in flow_names:
        waiting = [c for c in queued if (c.lane, c.class_, c.key) == flow]
        tag = books.tags.get(flow, 0)
        resume, later = books.resume.get(flow, -1), books.later.get(flow)
        if waiting or resume >= 0 or tag > books.virtual.get(flow[:2], 0):
            flows[":".join(flow)] = {
                "tag": tag,
                "waiting": len(waiting),
                "blocks": sum(c.blocks for c in waiting),
                "weight": books.weights.get(flow, 0),
                "parked": int(flow in books.parked),
                "owed": books.owed.get(flow, 0),
                "resume": resume,
                "later": later.tag if later else -1,
                "returned": later.arrival if later else 0,
                "warm": sum(c.blocks for c in waiting if c.is_warm),
            }
    lines = {}
    for lane_class in {f[:2] for f in flow_names} | set(books.virtual) | set(books.credit):
        waiting = [c for c in queued if (c.lane, c.class_) == lane_class]
        row = {
            "virtual": books.virtual.get(lane_class, 0),
            "waiting": len(waiting),
            "blocks": sum(c.blocks for c in waiting),
            "weights": sum(w for f, w in books.weights.items() if f[:2] == lane_class),
            "credit": books.credit.get(lane_class, 0),
            "warm": sum(c.blocks for c in waiting if c.is_warm),
        }
        if any(row.values()):
            lines[":".join(lane_class)] = row
    lanes = {}
    for lane in {*books.blocked, *books.book, *books.since}:  # a call may wait in one that is not configured
        row = {
            "blocked": books.blocked.get(lane, ""),
            "book": books.book.get(lane, 0),
            "since": books.since.get(lane, -1),
        }
        if row != IDLE_LANE:
            lanes[lane] = row
    return {
        "meta": {
            "epoch": books.epoch,
            "policy": books.policy,
            "clock": books.clock,
            "wall": books.wall,
            "skipped": books.skipped,
            "opens_after": books.opens_after,
            "opens_at": books.opens_at,
            "arrivals": books.arrivals,
            "dirty": int(books.dirty),
            "recheck": books.recheck,
            "rests": books.rests,
            "shut": books.shut,
        },
        "replicas": {r.name: _row(r, "replica") for r in books.replicas.values()},
        "calls": {c.id: _row(c, "call") for c in books.calls.values()},
        "keys": {name: _row(k, "key") for name, k in books.keys.items()},
        "flows": flows,
        "lines": lines,
        "lanes": lanes,
        "drains": {name: _row(d, "drain") for name, d in books.drains.items()},
        "capacities": {name: _row(c, "capacity") for name, c in books.capacities.items()},
        "owners": dict(books.owners),
        "sessions": {owner: _session(books, owner) for owner in books.sessions},
        "queue": sorted(
            f"{c.lane}:{c.class_}:{c.key}:{int(not c.is_warm)}{c.arrival:012d}:{c.id}" for c in queued
        ),
        "order": sorted(
            f"{lane}:{':' * warm}{class_}:{books.tags.get((lane, class_, key), 0):016d}:{key}"
            for (lane, class_, key), warm in {(_flow(c), c.is_warm) for c in queued}
            if (lane, class_, key) not in books.parked
        ),
        "parked": sorted(f"{key}:{lane}:{class_}" for lane, class_, key in books.parked),
        "owned": sorted(f"{c.owner}:{c.id}" for c in books.calls.values()),
        "outbox": sorted(
            f"{c.owner}:{c.id}" for c in books.calls.values() if c.state in ("unclaimed", "displaced")
        ),
        "backlog": sorted(
            f"{lane}:{class_}:{sum(c.blocks for c in queued if _flow(c) == (lane, class_, key)):012d}:{key}"
            for lane, class_, key in {_flow(c) for c in queued}
        ),
        "deadlines": {c.id: c.deadline for c in queued},
        "places": sorted(place.member for place in books.places),
        "place_ends": {place.member: place.end for place in books.places},
        "forecast": {
            owner: [item for end in ends for item in (end.due, end.replica, end.blocks)]
            for owner, ends in books.forecasts.items()
        },
        "once": {c.once: c.id for c in books.calls.values() if c.once},
        "nodes": {name: astuple(node) for name, node in books.nodes.nodes.items()},
        "holds": {name: asdict(hold) for name, hold in books.holds.holds.items()},
        "hold_ends": sorted(f"{h.replica}:{h.due:013d}:{name}" for name, h in books.holds.holds.items()),
    }


def _flow(call: Call) -> tuple[str, str, str]:
    return call.lane, call.class_, call.key


def _row(record: Any, kind: str) -> dict[str, Any]:
    row = {}
    for name in FIELDS[kind]:
        value = getattr(record, "class_" if name == "class" else name)
        row[name] = list(value) if isinstance(value, tuple) else value
        if isinstance(value, Prefix):
            row[name] = msgspec.json.decode(msgspec.json.encode(value)) if value.segments else ""
    return row


def _session(books: Books, owner: str) -> dict[str, int]:
    claimed = [int(c.id, 16) for c in books.calls.values() if c.owner == owner and c.state == "reserved"]
    session = books.sessions[owner]
    return {
        "batch": session.batch,
        "told": session.told,
        "declared": session.declared,
        "count": len(claimed),
        "sum": sum(claimed) % 2**48,
    }
