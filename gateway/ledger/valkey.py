"""The production ledger of one fleet: the list of this process's reservations, mirrored in the store by the channel."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.core import quota
from gateway.core.books import FleetConfig
from gateway.core.events import Healed, Observer, Overdraft
from gateway.core.forecast import Forecast, Run
from gateway.core.order import DIGEST_MODULUS, FIRST_APPOINTMENT_MS, ID_BITS, OPERATOR, SHUT_RETRY_MS
from gateway.core.outcomes import Code, Refusal
from gateway.core.rests import Why
from gateway.core.share import Denied
from gateway.ledger.api import Admission, Ahead, Lost
from gateway.ledger.channel import Channel, Result
from gateway.ledger.closed import Closed
from gateway.ledger.connection import REPLY_SECONDS, Connection
from gateway.ledger.fingerprints import Fingerprints
from gateway.ledger.keeper import Keeper
from gateway.ledger.records import Place, decode_text, path_argument
from gateway.ledger.reservation import Ask, Phase
from gateway.ledger.scripts import fleet_keys, key_prefix
from gateway.ledger.seats import Seats
from gateway.ledger.share import Sharing
from gateway.ledger.state import read_state
from gateway.ledger.unanswered import Unanswered
from gateway.ledger.wire import StoreAway

log = logging.getLogger(__name__)

CACHE_SECONDS = 0.05
"""How long a refusal of the store may be repeated without asking it again."""
KNOWN_MAX = 1024
"""Refusals remembered at once."""
PROBE_SECONDS = 0.01
"""One call in this time goes through to the store all the same."""
GROWTH_SECONDS = 0.1
"""Calls that grow tell the store within this time, many in one batch: a few tokens later changes nothing."""
ASK_SECONDS = 0.1
"""After this an answer to a question has no use: by then nearly any prompt is counted."""
SETTINGS_DIFFER = "another gateway has given this fleet other lanes or classes; ours are being sent again"
HOPELESS = frozenset({Code.CONTEXT_LENGTH_EXCEEDED, Code.KEY_CAP_EXCEEDED, Code.IDEMPOTENCY_KEY_REUSED})
"""Refusals that repeating the call cannot change."""
NOT_KNOWN = "the store does not answer: whether that was done is not known"
KEPT = ", of which a tenth is kept while others were asked to come back"
"""At the end of a refusal whose limit that may be."""
_OF_THE_CALL = frozenset({"displaced", "place_only"})
"""What a full queue is told as, but another call of the same key might not be."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """What a process keeps waiting while the store is away."""

    seconds: float
    """0 = refuse at once (`store.on_outage: refuse`)."""
    calls_max: int
    bytes_max: int


@dataclass(slots=True)
class _Known:
    refusal: Refusal
    until: float
    probed_at: float


class ValkeyLedger:
    """Implements `Ledger`.  `run` is the one task that talks to the store."""

    def __init__(
        self,
        url: str,
        fleet: str,
        config: Callable[[], FleetConfig],
        hold: HoldLimits,
        observer: Observer,
        now: Callable[[], float] = time.monotonic,
        reply_seconds: float = REPLY_SECONDS,
        keep_lost: bool = False,
        share_seconds: float = 0.0,
        notes_fill: bool = False,
    ) -> None:
        """`keep_lost` (`store.on_lease_lost: keep`): a call whose place was given away while this process was fenced
        is declared again by force, over the limit, instead of being reported to its `Lost`.

        `share_seconds` (`store.on_outage: share`): so long after the store went away this process still admits, within
        its part of what was free; 0 = it does not.

        `notes_fill`: `fill` is kept, for a reading of the store's replicas with each heartbeat."""
        self.fleet = fleet
        self.now = now
        self._retry_hints_ms: dict[tuple[str, str], int] = {}
        """The last appointment in each lane and class."""
        self._url = url
        self._hold = hold
        self._config = config
        self._keep_lost = keep_lost
        self._closing = False
        self._observer = observer
        self._asks: dict[str, Ask] = {}
        self.unanswered = Unanswered(hold.seconds or reply_seconds)
        # A system call for each id would cost more than the rest of `open`.
        self._random = random.Random(secrets.randbits(256))
        self._claimed: set[str] = set()
        self._claimed_sum = 0
        self.notes_fill = notes_fill
        self._fill: float | None = None
        self._known: dict[tuple[str, str, str], _Known] = {}
        self._counted: Counter[tuple[str, str, str]] = Counter()
        """Calls whose tokens are being counted, by lane, class and key."""
        """By lane, class and key; a rate quota is of the key alone."""
        self.draining: frozenset[str] = frozenset()
        """Replicas that answer and get no new calls, as of the last heartbeat."""
        self._growth_timer: asyncio.TimerHandle | None = None
        self.fingerprints = Fingerprints()
        self.forecast = Forecast()
        self.sharing = Sharing(self, self._asks, config, share_seconds, observer)
        prefix = key_prefix(fleet) + "wake:"
        self.channel = Channel(prefix, self.offer)
        connection = Connection(url, fleet_keys(fleet), observer, reply_seconds)
        self._keeper = Keeper(self, connection, url, prefix, config, observer)
        self._closed = Closed(connection, self.now)
        self.seats = Seats(self._keeper.ask)

    # -- the request path ----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._keeper.ready or self.sharing.active

    @property
    def away_seconds(self) -> float | None:
        """How long the store has been away; None while it answers."""
        return self._keeper.away_seconds

    @property
    def fill(self) -> float | None:
        return None if self._keeper.away_seconds is not None else self._fill

    def note_fill(self, fill: float) -> None:
        self._fill = fill

    async def closed(self) -> Refusal | None:
        if not await self._closed():
            return None
        return Refusal(Code.GATE_CLOSED, _FIXED_WORDS[Code.GATE_CLOSED], retry_ms=SHUT_RETRY_MS)

    @property
    def opened(self) -> bool:
        """The gate was open to this process at least once."""
        return self._keeper.opened

    @property
    def observed(self) -> Mapping[str, bool]:
        """Whether each replica that this process has seen stop or resume may have new calls."""
        keeper = self._keeper
        return {
            name: up and name not in self.draining and not keeper.rests.get(name)
            for name, up in keeper.observed.items()
        }

    @property
    def inflight(self) -> int:
        """Calls of this process that ask, wait, run or are being given back."""
        return len(self._asks)

    @property
    def holding(self) -> bool:
        """The store may hold something of this process."""
        return any(ask.phase is not Phase.NEW for ask in self._asks.values())

    def open(self, admission: Admission, lost: Lost) -> Ask:
        ask = Ask(self, self._new_id(), admission, lost)
        self._asks[ask.id] = ask
        return ask

    def _new_id(self) -> str:
        while True:
            id_ = f"{self._random.getrandbits(ID_BITS):010x}"
            if id_ not in self._asks:
                return id_

    @property
    def refused_lately(self) -> bool:
        return bool(self._known)

    def known_refusal(self, lanes: Sequence[str], class_: str, key: str) -> Refusal | None:
        limited = self._known.get(("", "", key))
        places = [("", "", key)] if limited else [(lane, class_, key) for lane in lanes]
        now = self.now()
        found: list[_Known] = []
        for place in places:
            known = self._known.get(place)
            if known is None:
                return None
            if now >= known.until:
                del self._known[place]
                return None
            found.append(known)
        if not found or now - found[0].probed_at >= PROBE_SECONDS:
            for known in found:
                known.probed_at = now
            return None
        return found[0].refusal

    async def would_refuse(self, admission: Admission, blocks_min: int, ahead: Ahead) -> Refusal | None:
        if self._closing or self.away_seconds is not None or self._keeper.slow or self.sharing.active:
            return None
        a = admission
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        arguments = [
            "Q", blocks_min, a.blocks, a.key, a.class_, a.lane, a.sequences, a.cost, a.wait_ms, a.weight, a.blocks_max,
            a.requests_max, a.pool_share, a.queue_max, a.queue_key_max, a.standing, *ahead,
            a.held, a.base, path_argument(a.path), int(a.promised), [a.block_size] if a.block_size else [],
            *([a.past] if a.past else []),
        ]  # fmt: skip
        self.channel.ask(arguments, partial(_tell, answer))
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                result = await answer
                return None if result[0] == "open" else self.refusal_of(a, result)
        return None

    @contextlib.contextmanager
    def counted(self, admission: Admission) -> Iterator[Ahead]:
        counted, own = self._counted, (admission.lane, admission.class_, admission.key)
        ahead = Ahead(sum(count for flow, count in counted.items() if flow[:2] == own[:2]), counted[own])
        counted[own] += 1
        try:
            yield ahead
        finally:
            counted.subtract([own])
            if not counted[own]:
                del counted[own]

    def may_ask(self, admission: Admission) -> Refusal | None:
        """While the store is away or slow, few calls wait for it; none once it has been away too long.

        Where this process has a share, none waits: it admits or refuses at once.
        """
        if self._closing:
            return self.draining_refusal()
        away = self._keeper.away_seconds
        if away is None and not self._keeper.slow:
            return None
        if self.sharing.active:
            return None
        if away is not None and (self.sharing.begun or away >= self._hold.seconds):
            return self.away_refusal()
        held = [
            a.admission.body_bytes for a in self._asks.values() if a.phase is Phase.ASKED and not a.abandoned
        ]
        if len(held) >= self._hold.calls_max:
            return self._hold_refusal("calls", len(held), self._hold.calls_max)
        held_bytes = sum(held) + admission.body_bytes
        if held_bytes > self._hold.bytes_max:
            return self._hold_refusal("bytes", held_bytes, self._hold.bytes_max)
        return None

    async def state(self) -> dict[str, Any]:
        return await read_state(self._url, self.fleet)

    async def observe(self, replica: str, up: bool) -> None:
        self._keeper.observe(replica, up)

    def rest(self, replica: str, why: str) -> None:
        """As far as this process is concerned the replica gets no new calls, or, without a reason, it may."""
        self._keeper.rest(replica, why)

    async def drain(self, replica: str, on: bool) -> Refusal | None:
        return await self._tell("rest", OPERATOR, replica, Why.DRAINED if on else "")

    async def distrust(self, replica: str, cache: int) -> None:
        await self._tell("distrust", replica, cache)

    async def shut(self, on: bool) -> Refusal | None:
        return await self._tell("shut", int(on))

    async def _tell(self, kind: str, *arguments: str | int) -> Refusal | None:
        """What an operator wants, on a connection of its own.  Returns why that cannot be done."""
        connection = Connection(self._url, fleet_keys(self.fleet), self._observer)
        try:
            await connection.open()
            wake_prefix = key_prefix(self.fleet) + "wake:"
            reply = await connection.evaluate("configure", "", wake_prefix, kind, *arguments)
        except StoreAway:
            return Refusal(Code.STORE_UNAVAILABLE, NOT_KNOWN, retry_ms=FIRST_APPOINTMENT_MS)
        finally:
            connection.close()
        if decode_text(reply)[0] == "ok":
            return None
        return Refusal(Code.NOT_FOUND, f"the store does not know that of fleet {self.fleet} yet", "fleet")

    def reconfigure(self) -> None:
        """The fleet's configuration changed: tell the store."""
        self._keeper.reconfigure()

    # -- running -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self._keeper.run()

    async def close(self, seconds: float) -> None:
        """Settle everything that this process holds until the store's list is empty, for at most `seconds`.

        Needs `run` to go on; calls that still wait for a place are refused.
        """
        self._closing = True
        self.sharing.stop()
        for ask in list(self._asks.values()):
            ask.settle(None, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._keeper.drain()

    # -- what reservations report --------------------------------------------------------------------------------

    def wake(self) -> None:
        self._keeper.wake()

    def wake_for_growth(self) -> None:
        """Soon; what else is sent meanwhile takes it along."""
        if self._growth_timer is None:
            self._growth_timer = asyncio.get_running_loop().call_later(GROWTH_SECONDS, self._growth_is_due)

    def _growth_is_due(self) -> None:
        self._growth_timer = None
        self.wake()

    def forget(self, ask: Ask) -> None:
        self._asks.pop(ask.id, None)

    def rename(self, ask: Ask) -> None:
        """The call goes on under a new id; whatever the store holds under the old one is settled."""
        del self._asks[ask.id]
        self._settle_unknown(ask.id)
        ask.id = self._new_id()
        self._asks[ask.id] = ask

    def new_run(self, replica: str, admission: Admission) -> Run | None:
        """A call begins to hold blocks there."""
        if not admission.tokens_max:
            return None
        lot = self._random.random()
        return Run(replica, admission.blocks, admission.tokens_max, lot, self.now(), admission.course)

    def claimed(self, id_: str) -> None:
        if id_ not in self._claimed:
            self._claimed.add(id_)
            self._claimed_sum += int(id_, 16)

    def unclaimed(self, id_: str) -> None:
        if id_ in self._claimed:
            self._claimed.remove(id_)
            self._claimed_sum -= int(id_, 16)

    def settled_here(self, admission: Admission) -> None:
        """Something of this lane and key was given back: what the store said before no longer holds."""
        if not self._known:
            return
        for place in [p for p in self._known if p[0] == admission.lane or p == ("", "", admission.key)]:
            del self._known[place]

    def _remember(self, place: tuple[str, str, str], refusal: Refusal, seconds: float) -> None:
        """For the same key only: a full queue may have room for another one."""
        now = self.now()
        if len(self._known) >= KNOWN_MAX:
            self._known = {p: known for p, known in self._known.items() if now < known.until}
        if len(self._known) < KNOWN_MAX:
            cached = msgspec.structs.replace(refusal, cached=True)
            self._known[place] = _Known(cached, now + min(seconds, CACHE_SECONDS), now)

    def op_failed(self, result: Result) -> None:
        """An op was malformed or met books that contradict it: a bug, counted and told."""
        log.error("an op failed in the store of fleet %s: %s", self.fleet, result[1])
        self._observer(Healed(self.fleet, "error", 1))

    def overdrawn(self, replica: str, blocks: int) -> None:
        """A call has grown, and the replica has so many blocks above its limit now."""
        pool = next((r.pool for r in self._config().replicas if r.name == replica), "")
        self._observer(Overdraft(self.fleet, pool, replica, blocks))

    def _all_drain(self, lane: str) -> bool:
        """Of the replicas that answer; there is one."""
        config = self._config()
        pools = dict(config.lanes).get(lane, ())
        answering = [r.name for r in config.replicas if r.pool in pools and r.limit >= 0]
        return bool(answering) and self.draining.issuperset(answering)

    def refusal_of(self, admission: Admission, result: Result) -> Refusal:
        """The store's refusal in words; that of a full queue or an empty quota is remembered for a moment."""
        if result[0] != "refused" or result[1] == "id":
            self.op_failed(result)
            return Refusal(Code.INTERNAL_ERROR, "the ledger could not carry the request out")
        _, name, knob, measured, limit, retry_ms = result
        if name == "settings":
            self._keeper.reconfigure()
            return Refusal(Code.STORE_UNAVAILABLE, SETTINGS_DIFFER, retry_ms=retry_ms)
        if knob == "quota":
            refusal = quota.refusal(admission.charges, measured, limit, retry_ms)
            self._remember(("", "", admission.key), refusal, retry_ms / 1000)
            return refusal
        code = Code(name)
        message = _words(code, knob, measured, limit, admission)
        if code in HOPELESS:
            return Refusal(code, message, should_retry=False)
        if code is Code.DUPLICATE_IN_PROGRESS:
            return Refusal(code, message)
        retry_ms = max(retry_ms, 1)
        self._retry_hints_ms[admission.lane, admission.class_] = retry_ms
        refusal = Refusal(code, message, retry_ms=retry_ms, waited=knob == "displaced")
        if code is Code.GATE_CLOSED or (code is Code.QUEUE_FULL and knob not in _OF_THE_CALL):
            self._remember((admission.lane, admission.class_, admission.key), refusal, CACHE_SECONDS)
        return refusal

    def away_refusal(self) -> Refusal:
        message = "the store of reservations does not answer"
        return Refusal(Code.STORE_UNAVAILABLE, message, retry_ms=FIRST_APPOINTMENT_MS)

    def once_refusal(self, second: Admission, first: Admission) -> Refusal:
        """As the store has it, of two calls under one `Idempotency-Key`."""
        same = second.identity.fingerprint() == first.identity.fingerprint()
        name = "duplicate_in_progress" if same else "idempotency_key_reused"
        return self.refusal_of(second, ["refused", name, "once", 0, 0, 0])

    def share_refusal(self, denied: Denied, admission: Admission) -> Refusal:
        if denied.code is Code.STORE_UNAVAILABLE:
            message = (
                f"the store of reservations does not answer; the request needs {denied.measured} KV blocks, and this "
                f"gateway's share of one replica has {denied.limit} free at most"
            )
        else:
            message = _words(denied.code, denied.knob, denied.measured, denied.limit, admission)
        return Refusal(denied.code, message, retry_ms=FIRST_APPOINTMENT_MS)

    def _hold_refusal(self, unit: str, measured: int, limit: int) -> Refusal:
        message = f"{measured} {unit} wait for the store of reservations, store.hold_{unit}_max is {limit}"
        return Refusal(Code.STORE_UNAVAILABLE, message, retry_ms=FIRST_APPOINTMENT_MS)

    def lost_refusal(self) -> Refusal:
        message = "the reservation was lost before it could move to another replica"
        return Refusal(Code.LEASE_LOST, message, retry_ms=FIRST_APPOINTMENT_MS)

    def draining_refusal(self) -> Refusal:
        return Refusal(Code.DRAINING, "this gateway is shutting down", retry_ms=FIRST_APPOINTMENT_MS)

    def displaced_refusal(self, admission: Admission) -> Refusal:
        message = _words(Code.QUEUE_FULL, "displaced", 0, 0, admission)
        return Refusal(Code.QUEUE_FULL, message, retry_ms=self._retry_hint_ms(admission), waited=True)

    def _retry_hint_ms(self, admission: Admission) -> int:
        return self._retry_hints_ms.get((admission.lane, admission.class_), FIRST_APPOINTMENT_MS)

    def waited_out_refusal(self, waited_ms: int, admission: Admission) -> Refusal:
        limit_ms = admission.wait_ms
        message = (
            f"waited {waited_ms} ms in the queue, the longest allowed (queue.seconds_max, or the request's own "
            f"deadline) is {limit_ms} ms"
        )
        if self._all_drain(admission.lane):
            message += f"; every replica of lane {admission.lane} drains: it gets no new requests"
        return Refusal(Code.QUEUE_TIMEOUT, message, retry_ms=self._retry_hint_ms(admission), waited=True)

    # -- what the keeper asks for --------------------------------------------------------------------------------

    def digest(self) -> list[Any]:
        return ["H", len(self._claimed), self._claimed_sum % DIGEST_MODULUS]

    def heartbeat(self) -> list[Any]:
        """The digest, and when blocks come back as far as that is foreseen."""
        runs = (ask.run for ask in self._asks.values() if ask.run and ask.phase is Phase.RESERVED)
        return [*self.digest(), self.forecast.next_ends(runs, self.now())]

    def offer(self, id_: str, place: Place) -> None:
        """A grant from the outbox.  One that this process does not know is settled."""
        ask = self._asks.get(id_)
        if ask:
            ask.offered(place)
        else:
            self._settle_unknown(id_)

    def restart(self, force: bool) -> None:
        """Under a new owner id: say again everything that is wanted or held."""
        self.channel.restart()
        self._claimed.clear()
        self._claimed_sum = 0
        for ask in list(self._asks.values()):
            ask.rebuild(force or self._keep_lost)

    def redeclare(self) -> None:
        """The store was restarted with its data, maybe old: confirm what runs, and ask again for what waits."""
        for ask in list(self._asks.values()):
            if ask.phase is Phase.RESERVED:
                ask.redeclare(force=True)
            elif ask.phase is Phase.QUEUED:
                ask.ask_again()

    def compare(self, listed: dict[str, str]) -> None:
        """Mend the difference between the store's list of our calls (id -> state) and ours.

        Every batch was answered when the list was read, and none was sent since.
        """
        unknown = [id_ for id_ in listed if id_ not in self._asks]
        for id_ in unknown:
            self._settle_unknown(id_)
        missing = [
            ask
            for ask in self._asks.values()
            if ask.phase is Phase.RESERVED and ask.id not in listed and not self.channel.declares(ask.id)
        ]
        for ask in missing:
            ask.redeclare(self._keep_lost)
        self._claimed = {id_ for id_, state in listed.items() if state == "reserved"}
        self._claimed_sum = sum(int(id_, 16) for id_ in self._claimed)
        for kind, found in (("settled", unknown), ("redeclared", missing)):
            if found:
                log.warning(
                    "fleet %s: %d reservations differed from the store's, %s", self.fleet, len(found), kind
                )
                self._observer(Healed(self.fleet, kind, len(found)))

    def _settle_unknown(self, id_: str) -> None:
        self.channel.free(["S", id_, -1, -1, [], ""], lambda _: self.unclaimed(id_))


def _tell(answer: "asyncio.Future[Result]", result: Result) -> None:
    """Who asked may be gone."""
    if not answer.done():
        answer.set_result(result)


_FIXED_WORDS = {
    Code.DUPLICATE_IN_PROGRESS: "this request is in progress already: one with the same Idempotency-Key waits or runs",
    Code.IDEMPOTENCY_KEY_REUSED: (
        "another request with the same Idempotency-Key waits or runs, and its body is not the same"
    ),
    Code.GATE_CLOSED: "an operator has closed this fleet to new requests (kvgate gate)",
}


def _words(code: Code, knob: str, measured: int, limit: int, admission: Admission) -> str:
    match code:
        case _ if knob == "pool_share":
            needed = "would hold" if code is Code.QUOTA_EXCEEDED else "needs"
            return f"the key {needed} {measured} KV blocks of a pool, its part of that (limits.pool_share) is {limit}"
        case Code.CONTEXT_LENGTH_EXCEEDED:
            return (
                f"the request needs {measured} KV blocks, the largest replica has {limit}: it can never run"
            )
        case Code.KEY_CAP_EXCEEDED:
            return f"the request needs {measured} KV blocks, the key's limits.blocks_max is {limit}"
        case Code.QUOTA_EXCEEDED:
            return f"the key would hold {measured}, its {admission.section}.{knob} is {limit}"
        case Code.QUEUE_FULL:
            return _words_of_full_queue(knob, measured, limit, admission.class_)
        case _ if code in _FIXED_WORDS:
            return _FIXED_WORDS[code]
        case Code.PREDICTED_WAIT:
            return f"the wait is expected to take {measured} ms, the request may wait {limit} ms{KEPT}"
        case Code.CAPACITY_EXCEEDED:
            return f"the request needs {measured} KV blocks, one replica has {limit} free at most, queue.depth_max is 0"
        case Code.QUEUE_TIMEOUT:
            return f"the call may not wait any longer in the queue: {limit} ms are left"
        case Code.NO_BACKEND:
            return _words_of_no_backend(knob, admission.lane)
        case _:
            return "the store of reservations has just been started, and admission is not open yet"


def _words_of_no_backend(knob: str, lane: str) -> str:
    match knob:
        case "draining":
            drains = "drains, so it gets no new requests; queue.depth_max is 0"
            return f"every replica of lane {lane} that the request fits {drains}"
        case "promised":
            return (
                f"the request was promised that it is never preempted, and no replica of lane {lane} that it fits and "
                "whose mode allows that promise (guaranteed or shared) is up"
            )
        case _:
            return f"no replica of lane {lane} that the request fits is up"


def _words_of_full_queue(knob: str, measured: int, limit: int, class_: str) -> str:
    match knob:
        case "key_share":
            return (
                f"{measured} requests of this key wait in class {class_}, its part of the queue (queue.key_share of "
                f"queue.depth_max) is {limit}"
            )
        case "displaced":
            return (
                f"the queue of class {class_} is full (queue.depth_max), and this key waits for the most blocks: a "
                "request of another key has taken the place"
            )
        case "place_only":
            return (
                "no place is free at once, and this key's retries have used up their part of its requests "
                "(queue.retry_share): a retry is queued again only in the place that the same request has left"
            )
        case _:
            return f"{measured} requests wait in class {class_}, queue.depth_max is {limit}{KEPT}"
