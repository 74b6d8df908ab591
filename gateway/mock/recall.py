"""The events of a response in the background, kept for whoever asks for them, as vLLM keeps them.

Source: `responses_background_stream_generator` of vLLM 0.32.
"""

import asyncio
from collections.abc import Sequence

from gateway.mock.exchange import Exchange

_YES = frozenset({"1", "on", "t", "true", "y", "yes"})


class Told:
    """The events of one response until now."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._over = False
        self._more = asyncio.Event()
        """Set, and another one in its place, whenever there are more."""

    def add(self, events: Sequence[bytes], *, over: bool = False) -> None:
        """`over`: the last one says so."""
        self._events += events
        self._over = over
        self._more.set()
        self._more = asyncio.Event()

    async def tell(self, exchange: Exchange, after: int | None = None) -> None:
        """Send those behind the one of the number `after`, and wait for more until the last one.

        A response that was cancelled has no last one: then this goes on until its client leaves.
        """
        await exchange.start_stream()
        at = 0 if after is None else after + 1
        while True:
            more, events = self._more, self._events[at:]
            if events and not exchange.push(events):
                await exchange.drained()
            at += len(events)
            if self._over and at >= len(self._events):
                return await exchange.end()
            if at >= len(self._events):
                await more.wait()


def wants_events(exchange: Exchange) -> bool:
    return any(value.lower() in _YES for value in exchange.query("stream"))


def number_behind(exchange: Exchange) -> int | None:
    """`starting_after`; what is no number is as absent."""
    values = exchange.query("starting_after")
    return int(values[-1]) if values and values[-1].isdigit() else None
