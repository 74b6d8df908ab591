"""What an engine's answer to `/v1/messages` says about itself: Anthropic's events, as vLLM writes them.

Source: answers recorded from vLLM 0.32.  Errors within a stream were not recorded; their form is Anthropic's.
"""

from typing import Any, ClassVar

import msgspec

from gateway.core.sse import (
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


class _Frame(msgspec.Struct):
    """The fields of an answer, or of an event, that tell its fate."""

    type: str | None = None
    message: _Message | None = None
    usage: _Counts | None = None
    error: Any = None

    @property
    def is_error(self) -> bool:
        return self.error is not None or self.type == "error"

    @property
    def counted(self) -> Usage | None:
        """A stream begins with the prompt's tokens, and with an output that nobody knows yet."""
        if self.usage:
            return self.usage.usage
        begun = self.message.usage if self.message else None
        return msgspec.structs.replace(begun, output_tokens=None).usage if begun else None


_FRAMES = msgspec.json.Decoder(_Frame)


def inspect_message(body: bytes) -> AnswerFacts:
    """Read the body of a 200 that is not a stream."""
    frame = decode_frame(body, _FRAMES)
    if frame is None:
        return AnswerFacts(None, Failure.NOT_JSON)
    return AnswerFacts(frame.counted, Failure.ERROR if frame.is_error else None)


class MessagesInspector(StreamInspector):
    """Follows one stream of Anthropic's events; it ends with `message_stop`, or with an `error`."""

    __slots__ = ()

    _end: ClassVar[bytes] = b""

    def _passes(self, event: bytes) -> bool:
        payload = data_of(event)
        if payload is None:
            return True
        frame = decode_frame(payload, _FRAMES) or _Frame()
        self.usage = frame.counted or self.usage
        if frame.is_error:
            self._fail(Failure.ERROR)
        elif frame.type == "message_stop":
            self.done = True
            if not self.started:
                self._fail(Failure.EMPTY)
        elif frame.type != "ping":
            self.started = True
            self.events += frame.type == "content_block_delta"
        return True
