"""Frozen facts that rooms report to an observer.  Telemetry listens; nothing else looks back up."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.core.outcomes import Code, Outcome


class CallEnded(msgspec.Struct, frozen=True):
    """One call, once, however it ended."""

    request_id: str
    fleet: str
    """Empty when the call ended before its fleet was known."""
    lane: str
    pool: str
    replica: str
    key: str
    """The configured name of the key, never its secret; empty before authentication."""
    class_: str
    outcome: Outcome
    reason: Code | None
    status: int
    refusal_ms: float | None
    """Last body byte read to answer written, for refusals that never queued."""
    queue_ms: float
    predicted_ms: int | None
    """What the store expected a call to wait that got a ticket, and then a place."""
    reserved_blocks: int
    unused_blocks: int | None
    """Blocks reserved but not used, where the engine reported usage."""
    prompt_tokens_estimated: int
    prompt_tokens: int | None
    output_tokens: int | None
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


Event = CallEnded | FirstToken | TokenGaps | StoreAnswered | StoreUp | LeaseLost | AdmittedByShare | Healed


class Observer(Protocol):
    def __call__(self, event: Event, /) -> None:
        """Must return at once and never raise."""
        ...
