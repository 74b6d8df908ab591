"""Responses that an engine goes on with whoever has left: they are asked for until they are over.

Their blocks are in use for so long, and nobody but the engine knows for how long that is.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

from gateway.call import Call
from gateway.core.responses import CANCELLED, EVENT_BYTES_MAX, Progress, progress_of
from gateway.upstream.api import Collected, Headers, Upstream, UpstreamFailed, UpstreamRequest

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.25, 5.0
"""Between two questions; each wait is half as long again as the one before."""
POLL_GROWTH = 1.5
ANSWER_SECONDS = 10.0
"""For one question; an engine answers it from its memory."""
END_SECONDS = 10.0
"""An engine drops a call within a step; who is asked to and says nothing in this time may be gone."""
ANSWERS_BYTES_MAX = 256 * 2**20
"""Of all answers about responses that one process holds at once: each repeats what its call brought."""
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


class Crowded(UpstreamFailed):
    """Answers of ANSWERS_BYTES_MAX are held; the engine is not to blame."""


class _Answer(Collected):
    """One of those that share a bound."""

    def __init__(self, background: "Background") -> None:
        super().__init__(EVENT_BYTES_MAX)
        self._background = background

    async def body(self, data: bytes) -> None:
        if self._background.held_bytes + len(data) > ANSWERS_BYTES_MAX:
            raise Crowded(f"answers about responses have more than {ANSWERS_BYTES_MAX} bytes")
        self._background.held_bytes += len(data)
        await super().body(data)


class Background:
    """Follows responses; one for the process."""

    def __init__(self, upstream: Upstream, seconds_max: float) -> None:
        """`seconds_max`: a response that takes longer is ended."""
        self._upstream = upstream
        self._seconds_max = seconds_max
        self.held_bytes = 0
        """Of answers that are being received."""

    async def attend(self, place: Place, passing: Coroutine[Any, Any, None], call: Call) -> Progress | None:
        """Have the events of a response passed on, and return when it is over: what was seen of it then, None where its
        events have told all.

        The client may leave, the engine goes on.  Its events are read on, for they tell its end first, and a failure
        only they; not if the client is still there and has stopped to read, since then they cannot be.

        `passing` passes them on.  What it raises is raised here, but for a connection that breaks when nobody is there.
        """
        stream = asyncio.create_task(passing)
        begun = asyncio.Event()
        over = asyncio.create_task(self.follow(place, begun))

        def leave() -> None:
            if call.writing_since is not None or over.done():
                stream.cancel()

        call.on_heard, call.on_abandoned = begun.set, leave
        try:
            await asyncio.wait((stream, over), return_when=asyncio.FIRST_COMPLETED)
            if not stream.done() and over.result().failure is None and not call.abandoned:
                await asyncio.wait((stream,))  # the end is on its way
            if stream.done() and _told_all(stream, call):
                return None
            return await over  # a stream of vLLM's has no end when its response was cancelled
        finally:
            call.on_heard = call.on_abandoned = None
            stream.cancel()
            over.cancel()
            await asyncio.gather(stream, over, return_exceptions=True)

    async def follow(self, place: Place, begun: asyncio.Event | None = None) -> Progress:
        """Return when the response is over, or was ended: how it was seen last.  Raises nothing.

        `begun`: before that the engine may not know it.
        """
        if begun is not None:
            await begun.wait()
        loop = asyncio.get_running_loop()
        wait, ends_at, unreachable_since = POLL_SECONDS_MIN, loop.time() + self._seconds_max, None
        while (left := ends_at - loop.time()) > 0:
            await asyncio.sleep(min(wait, left))
            wait = min(wait * POLL_GROWTH, POLL_SECONDS_MAX)
            try:
                progress = await self._look(place)
            except UpstreamFailed as failed:
                now = loop.time()
                unreachable_since = (unreachable_since or now) if failed.connecting else None
                if unreachable_since is not None and now - unreachable_since >= UNREACHABLE_SECONDS:
                    return Progress()
                continue
            unreachable_since = None
            if progress.is_over:
                return progress
        await self.end(place)
        return Progress(CANCELLED)

    async def end(self, place: Place) -> bool:
        """Have the engine drop a response that it may have begun, and wait until it has.  True: nothing is left.

        Raises nothing.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + END_SECONDS
        while True:
            try:
                await self.ask(place.request("POST", "/cancel"))
                if (await self._look(place)).is_over:
                    return True
            except UpstreamFailed:
                pass
            if loop.time() >= ends_at:
                return False
            await asyncio.sleep(POLL_SECONDS_MIN)

    async def _look(self, place: Place) -> Progress:
        """How far it is; one that the engine does not know (any more) is over.  Raises UpstreamFailed."""
        found = await self.ask(place.request("GET"))
        if found.status == 404:
            return Progress()
        progress = progress_of(found.content) if found.status == 200 else None
        if progress is None:
            raise UpstreamFailed(f"the engine answered {found.status} and no response")
        return progress

    async def ask(self, request: UpstreamRequest) -> Collected:
        """The engine's answer to a question about a response.  Raises UpstreamFailed, and Crowded of them."""
        found = _Answer(self)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._upstream.exchange(request, found)
        except TimeoutError:
            raise UpstreamFailed("no answer about a response", timed_out=True) from None
        finally:
            self.held_bytes -= found.size
        return found


def _told_all(stream: "asyncio.Task[None]", call: Call) -> bool:
    """What was passed on is all that there is to know: nothing more is computed.  Raises what went wrong."""
    if stream.cancelled():
        return False
    failed = stream.exception()
    if failed is None:
        ended = call.relay is not None and call.relay.complete
        return ended or not call.outlives_client  # a whole answer may say that it was begun, or refused
    if call.abandoned and isinstance(failed, UpstreamFailed) and not failed.told:
        return False
    raise failed
