"""An engine's answer on its way to the client: bytes untouched, judged as they pass.

Nothing is written before the first data event of a stream, or the end of any other answer, was seen: an engine reports
failure as success, and while nothing was forwarded the call can be tried elsewhere.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

from gateway.call import Call
from gateway.core.events import FirstToken, Observer
from gateway.core.forecast import Course
from gateway.core.lifecycle import Event
from gateway.core.messages import MessagesInspector, inspect_message
from gateway.core.request import Dialect, Endpoint
from gateway.core.responses import ResponsesInspector, inspect_response
from gateway.core.rests import read_retry_after
from gateway.core.sse import AnswerFacts, Failure, StreamInspector, inspect_answer
from gateway.http.errors import late_error
from gateway.http.gaps import AllGaps, Gaps
from gateway.metering import Meter
from gateway.steps import Begun
from gateway.upstream.api import Headers, Trouble, UpstreamFailed

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""Of an answer that is no stream, held until its end to be judged; a longer one is passed on unjudged."""
SIGHT_SECONDS = 0.1
"""That the engine of an elastic call may be left unread before the call holds all of its demand.  A write only waits
when all buffers on the way to its client are full, so no hiccup of a network leads there."""
WRITER = "kvgate.writer"
"""The extension of ASGI's scope that has a `Writer`."""
_ERROR_MEMBER = re.compile(rb'"error"\s*:')
"""Old engines write `{"object": "error", ...}`, which an OpenAI SDK takes for a part of the answer."""


_TOLD = frozenset({Failure.ERROR, Failure.BUSY, Failure.ABORTED, Failure.EMPTY})
_TROUBLES = {
    Failure.ABORTED: Trouble.ENDING,
    Failure.EMPTY: Trouble.ENDING,
    Failure.BUSY: Trouble.BUSY,
}


class AnswerCutOff(Exception):
    """An answer that is no stream broke after its head was sent: only closing the connection tells the client."""


class Writer(Protocol):
    """The client's connection, for what needs no waiting; a server that has none is written to through ASGI alone."""

    @property
    def ready(self) -> bool:
        """The answer has begun, and its client is there and reads."""
        ...

    def write(self, body: bytes) -> None:
        """More of the body.  Only when `ready`."""
        ...

    @property
    def chunk_to(self) -> Callable[[bytes], None] | None:
        """Takes more of the body as one chunk in HTTP's chunked coding; None where that is not used, or not `ready`."""
        ...

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """All of an answer that has not begun, headers with the body's length.  False: nothing was taken, it has to go
        through ASGI, which may have to wait."""
        ...


class Opening(Protocol):
    """Who may have begun the client's answer before there was one of an engine."""

    async def take_over(self) -> bool:
        """From now on the answer is the relay's; whether its head was sent, with status 200."""
        ...


class AnswerRelay:
    """Implements `Relay` for one attempt."""

    __slots__ = (
        "_all_gaps", "_at_once", "_call", "_first_at", "_first_token", "_gaps", "_headers", "_held", "_media_type",
        "_meter", "_observer", "_opening", "_own_headers", "_send", "_status", "_stream", "_writer", "last_at",
        "rest_seconds",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        send: Send,
        writer: Writer | None,
        own_headers: Headers,
        first_token: Callable[[], None],
        observer: Observer,
        opening: Opening | None = None,
        all_gaps: AllGaps | None = None,
    ) -> None:
        """`all_gaps`: where the times between tokens are gathered; None = the stream's own."""
        self._call = call
        self._send = send
        self._writer = writer
        self._own_headers = own_headers
        self._first_token = first_token
        self._observer = observer
        self._opening = opening
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._media_type = b""
        self._stream: StreamInspector | None = None
        self._at_once = False
        """A stream of which nothing is known: nothing of it is held back."""
        self._held = bytearray()
        self._first_at = 0.0
        self.last_at = 0.0
        self._all_gaps = all_gaps or AllGaps(observer)
        self._meter: Meter | None = None
        """The call's, of a stream; the call itself is not looked at for each token."""
        self._gaps: Gaps | None = None
        """From the first token on."""
        self.rest_seconds: float | None = None

    @property
    def started(self) -> bool:
        return self._stream is None or self._stream.started

    @property
    def complete(self) -> bool:
        """The stream has ended for the client, whatever the connection does afterwards."""
        return self._stream is not None and self._stream.done and self._stream.failure is None

    @property
    def relayable_failure(self) -> bytes:
        """The engine's own error event, for a stream that it ended with one in the form that clients look for."""
        failure = self._stream.relayable_failure if self._stream else b""
        return failure if _ERROR_MEMBER.search(failure) else b""

    @property
    def course(self) -> Course | None:
        if self._stream is None or self._gaps is None:
            return None
        return Course(self._stream.events, self._first_at, self.last_at)

    @property
    def ended_of_itself(self) -> bool:
        return (
            self.complete and self._stream is not None and self._stream.finish_reason not in (None, "length")
        )

    @property
    def streams(self) -> bool:
        return self._stream is not None

    @property
    def _is_anthropics(self) -> bool:
        return self._call.request.dialect is Dialect.ANTHROPIC

    @property
    def _judges(self) -> bool:
        """Of a call that holds no blocks the answer is the engine's affair."""
        return self._call.request.holds_blocks

    @property
    def _is_response(self) -> bool:
        return self._call.request.path == Endpoint.RESPONSES

    def _inspect(self, body: bytes) -> AnswerFacts:
        if self._is_response:
            return inspect_response(body)
        if self._is_anthropics:
            return inspect_message(body)
        facts = inspect_answer(body)
        if facts.failure is not Failure.NOT_JSON or self._call.generation.sound is None:
            return facts
        is_plain = not self._media_type.startswith(b"application/json")
        return AnswerFacts(None, None) if is_plain else facts  # subtitles, or the text alone

    def _inspector(self) -> StreamInspector:
        if self._is_anthropics:
            return MessagesInspector()
        if self._is_response:
            return ResponsesInspector()
        request, self._meter = self._call.request, self._call.meter
        metered = self._meter is not None
        return StreamInspector(
            drop_usage=not request.include_usage_asked,
            metered=metered,
            cut_usage=metered and not request.meter_asked,
        )

    async def head(self, status: int, headers: Headers) -> None:
        named = dict(headers)
        if retry_after := named.get(b"retry-after"):
            self.rest_seconds = read_retry_after(retry_after, time.time())
        if status >= 500 and self._call.request.repeatable:
            trouble = Trouble.BUSY if status == 503 else Trouble.BROKEN
            raise UpstreamFailed(
                f"the engine answered {status}", trouble=trouble, rest_seconds=self.rest_seconds
            )
        self._status = status
        self._headers = list(headers)
        self._media_type = named.get(b"content-type", b"")
        if self._media_type.startswith(b"text/event-stream"):
            self._at_once = not self._judges
            self._stream = self._inspector() if status == 200 and self._judges else None

    def take(self, data: bytes) -> bool:
        stream, writer, call = self._stream, self._writer, self._call
        if writer is None or stream is None or not call.status or not writer.ready:
            return False
        events_before = stream.events
        forward = stream.feed(data)
        call.usage, call.output_events = stream.usage, stream.events
        self._note_usage(stream)
        self._note_event(True, stream.events - events_before)
        if forward:
            writer.write(forward)
        if stream.failure:
            raise _failed(stream.failure)
        return True

    def take_chunk(self, chunk: bytes, start: int) -> bool:
        stream, writer, gaps = self._stream, self._writer, self._gaps
        if writer is None or stream is None or gaps is None:
            return False
        write = writer.chunk_to
        if write is None:
            return False
        if stream.metered:
            end = len(chunk) - 2
            event = stream.passes_metered(chunk, start, end)
            if event is None:
                return False
            meter = self._meter
            if meter is not None and stream.written >= meter.due:
                self._note_usage(stream)
            if len(event) != end - start:
                chunk = b"%x\r\n%b\r\n" % (len(event), event)
        elif not stream.passes(chunk, start, len(chunk) - 2):
            return False
        write(chunk)
        self.last_at = gaps.next(self.last_at)
        return True

    def _note_usage(self, stream: StreamInspector) -> None:
        meter, usage = self._meter, stream.usage
        if meter is None:
            return
        if stream.unmetered:
            meter.lose()
        elif usage is not None and (usage.completion_tokens or 0) >= meter.due:
            meter.note(usage)

    async def body(self, data: bytes) -> None:
        if self._stream is None:
            return await self._hold(data)
        stream = self._stream
        events_before, started_before = stream.events, stream.started
        forward = stream.feed(data)
        self._call.usage, self._call.output_events = stream.usage, stream.events
        self._note_usage(stream)
        if not stream.started:
            self._held += forward[: stream.opening_bytes_max - len(self._held)]
        elif started_before:
            self._note_event(True, stream.events - events_before)
            await self._forward(forward)
        else:
            await self._forward_first(forward)
        if stream.failure:
            raise _failed(stream.failure)

    async def _forward_first(self, data: bytes) -> None:
        """The first token leaves before it is told of, which may be a write to the store; a client that does not read
        delays nobody who waits for that."""
        leaving = Begun(self._forward(data))
        try:
            self._note_event(False, 1)
            await leaving.rest()
        finally:
            leaving.close()

    async def finish(self) -> None:
        if self._stream is None:
            await self._finish_whole()
        else:
            rest = self._stream.finish()
            if self._stream.failure:
                raise _failed(self._stream.failure)
            await self._forward(rest)
            await self._write({"type": "http.response.body", "body": b""})
        self._call.hear()
        self._call.answered = True

    async def _hold(self, data: bytes) -> None:
        if self._call.status or self._at_once:
            return await self._forward(data)
        self._held += data
        if len(self._held) > ANSWER_BYTES_MAX:
            await self._forward(b"")

    async def _finish_whole(self) -> None:
        if self._call.status:
            return await self._write({"type": "http.response.body", "body": b""})
        body = bytes(self._held)
        if self._status == 200 and self._judges:
            self._judge(body)
        if self._opening and await self._opening.take_over():
            return await self._finish_late(body)
        self._headers.append((b"content-length", b"%d" % len(body)))
        headers = [*self._headers, *self._own_headers]
        if self._writer is not None and self._writer.answer(self._status, headers, body):
            self._note_begun()
        else:
            await self._begin()
            await self._write({"type": "http.response.body", "body": body})
        return None

    def _judge(self, body: bytes) -> None:
        """Raises UpstreamFailed."""
        call = self._call
        generates = call.generation.endpoint.generates
        if not generates and self._media_type.startswith(b"application/octet-stream"):
            return  # embeddings as bytes, which say nothing of themselves
        facts = self._inspect(body)
        if facts.failure:
            raise _failed(facts.failure)
        call.usage = facts.usage
        if facts.usage and not generates:  # of scores no output is told at all
            call.usage = msgspec.structs.replace(facts.usage, completion_tokens=0)

    async def _forward(self, data: bytes) -> None:
        if not self._call.status:
            await self._begin()
            data = bytes(self._held) + data
            self._held.clear()
        if data:
            await self._write({"type": "http.response.body", "body": data, "more_body": True})
            self._call.hear()

    async def _finish_late(self, body: bytes) -> None:
        """The client was told 200 for a stream, and the engine has another answer: an error is told by an event."""
        if self._status < 400:
            raise UpstreamFailed("the engine's answer to a stream is none")
        self._call.status = self._status
        self._call.advance(Event.FORWARDED)
        event = late_error(self._status, body, self._call.request.dialect)
        await self._write({"type": "http.response.body", "body": event})

    async def _begin(self) -> None:
        begun = self._opening is not None and await self._opening.take_over()
        if begun and self._stream is None:
            raise UpstreamFailed("the engine's answer to a stream is none, and long")
        self._note_begun()
        if begun:
            return
        headers = [*self._headers, *self._own_headers]
        await self._write({"type": "http.response.start", "status": self._status, "headers": headers})

    def _note_begun(self) -> None:
        self._call.status = self._status
        self._call.advance(Event.FORWARDED)

    async def _write(self, message: MutableMapping[str, Any]) -> None:
        """Suspends while the client reads too slowly; who watches the call ends it when that takes too long.

        The engine is not read meanwhile, and writes on unless it is done: what it has written is not known any more.
        """
        call, unseen = self._call, None
        call.writing_since = time.monotonic()
        if call.meter is not None and not self.complete:
            unseen = asyncio.get_running_loop().call_later(SIGHT_SECONDS, call.meter.lose_sight)
        try:
            await self._send(message)
        finally:
            if unseen is not None:
                unseen.cancel()
        call.writing_since = None

    def _note_event(self, started_before: bool, events: int) -> None:
        if started_before:
            if events and self._gaps is not None:
                self.last_at = self._gaps.next(self.last_at)
            return
        now = time.monotonic()
        self._first_token()
        call = self._call
        ttft_ms = (now - call.started) * 1000
        place = call.fleet.name, self._pool(), call.terms.class_
        self._observer(FirstToken(*place, ttft_ms))
        self._gaps = self._all_gaps.of(*place)
        self._first_at = self.last_at = now

    def report(self) -> None:
        """Tell of the tokens since the last report: the call how many, telemetry the times between them.

        Whoever ends the answer asks for the rest.
        """
        if self._stream is not None:
            self._call.usage, self._call.output_events = self._stream.usage, self._stream.events
        if self._gaps is not None:
            self._gaps.report()

    def _pool(self) -> str:
        call = self._call
        return call.fleet.engines.pool(call.grant.replica) if call.grant else ""


def _failed(failure: Failure) -> UpstreamFailed:
    trouble = _TROUBLES.get(failure, Trouble.BROKEN)
    return UpstreamFailed(failure, trouble=trouble, told=failure in _TOLD)
