"""What must be true of the simulated world: after each script, at each moment of calm, and at the end.

A process is calm when nothing has disturbed its way to the store, the store or itself for a while; then everything has
to be in order and prompt.  What is out of order otherwise must have a reason that DESIGN 4.5 names.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import msgspec

from gateway.core.books import Books, Call
from gateway.core.elastic import GUARANTEED
from gateway.core.events import CallEnded, Healed, LeaseLost, Overdraft
from gateway.core.events import Event as Fact
from gateway.core.invariants import Flow, Line, SessionRecord, Snapshot, holds, violations
from gateway.core.order import DIGEST_MODULUS, HOLD_MS
from gateway.ledger.reservation import Ask, Phase
from gateway.upstream.api import UpstreamRequest
from tests.sim.clients import Visit
from tests.sim.engines import blocks_of
from tests.sim.gateways import HEARTBEAT_MS, HOLD_SECONDS, LEASE_MS, WAIT_MS, Gateway
from tests.sim.loop import Process, VirtualLoop
from tests.sim.store import Store

CALM_SECONDS = 3.5
"""After a disturbance: a late reply (1 s), another attempt, and two heartbeats."""
LOOK_SECONDS = 0.2
PROMPT_SECONDS = 0.5
"""In calm: an op that was put in is answered, a grant that was woken for is claimed."""
HEARTBEAT_SECONDS = HEARTBEAT_MS / 1000
SCRIPTS_A_CHECK = 12
"""Whole books are judged after every so many scripts."""
HEALS_SECONDS = 2 * LEASE_MS / 1000
"""After the store has lost its data its books may have to be healed."""
NEVER = -1e9
STREAM_SECONDS_MAX = 70.0
"""The longest that an answer, its retries and a client that reads slowly take."""


class Violation(Exception):
    """Something happened that must not."""


@dataclass(slots=True, eq=False)
class Run:
    """One exchange with an engine, from before its connection to after its end."""

    gateway: Gateway
    ask: Ask
    replica: str
    blocks: int
    excused: bool = False
    """Its gateway lost its lease, or came back too late after the store had lost its data."""
    undeclared: bool = False
    """The store lost its data: it has to be declared again before admission opens."""
    refused: bool = False
    """Its gateway asked for its place again, and it is gone: it has to end."""

    @property
    def id(self) -> str:
        return self.ask.id


class Judge:
    def __init__(self, loop: VirtualLoop, trace: Callable[[str], None]) -> None:
        self.failed: asyncio.Future[str] = loop.create_future()
        self.runs: dict[Run, None] = {}
        self.facts: Counter[str] = Counter()
        self._loop = loop
        self._trace = trace
        self._store: Store | None = None
        self._gateways: list[Gateway] = []
        self._disturbed_until: dict[Process, float] = {}
        self._all_disturbed_until = 0.0
        self._ends: dict[str, list[CallEnded]] = {}
        self._owners: dict[str, Process] = {}
        self._sessions: set[str] = set()
        self._places: dict[str, tuple[str, int]] = {}
        self._run = ""
        self._data_lost_at = self._old_data_at = NEVER
        self._opens_not_before_ms = 0
        self._was_open = False
        self._declared: dict[str, str] = {}
        """In which run of the store each owner has said that it declared everything."""
        self._ids: set[str] = set()
        self._revived: set[str] = set()
        """Calls that began in a batch that was carried out before."""
        self._revived_at: dict[Process, float] = {}
        self._scripts = 0
        self._seen: dict[tuple[str, ...], float] = {}
        """Since when something that must not last is so."""
        self._looked: set[tuple[str, ...]] = set()
        self._paused_seconds = 0.0

    def watch(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    def add(self, gateway: Gateway) -> None:
        self._gateways.append(gateway)
        self.disturb(gateway.process, 0.0)

    def fail(self, what: str) -> None:
        self._trace(f"VIOLATION {what}")
        if not self.failed.done():
            self.failed.set_result(f"at {self._loop.time():.3f} s: {what}")

    # -- disturbances --------------------------------------------------------------------------------------------

    def disturb(self, process: Process | None, seconds: float) -> None:
        """Something bad happens to a process, or to all, from now on for so long."""
        until = self._loop.time() + seconds
        if process is None:
            self._all_disturbed_until = max(self._all_disturbed_until, until)
        else:
            self._disturbed_until[process] = max(self._disturbed_until.get(process, 0.0), until)
        self._seen.clear()

    def paused(self, seconds: float) -> None:
        """A process was stopped, so its calls end so much later."""
        self._paused_seconds += seconds

    def lost_data(self, old: bool) -> None:
        """The store forgets all or, where `old`, remembers what was true once."""
        self._data_lost_at = self._loop.time()
        if old:
            self._old_data_at = self._data_lost_at
        for run in self.runs:
            run.undeclared = True

    def calm(self, process: Process, seconds: float = CALM_SECONDS) -> bool:
        until = max(self._all_disturbed_until, self._disturbed_until.get(process, 0.0))
        return not process.stopped and self._loop.time() >= until + seconds

    # -- facts ---------------------------------------------------------------------------------------------------

    def observe(self, gateway: Gateway, fact: Fact) -> None:
        if gateway.process.dead:
            return
        if isinstance(fact, CallEnded):
            self._ends.setdefault(fact.request_id, []).append(fact)
            self.facts[f"{fact.outcome} {fact.reason or ''}".strip()] += 1
            self._judge_wait(fact)
        elif isinstance(fact, Healed):
            self.facts[f"healed {fact.kind}"] += fact.count
            if not self._is_explained(gateway, fact):
                self.fail(f"{gateway}: the books had to be healed, {fact.kind} {fact.count}")
        elif isinstance(fact, Overdraft):
            self.facts["overdraft"] += 1
        elif isinstance(fact, LeaseLost):
            self.facts["lease lost"] += 1
            if self.calm(gateway.process):
                self.fail(f"{gateway} was fenced although nothing disturbed it")

    def _is_explained(self, gateway: Gateway, healed: Healed) -> bool:
        if healed.kind == "error":
            return self._remembers_old
        revived_at = self._revived_at.get(gateway.process, NEVER) if healed.kind == "settled" else NEVER
        return self._since(max(revived_at, self._data_lost_at)) < HEALS_SECONDS

    def _judge_wait(self, fact: CallEnded) -> None:
        waits = WAIT_MS[fact.class_] / 1000 + 2 * HOLD_SECONDS + self._paused_seconds + PROMPT_SECONDS
        never_ran = not fact.replica
        if never_ran and fact.duration_ms > waits * 1000:
            self.fail(f"{fact.request_id} waited {fact.duration_ms:.0f} ms and was answered {fact.reason}")

    def _since(self, moment: float) -> float:
        return self._loop.time() - moment

    @property
    def _remembers_old(self) -> bool:
        """The store may take a call to be where it was, or its owner to be who it was."""
        return self._since(self._old_data_at) < HEALS_SECONDS

    def log(self, record: logging.LogRecord) -> None:
        """An error that no fault explains is one of the product's."""
        text = record.getMessage()
        self._trace(f"log {record.levelname} {text}")
        if record.levelno < logging.ERROR:
            return
        away = "is away" in text and not record.exc_info
        contradicted = "an op failed" in text and self._remembers_old
        if not (away or contradicted):
            self.fail(f"logged: {text}{f' {record.exc_info[1]!r}' if record.exc_info else ''}")

    # -- exchanges -----------------------------------------------------------------------------------------------

    def began(self, gateway: Gateway, ask: Ask, request: UpstreamRequest) -> Callable[[], None]:
        replica = request.url.removeprefix("http://").partition(":")[0]
        run = Run(gateway, ask, replica, blocks_of(msgspec.json.decode(request.body)))
        if gateway.process.dead:
            return lambda: None
        self._trace(f"{gateway} runs {ask.id} on {replica}, {run.blocks} blocks")
        self.runs[run] = None
        if not self._in_standing(gateway):
            run.excused = True
        elif not self._covered(run):
            self.fail(f"{gateway} runs {ask.id} on {replica}, but the store has {self._record(ask.id)}")
        self._judge_room(replica)
        return lambda: self._ended(run)

    def _ended(self, run: Run) -> None:
        self.runs.pop(run, None)
        self._trace(f"{run.gateway} ended {run.id}")

    def dropped(self, gateway: Gateway) -> None:
        """It was killed, and its connections with it."""
        for run in [run for run in self.runs if run.gateway is gateway]:
            del self.runs[run]

    def _judge_room(self, replica: str) -> None:
        """Where every call is charged in full: else more may run than fit at their limits.  What calls begin with is
        in the engine once."""
        if replica in self.store.books.replicas and self.store.books.replicas[replica].mode != GUARANTEED:
            return
        running = [run for run in self.runs if run.replica == replica]
        judged = [run for run in running if not run.excused and not run.undeclared]
        begun = [segment for run in judged for segment in run.ask.admission.segments]
        once = {segment.id: segment.blocks for segment in begun}
        counted = sum(run.blocks for run in judged) - sum(s.blocks for s in begun) + sum(once.values())
        limit = self.store.books.replicas[replica].limit if replica in self.store.books.replicas else 0
        if counted > limit > 0:
            told = ", ".join(f"{run.id} of {run.gateway}: {run.blocks}" for run in running)
            self.fail(f"{replica} has {limit} blocks and runs {counted}: {told}")

    def _covered(self, run: Run) -> bool:
        call = self.store.books.calls.get(run.id)
        return (
            call is not None
            and holds(call)
            and call.replica == run.replica
            and self._owners.get(call.owner) is run.gateway.process
        )

    def _record(self, id_: str) -> str:
        call = self.store.books.calls.get(id_)
        return f"{call.state} on {call.replica or 'no replica'}" if call else "no such call"

    def _owner_of(self, gateway: Gateway) -> str | None:
        """Its living owner id that has declared all in this epoch."""
        books = self.store.books
        found = [o for o, p in self._owners.items() if p is gateway.process and o in books.sessions]
        return found[-1] if found and books.sessions[found[-1]].declared == books.epoch else None

    def _in_standing(self, gateway: Gateway) -> bool:
        return self._owner_of(gateway) is not None and self.store.run == self.store.books.run

    # -- scripts -------------------------------------------------------------------------------------------------

    def ran(self, store: Store, script: str, client: Process, owner: str) -> None:
        books = store.books
        if script == "hello":
            self._owners[owner] = client
        self._note_epoch(books)
        self._note_fenced(books)
        self._note_declared(books, owner)
        self._note_opening(books)
        self._judge_placements(books)
        self._note_revived(books, client)
        self._scripts += 1
        if self._scripts % SCRIPTS_A_CHECK == 0:
            self._judge_books(books)

    def _note_epoch(self, books: Books) -> None:
        """Where no owner was known the gate stays closed for two heartbeats."""
        if books.run == self._run or books.config is None:
            return
        self._run = books.run
        self._opens_not_before_ms = 0 if books.owners else books.clock + 2 * books.config.heartbeat_ms

    def _note_fenced(self, books: Books) -> None:
        """Whoever lost its session lost its places; its streams end when it hears of it."""
        lost, self._sessions = self._sessions - books.sessions.keys(), set(books.sessions)
        for owner in sorted(lost):
            process = self._owners[owner]
            self._trace(f"{process} is fenced")
            was_reachable = self.calm(process) and self._since(self._data_lost_at) > CALM_SECONDS
            if was_reachable and self._speaks_as(process, owner):
                self.fail(f"{process} was fenced although nothing disturbed it")
            for run in self.runs:
                if run.gateway.process is process:
                    run.excused = True

    def _speaks_as(self, process: Process, owner: str) -> bool:
        """Whether that is the id that a living process goes by."""
        gateway = next((g for g in self._gateways if g.process is process and g.alive), None)
        return gateway is not None and gateway.ledger._keeper._owner == owner

    def _note_revived(self, books: Books, client: Process) -> None:
        """A batch that is carried out again may take an admit that it had refused; the digest, the outbox or the
        ticket's deadline gives that back (DESIGN 4.1: a replay is executed)."""
        if books.replay:
            new = books.calls.keys() - self._ids
            self._revived |= new
            if new:
                self._revived_at[client] = self._loop.time()
        self._ids = set(books.calls)

    def _note_declared(self, books: Books, owner: str) -> None:
        """Whoever says that it has declared everything has: what the store does not hold for it then was refused."""
        session = books.sessions.get(owner)
        if session is None or session.declared != books.epoch or self._declared.get(owner) == self._run:
            return
        self._declared[owner] = self._run
        for run in self.runs:
            if run.gateway.process is not self._owners[owner] or self._covered(run):
                continue
            if run.undeclared and not self._remembers_old:
                self.fail(f"{run.gateway} has said that it declared everything, but not {run.id}")
            run.refused = True

    def _note_opening(self, books: Books) -> None:
        """Whoever was not back in time has no place for what it runs, until it declares it by force."""
        is_open = books.opens_at == 0
        if is_open and not self._was_open:
            for run in self.runs:
                run.excused = run.excused or (run.undeclared and not self._covered(run))
                run.undeclared = False
        self._was_open = is_open

    def _judge_placements(self, books: Books) -> None:
        """Nothing is granted behind a closed gate, or above a limit."""
        places = {c.id: (c.replica, c.attempt) for c in books.calls.values() if holds(c)}
        new = [books.calls[id_] for id_, place in places.items() if self._places.get(id_) != place]
        self._places = places
        for call in new:
            self._trace(f"{call.id} gets {call.blocks} blocks on {call.replica} ({call.state})")
            hold = books.holds.find(call.past)
            if hold and hold.due < books.clock + HOLD_MS:  # one of this script is of another answer
                self.fail(f"{call.id} goes on with {call.past}, which stays held")
            if call.charged and books.clock < self._opens_not_before_ms:
                self.fail(f"{call.id} was granted although the gate had to be closed")
        for name in {call.replica for call in new if call.charged}:
            replica = books.replicas[name]
            if replica.used > replica.limit and replica.sequences > 1:
                self.fail(f"{name} was given {replica.used} of {replica.limit} blocks")

    def _judge_books(self, books: Books) -> None:
        if books.config is None:
            return
        found = violations(snapshot_of(books))
        if found:
            self.fail("; ".join(map(str, found)))

    # -- moments of calm -----------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._looked = set()
            self._look_at_streams()
            for gateway in self._gateways:
                if gateway.alive and not gateway.draining and self.calm(gateway.process):
                    self._look_at(gateway)
            self._seen = {what: since for what, since in self._seen.items() if what in self._looked}

    def _look_at_streams(self) -> None:
        """Calm or not: what a process knows that it does not hold ends at once."""
        for run in self.runs:
            if not run.gateway.process.stopped:
                unpaid = run.id not in run.gateway.ledger._asks
                self._must_not_last(
                    unpaid, PROMPT_SECONDS, run.gateway, f"goes on with {run.id}, which has no place"
                )

    def _look_at(self, gateway: Gateway) -> None:
        books, owner = self.store.books, self._owner_of(gateway)
        self._must_not_last(
            owner is None or not gateway.ledger.ready, LEASE_MS / 1000, gateway, "is not ready"
        )
        for run in self.runs:
            if run.gateway is gateway:
                unknown = run.refused or not self._covered(run)
                self._must_not_last(unknown, PROMPT_SECONDS, gateway, f"runs {run.id} unknown to the store")
        self._look_for_drift(gateway)
        for ask in gateway.ledger._asks.values():
            late = ask.phase in (Phase.ASKED, Phase.MOVING, Phase.SETTLING)
            self._must_not_last(
                late, PROMPT_SECONDS, gateway, f"has no answer about {ask.id}: {ask.phase.name}"
            )
        woken_seconds = HEARTBEAT_SECONDS + PROMPT_SECONDS if self.store.wakes_lost else PROMPT_SECONDS
        for call in books.calls.values():
            if call.owner == owner:
                unclaimed = call.state == "unclaimed"
                self._must_not_last(unclaimed, woken_seconds, gateway, f"does not claim {call.id}")
                unknown = call.id not in gateway.ledger._asks and call.id not in self._revived
                self._must_not_last(
                    unknown, PROMPT_SECONDS, gateway, f"has forgotten {call.id} ({call.state})"
                )

    def _look_for_drift(self, gateway: Gateway) -> None:
        """What a process has said that a call holds and may hold is what the store takes away with it.

        A call that grows fast may be told late again and again, each time with other words: how long the store has not
        had one of them is what counts.
        """
        for ask in gateway.ledger._asks.values():
            call = self.store.books.calls.get(ask.id)
            if ask.phase is not Phase.RESERVED or call is None or not holds(call):
                continue
            blocks = ask.admission.blocks
            held = blocks if ask.held < 0 else ask.held
            said = (held, ask.base, ask.path, ask.net) if ask.path else (blocks, 0, b"", 0)
            drifted = said != (call.asked, call.base, call.path, call.prefix.net)
            words = f"{said[0]} blocks, without {said[3]} by path {crc32(said[2]):08x}"
            what = f"says that {ask.id} holds {words}, and the store does not"
            self._must_not_last(drifted, PROMPT_SECONDS, gateway, what)
            self.facts["charged by path"] += call.elastic
            self.facts["charged in full"] += not call.elastic
            self.facts["segments shared"] += call.prefix.joined
            self.facts["warm"] += call.is_warm
            drifted = ask.shared != call.prefix.blocks_of(call.prefix.joined)
            what = f"says that {ask.id} shares {ask.shared} blocks, and the store does not"
            self._must_not_last(drifted, PROMPT_SECONDS, gateway, what)

    def _must_not_last(self, is_so: bool, seconds: float, gateway: Gateway, what: str) -> None:
        if not is_so:
            return
        name = (gateway.name, what)
        self._looked.add(name)
        since = self._seen.setdefault(name, self._loop.time())
        if self._loop.time() - since > seconds:
            self.fail(f"{gateway} {what}, since {since:.1f} s, and nothing disturbs it")

    # -- the end -------------------------------------------------------------------------------------------------

    def judge_visits(self, visits: Iterable[Visit]) -> None:
        for visit in visits:
            if visit.gateway.process.dead:
                continue
            ends = self._ends.get(visit.id, [])
            if len(ends) != 1:
                self.fail(f"{visit.id} ended {len(ends)} times at {visit.gateway}")
            if not visit.left and not visit.cut:
                self._judge_answer(visit)

    def _judge_answer(self, visit: Visit) -> None:
        body, status = visit.visitor.body, visit.visitor.status
        if not visit.visitor.complete:
            self.fail(f"{visit.id} at {visit.gateway} has no whole answer: {status}")
        ends = body.count(b"data: [DONE]\n\n"), body.endswith(b"data: [DONE]\n\n")
        if status == 200 and body.startswith(b"data: ") and ends != (1, True):
            self.fail(f"{visit.id} had a stream without its one end: {body[-80:]!r}")

    def judge_quiet(self) -> None:
        """Two leases after the last client: nothing is held, and nobody knows of anything that is."""
        books = self.store.books
        held = {
            "calls": sorted(books.calls),
            "blocks": {r.name: r.used for r in books.replicas.values() if r.used or r.sequences or r.prefill},
            "paths": [r.name for r in books.replicas.values() if r.full or r.assured or r.elastic or r.sums],
            "keys": {n: (k.blocks, k.calls) for n, k in books.keys.items() if k.blocks or k.calls},
            "holds": sorted(books.holds.holds),
            "soft": [r.name for r in books.replicas.values() if r.soft or r.holds or r.soft_end],
            "exchanges": [run.id for run in self.runs],
        }
        self._expect_empty("the store", held)
        living = [gateway for gateway in self._gateways if gateway.alive]
        for gateway in living:
            left = {
                "reservations": [f"{a.id} {a.phase.name}" for a in gateway.ledger._asks.values()],
                "calls": gateway.calls.inflight(),
                "visits": len(gateway.visits),
            }
            self._expect_empty(gateway.name, left)
        owners = {self._owner_of(gateway) for gateway in living}
        self._expect_empty("the store", {"owners": sorted(books.owners.keys() - owners)})
        self._judge_books(books)

    def _expect_empty(self, whose: str, held: dict[str, Any]) -> None:
        left = {name: what for name, what in held.items() if what}
        if left:
            self.fail(f"{whose} still has {left}")


def snapshot_of(books: Books) -> Snapshot:
    """The specification's content as invariants read it.  It has no indexes, so they are what they should be."""
    assert books.config is not None
    calls = books.calls
    waiting: dict[tuple[str, str, str], list[Call]] = {}
    for call in sorted(calls.values(), key=lambda c: c.arrival):
        if call.state == "queued":
            waiting.setdefault((call.lane, call.class_, call.key), []).append(call)
    flows = {
        name: Flow(
            books.tags.get(name, 0),
            len(waiting.get(name, [])),
            sum(c.blocks for c in waiting.get(name, [])),
            books.weights.get(name, 0),
            int(name in books.parked),
            resume=books.resume.get(name, -1),
            warm=sum(c.blocks for c in waiting.get(name, []) if c.is_warm),
        )
        for name in dict.fromkeys([*waiting, *books.tags, *books.weights, *books.resume])
    }
    return Snapshot(
        fleet=books.config,
        epoch=books.epoch,
        clock=books.clock,
        opens_at=books.opens_at,
        arrivals=books.arrivals,
        dirty=books.dirty,
        replicas=books.replicas,
        calls=calls,
        keys=books.keys,
        flows=flows,
        lines=_lines(books, flows),
        blocked=books.blocked,
        owners=books.owners,
        sessions={owner: _session(books, owner) for owner in books.sessions},
        indexes=_indexes(books, flows),
        place_ends={place.member: place.end for place in books.places},
        once={call.once: id_ for id_, call in calls.items() if call.once},
        nodes=books.nodes.nodes,
        holds=books.holds.holds,
        hold_ends=frozenset(f"{h.replica}:{h.due:013d}:{name}" for name, h in books.holds.holds.items()),
    )


def _lines(books: Books, flows: dict[tuple[str, str, str], Flow]) -> dict[tuple[str, str], Line]:
    names = {flow[:2] for flow in flows} | books.virtual.keys() | books.credit.keys()
    return {
        name: Line(
            books.virtual.get(name, 0),
            sum(row.waiting for flow, row in flows.items() if flow[:2] == name),
            sum(row.blocks for flow, row in flows.items() if flow[:2] == name),
            sum(row.weight for flow, row in flows.items() if flow[:2] == name),
            books.credit.get(name, 0),
            sum(row.warm for flow, row in flows.items() if flow[:2] == name),
        )
        for name in names
    }


def _session(books: Books, owner: str) -> SessionRecord:
    claimed = [int(c.id, 16) for c in books.calls.values() if c.owner == owner and c.state == "reserved"]
    session = books.sessions[owner]
    return SessionRecord(
        session.batch, session.told, session.declared, len(claimed), sum(claimed) % DIGEST_MODULUS
    )


def _indexes(books: Books, flows: dict[tuple[str, str, str], Flow]) -> dict[str, frozenset[str]]:
    calls = books.calls.values()
    queued = [c for c in calls if c.state == "queued"]
    waiting = {(c.lane, c.class_, c.key) for c in queued}
    parts = {((c.lane, c.class_, c.key), c.is_warm) for c in queued}
    return {
        "queue": frozenset(
            f"{c.lane}:{c.class_}:{c.key}:{int(not c.is_warm)}{c.arrival:012d}:{c.id}" for c in queued
        ),
        "deadlines": frozenset(f"{c.id}:{c.deadline}" for c in queued),
        "owned": frozenset(f"{c.owner}:{c.id}" for c in calls),
        "outbox": frozenset(f"{c.owner}:{c.id}" for c in calls if c.state in ("unclaimed", "displaced")),
        "backlog": frozenset(
            f"{lane}:{class_}:{flow.blocks:012d}:{key}"
            for (lane, class_, key), flow in flows.items()
            if flow.waiting
        ),
        "order": frozenset(
            f"{f[0]}:{':' * warm}{f[1]}:{flows[f].tag:016d}:{f[2]}"
            for f, warm in parts
            if not flows[f].parked
        ),
        "parked": frozenset(f"{f[2]}:{f[0]}:{f[1]}" for f in waiting if flows[f].parked),
        "places": frozenset(place.member for place in books.places),
    }
