"""Sending the events of one stream: counted, so that a script strikes at its event, and never silent for too long."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.mock.calls import Call
from gateway.mock.control import Control
from gateway.mock.engine import Token
from gateway.mock.exchange import Exchange
from gateway.mock.faults import Fault
from gateway.mock.journal import Record
from gateway.mock.progress import Extras, Progress
from gateway.mock.stream import Stream

KEEP_ALIVE = b": keep-alive\n\n"


class Shape(Protocol):
    """The events of one stream in its protocol; `progress` tells how far it is."""

    progress: Progress

    def begin(self) -> list[bytes]:
        """Before the first token."""

    def tokens(self, tokens: Sequence[Token]) -> list[bytes]:
        """Of tokens that are at hand."""

    def abort(self) -> list[bytes]:
        """End every open choice with finish_reason "abort"."""

    def close(self, extras: Extras) -> list[bytes]:
        """After the last choice has ended."""

    def error(self, body: dict[str, Any]) -> list[bytes]:
        """An error in OpenAI's envelope, and the end."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call on its way."""

    exchange: Exchange
    record: Record
    call: Call
    fault: Fault | None
    rank: int | None
    """Data-parallel rank that the client asked for."""


class Teller:
    """Sends the events of one stream, counts them, and tells when the call's fault is due."""

    def __init__(
        self, job: Job, shape: Shape, stream: Stream, keep_alive: "KeepAlive", control: Control
    ) -> None:
        self.job = job
        self._exchange = job.exchange
        self.shape = shape
        self.stream = stream
        self._keep_alive = keep_alive
        self._control = control
        self._left = None if job.fault is None else job.fault.strikes_after_events

    @property
    def scripted(self) -> bool:
        """True while a fault is still to come."""
        return self._left is not None

    async def tell(self, events: Sequence[bytes]) -> bool:
        """Send the events, or those before the fault; True when the fault is due that ends the call."""
        if self._left is None:
            await self.say(events)
            return False
        before = events[: self._left]
        await self.say(before)
        self._left -= len(before)
        if self._left > 0:
            return False
        fault = self.job.fault
        assert fault is not None
        if not fault.engine_wide:
            return True
        self._left = None
        self._control.strike(fault)
        await self.say(events[len(before) :])
        return False

    async def say(self, events: Sequence[bytes]) -> None:
        if events and not self.push(events):
            await self._exchange.drained()

    def push(self, events: Sequence[bytes]) -> bool:
        """Send events; False when the client is behind and its exchange should be drained."""
        self._keep_alive.spoke()
        return self._exchange.push(events)


class KeepAlive:
    """Comment lines in a stream that is silent."""

    def __init__(self, exchange: Exchange, interval_seconds: float) -> None:
        """0 seconds: none."""
        self._exchange = exchange
        self._interval = interval_seconds
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._timer = self._loop.call_later(interval_seconds, self._due) if interval_seconds else None

    def spoke(self) -> None:
        if self._timer is not None:
            self._spoke_at = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        now = self._loop.time()
        if now >= self._spoke_at + self._interval:
            self._exchange.interject(KEEP_ALIVE)
            self._spoke_at = now
        self._timer = self._loop.call_at(self._spoke_at + self._interval, self._due)
