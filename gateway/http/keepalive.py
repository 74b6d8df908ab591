"""Comments to a stream that waits, so that nobody on its way takes it for dead (`answers.keepalive_seconds`).

With the first of them the status of the answer is 200: what goes wrong afterwards is told by an event.  A call can
still be tried elsewhere, because nothing of an engine's answer was passed on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.call import Call
from gateway.http.relay import Writer

Message = MutableMapping[str, Any]
log = logging.getLogger(__name__)
COMMENT = b": keep-alive\n\n"
"""As vLLM's own (`--sse-keep-alive-interval`)."""


class KeepAlive:
    """For one stream.  Whoever made it calls `close` when the answer is over.

    Until `take_over` it writes through ASGI, head included.  From then on it uses only the connection's own writer,
    which never waits, so that a comment stands between two events and never inside one.
    """

    def __init__(
        self,
        call: Call,
        seconds: float,
        begin: Callable[[], Message],
        send: Callable[[Message], Awaitable[None]],
        writer: Writer | None,
    ) -> None:
        """`begin`: the head of the answer, made when it is sent.  `seconds`: the longest silence, above 0."""
        self._call = call
        self._seconds = seconds
        self._begin = begin
        self._send = send
        self._writer = writer
        self._writing = asyncio.Lock()
        self._taken = False
        self._last = call.started
        self.opened = False
        """The head was sent, with status 200."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_tell)

    async def take_over(self) -> bool:
        """The answer itself begins: returns whether its head was sent already, which it will not be any more."""
        async with self._writing:
            self._taken = True
        return self.opened

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            silence = time.monotonic() - self._last_byte()
            if silence < self._seconds:
                await asyncio.sleep(self._seconds - silence)
                continue
            self._last = time.monotonic()
            async with self._writing:
                if not self._taken:
                    await self._open()
            if self._taken and self._writer is not None and self._writer.ready:
                self._writer.write(COMMENT)

    def _last_byte(self) -> float:
        """When the client was written to; of several events in one piece the last one counts."""
        course = self._call.course()
        return self._last if course is None else max(self._last, course.last_at)

    async def _open(self) -> None:
        """Suspends while the client reads too slowly; who watches the call ends it when that takes too long."""
        call = self._call
        call.writing_since = time.monotonic()
        if not self.opened:
            self.opened = True
            await self._send(self._begin())
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        call.writing_since = None


def _tell(task: "asyncio.Task[None]") -> None:
    """The answer goes on without comments."""
    if not task.cancelled() and (error := task.exception()):
        log.error("comments to a stream have ended", exc_info=error)
