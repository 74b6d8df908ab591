"""The block books of one fleet: the executable specification that `lua/` translates.

Written to be read: linear scans, no indexes, no I/O; the time and the store's run id are arguments.  The conformance
suite drives this and the Lua with the same commands and compares every reply and the whole content after each.

A call is none, `queued`, `unclaimed` (granted, its owner does not know yet) or `reserved`; never two.
Times are milliseconds of the ledger clock, sizes are blocks, sequences and tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gateway.core.elastic import (
    ELASTIC,
    GUARANTEED,
    POINTS,
    SUM_MAX,
    Path,
    bound_holds,
    flat,
    narrowed,
    pack,
    unpack,
)
from gateway.core.holds import WARM, Hold, Holds, averaged, counted, is_large
from gateway.core.nodes import Nodes, Prefix
from gateway.core.order import (
    APPOINTMENT_MAX_MS,
    ASKED_BACK,
    CREDIT_SCALE,
    DIGEST_MODULUS,
    DRAIN_SETTLING_MS,
    DRAIN_WINDOW_MS,
    FIRST_APPOINTMENT_MS,
    FORECAST_ENDS,
    FORECAST_MARGIN_PERCENT,
    FORECAST_PLAYED,
    FORECAST_WAITING,
    HOLDS_ENDED,
    KEPT_PART,
    LOOKAHEAD,
    OPERATOR,
    OUTBOX,
    PLACE_MS,
    PLACE_ONLY,
    PLACES,
    PLACES_OF_FLOW,
    POOL_SHARE_SCALE,
    QUOTA_BUCKETS,
    SHUT_RETRY_MS,
    SLICE,
    TAG_SCALE,
    WORK,
    YIELD_MS,
)

Answer = list[Any]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    name: str
    pool: str
    limit: int = -1
    """Blocks to hand out; -1 while the engine's numbers are unknown: what the store has is kept."""
    usable: int = 0
    """Blocks that one call may hold alone: `num_gpu_blocks - 1`."""
    sequences_max: int = 0
    prefill_max: int = 0
    """Prompt tokens that may be in prefill at once."""
    mode: str = GUARANTEED
    """GUARANTEED: every call there is charged in full; ELASTIC: none that was promised the guarantee is there; SHARED:
    both are."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    lease_ms: int
    heartbeat_ms: int
    overtake_blocks: int
    """Blocks that may pass a blocked head before a replica is held for it."""
    lanes: tuple[tuple[str, tuple[str, ...]], ...]
    """Name and pools, in order of preference."""
    classes: tuple[tuple[str, int], ...]
    """Name and guaranteed share in thousandths, highest class first."""
    replicas: tuple[ReplicaConfig, ...]


@dataclass(slots=True)
class Replica:
    name: str
    pool: str
    limit: int = 0
    usable: int = 0
    sequences_usable: int = 0
    """That one call may have alone: as many as are configured, whatever was learned."""
    sequences_max: int = 0
    prefill_max: int = 0
    used: int = 0
    """What the calls there hold now."""
    sequences: int = 0
    prefill: int = 0
    state: str = "up"
    """`up`, `draining` (it answers, and gets no new calls), `down`, or `removed` from the configuration."""
    held_for: str = ""
    mode: str = GUARANTEED
    full: int = 0
    """The whole demands of the calls there, what they share once."""
    assured: int = 0
    """Those of the calls that are charged in full."""
    elastic: int = 0
    """Calls there that are charged by their paths."""
    base: int = 0
    """What their paths are made for (`core/elastic.py`); 0 while there are none."""
    sums: bytes = b""
    """The sum of their paths, packed as one; empty while there are none."""
    shared: int = 0
    """Blocks in nodes: of prefixes that calls there hold together."""
    cache: int = 0
    """Number of the engine's prefix cache; 0 = nothing is shared there."""
    distrusted: int = 0
    """Number of a cache that holds less than it should: it counts as none."""
    soft: int = 0
    """Blocks that are held softly there (`core/holds.py`): no part of `used`."""
    holds: int = 0
    """So many holds these are."""
    soft_end: int = 0
    """None of them ends before that; 0 while there are none."""
    history: int = 0
    """The average of what calls used that ended there, in parts of HISTORY_WEIGHT of a block; 0 before the first."""

    def points(self) -> Path:
        return unpack(self.sums) if self.sums else (0,) * POINTS


@dataclass(slots=True)
class Capacity:
    """What is configured for a replica whose engine's metrics are read, and what was learned from them
    (`core/capacity.py`): its limits are the lower of each two."""

    limit: int
    sequences_max: int
    prefill_max: int
    limit_learned: int = -1
    """-1 = as configured, here and below."""
    sequences_learned: int = -1
    prefill_learned: int = -1
    scraper: str = ""
    """The gateway process that reads them, until `lease_end`."""
    lease_end: int = 0
    number: int = 0
    """Of the last reading."""
    told: str = ""
    """What the reader wants the next one to know."""


@dataclass(slots=True)
class Call:
    id: str
    state: str
    owner: str
    replica: str
    pool: str
    """Where its blocks count, should its replica change to another."""
    key: str
    class_: str
    lane: str
    blocks: int
    sequences: int
    prefill: int
    """Demand on the prefill budget; `prefilling` is what is held of it now."""
    prefilling: int
    cost: int
    deadline: int
    arrival: int
    passed: int = 0
    """Blocks granted to others, on replicas it could use, while it was the blocked head."""
    attempt: int = 0
    charged: int = 0
    """Tag units its flow paid for it."""
    exclude: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    charge: tuple[int, ...] = ()
    """What it paid of its key's rate quotas: bucket, microseconds, bucket, microseconds..."""
    once: str = ""
    """Hash of its key and `Idempotency-Key`: while it lives no other call is admitted under the same."""
    fingerprint: str = ""
    """Of the request, kept only beside `once`."""
    held: int = 0
    """What it holds of its replica now: `asked` where it is charged by its path, else `blocks`; without what it
    shares."""
    asked: int = 0
    """What it is to hold where it is charged by its path, with what it shares."""
    base: int = 0
    path: bytes = b""
    """What it may hold later (`core/elastic.py`), without `prefix.net` blocks of it, for replicas of the size `base`;
    empty: it is charged in full."""
    elastic: int = 0
    """1 = its path is in its replica's sums: it is charged by it."""
    promised: int = 0
    """1 = it was promised the guarantee: it is charged in full, and on no replica whose mode is ELASTIC."""
    prefix: Prefix = field(default_factory=Prefix)
    past: str = ""
    """Name of the conversation with which it goes on; '' = none."""
    yields_until: int = 0
    """The clock until which it lets warm calls go before it; WARM = it is one."""
    expected_ms: int | None = None
    """What was found of its wait when it was admitted; not in the store."""

    @property
    def own(self) -> int:
        """Blocks that it does not share."""
        return self.blocks - self.prefix.shared

    @property
    def is_warm(self) -> bool:
        return self.yields_until == WARM

    def asks(self, shared: int) -> int:
        """What it is to hold where it is charged by its path, and shares so many blocks."""
        return max(self.asked - shared, 0)

    def points(self, shared: int) -> Path:
        """Its path, where it shares so many blocks."""
        prefix = self.prefix
        return narrowed(unpack(self.path), prefix.net, shared, self.asked, self.blocks, prefix.block_size)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stood that left the queue, for the next one with the same fingerprint."""

    lane: str
    class_: str
    key: str
    fingerprint: str
    arrival: int
    end: int
    """Of the time for which it is remembered."""

    @property
    def flow(self) -> tuple[str, str, str]:
        return self.lane, self.class_, self.key

    @property
    def member(self) -> str:
        return f"{self.lane}:{self.class_}:{self.key}:{self.fingerprint}:{self.arrival:012d}"


@dataclass(frozen=True, slots=True)
class Later:
    """Where those of a flow stand who came after a return: a place that was left makes good one call's absence."""

    arrival: int
    """The last one before."""
    tag: int


@dataclass(slots=True)
class Key:
    weight: int = 1
    blocks_max: int = -1
    requests_max: int = -1
    pool_share: int = -1
    """Millionths of each pool's limit that it may hold."""
    blocks: int = 0
    calls: int = 0
    quotas: tuple[int, ...] = ()
    """By bucket the instant (`Books.quota_us`) at which it is full again; empty until the first charge."""
    pools: tuple[Any, ...] = ()
    """Pool, blocks that it holds there, pool, blocks...; in the order in which it came to hold some."""

    def held_by_pool(self) -> dict[str, int]:
        return dict(zip(self.pools[::2], self.pools[1::2], strict=True))

    def held_in(self, pool: str) -> int:
        return self.held_by_pool().get(pool, 0)

    def hold_in(self, pool: str, more: int) -> None:
        held = self.held_by_pool()
        held[pool] = held.get(pool, 0) + more
        self.pools = tuple(item for pair in held.items() if pair[1] for item in pair)


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a call may wait."""

    queue_max: int
    queue_key_max: int
    wait_ms: int
    fingerprint: str
    standing: int
    smallest: Call | None = None
    """Of a call that only asks: what it is at least."""
    ahead: int = 0
    """Of a call that only asks: calls that will wait before it in its line."""
    own_ahead: int = 0
    """Those of them that are its key's."""


@dataclass(slots=True)
class Session:
    batch: int
    told: int
    """The last epoch that its owner was told of."""
    declared: int = 0
    """The epoch of its last Y."""


@dataclass(slots=True)
class Drain:
    """Blocks given back: a sliding window of two halves."""

    start: int = 0
    current: int = 0
    previous: int = -1
    """Blocks of the window before; -1 when there was none."""
    last: int = 0
    """The last figure seen."""


@dataclass(frozen=True, slots=True)
class End:
    """Of a running call, as its owner foresees it."""

    due: int
    replica: str
    blocks: int


@dataclass(slots=True)
class Books:
    config: FleetConfig | None = None
    run: str = ""
    epoch: int = 0
    policy: int = 0
    clock: int = 0
    wall: int = -1
    skipped: int = 0
    """Milliseconds by which the store's time passed, but not the clock."""
    opens_after: int = 0
    opens_at: int = 0
    """While closed: the clock at which admission opens at the latest; 0 = open."""
    arrivals: int = 0
    dirty: bool = False
    replicas: dict[str, Replica] = field(default_factory=dict)
    capacities: dict[str, Capacity] = field(default_factory=dict)
    shut: bool = False
    """The operator has closed the fleet: no new calls."""
    rests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Replica and who says that it gets no new calls -> why: OPERATOR, or an owner, with whose lease its word ends."""
    calls: dict[str, Call] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    holds: Holds = field(default_factory=Holds)
    keys: dict[str, Key] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    tags: dict[tuple[str, str, str], int] = field(default_factory=dict)
    weights: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Weight of each flow that waits, as it was when it began to."""
    owed: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Tag units that a flow that waits was charged too much, and that would have put it before all others."""
    resume: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Of a flow that nobody waits in, but that has remembered places: the tag from which one of them goes on."""
    later: dict[tuple[str, str, str], Later] = field(default_factory=dict)
    """Of a flow that waits and went on from a tag of before."""
    places: list[Place] = field(default_factory=list)
    parked: set[tuple[str, str, str]] = field(default_factory=set)
    recheck: str = ""
    """A limit has changed: which of the parked flows are still to be looked at, as ZRANGEBYLEX has its lower bound;
    empty = none."""
    virtual: dict[tuple[str, str], int] = field(default_factory=dict)
    credit: dict[tuple[str, str], int] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    book: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    """Lane -> the clock since which somebody waits in it for the replicas."""
    drains: dict[str, Drain] = field(default_factory=dict)
    forecasts: dict[str, tuple[End, ...]] = field(default_factory=dict)
    """Owner -> the next ends of its calls, in order."""
    work: int = 0
    rehearsed: bool = False
    """This script has played the order forward."""
    replay: bool = False

    # -- the scripts ---------------------------------------------------------------------------------------------

    def configure(self, now: int, run: str, config: FleetConfig) -> Answer:
        if config != self.config:
            self.config = config
            self.policy += 1
        self._open(now, run)
        known = {replica.name for replica in config.replicas}
        for wanted in config.replicas:
            self._configure_replica(wanted)
        for name in sorted(set(self.replicas) - known):
            self._take_down(name, "removed")
        self._forget_removed()
        self._recheck_parked()
        self._close()
        return ["ok", self.epoch, self.clock, self.policy]

    def observe(self, now: int, run: str, name: str, up: bool) -> Answer:
        """A gateway saw a replica stop or resume answering."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        replica = self.replicas.get(name)
        if replica and replica.state != "removed":
            if up:
                self._let_answer(replica)
            else:
                self._take_down(name, "down")
        self._close()
        return ["ok", self.epoch, self.clock, self.policy]

    def set_shut(self, now: int, run: str, shut: bool) -> Answer:
        """The operator closes the fleet to new calls, or opens it; who waits or runs goes on."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        self.shut = shut
        self._close()
        return ["ok", self.epoch, self.clock, self.policy]

    def rest(self, now: int, run: str, teller: str, name: str, why: str) -> Answer:
        """A replica gets no new calls, as far as the operator or an owner is concerned; without a reason it may."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        replica = self.replicas.get(name)
        if teller != OPERATOR and teller not in self.sessions:
            status = "fenced"
        elif why and (replica is None or replica.state == "removed"):
            status = "unknown"
        else:
            status = "ok"
            self._set_rest(name, teller, why)
        self._close()
        return [status, self.epoch, self.clock, self.policy]

    def _set_rest(self, name: str, teller: str, why: str) -> None:
        if self.rests.get((name, teller), "") == why:
            return
        self.rests[name, teller] = why
        if not why:
            del self.rests[name, teller]
        replica = self.replicas.get(name)
        if replica and replica.state in ("up", "draining"):
            self._let_answer(replica)

    def seat(self, now: int, run: str, scraper: str, name: str) -> Answer:
        """A gateway offers to read a replica's metrics: one does at a time."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        replica = self.replicas.get(name)
        if replica is None or replica.state == "removed":
            return ["unknown"]
        configured = (replica.limit, replica.sequences_max, replica.prefill_max)
        capacity = self.capacities.setdefault(name, Capacity(*configured))
        if capacity.lease_end <= self.clock:
            capacity.scraper = scraper
        if capacity.scraper == scraper:
            capacity.lease_end = self.clock + self._fleet.lease_ms
        return self._seat(scraper, replica, capacity)

    def learn(
        self,
        now: int,
        run: str,
        scraper: str,
        name: str,
        number: int,
        learned: Sequence[int],
        told: str,
        cache: int,
    ) -> Answer:
        """What the reader of a replica's metrics has learned: limit, sequences and prefill, and the number of its
        cache.  A later reading wins."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        replica, capacity = self.replicas.get(name), self.capacities.get(name)
        if replica is None or replica.state == "removed" or capacity is None:
            return ["unknown"]
        if capacity.scraper != scraper or number <= capacity.number:
            return ["late"]
        capacity.limit_learned, capacity.sequences_learned, capacity.prefill_learned = learned
        capacity.number, capacity.told = number, told
        capacity.lease_end = self.clock + self._fleet.lease_ms
        if self._apply(replica, capacity):
            self._recheck_parked()
            self.dirty = True
        self._set_cache(replica, cache)
        self._close()
        return self._seat(scraper, replica, capacity)

    def distrust(self, now: int, run: str, name: str, cache: int) -> Answer:
        """Nothing more is shared there while the engine has that cache.

        Of another one than is known there the word is late: it would undo what was said of this one.
        """
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        replica = self.replicas.get(name)
        if replica and (replica.cache or replica.distrusted or cache) == cache:
            replica.distrusted = cache
            self._set_cache(replica, replica.cache)
        self._close()
        return ["ok" if replica else "unknown", self.epoch, self.clock, self.policy]

    def _set_cache(self, replica: Replica, cache: int) -> None:
        """Who waits may share what nobody could before."""
        cache = 0 if cache == replica.distrusted else cache
        if replica.cache != cache:
            self.dirty = True
            self._drop_holds(replica)
        replica.cache = cache

    def _seat(self, scraper: str, replica: Replica, capacity: Capacity) -> Answer:
        held = [replica.used, replica.sequences, replica.prefill]
        configured = [capacity.limit, capacity.sequences_max, capacity.prefill_max]
        lease = [int(capacity.scraper == scraper), capacity.lease_end - self.clock]
        return ["seat", self.clock, *lease, capacity.number, held, configured, capacity.told]

    @staticmethod
    def _apply(replica: Replica, capacity: Capacity) -> bool:
        """True = a limit has changed."""
        before = (replica.limit, replica.sequences_max, replica.prefill_max)
        replica.limit = _lower(capacity.limit, capacity.limit_learned)
        replica.sequences_max = _lower(capacity.sequences_max, capacity.sequences_learned)
        replica.prefill_max = _lower(capacity.prefill_max, capacity.prefill_learned)
        return before != (replica.limit, replica.sequences_max, replica.prefill_max)

    def hello(self, now: int, run: str, owner: str) -> Answer:
        """A new incarnation of a worker process.  The run id tells it whether the store lost its data."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        self.owners[owner] = self.clock + self._fleet.lease_ms
        self.sessions[owner] = Session(batch=0, told=self.epoch)
        return ["ok", self.epoch, self.clock, self.policy, run]

    def step(self, now: int, run: str, owner: str, batch: int, ops: Sequence[Sequence[Any]]) -> Answer:
        """One batch of one owner."""
        if self.config is None:
            return ["unconfigured"]
        self._open(now, run)
        session = self.sessions.get(owner)
        if session is None:
            return ["fenced"]
        if batch < session.batch:
            return ["stale"]
        self.owners[owner] = self.clock + self._fleet.lease_ms
        if session.told != self.epoch:
            session.told = self.epoch
            return ["epoch", self.epoch, self.clock, self.policy]
        self.replay = batch == session.batch
        session.batch = batch
        more = self._reap() | self._expire()
        self._open_gate()
        results = [self._op(owner, op) for op in ops]
        self._close()
        return [
            "ok",
            self.epoch,
            self.clock,
            self.policy,
            int(more or (self.dirty and not self.opens_at)),
            results,
            self._outbox(owner),
        ]

    def _outbox(self, owner: str) -> Answer:
        told = ("unclaimed", "displaced")
        ids = sorted(c.id for c in self.calls.values() if c.owner == owner and c.state in told)
        return [item for id_ in ids[:OUTBOX] for item in (id_, _place_told(self.calls[id_]))]

    def _op(self, owner: str, op: Sequence[Any]) -> Answer:
        name, *arguments = op
        commands: dict[str, Callable[..., Answer]] = {
            "A": self._admit,
            "Q": self._ask,
            "K": self._claim,
            "F": self._first_token,
            "Z": self._resize,
            "M": self._move,
            "S": self._settle,
            "R": self._redeclare,
            "H": self._heartbeat,
            "Y": self._declared,
        }
        return commands[name](owner, *arguments)

    # -- time, owners, the gate ----------------------------------------------------------------------------------

    @property
    def _fleet(self) -> FleetConfig:
        assert self.config is not None
        return self.config

    def _open(self, now: int, run: str) -> None:
        """Advance the clock by at most two heartbeats, so that a pause of the store ends nobody's lease."""
        gap = 2 * self._fleet.heartbeat_ms
        passed = now - self.wall if self.wall >= 0 else 0
        self.clock += min(max(passed, 0), gap)
        self.skipped += max(passed - gap, 0)
        self.wall = now
        self.work, self.rehearsed = WORK, False
        self.replay = False
        if run != self.run:
            self._new_epoch(run)

    def _new_epoch(self, run: str) -> None:
        """The store is another process than before: what it holds may be old or nothing."""
        self.run = run
        self.epoch += 1
        for owner in self.owners:
            self.owners[owner] = self.clock + self._fleet.lease_ms
        self.opens_after = self.clock + (0 if self.owners else 2 * self._fleet.heartbeat_ms)
        self.opens_at = self.clock + self._fleet.lease_ms

    def _open_gate(self) -> None:
        if not self.opens_at:
            return
        declared = self.owners and all(
            owner in self.sessions and self.sessions[owner].declared == self.epoch for owner in self.owners
        )
        if self.clock >= self.opens_at or (declared and self.clock >= self.opens_after):
            self.opens_at = 0

    def _reap(self) -> bool:
        """Fence every owner whose lease is over and give a slice of their calls back; True = some are left."""
        lost = sorted(
            (o for o, end in self.owners.items() if end <= self.clock), key=lambda o: (self.owners[o], o)
        )
        for owner in lost:
            self.sessions.pop(owner, None)
            self.forecasts.pop(owner, None)
        for name, teller in sorted(self.rests):
            if teller in lost:
                self._set_rest(name, teller, "")
        left = SLICE
        for owner in lost:
            ids = sorted(c.id for c in self.calls.values() if c.owner == owner)[:left]
            for id_ in ids:
                self._give_back(self.calls[id_])
            left -= len(ids)
            if any(c.owner == owner for c in self.calls.values()):
                return True
            del self.owners[owner]
        return False

    def _give_back(self, call: Call) -> None:
        """The owner is gone: what never ran is refunded, for what ran the charge stays."""
        self.work -= 1
        if call.state == "queued":
            return self._withdraw(call)
        if call.state == "displaced":
            del self.calls[call.id]
            return None
        return self._release(call, refund=call.state == "unclaimed")

    def _expire(self) -> bool:
        late = [c for c in self.calls.values() if c.state == "queued" and c.deadline <= self.clock]
        late.sort(key=lambda c: (c.deadline, c.id))
        for call in late[:SLICE]:
            self.work -= 1
            self._withdraw(call)
        more = self._forget_places() or len(late) > SLICE
        return self._end_holds() or more

    def _close(self) -> None:
        self._dispatch()
        if not self.calls:
            self.tags.clear()
            self.resume.clear()
            self.virtual.clear()
            self.credit.clear()

    # -- replicas ------------------------------------------------------------------------------------------------

    def _configure_replica(self, wanted: ReplicaConfig) -> None:
        replica = self.replicas.get(wanted.name)
        unknown = wanted.limit < 0
        if replica is None:
            replica = self.replicas[wanted.name] = Replica(wanted.name, wanted.pool, state="removed")
        replica.pool, replica.mode = wanted.pool, wanted.mode
        if replica.state == "removed" and unknown:
            replica.state = "down"
        elif replica.state == "removed":
            self._let_answer(replica)
        if not unknown:
            replica.limit, replica.usable = wanted.limit, wanted.usable
            replica.sequences_usable = replica.sequences_max = wanted.sequences_max
            replica.prefill_max = wanted.prefill_max
            self._keep_learned(replica)
        self.dirty = True

    def _keep_learned(self, replica: Replica) -> None:
        """Its limits are as configured just now."""
        capacity = self.capacities.get(replica.name)
        if capacity:
            capacity.limit, capacity.sequences_max = replica.limit, replica.sequences_max
            capacity.prefill_max = replica.prefill_max
            self._apply(replica, capacity)

    def _let_answer(self, replica: Replica) -> None:
        """It answers, so it may be given calls unless somebody says that it rests."""
        before = replica.state
        if any(name == replica.name for name, _ in self.rests):
            replica.state, replica.held_for = "draining", ""
            self._drop_holds(replica)
        else:
            replica.state = "up"
            if before != "up":
                self._recheck_parked()
        self.dirty = True

    def _take_down(self, name: str, state: str) -> None:
        """No new placements; a call that a hold was for looks elsewhere."""
        replica = self.replicas[name]
        self._drop_holds(replica)
        if replica.state != "removed":
            replica.state = state
        replica.held_for = ""
        self.dirty = True

    def _forget_removed(self) -> None:
        for name in [r.name for r in self.replicas.values() if r.state == "removed" and not r.sequences]:
            del self.replicas[name]
            self.capacities.pop(name, None)

    # -- soft holds ----------------------------------------------------------------------------------------------

    def _finish_hold(self, name: str) -> None:
        """The conversation goes on, or its hold makes room."""
        hold = self.holds.find(name)
        if hold is None:
            return
        del self.holds.holds[name]
        replica = self.replicas[hold.replica]
        replica.soft -= hold.blocks
        replica.holds -= 1
        if not replica.holds:
            replica.soft_end = 0
        self.dirty = True

    def _drop_holds(self, replica: Replica) -> None:
        """Nothing of them is in the replica's cache any more, or nobody is sent there."""
        for name, _ in self.holds.of(replica.name):
            self._finish_hold(name)

    def _end_holds(self) -> bool:
        """Those whose time is over; True = some are left."""
        left = HOLDS_ENDED
        for replica in sorted(self._with_due_holds(), key=lambda r: r.name):
            if left <= 0:
                break
            found = self.holds.of(replica.name)
            over = [name for name, hold in found if hold.due <= self.clock][:left]
            for name in over:
                self._finish_hold(name)
            left -= len(over)
            if len(over) < len(found):
                replica.soft_end = found[len(over)][1].due
        return bool(self._with_due_holds())

    def _with_due_holds(self) -> list[Replica]:
        return [r for r in self.replicas.values() if 0 < r.soft_end <= self.clock]

    def _answered(self, replica: Replica, blocks: int, kept: int, name: str) -> None:
        """A call has ended there that used so many blocks, of which others hold `kept` in nodes; without a name nobody
        will go on with it."""
        if replica.state == "removed":
            return
        blocks = max(blocks - kept, 1)
        replica.history = averaged(replica.history, blocks)
        if not (
            name and replica.state == "up" and replica.cache and is_large(replica.limit, replica.history)
        ):
            return
        self._finish_hold(name)
        oldest = self.holds.oldest_to_go(replica.name)
        if oldest:
            self._finish_hold(oldest)
        hold = self.holds.keep(name, replica.name, blocks, self.clock)
        replica.soft += blocks
        replica.holds += 1
        replica.soft_end = replica.soft_end or hold.due

    def _yields(self, past: str) -> int:
        """Of a call that comes now."""
        return WARM if self.holds.find(past) else self.clock + YIELD_MS

    @staticmethod
    def _limit(call: Call, replica: Replica) -> int:
        """Blocks that a replica has for a call like this one."""
        return replica.limit if call.is_warm else replica.limit - counted(replica.soft, replica.limit)

    def _home(self, call: Call) -> Replica | None:
        """Where the conversation is held with which it goes on, if it fits there."""
        hold: Hold | None = self.holds.find(call.past)
        replica = self.replicas.get(hold.replica) if hold else None
        return replica if replica and self._fits(call, replica) else None

    # -- where calls fit -----------------------------------------------------------------------------------------

    def _pools(self, lane: str) -> tuple[str, ...]:
        return dict(self._fleet.lanes).get(lane, ())

    def _part(self, key: Key, pool: str) -> int:
        """Blocks of a pool that a key with a share may hold now."""
        limit = sum(r.limit for r in self.replicas.values() if r.pool == pool and r.state == "up")
        return limit * key.pool_share // POOL_SHARE_SCALE

    def _within_part(self, call: Call, pool: str) -> bool:
        key = self._key(call.key)
        return key.pool_share < 0 or key.held_in(pool) + call.blocks <= self._part(key, pool)

    def _is_able(self, call: Call, replica: Replica) -> bool:
        """Whether a call of its size can run there, whatever its key holds and wherever it has been."""
        return (
            replica.state == "up"
            and replica.pool in self._pools(call.lane)
            and call.blocks <= replica.usable
            and call.sequences <= replica.sequences_usable
            and not (call.promised and replica.mode == ELASTIC)
        )

    def _could_use(self, call: Call, replica: Replica) -> bool:
        """Whether the call can run there, however busy it is now, as its key holds what it does."""
        return (
            self._is_able(call, replica)
            and self._within_part(call, replica.pool)
            and replica.name not in call.exclude
        )

    def _fits(self, call: Call, replica: Replica) -> bool:
        return (
            self._could_use(call, replica)
            and replica.held_for in ("", call.id)
            and self._has_blocks(call, replica, self._shared(call, replica))
            and (replica.sequences + call.sequences <= replica.sequences_max or replica.sequences == 0)
            and (
                replica.prefill + self._uncached(call, replica) <= replica.prefill_max or replica.prefill == 0
            )
        )

    def _uncached(self, call: Call, replica: Replica) -> int:
        """What it would hold of the prefill budget there."""
        return call.prefix.prefill(call.prefill, self._shared(call, replica))

    def _shared(self, call: Call, replica: Replica) -> int:
        """Blocks that it would share there; of one that only asks, and whose prompt is not known, as many as can be."""
        if call.prefix.block_size and not call.prefix.segments:
            return min(replica.shared, call.blocks - 1)
        return call.prefix.blocks_of(self.nodes.run(call.prefix, replica.name, replica.cache))

    def _has_blocks(self, call: Call, replica: Replica, shared: int) -> bool:
        """For what it would hold now beside what it shares, and in all likelihood for what all calls there will hold
        later."""
        if replica.used == 0:
            return True
        by_path, limit = _is_by_path(call, replica), self._limit(call, replica)
        if replica.used + (call.asks(shared) if by_path else call.blocks - shared) > limit:
            return False
        if replica.full + call.blocks - shared <= limit:  # safe, whatever they write
            return True
        path = call.points(shared) if by_path else flat(call.blocks - shared)
        base = replica.base or call.base
        return bound_holds(replica.points(), path, replica.assured, limit, base)

    def _place(self, call: Call) -> Replica | None:
        """Where its conversation is held softly; else the first pool with room, and there, of the replicas that are at
        most 10 % fuller than the emptiest, the one that shares most with it, then a preferred one; else most free
        blocks."""
        if home := self._home(call):
            return home
        for pool in self._pools(call.lane):
            room = [r for r in self.replicas.values() if r.pool == pool and self._fits(call, r)]
            if not room:
                continue
            emptiest = min(room, key=_roomiest)
            near = [r for r in room if _percent(r) <= _percent(emptiest) + 10]
            warm = [r for r in near if r.name in call.prefer or self._shared(call, r)]
            return min(warm, key=lambda r: self._warmest(call, r)) if warm else emptiest
        return None

    def _warmest(self, call: Call, replica: Replica) -> tuple[int, bool, tuple[int, str]]:
        return -self._shared(call, replica), replica.name not in call.prefer, _roomiest(replica)

    def _unhold(self, call: Call) -> None:
        for replica in self.replicas.values():
            if replica.held_for == call.id:
                replica.held_for = ""

    # -- the queue -----------------------------------------------------------------------------------------------

    def _waiting(self, lane: str, class_: str | None = None, key: str | None = None) -> list[Call]:
        found = [
            c
            for c in self.calls.values()
            if c.state == "queued" and c.lane == lane and class_ in (None, c.class_) and key in (None, c.key)
        ]
        return sorted(found, key=lambda c: c.arrival)

    def _unparked_wait(self, lane: str) -> bool:
        return any((c.lane, c.class_, c.key) not in self.parked for c in self._waiting(lane))

    def _join(self, call: Call, returns: bool = False) -> None:
        """Stand in the queue; `returns`: in a place that was remembered."""
        flow = _flow(call)
        waiting = self._waiting(*flow)
        part = [other for other in waiting if other.is_warm == call.is_warm]
        if part and call.arrival < part[0].arrival:
            self._unhold(part[0])  # its turn is later now
        if not part:
            self.dirty = True
        if not waiting:
            entry = self._entry(flow)
            self.tags[flow] = min(entry, self.resume.get(flow, entry)) if returns else entry
            if self.tags[flow] < entry:
                self.later[flow] = Later(self.arrivals, entry)
            self.resume.pop(flow, None)
            self.weights[flow] = self._key(call.key).weight
        call.state = "queued"
        self.calls[call.id] = call
        self._note_since(call.lane)

    def _leave(self, call: Call) -> None:
        """After the call stopped to be queued: what it leaves behind in the order."""
        flow = _flow(call)
        self._unhold(call)
        if self.blocked.get(call.lane) == call.id:
            del self.blocked[call.lane]
        if self._waiting(*flow):
            self._end_return(flow)
            self._unpark([flow])
        else:
            self.parked.discard(flow)
            self.weights.pop(flow, None)
            self.owed.pop(flow, None)
            self.later.pop(flow, None)
            if any(place.flow == flow for place in self.places):
                self.resume[flow] = self._standing(flow)
        if not self._waiting(call.lane, call.class_):
            self.credit.pop((call.lane, call.class_), None)
        self._note_since(call.lane)
        self.dirty = True

    def _end_return(self, flow: tuple[str, str, str]) -> None:
        """Its head is none of those that may have returned."""
        later = self.later.get(flow)
        if later and self._waiting(*flow)[0].arrival > later.arrival:
            self.tags[flow] = max(self.tags[flow], later.tag)
            del self.later[flow]

    def _note_since(self, lane: str) -> None:
        """Who waits for its own key's cap does not say what the replicas can do."""
        if self._unparked_wait(lane):
            self.since.setdefault(lane, self.clock)
        else:
            self.since.pop(lane, None)

    def _withdraw(self, call: Call, fingerprint: str = "") -> None:
        """With a fingerprint its place is remembered."""
        del self.calls[call.id]
        if fingerprint:
            self._remember(call, fingerprint)
        self._leave(call)
        self._refund_quotas(call)

    # -- remembered places ---------------------------------------------------------------------------------------

    def _remember(self, call: Call, fingerprint: str) -> None:
        """At most so many: the one that would end first makes room, but not for a flow that has its part."""
        if sum(place.flow == _flow(call) for place in self.places) >= PLACES_OF_FLOW:
            return
        if len(self.places) >= PLACES:
            self._forget_place(min(self.places, key=_by_end))
        place = Place(*_flow(call), fingerprint, call.arrival, self.clock + PLACE_MS)
        self.places.append(place)

    def _forget_places(self) -> bool:
        """Those whose time is over; True = some are left."""
        over = sorted((place for place in self.places if place.end <= self.clock), key=_by_end)
        for place in over[:SLICE]:
            self.work -= 1
            self._forget_place(place)
        return len(over) > SLICE

    def _forget_place(self, place: Place) -> None:
        self.places.remove(place)
        if not any(other.flow == place.flow for other in self.places):
            self.resume.pop(place.flow, None)

    def _place_left(self, call: Call, fingerprint: str) -> Place | None:
        """The first of those that calls like this one have left."""
        of_its_like = [p for p in self.places if p.flow == _flow(call) and p.fingerprint == fingerprint]
        return min(of_its_like, key=lambda place: place.arrival, default=None)

    def _return(self, call: Call, place: Place) -> None:
        """Stand where the one before stood, from now on first of its flow perhaps."""
        flow = _flow(call)
        call.arrival = place.arrival
        if self._waiting(*flow):
            self._unpark([flow])
        self._join(call, returns=True)
        self._forget_place(place)
        self.dirty = True

    def _unpark(self, flows: Iterable[tuple[str, str, str]]) -> None:
        back = self.parked.intersection(flows)
        self.work -= len(back)
        self.parked -= back
        for lane in {flow[0] for flow in back}:
            self._note_since(lane)
        self.dirty = self.dirty or bool(back)

    def _unpark_key(self, key: str) -> None:
        self._unpark([flow for flow in self.parked if flow[2] == key])

    def _key(self, name: str) -> Key:
        return self.keys.setdefault(name, Key())

    def _capped(self, call: Call) -> bool:
        key = self._key(call.key)
        if (0 <= key.blocks_max < key.blocks + call.blocks) or (0 <= key.requests_max < key.calls + 1):
            return True
        return key.pool_share >= 0 and not any(
            self._within_part(call, pool) for pool in self._pools(call.lane)
        )

    def _park(self, call: Call) -> None:
        """Out of the order, until its key has room; a replica that was held for it is free for others meanwhile."""
        for waiting in self._waiting(*_flow(call)):
            self._unhold(waiting)
        self.parked.add(_flow(call))
        self._note_since(call.lane)
        self.work -= 1

    def _recheck_parked(self) -> None:
        """A pool may have a higher limit: who is parked for a part of it may be within that now."""
        if self.parked:
            self.recheck = "-"

    def _recheck_slice(self) -> None:
        """Put back into the order, of the next parked flows, those of keys that have shares of pools."""
        if not self.recheck or self.work <= 0:
            return
        members = sorted((f"{key}:{lane}:{class_}", (lane, class_, key)) for lane, class_, key in self.parked)
        left = [(m, flow) for m, flow in members if self.recheck == "-" or m > self.recheck[1:]]
        self._unpark([flow for _, flow in left[:SLICE] if self._key(flow[2]).pool_share >= 0])
        self.recheck = f"({left[SLICE - 1][0]}" if len(left) > SLICE else ""

    # -- the order -----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Turn tickets into unclaimed reservations until nothing fits or the script's work is used up.

        Doing it again at once changes nothing, so it may be skipped while nothing changed.
        """
        if not self.dirty or self.opens_at:
            return
        self._recheck_slice()
        self.dirty = bool(self.recheck)
        progress = True
        while progress:
            progress = False
            for lane, _ in self._fleet.lanes:
                while self._waiting(lane):
                    if self.work <= 0:
                        self.dirty = True
                        return
                    if not self._advance(lane):
                        break
                    progress = True

    def _advance(self, lane: str) -> bool:
        """One grant, parking or hold in this lane; False when nothing can be done."""
        head: Call | None = None
        classes, by_credit = self._class_order(lane)
        for class_ in classes:
            for call in self._heads(lane, class_):
                if self._capped(call):
                    self._park(call)
                    return True
                replica = self._place(call)
                if replica:
                    self._grant(call, replica, by_credit == class_)
                    return True
                if head is None:
                    head = call
                    self.blocked[lane] = call.id
                    if self._hold(call):
                        return True
        return False

    def _heads(self, lane: str, class_: str) -> list[Call]:
        """Who is looked at, in the order of their turns: of the flows' first calls those that have waited long enough,
        then the warm ones, then the others."""
        others = self._first_calls(lane, class_, warm=False)
        warm = self._first_calls(lane, class_, warm=True)
        if not warm:
            return others
        due = [call for call in others if call.yields_until <= self.clock]
        return [*due, *warm, *(call for call in others if call.yields_until > self.clock)]

    def _first_calls(self, lane: str, class_: str, *, warm: bool) -> list[Call]:
        """The first one of that part of each of the first flows that are not parked."""
        heads: dict[str, Call] = {}
        for call in self._waiting(lane, class_):
            if call.is_warm == warm and _flow(call) not in self.parked:
                heads.setdefault(call.key, call)
        return sorted(heads.values(), key=lambda c: (self.tags.get(_flow(c), 0), c.key))[:LOOKAHEAD]

    def _class_order(self, lane: str) -> tuple[list[str], str | None]:
        """Highest class first, except that the lowest class whose credit covers its head goes before all."""
        waiting = [name for name, _ in self._fleet.classes if self._waiting(lane, name)]
        shares = dict(self._fleet.classes)
        for class_ in reversed(waiting):
            heads = self._heads(lane, class_)
            if not shares[class_] or not heads:
                continue
            if self.credit.get((lane, class_), 0) >= self._price(class_) * heads[0].blocks:
                return [class_, *(c for c in waiting if c != class_)], class_
        return waiting, None

    def _price(self, class_: str) -> int:
        """Credit for a block that goes before its turn: all but what the block itself earns, so that a class with a
        share of 100 thousandths has a tenth of all blocks, not an eleventh."""
        return CREDIT_SCALE - dict(self._fleet.classes)[class_]

    def _grant(self, call: Call, replica: Replica, by_credit: bool) -> None:
        self.work -= 1
        lane_class = (call.lane, call.class_)
        if by_credit:
            self.credit[lane_class] -= self._price(call.class_) * call.blocks
        self._pay(call)
        call.state = "unclaimed"
        self._leave(call)
        self._share(call, replica)
        self._reserve(call, replica)
        lower = False
        for class_, share in self._fleet.classes:
            if lower and share and self._waiting(call.lane, class_):
                earned = self.credit.get((call.lane, class_), 0) + call.blocks * share
                self.credit[call.lane, class_] = earned
            lower = lower or class_ == call.class_

    def _pay(self, call: Call) -> None:
        """Start-time fair queueing: the flow's tag moves on by the call's cost over the key's weight."""
        flow, lane_class = _flow(call), (call.lane, call.class_)
        start = self._standing(flow)
        self.virtual[lane_class] = max(self.virtual.get(lane_class, 0), start)
        call.charged = _ceil(call.cost * TAG_SCALE, self._key(call.key).weight)
        self.tags[flow] = start + self._after_owed(flow, call.charged)
        self._delay(flow, call.charged)

    def _correct(self, call: Call, units: int) -> None:
        """Move the flow's tag by what was charged too much or too little."""
        flow = _flow(call)
        tag = self._standing(flow)
        if units > 0:
            self.tags[flow] = tag + self._after_owed(flow, units)
            self._delay(flow, units)
        elif not self._waiting(*flow):
            self.tags[flow] = max(0, tag + units)
        else:
            self.tags[flow] = max(tag + units, min(tag, self._first_tag(flow, tag) + 1))
            self.owed[flow] = self.owed.get(flow, 0) + self.tags[flow] - tag - units

    def _after_owed(self, flow: tuple[str, str, str], units: int) -> int:
        """Of a charge what is left when the flow has used what it is owed; at least 1, so that turns are taken."""
        owed = self.owed.get(flow, 0)
        left = max(units - owed, min(units, 1))
        if owed:
            self.owed[flow] = owed - (units - left)
        return left

    def _delay(self, flow: tuple[str, str, str], units: int) -> None:
        """What its key is charged meanwhile counts for who returns; what it gets back is not saved up."""
        if flow in self.resume:
            self.resume[flow] += units

    def _standing(self, flow: tuple[str, str, str]) -> int:
        """Its tag.  A flow that waits may be behind its class's time; one that does not saves nothing up."""
        tag = self.tags.get(flow, 0)
        return tag if self._waiting(*flow) else max(self.virtual.get(flow[:2], 0), tag)

    def _entry(self, flow: tuple[str, str, str]) -> int:
        """The tag of a flow that begins to wait: behind nobody's, unless it took more than others lately."""
        tag, virtual = self.tags.get(flow, 0), self.virtual.get(flow[:2], 0)
        return tag if tag > virtual else min(virtual, self._first_tag(flow, virtual))

    def _first_tag(self, flow: tuple[str, str, str], otherwise: int) -> int:
        """Of the other flows that wait in its class."""
        others = [_flow(c) for c in self._waiting(*flow[:2]) if c.key != flow[2]]
        return min(
            (self.tags.get(other, 0) for other in others if other not in self.parked), default=otherwise
        )

    def _share(self, call: Call, replica: Replica) -> None:
        """It is admitted there on the strength of what others have computed: which of its segments that is."""
        if not call.prefix.segments:
            return
        shared = self.nodes.run(call.prefix, replica.name, replica.cache)
        call.prefix.cache, call.prefix.joined, call.prefix.computed = replica.cache, shared, 0

    def _count_nodes(self, replica: Replica, blocks: int) -> None:
        """Nodes count by themselves, or are gone (negative): whole demands of nobody in particular."""
        replica.shared += blocks
        replica.used += blocks
        replica.full += blocks
        replica.assured += blocks

    def _compute(self, call: Call) -> None:
        """Its prompt is in the cache now: what it begins with is shared, and its own charge is only the rest."""
        prefix, replica = call.prefix, self.replicas[call.replica]
        if not prefix.segments or prefix.computed:
            return
        self.nodes.compute(prefix, replica.name)
        if prefix.cache and prefix.cache == replica.cache:
            alone = self._enter(call, prefix.joined, len(prefix.segments), replica)
            self._uncount(call, replica)
            prefix.joined, prefix.alone = len(prefix.segments), prefix.alone + alone
            self._count(call, replica)
        self.dirty = True  # who waits may share it, and what several had of it was given back

    def _enter(self, call: Call, first: int, last: int, replica: Replica) -> int:
        """It joins the nodes of these segments; blocks of those that are its own.  What was another's own until now
        leaves that one's charge."""
        own = call.id if _is_by_path(call, replica) else ""
        joined = self.nodes.join(call.prefix, first, last, replica.name, own)
        self._count_nodes(replica, joined.counted)
        for id_, blocks in joined.freed:
            other = self.calls[id_]
            self._uncount(other, replica)
            other.prefix.alone -= blocks
            self._count(other, replica)
        return joined.alone

    def _count(self, call: Call, replica: Replica) -> None:
        """Put its own blocks on the replica: by its path where that can be, else all that it may ever need."""
        shared = call.prefix.shared
        sums = _added(replica.points(), call.points(shared), 1) if _is_by_path(call, replica) else b""
        call.elastic = int(bool(sums))
        call.held = call.asks(shared) if sums else call.own
        replica.used += call.held
        replica.full += call.own
        if sums:
            replica.elastic += 1
            replica.base, replica.sums = call.base, sums
        else:
            replica.assured += call.own

    def _uncount(self, call: Call, replica: Replica) -> None:
        """Take off exactly what was put there."""
        replica.used -= call.held
        replica.full -= call.own
        if call.elastic:
            replica.elastic -= 1
            replica.sums = _added(replica.points(), call.points(call.prefix.shared), -1)
        else:
            replica.assured -= call.own
        if not replica.elastic:
            replica.base, replica.sums = 0, b""
        call.held = call.elastic = 0

    def _recount(self, call: Call, held: int, base: int, path: bytes, net: int) -> Answer:
        """A running call holds another number of blocks from now on.  Waiters and holds do not stop it, and no limit:
        what is above it was written by the engine already, or will be."""
        if not path and not call.path:  # it is charged in full, as before
            return ["ok"]
        replica, before = self.replicas[call.replica], (call.held, call.elastic)
        self._uncount(call, replica)
        call.prefix.net = min(net, call.prefix.blocks_of(len(call.prefix.segments)))
        call.asked, call.base, call.path = _wanted(call.blocks, held, base, path)
        self._count(call, replica)
        if before[1] or call.elastic:  # a waiter may fit where a path has become lower
            self.dirty = True
        over = replica.used - replica.limit
        return ["over", over] if call.held > before[0] and over > 0 else ["ok"]

    def _reserve(self, call: Call, replica: Replica) -> None:
        """Its prefix says which nodes it is in."""
        prefix = call.prefix
        prefix.alone = self._enter(call, 0, prefix.joined, replica)
        self._count(call, replica)
        replica.sequences += call.sequences
        there = prefix.blocks_of(prefix.joined)
        call.prefilling = 0 if prefix.computed else prefix.prefill(call.prefill, there)
        replica.prefill += call.prefilling
        call.replica, call.pool = replica.name, replica.pool
        key = self._key(call.key)
        key.blocks += call.blocks
        key.calls += 1
        key.hold_in(call.pool, call.blocks)
        self.calls[call.id] = call
        self._finish_hold(call.past)
        for lane, _ in self._fleet.lanes:
            head = self.calls.get(self.blocked.get(lane, ""))
            if head and call.is_warm and head.yields_until > self.clock:
                continue  # it lets warm ones go before it
            if head and head.id != call.id and self._could_use(head, replica):
                head.passed += call.blocks
                passed_before = head.passed - call.blocks
                if call.state == "reserved" and passed_before < self._fleet.overtake_blocks <= head.passed:
                    self.dirty = True  # no dispatch has placed this one; the head is due a replica to itself

    def _hold(self, call: Call) -> bool:
        """A head that was passed too often gets the roomiest replica it may use to itself; it keeps at most one, and
        none in a pool of which its key holds its part by now."""
        if call.passed < self._fleet.overtake_blocks:
            return False
        held = next((r for r in self.replicas.values() if r.held_for == call.id), None)
        if held:
            if self._could_use(call, held):
                return False
            held.held_for = ""
            self.work -= 1
            return True
        free = [r for r in self.replicas.values() if r.held_for == "" and self._could_use(call, r)]
        if not free:
            return False
        min(free, key=_roomiest).held_for = call.id
        self.work -= 1
        return True

    def _vacate(self, call: Call) -> None:
        """Take a reservation's blocks, sequences and prefill tokens off its replica and its key."""
        replica = self.replicas[call.replica]
        self._uncount(call, replica)
        self._count_nodes(replica, -self.nodes.leave(call.prefix, replica.name))
        replica.sequences -= call.sequences
        replica.prefill -= call.prefilling
        key = self._key(call.key)
        key.blocks -= call.blocks
        key.calls -= 1
        key.hold_in(call.pool, -call.blocks)
        call.pool = ""
        self._unpark_key(call.key)
        self._drained(replica.pool, call.blocks)
        self._forget_removed()
        self.dirty = True

    def _release(self, call: Call, refund: bool) -> None:
        del self.calls[call.id]
        self._vacate(call)
        if refund:
            self._correct(call, -call.charged)
            self._refund_quotas(call)

    # -- the appointment book ------------------------------------------------------------------------------------

    def _drained(self, pool: str, blocks: int) -> None:
        drain = self.drains.setdefault(pool, Drain(start=self.clock))
        age = self.clock - drain.start
        if age >= DRAIN_WINDOW_MS:
            adjacent = age < 2 * DRAIN_WINDOW_MS
            drain.previous = drain.current if adjacent else -1
            drain.start = drain.start + DRAIN_WINDOW_MS if adjacent else self.clock
            drain.current = 0
        drain.current += blocks
        drain.last = self._drain_of(drain)

    def _drain_of(self, drain: Drain) -> int:
        """Blocks given back per window, now."""
        age = self.clock - drain.start
        if age >= 2 * DRAIN_WINDOW_MS:
            return 0
        if age >= DRAIN_WINDOW_MS:
            return drain.current * (2 * DRAIN_WINDOW_MS - age) // DRAIN_WINDOW_MS
        if drain.previous < 0:
            return drain.current * DRAIN_WINDOW_MS // max(age, DRAIN_SETTLING_MS)
        return drain.current + drain.previous * (DRAIN_WINDOW_MS - age) // DRAIN_WINDOW_MS

    def _lane_drain(self, lane: str) -> int:
        drains = [self.drains[pool] for pool in self._pools(lane) if pool in self.drains]
        return sum(self._drain_of(drain) or drain.last for drain in drains)

    def _predicted_wait(self, call: Call, drain: int) -> int:
        """Milliseconds until the work ahead of this call, which is not counted as waiting yet, has drained.  Ahead of a
        warm one are warm ones alone in its class, ahead of others also those that are likely to come."""
        ahead = 0
        for class_, _ in self._fleet.classes:
            if class_ == call.class_:
                break
            ahead += sum(c.blocks for c in self._waiting(call.lane, class_))
        waiting = [c for c in self._waiting(call.lane, call.class_) if c.is_warm or not call.is_warm]
        own = call.blocks + sum(c.blocks for c in waiting if c.key == call.key)
        active = {
            flow: weight for flow, weight in self.weights.items() if flow[:2] == (call.lane, call.class_)
        }
        weight = active.setdefault(_flow(call), self._key(call.key).weight)
        in_class = call.blocks + sum(c.blocks for c in waiting)
        ahead_in_class = min(in_class, _ceil(own * sum(active.values()), weight))
        share = dict(self._fleet.classes)[call.class_]
        if share:  # of all blocks that go: no more than the rest goes before it
            ahead = min(ahead, _ceil(ahead_in_class * (CREDIT_SCALE - share), share))
        lane = [r for r in self.replicas.values() if r.pool in self._pools(call.lane)]
        held = 0 if call.is_warm else sum(counted(r.soft, r.limit) for r in lane)
        work = ahead + ahead_in_class + held
        return work * DRAIN_WINDOW_MS // drain

    def _drain_is_known(self, lane: str) -> bool:
        """Somebody has waited all the time in which it was measured: before that it is what calls needed, not what
        the replicas can do."""
        return self.clock - self.since.get(lane, self.clock) >= DRAIN_WINDOW_MS

    def _likely_drain(self, call: Call) -> int:
        """Until it is known at least what is given back if all that run take as long as this call is expected to."""
        drain = self._lane_drain(call.lane)
        if not drain or self._drain_is_known(call.lane):
            return drain
        full = sum(r.full for r in self.replicas.values() if r.pool in self._pools(call.lane))
        return max(drain, full * call.blocks * DRAIN_WINDOW_MS // (max(call.cost, 1) * 1000))

    def _expected_wait(self, call: Call) -> int:
        """-1 while nobody can say; of one call the same in one script."""
        if call.expected_ms is None:
            call.expected_ms = self._foreseen_wait(call)
        if call.expected_ms is None:
            known = self._lane_drain(call.lane) if self._drain_is_known(call.lane) else 0
            call.expected_ms = self._predicted_wait(call, known) if known else -1
        return call.expected_ms

    def _wait_told(self, call: Call) -> int:
        drain = self._likely_drain(call)
        return self._predicted_wait(call, drain) if drain else FIRST_APPOINTMENT_MS

    def _appointment(self, call: Call) -> int:
        """Milliseconds until a refused call should come back; it takes a place in the lane's book."""
        drain = self._likely_drain(call)
        if not drain:
            return FIRST_APPOINTMENT_MS
        earliest = self.clock + self._predicted_wait(call, drain)
        due = max(self.book.get(call.lane, 0), earliest) + call.blocks * DRAIN_WINDOW_MS // drain
        self.book[call.lane] = min(due, self.clock + APPOINTMENT_MAX_MS)
        return self.book[call.lane] - self.clock

    # -- the forecast --------------------------------------------------------------------------------------------

    def _foreseen_wait(self, call: Call) -> int | None:
        """Milliseconds until this call starts, by the order played forward over the ends that owners foresee; where
        calls are charged by their paths, or share, or some are held softly, an end does not say how much fits then, and
        warm calls are not in the order that is played."""
        waiting = [c for c in self.calls.values() if c.state == "queued"]
        if self.opens_at or len(waiting) >= FORECAST_WAITING or self.rehearsed:
            return None
        if _flow(call) in self.parked or self._capped(call):
            return None
        before = [c for c in self._waiting(*_flow(call)) if c.is_warm or not call.is_warm]
        if not before and self._place(call):
            return 0
        lane = [r for r in self.replicas.values() if r.pool in self._pools(call.lane)]
        if any(r.elastic or r.shared or r.soft for r in lane) or call.is_warm:
            return None
        if any(c.is_warm and self._pools(c.lane) and c.class_ in dict(self._fleet.classes) for c in waiting):
            return None
        self.rehearsed = True
        ends, rehearsal = self._ends(), Rehearsal(self, call)
        starts = next((end.due for end in ends[:FORECAST_PLAYED] if rehearsal.starts_at(end)), None)
        return None if starts is None else (starts - self.clock) * (100 + FORECAST_MARGIN_PERCENT) // 100

    def _ends(self) -> list[End]:
        """Those that lie ahead, as far as every owner has told of them."""
        owners = sorted(self.forecasts, key=lambda owner: (self.owners[owner], owner))
        full = [
            self.forecasts[owner][-1].due for owner in owners if len(self.forecasts[owner]) == FORECAST_ENDS
        ]
        ends = [end for owner in owners for end in self.forecasts[owner]]
        ahead = [end for end in ends if self.clock < end.due <= min(full, default=end.due)]
        return sorted(ahead, key=lambda end: end.due)

    # -- the operations ------------------------------------------------------------------------------------------

    def _mine(self, owner: str, id_: str) -> Call | None:
        call = self.calls.get(id_)
        return call if call and call.owner == owner else None

    def _foreign(self, owner: str, id_: str) -> bool:
        """Whether a living owner other than this one has the id; what a fenced one left is given back."""
        call = self.calls.get(id_)
        if call is None or call.owner == owner:
            return False
        if call.owner in self.sessions:
            return True
        self._give_back(call)
        return False

    def _admit(
        self,
        owner: str,
        id_: str,
        key: str,
        class_: str,
        lane: str,
        blocks: int,
        sequences: int,
        prefill: int,
        cost: int,
        wait_ms: int,
        weight: int,
        blocks_max: int,
        requests_max: int,
        pool_share: int,
        queue_max: int,
        queue_key_max: int,
        prefer: Sequence[str],
        exclude: Sequence[str],
        charge: Sequence[int],
        fingerprint: str,
        once: str,
        standing: int,
        held: int,
        base: int,
        path: bytes,
        promised: int,
        prefix: Sequence[Any],
        past: str = "",
    ) -> Answer:
        """`queue_max`: tickets that its lane and class may hold, `queue_key_max`: those of them that are its key's.

        `charge`: of each rate quota its bucket, what the call takes of it, and what it holds when it is full.
        `fingerprint`: of key, route and body, '' until it is asked for.  `once`: hash of key and `Idempotency-Key`,
        always with a fingerprint; '' = none.  `standing`: PLACE_ONLY, ASKED_BACK, or 0.  `held`, `base`, `path`: as in
        `Call`, `held` -1 = all of its blocks, `path` '' = it is charged in full.  `prefix`: block size and segments,
        or nothing.  `past`: name of the conversation with which it goes on.
        """
        if self._foreign(owner, id_):
            return ["refused", "id", "", 0, 0, 0]
        known = self.calls.get(id_)
        if known:
            return self._claim(owner, id_)
        if not self._pools(lane) or class_ not in dict(self._fleet.classes):
            return ["refused", "settings", "", 0, 0, FIRST_APPOINTMENT_MS]
        call = Call(
            id_, "none", owner, "", "", key, class_, lane, blocks, sequences, prefill, 0, cost, self.clock + wait_ms, 0,
            exclude=tuple(exclude), prefer=tuple(prefer), once=once, fingerprint=fingerprint if once else "",
            promised=promised, prefix=_prefix(prefix), past=past, yields_until=self._yields(past),
        )  # fmt: skip
        call.asked, call.base, call.path = _wanted(blocks, held, base, path)
        refusal = self._refuse_second(call) or self._refuse_shut()
        if refusal:
            return refusal
        self._set_policy(key, weight, blocks_max, requests_max, pool_share)
        refusal = self._refuse_outright(call) or self._refuse_by_quota(key, charge)
        terms = Terms(queue_max, queue_key_max, wait_ms, fingerprint, standing)
        return refusal or self._give_place(call, charge, terms)

    def _give_place(self, call: Call, charge: Sequence[int], terms: Terms) -> Answer:
        """On a replica, or in the queue."""
        self._dispatch()
        replica = self._at_once(call)
        if replica:
            self._start(call, replica)
            return ["grant", _place_told(call), *self._pay_quotas(call, charge)]
        told = self._queue(call, terms)
        return [*told, *self._pay_quotas(call, charge)] if told[0] == "ticket" else told

    def _start(self, call: Call, replica: Replica) -> None:
        """Without a ticket."""
        self._number(call)
        self._pay(call)
        call.state = "reserved"
        self._share(call, replica)
        self._reserve(call, replica)

    def _ask(
        self,
        owner: str,
        least: int,
        likely: int,
        key: str,
        class_: str,
        lane: str,
        sequences: int,
        cost: int,
        wait_ms: int,
        weight: int,
        blocks_max: int,
        requests_max: int,
        pool_share: int,
        queue_max: int,
        queue_key_max: int,
        standing: int,
        ahead: int,
        own_ahead: int,
        held: int,
        base: int,
        path: bytes,
        promised: int,
        prefix: Sequence[Any],
        past: str = "",
    ) -> Answer:
        """Whether the queue would refuse a call of `least` blocks or more, how many is not known yet.

        `likely` is what a refusal books, and what is compared with others' work.  `ahead` calls of its line,
        `own_ahead` of them of its key, were told so before and do not wait yet.  `held`, `base` and `path` are those of
        a call of `least` blocks.  `prefix`: the block size where it may come to share, or nothing.  Nothing is taken.
        """
        if not self._pools(lane) or class_ not in dict(self._fleet.classes) or self.opens_at:
            return ["open"]
        if refusal := self._refuse_shut():
            return refusal
        smallest = Call(
            "", "none", owner, "", "", key, class_, lane, least, sequences, 0, 0, cost, self.clock, 0,
            promised=promised, prefix=_prefix(prefix), past=past, yields_until=self._yields(past),
        )  # fmt: skip
        smallest.asked, smallest.base, smallest.path = _wanted(least, held, base, path)
        self._set_policy(key, weight, blocks_max, requests_max, pool_share)
        self._dispatch()
        if self._fits_now(smallest) or any(place.flow == _flow(smallest) for place in self.places):
            return ["open"]
        call = replace(smallest, blocks=max(least, likely)) if queue_max else smallest
        terms = Terms(queue_max, queue_key_max, wait_ms, "", standing, smallest, ahead, own_ahead)
        return self._refuse_to_queue(call, terms) or ["open"]

    def _queue(self, call: Call, terms: Terms) -> Answer:
        """A ticket, in the place that was left or behind all others of its flow; or why there is none."""
        if terms.queue_max and not terms.fingerprint and any(p.flow == _flow(call) for p in self.places):
            return ["fingerprint"]
        refusal = self._refuse_to_queue(call, terms)
        if refusal:
            return refusal
        place, wait = self._place_left(call, terms.fingerprint), -1
        if place:
            self._return(call, place)
        else:
            wait = self._expected_wait(call)
            self._number(call)
            self._join(call)
        return ["ticket", len(self._waiting(call.lane, call.class_)), wait]

    def _refuse_shut(self) -> Answer | None:
        return ["refused", "gate_closed", "", 0, 0, SHUT_RETRY_MS] if self.shut else None

    def _refuse_second(self, call: Call) -> Answer | None:
        """Of two calls under one `Idempotency-Key`."""
        first = next((c for c in self.calls.values() if call.once and c.once == call.once), None)
        if first is None:
            return None
        same = first.fingerprint == call.fingerprint
        return ["refused", "duplicate_in_progress" if same else "idempotency_key_reused", "once", 0, 0, 0]

    # -- rate quotas ---------------------------------------------------------------------------------------------

    @property
    def quota_us(self) -> int:
        """The store's time as it passed while it did not go backwards, in microseconds."""
        return (self.clock + self.skipped) * 1000

    def _missing(self, key: str, bucket: int) -> int:
        """Microseconds until it is full."""
        quotas = self._key(key).quotas or (0,) * QUOTA_BUCKETS
        return max(quotas[bucket] - self.quota_us, 0)

    def _refuse_by_quota(self, key: str, charge: Sequence[int]) -> Answer | None:
        """The one that it takes longest to wait for; of equal ones the first."""
        longest, refusal = 0, None
        for bucket, cost, capacity in zip(charge[::3], charge[1::3], charge[2::3], strict=True):
            left = capacity - self._missing(key, bucket)
            if cost - left > longest:
                longest = cost - left
                refusal = ["refused", "quota_exceeded", "quota", bucket, left, _ceil(longest, 1000)]
        return refusal

    def _pay_quotas(self, call: Call, charge: Sequence[int]) -> list[int]:
        """What is missing in each bucket afterwards."""
        costs = [item for pair in zip(charge[::3], charge[1::3], strict=True) for item in pair]
        self._change_quotas(call.key, costs)
        call.charge = tuple(costs)
        return [self._missing(call.key, bucket) for bucket in charge[::3]]

    def _change_quotas(self, name: str, costs: Sequence[int]) -> None:
        """Bucket, microseconds...; what is negative is given back."""
        if not costs:
            return
        key = self._key(name)
        quotas = list(key.quotas or (0,) * QUOTA_BUCKETS)
        for bucket, cost in zip(costs[::2], costs[1::2], strict=True):
            quotas[bucket] = max(quotas[bucket], self.quota_us) + cost
        key.quotas = tuple(quotas)

    def _refund_quotas(self, call: Call) -> None:
        self._change_quotas(call.key, [-item if i % 2 else item for i, item in enumerate(call.charge)])

    def _set_policy(
        self, name: str, weight: int, blocks_max: int, requests_max: int, pool_share: int
    ) -> None:
        key = self._key(name)
        other_share = key.pool_share != pool_share
        changed = other_share or (key.blocks_max, key.requests_max) != (blocks_max, requests_max)
        key.weight, key.blocks_max, key.requests_max = weight, blocks_max, requests_max
        key.pool_share = pool_share
        if changed:
            self._unpark_key(name)
        if other_share:  # who waits for the other pools of its lane may start in this one
            self.dirty = True

    def _refuse_outright(self, call: Call) -> Answer | None:
        """Refusals that no waiting can change."""
        lane = [
            r for r in self.replicas.values() if r.pool in self._pools(call.lane) and r.state != "removed"
        ]
        fitting = [r for r in lane if call.blocks <= r.usable and call.sequences <= r.sequences_usable]
        if lane and not fitting and all(r.usable for r in lane):
            return [
                "refused",
                "context_length_exceeded",
                "usable",
                call.blocks,
                max(r.usable for r in lane),
                0,
            ]
        answering = [r for r in fitting if r.state in ("up", "draining")]
        if not any(not (call.promised and r.mode == ELASTIC) for r in answering):
            knob = "promised" if answering else ""
            return ["refused", "no_backend", knob, 0, 0, FIRST_APPOINTMENT_MS]
        key = self._key(call.key)
        if 0 <= key.blocks_max < call.blocks:
            return ["refused", "key_cap_exceeded", "blocks_max", call.blocks, key.blocks_max, 0]
        most = self._part_in_health(key, call.lane)
        if 0 <= most < call.blocks:
            return ["refused", "key_cap_exceeded", "pool_share", call.blocks, most, 0]
        if key.requests_max == 0:
            return ["refused", "quota_exceeded", "requests_max", 1, 0, FIRST_APPOINTMENT_MS]
        return None

    def _part_in_health(self, key: Key, lane: str) -> int:
        """Most blocks that the key may hold of one pool of the lane when all replicas are up; -1 where that is not
        limited, or not known."""
        pools = [
            [r for r in self.replicas.values() if r.pool == pool and r.state != "removed"]
            for pool in self._pools(lane)
        ]
        if key.pool_share < 0 or any(r.usable == 0 for replicas in pools for r in replicas):
            return -1
        return max(sum(r.limit for r in replicas) * key.pool_share // POOL_SHARE_SCALE for replicas in pools)

    def _at_once(self, call: Call) -> Replica | None:
        """Where the call may start without a ticket: nobody that could start waits in its lane, and it fits."""
        if (
            self.opens_at
            or self._unparked_wait(call.lane)
            or self._waiting(*_flow(call))
            or self._capped(call)
        ):
            return None
        return self._place(call)

    def _refuse_to_queue(self, call: Call, terms: Terms) -> Answer | None:
        waiting = len(self._waiting(call.lane, call.class_)) + terms.ahead
        if waiting < self._open_to(call, terms, terms.queue_max):
            return self._refuse_to_open_queue(call, terms)
        if terms.queue_max:
            return self._refuse_to_full_queue(call, waiting, terms)
        if self.opens_at:
            return ["refused", "store_unavailable", "", 0, 0, self.opens_at - self.clock]
        if not any(self._is_able(call, r) for r in self.replicas.values()):
            return ["refused", "no_backend", "draining", 0, 0, FIRST_APPOINTMENT_MS]
        if self._capped(call):
            return self._refuse_capped(call)
        return [
            "refused",
            "capacity_exceeded",
            "limit",
            call.blocks,
            self._free(call),
            self._appointment(call),
        ]

    def _refuse_to_open_queue(self, call: Call, terms: Terms) -> Answer | None:
        own = len(self._waiting(*_flow(call))) + terms.own_ahead
        if terms.wait_ms <= 0:
            return ["refused", "queue_timeout", "seconds_max", 0, terms.wait_ms, self._wait_told(call)]
        if own >= terms.queue_key_max:
            return ["refused", "queue_full", "key_share", own, terms.queue_key_max, self._appointment(call)]
        if self._place_left(call, terms.fingerprint):
            return None
        if terms.standing == PLACE_ONLY:
            return ["refused", "queue_full", "place_only", 0, 0, self._appointment(call)]
        return self._refuse_too_late(call, terms)

    def _refuse_to_full_queue(self, call: Call, waiting: int, terms: Terms) -> Answer | None:
        """A key with less waiting takes the place of the newest call of the key with the most."""
        crowder = self._crowder(call)
        if terms.wait_ms <= 0 or crowder is None:
            return ["refused", "queue_full", "depth_max", waiting, terms.queue_max, self._appointment(call)]
        refusal = self._refuse_to_open_queue(call, terms)
        if refusal is None and not terms.smallest:
            self._displace(self._newest(call.lane, call.class_, crowder))
        return refusal

    def _newest(self, lane: str, class_: str, key: str) -> Call:
        """Of the warm ones only where there are no others."""
        return max(self._waiting(lane, class_, key), key=lambda c: (not c.is_warm, c.arrival))

    def _crowder(self, call: Call) -> str | None:
        """The key with the most blocks waiting, if they are more than the call's own key would have, and no replica
        was emptied for its newest call."""
        blocks: dict[str, int] = {}
        for waiting in self._waiting(call.lane, call.class_):
            blocks[waiting.key] = blocks.get(waiting.key, 0) + waiting.blocks
        most, key = max(((b, key) for key, b in blocks.items()), default=(0, ""))
        if blocks.get(call.key, 0) + call.blocks >= most:
            return None
        newest = self._newest(call.lane, call.class_, key)
        return None if any(r.held_for == newest.id for r in self.replicas.values()) else key

    def _displace(self, call: Call) -> None:
        """Its owner is told, and settles it."""
        call.state = "displaced"
        self._leave(call)
        self._refund_quotas(call)
        call.charge = ()

    def _open_to(self, call: Call, terms: Terms, amount: int) -> int:
        """Of the places and the time of a queue a part is kept for who was asked to come back, while anybody was."""
        if terms.standing == ASKED_BACK or self.book.get(call.lane, 0) <= self.clock:
            return amount
        return amount - amount // KEPT_PART

    def _fits_now(self, call: Call) -> bool:
        return not self._capped(call) and self._place(call) is not None

    def _refuse_too_late(self, call: Call, terms: Terms) -> Answer | None:
        """It would wait in vain, as far as anybody can tell; not who fits now, past those that do not."""
        judged, wait_ms = terms.smallest or call, terms.wait_ms
        wait = self._expected_wait(judged)
        if wait <= self._open_to(call, terms, wait_ms) or self.opens_at or self._fits_now(judged):
            return None
        return ["refused", "predicted_wait", "wait_ms", wait, wait_ms, self._appointment(call)]

    def _refuse_capped(self, call: Call) -> Answer:
        key = self._key(call.key)
        wait = self._wait_told(call)
        if 0 <= key.requests_max < key.calls + 1:
            return ["refused", "quota_exceeded", "requests_max", key.calls + 1, key.requests_max, wait]
        if 0 <= key.blocks_max < key.blocks + call.blocks:
            return ["refused", "quota_exceeded", "blocks_max", key.blocks + call.blocks, key.blocks_max, wait]
        pool = self._pools(call.lane)[0]
        held = key.held_in(pool) + call.blocks
        return ["refused", "quota_exceeded", "pool_share", held, self._part(key, pool), wait]

    def _free(self, call: Call) -> int:
        """Most blocks on one replica that the call may use which no whole demand is counted in."""
        usable = [r for r in self.replicas.values() if self._could_use(call, r)]
        return max([self._limit(call, r) - r.full for r in usable] + [0])

    def _number(self, call: Call) -> None:
        """Its place in its flow, to which a move brings it back."""
        self.arrivals += 1
        call.arrival = self.arrivals

    def _claim(self, owner: str, id_: str) -> Answer:
        call = self._mine(owner, id_)
        if call is None:
            return ["gone"]
        if call.state == "queued":
            waiting = self._waiting(call.lane, call.class_)
            return ["ticket", len(waiting), FIRST_APPOINTMENT_MS]
        if call.state == "displaced":
            del self.calls[id_]
            return ["refused", "queue_full", "displaced", 0, 0, self._wait_told(call)]
        call.state = "reserved"
        return ["grant", _place_told(call)]

    def _first_token(self, owner: str, id_: str) -> Answer:
        """How many of its segments are in nodes now."""
        call = self._mine(owner, id_)
        if call is None or not _holds(call):
            return ["gone"]
        call.state = "reserved"
        self._end_prefill(call)
        self._compute(call)
        return ["ok", call.prefix.joined] if call.prefix.segments else ["ok"]

    def _end_prefill(self, call: Call) -> None:
        self.replicas[call.replica].prefill -= call.prefilling
        if call.prefilling:
            call.prefilling = 0
            self.dirty = True

    def _resize(self, owner: str, id_: str, held: int, base: int, path: bytes, net: int) -> Answer:
        """What the call holds from now on, with what it shares, and its path, without `net` blocks of that.

        Absolute: to carry it out twice changes nothing, nor does what the call comes to share before or after."""
        call = self._mine(owner, id_)
        if call is None or not _holds(call):
            return ["gone"]
        call.state = "reserved"
        return self._recount(call, held, base, path, net)

    def _move(self, owner: str, id_: str, exclude: Sequence[str]) -> Answer:
        """Back into the queue at the old place, not on these replicas, without paying twice; once, also if it is
        carried out again."""
        call = self._mine(owner, id_)
        if call is None or call.state == "displaced":
            return ["gone"]
        if call.state != "queued" and call.replica not in exclude:  # a late copy: it runs elsewhere already
            return ["grant", call.replica]
        call.exclude = tuple(sorted({*call.exclude, *exclude}))
        if call.state == "queued":
            self._unhold_excluded(call)
            self.dirty = True
        else:
            self._vacate(call)
            self._correct(call, -call.charged)
            call.charged, call.prefilling, call.replica = 0, 0, ""
            call.attempt += 1
            self._join(call)
        return ["ticket", len(self._waiting(call.lane, call.class_)), FIRST_APPOINTMENT_MS]

    def _unhold_excluded(self, call: Call) -> None:
        for name in call.exclude:
            if name in self.replicas and self.replicas[name].held_for == call.id:
                self.replicas[name].held_for = ""

    def _settle(
        self,
        owner: str,
        id_: str,
        used: int,
        cost: int,
        corrections: Sequence[int],
        fingerprint: str,
        name: str = "",
    ) -> Answer:
        """`used`: blocks really used, `cost`: block-seconds really held; -1 where unknown.

        `corrections`: bucket, microseconds that were charged too little (negative: too much), for a call that ran.
        `fingerprint`: its place is to be remembered if it still waits; '' = it is not.  `name`: of the conversation,
        whose blocks are to be held softly; '' = they are not.
        """
        call = self._mine(owner, id_)
        if call is None:
            return ["gone"]
        if call.state == "queued":
            self._withdraw(call, fingerprint)
            return ["withdrawn"]
        if call.state == "displaced":
            del self.calls[id_]
            return ["withdrawn"]
        if call.state == "unclaimed":
            self._release(call, refund=True)
            return ["released"]
        replica, shared = self.replicas[call.replica], call.prefix.shared
        before = replica.shared
        self._release(call, refund=False)
        if used >= 0:
            kept = shared - (before - replica.shared)  # of its nodes those that others are in
            self._answered(replica, min(used, call.blocks), kept, name)
        if call.charge:
            self._change_quotas(call.key, corrections)
        if cost >= 0 and call.charged:
            self._correct(call, _ceil((cost - call.cost) * TAG_SCALE, self._key(call.key).weight))
        return ["settled"]

    def _redeclare(
        self,
        owner: str,
        id_: str,
        replica: str,
        key: str,
        class_: str,
        lane: str,
        blocks: int,
        sequences: int,
        prefill: int,
        cost: int,
        weight: int,
        blocks_max: int,
        requests_max: int,
        pool_share: int,
        force: int,
        fingerprint: str,
        once: str,
        held: int,
        base: int,
        path: bytes,
        promised: int,
        prefix: Sequence[Any],
    ) -> Answer:
        """A running call says where it runs: after its owner lost its lease, or the store its data.

        `prefill`: what it still holds; `prefix`: with the nodes that it was in.  Where another call was admitted under
        its `once` meanwhile, that one keeps it.
        """
        if self._foreign(owner, id_):
            return ["refused", "id", "", 0, 0, 0]
        known = self.calls.get(id_)
        if known and known.state == "displaced":
            del self.calls[id_]
            known = None
        if known and known.state != "queued":
            if known.replica != replica:
                return ["error", "declared on another replica"]
            declared = _prefix(prefix)
            self._recount(known, held, base, path, declared.net)
            return self._confirm(known, prefill, declared)
        target = self.replicas.get(replica)
        if target is None and force:
            target = self.replicas[replica] = Replica(replica, pool="", state="removed")
        if target is None:
            return ["no_room"]
        call = Call(id_, "reserved", owner, "", "", key, class_, lane, blocks, sequences, prefill, 0, cost, self.clock,
                    0, promised=promised, prefix=_prefix(prefix), yields_until=WARM)  # fmt: skip
        call.asked, call.base, call.path = _wanted(blocks, held, base, path)
        seats = target.sequences + sequences <= target.sequences_max or target.sequences == 0
        has_blocks = self._has_blocks(call, target, self.nodes.known(call.prefix, replica))
        if not (force or (seats and has_blocks)):
            return ["no_room"]
        call.yields_until = 0  # no hold was in its way just now, and it waits behind no warm call later
        if known:
            self._withdraw(known)
        self._set_policy(key, weight, blocks_max, requests_max, pool_share)
        self._number(call)
        if once and all(c.once != once for c in self.calls.values()):
            call.once, call.fingerprint = once, fingerprint
        self._reserve(call, target)
        self.dirty = self.dirty or call.prefix.joined > 0  # who waits may share it again
        return ["declared"]

    def _confirm(self, known: Call, prefill: int, prefix: Prefix) -> Answer:
        """A call that is declared was never lost; what its owner knows of it may be newer."""
        known.state = "reserved"
        if not prefill or prefix.computed:
            self._end_prefill(known)
        if prefix.computed:
            self._compute(known)
        return ["same"]

    def _heartbeat(self, owner: str, count: int, total: int, ends: Sequence[Any]) -> Answer:
        """Compare the owner's list with ours; a replayed batch has changed the set already and tells nothing.

        `ends`: of its running calls the next, in order: milliseconds from now, replica, blocks...
        """
        due = zip(ends[::3], ends[1::3], ends[2::3], strict=True)
        self.forecasts[owner] = tuple(End(self.clock + ms, replica, blocks) for ms, replica, blocks in due)
        if not ends:
            del self.forecasts[owner]
        ids = [int(c.id, 16) for c in self.calls.values() if c.owner == owner and c.state == "reserved"]
        same = self.replay or (count, total) == (len(ids), sum(ids) % DIGEST_MODULUS)
        draining = sorted(r.name for r in self.replicas.values() if r.state == "draining")
        return ["same" if same else "differs", *draining]

    def _declared(self, owner: str) -> Answer:
        self.sessions[owner].declared = self.epoch
        self._open_gate()
        return ["closed", self.opens_at - self.clock] if self.opens_at else ["open"]


class Rehearsal:
    """The queue with one call more, in which others start in thought, or leave in vain: as in the books, except that
    no prefill is given back, that no key reaches a cap, and that nobody comes."""

    def __init__(self, books: Books, call: Call) -> None:
        self._books = books
        self._call = call
        waiting = [c for c in books.calls.values() if c.state == "queued" and _flow(c) not in books.parked]
        self._waiting = [*sorted(waiting, key=lambda c: c.arrival), call]
        self._tags = {_flow(c): books.tags.get(_flow(c), 0) for c in waiting}
        self._tags.setdefault(_flow(call), books._entry(_flow(call)))
        self._owed = dict(books.owed)
        self._credit = dict(books.credit)
        self._free = {r.name: r.limit - r.used for r in books.replicas.values()}
        self._seats = {r.name: r.sequences_max - r.sequences for r in books.replicas.values()}

    def starts_at(self, end: End) -> bool:
        """Whether the call starts when this end gives its blocks back, and one sequence: owners do not tell how many,
        and few calls have more."""
        replica = self._books.replicas.get(end.replica)
        if replica is None:
            return False
        self._free[replica.name] += end.blocks
        self._seats[replica.name] += 1
        self._waiting = [c for c in self._waiting if c is self._call or c.deadline > end.due]
        while head := self._next(replica):
            self._start(head, replica)
            if head is self._call:
                return True
        return False

    def _next(self, replica: Replica) -> Call | None:
        """Who starts there now."""
        for lane, pools in self._books._fleet.lanes:
            for class_ in self._classes(lane) if replica.pool in pools else ():
                for head in self._heads(lane, class_)[:LOOKAHEAD]:
                    if self._fits(head, replica):
                        return head
        return None

    def _heads(self, lane: str, class_: str) -> list[Call]:
        heads: dict[str, Call] = {}
        for call in self._waiting:
            if (call.lane, call.class_) == (lane, class_):
                heads.setdefault(call.key, call)
        return sorted(heads.values(), key=lambda c: (self._tags[_flow(c)], c.key))

    def _classes(self, lane: str) -> list[str]:
        """In the order of their turns."""
        favoured = self._favoured(lane)
        found = [class_ for class_, _ in self._books._fleet.classes if self._heads(lane, class_)]
        return sorted(found, key=lambda class_: class_ != favoured)

    def _favoured(self, lane: str) -> str | None:
        """The lowest class whose credit covers its head."""
        for class_, share in reversed(self._books._fleet.classes):
            heads = self._heads(lane, class_)
            credit = self._credit.get((lane, class_), 0)
            if share and heads and credit >= self._books._price(class_) * heads[0].blocks:
                return class_
        return None

    def _fits(self, call: Call, replica: Replica) -> bool:
        held_for = self._books.calls.get(replica.held_for)
        return (
            call.blocks <= self._free[replica.name]
            and call.sequences <= self._seats[replica.name]
            and self._books._could_use(call, replica)
            and (held_for is None or held_for is call or held_for not in self._waiting)
        )

    def _start(self, call: Call, replica: Replica) -> None:
        if self._favoured(call.lane) == call.class_:
            self._credit[call.lane, call.class_] -= self._books._price(call.class_) * call.blocks
        self._waiting.remove(call)
        self._free[replica.name] -= call.blocks
        self._seats[replica.name] -= call.sequences
        self._charge(call)
        classes = self._books._fleet.classes
        for class_, share in classes[[name for name, _ in classes].index(call.class_) + 1 :]:
            if share and self._heads(call.lane, class_):
                self._credit[call.lane, class_] = (
                    self._credit.get((call.lane, class_), 0) + call.blocks * share
                )

    def _charge(self, call: Call) -> None:
        units = _ceil(call.cost * TAG_SCALE, self._books._key(call.key).weight)
        owed = self._owed.get(_flow(call), 0)
        left = max(units - owed, min(units, 1))
        self._tags[_flow(call)] += left
        self._owed[_flow(call)] = owed - (units - left)


def _holds(call: Call) -> bool:
    """Whether it has a place on a replica."""
    return call.state in ("unclaimed", "reserved")


def _is_by_path(call: Call, replica: Replica) -> bool:
    """Whether the call is charged by its path there; sums of paths for different sizes would say nothing."""
    return (
        call.path != b""
        and not call.promised
        and replica.mode != GUARANTEED
        and (not replica.elastic or replica.base == call.base)
    )


def _prefix(packed: Sequence[Any]) -> Prefix:
    return msgspec.convert(packed, Prefix) if packed else Prefix()


def _place_told(call: Call) -> Any:
    """Its replica; of a call that asks to share also how many of its segments it does, and the cache that has them;
    then 1 where it is warm."""
    prefix = call.prefix
    if not call.replica or not (prefix.segments or call.is_warm):
        return call.replica
    return [call.replica, prefix.joined, prefix.cache, *([1] if call.is_warm else [])]


def _wanted(blocks: int, held: int, base: int, path: bytes) -> tuple[int, int, bytes]:
    """What a call asks to hold, its base and its path; without a path all of its demand."""
    return (blocks if held < 0 else held, base, path) if path else (blocks, 0, b"")


def _added(sums: Path, path: Path, direction: int) -> bytes:
    """Packed; empty where a sum is more than the record holds."""
    added = tuple(point + direction * more for point, more in zip(sums, path, strict=True))
    return pack(added) if max(added) <= SUM_MAX else b""


def _flow(call: Call) -> tuple[str, str, str]:
    return call.lane, call.class_, call.key


def _by_end(place: Place) -> tuple[int, str]:
    return place.end, place.member


def _lower(configured: int, learned: int) -> int:
    return configured if learned < 0 else min(configured, learned)


def _roomiest(replica: Replica) -> tuple[int, str]:
    return replica.used - replica.limit, replica.name


def _percent(replica: Replica) -> int:
    return replica.used * 100 // max(replica.limit, 1)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
