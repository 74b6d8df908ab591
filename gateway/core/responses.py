"""`/v1/responses`: the id that leads back to the replica that made a response, and what an engine's answer says.

vLLM keeps responses in the memory of one engine and names them as the request asks (`request_id`), so the name itself
says where a response is: nothing has to be stored, every gateway process can read it, and it lives as long as what it
names.  It says whose it is, too: a response is found by the key that asked for it.

Source: answers recorded from vLLM 0.32.  Errors within a stream were not recorded; their form is OpenAI's.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from gateway.core.body import shorten
from gateway.core.outcomes import Code, Refusal
from gateway.core.sse import (
    COMMENT_BYTES_MAX,
    AnswerFacts,
    Failure,
    StreamInspector,
    Tokens,
    Usage,
    data_of,
    decode_frame,
)

EVENT_BYTES_MAX = 16 * 2**20
"""The first events repeat instructions and tools, the last one has the whole answer."""
TAG_CHARS = 8
RANDOM_CHARS = 16
_ID = re.compile(rf"resp_([0-9a-f]{{{RANDOM_CHARS}}})([0-9a-f]{{{TAG_CHARS}}})([0-9a-f]{{{TAG_CHARS}}})")
_NOTHING_YET = frozenset({None, "response.created", "response.in_progress", "response.queued"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_GOES_ON = frozenset({"queued", "in_progress"})
CANCELLED = "cancelled"
_FAILURES = frozenset({"response.failed", "error"})


Place = tuple[str, str]
"""A fleet, and one of its replicas."""


def new_id(random: str, place: Place, caller: str) -> str:
    """`random`: RANDOM_CHARS hexadecimal digits that nobody can guess.  `caller`: the name of the key."""
    return f"resp_{random}{_tag(place)}{_whose(random, caller)}"


def maker(response_id: str, caller: str, places: Iterable[Place]) -> Place | None:
    """Where a response was made; None where none of these made it, or for another caller."""
    parts = _ID.fullmatch(response_id)
    if parts is None or parts[3] != _whose(parts[1], caller):
        return None
    return next((place for place in places if _tag(place) == parts[2]), None)


def not_found(response_id: str) -> Refusal:
    """As vLLM says it."""
    return Refusal(Code.NOT_FOUND, f"Response with id '{shorten(response_id)}' not found.", "response_id")


@lru_cache(maxsize=4096)
def _tag(place: Place) -> str:
    return hashlib.sha256("\n".join(place).encode()).hexdigest()[:TAG_CHARS]


def _whose(random: str, caller: str) -> str:
    """Another one in every id, so that ids do not show which of them are of one key."""
    return hashlib.sha256(f"{random}\n{caller}".encode()).hexdigest()[:TAG_CHARS]


class _Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class _Counts(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    input_tokens_details: _Details | None = None

    @property
    def usage(self) -> Usage | None:
        if self.input_tokens is None:
            return None
        details = self.input_tokens_details
        return Usage(self.input_tokens, self.output_tokens, details.cached_tokens if details else None)


class Progress(msgspec.Struct):
    """The fields of a response that tell its fate."""

    status: str | None = None
    usage: _Counts | None = None
    error: Any = None

    @property
    def is_over(self) -> bool:
        """Nothing of it is computed any more."""
        return self.status not in _GOES_ON

    @property
    def failure(self) -> Failure | None:
        """vLLM writes `cancelled` where a call was aborted, and `completed` where it was never begun."""
        if self.error is not None or self.status == "failed":
            return Failure.ERROR
        return Failure.ABORTED if self.status == CANCELLED else None

    @property
    def counted(self) -> Usage | None:
        return self.usage.usage if self.usage else None


class _Event(msgspec.Struct):
    type: str | None = None
    response: Progress | None = None
    error: Any = None


_RESPONSES = msgspec.json.Decoder(Progress)
_EVENTS = msgspec.json.Decoder(_Event)


def progress_of(body: bytes) -> Progress | None:
    """How far a response is that was asked for; None for what is none."""
    found = decode_frame(body, _RESPONSES)
    return found if found is not None and found.status is not None else None


def inspect_response(body: bytes) -> AnswerFacts:
    """Read the body of a 200 that is not a stream."""
    response = decode_frame(body, _RESPONSES)
    if response is None:
        return AnswerFacts(None, Failure.NOT_JSON)
    return AnswerFacts(response.counted, response.failure)


class ResponsesInspector(StreamInspector):
    """Follows one stream of a response's events; it ends with the one that has the whole response."""

    __slots__ = ()

    _end: ClassVar[bytes] = b""
    opening_bytes_max: ClassVar[int] = 2 * EVENT_BYTES_MAX + COMMENT_BYTES_MAX

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        super().__init__(event_bytes_max=event_bytes_max)

    @property
    def relayable_failure(self) -> bytes:
        """OpenAI's client takes every event of this protocol for a part of the answer."""
        return b""

    def _passes(self, event: bytes) -> bool:
        payload = data_of(event)
        if payload is None:
            return True
        frame = decode_frame(payload, _EVENTS) or _Event()
        response = frame.response or Progress()
        self.usage = response.counted or self.usage
        if frame.type in _FAILURES or frame.error is not None or response.failure:
            self._fail(response.failure or Failure.ERROR)
        elif frame.type in _ENDS:
            self._stop()
        elif frame.type not in _NOTHING_YET:
            self.started = True
            self.events += frame.type is not None and frame.type.endswith(".delta")
        return True

    def _stop(self) -> None:
        """An engine that shuts down ends a call that it never began as if it were complete."""
        self.done = True
        if not self.started and not (self.usage and self.usage.completion_tokens):
            self._fail(Failure.EMPTY)
        self.started = True
