"""What an engine's answer says about itself: started, used, finished, or failed behind a status of 200.

A vLLM engine reports failure as success: an error event in a 200 stream, `finish_reason: "abort"`, or
`[DONE]` with no choice at all.  The inspector sees every event of a stream on its way to the client and
changes no byte of what it passes on.
"""

import json
import re
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec

from gateway.core.usage_cut import cut_usage, without_usage

EVENT_BYTES_MAX = 1_048_576
"""The longest event; an incomplete one is held in memory until it ends."""

COMMENT_BYTES_MAX = 64 * 1024
"""Comments before the first data event are held too; what exceeds this is dropped."""

DONE_EVENT = b"data: [DONE]\n\n"

_EVENT_END = re.compile(rb"\n\r?\n")
"""A blank line.  Only LF and CR LF end a line: U+2028, U+0085 and their like are text inside JSON."""

_END_BYTES_MAX = 3


class Failure(StrEnum):
    """How an engine failed under a status of 200."""

    ERROR = "the engine sent an error"
    BUSY = "the engine's own queue is full"
    ABORTED = "the engine aborted the call"
    EMPTY = "the engine ended the stream without any choice"
    UNFINISHED = "the stream ended without its last event"
    EVENT_TOO_LONG = "an event of the stream is too long"
    NOT_JSON = "the answer is not a JSON object"


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int | None
    """None where the kind of call produces no output tokens."""
    cached_tokens: int | None = None
    """Of the prompt's, where the engine tells."""


class AnswerFacts(msgspec.Struct, frozen=True):
    """What the JSON body of a 200 says."""

    usage: Usage | None
    failure: Failure | None


Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Counts(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    prompt_tokens_details: Any = None
    """Not typed: details of another shape must not cost the counts."""

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if type(cached) is int and 0 <= cached < 2**53 else None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Frame(msgspec.Struct):
    """The fields of an answer that tell its fate; the rest is skipped without being decoded."""

    choices: list[_Choice] | None = None
    usage: _Counts | None = None
    error: Any = None
    object: str | None = None

    @property
    def failure(self) -> Failure | None:
        if self.error is not None or self.object == "error":
            return Failure.BUSY if self._is_busy else Failure.ERROR
        for choice in self.choices or ():
            if choice.finish_reason == "abort":
                return Failure.ABORTED
        return None

    @property
    def _is_busy(self) -> bool:
        """vLLM refuses a stream by an event where its queue filled up after the headers."""
        code = self.error.get("code") if isinstance(self.error, dict) else None
        return code in (429, 503)

    @property
    def counted(self) -> Usage | None:
        usage = self.usage
        if usage is None or usage.prompt_tokens is None:
            return None
        return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


class _PlainChoice(msgspec.Struct, gc=False):
    finish_reason: None = None


class _PlainFrame(msgspec.Struct, gc=False):
    """An event that only carries tokens: whatever else an event can tell does not decode as one."""

    object: Literal["chat.completion.chunk", "text_completion"]
    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    usage: None = None
    error: None = None


class _PlainUsage(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _MeteredFrame(msgspec.Struct, gc=False):
    """The same of a stream whose events tell its usage until then."""

    object: Literal["chat.completion.chunk", "text_completion"]
    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    usage: _PlainUsage
    error: None = None


_FrameT = TypeVar("_FrameT", bound=msgspec.Struct)
_FRAMES = msgspec.json.Decoder(_Frame)
_PLAIN_FRAMES = msgspec.json.Decoder(_PlainFrame)
_METERED_FRAMES = msgspec.json.Decoder(_MeteredFrame)
_LF = 0x0A


def decode_frame(data: bytes, decoder: msgspec.json.Decoder[_FrameT]) -> _FrameT | None:
    """The telling fields of a JSON object, those of an unknown shape left out; None for anything else.

    Decoding costs less than searching for the telling words first.  The standard library reads what the fast
    decoder refuses and engines do write: half a surrogate pair, `-Infinity` as a log probability.
    """
    try:
        return decoder.decode(data)
    except msgspec.DecodeError:
        pass
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return _salvage(fields, cast(type[_FrameT], decoder.type)) if isinstance(fields, dict) else None


def _salvage(fields: dict[str, Any], kind: type[_FrameT]) -> _FrameT:
    frame = kind()
    for field in msgspec.structs.fields(kind):
        with suppress(msgspec.ValidationError, UnicodeEncodeError):  # half a surrogate pair as a name
            setattr(frame, field.name, msgspec.convert(fields.get(field.name), field.type))
    return frame


def inspect_answer(body: bytes) -> AnswerFacts:
    """Read the body of a 200 that is not a stream."""
    frame = decode_frame(body, _FRAMES)
    if frame is None:
        return AnswerFacts(None, Failure.NOT_JSON)
    return AnswerFacts(frame.counted, frame.failure)


class StreamInspector:
    """Follows one server-sent event stream, whatever way its bytes are cut.

    `feed` returns what may go to the client: whole events, byte for byte, up to the first failure.  From a
    failure on it returns nothing; the failed event and what follows are kept, and the caller decides: ask
    another engine where nothing was forwarded, send `relayable_failure` where that is not empty, else write an
    error event of its own.  The outcome depends on the bytes alone, never on the cuts.
    """

    _end: ClassVar[bytes] = DONE_EVENT
    """What a stream ends with, one that failed as well."""

    opening_bytes_max: ClassVar[int] = COMMENT_BYTES_MAX
    """Of what comes before it has started, and is passed on with the rest."""

    __slots__ = (
        "_after_failure", "_closing", "_cut_usage", "_drop_usage", "_event_bytes_max", "_held", "_overlong", "done",
        "events", "failure", "finish_reason", "metered", "started", "unmetered", "usage", "written",
    )  # fmt: skip

    def __init__(
        self,
        *,
        drop_usage: bool = False,
        metered: bool = False,
        cut_usage: bool = False,
        event_bytes_max: int = EVENT_BYTES_MAX,
    ) -> None:
        """`drop_usage` takes out the `choices: []` usage event, for a client that did not ask for it.

        `metered`: the engine was asked to tell the usage in each event; `cut_usage` takes it out of those with choices.
        """
        self.started = False
        """A data event has come that is neither an error nor `[DONE]`; comments do not count."""
        self.usage: Usage | None = None
        """From the last event that had it."""
        self.events = 0
        """Data events with a choice: about the output tokens, for a stream that ends without usage."""
        self.finish_reason: str | None = None
        """Of the choice that ended last."""
        self.metered = metered
        self.written = 0
        """Output tokens, as the last event told that `passes_metered` took."""
        self.unmetered = False
        """An event of a metered stream had a choice and told no usage."""
        self.done = False
        self.failure: Failure | None = None
        self._closing = False
        """The last event was the closing count, of which the usage is all that there is."""
        self._cut_usage = cut_usage
        self._drop_usage = drop_usage
        self._event_bytes_max = event_bytes_max
        self._overlong = False
        """An event passed the bound: what follows cannot be told apart and is not read."""
        self._held: bytearray | None = None
        """The beginning of an event."""
        self._after_failure = bytearray()

    @property
    def failure_bytes(self) -> bytes:
        """The failed event and the whole events after it, as they came; at most two events' worth."""
        return bytes(self._after_failure)

    @property
    def relayable_failure(self) -> bytes:
        """The engine's own error event, closed by `[DONE]`; empty where it sent none."""
        if self.failure not in (Failure.ERROR, Failure.BUSY) or not self._after_failure:
            return b""
        return self.failure_bytes + (b"" if self.done else self._end)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return those to forward."""
        if self._overlong:
            return b""
        if self._held:
            seam = bytes(self._held[1 - _END_BYTES_MAX :]) + data
            if _EVENT_END.search(seam) is None:
                self._hold(data)
                return b""
            data = bytes(self._held) + data
            self._held = None
        forward: list[bytes] = []
        start = 0
        while end := _EVENT_END.search(data, start):
            event = data[start : end.end()]
            start = end.end()
            if len(event) > self._event_bytes_max:
                self._give_up()
                return b"".join(forward)
            if not self._passes(event):
                continue
            if self.failure is None:
                forward.append(self._as_shown(event))
            else:
                self._keep(event)
        self._hold(data[start:])
        return b"".join(forward)

    def passes(self, data: bytes, start: int, end: int) -> bool:
        """Whether `data[start:end]` is one event that only carries tokens, as nearly all are, and may go to the client.
        Then it is noted.  Else nothing is, and `feed` has to take it.
        """
        if self._held or self.failure is not None or end - start > self._event_bytes_max:
            return False
        if data.find(b"\n", start) != end - 2 or data[end - 1] != _LF or not data.startswith(b"data:", start):
            return False
        try:
            _PLAIN_FRAMES.decode(data[start + 5 : end - 2])
        except msgspec.DecodeError:
            return False
        self.started = True
        self.events += 1
        return True

    def passes_metered(self, data: bytes, start: int, end: int) -> bytes | None:
        """As `passes`, of a metered stream: the event as the client gets it; None = `feed` has to take it."""
        if self._held or self.failure is not None or end - start > self._event_bytes_max:
            return None
        if data.find(b"\n", start) != end - 2 or data[end - 1] != _LF or not data.startswith(b"data:", start):
            return None
        try:
            usage = _METERED_FRAMES.decode(data[start + 5 : end - 2]).usage
        except msgspec.DecodeError:
            return None
        shown = without_usage(data, start, end) if self._cut_usage else data[start:end]
        if shown is not None:
            self.written = usage.completion_tokens
            self.usage = Usage(usage.prompt_tokens, self.written)
            self.started = True
            self.events += 1
        return shown

    def finish(self) -> bytes:
        """Judge the end of the stream and return what is left to forward: bytes after the last blank line."""
        rest, self._held = bytes(self._held or b""), None
        keep = self._passes(rest) if rest else False
        if self.failure is None and not self.done:
            self.failure = Failure.UNFINISHED
        return self._as_shown(rest) if keep and self.failure is None else b""

    def _as_shown(self, event: bytes) -> bytes:
        return cut_usage(event) if self._cut_usage and not self._closing else event

    def _hold(self, data: bytes) -> None:
        """Wait for the end of an event, within bounds."""
        if not data:
            return
        held = self._held or bytearray()
        if len(held) + len(data) > self._event_bytes_max:
            self._give_up()
            return
        held += data
        self._held = held

    def _give_up(self) -> None:
        self._overlong = True
        self._held = None
        self._fail(Failure.EVENT_TOO_LONG)

    def _keep(self, event: bytes) -> None:
        if len(self._after_failure) + len(event) <= 2 * self._event_bytes_max:
            self._after_failure += event

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure

    def _passes(self, event: bytes) -> bool:
        """Note what one event says; False when the client must not see it."""
        payload = data_of(event)
        if payload is None:
            return True
        if payload == b"[DONE]":
            self.done = True
            if not self.events:
                self._fail(Failure.EMPTY)
            return True
        return self._passes_frame(decode_frame(payload, _FRAMES) or _Frame())

    def _passes_frame(self, frame: _Frame) -> bool:
        self.usage = frame.counted or self.usage
        failure = frame.failure
        if failure is not None:
            self._fail(failure)
            return True
        self._closing = frame.choices == [] and frame.usage is not None
        if self._closing:
            return self._passes_usage()
        self.started = True
        if frame.choices:
            self.events += 1
            self.finish_reason = frame.choices[-1].finish_reason or self.finish_reason
            counted = frame.counted
            self.unmetered |= self.metered and (counted is None or counted.completion_tokens is None)
        return True

    def _passes_usage(self) -> bool:
        """The engine's closing count; before any choice it only announces an empty `[DONE]`."""
        if not self.events:
            self._fail(Failure.EMPTY)
            return True
        return not self._drop_usage


def data_of(event: bytes) -> bytes | None:
    """The data of an event, its lines joined; None for an event of comments or other fields only."""
    if event.startswith(b"data:") and b"\ndata:" not in event:
        return event[5:].partition(b"\n")[0].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
