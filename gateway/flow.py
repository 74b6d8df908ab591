"""The spine: what happens to one call.  Read `Flow._serve` first.

    HTTP in -> estimate -> admit -> wait -> stream -> settle

The reservation's id exists before the store hears of it, and from then on every way out leads through `settle`, which
is synchronous and so cannot be cancelled.  Whatever ends a call from outside cancels its task; `Call.interrupted` says
why, and `core/lifecycle.py` what that means.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from msgspec.structs import replace

from gateway import all_fleets, beginnings, talks
from gateway.all_fleets import Joint
from gateway.background import Background, Crowded, Place
from gateway.call import Call, Client, Relay
from gateway.core import responses
from gateway.core.estimate import Demand, prefill_share, token_bounds
from gateway.core.events import CacheDoubted, Observer, Unmetered
from gateway.core.growth import IN_FULL, Growth, start
from gateway.core.headers import pinned, prompt_estimate
from gateway.core.lifecycle import Action, Event, Step
from gateway.core.modes import can_keep, growing_yield
from gateway.core.outcomes import Code, Refusal
from gateway.core.prefill import PrefillTimes, wait_for_first_token_ms
from gateway.core.prompt import PromptTokens
from gateway.core.quota import charges, never_fits
from gateway.core.request import forward
from gateway.core.responses import Progress
from gateway.core.route import FleetShape, Outlook, candidate_lanes, hopeless, outlooks, route
from gateway.endings import NOBODY_ANSWERS, no_room, refusal_of, tell
from gateway.estimates import estimate, learn
from gateway.ledger.api import Grant, Ledger, Reservation
from gateway.metering import Meter
from gateway.steps import Begun
from gateway.tokens.api import Counted, Counter, IdReader
from gateway.turns import Turns
from gateway.upstream.api import Trouble, Upstream, UpstreamFailed, UpstreamRequest
from gateway.used import blocks_used, units_counted

COUNTED_AT_ONCE_BYTES_MAX = 1024
"""Below this, judging a call by its bytes costs as much as counting its tokens."""
COUNTED_UNASKED_BYTES_MAX = 32 * 1024
"""Below this, an estimate takes less than 3 ms."""
UNKNOWN_SECONDS = 2.0
UNKNOWN_TRIES = 3
"""A replica that only another process's configuration has is given up for one that this process knows, too.  If that
takes longer than reading the configuration anew, the call asks anew: excluding what it does not know yet, it might
exclude all that there is, and nobody behind it in its flow would start.
"""
TOO_MUCH_IS_COUNTED = Refusal(
    Code.CAPACITY_EXCEEDED, "too many long prompts are being counted at once", retry_ms=1000
)
BUSY_STATUS = 429
ATTEMPTS_MAX = 2
"""A second replica is tried once, while nothing was forwarded."""


class Flow:
    """Serves calls; one for the process."""

    def __init__(
        self,
        counter: Counter,
        upstream: Upstream,
        limits: Ledger,
        observer: Observer,
        background_seconds: float = 3600.0,
        ids: IdReader | None = None,
    ) -> None:
        """`limits`: the books of those that keys have over all fleets together.

        `background_seconds`: how long a response may go on after its answer.
        `ids` reads how prompts begin that are token ids; without it these share nothing.
        """
        self._ids = ids
        self._observer = observer
        self._counter = counter
        self._upstream = upstream
        self._limits = limits
        self._background = Background(upstream, background_seconds)
        self._prefill_times = PrefillTimes()
        self._turns = Turns()

    async def serve(self, call: Call, client: Client) -> None:
        """Answer the call, whatever happens to it.  Returns when the last byte was written or nobody reads any more."""
        try:
            ending = await self._serve(call, client)
        except asyncio.CancelledError:
            if call.interrupted is None:
                raise
            call.task.uncancel()
            ending = call.advance(call.interrupted)
        if ending is None or call.answered:
            return
        await tell(call, client, ending)

    async def _serve(self, call: Call, client: Client) -> Refusal | Step | None:
        """None when the answer was passed on whole; else what the client is still owed."""
        if not self._turns.has_room():
            await self._turns.wait()
        rule = call.fleet.engines.shape().media
        refusal = call.request.not_taken(rule)
        if refusal:
            return refusal
        if not call.request.holds_blocks:
            return await self._pass_on(call, client)
        call.request = call.generation.by_rule(rule)
        await talks.read(call, time.monotonic())
        demand = await self._estimate(call)
        if isinstance(demand, Refusal):
            return demand
        call.demand = demand
        refusal = _charge(call, demand)
        if refusal:
            return refusal
        if call.once and not call.identity.is_quick:
            await asyncio.to_thread(call.identity.fingerprint)
        call.advance(Event.COUNTED)
        for _ in range(UNKNOWN_TRIES):
            try:
                ending = await self._admit(call, demand, client)
                await self._doubt(call)
                return ending
            except _UnknownReplica:
                continue
        words = "the replica is not in this gateway's configuration, which may be about to be read anew"
        return Refusal(Code.NO_BACKEND, words, retry_ms=1000)

    async def _admit(self, call: Call, demand: Demand, client: Client) -> Refusal | Step | None:
        """As `_serve`, of one reservation.  Raises _UnknownReplica."""
        reservation = self._open(call, demand)
        try:
            answer = await reservation.granted()  # admit, and wait
            while isinstance(answer, Grant):
                if not call.fleet.engines.knows(answer.replica):
                    answer = await _elsewhere(reservation, answer.replica)
                    continue
                failure = await self._stream(call, demand, answer, reservation, client)
                if not _moves(failure):
                    return failure
                answer = await reservation.moved(answer.replica)
            return self._explained(call, demand, answer)
        finally:
            used, units = blocks_used(call, demand), units_counted(call, demand)
            reservation.settle(*used, units, talks.ended(call, time.monotonic()))
            _learn(call)
            call.relay = None  # the two would stay until the collector comes round

    async def _doubt(self, call: Call) -> None:
        """Its replica's cache has less than it should: no more is shared there."""
        grant = call.grant
        if not call.doubted or grant is None:
            return
        await call.fleet.ledger.distrust(grant.replica, grant.cache)
        pool = call.fleet.engines.pool(grant.replica)
        self._observer(CacheDoubted(call.fleet.name, pool, grant.replica))

    def _open(self, call: Call, demand: Demand) -> Reservation:
        """Nothing is asked yet.  Who has limits over all fleets needs a place within those first."""
        ledger, call.law = call.fleet.ledger, call.law_in(demand.lane)
        holding = start(demand, call.law) if call.law else IN_FULL
        wanted = call.admission(demand, holding, self._wait_ms(call, demand))
        lost = partial(call.interrupt, Event.LEASE_LOST)
        limits = call.terms.all_fleets
        if limits is None:
            return ledger.open(wanted, lost)
        place = replace(all_fleets.admission(call, limits), wait_ms=wanted.wait_ms)
        within = self._limits.open(place, all_fleets.keep_running)
        return Joint(within, ledger, wanted, lost)

    def _wait_ms(self, call: Call, demand: Demand) -> int:
        """Only a stream shows when its first token comes."""
        terms = call.terms
        if terms.ttft_ms is None or not call.request.stream:
            return terms.wait_ms
        passed_ms = int((time.monotonic() - call.started) * 1000)
        return wait_for_first_token_ms(
            terms.wait_ms, terms.ttft_ms, passed_ms, self._prefill_ms(call, demand)
        )

    def _prefill_ms(self, call: Call, demand: Demand) -> int:
        engines = call.fleet.engines
        pools = engines.shape().lanes.get(demand.lane, (demand.lane,))
        replicas = [name for name in engines.names() if engines.pool(name) in pools]
        return self._prefill_times.expected_ms(replicas, demand.prompt_tokens)

    def _explained(self, call: Call, demand: Demand, refusal: Refusal) -> Refusal:
        """A call that could have waited for longer is told why it did not."""
        ttft_ms = call.terms.ttft_ms
        short = refusal.code in (Code.QUEUE_TIMEOUT, Code.PREDICTED_WAIT)
        if ttft_ms is None or not short or self._wait_ms(call, demand) == call.terms.wait_ms:
            return refusal
        prefill_ms = self._prefill_ms(call, demand)
        why = (
            f"queue.ttft_seconds wants its first token within {ttft_ms} ms, its prompt takes {prefill_ms} ms"
        )
        return replace(refusal, message=f"{refusal.message}; {why}")

    # -- estimate ------------------------------------------------------------------------------------------------

    async def _estimate(self, call: Call) -> Demand | Refusal:
        """The call's demand; hopeless and saturated calls are refused on bytes, before their tokens are counted."""
        if call.request.replica:
            refusal = await self._recall(call)
            if refusal:
                return refusal
        shape, request, limits = _shape(call), call.generation, call.terms.limits
        call.block_size = beginnings.block_size_of(call)
        asks: Callable[[], Sequence[Outlook]] | None = None
        is_dear = _is_counted_when_full(call, shape)
        if is_dear or self._refused_lately(call) or len(request.body) > COUNTED_AT_ONCE_BYTES_MAX:
            low, high = token_bounds(request, shape.token_factor)
            refusal = hopeless(shape, request, low, limits)
            if refusal is None and self._refused_lately(call):
                lanes = candidate_lanes(shape, request, low, high, limits)
                refusal = self._known_refusal(call, lanes)
            if refusal:
                return refusal
            if (is_dear or len(request.body) > COUNTED_UNASKED_BYTES_MAX) and not request.replica:
                asks = partial(outlooks, shape, request, low, high, limits)
        counting = self._count_unless_refused(call, asks) if asks else self._count_all(call)
        counts = await counting
        if isinstance(counts, Refusal):
            return counts
        prompts = request.prompt_tokens([counted.tokens for counted in counts])
        await beginnings.read(call, counts, self._ids, time.monotonic())
        demand = route(shape, request, prompts, limits, call.cached)
        if isinstance(demand, Refusal):
            return demand if all(counted.exact for counted in counts) else TOO_MUCH_IS_COUNTED
        mode = call.terms.mode
        if mode is not None and not can_keep(mode, shape.modes_of(demand.lane)):
            return _not_kept(demand.lane)
        beginnings.cut(call, demand)
        return demand

    async def _count_unless_refused(
        self, call: Call, asks: Callable[[], Sequence[Outlook]]
    ) -> list[Counted] | Refusal:
        """Before a thread counts, the store is asked whether the call's size matters at all: `asks` says about what.

        Counting meanwhile would take the processor from who waits for that answer.  A second call under one
        `Idempotency-Key` is to hear of the first one, which the store says only when it admits.
        """
        counting = Begun(self._count_all(call))
        try:
            if not counting.suspended or call.once:
                return await counting.rest()
            with ExitStack() as lines:
                return await _would_refuse(call, asks(), lines) or await counting.rest()
        finally:
            counting.close()

    async def _recall(self, call: Call) -> Refusal | None:
        """Ask the engine how long the conversation is that the call goes on from, and count that, too."""
        asked, engines = call.request, call.fleet.engines
        if engines.any_up((), asked.replica) is None:
            return NOBODY_ANSWERS
        access = engines.access(asked.replica)
        headers = [*call.headers, *access.headers]
        place = Place(engines.url(asked.replica), asked.response_id, headers, access.tls)
        try:
            found = await self._background.ask(place.request("GET"))
        except Crowded:
            words = "too many long conversations are being looked up at once"
            return Refusal(Code.CAPACITY_EXCEEDED, words, retry_ms=1000)
        except UpstreamFailed as failed:
            return refusal_of(Code.UPSTREAM_TIMEOUT if failed.timed_out else Code.UPSTREAM_ERROR)
        if found.status == 503:
            return no_room(None)
        if found.status >= 500:
            return refusal_of(Code.UPSTREAM_ERROR)
        usage = responses.inspect_response(found.content).usage
        if found.status != 200 or usage is None:
            return responses.not_found(asked.response_id)
        call.request = call.generation.after(usage.prompt_tokens + (usage.completion_tokens or 0))
        return None

    def _refused_lately(self, call: Call) -> bool:
        limited = call.terms.all_fleets is not None and self._limits.refused_lately
        return limited or call.fleet.ledger.refused_lately

    def _known_refusal(self, call: Call, lanes: Sequence[str]) -> Refusal | None:
        if call.asked_back or call.came_back:
            return None  # what is kept for it was not open to those who were refused
        class_, key = call.terms.class_, call.terms.key
        known = call.fleet.ledger.known_refusal(lanes, class_, key)
        if known is None and call.terms.all_fleets is not None:
            return self._limits.known_refusal((all_fleets.LANE,), class_, key)
        return known

    async def _count_all(self, call: Call) -> list[Counted]:
        """Of each prompt as the engines count it, where that can be told, else an estimate."""
        counter, shape = call.fleet.counter, call.fleet.engines.shape()
        if counter is not None and (_is_counted_when_full(call, shape) or beginnings.is_worth_counting(call)):
            found = await counter.count(call.generation, call.block_size)
            if found is not None:
                return [Counted(tokens, exact=True, points=points) for tokens, points in found]
        factors = call.fleet.factors if shape.learns else None
        counts, call.guess = await estimate(self._counter, call.generation, shape.token_factor, factors)
        return counts

    # -- calls that hold no blocks -------------------------------------------------------------------------------

    async def _pass_on(self, call: Call, client: Client) -> Refusal | Step | None:
        """As `_serve`: to any replica that answers, however full it is."""
        if not call.request.response_id:  # what an engine has begun is not new
            refusal = await call.fleet.ledger.closed()
            if refusal:
                return refusal
        call.advance(Event.COUNTED)
        try:
            while True:
                replica = call.fleet.engines.any_up(call.tried, call.request.replica)
                if replica is None:
                    return NOBODY_ANSWERS
                failure = await self._ask(call, replica, client)
                if not _moves(failure):
                    return failure
        finally:
            call.relay = None  # the two would stay until the collector comes round

    async def _ask(self, call: Call, replica: str, client: Client) -> Refusal | Step | None:
        """One attempt.  None when the answer is complete."""
        call.advance(Event.GRANTED)
        call.grant = Grant(replica, queue_ms=0, queued=False)
        call.sent_at = time.monotonic()
        call.relay = relay = client.relay(call, lambda: None)
        engines, asked = call.fleet.engines, call.request
        access = engines.access(replica)
        headers = [*call.headers, *access.headers]
        request = UpstreamRequest(
            engines.url(replica), asked.path, headers, asked.body, method=asked.method, tls=access.tls
        )
        try:
            await self._exchange(request, relay)
        except UpstreamFailed as failed:
            call.tried.append(replica)
            if failed.connecting:  # what else fails here says nothing of how the engine generates
                engines.report_failure(replica, failed.trouble)
            may_repeat = asked.repeatable or failed.connecting
            return _moved_or_failed(
                call, failed, may_repeat and engines.any_up(call.tried, asked.replica) is not None
            )
        call.advance(Event.ENDED)
        return None

    # -- stream --------------------------------------------------------------------------------------------------

    async def _stream(
        self, call: Call, demand: Demand, grant: Grant, reservation: Reservation, client: Client
    ) -> Refusal | Step | None:
        """One attempt: the call to its replica, the answer to the client.  None when that is complete."""
        call.advance(Event.GRANTED)
        call.grant = grant
        talks.note_grant(call, grant.warm)
        call.sent_at = time.monotonic()
        relay = client.relay(call, partial(self._first_token, call, demand, grant, reservation))
        call.relay = relay
        engines, replica = call.fleet.engines, grant.replica
        access = engines.access(replica)
        call.meter = meter = self._meter(call, demand, grant, reservation)
        beginnings.note_run(call, grant, call.sent_at)
        asked, grows = call.generation, meter is not None
        response_id = _response_id(call, replica) if asked.id_edit is not None else ""
        yields = grows and growing_yield(engines.shape().mode_of(engines.pool(replica)))
        body = forward(asked, demand.output_tokens, response_id, grows, call.terms.cache_salt, yields)
        own = [*call.headers, *access.headers, prompt_estimate(demand.prompt_tokens)]
        headers = pinned(own, engines.rank(replica))
        request = UpstreamRequest(engines.url(replica), asked.path, headers, body, tls=access.tls)
        prefill_over = self._end_prefill_later(call, demand, grant, reservation)
        seen = None
        try:
            if asked.background:
                place = Place(request.url, response_id, [*call.headers, *access.headers], access.tls)
                seen = await self._exchange_and_follow(call, request, relay, place)
            else:
                await self._exchange(request, relay)
        except UpstreamFailed as failed:
            return _failed(call, demand, grant, failed)
        finally:
            relay.report()  # who gives the place back asks the call what it used
            if meter is not None:
                meter.end(call.usage, relay.ended_of_itself)
            call.held_seconds += time.monotonic() - call.sent_at
            if prefill_over:
                prefill_over.cancel()
        if seen is not None:
            call.usage = seen.counted or call.usage
            if seen.failure is not None and not call.answered:
                return call.advance(Event.STOPPED)
        call.advance(Event.ENDED)
        if call.status < 400:
            engines.report_success(replica)
            beginnings.note_run(call, grant, time.monotonic())
            beginnings.compare(call, demand, grant, self._observer)
        elif call.status == BUSY_STATUS:  # passed on as the engine's own, and it says how the engine is
            engines.report_failure(replica, Trouble.BUSY, relay.rest_seconds)
        return None

    async def _exchange_and_follow(
        self, call: Call, request: UpstreamRequest, relay: Relay, place: Place
    ) -> Progress | None:
        """As `_exchange`, and until the engine has done what it goes on with; it is left with nothing to do.

        What was seen of a response that went on without its answer.  Raises UpstreamFailed, after which another engine
        may be asked where nothing is left on this one.
        """
        exchange = self._exchange(request, relay)
        try:
            if call.request.stream:
                return await self._background.attend(place, exchange, call)
            await exchange
            return await self._background.follow(place) if call.outlives_client else None
        except asyncio.CancelledError:
            await self._background.end(place)
            raise
        except UpstreamFailed as failed:
            if not failed.connecting and not await self._background.end(place):
                failed.final = True
            raise

    def _meter(self, call: Call, demand: Demand, grant: Grant, reservation: Reservation) -> Meter | None:
        if call.law is None:
            return None
        unmetered = Unmetered(call.fleet.name, call.fleet.engines.pool(grant.replica))
        return Meter(
            Growth(demand, call.law, grant.shared),
            reservation,
            call.fleet.lengths,
            call.kind,
            partial(self._observer, unmetered),
        )

    async def _exchange(self, request: UpstreamRequest, relay: Relay) -> None:
        """One engine's whole answer.  Raises UpstreamFailed."""
        try:
            await self._upstream.exchange(request, relay)
        except UpstreamFailed:
            if not relay.complete:
                raise
        await relay.finish()

    def _first_token(self, call: Call, demand: Demand, grant: Grant, reservation: Reservation) -> None:
        """The engine has computed the prompt: its share of the prefill budget is free."""
        reservation.first_token()
        computed = prefill_share(_computed_tokens(demand, grant))
        if demand.prefill and computed:
            took_ms = (time.monotonic() - call.sent_at) * 1000
            self._prefill_times.observe(grant.replica, computed, took_ms)

    def _end_prefill_later(
        self, call: Call, demand: Demand, grant: Grant, reservation: Reservation
    ) -> asyncio.TimerHandle | None:
        """An answer that is no stream shows no first token: its share ends, and others may share what it has computed,
        after the time that was learned.

        What generates nothing is all prefill: its share ends with its answer.
        """
        if not (demand.prefill or call.segments):
            return None
        if call.request.stream or not call.generation.endpoint.generates:
            return None
        seconds = self._prefill_times.seconds(grant.replica, _computed_tokens(demand, grant))
        return asyncio.get_running_loop().call_later(seconds, reservation.first_token)


def _is_counted_when_full(call: Call, shape: FleetShape) -> bool:
    """While there is room, a block too many does no harm, but counting takes processors.  Ids are counted already."""
    if call.fleet.counter is None or isinstance(
        call.generation.prompts[0], PromptTokens
    ):  # then all of them are
        return False
    fill = call.fleet.ledger.fill
    return fill is None or fill >= shape.exact_above


def _computed_tokens(demand: Demand, grant: Grant) -> int:
    """Of its prompt, those that its engine does not have."""
    return demand.prompt_tokens - grant.shared * demand.block_size


def _learn(call: Call) -> None:
    """From what the engine says that the prompt has."""
    if call.fleet.on_end is not None:
        call.fleet.on_end(call)
    usage = call.usage
    if call.guess and usage is not None and usage.prompt_tokens > 0:
        learn(call.fleet.factors, call.guess, usage.prompt_tokens)


def _shape(call: Call) -> FleetShape:
    """What there is for the call: the fleet, or the pool of the only replica that can take it."""
    engines = call.fleet.engines
    only = call.request.replica
    return engines.shape().only(engines.pool(only)) if only else engines.shape()


async def _would_refuse(call: Call, asks: Sequence[Outlook], lines: ExitStack) -> Refusal | None:
    """Of all lanes that it may go to, the last one's.  While `lines` last it is ahead of who asks later."""
    refusal, ledger = None, call.fleet.ledger
    for outlook in asks:
        likely = call.admission(outlook.likely, call.holding(outlook.smallest))
        ahead = lines.enter_context(ledger.counted(likely))
        refusal = await ledger.would_refuse(likely, outlook.blocks_min, ahead)
        if refusal is None:
            return None
    return refusal


def _charge(call: Call, demand: Demand) -> Refusal | None:
    """Note what it takes of each quota of its key; refused where a full one does not hold that."""
    terms = call.terms
    if not terms.quotas and terms.all_fleets is None:
        return None
    call.charges = charges(terms.quotas, demand.units)
    if terms.all_fleets is not None:
        call.all_fleets_charges = charges(terms.all_fleets.quotas, demand.units)
    return never_fits(call.charges) or never_fits(call.all_fleets_charges)


def _response_id(call: Call, replica: str) -> str:
    """Another one for each attempt."""
    random = secrets.token_hex(responses.RANDOM_CHARS // 2)
    return responses.new_id(random, (call.fleet.name, replica), call.terms.caller)


def _not_kept(lane: str) -> Refusal:
    """The settings do not allow that, but they may have changed since the key was read."""
    words = f"mode guaranteed was promised to this key, and every pool of lane {lane} is elastic"
    return Refusal(Code.NO_BACKEND, words, should_retry=False)


class _UnknownReplica(Exception):
    """No place was found on a replica that this process knows."""


async def _elsewhere(reservation: Reservation, replica: str) -> Grant | Refusal:
    try:
        async with asyncio.timeout(UNKNOWN_SECONDS):
            return await reservation.moved(replica)
    except TimeoutError:
        raise _UnknownReplica from None


def _failed(call: Call, demand: Demand, grant: Grant, failed: UpstreamFailed) -> Refusal | Step:
    """Another replica, once, while nothing was forwarded; else the end."""
    call.tried.append(grant.replica)
    engines = call.fleet.engines
    engines.report_failure(grant.replica, failed.trouble, failed.rest_seconds)
    gone = [*call.tried, *call.excluded, *demand.exclude]
    others = engines.another_can_hold(demand.lane, gone, demand.blocks, demand.sequences)
    return _moved_or_failed(call, failed, others and not failed.final)


def _moved_or_failed(call: Call, failed: UpstreamFailed, others: bool) -> Refusal | Step:
    """`others` may be asked."""
    if others and call.status == 0 and len(call.tried) < ATTEMPTS_MAX:
        return call.advance(Event.TIMED_OUT if failed.timed_out else Event.FAILED)
    if failed.trouble is Trouble.BUSY and call.status == 0:
        call.advance(Event.BUSY_FOR_GOOD)
        return no_room(failed.rest_seconds)
    return call.advance(Event.TIMED_OUT_FOR_GOOD if failed.timed_out else Event.FAILED_FOR_GOOD)


def _moves(failure: Refusal | Step | None) -> bool:
    return isinstance(failure, Step) and failure.action is Action.MOVE
