"""What an engine's answer to `/v1/messages` says about itself: Anthropic's events, as vLLM writes them.

Source: answers recorded from vLLM 0.32.  Errors within a stream were not recorded; their form is Anthropic's.
"""

import re
from typing import Any, ClassVar

import msgspec

from gateway.core.sse import (
    EVENT_BYTES_MAX,
    AnswerFacts,
    Failure,
    StreamInspector,
    Tokens,
    Usage,
    data_of,
    decode_frame,
)


class _Counts(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None

    @property
    def usage(self) -> Usage | None:
        """Where the cache is told of, `input_tokens` are those that it neither had nor got."""
        if self.input_tokens is None:
            return None
        cached = self.cache_read_input_tokens
        prompt = self.input_tokens + (self.cache_creation_input_tokens or 0) + (cached or 0)
        return Usage(prompt, self.output_tokens, cached)


class _Message(msgspec.Struct):
    usage: _Counts | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Frame(msgspec.Struct):
    """The fields of an answer, or of an event, that tell its fate."""

    type: str | None = None
    message: _Message | None = None
    usage: _Counts | None = None
    delta: _Delta | None = None
    stop_reason: str | None = None
    error: Any = None

    @property
    def is_error(self) -> bool:
        return self.error is not None or self.type == "error"

    @property
    def failure(self) -> Failure | None:
        """Of an answer that is no stream.  vLLM gives a reason for every end but an abort."""
        if self.is_error:
            return Failure.ERROR
        return Failure.ABORTED if self.type == "message" and self.stop_reason is None else None

    @property
    def counted(self) -> Usage | None:
        """A stream begins with the prompt's tokens, and with an output that nobody knows yet."""
        if self.usage:
            return self.usage.usage
        begun = self.message.usage if self.message else None
        return msgspec.structs.replace(begun, output_tokens=None).usage if begun else None


_FRAMES = msgspec.json.Decoder(_Frame)
_ERROR_NAME = re.compile(rb"\nevent:[ ]?error\r?\n")


def inspect_message(body: bytes) -> AnswerFacts:
    """Read the body of a 200 that is not a stream."""
    frame = decode_frame(body, _FRAMES)
    if frame is None:
        return AnswerFacts(None, Failure.NOT_JSON)
    return AnswerFacts(frame.counted, frame.failure)


class MessagesInspector(StreamInspector):
    """Follows one stream of Anthropic's events; it ends with `message_stop`, or with an `error`."""

    __slots__ = ("_aborted",)

    _end: ClassVar[bytes] = b""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        super().__init__(event_bytes_max=event_bytes_max)
        self._aborted = False
        """The message was closed without a reason."""

    @property
    def relayable_failure(self) -> bytes:
        """Anthropic's clients see an error only where the event is named so."""
        failure = super().relayable_failure
        return failure if _is_named_error(failure) else b""

    def _passes(self, event: bytes) -> bool:
        payload = data_of(event)
        if payload is None:
            return True
        frame = decode_frame(payload, _FRAMES) or _Frame()
        self.usage = frame.counted or self.usage
        if frame.is_error or _is_named_error(event):
            self._fail(Failure.ERROR)
        elif frame.type == "message_stop":
            self._stop()
        elif frame.type not in (None, "ping"):
            self.started = True
            self.events += frame.type == "content_block_delta"
            if frame.type == "message_delta":
                self._aborted = frame.delta is None or frame.delta.stop_reason is None
        return True

    def _stop(self) -> None:
        self.done = True
        if not self.started:
            self._fail(Failure.EMPTY)
        elif self._aborted:
            self._fail(Failure.ABORTED)


def _is_named_error(event: bytes) -> bool:
    return _ERROR_NAME.search(b"\n" + event) is not None
