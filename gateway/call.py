"""One call and its surroundings, as the flow and the HTTP edge share them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.core import lifecycle
from gateway.core.estimate import Demand
from gateway.core.factors import Factors
from gateway.core.forecast import Course
from gateway.core.growth import IN_FULL, Holding, Law, start
from gateway.core.identity import Identity
from gateway.core.learned import LearnedLengths
from gateway.core.lifecycle import Event, Phase, Step
from gateway.core.modes import Mode, is_elastic, is_promised
from gateway.core.order import ASKED_BACK, PLACE_ONLY, POOL_SHARE_SCALE
from gateway.core.outcomes import Code, Outcome, Refusal
from gateway.core.prefixes import SeenPoints
from gateway.core.quota import AllFleets, Charge, Quota
from gateway.core.request import GenerationRequest, Request
from gateway.core.returns import ReturnsByKind
from gateway.core.route import KeyLimits
from gateway.core.segments import Segment
from gateway.core.sse import Usage
from gateway.core.talk import Talk
from gateway.core.warm import Counts, SharedCaches, WarmPlaces
from gateway.estimates import Guess
from gateway.ledger.api import Admission, Grant, Ledger
from gateway.metering import Meter
from gateway.tokens.api import ModelCounter
from gateway.upstream.api import Engines, Headers, Receiver


@dataclass(frozen=True, slots=True)
class Memory:
    """How prompts began lately, and where; fleets may share one."""

    seen: SeenPoints = field(default_factory=SeenPoints)
    warm: WarmPlaces = field(default_factory=WarmPlaces)


@dataclass(frozen=True, slots=True)
class Fleet:
    name: str
    engines: Engines
    ledger: Ledger
    counter: ModelCounter | None = None
    """Counts as the fleet's engines do; None where prompts are always estimated."""
    factors: Factors = field(default_factory=Factors)
    """What was learned of estimates."""
    lengths: LearnedLengths = field(default_factory=LearnedLengths)
    """What was learned of how much calls write."""
    returns: ReturnsByKind = field(default_factory=ReturnsByKind)
    """Whose conversations go on soon."""
    memory: Memory = field(default_factory=Memory)
    caches: SharedCaches = field(default_factory=SharedCaches)
    counts: Counts = field(default_factory=Counts)
    """Of its own tokenizer: texts that it does not count as its engines do say nothing of its blocks."""
    on_end: "Callable[[Call], None] | None" = None
    """Is told each call that had a place; None = nobody asks."""


class Terms(msgspec.Struct, frozen=True):
    """What a caller's key and class allow."""

    caller: str
    """The key's own name."""
    key: str
    """The name under which the ledger keeps what the key holds; keys of one group share it."""
    class_: str
    weight: int
    requests_max: int | None
    quotas: tuple[Quota, ...]
    limits: KeyLimits
    wait_ms: int
    queue_max: int
    queue_key_max: int
    ttft_ms: int | None = None
    """When the first token is wanted, from the last byte of the request on; None = whenever."""
    mode: Mode | None = None
    """What its calls were promised; None = what its pool does."""
    cache_salt: str = ""
    """Of its prefixes in the engines' caches; '' = they are everybody's."""
    pool_share: float | None = None
    """The part of each pool's limit that the key may hold at once."""
    all_fleets: AllFleets | None = None
    """None = no limits over all fleets."""


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way through the gateway; what is learned of it is noted here."""

    request_id: str
    """The client's own, or ours: for logs and the answer."""
    request: Request
    headers: Headers
    """For the engine, already filtered; they carry an id of ours."""
    fleet: Fleet
    terms: Terms
    started: float
    """When the last byte of the body had been read; like all times here seconds of the monotonic clock."""
    task: asyncio.Task[object]
    identity: Identity
    arrived: float = 0.0
    """When the head of the request had come."""
    once: str = ""
    """Hash of its key and `Idempotency-Key`, '' where the client sent none."""
    retry_count: int = 0
    """How often its client says to have tried before."""
    place_only: bool = False
    """It is a retry too many: it may wait only in the place that it left."""
    asked_back: bool = False
    """It comes when its client, or another one of its key, was told to."""
    phase: Phase = Phase.ESTIMATING
    demand: Demand | None = None
    law: Law | None = None
    """How its hold on its replica may grow; None where it has all of its demand from the beginning."""
    meter: Meter | None = None
    """Of the attempt that is under way, where its hold may grow."""
    guess: Guess | None = None
    """How its prompt was estimated, where the engine's count can say how well."""
    block_size: int = 0
    """Of the blocks of its prompt that others may hold as well; 0 where none are shared."""
    beginning: Sequence[bytes] = ()
    """Keys of its points, by its tokens, or where these are not known by its texts; empty where neither was looked at.
    """
    tokens_known: bool = False
    """Its beginning is one of tokens."""
    segments: tuple[Segment, ...] = ()
    """What others may hold as well, by its tokens."""
    prefer: tuple[str, ...] = ()
    """Replicas that are likely to have most of its beginning."""
    cached: Mapping[str, int] | None = None
    """By replica, tokens of its prompt that are likely to be there already; None = nothing is known of that."""
    talk: Talk | None = None
    """Names of its conversation; None where it has none, or nobody would keep it."""
    came_back: bool = False
    """That was answered lately."""
    doubted: bool = False
    """Its replica's cache had too little of what it should have, of this call and others."""
    charges: tuple[Charge, ...] = ()
    """What it takes of its key's rate quotas in its fleet."""
    all_fleets_charges: tuple[Charge, ...] = ()
    """The same over all fleets."""
    grant: Grant | None = None
    relay: "Relay | None" = None
    """Of the last attempt."""
    tried: list[str] = field(default_factory=list)
    """Replicas that failed."""
    sent_at: float = 0.0
    held_seconds: float = 0.0
    """For which it had its blocks, on all the replicas that it was sent to."""
    writing_since: float | None = None
    """Set while a write to the client has not returned."""
    heard: bool = False
    """Its client was given the first bytes of an engine's answer, which name a response, or more."""
    answered: bool = False
    """Its client was given all of its answer."""
    abandoned: bool = False
    """Its client has left, or was given all, and the engine goes on."""
    on_heard: Callable[[], None] | None = None
    on_abandoned: Callable[[], None] | None = None
    """Called whenever a client leaves that the engine goes on without; also one that only stopped to read."""
    usage: Usage | None = None
    blocks_used: int | None = None
    """At its end, unshared, by its engine's `usage`; None where that does not tell."""
    output_events: int = 0
    status: int = 0
    """Of the answer; 0 while none has begun."""
    retry_ms: int | None = None
    """When to come back, as its client was told."""
    outcome: Outcome | None = None
    reason: Code | None = None
    waited: bool = False
    """It was refused after it had a ticket."""
    interrupted: Event | None = None

    @property
    def generation(self) -> GenerationRequest:
        """Of a call that holds blocks."""
        assert isinstance(self.request, GenerationRequest)
        return self.request

    @property
    def excluded(self) -> tuple[str, ...]:
        """Replicas that do not have what the call goes on from."""
        only = self.request.replica
        return tuple(name for name in self.fleet.engines.names() if name != only) if only else ()

    @property
    def outlives_client(self) -> bool:
        """Its client can come back to what the engine goes on with: its place is held whoever is still there."""
        request = self.request
        goes_on = isinstance(request, GenerationRequest) and request.background
        return goes_on and 200 <= self.status < 300 and self.heard

    def advance(self, event: Event) -> Step:
        """Take the step that the table has for the event."""
        step = lifecycle.TABLE.get((self.phase, event)) or lifecycle.step(self.phase, event)
        if step.phase is Phase.SETTLED and self.phase is not Phase.SETTLED:
            self.outcome, self.reason = step.outcome, step.code
        self.phase = step.phase
        return step

    def hear(self) -> None:
        """Bytes of an engine's answer were given to its client."""
        if not self.heard:
            self.heard = True
            if self.on_heard:
                self.on_heard()

    def interrupt(self, event: Event) -> None:
        """End the call from outside where the table lets the event end calls; the first one counts."""
        if self.interrupted or self.phase is Phase.SETTLED:
            return
        if event is Event.LEFT and (self.answered or self.outlives_client):
            self._abandon()  # the end of an answer looks as a client does that leaves
            return
        if lifecycle.step(self.phase, event).phase is Phase.SETTLED:
            self.interrupted = event
            self.task.cancel()

    def _abandon(self) -> None:
        self.abandoned = True
        if self.on_abandoned:
            self.on_abandoned()

    @property
    def standing(self) -> int:
        if self.place_only:
            return PLACE_ONLY
        return ASKED_BACK if self.asked_back else 0

    @property
    def kind(self) -> str:
        """Under which name its fleet learns how much such calls write."""
        model = self.request.model or self.fleet.engines.shape().model
        return self.fleet.lengths.kind(self.terms.class_, model)

    def law_in(self, lane: str) -> Law | None:
        """How it may grow there; None where it holds all of its demand from the beginning."""
        shape = self.fleet.engines.shape()
        if not shape.elastic_base or shape.encoder_tokens:  # what is beside the context does not grow
            return None
        if not self.generation.is_metered:
            return None
        if not is_elastic(self.terms.mode, shape.modes_of(lane)):
            return None
        survival = self.fleet.lengths.of(self.kind).survival
        return Law(survival, shape.elastic_base, shape.speculative_tokens)

    def holding(self, demand: Demand) -> Holding:
        """What it has of its replica before it has written anything."""
        law = self.law_in(demand.lane)
        return start(demand, law) if law else IN_FULL

    def admission(self, demand: Demand, holding: Holding = IN_FULL, wait_ms: int | None = None) -> Admission:
        """`holding`: what it has of its replica at first.  `wait_ms`: how long it may wait; None = as its terms say."""
        terms = self.terms
        return Admission(
            key=terms.key,
            class_=terms.class_,
            lane=demand.lane,
            blocks=demand.blocks,
            sequences=demand.sequences,
            prefill=demand.prefill,
            cost=demand.cost,
            wait_ms=terms.wait_ms if wait_ms is None else wait_ms,
            weight=terms.weight,
            blocks_max=-1 if terms.limits.blocks_max is None else terms.limits.blocks_max,
            requests_max=-1 if terms.requests_max is None else terms.requests_max,
            pool_share=-1 if terms.pool_share is None else round(terms.pool_share * POOL_SHARE_SCALE),
            queue_max=terms.queue_max,
            queue_key_max=terms.queue_key_max,
            identity=self.identity,
            once=self.once,
            standing=self.standing,
            exclude=(*self.excluded, *demand.exclude),
            charges=self.charges,
            body_bytes=len(self.request.body),
            tokens_max=demand.output_tokens * demand.sequences,
            course=self.course,
            held=holding.held,
            base=holding.base,
            path=holding.path,
            promised=is_promised(terms.mode),
            segments=self.segments,
            block_size=self.block_size,
            prefer=self.prefer,
            past=self.talk.past if self.talk else "",
        )

    def course(self) -> Course | None:
        return self.relay.course if self.relay else None


class Relay(Receiver, Protocol):
    """Takes one engine's answer and passes it on."""

    @property
    def complete(self) -> bool:
        """The answer has said that it is over: what the connection does from then on is no failure of the call."""
        ...

    async def finish(self) -> None:
        """The engine's answer is complete: pass the rest on.  Raises UpstreamFailed where it proves a failure."""
        ...

    @property
    def course(self) -> Course | None:
        """Of a stream that has begun."""
        ...

    @property
    def rest_seconds(self) -> float | None:
        """For which the engine asked to be left alone; None where it did not say."""
        ...

    @property
    def ended_of_itself(self) -> bool:
        """The stream is complete, and its limit was not what ended it."""
        ...

    def report(self) -> None:
        """Tell what was not told yet: the call its tokens, telemetry the times between them."""
        ...


class Client(Protocol):
    """The way back to whoever sent the call."""

    def relay(self, call: Call, first_token: Callable[[], None]) -> Relay:
        """A receiver for one attempt.  It advances the call with FORWARDED and tells of the first data event."""
        ...

    async def refuse(self, call: Call, refusal: Refusal) -> None:
        """A whole answer that says why the call is not served."""
        ...

    async def fail(self, call: Call, refusal: Refusal) -> None:
        """The answer has begun: end it so that no client takes it for a success."""
        ...
