"""The call log: one line of JSON for every finished call, refused ones too, in a file that several processes share.

Bills and audits are made of it, so nothing is lost silently: what could not be written is counted, and the log itself
says how many calls are missing once it goes on.  The event loop only puts a call into a bounded queue; a thread does
the rest.  Of what a client sent a line has the route, the model's name and the request id, nothing else.
"""

import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core.events import CallEnded, Event
from gateway.core.outcomes import Outcome

log = logging.getLogger("kvgate.calllog")

CALLS_MAX = 20_000
"""Calls that wait for a slow disk: about 20 MB."""
BATCH_CALLS_MAX = 64
"""Of one write.  Making them up keeps the interpreter from the event loop for half a millisecond at most."""
FLUSH_SECONDS = 0.1
"""How late a line may be.  Waking the thread for each call would cost the event loop more than everything else here."""
FOLLOW_SECONDS = 1.0
"""Between two looks whether the file was moved away."""
COMPLAIN_SECONDS = 60.0
ALONE_SECONDS = 0.5
"""For another process to end its write, which takes it well under a millisecond."""
ALONE_POLL_SECONDS = 0.001
CLOSE_SECONDS = 3.0
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
"""Reading is for the last byte; and opening a pipe to write only would wait for its reader."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Amount = Annotated[float, Meta(ge=0, lt=2.0**53)]
Moment = Annotated[datetime, Meta(tz=True)]
Batch = list[tuple[float, CallEnded]]
"""Calls, each with the time when it was seen to end, in seconds since the epoch."""


class CallLine(msgspec.Struct, frozen=True, kw_only=True):
    """One call.  Every line has every field; null is what was not known of the call, or does not apply to it."""

    time: Moment
    """When it ended."""
    seconds: Amount
    """From the last byte of its body to its end."""
    request_id: str
    route: str
    model: str | None
    """As the client asked for it; the fleet's where it named none."""
    fleet: str | None
    key: str | None
    """Its configured name; null where no valid one came."""
    group: str | None
    class_: str | None = msgspec.field(name="class")
    lane: str | None
    pool: str | None
    replica: str | None
    outcome: Outcome
    reason: str | None
    status: Count
    retry_ms: Count | None
    """When to come back, as the client was told."""
    queue_ms: Amount
    prompt_tokens: Count | None
    prompt_estimated: bool
    """They are kvgate's own estimate, because the engine reported none."""
    cached_tokens: Count | None
    """Of the prompt's, where the engine tells."""
    output_tokens: Count | None
    output_estimated: bool
    reserved_blocks: Count
    shared_blocks: Count = 0
    """Of these, those that others held as well when it was admitted."""
    block_seconds: Amount
    """These blocks x the seconds for which they were held."""
    charged: bool
    """Its tokens count against its key."""


class LostLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the log says of calls that it does not have."""

    time: Moment
    lost: Count


def line_of(ended_at: float, event: CallEnded) -> CallLine:
    """`ended_at`: seconds since the epoch."""
    prompt, output = event.prompt_tokens, event.output_tokens
    prompt_estimate = event.prompt_tokens_estimated or None
    output_estimate = event.output_tokens_estimated if event.charged else None
    return CallLine(
        time=_moment(ended_at),
        seconds=round(event.duration_ms / 1000, 6),
        request_id=event.request_id,
        route=event.route,
        model=_utf8(event.model) or None,
        fleet=event.fleet or None,
        key=event.key or None,
        group=event.group or None,
        class_=event.class_ or None,
        lane=event.lane or None,
        pool=event.pool or None,
        replica=event.replica or None,
        outcome=event.outcome,
        reason=event.reason,
        status=event.status,
        retry_ms=event.retry_ms,
        queue_ms=round(event.queue_ms, 3),
        prompt_tokens=prompt_estimate if prompt is None else prompt,
        prompt_estimated=prompt is None and prompt_estimate is not None,
        cached_tokens=event.cached_tokens,
        output_tokens=output_estimate if output is None else output,
        output_estimated=output is None and output_estimate is not None,
        reserved_blocks=event.reserved_blocks,
        shared_blocks=event.shared_blocks,
        block_seconds=round(event.reserved_blocks * event.held_seconds, 3),
        charged=event.charged,
    )


def _moment(seconds: float) -> datetime:
    """To the millisecond."""
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def _utf8(text: str) -> str:
    """A client may write half a surrogate pair, which is none."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class CallLog:
    """An observer, and the thread that writes what it saw.  One for the process."""

    def __init__(
        self,
        path: Path,
        calls_max: int = CALLS_MAX,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: seconds since the epoch; `clock`: seconds that never go back."""
        self._file = SharedFile(path, clock)
        self._calls_max = calls_max
        self._now = now
        self._clock = clock
        self._waiting: deque[tuple[float, CallEnded]] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgate-calllog", daemon=True)
        self._encoder = msgspec.json.Encoder()
        # Each of the two has one thread that writes it, so neither needs a lock.
        self._dropped = 0
        self._unwritten = 0
        self._told = 0
        """Of the lost calls those that the file tells of."""
        self._complained = 0
        """Of the lost calls those that the process's own log tells of."""
        self._complained_at = -COMPLAIN_SECONDS

    @property
    def lost(self) -> int:
        """Calls that the file does not have."""
        return self._dropped + self._unwritten

    def __call__(self, event: Event) -> None:
        if type(event) is not CallEnded:
            return
        if len(self._waiting) < self._calls_max:
            self._waiting.append((self._now(), event))
        else:
            self._dropped += 1

    def start(self) -> None:
        """Write from now on.  A file that cannot be written is told in the process's log, and tried again."""
        self._thread.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits; blocks, for at most so long."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._waiting:
            log.error("%s: %d calls could not be written in time", self._file.path, len(self._waiting))

    # -- the thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError):  # told by the first flush
            self._file.open()
        while not self._closed.wait(FLUSH_SECONDS):
            self.flush()
        self.flush()
        if self.lost > self._told:
            self._write([])
        self._file.close()

    def flush(self) -> None:
        """Write what waits.  Not for two threads."""
        while self._waiting:
            count = min(len(self._waiting), BATCH_CALLS_MAX)
            self._write([self._waiting.popleft() for _ in range(count)])
            self._complain()  # under a load that never lets it come to an end, too
        self._complain()

    def _write(self, batch: Batch) -> None:
        """One write: how many calls are missing before these, where it was not told yet, and these."""
        lost = self.lost
        told = [LostLine(time=_moment(self._now()), lost=lost - self._told)] if lost > self._told else []
        try:
            lines = self._encoder.encode_lines([*told, *(line_of(*call) for call in batch)])
            written = self._file.append(lines)
        except OSError:
            written = 0
        except Exception:  # a bug of ours must cost these calls only
            log.exception("calls cannot be written as lines")
            written = 0
        if told and written:
            self._told = lost
            written -= 1
        self._unwritten += len(batch) - written

    def _complain(self) -> None:
        lost, now = self.lost, self._clock()
        if not self._file.problem and lost == self._complained:
            return
        if now - self._complained_at < COMPLAIN_SECONDS:
            return
        self._complained, self._complained_at = lost, now
        problem = self._file.problem or "not all calls could be written in time"
        log.error("%s: %s; %d calls are missing in it since the start", self._file.path, problem, lost)


class SharedFile:
    """A file that whole lines are appended to, by several processes, under a name that may come to mean another file.

    Appending is one write at the end of the file, which a local file system does not interleave with others.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self.problem = ""
        """Why the last attempt failed; empty when it did not."""
        self._clock = clock
        self._descriptor: int | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode."""
        self._looked_at = 0.0

    def append(self, lines: bytes) -> int:
        """How many whole lines are in the file now: fewer than were given when the disk is full.  Raises OSError.

        A line that somebody left unfinished is ended first, so that it takes none of these with it.
        """
        descriptor = self._current()
        try:
            with _alone(descriptor, self._clock):
                ended = _ends_whole(descriptor)
                data = lines if ended else b"\n" + lines
                written = os.write(descriptor, data)
        except OSError as error:
            self.close()
            self._fail(error)
            raise
        if written < len(data):
            self.problem = "only a part of the lines could be written"
        return data.count(b"\n", 0 if ended else 1, written)

    def open(self) -> None:
        """Make the file if it is not there, readable by its owner alone.  Raises OSError."""
        try:
            descriptor = os.open(self.path, _FLAGS, 0o600)
        except OSError as error:
            self._fail(error)
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self.problem = "it is no file"
            raise OSError(self.problem)
        self.close()
        self.problem = ""
        self._descriptor, self._file = descriptor, (status.st_dev, status.st_ino)
        self._looked_at = self._clock()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _current(self) -> int:
        if self._descriptor is not None and self._clock() - self._looked_at >= FOLLOW_SECONDS:
            self._follow()
        if self._descriptor is None:
            self.open()
        assert self._descriptor is not None
        return self._descriptor

    def _follow(self) -> None:
        """While the name leads nowhere, the file that was moved away is better than none."""
        self._looked_at = self._clock()
        self.problem = ""
        with suppress(OSError):
            if self._is_moved():
                self.open()

    def _is_moved(self) -> bool:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._file

    def _fail(self, error: OSError) -> None:
        self.problem = error.strerror or str(error)


@contextmanager
def _alone(descriptor: int, clock: Callable[[], float]) -> Iterator[None]:
    """No other process writes meanwhile: a file whose size is read during a write seems to end with half a line.

    One that was stopped in its write, or a file system without locks, is waited for no longer than `ALONE_SECONDS`.
    """
    until = clock() + ALONE_SECONDS
    while not (locked := _locked(descriptor)) and clock() < until:
        time.sleep(ALONE_POLL_SECONDS)
    try:
        yield
    finally:
        if locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ends_whole(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
