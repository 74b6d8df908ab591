"""One attempt on the wire: its time-out, its tokens and gaps, and how it ended."""

import asyncio
import time

import httptools

from gateway.loadtest.answers import BadAnswer, EventStream, WholeAnswer, error_code
from gateway.loadtest.records import Attempt, End, Recording
from gateway.loadtest.wire import Connection

QUEUE_MS_DIGITS_MAX = 12
REFUSAL_BYTES_MAX = 1 << 20
"""More of an error's body is not kept."""


class Notes:
    """Where exchanges note what happens, on one time axis."""

    def __init__(self, recording: Recording, start: float) -> None:
        """`start` is the run's zero by `time.monotonic`, which is one clock for all processes of a machine."""
        self.recording = recording
        self.start = start
        self.streaming = 0
        """Streams between their first token and their end."""
        self._gaps = recording.gaps.seconds
        self._tokens = recording.tokens
        self._last_second = len(self._gaps) - 1

    def token(self, at: float, gap: float | None, count: int) -> None:
        """`count` token events that came with one read; only the first has a gap before it."""
        second = min(int(at), self._last_second)
        self._tokens[second] += count
        gaps = self._gaps[second]
        if gap is not None:
            gaps.append(gap)
        if count > 1:
            gaps.extend([0.0] * (count - 1))

    def unpaced_tokens(self, at: float, count: int) -> None:
        """Tokens whose gaps are the client's own doing."""
        self._tokens[min(int(at), self._last_second)] += count


class Exchange:
    """The reader of one answer.  `done` resolves when the attempt has ended; `abandon` may end it at any time.

    The time-out is that of HTTP clients, the longest wait for the next byte.  One timer per attempt is set again only
    when it fires, so that a token costs no timer.
    """

    def __init__(
        self, attempt: Attempt, notes: Notes, *, stream: bool, timeout_seconds: float, leave_after: int | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.now = time.monotonic()
        self.done: asyncio.Future[None] = loop.create_future()
        self.headers: dict[str, str] = {}
        self._loop = loop
        self._attempt = attempt
        self._notes = notes
        self._answer = EventStream() if stream else WholeAnswer()
        self._leave_after = leave_after
        self._timeout_seconds = timeout_seconds
        self._read_seconds = 0.0
        self._waiting_to_read: asyncio.TimerHandle | None = None
        self._refusal: bytearray | None = None
        self._last_token: float | None = None
        self._over = False
        self._connection: Connection | None = None
        self._timer = loop.call_later(timeout_seconds, self._check_time)

    def begin(self, connection: Connection, request: bytes, read_seconds: float) -> None:
        """Send the request; `read_seconds` above 0 makes a client that reads slowly."""
        self.now = time.monotonic()
        self._attempt.sent_at = self.now - self._notes.start
        self._connection = connection
        self._read_seconds = read_seconds
        if read_seconds:
            connection.read_slowly()
        connection.send(request, self)

    def abandon(self) -> None:
        """The run is over."""
        self._finish(End.STOPPED, "", broken=True)

    # What the connection calls

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        attempt = self._attempt
        attempt.status = status
        attempt.headers_at = self.now - self._notes.start
        self.headers = headers
        queue_ms = headers.get("x-kvgate-queue-ms", "")
        attempt.queue_ms = int(queue_ms[:QUEUE_MS_DIGITS_MAX]) if queue_ms.isdecimal() else None
        if status != 200:
            self._refusal = bytearray()

    def on_body(self, data: bytes) -> None:
        if self._refusal is not None:
            self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
            return
        if self._over:
            return  # the rest of the read in which a client left
        try:
            count = self._answer.feed(data)
        except BadAnswer as error:
            self._finish(End.FAILED, str(error), broken=True)
            return
        if count:
            self._take_tokens(count)
        if self._read_seconds:
            self._rest()

    def on_end(self) -> None:
        if self._refusal is not None:
            reason = self.headers.get("x-kvgate-reason", "")
            code = error_code(self._attempt.status, reason, bytes(self._refusal))
            self._finish(End.REFUSED, code, broken=False)
            return
        try:
            problem = self._answer.problem()
        except BadAnswer as error:
            problem = str(error)
        self._finish(End.FAILED if problem else End.ANSWERED, problem, broken=bool(problem))

    def on_lost(self, error: Exception | None) -> None:
        """Closed or reset before the end, or bytes that are no HTTP.  After `[DONE]` no client looks any more."""
        if self._refusal is None and self._attempt.first_token_at is not None and not self._answer.problem():
            self._finish(End.ANSWERED, "", broken=False)
            return
        if error is not None and not isinstance(error, OSError):
            own = isinstance(error, httptools.HttpParserCallbackError)
            reason = "own_error" if own else "not_http"
        else:
            how = "reset" if error else "cut"
            reason = f"{how}_{'before_headers' if self._attempt.headers_at is None else 'in_answer'}"
        self._finish(End.FAILED, reason, broken=True)

    # Inside

    def _take_tokens(self, count: int) -> None:
        now, last, attempt = self.now, self._last_token, self._attempt
        at = now - self._notes.start
        attempt.events += count
        self._last_token = now
        if last is None:
            attempt.first_token_at = at
            self._notes.streaming += 1
        if self._read_seconds:
            self._notes.unpaced_tokens(at, count)
        elif last is None:
            self._notes.token(at, None, count)
        else:
            gap = now - last
            attempt.worst_gap = max(attempt.worst_gap, gap)
            self._notes.token(at, gap, count)
        if self._leave_after is not None and attempt.events >= self._leave_after:
            self._finish(End.LEFT, "", broken=False)

    def _rest(self) -> None:
        """Read nothing for a while."""
        if self._waiting_to_read is None and self._connection is not None:
            self._connection.pause()
            self._waiting_to_read = self._loop.call_later(self._read_seconds, self._read_again)

    def _read_again(self) -> None:
        self._waiting_to_read = None
        if self._connection is not None:
            self._connection.resume()

    def _check_time(self) -> None:
        left = self.now + self._timeout_seconds - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_time)
            return
        attempt = self._attempt
        stage = "headers" if attempt.headers_at is None else "first_token"
        if attempt.first_token_at is not None:
            stage = "between_tokens"
        self._finish(End.TIMED_OUT, stage, broken=True)

    def _finish(self, end: End, reason: str, *, broken: bool) -> None:
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        if self._waiting_to_read is not None:
            self._waiting_to_read.cancel()
        attempt, start = self._attempt, self._notes.start
        ended = time.monotonic()
        attempt.end, attempt.reason, attempt.ended = end, reason, ended - start
        attempt.tokens = self._answer.usage_tokens or attempt.events
        if self._last_token is not None:
            self._notes.streaming -= 1
            if broken and not self._read_seconds:
                self._leave_gap_open(ended)
        connection, self._connection = self._connection, None
        if connection is not None and end not in (End.ANSWERED, End.REFUSED):
            connection.close()
        if not self.done.done():  # a caller that is cancelled has cancelled it
            self.done.set_result(None)

    def _leave_gap_open(self, ended: float) -> None:
        assert self._last_token is not None
        gap = ended - self._last_token
        self._notes.recording.open_gaps.add(ended - self._notes.start, gap)
        self._attempt.worst_gap = max(self._attempt.worst_gap, gap)
