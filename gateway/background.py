"""Responses that an engine goes on with after its answer: they are asked for until they are over.

Their blocks are in use for so long, and nobody but the engine knows for how long that is.
"""

import asyncio
from dataclasses import dataclass
from ssl import SSLContext

from gateway.core.responses import EVENT_BYTES_MAX, progress_of
from gateway.core.sse import Usage
from gateway.upstream.api import Collected, Headers, Upstream, UpstreamFailed, UpstreamRequest

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.25, 5.0
"""Between two questions; each wait is half as long again as the one before."""
POLL_GROWTH = 1.5
ANSWER_SECONDS = 10.0
"""For one question; an engine answers it from its memory."""
END_SECONDS = 10.0
"""An engine drops a call within a step; who is asked to and says nothing in this time may be gone."""
UNREACHABLE_SECONDS = 60.0
"""Nobody listens there any more: the process is gone, and what it held with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is made."""

    url: str
    response_id: str
    headers: Headers
    tls: SSLContext | None

    def request(self, method: str, rest: str = "") -> UpstreamRequest:
        path = f"/v1/responses/{self.response_id}{rest}"
        return UpstreamRequest(self.url, path, self.headers, b"", method=method, tls=self.tls)


class Background:
    """Follows responses; one for the process.  Neither of its methods raises but when it is cancelled."""

    def __init__(self, upstream: Upstream, seconds_max: float) -> None:
        """`seconds_max`: a response that takes longer is ended."""
        self._upstream = upstream
        self._seconds_max = seconds_max

    async def follow(self, place: Place) -> Usage | None:
        """Return when the response is over, or was ended; the engine's count of its tokens, where it has one."""
        loop = asyncio.get_running_loop()
        wait, ends_at, unreachable_since = POLL_SECONDS_MIN, loop.time() + self._seconds_max, None
        while (left := ends_at - loop.time()) > 0:
            await asyncio.sleep(min(wait, left))
            wait = min(wait * POLL_GROWTH, POLL_SECONDS_MAX)
            try:
                over, usage = await self._look(place)
            except UpstreamFailed as failed:
                now = loop.time()
                unreachable_since = (unreachable_since or now) if failed.connecting else None
                if unreachable_since is not None and now - unreachable_since >= UNREACHABLE_SECONDS:
                    return None
                continue
            unreachable_since = None
            if over:
                return usage
        await self.end(place)
        return None

    async def end(self, place: Place) -> bool:
        """Have the engine drop a response that it may have begun, and wait until it has.  True: nothing is left."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + END_SECONDS
        while True:
            try:
                await self._ask(place.request("POST", "/cancel"))
                if (await self._look(place))[0]:
                    return True
            except UpstreamFailed:
                pass
            if loop.time() >= ends_at:
                return False
            await asyncio.sleep(POLL_SECONDS_MIN)

    async def _look(self, place: Place) -> tuple[bool, Usage | None]:
        """Whether it is over; one that the engine does not know (any more) is.  Raises UpstreamFailed."""
        found = await self._ask(place.request("GET"))
        if found.status == 404:
            return True, None
        progress = progress_of(found.content) if found.status == 200 else None
        if progress is None:
            raise UpstreamFailed(f"the engine answered {found.status} and no response")
        return progress.is_over, progress.counted

    async def _ask(self, request: UpstreamRequest) -> Collected:
        found = Collected(EVENT_BYTES_MAX)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._upstream.exchange(request, found)
        except TimeoutError:
            raise UpstreamFailed("no answer about a response", timed_out=True) from None
        return found
