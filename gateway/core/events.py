"""Frozen facts that rooms report to an observer.  Telemetry listens; nothing else looks back up."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.core.outcomes import Code, Outcome


class CallEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One call, once, however it ended.  What has a default was not known of a call that ended early."""

    request_id: str
    route: str
    model: str = ""
    """As the client asked for it; the fleet's where it named none."""
    fleet: str = ""
    lane: str = ""
    pool: str = ""
    replica: str = ""
    key: str
    """The configured name of the key, never its secret; empty before authentication."""
    group: str
    class_: str
    outcome: Outcome
    reason: Code | None
    status: int
    retry_ms: int | None = None
    """When to come back, as the client was told."""
    refusal_ms: float | None
    """Last body byte read to answer written, for refusals that never queued."""
    reserves: bool = True
    """False for a call that needs no blocks, and so never waits for any."""
    queue_ms: float = 0
    predicted_ms: int | None = None
    """What the store expected a call to wait that got a ticket, and then a place."""
    reserved_blocks: int = 0
    shared_blocks: int = 0
    """Of these, those that others held as well when it was admitted."""
    warm: bool = False
    """The blocks of its conversation were held softly for it."""
    unused_blocks: int | None = None
    """Blocks reserved but not used, where the engine reported usage."""
    held_seconds: float = 0
    """For which `reserved_blocks` were held, on all replicas that were tried."""
    charged: bool = False
    """Its tokens count against its key: an answer that is no error began."""
    prompt_tokens_estimated: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that the engine had in its cache."""
    output_tokens_estimated: int = 0
    """What the key is charged without a report of the engine: 0 where nothing is charged."""
    output_tokens: int | None = None
    duration_ms: float


class FirstToken(msgspec.Struct, frozen=True):
    fleet: str
    pool: str
    class_: str
    ttft_ms: float
    """From the request's last body byte to its first data event, queueing included."""


class TokenGaps(msgspec.Struct, frozen=True):
    """Times between data events of one stream; several at once, because a fact for each would cost as much as passing
    the token on."""

    fleet: str
    pool: str
    class_: str
    gaps_ms: Sequence[float]


class StoreAnswered(msgspec.Struct, frozen=True):
    milliseconds: float


class StoreUp(msgspec.Struct, frozen=True):
    up: bool


class LeaseLost(msgspec.Struct, frozen=True):
    """This process was fenced: it slept or was cut off past its lease."""

    fleet: str


class AdmittedByShare(msgspec.Struct, frozen=True):
    """A call got its place from this process alone: the store is away, and `store.on_outage` is `share`."""

    fleet: str


class Healed(msgspec.Struct, frozen=True):
    """A difference between this process's reservations and the store's list, found by the digest and mended."""

    fleet: str
    kind: str
    """`settled` (the store held what we do not), `redeclared` (we held what it did not), `error` (an op failed)."""
    count: int


class Overdraft(msgspec.Struct, frozen=True):
    """A call holds more than its replica had left: what the calls there write was foreseen too low.  Nothing is
    admitted there until enough is given back."""

    fleet: str
    pool: str
    """Empty where the replica is configured no longer."""
    replica: str
    blocks: int
    """Above its limit, all calls there together."""


class LengthSurprise(msgspec.Struct, frozen=True):
    """Calls of a class write more than was learned, beyond chance: nearly all of it was forgotten."""

    fleet: str
    class_: str


class Unmetered(msgspec.Struct, frozen=True):
    """The engine did not report the tokens of an elastic call's stream: it holds all of its demand."""

    fleet: str
    pool: str


class PrefixFound(msgspec.Struct, frozen=True):
    """An engine has told how much of what calls there hold a call found in its cache."""

    fleet: str
    pool: str
    replica: str
    expected_tokens: int
    """That it shares with others, as the ledger has it."""
    found_tokens: int
    """Of these; what its engine had beside them is not counted."""


class CacheDoubted(msgspec.Struct, frozen=True):
    """An engine had less in its cache than it should have: nothing more is shared there until it is started anew."""

    fleet: str
    pool: str
    replica: str


class PinCall(msgspec.Struct, frozen=True):
    """A call that was to keep a named prefix in an engine's cache has ended."""

    fleet: str
    prefix: str
    ending: str
    """`warm`, `cold`, `untold`, `refused` or `failed` (`gateway/pins.py`)."""
    tokens: int
    """That the engine computed for it."""


class PinUse(msgspec.Struct, frozen=True):
    """A client's call began with a named prefix."""

    fleet: str
    prefix: str
    saved_tokens: int
    """Of the prefix, those that the engine had in its cache; 0 also where it does not tell."""


class Miscounted(msgspec.Struct, frozen=True):
    """Most prompts that came to a route were not counted as the engines count them, where that should be exact: what
    they have in common is not known, and they share nothing any more."""

    fleet: str
    route: str
    key: str = ""
    """Name of the key that sent them; '' = of all keys."""


Event = (
    CallEnded
    | FirstToken
    | TokenGaps
    | StoreAnswered
    | StoreUp
    | LeaseLost
    | AdmittedByShare
    | Healed
    | Overdraft
    | LengthSurprise
    | Unmetered
    | PrefixFound
    | CacheDoubted
    | Miscounted
    | PinCall
    | PinUse
)


class Observer(Protocol):
    def __call__(self, event: Event, /) -> None:
        """Must return at once and never raise."""
        ...
