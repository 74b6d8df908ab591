"""The request path as plain ASGI: authenticate, read, parse, hand to the flow, and say how it ended.

Plain ASGI because Starlette's BaseHTTPMiddleware hides disconnects, and because a cancelled task is all the machinery
that a leaving client needs.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from gateway.call import Call, Fleet, Terms
from gateway.core import quota
from gateway.core.events import CallEnded, Observer
from gateway.core.headers import prompt_estimate, request_headers
from gateway.core.identity import (
    IDEMPOTENCY_KEY,
    Identity,
    hashed_idempotency_key,
    read_idempotency_key,
)
from gateway.core.lifecycle import Event
from gateway.core.modes import Mode
from gateway.core.outcomes import Code, Outcome, Refusal
from gateway.core.quota import Units
from gateway.core.request import GenerationRequest, Request
from gateway.core.responses import maker, not_found
from gateway.core.retries import RETRY_COUNT, Appointments, RetryBudgets, read_retry_count
from gateway.core.route import KeyLimits
from gateway.core.urgency import DEADLINE, PRIORITY, lowered_class, read_deadline
from gateway.endings import refusal_of
from gateway.flow import Flow
from gateway.http.auth import Key
from gateway.http.body import (
    BodyBudget,
    BodyShare,
    ClientLeft,
    Incoming,
    Receive,
    Scope,
    accept_body,
    discard_body,
    read_body,
)
from gateway.http.errors import Answer, Send, answer_of, error_event, safe_request_id, send_answer
from gateway.http.gaps import AllGaps
from gateway.http.keepalive import KeepAlive
from gateway.http.passages import Passages
from gateway.http.relay import WRITER, AnswerCutOff, AnswerRelay, Writer
from gateway.http.routes import Route, find_route
from gateway.ledger.api import Cut
from gateway.used import units_used

log = logging.getLogger("kvgate.proxy")

MODEL_CHARS_MAX = 256
"""Of a model's name in telemetry; no configured one is longer."""
MODEL_CHARS_SHOWN = 64
"""A client gets its own model name back in an error, up to this length."""
CLIENT_STALL_SECONDS = 60.0
"""A client that takes no byte of its answer for so long has left."""
PARSE_INLINE_BYTES_MAX = 320 * 1024
"""A prompt of 64k tokens with its JSON: 0.4 ms.  Longer bodies are parsed in a thread, so that other calls go on; for
shorter ones the loop would wait about as long for the interpreter lock.
"""
LINGER_SECONDS = 2.0
LINGER_BYTES_MAX = 16 * 1024 * 1024
"""What a client may still send of a body that is refused, before its connection is closed."""
STALL_CHECK_SECONDS = 1.0
KNOWN_TERMS_MAX = 10_000
"""Keys whose terms are kept ready."""
CUTS_MAX = 1_000
"""Keys whose last cut is remembered."""
NO_REQUESTS, NO_REQUESTS_AT_ALL = (
    Refusal(Code.QUOTA_EXCEEDED, f"the key would hold 1, its {section}.requests_max is 0")
    for section in (quota.LIMITS, quota.ALL_FLEETS_LIMITS)
)
DRAINING = Refusal(Code.DRAINING, "this gateway is shutting down", retry_ms=1000)


class Connection(Writer, Protocol):
    """The client's connection beside ASGI, where the server offers that."""

    def take_body(self) -> bytes | None:
        """The request's body where all of it has come; None where `receive` has to be asked."""
        ...

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Call it when the client leaves, at once where it has; None: nobody wants to know any more."""
        ...


class Keys(Protocol):
    def find(self, scope: Scope, headers: Mapping[bytes, bytes], now_ms: int, /) -> Key | None: ...


@dataclass(frozen=True, slots=True)
class ClassTerms:
    """What calls of one class may queue for."""

    wait_ms: int
    queue_max: int
    queue_key_max: int
    ttft_ms: int | None = None
    """When the first token is wanted."""
    mode: Mode | None = None
    """What its calls were promised."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    body_bytes_max: int
    body_seconds: float
    bodies_bytes_max: int
    n_max: int
    overload_status: int
    show_replica: bool
    classes: Mapping[str, ClassTerms]
    default_class: str
    retry_share: float
    """Retries of a key that are queued for each of its first attempts."""
    pass_through: frozenset[str] = frozenset()
    """Paths that lead to an engine beside those that are known."""
    audio_bytes_max: int = 26 * 2**20
    """Of a form with a sound."""
    unreserved_max: int = 64
    """Calls that reserve nothing, under way at once."""
    keepalive_seconds: float = 0
    """The longest silence of a stream; 0: it may be silent until its first event."""


class Calls:
    """The calls of this process that are past their body, so that they can be counted and ended from outside."""

    def __init__(self) -> None:
        # Not sets: whoever is ended first gives its place back first, in the same order each time.
        self._calls: dict[Call, None] = {}
        self._reading: dict[asyncio.Task[object], None] = {}
        self._cuts: dict[str, float] = {}
        """The last cut of a key, for requests of it that were being read then; the latest come last."""
        self.draining = False

    def add(self, call: Call) -> None:
        self._calls[call] = None

    def discard(self, call: Call) -> None:
        self._calls.pop(call, None)

    def inflight(self) -> dict[str, int]:
        """Calls by fleet."""
        counts: dict[str, int] = {}
        for call in self._calls:
            counts[call.fleet.name] = counts.get(call.fleet.name, 0) + 1
        return counts

    async def read(self, reading: Coroutine[Any, Any, bytes | Refusal]) -> bytes | Refusal:
        """The body, unless a drain comes first: nothing is held for such a call yet."""
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = None
        try:
            return await reading
        except asyncio.CancelledError:
            if not self.draining:
                raise
            task.uncancel()
            return DRAINING
        finally:
            self._reading.pop(task, None)

    def drain(self) -> None:
        """No new calls; those that arrive or wait are answered 503, those that run go on."""
        self.draining = True
        self.interrupt(Event.DRAINED)
        for task in list(self._reading):
            task.cancel()

    def interrupt(self, event: Event) -> None:
        for call in list(self._calls):
            call.interrupt(event)

    def cut(self, cut: Cut) -> int:
        """End the calls of one key; returns how many there were."""
        self._cuts.pop(cut.name, None)
        self._cuts[cut.name] = cut.before
        if len(self._cuts) > CUTS_MAX:
            del self._cuts[next(iter(self._cuts))]
        found = [call for call in self._calls if self.is_cut(call.terms.caller, call.arrived)]
        running = [call for call in found if not call.interrupted]
        for call in running:
            call.interrupt(Event.CUT)
        return sum(call.interrupted is Event.CUT for call in running)

    def is_cut(self, name: str, arrived: float) -> bool:
        """Whether a request of that key, which arrived then, is to end."""
        return bool(self._cuts) and arrived < self._cuts.get(name, -math.inf)

    async def watch_writes(self) -> None:
        """End calls whose clients stopped to read; runs until cancelled."""
        while True:
            await asyncio.sleep(STALL_CHECK_SECONDS)
            late = time.monotonic() - CLIENT_STALL_SECONDS
            for call in list(self._calls):
                if call.writing_since is not None and call.writing_since < late:
                    call.interrupt(Event.LEFT)


@dataclass(slots=True)
class _Visit:
    """One HTTP request until its call is known; afterwards the call carries the story."""

    request_id: str
    own_id: str
    """The engine gets this one, so that two clients with one id never collide."""
    incoming: Incoming
    send: Send
    writer: Connection | None
    arrived: float
    began: float
    """When it arrived, then when its last byte was read."""
    share: BodyShare
    route: Route
    leave: Callable[[], None] | None = None
    """Gives back the place that was taken among the calls that reserve nothing."""
    model: str = ""
    key: Key | None = None
    reported: bool = False
    alive: KeepAlive | None = None


class Proxy:
    """The ASGI application of the paths that lead to an engine."""

    def __init__(
        self,
        flow: Flow,
        keys: Keys,
        fleets: Mapping[str, Fleet],
        settings: EdgeSettings,
        calls: Calls,
        observer: Observer,
        jitter: Callable[[], float] = lambda: random.uniform(1, 1.25),
    ) -> None:
        """`fleets` by every model name that they answer to, as of now: a reload changes the mapping."""
        self._flow = flow
        self._keys = keys
        self._fleets = fleets
        different = {fleet.name: fleet for fleet in fleets.values()}
        self._only_fleet = next(iter(different.values())) if len(different) == 1 else None
        self._settings = settings
        self._bodies = BodyBudget(settings.bodies_bytes_max)
        self._passages = Passages(settings.unreserved_max)
        self._streams = Passages(settings.unreserved_max)
        """Of events that an engine keeps: they may take hours, and others get through beside them."""
        self._retries = RetryBudgets(settings.retry_share)
        self._appointments = Appointments()
        self._calls = calls
        self._observer = observer
        self._gaps = AllGaps(observer)
        self._jitter = jitter
        self._ids = itertools.count()
        self._id_prefix = secrets.token_hex(8)
        self._known_terms: dict[str, tuple[Key, Terms]] = {}
        """By name of a key."""

    def use(self, settings: EdgeSettings) -> None:
        """From the next call on."""
        self._settings = settings
        self._known_terms.clear()
        self._bodies.bytes_max = settings.bodies_bytes_max
        self._retries.share = settings.retry_share
        self._passages.most = self._streams.most = settings.unreserved_max

    def route(self, scope: Scope) -> Route | None:
        """None for a path that leads to no engine."""
        return find_route(scope["raw_path"], self._settings.pass_through)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of a path that leads to an engine."""
        route = self.route(scope)
        assert route is not None
        await self.serve(route, scope, receive, send)

    async def serve(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """The same, of the path of this route."""
        headers = dict(scope["headers"])
        own_id = self._new_id()
        asked = headers.get(b"x-request-id")
        request_id = own_id if asked is None else safe_request_id(asked, own_id)
        writer: Connection | None = scope.get("extensions", {}).get(WRITER)
        share = self._bodies.share()
        incoming, now = Incoming(receive), time.monotonic()
        visit = _Visit(request_id, own_id, incoming, send, writer, now, now, share, route)
        try:
            await self._visit(visit, scope, headers)
        except ClientLeft:
            return
        except AnswerCutOff:
            raise
        except Exception:
            if visit.reported:
                raise
            log.exception("internal error", extra={"request_id": visit.request_id})
            await self._refuse_early(visit, Refusal(Code.INTERNAL_ERROR, ""), close=True)
        finally:
            visit.share.give_back()
            if visit.leave:
                visit.leave()
            if not visit.reported:
                self._report_early(visit, None, Outcome.CANCELLED, Code.CLIENT_DISCONNECT, 499)

    def _new_id(self) -> str:
        """One that no process gives again; nothing depends on its being a secret, and randomness is a system call."""
        return f"{self._id_prefix}{next(self._ids):016x}"

    async def _visit(self, visit: _Visit, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        refusal = self._refuse_unread(visit, scope, headers)
        if refusal:
            return await self._refuse_early(visit, refusal, close=True)
        body = self._take_body(visit, scope, headers)
        if body is None:
            body = await self._calls.read(self._read_body(visit, scope))
        visit.began = time.monotonic()
        if isinstance(body, Refusal):
            return await self._refuse_early(visit, body, close=True)
        call = await self._open_call(visit, scope, headers, body)
        if isinstance(call, Refusal):
            return await self._refuse_early(visit, call, close=False)
        await self._serve(visit, call, visit.incoming)

    def _take_body(
        self, visit: _Visit, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> bytes | Refusal | None:
        """The body where it has come already, as nearly all have; else None."""
        body = visit.writer.take_body() if visit.writer is not None else None
        if body is None:
            return None
        visit.incoming.over = True
        bytes_max, setting = self._body_limit(visit.route)
        return accept_body(scope, headers, body, bytes_max, visit.share, setting)

    def _read_body(self, visit: _Visit, scope: Scope) -> Coroutine[Any, Any, bytes | Refusal]:
        bytes_max, setting = self._body_limit(visit.route)
        return read_body(scope, visit.incoming, bytes_max, self._settings.body_seconds, visit.share, setting)

    def _body_limit(self, route: Route) -> tuple[int, str]:
        """And the setting that has it."""
        if route.takes_form:
            return self._settings.audio_bytes_max, "server.audio_bytes_max"
        return self._settings.body_bytes_max, "server.body_bytes_max"

    # -- before there is a call ----------------------------------------------------------------------------------

    def _refuse_unread(self, visit: _Visit, scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """What is refused before a byte of the body is read."""
        if scope["method"] not in visit.route.methods:
            methods = " and ".join(visit.route.methods)
            return Refusal(Code.METHOD_NOT_ALLOWED, f"{visit.route.name} takes {methods}")
        now_ms = int(time.time() * 1000)
        visit.key = self._keys.find(scope, headers, now_ms)
        if visit.key is None:
            return Refusal(Code.INVALID_API_KEY, "no valid API key in `Authorization: Bearer` or `x-api-key`")
        if self._calls.draining:
            return DRAINING
        return None

    async def _open_call(
        self, visit: _Visit, scope: Scope, headers: Mapping[bytes, bytes], body: bytes
    ) -> Call | Refusal:
        assert visit.key is not None
        locked = _locked(visit.key)
        if locked:
            return locked
        if len(body) <= PARSE_INLINE_BYTES_MAX and not visit.route.takes_form:
            request = visit.route.read(scope, body, self._settings.n_max)
        else:
            request = await _read(visit.route, scope, body, self._settings.n_max)
        if isinstance(request, Refusal):
            return request
        if self._calls.draining:
            return DRAINING
        visit.model = (request.model or "")[:MODEL_CHARS_MAX]
        if self._calls.is_cut(visit.key.name, visit.arrived):
            return refusal_of(Code.CUT)
        if request.response_id:
            fleet, request = self._pinned(request, visit.key)
        else:
            fleet = self._fleet_of(request, visit.key)
        if isinstance(fleet, Refusal):
            return fleet
        task = asyncio.current_task()
        assert task is not None
        passed = request_headers(scope["headers"], f"kvg-{visit.own_id}")
        terms = self._terms_of(visit.key, request.priority, headers)
        if isinstance(terms, Refusal):
            return terms
        if not request.holds_blocks:
            passages = self._streams if request.stream else self._passages
            refusal = passages.take(visit.key.name)
            if refusal:
                return refusal
            visit.leave = partial(passages.give_back, visit.key.name)
        identity = Identity(visit.key.name, visit.route.name, body)
        call = Call(
            visit.request_id, request, passed, fleet, terms, visit.began, task, identity, visit.arrived
        )
        return self._read_repetition(call, visit.key.name, headers) or call

    def _read_repetition(self, call: Call, name: str, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """What the client says of how often it sends this call; `name` is the key's."""
        if IDEMPOTENCY_KEY in headers:
            once = read_idempotency_key(headers[IDEMPOTENCY_KEY])
            if isinstance(once, Refusal):
                return once
            call.once = hashed_idempotency_key(name, once)
        call.retry_count = read_retry_count(headers.get(RETRY_COUNT))
        now_ms = _now_ms()
        call.place_only = not self._retries.take(name, call.retry_count, now_ms)
        call.asked_back = call.retry_count > 0 and self._appointments.keep(name, now_ms)
        return None

    def _pinned(self, request: Request, key: Key) -> tuple[Fleet | Refusal, Request]:
        """The fleet and the replica that have what is asked for: for its own key, which could use that model then."""
        fleets = {fleet.name: fleet for fleet in self._fleets.values()}
        places = ((fleet.name, name) for fleet in fleets.values() for name in fleet.engines.names())
        place = maker(request.response_id, key.name, places)
        if place is None:
            return not_found(request.response_id), request
        fleet, pinned = fleets[place[0]], replace(request, replica=place[1])
        asked = self._fleet_of(request, key) if request.holds_blocks else fleet
        if isinstance(asked, Refusal) or asked is fleet:
            return asked, pinned
        return not_found(request.response_id), request

    def _fleet_of(self, request: Request, key: Key) -> Fleet | Refusal:
        """Without a model name the only fleet is meant, as vLLM means its only model."""
        if request.model is None and self._only_fleet:
            return self._cleared(self._only_fleet, self._only_fleet.engines.shape().model, key)
        if request.model is None:
            return Refusal(Code.MISSING_FIELD, "`model` is missing; this gateway serves several", "model")
        found = self._fleets.get(request.model)
        if found is None:
            shown = request.model[:MODEL_CHARS_SHOWN]
            return Refusal(Code.MODEL_NOT_FOUND, f"The model `{shown}` does not exist.", "model")
        return self._cleared(found, request.model, key)

    def _cleared(self, fleet: Fleet, model: str, key: Key) -> Fleet | Refusal:
        if key.models is None or model in key.models:
            return fleet
        return Refusal(Code.MODEL_NOT_ALLOWED, f"this key may not use the model `{model}`", "model")

    def _terms_of(self, key: Key, priority: int, headers: Mapping[bytes, bytes]) -> Terms | Refusal:
        """What the key allows, and the call itself asks to be less."""
        if not (priority or PRIORITY in headers or DEADLINE in headers):
            known = self._known_terms.get(key.name)
            return known[1] if known is not None and known[0] is key else self._usual_terms(key)
        settings = self._settings
        class_ = lowered_class(self._class_of(key), tuple(settings.classes), headers.get(PRIORITY), priority)
        deadline_ms = read_deadline(headers.get(DEADLINE))
        if isinstance(class_, Refusal):
            return class_
        if isinstance(deadline_ms, Refusal):
            return deadline_ms
        return self._terms(key, class_, deadline_ms)

    def _usual_terms(self, key: Key) -> Terms:
        """Of a call that asks nothing: the same for all of a key, until it or the settings change."""
        if len(self._known_terms) >= KNOWN_TERMS_MAX:
            self._known_terms.clear()
        terms = self._terms(key, self._class_of(key), None)
        self._known_terms[key.name] = key, terms
        return terms

    def _class_of(self, key: Key) -> str:
        return key.class_ if key.class_ in self._settings.classes else self._settings.default_class

    def _terms(self, key: Key, class_: str, deadline_ms: int | None) -> Terms:
        queue = self._settings.classes[class_]
        return Terms(
            caller=key.name,
            key=f"@{key.group}" if key.group else key.name,
            class_=class_,
            weight=key.weight,
            requests_max=key.requests_max,
            pool_share=key.pool_share,
            quotas=key.quotas,
            limits=KeyLimits(key.context_tokens_max, key.max_output_tokens, key.blocks_max),
            wait_ms=queue.wait_ms if deadline_ms is None else min(queue.wait_ms, deadline_ms),
            queue_max=queue.queue_max,
            queue_key_max=queue.queue_key_max,
            ttft_ms=queue.ttft_ms,
            mode=key.mode or queue.mode,
            cache_salt=key.cache_salt,
            all_fleets=key.all_fleets,
        )

    async def _refuse_early(self, visit: _Visit, refusal: Refusal, close: bool) -> None:
        answer = self._answer(visit, refusal)
        await _last_write(send_answer(visit.send, answer, visit.request_id, close))
        self._report_early(visit, answer, Outcome.REFUSED, refusal.code, answer.status)
        if close:
            await discard_body(visit.incoming, LINGER_SECONDS, LINGER_BYTES_MAX)
            await visit.send({"type": "http.response.body", "body": b""})

    def _answer(self, visit: _Visit, refusal: Refusal) -> Answer:
        allow, dialect = ", ".join(visit.route.methods), visit.route.dialect
        return answer_of(refusal, self._settings.overload_status, self._jitter(), allow, dialect)

    # -- the call ------------------------------------------------------------------------------------------------

    async def _serve(self, visit: _Visit, call: Call, receive: Receive) -> None:
        """Run the flow, with an eye on the client; count the call whatever happens."""
        client = _HttpClient(self, visit)
        self._calls.add(call)
        on_left = partial(call.interrupt, Event.LEFT)
        watch = visit.writer or _Watch(receive)
        watch.watch(on_left)
        if self._settings.keepalive_seconds:
            visit.alive = self._keep_alive(visit, call)
        try:
            await self._flow.serve(call, client)
        except AnswerCutOff:
            raise
        except Exception:
            log.exception("internal error", extra={"request_id": call.request_id})
            await self._apologise(call, client)
        finally:
            watch.watch(None)
            if visit.alive:
                visit.alive.close()
            self._calls.discard(call)
            self._report(visit, call)

    def _keep_alive(self, visit: _Visit, call: Call) -> KeepAlive | None:
        seconds = self._settings.keepalive_seconds
        if not (call.request.stream and call.request.holds_blocks):
            return None

        def head() -> dict[str, Any]:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *self.own_headers(call)]
            return {"type": "http.response.start", "status": 200, "headers": headers}

        return KeepAlive(call, seconds, head, visit.send, visit.writer)

    async def _apologise(self, call: Call, client: "_HttpClient") -> None:
        call.outcome, call.reason = Outcome.FAILED, Code.INTERNAL_ERROR
        refusal = Refusal(Code.INTERNAL_ERROR, "")
        if call.status:
            await client.fail(call, refusal)
        else:
            await client.refuse(call, refusal)

    def own_headers(self, call: Call) -> list[tuple[bytes, bytes]]:
        """What kvgate says about the call, on every answer that was admitted."""
        headers = [(b"x-request-id", call.request_id.encode())]
        grant, demand = call.grant, call.demand
        if grant and demand:
            waited_ms = grant.limited_ms + (grant.queue_ms if grant.queued else 0)
            headers += (
                (b"x-kvgate-reserved-blocks", b"%d" % demand.blocks),
                (b"x-kvgate-output-limit", b"%d" % demand.output_tokens),
                (b"x-kvgate-queue-ms", b"%d" % waited_ms),
                prompt_estimate(demand.prompt_tokens),
            )
        if grant:
            headers.append((b"x-kvgate-pool", call.fleet.engines.pool(grant.replica).encode()))
            if self._settings.show_replica:
                headers.append((b"x-kvgate-replica", grant.replica.encode()))
            if grant.shared:
                headers.append((b"x-kvgate-shared-blocks", b"%d" % grant.shared))
            if grant.queued:
                headers.append((b"x-kvgate-queue-position", b"%d" % grant.position))
            if grant.left:
                headers += quota.headers(grant.left)
        if call.request.stream:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return headers

    def relay(self, visit: _Visit, call: Call, first_token: Callable[[], None]) -> AnswerRelay:
        headers = self.own_headers(call)
        return AnswerRelay(
            call, visit.send, visit.writer, headers, first_token, self._observer, visit.alive, self._gaps
        )

    async def refuse(self, visit: _Visit, call: Call, refusal: Refusal) -> None:
        answer = self._answer(visit, refusal)
        call.status, call.retry_ms = answer.status, answer.retry_ms
        if visit.key and refusal.retry_ms is not None and not call.place_only:
            self._retries.invite(visit.key.name, call.retry_count + 1, _now_ms())
            self._appointments.make(visit.key.name, _now_ms() + (answer.retry_ms or refusal.retry_ms))
        if visit.alive and await visit.alive.take_over():
            event = error_event(refusal, call.request.dialect)
            return await _last_write(visit.send({"type": "http.response.body", "body": event}))
        return await _last_write(send_answer(visit.send, answer, call.request_id, close=False))

    # -- the report ----------------------------------------------------------------------------------------------

    def _report(self, visit: _Visit, call: Call) -> None:
        visit.reported = True
        demand, grant, usage, key = call.demand, call.grant, call.usage, visit.key
        refused_at_once = call.outcome is Outcome.REFUSED and not call.waited
        used = call.blocks_used
        charged = units_used(call, demand) if demand else Units()
        duration_ms = (time.monotonic() - call.started) * 1000
        waited_in_vain_ms = 0 if refused_at_once else duration_ms
        self._observer(
            CallEnded(
                request_id=call.request_id,
                route=visit.route.name,
                model=visit.model or call.fleet.engines.shape().model,
                fleet=call.fleet.name,
                lane=demand.lane if demand else "",
                pool=call.fleet.engines.pool(grant.replica) if grant else "",
                replica=grant.replica if grant else "",
                key=key.name if key else "",
                group=(key.group or "") if key else "",
                class_=call.terms.class_,
                outcome=call.outcome or Outcome.CANCELLED,
                reason=call.reason,
                status=call.status or 499,
                retry_ms=call.retry_ms,
                refusal_ms=duration_ms if refused_at_once else None,
                queue_ms=grant.queue_ms if grant else waited_in_vain_ms,
                predicted_ms=grant.predicted_ms if grant else None,
                reserved_blocks=demand.blocks if demand and grant else 0,
                shared_blocks=grant.shared if grant else 0,
                warm=grant.warm if grant else False,
                unused_blocks=max(0, demand.unshared_blocks - used) if demand and used is not None else None,
                held_seconds=call.held_seconds,
                charged=charged.requests > 0,
                prompt_tokens_estimated=demand.prompt_tokens if demand else 0,
                prompt_tokens=usage.prompt_tokens if usage and not _hears(call.request) else None,
                cached_tokens=usage.cached_tokens if usage else None,
                output_tokens_estimated=charged.output_tokens,
                output_tokens=usage.completion_tokens if usage else None,
                duration_ms=duration_ms,
                reserves=call.request.holds_blocks,
            )
        )

    def _report_early(
        self, visit: _Visit, answer: Answer | None, outcome: Outcome, reason: Code, status: int
    ) -> None:
        """A visit that never became a call; `answer` is what it was refused with."""
        visit.reported = True
        key = visit.key
        milliseconds = (time.monotonic() - visit.began) * 1000
        self._observer(
            CallEnded(
                request_id=visit.request_id,
                route=visit.route.name,
                model=visit.model,
                key=key.name if key else "",
                group=(key.group or "") if key else "",
                class_=key.class_ if key else "",
                outcome=outcome,
                reason=reason,
                status=status,
                retry_ms=answer.retry_ms if answer else None,
                refusal_ms=milliseconds if answer else None,
                duration_ms=milliseconds,
            )
        )


class _HttpClient:
    """Implements `Client` for one visit."""

    def __init__(self, proxy: Proxy, visit: _Visit) -> None:
        self._proxy = proxy
        self._visit = visit
        self._relay: AnswerRelay | None = None

    def relay(self, call: Call, first_token: Callable[[], None]) -> AnswerRelay:
        self._relay = self._proxy.relay(self._visit, call, first_token)
        return self._relay

    async def refuse(self, call: Call, refusal: Refusal) -> None:
        await self._proxy.refuse(self._visit, call, refusal)

    async def fail(self, call: Call, refusal: Refusal) -> None:
        """An error event of the engine's own is passed on as it came."""
        if self._relay is None or not self._relay.streams:
            raise AnswerCutOff
        last: dict[str, Any] = {
            "type": "http.response.body",
            "body": self._relay.relayable_failure or error_event(refusal, call.request.dialect),
        }
        await _last_write(self._visit.send(last))


def _locked(key: Key) -> Refusal | None:
    """A key of no calls at all is refused before its body is read as JSON."""
    if key.requests_max == 0:
        return NO_REQUESTS
    if key.all_fleets is not None and key.all_fleets.requests_max == 0:
        return NO_REQUESTS_AT_ALL
    return None


async def _read(route: Route, scope: Scope, body: bytes, n_max: int) -> Request | Refusal:
    """In a thread: a long body, and a form, the heads of whose parts are read by Python alone.

    Nothing is held yet: a cancelled wait leaves a thread that ends by itself.
    """
    return await asyncio.to_thread(route.read, scope, body, n_max)


def _hears(request: Request) -> bool:
    """What its engine calls the tokens of its prompt is the length of a sound."""
    return isinstance(request, GenerationRequest) and request.sound is not None


def _now_ms() -> int:
    return int(time.monotonic() * 1000)


async def _last_write(write: Awaitable[None]) -> None:
    """What ends an answer.  Nothing is held any more that a client could keep by not reading it, but its task is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLIENT_STALL_SECONDS):
            await write


class _Watch:
    """Tells when the client leaves, of servers that say so by `receive` alone.  Without a task: between the request's
    last byte and the answer's end the only thing that can arrive is the client's leaving.
    """

    def __init__(self, receive: Receive) -> None:
        self._on_left: Callable[[], None] | None = None
        self._listening = self._listen(receive)

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """As a connection's.  From None on it does nothing."""
        self._on_left = on_left
        if on_left is None:
            self._listening.close()
        else:
            self._step()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        if self._on_left is not None:
            self._on_left()

    def _step(self, _: object = None) -> None:
        """Run until it waits for a future, and go on when that is done."""
        if self._on_left is None:
            return
        try:
            waits_for = self._listening.send(None)
        except StopIteration:
            return
        if waits_for is None:  # for the loop's next turn
            asyncio.get_running_loop().call_soon(self._step)
        else:
            waits_for.add_done_callback(self._step)
