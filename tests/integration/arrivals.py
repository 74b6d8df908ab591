"""Steady arrivals: streams that come at a fixed rate, whatever became of those before them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.processes import GatewayProcess
from tests.wire import Wire, post


@dataclass(frozen=True)
class Seen:
    """What one client saw."""

    sent_at: float
    """Of the monotonic clock, in seconds."""
    seconds: float
    """Until the answer began."""
    status: int
    code: str
    """Of a refusal."""
    retry_after: int
    """Seconds; 0 where the answer has none."""


class Arrivals:
    """Calls at gateways in turn, each on a connection of its own."""

    def __init__(self, gateways: Sequence[GatewayProcess], body: dict[str, Any], per_second: int) -> None:
        self.seen: list[Seen] = []
        self.blocks: Counter[str] = Counter()
        """Held by calls whose answer has begun and is not over, by the gateway's URL."""
        self.open = 0
        """Calls that were sent, and whose answer is not over."""
        self._gateways = gateways
        self._request = post(gateways[0].key, body)
        self._per_second = per_second

    def between(self, start: float, end: float) -> list[Seen]:
        """Calls that were sent in that time."""
        return [seen for seen in self.seen if start <= seen.sent_at < end]

    def answered(self, start: float, end: float) -> list[Seen]:
        """Calls that were sent and whose answer began in that time."""
        return [seen for seen in self.between(start, end) if seen.sent_at + seen.seconds < end]

    async def run(self) -> None:
        """Until cancelled; then every call that was sent is followed to its end."""
        calls: list[asyncio.Task[None]] = []
        started = time.monotonic()
        try:
            while True:
                due = started + len(calls) / self._per_second
                await asyncio.sleep(max(due - time.monotonic(), 0))
                calls.append(
                    asyncio.create_task(self._call(self._gateways[len(calls) % len(self._gateways)]))
                )
        finally:
            await asyncio.gather(*calls)

    async def _call(self, gateway: GatewayProcess) -> None:
        wire = await Wire.open(gateway.url)
        self.open += 1
        try:
            self.seen.append(await self._answer(wire, gateway.url))
        finally:
            self.open -= 1
            wire.reset()

    async def _answer(self, wire: Wire, url: str) -> Seen:
        sent_at = time.monotonic()
        await wire.send(self._request)
        status, headers = await wire.head()
        seconds = time.monotonic() - sent_at
        if status != 200:
            code = (await wire.rest())["error"]["code"]
            return Seen(sent_at, seconds, status, code, int(headers.get("retry-after", "0")))
        blocks = int(headers["x-kvgate-reserved-blocks"])
        self.blocks[url] += blocks
        events = await wire.events()
        self.blocks[url] -= blocks
        assert events[-1] == b"data: [DONE]"
        assert b'"error"' not in events[-2], "nobody ended it"
        return Seen(sent_at, seconds, status, "", 0)


@asynccontextmanager
async def arriving(
    gateways: Sequence[GatewayProcess], body: dict[str, Any], per_second: int
) -> AsyncIterator[Arrivals]:
    """When left, no more calls come, and those that came have their answers."""
    arrivals = Arrivals(gateways, body, per_second)
    task = asyncio.create_task(arrivals.run())
    try:
        yield arrivals
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
