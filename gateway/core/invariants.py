"""What must hold of one fleet's books whatever happens: checks on a snapshot of the store's content.

Tests call `violations` on everything they leave behind, `kvgate verify` on a live store.  It judges the scripts and
their specification (`core/books.py`) alike, so it shares no decision with either: it has their records and constants
and says again, in its own words, what a call fits and which flows come first.  `docs/ledger.md` lists the rules.

A snapshot must be whole: what the store held between two scripts.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from gateway.core.books import Call, FleetConfig, Key, Replica
from gateway.core.estimate import PREFILL_TOKENS_MIN
from gateway.core.holds import Hold
from gateway.core.nodes import Node, NodeName, Prefix
from gateway.core.order import (
    DIGEST_MODULUS,
    HOLD_MS,
    HOLDS_MAX,
    LOOKAHEAD,
    OPERATOR,
    PLACE_MS,
    PLACES,
    PLACES_OF_FLOW,
    POOL_SHARE_SCALE,
)

FlowName = tuple[str, str, str]
"""Lane, class and key."""
LineName = tuple[str, str]
"""Lane and class."""
_POINT_BYTES = 4
_TILTS = (12, 50, 240)
_RARE = (1e-3,) * 5 + (0.012,) * 6
"""By horizon."""
_REACHES = (32, 128, 256, 512, 768, 1024, 2048, 3072, 4096, 8192, 12288)
"""Tokens from now, by horizon."""
_SINGLE = 3
"""So many horizons, the first, may stand for themselves alone; each of the others for the next one, too."""
_EXACT = 2**20
_PARTS = 64
"""Of a block: what a path is counted in."""


class Rule(StrEnum):
    """The value is what an operator reads."""

    RECORD = "every record can be read"
    SUMS = "a replica's figures are the sums of its calls"
    HOLDINGS = "a key's figures are the sums of its calls"
    STATE = "a call is queued or displaced on no replica, or held on one that exists"
    ARRIVAL = "no two calls have one arrival number"
    OWNER = "what an owner holds ends with its lease"
    DIGEST = "an owner's digest is that of its claimed calls"
    INDEX = "an index lists exactly what the calls say"
    WAITING = "a flow and its class count their waiters"
    PARKED = "a parked flow's key is at its cap"
    REST = "a replica that answers drains while somebody who is known says that it rests, and else is up"
    HOLD = "a hold is for the first of a flow that is not parked, on a replica that is up, one for each call"
    BLOCKED = "a blocked head waits in its lane"
    DISPATCH = "nobody waits that could start"
    OVERTAKING = "a head that was passed too often has a replica held for it"
    PLACE = "a remembered place is nobody's, and its time ends"
    ONCE = "of the calls under one Idempotency-Key one is known"
    QUIET = "without calls the order is empty"
    CLOCK = "clock, epoch, arrivals and batch numbers never go back"
    GATE = "behind a closed gate nothing is admitted"
    LIMIT = "nothing is admitted above a limit"
    FORESEEN = "nothing is admitted above what a replica's paths leave"
    NODE = "what calls share is counted once, as long as one of them is there"
    SHARED = "who is admitted shares only what is in the cache that its replica has now"
    SOFT = "what is held softly is the sum of the holds of conversations that nobody has gone on with"
    PROMISE = "who was promised the guarantee is charged in full, and admitted on no elastic replica"


@dataclass(frozen=True, slots=True)
class Violation:
    rule: Rule
    about: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.about}: {self.rule}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Flow:
    tag: int = 0
    waiting: int = 0
    blocks: int = 0
    weight: int = 0
    parked: int = 0
    owed: int = 0
    resume: int = -1
    """The tag from which a call that returns goes on; -1 unless nobody waits and one may return."""
    later: int = -1
    """The tag for those who came after a return; -1 unless calls wait and one has returned."""
    returned: int = 0
    """The last arrival before that return."""
    warm: int = 0
    """Of the blocks those of warm calls."""


@dataclass(frozen=True, slots=True)
class Line:
    """One class of one lane."""

    virtual: int = 0
    waiting: int = 0
    blocks: int = 0
    weights: int = 0
    credit: int = 0
    warm: int = 0
    """Of the blocks those of warm calls."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    batch: int
    told: int
    declared: int
    count: int
    sum: int


@dataclass(frozen=True)
class Snapshot:
    """The content of the keys of `docs/ledger.md`, decoded; the indexes by their members."""

    fleet: FleetConfig
    epoch: int
    clock: int
    opens_at: int
    arrivals: int
    dirty: bool
    replicas: Mapping[str, Replica]
    calls: Mapping[str, Call]
    keys: Mapping[str, Key]
    flows: Mapping[FlowName, Flow]
    lines: Mapping[LineName, Line]
    blocked: Mapping[str, str]
    """Lane -> id of its blocked head."""
    owners: Mapping[str, int]
    sessions: Mapping[str, SessionRecord]
    indexes: Mapping[str, frozenset[str]]
    """`queue`, `order`, `parked`, `owned`, `outbox`, `backlog` and `places` by member, `deadlines` as
    `id:milliseconds`."""
    place_ends: Mapping[str, int] = field(default_factory=dict)
    """Of the members of `places`."""
    nodes: Mapping[NodeName, Node] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    hold_ends: frozenset[str] = frozenset()
    """Their index, by member."""
    once: Mapping[str, str] = field(default_factory=dict)
    """Hash of key and `Idempotency-Key` -> id of the call that has it."""
    rests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Replica and who says that it gets no new calls -> why."""
    unreadable: tuple[str, ...] = ()
    """Records that are not what the layout says, as `key field`."""

    @cached_property
    def waiting(self) -> dict[FlowName, list[Call]]:
        """The queued calls of each flow, first come first."""
        found: dict[FlowName, list[Call]] = defaultdict(list)
        for call in sorted(self.calls.values(), key=lambda c: c.arrival):
            if call.state == "queued":
                found[call.lane, call.class_, call.key].append(call)
        return dict(found)

    @cached_property
    def held(self) -> dict[str, list[Call]]:
        """The calls on each replica."""
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls.values():
            if holds(call):
                found[call.replica].append(call)
        return dict(found)

    def is_parked(self, flow: FlowName) -> bool:
        return flow in self.flows and self.flows[flow].parked != 0


def holds(call: Call) -> bool:
    """Whether it has a place on a replica."""
    return call.state in ("unclaimed", "reserved")


def _flow(call: Call) -> FlowName:
    return call.lane, call.class_, call.key


def violations(books: Snapshot) -> list[Violation]:
    """All that is wrong with a whole snapshot, in the order of the rules."""
    checks = (
        _unreadable, _sums, _charges, _nodes, _soft, _holdings, _states, _arrivals, _owners, _digests,
        _indexes, _flow_counts, _line_counts, _places, _resumptions, _once, _parked, _rests, _holds,
        _blocked_heads, _startable, _overtaken, _quiet,
    )  # fmt: skip
    return [violation for check in checks for violation in check(books)]


def _compared(rule: Rule, about: str, **figures: tuple[Any, Any]) -> Iterator[Violation]:
    """A violation for each `figure=(expected, found)` that differs."""
    for figure, (expected, found) in figures.items():
        if expected != found:
            yield Violation(rule, f"{about} {figure}", expected, found)


# -- one record at a time --------------------------------------------------------------------------------------------


def _unreadable(books: Snapshot) -> Iterator[Violation]:
    for record in books.unreadable:
        yield Violation(Rule.RECORD, f"record {record}", "its fields", "something else")


def _sums(books: Snapshot) -> Iterator[Violation]:
    shared: dict[str, int] = defaultdict(int)
    for (_, replica_name, _, blocks), node in books.nodes.items():
        shared[replica_name] += 0 if node.own else blocks
    for name, replica in books.replicas.items():
        held, once = books.held.get(name, []), shared[name]
        yield from _compared(
            Rule.SUMS,
            f"replica {name}",
            used=(sum(c.held for c in held) + once, replica.used),
            full=(sum(map(_rest, held)) + once, replica.full),
            assured=(sum(_rest(c) for c in held if not c.elastic) + once, replica.assured),
            shared=(once, replica.shared),
            elastic=(sum(c.elastic != 0 for c in held), replica.elastic),
            base=(max((c.base for c in held if c.elastic), default=0), replica.base),
            sums=(_integers(_points(held)), _integers(replica.sums)),
            sequences=(sum(c.sequences for c in held), replica.sequences),
            prefill=(sum(c.prefilling for c in held), replica.prefill),
        )


def _joined(call: Call) -> list[NodeName]:
    """The nodes in which a call is."""
    prefix = call.prefix
    return [(s.id, call.replica, prefix.cache, s.blocks) for s in prefix.segments[: prefix.joined]]


def _outside(call: Call) -> int:
    """Blocks that are counted in nodes, and not with it."""
    return sum(blocks for *_, blocks in _joined(call)) - call.prefix.alone


def _rest(call: Call) -> int:
    """Of its demand what is counted with it."""
    return call.blocks - _outside(call)


def _now(call: Call) -> int:
    """What it holds."""
    return max(call.asked - _outside(call), 0) if call.elastic else _rest(call)


def _nodes(books: Snapshot) -> Iterator[Violation]:
    """Each counts the calls that are in it, of which there is one at least."""
    counts: dict[NodeName, list[int]] = defaultdict(lambda: [0, 0])
    for id_, call in books.calls.items():
        prefix = call.prefix
        if not holds(call):
            found = (prefix.joined, prefix.computed, prefix.alone)
            yield from _compared(Rule.NODE, f"call {id_}", place=((0, 0, 0), found))
            continue
        if prefix.joined and not prefix.cache:
            yield Violation(Rule.NODE, f"call {id_} joined", 0, prefix.joined)
        own = sum(name[-1] for name in _joined(call) if books.nodes.get(name, Node()).own == id_)
        yield from _compared(Rule.NODE, f"call {id_}", alone=(own, prefix.alone))
        for name in _joined(call):
            counts[name][0 if prefix.computed else 1] += 1
            owner = books.nodes.get(name, Node()).own
            if owner not in ("", id_):
                yield Violation(
                    Rule.NODE, f"node {':'.join(map(str, name))} own", "nobody's but its own", owner
                )
    for name in books.nodes.keys() | counts.keys():
        node = books.nodes.get(name, Node())
        about = f"node {':'.join(map(str, name))}"
        yield from _compared(Rule.NODE, about, counts=(counts[name], [node.holders, node.newcomers]))
        if not node.holders + node.newcomers:
            yield Violation(Rule.NODE, about, "somebody in it", "nobody")


def _soft(books: Snapshot) -> Iterator[Violation]:
    """Holds are where calls are sent and where prefixes are cached, and none lasts longer than from now on."""
    blocks: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, list[int]] = defaultdict(list)
    for name, hold in books.holds.items():
        blocks[hold.replica].append(hold.blocks)
        ends[hold.replica].append(hold.due)
        replica = books.replicas.get(hold.replica)
        if replica is None or replica.state != "up" or not replica.cache or hold.blocks < 1:
            expected = "blocks on a replica that is up and has a cache"
            yield Violation(Rule.SOFT, f"hold {name}", expected, hold)
        if hold.due > books.clock + HOLD_MS:
            yield Violation(Rule.SOFT, f"hold {name} end", f"at most {books.clock + HOLD_MS}", hold.due)
    for name, replica in books.replicas.items():
        about, count = f"replica {name}", len(blocks[name])
        yield from _compared(
            Rule.SOFT, about, soft=(sum(blocks[name]), replica.soft), holds=(count, replica.holds)
        )
        if count > HOLDS_MAX:
            yield Violation(Rule.SOFT, f"{about} holds", f"at most {HOLDS_MAX}", count)
        if bool(replica.soft_end) != bool(count) or replica.soft_end > min(ends[name], default=0):
            yield Violation(
                Rule.SOFT, f"{about} soft_end", f"at most {min(ends[name], default=0)}", replica.soft_end
            )
    members = {f"{hold.replica}:{hold.due:013d}:{name}" for name, hold in books.holds.items()}
    yield from _compared(Rule.SOFT, "hold_ends", members=(members, set(books.hold_ends)))


def _points(held: Iterable[Call]) -> bytes:
    """The sum of the paths by which these are charged, point by point; packed as the paths are."""
    paths = [_beside(call, _integers(call.path)) for call in held if call.elastic]
    return b"".join(sum(points).to_bytes(_POINT_BYTES, "big") for points in zip(*paths, strict=True))


def _beside(call: Call, path: list[int]) -> list[int]:
    """Of a call's path what is left beside that part of it which nodes count: of each point the part of the blocks that
    it has by then at most.  Where nodes count less than the path is without, it has that, too."""
    net, width, changed = call.prefix.net, len(_TILTS), list[int]()
    more = _outside(call) - net
    if more <= 0:
        return [point + (-more * _PARTS if point else 0) for point in path]
    for at, point in enumerate(path):
        first = at - at % width
        later = path[first + width : first + 2 * width]
        number = at // width
        stands_for = number if number < _SINGLE and later[0] else number + 1
        blocks = call.blocks
        if stands_for < len(_REACHES):
            blocks = min(blocks, call.asked + math.ceil(_REACHES[stands_for] / call.prefix.block_size))
        blocks = max(1, blocks - net, *(math.ceil(other / _PARTS) for other in path[first : first + width]))
        part = max(blocks - more, 0) if blocks <= _EXACT else blocks
        changed.append((point * part + blocks - 1) // blocks)
    return changed


def _integers(packed: bytes) -> list[int]:
    return [
        int.from_bytes(packed[at : at + _POINT_BYTES], "big") for at in range(0, len(packed), _POINT_BYTES)
    ]


def _charges(books: Snapshot) -> Iterator[Violation]:
    """A call is charged by its path, and holds what it asked for, or in full."""
    for id_, call in books.calls.items():
        about = f"call {id_}"
        if not holds(call):
            yield from _compared(Rule.STATE, about, held=(0, call.held), elastic=(0, call.elastic))
            continue
        yield from _compared(Rule.STATE, about, held=(_now(call), call.held))
        if call.elastic and not call.path:
            yield Violation(Rule.STATE, f"{about} path", "one", "none")
        elif call.elastic:
            base = books.replicas[call.replica].base if call.replica in books.replicas else 0
            yield from _compared(Rule.STATE, about, base=(base, call.base))
        if call.elastic and call.promised:
            yield Violation(Rule.PROMISE, about, "charged in full", "by its path")


def _holdings(books: Snapshot) -> Iterator[Violation]:
    blocks: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    pools: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for call in books.calls.values():
        if holds(call):
            blocks[call.key] += call.blocks
            count[call.key] += 1
            pools[call.key][call.pool] += call.blocks
    for name in books.keys.keys() | count.keys():
        key = books.keys.get(name, Key())
        yield from _compared(
            Rule.HOLDINGS,
            f"key {name}",
            blocks=(blocks[name], key.blocks),
            calls=(count[name], key.calls),
            pools=(dict(pools[name]), _held_by_pool(key)),
        )


def _held_by_pool(key: Key) -> dict[str, int]:
    return dict(zip(key.pools[::2], key.pools[1::2], strict=True))


def _states(books: Snapshot) -> Iterator[Violation]:
    for id_, call in books.calls.items():
        if call.state in ("queued", "displaced"):
            yield from _compared(Rule.STATE, f"call {id_}", replica=("", call.replica))
            yield from _compared(Rule.STATE, f"call {id_}", prefilling=(0, call.prefilling))
            yield from _compared(Rule.STATE, f"call {id_}", pool=("", call.pool))
        elif not holds(call):
            states = "queued, displaced, unclaimed or reserved"
            yield Violation(Rule.STATE, f"call {id_} state", states, call.state)
        elif call.replica not in books.replicas:
            yield Violation(Rule.STATE, f"call {id_} replica", "one that exists", call.replica)
        uncached = _uncached(call, sum(blocks for *_, blocks in _joined(call)))
        if call.prefilling and (call.prefilling != uncached or call.prefix.computed):
            yield Violation(Rule.STATE, f"call {id_} prefilling", f"0 or {uncached}", call.prefilling)


def _uncached(call: Call, shared: int) -> int:
    """What counts of its prompt as prefill where so many blocks of it are computed."""
    left = call.prefill - shared * call.prefix.block_size
    return left if left >= PREFILL_TOKENS_MIN or not shared else 0


def _arrivals(books: Snapshot) -> Iterator[Violation]:
    seen: dict[int, str] = {}
    for id_, call in books.calls.items():
        if call.arrival in seen:
            yield Violation(
                Rule.ARRIVAL, f"call {id_}", f"a number other than {seen[call.arrival]}'s", call.arrival
            )
        if not 0 < call.arrival <= books.arrivals:
            yield Violation(Rule.ARRIVAL, f"call {id_}", f"1 to {books.arrivals}", call.arrival)
        seen[call.arrival] = id_


def _owners(books: Snapshot) -> Iterator[Violation]:
    """The lease of an owner that is not in the list is never over, so nothing would give its calls back."""
    for id_, call in books.calls.items():
        if call.owner not in books.owners:
            yield Violation(Rule.OWNER, f"call {id_} owner", "one with a lease", call.owner)
    for owner in books.sessions.keys() - books.owners.keys():
        yield Violation(Rule.OWNER, f"session {owner}", "a lease", "none")


def _digests(books: Snapshot) -> Iterator[Violation]:
    ids: dict[str, list[int]] = defaultdict(list)
    for id_, call in books.calls.items():
        if call.state == "reserved":
            ids[call.owner].append(int(id_, 16))
    for owner, session in books.sessions.items():
        claimed = ids[owner]
        yield from _compared(
            Rule.DIGEST,
            f"session {owner}",
            count=(len(claimed), session.count),
            sum=(sum(claimed) % DIGEST_MODULUS, session.sum),
        )


# -- the queue -------------------------------------------------------------------------------------------------------


def _indexes(books: Snapshot) -> Iterator[Violation]:
    calls = books.calls.items()
    queued = [(id_, call) for id_, call in calls if call.state == "queued"]
    expected = {
        "queue": {f"{c.lane}:{c.class_}:{c.key}:{int(not c.is_warm)}{c.arrival:012d}:{id_}" for id_, c in queued},
        "deadlines": {f"{id_}:{c.deadline}" for id_, c in queued},
        "owned": {f"{c.owner}:{id_}" for id_, c in calls},
        "outbox": {f"{c.owner}:{id_}" for id_, c in calls if c.state in ("unclaimed", "displaced")},
        "backlog": {f"{lane}:{class_}:{sum(c.blocks for c in waiting):012d}:{key}"
                    for (lane, class_, key), waiting in books.waiting.items()},
        "order": {_order_member(books, _flow(c), c.is_warm) for _, c in queued if not books.is_parked(_flow(c))},
        "parked": {f"{key}:{lane}:{class_}" for lane, class_, key in books.waiting
                   if books.is_parked((lane, class_, key))},
    }  # fmt: skip
    for name, members in expected.items():
        found = books.indexes[name]
        for member in sorted(members - found):
            yield Violation(Rule.INDEX, f"{name} {member}", "listed", "missing")
        for member in sorted(found - members):
            yield Violation(Rule.INDEX, f"{name} {member}", "nothing", "listed")


def _order_member(books: Snapshot, flow: FlowName, warm: bool) -> str:
    """A flow's warm calls are listed under a class of their own."""
    lane, class_, key = flow
    return f"{lane}:{':' if warm else ''}{class_}:{books.flows.get(flow, Flow()).tag:016d}:{key}"


def _flow_counts(books: Snapshot) -> Iterator[Violation]:
    for name in books.flows.keys() | books.waiting.keys():
        flow, waiting = books.flows.get(name, Flow()), books.waiting.get(name, [])
        about = f"flow {':'.join(name)}"
        yield from _compared(
            Rule.WAITING,
            about,
            waiting=(len(waiting), flow.waiting),
            blocks=(sum(c.blocks for c in waiting), flow.blocks),
            warm=(sum(c.blocks for c in waiting if c.is_warm), flow.warm),
        )
        if (flow.weight > 0) != bool(waiting):
            yield Violation(Rule.WAITING, f"{about} weight", "above 0 while calls wait, else 0", flow.weight)
        if flow.parked and not waiting:
            yield Violation(Rule.WAITING, f"{about} parked", 0, flow.parked)
        if flow.owed < 0 or (flow.owed and not waiting):
            yield Violation(Rule.WAITING, f"{about} owed", "0, or above it while calls wait", flow.owed)


def _line_counts(books: Snapshot) -> Iterator[Violation]:
    counts: dict[LineName, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for flow, waiting in books.waiting.items():
        count = counts[flow[:2]]
        count[0] += len(waiting)
        count[1] += sum(c.blocks for c in waiting)
        count[2] += books.flows.get(flow, Flow()).weight
        count[3] += sum(c.blocks for c in waiting if c.is_warm)
    for name in books.lines.keys() | counts.keys():
        line, (calls, blocks, weights, warm) = books.lines.get(name, Line()), counts[name]
        about = f"class {':'.join(name)}"
        yield from _compared(
            Rule.WAITING,
            about,
            waiting=(calls, line.waiting),
            blocks=(blocks, line.blocks),
            weights=(weights, line.weights),
            warm=(warm, line.warm),
        )
        if line.credit and not calls:
            yield Violation(Rule.WAITING, f"{about} credit", "0 while nobody waits", line.credit)


def _places(books: Snapshot) -> Iterator[Violation]:
    if len(books.place_ends) > PLACES:
        yield Violation(Rule.PLACE, "places", f"at most {PLACES}", len(books.place_ends))
    flows = Counter(member.rsplit(":", 2)[0] for member in books.place_ends)
    for name, count in flows.items():
        if count > PLACES_OF_FLOW:
            yield Violation(Rule.PLACE, f"flow {name} places", f"at most {PLACES_OF_FLOW}", count)
    yield from _compared(Rule.PLACE, "places", members=(set(books.place_ends), books.indexes["places"]))
    arrivals = {call.arrival for call in books.calls.values()}
    for member, end in books.place_ends.items():
        arrival = int(member.rpartition(":")[2])
        if not 0 < arrival <= books.arrivals or arrival in arrivals:
            yield Violation(Rule.PLACE, f"place {member}", "nobody's arrival number", arrival)
        if end > books.clock + PLACE_MS:
            yield Violation(Rule.PLACE, f"place {member} end", f"at most {books.clock + PLACE_MS}", end)


def _resumptions(books: Snapshot) -> Iterator[Violation]:
    """Who returns to an empty flow goes on from a tag; that is kept as long as somebody may."""
    left = {tuple(member.split(":")[:3]) for member in books.place_ends}
    for name, flow in books.flows.items():
        if flow.resume >= 0 and (flow.waiting or name not in left):
            expected = "-1 unless nobody waits and one may return"
            yield Violation(Rule.PLACE, f"flow {':'.join(name)} resume", expected, flow.resume)
        waiting = books.waiting.get(name)
        if flow.later >= 0 and not (waiting and waiting[0].arrival <= flow.returned):
            yield Violation(
                Rule.PLACE, f"flow {':'.join(name)} later", "-1 unless one has returned", flow.later
            )


def _once(books: Snapshot) -> Iterator[Violation]:
    named = [(call.once, id_) for id_, call in books.calls.items() if call.once]
    for once, id_ in sorted({*named, *books.once.items()}):
        if books.once.get(once) != id_ or (once, id_) not in named:
            yield Violation(Rule.ONCE, f"once {once}", id_, books.once.get(once))


def _parked(books: Snapshot) -> Iterator[Violation]:
    """While a script has left something to do, who is parked for a part of a pool may have room there again."""
    for flow in books.waiting:
        rechecked = books.dirty and books.keys.get(flow[2], Key()).pool_share >= 0
        capped = any(_capped(books, head) for head in _heads(books, flow))
        if books.is_parked(flow) and not capped and not rechecked:
            yield Violation(Rule.PARKED, f"flow {':'.join(flow)}", "in the order", "parked")


def _rests(books: Snapshot) -> Iterator[Violation]:
    resting = {name for name, _ in books.rests}
    for name, replica in books.replicas.items():
        wanted = "draining" if name in resting else "up"
        if replica.state in ("up", "draining") and replica.state != wanted:
            yield Violation(Rule.REST, f"replica {name} state", wanted, replica.state)
    for name, teller in books.rests:
        if teller != OPERATOR and teller not in books.sessions:
            yield Violation(Rule.REST, f"rest of replica {name}", "of the operator or an owner", teller)


def _holds(books: Snapshot) -> Iterator[Violation]:
    seen: set[str] = set()
    for name, replica in books.replicas.items():
        if not replica.held_for:
            continue
        call = books.calls.get(replica.held_for)
        if call is None or call.state != "queued":
            yield Violation(Rule.HOLD, f"replica {name} held for", "a call that waits", replica.held_for)
        elif books.is_parked(_flow(call)) or call not in _heads(books, _flow(call)):
            yield Violation(Rule.HOLD, f"replica {name} held for", "whose turn it is", replica.held_for)
        if replica.state != "up":
            yield Violation(Rule.HOLD, f"replica {name} state", "up", replica.state)
        if replica.held_for in seen:
            yield Violation(Rule.HOLD, f"replica {name} held for", "a call without a hold", replica.held_for)
        seen.add(replica.held_for)


def _blocked_heads(books: Snapshot) -> Iterator[Violation]:
    for lane, id_ in books.blocked.items():
        call = books.calls.get(id_)
        if call is None or call.state != "queued" or call.lane != lane:
            yield Violation(Rule.BLOCKED, f"lane {lane}", "a call that waits in it", id_)


# -- what a dispatch leaves ------------------------------------------------------------------------------------------


def _settled(books: Snapshot) -> bool:
    """Whether the last script left nothing to do."""
    return not books.dirty and not books.opens_at


def _heads(books: Snapshot, flow: FlowName) -> list[Call]:
    """The first of its warm calls, and of the others."""
    waiting = books.waiting.get(flow, [])
    parts = ([c for c in waiting if c.is_warm], [c for c in waiting if not c.is_warm])
    return [part[0] for part in parts if part]


def _first_heads(books: Snapshot) -> Iterator[Call]:
    """The heads that a dispatch looks at: of the first unparked flows of each configured lane and class, warm calls and
    others each for themselves."""
    lines: dict[tuple[str, str, bool], list[Call]] = defaultdict(list)
    for flow in books.waiting:
        for head in _heads(books, flow) if not books.is_parked(flow) else ():
            lines[head.lane, head.class_, head.is_warm].append(head)
    for lane, _ in books.fleet.lanes:
        for class_, _ in books.fleet.classes:
            for warm in (True, False):
                heads = lines[lane, class_, warm]
                yield from sorted(heads, key=lambda c: (books.flows.get(_flow(c), Flow()).tag, c.key))[
                    :LOOKAHEAD
                ]


def _startable(books: Snapshot) -> Iterator[Violation]:
    if not _settled(books):
        return
    for head in _first_heads(books):
        if _capped(books, head):
            continue
        for replica in books.replicas.values():
            if _fits(books, head, replica):
                yield Violation(Rule.DISPATCH, f"call {head.id}", f"started on {replica.name}", "queued")
                break


def _overtaken(books: Snapshot) -> Iterator[Violation]:
    """A head that was passed by so many blocks gets a replica to itself, if one that it may use is free."""
    if not _settled(books):
        return
    holding = {replica.held_for for replica in books.replicas.values()}
    heads = {head.id: head for head in _first_heads(books)}
    for lane, id_ in books.blocked.items():
        call = heads.get(id_)
        if call is None or id_ in holding:
            continue
        usable = [r for r in books.replicas.values() if _could_use(books, call, r)]
        free = sorted(r.name for r in usable if not r.held_for)
        if free and call.passed >= books.fleet.overtake_blocks:
            yield Violation(Rule.OVERTAKING, f"lane {lane} call {id_}", f"a hold on one of {free}", "none")


def _capped(books: Snapshot, call: Call) -> bool:
    key = books.keys.get(call.key, Key())
    if (0 <= key.blocks_max < key.blocks + call.blocks) or (0 <= key.requests_max <= key.calls):
        return True
    pools = dict(books.fleet.lanes).get(call.lane, ())
    return key.pool_share >= 0 and all(_above_part(books, call, pool) for pool in pools)


def _above_part(books: Snapshot, call: Call, pool: str) -> bool:
    """Whether its key would hold more of the pool than its part."""
    key = books.keys.get(call.key, Key())
    limit = sum(r.limit for r in books.replicas.values() if r.pool == pool and r.state == "up")
    held = _held_by_pool(key).get(pool, 0)
    return 0 <= key.pool_share * limit < (held + call.blocks) * POOL_SHARE_SCALE


def _could_use(books: Snapshot, call: Call, replica: Replica) -> bool:
    return (
        replica.state == "up"
        and replica.pool in dict(books.fleet.lanes).get(call.lane, ())
        and not _above_part(books, call, replica.pool)
        and replica.name not in call.exclude
        and call.blocks <= replica.usable
        and call.sequences <= replica.sequences_usable
        and not (call.promised and replica.mode == "elastic")
    )


def _fits(books: Snapshot, call: Call, replica: Replica) -> bool:
    idle, nothing_in_prefill = replica.used == 0, replica.prefill == 0
    uncached = _uncached(call, _shared(books, call, replica))
    return (
        _could_use(books, call, replica)
        and replica.held_for in ("", call.id)
        and (idle or _has_blocks(books, call, replica))
        and (replica.sequences + call.sequences <= replica.sequences_max or replica.sequences == 0)
        and (nothing_in_prefill or replica.prefill + uncached <= replica.prefill_max)
    )


def _by_path(books: Snapshot, call: Call, replica: Replica) -> bool:
    """Whether a call that waits would be charged by its path there."""
    bases = {other.base for other in books.held.get(replica.name, []) if other.elastic}
    return call.path != b"" and not call.promised and replica.mode != "guaranteed" and bases <= {call.base}


def _placed(books: Snapshot, call: Call, replica: Replica) -> Call:
    """A call that waits, as it would be there."""
    names = [(s.id, replica.name, replica.cache, s.blocks) for s in call.prefix.segments if replica.cache]
    nodes = [books.nodes.get(name, Node()) for name in names]
    run = list(itertools.takewhile(lambda node: node.holders > 0 and not node.own, nodes))
    told = call.prefix
    prefix = Prefix(told.block_size, told.segments, replica.cache, len(run), net=told.net)
    return replace(call, elastic=int(_by_path(books, call, replica)), prefix=prefix)


def _shared(books: Snapshot, call: Call, replica: Replica) -> int:
    """Blocks with which it begins, and that calls there have computed in the cache of now, each for all."""
    return _outside(_placed(books, call, replica))


def _has_blocks(books: Snapshot, call: Call, replica: Replica) -> bool:
    """Beside the calls there: for what it holds at first, and for what all of them may hold later."""
    others = books.held.get(replica.name, [])
    newcomer, limit = _placed(books, call, replica), replica.limit - _held_back(books, call, replica)
    counted = (name for name, node in books.nodes.items() if name[1] == replica.name and not node.own)
    nodes = sum(blocks for *_, blocks in counted)
    if sum(c.held for c in others) + nodes + _now(newcomer) > limit:
        return False
    whole = sum(map(_rest, [*others, newcomer])) + nodes
    return whole <= limit or _is_foreseen([*others, newcomer], limit - nodes)


def _held_back(books: Snapshot, call: Call, replica: Replica) -> int:
    """What is held softly there: half of the limit at most, and nothing for a warm call."""
    blocks = sum(hold.blocks for hold in books.holds.values() if hold.replica == replica.name)
    return 0 if call.is_warm else min(blocks, replica.limit // 2)


def _is_foreseen(held: Sequence[Call], limit: int) -> bool:
    """Whether at every horizon some tilt shows that the chance of these calls to need more than the limit is small:
    the effective bandwidths of their paths and ln(1 / chance) / theta, beside the whole demands of the others.  The
    limit is what their nodes leave of it."""
    assured = sum(_rest(call) for call in held if not call.elastic)
    base = max((call.base for call in held if call.elastic), default=0)
    sums = _integers(_points(held))
    horizons = [sums[at : at + len(_TILTS)] for at in range(0, len(sums), len(_TILTS))]
    return all(
        any(
            point + math.ceil(_PARTS * -math.log(rare) * base / tilt) <= (limit - assured) * _PARTS
            for point, tilt in zip(horizon, _TILTS, strict=True)
        )
        for horizon, rare in zip(horizons, _RARE, strict=True)
    )


def _quiet(books: Snapshot) -> Iterator[Violation]:
    """The rest of an empty fleet follows from the sums and the indexes."""
    if books.calls:
        return
    for flow in books.flows:
        yield Violation(Rule.QUIET, f"flow {':'.join(flow)}", "none", "a record")
    for lane, _ in books.fleet.lanes:
        for class_, _ in books.fleet.classes:
            line = books.lines.get((lane, class_), Line())
            about = f"class {lane}:{class_}"
            yield from _compared(Rule.QUIET, about, virtual=(0, line.virtual), credit=(0, line.credit))


# -- what one script may change --------------------------------------------------------------------------------------


def step_violations(before: Snapshot, after: Snapshot) -> list[Violation]:
    """What is wrong with the way from one snapshot to the next, when one script ran between."""
    checks = (
        _gone_back, _admitted_behind_the_gate, _admitted_above_the_limit, _admitted_unforeseen, _admitted_unkept,
        _admitted_to_old_nodes, _left_held,
    )  # fmt: skip
    return [violation for check in checks for violation in check(before, after)]


def _gone_back(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    for name in ("clock", "epoch", "arrivals"):
        least, found = getattr(before, name), getattr(after, name)
        if found < least:
            yield Violation(Rule.CLOCK, name, f"at least {least}", found)
    for owner in before.sessions.keys() & after.sessions.keys():
        least, found = before.sessions[owner].batch, after.sessions[owner].batch
        if found < least:
            yield Violation(Rule.CLOCK, f"session {owner} batch", f"at least {least}", found)


def _admitted(call: Call) -> bool:
    """Granted by the order, which charges its flow; a call that was declared again has paid nothing."""
    return holds(call) and call.charged > 0


def _newcomers(before: Snapshot, after: Iterable[Call]) -> list[Call]:
    """Calls that hold a place which they did not hold before."""
    places = {(id_, c.replica, c.attempt) for id_, c in before.calls.items()}
    return [c for c in after if holds(c) and (c.id, c.replica, c.attempt) not in places]


def _admitted_behind_the_gate(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    if not (before.opens_at and after.opens_at and before.epoch == after.epoch):
        return
    for call in _newcomers(before, after.calls.values()):
        if _admitted(call):
            yield Violation(Rule.GATE, f"call {call.id}", "queued or refused", call.state)


def _admitted_above_the_limit(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """A lowered limit, calls declared by force, calls that have grown, and one large call alone may exceed it; a grant
    on top may not."""
    for name, replica in after.replicas.items():
        was = before.replicas.get(name)
        if was is None or was.limit != replica.limit or replica.used <= replica.limit:
            continue
        held = after.held.get(name, [])
        new = _newcomers(before, held)
        admitted = {node for c in held if c not in new or _admitted(c) for node in _joined(c)}
        declared = {node for c in new if not _admitted(c) for node in _joined(c)}
        forced = sum(c.held for c in new if not _admitted(c)) + sum(
            name[-1] for name in declared - admitted if not after.nodes[name].own
        )
        rest = replica.used - forced - sum(_growth(before, c) for c in held)
        alone = len(held) - sum(not _admitted(c) for c in new) <= 1
        if any(map(_admitted, new)) and rest > replica.limit and rest > was.used and not alone:
            yield Violation(Rule.LIMIT, f"replica {name} used", f"at most {replica.limit}", rest)


def _growth(before: Snapshot, call: Call) -> int:
    """Of a call that was there already."""
    was = before.calls.get(call.id)
    there = was is not None and holds(was) and (was.replica, was.attempt) == (call.replica, call.attempt)
    return max(call.held - was.held, 0) if was and there else 0


def _admitted_unforeseen(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """Where nothing else has changed: neither a limit, nor what a call there holds or may hold."""
    for name, replica in after.replicas.items():
        was, held = before.replicas.get(name), after.held.get(name, [])
        new = _newcomers(before, held)
        old = [call for call in held if all(call is not other for other in new)]
        # Who has had its first token, too, may have joined what was another newcomer's own.
        changed = any(not _admitted(c) or c.prefix.computed for c in new)
        changed = changed or any(_is_changed(before, c) for c in old)
        if was is None or was.limit != replica.limit or changed or len(held) <= 1 or not new:
            continue
        if replica.full > replica.limit and not _is_foreseen(held, replica.limit - replica.shared):
            yield Violation(Rule.FORESEEN, f"replica {name}", "room for what its calls may hold", "none")


def _is_changed(before: Snapshot, call: Call) -> bool:
    was = before.calls[call.id]
    return any(
        getattr(was, figure) != getattr(call, figure)
        for figure in ("held", "elastic", "base", "path", "prefix")
    )


def _admitted_to_old_nodes(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """Where nothing was learned of the replica's cache meanwhile."""
    for call in _newcomers(before, after.calls.values()):
        replica, was = after.replicas.get(call.replica), before.replicas.get(call.replica)
        if replica is None or was is None or replica.cache != was.cache:
            continue
        if _admitted(call) and call.prefix.joined and call.prefix.cache != replica.cache:
            yield Violation(Rule.SHARED, f"call {call.id} cache", replica.cache, call.prefix.cache)


def _left_held(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """A conversation goes on: what was held for it is not any more."""
    for call in _newcomers(before, after.calls.values()):
        hold = after.holds.get(call.past)
        if hold is not None and hold == before.holds.get(call.past):
            yield Violation(Rule.SOFT, f"hold {call.past}", f"none beside call {call.id}", hold)


def _admitted_unkept(before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """A replica may have become elastic since, and a call that was declared again says where it runs."""
    for call in _newcomers(before, after.calls.values()):
        replica, was = after.replicas.get(call.replica), before.replicas.get(call.replica)
        elastic = replica and was and replica.mode == was.mode == "elastic"
        if _admitted(call) and call.promised and elastic:
            yield Violation(
                Rule.PROMISE, f"call {call.id}", "not admitted on an elastic replica", call.replica
            )
