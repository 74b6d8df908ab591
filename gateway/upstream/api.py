"""How the request path talks to an engine: one exchange, bytes in callbacks, failures as one exception."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from ssl import SSLContext
from typing import Protocol

import msgspec

from gateway.core.route import FleetShape

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Access:
    """What lets a gateway in to the engines of a pool."""

    headers: Headers = field(default=(), repr=False)
    tls: SSLContext | None = field(default=None, repr=False)
    """For `https://`: whom it trusts, and its own certificate; None trusts the system's authorities."""

    @classmethod
    def of(cls, api_key: str | None, tls: SSLContext | None = None) -> "Access":
        headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode("ascii"))]
        return cls(tuple(headers), tls)


class UpstreamRequest(msgspec.Struct, frozen=True):
    url: str
    """Base URL of the replica, no trailing slash."""
    path: str
    headers: Headers
    """Complete, already filtered; without Host and Content-Length, which the client sets."""
    body: bytes
    method: str = "POST"
    alone: bool = False
    """On a connection of its own."""
    tls: SSLContext | None = None
    """As in `Access`."""


class Trouble(Enum):
    """What a failed call says of its replica."""

    UNREACHABLE = auto()
    """Nothing can have reached the engine."""
    SLOW = auto()
    """No answer in time."""
    BUSY = auto()
    """Its own queue is full, or it says so of itself by 429 or 503: load, no fault."""
    ENDING = auto()
    """It ended the call by itself, as an engine does that shuts down."""
    BROKEN = auto()


class UpstreamFailed(Exception):
    """The engine could not be reached, broke its answer off, or failed politely."""

    def __init__(
        self,
        detail: str,
        *,
        timed_out: bool = False,
        connecting: bool = False,
        trouble: Trouble = Trouble.BROKEN,
        rest_seconds: float | None = None,
        told: bool = False,
    ) -> None:
        """`trouble` is told where it is neither of the other two."""
        super().__init__(detail)
        self.detail = detail
        """For logs; clients get a message without addresses."""
        self.timed_out = timed_out
        """True becomes 504, False 502."""
        self.connecting = connecting
        """True when nothing can have reached the engine."""
        self.final = False
        """The engine may go on with the call: no other one may be asked."""
        self.trouble = Trouble.UNREACHABLE if connecting else Trouble.SLOW if timed_out else trouble
        self.told = told
        """The engine itself has said so: it does nothing more for the call."""
        self.rest_seconds = rest_seconds
        """For which a busy engine asks to be left alone; None where it does not say."""


class Receiver(Protocol):
    """Where an answer goes.  The coroutines usually finish without suspending; while one is suspended (the client
    reads slowly) the engine's socket is not read, which is the whole of backpressure."""

    @property
    def started(self) -> bool:
        """True once the first data event was seen: before it the first-event limit counts, then the idle limit."""
        ...

    @property
    def last_at(self) -> float:
        """When `take_chunk` last took one, by time.monotonic: the idle limit counts from there."""
        ...

    async def head(self, status: int, headers: Headers) -> None: ...

    def take(self, data: bytes) -> bool:
        """Take the next bytes of the body if that needs no waiting: no coroutine for each token.  False: nothing was
        taken, `body` has to."""
        ...

    def take_chunk(self, chunk: bytes, start: int) -> bool:
        """Take `chunk[start:-2]`, the next bytes of the body, as `take` does.  `chunk` is all of one chunk of HTTP's
        chunked coding, without extensions, and can be sent on as it is.  False: nothing was taken."""
        ...

    async def body(self, data: bytes) -> None: ...


class Collected(Receiver):
    """Takes an answer that goes to no client, of so many bytes at most."""

    def __init__(self, bytes_max: int) -> None:
        self.status = 0
        self._bytes_max = bytes_max
        self._content = bytearray()

    @property
    def content(self) -> bytes:
        return bytes(self._content)

    @property
    def size(self) -> int:
        return len(self._content)

    @property
    def started(self) -> bool:
        return True

    @property
    def last_at(self) -> float:
        return 0.0

    async def head(self, status: int, headers: Headers) -> None:
        self.status = status

    def take(self, data: bytes) -> bool:
        return False

    def take_chunk(self, chunk: bytes, start: int) -> bool:
        return False

    async def body(self, data: bytes) -> None:
        self._content += data
        if len(self._content) > self._bytes_max:
            raise UpstreamFailed(f"the answer has more than {self._bytes_max} bytes")


class Upstream(Protocol):
    async def exchange(self, request: UpstreamRequest, receiver: Receiver) -> None:
        """Send, then call `head` once and `body` for what arrives; return at the answer's proper end.

        Raises UpstreamFailed.  An exception from the receiver passes through.  However it is left (end, failure,
        cancellation), a connection whose answer is not complete is closed before this returns, so the engine aborts.
        """
        ...


class Engines(Protocol):
    """The replicas of one fleet as the request path sees them."""

    def shape(self) -> FleetShape:
        """What routing needs to know now; its pools are those with at least one known replica."""
        ...

    def knows(self, replica: str) -> bool:
        """False for one that only another gateway's settings have."""
        ...

    def names(self) -> Collection[str]:
        """Of all replicas."""
        ...

    def url(self, replica: str) -> str: ...

    def rank(self, replica: str) -> int | None:
        """The data-parallel rank behind its URL; None where there is one engine."""
        ...

    def access(self, replica: str) -> Access: ...

    def pool(self, replica: str) -> str:
        """Empty for a replica that is not known."""
        ...

    def any_up(self, tried: Sequence[str], only: str = "") -> str | None:
        """A replica that answers and was not tried yet, another one each time, who rests comes last; or `only` that."""
        ...

    def another_can_hold(self, lane: str, tried: Sequence[str], blocks: int, sequences: int) -> bool:
        """Whether a replica of the lane answers, is large enough and was not tried yet."""
        ...

    def report_failure(self, replica: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        """A call failed there.  `rest_seconds`: for which a busy replica asks to be left alone, if it says."""
        ...

    def report_success(self, replica: str) -> None:
        """A call was answered there; one that the engine refused says nothing."""
        ...
