"""One engine's answer: parsed as it arrives and passed on from the socket's own callback.

A task switch for each token would cost more than the rest of the way, so the receiver's coroutine is run right where
the bytes arrive.  It nearly always finishes without suspending.  When the client reads too slowly it does suspend;
then the engine's socket is not read and the call's task waits for the rest of it.
"""

import asyncio
import time
import zlib
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any

import httptools

from gateway.core.headers import answer_headers
from gateway.deadline import Deadline
from gateway.steps import Begun
from gateway.upstream.api import Receiver, UpstreamFailed
from gateway.upstream.limits import HEAD_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, UpstreamLimits

PIECE_BYTES_MAX = 65_536
"""A compressed answer is decoded in pieces of this size, so that no engine can make a small one fill the memory."""

_DETAIL_CHARS_MAX = 200
_SIZE_DIGITS_MAX = 6
"""Of a chunk that is not parsed: more than one read of the socket gives."""
_GZIP = 31  # zlib's wbits for the gzip format
_CODINGS = {b"": None, b"identity": None, b"gzip": _GZIP, b"x-gzip": _GZIP, b"deflate": zlib.MAX_WBITS}
"""Content codings and zlib's name for them; engines are asked for identity."""


@lru_cache(maxsize=4096)
def _size_line(chunk_bytes: int) -> bytes:
    """How a chunk of so many bytes in all begins (RFC 9112, 7.1); empty where no chunk has so many, or no data."""
    for digits in range(1, _SIZE_DIGITS_MAX + 1):
        size = chunk_bytes - digits - len(b"\r\n\r\n")
        if 16 ** (digits - 1) <= size < 16**digits:
            return b"%x\r\n" % size
    return b""


class Exchange:
    """Reads one answer.  `feed`, `eof` and `lost` are the socket's side, `finish` the task's.

    The methods that begin with `on_` are httptools' interface.
    """

    __slots__ = (
        "__weakref__", "_between_chunks", "_chunks_came", "_closed", "_coding_bits", "_deadline", "_decoder",
        "_decoding", "_ended", "_error", "_failure", "_head_complete", "_head_passed", "_head_refused", "_headers",
        "_heard", "_idle_counts", "_keeps_alive", "_limit", "_limits", "_loop", "_parser", "_parts",
        "_receiver", "_status", "_streams", "_suspended", "_transport", "_unread_bytes", "_until_eof",
        "_whole_chunks", "_woken",
    )  # fmt: skip

    def __init__(
        self, transport: asyncio.Transport, receiver: Receiver, limits: UpstreamLimits, deadline: Deadline
    ) -> None:
        """`deadline` is the connection's; when it passes it calls `late`."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._receiver = receiver
        self._limits = limits
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._status = 0
        self._unread_bytes = 0
        """Of a head or of trailers, since the last byte that got anything further."""
        self._heard = False
        self._closed = False
        self._head_complete = False
        self._head_refused = False
        self._head_passed = False
        self._streams = False
        self._until_eof = False
        self._keeps_alive = False
        self._coding_bits: int | None = None
        self._decoder: Any = None
        self._decoding = False
        self._parts: list[bytes] = []
        self._between_chunks = False
        """The parser has read the end of a chunk, and no line since."""
        self._whole_chunks = False
        """The next chunk need not be parsed if it arrives undivided."""
        self._chunks_came = False
        """Such ones, which moved no deadline, since a limit last passed."""
        self._ended = False
        self._failure: UpstreamFailed | None = None
        self._error: BaseException | None = None
        self._suspended: Begun[None] | None = None
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._idle_counts = False
        self._limit = "no answer within", limits.headers_seconds
        """What the deadline stands for, in words and seconds."""
        self._deadline = deadline
        deadline.set(limits.headers_seconds)

    @property
    def reusable(self) -> bool:
        """The connection is at the beginning of a next answer."""
        clean = self._ended and self._keeps_alive and self._failure is None and self._error is None
        # A delivery that was not finished has left the socket unread, which nobody would undo.
        return clean and self._suspended is None and not self._transport.get_write_buffer_size()

    @property
    def unheard(self) -> bool:
        """The engine closed the connection in good order without a byte of an answer; a reset may follow work on it."""
        return self._closed and not self._heard

    async def finish(self) -> None:
        """Return at the answer's proper end, when all was passed on.

        Raises UpstreamFailed; what the receiver raises passes.
        """
        try:
            while True:
                await self._woken
                if self._suspended is not None:
                    await self._resume(self._suspended)
                if self._error is not None:
                    raise self._error
                if self._failure is not None:
                    raise self._failure
                if self._ended and self._cut_off:
                    raise UpstreamFailed("the compressed answer is cut off")
                if self._ended:
                    return
                self._woken = self._loop.create_future()
        finally:
            del self._parser  # it holds this object: the two would stay until the collector comes round
            self._deadline.clear()
            if self._suspended is not None:
                self._suspended.close()

    # -- the socket's side ---------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Begins with what nearly every token is, a chunk in one piece, in one function: before and after it the parser
        stands between two chunks, so it need not see it.
        """
        if self._whole_chunks:
            size_line = _size_line(len(data))
            if size_line and data.startswith(size_line) and data.endswith(b"\r\n"):
                try:
                    taken = self._receiver.take_chunk(data, len(size_line))
                except BaseException as error:
                    self._stop(error)
                    return
                if taken:
                    self._chunks_came = True
                    return
        if self._ended:
            self._keeps_alive = False  # nobody asked for this
            return
        self._parse(data)
        self._pass_on()
        # At the end of a line no size is half read: one that was read whole has moved the parser on.
        self._whole_chunks = self._between_chunks and data.endswith(b"\n") and self._runs_well

    def _parse(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the engine wants another protocol")
        except httptools.HttpParserError as error:
            if not self._ended:
                self._fail(f"{type(error).__name__}: {error}")
            self._keeps_alive = False
        self._unread_bytes = 0 if self._parts or self._ended else self._unread_bytes + len(data)
        if self._unread_bytes > HEAD_BYTES_MAX:
            self._refuse("the head or the trailers of the answer are too long")

    def lost(self, error: Exception | None) -> None:
        """The connection is gone, in good order or not: for an answer without a length that is its end."""
        self._keeps_alive = False
        self._closed = error is None
        if self._ended or self._failure is not None:
            return
        if self._until_eof and error is None:
            self._ended = True
        else:
            self._fail(f"{type(error).__name__}: {error}" if error else "the connection was closed too early")
        self._pass_on()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._ended:
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # a trailer
        self._headers.append((name.lower(), value))
        if len(self._headers) > HEADERS_MAX or len(name) + len(value) > HEADER_BYTES_MAX:
            self._refuse("the head of the answer is too long")

    def on_headers_complete(self) -> None:
        if self._ended:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._headers.clear()
            return
        self._head_complete = True
        self._status = status
        self._keeps_alive = self._parser.should_keep_alive()
        if status < 200 or 300 <= status < 400:
            self._refuse(f"it answers {status}")
            return
        self._read_head(dict(self._headers))

    def on_body(self, body: bytes) -> None:
        if not self._ended:
            self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._ended = self._ended or self._head_complete

    def _read_head(self, headers: dict[bytes, bytes]) -> None:
        limits = self._limits
        self._streams = headers.get(b"content-type", b"").partition(b";")[0].strip() == b"text/event-stream"
        framed = b"content-length" in headers or b"transfer-encoding" in headers
        self._until_eof = not framed and self._status != 204
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in _CODINGS:
            self._refuse("the answer has an unknown content encoding")
            return
        self._coding_bits = _CODINGS[coding]
        self._decoder = None if self._coding_bits is None else zlib.decompressobj(self._coding_bits)
        if self._streams:
            self._limit = "no first event within", limits.first_event_seconds
            self._deadline.set(limits.first_event_seconds)

    # -- passing on ----------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Give the receiver what is there, and the task its end when all was given."""
        if self._suspended is not None or self._error is not None:
            return
        if self._parts and self._head_passed and self._decoder is None:
            self._offer()
        if self._head_complete and not self._head_refused and (self._parts or not self._head_passed):
            self._begin(self._deliver())
        if self._ended or self._failure is not None:
            self._wake()

    def _offer(self) -> None:
        """What nearly all events need."""
        parts = self._parts
        try:
            taken = self._receiver.take(parts[0] if len(parts) == 1 else b"".join(parts))
        except BaseException as error:
            self._parts.clear()
            self._stop(error)
            return
        if taken:
            self._parts.clear()
            self._note_progress()

    @property
    def _runs_well(self) -> bool:
        """An answer that has begun and is not compressed, all of it passed on, so that its idle limit counts."""
        stopped = self._ended or self._suspended or self._failure or self._error
        return not stopped and self._idle_counts and self._decoder is None

    @property
    def _cut_off(self) -> bool:
        """A compressed answer has its end in itself."""
        return self._decoding and not self._decoder.eof

    def _begin(self, delivery: Coroutine[Any, None, None]) -> None:
        """Run the delivery as far as it goes without waiting."""
        try:
            begun = Begun(delivery)
        except BaseException as error:
            self._stop(error)
            return
        if not begun.suspended:
            self._note_progress()
            return
        self._suspended = begun
        self._deadline.clear()
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._wake()

    async def _resume(self, delivery: Begun[None]) -> None:
        """Finish in the task what was begun outside; meanwhile no limit runs, the receiver bounds its own waits."""
        await delivery.rest()
        self._suspended = None
        self._note_progress()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    async def _deliver(self) -> None:
        if not self._head_passed:
            self._head_passed = True
            await self._receiver.head(self._status, answer_headers(self._headers))
        while self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            if self._decoder is None:
                await self._receiver.body(data)
            else:
                await self._decode(data)

    async def _decode(self, data: bytes) -> None:
        self._decoding = True
        try:
            while data:
                piece = self._decoder.decompress(data, PIECE_BYTES_MAX)
                data = self._decoder.unconsumed_tail
                if piece:
                    await self._receiver.body(piece)
                if self._decoder.unused_data:  # gzip may come in several members
                    data = self._decoder.unused_data
                    self._decoder = zlib.decompressobj(self._coding_bits or _GZIP)
        except zlib.error as error:
            raise UpstreamFailed(f"the answer cannot be decoded: {error}") from error

    # -- ends and limits -----------------------------------------------------------------------------------------

    def _fail(self, detail: str, *, timed_out: bool = False) -> None:
        if self._failure is None:
            self._failure = UpstreamFailed(detail[:_DETAIL_CHARS_MAX], timed_out=timed_out)

    def _refuse(self, detail: str) -> None:
        """A head that nothing of is passed on."""
        self._head_refused = True
        self._fail(detail)

    def _stop(self, error: BaseException) -> None:
        """The receiver has raised."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        """Nothing goes past what the task has to see."""
        self._whole_chunks = False
        if not self._woken.done():
            self._woken.set_result(None)

    def _note_progress(self) -> None:
        """Between the pieces of a body the idle limit counts; before a stream's first data event another one does."""
        if self._ended:
            return
        if not self._idle_counts and self._head_passed and (not self._streams or self._receiver.started):
            self._idle_counts = True
            self._limit = "nothing for", self._limits.idle_seconds
        if self._idle_counts:
            self._deadline.set(self._limits.idle_seconds)
        elif not self._deadline.is_set:
            self._deadline.set(self._limits.first_event_seconds)

    def late(self) -> None:
        """The limit that counts now has passed, unless chunks have come since that moved no deadline."""
        if self._ended:
            return
        if self._chunks_came:
            self._chunks_came = False
            seconds_left = self._receiver.last_at + self._limits.idle_seconds - time.monotonic()
            if seconds_left > 0:
                self._deadline.set(seconds_left)
                return
        words, seconds = self._limit
        self._fail(f"{words} {seconds:g} s", timed_out=True)
        self._wake()
