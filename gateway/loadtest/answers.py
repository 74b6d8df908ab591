"""Reads answers as an OpenAI client does: pure, one search of the bytes per event that holds nothing but a token.

An answer is right only when it says so: finish_reason `stop` or `length`, and `[DONE]` where it streams.  vLLM reports
several failures with status 200: an error event, finish_reason `abort`, `[DONE]` without a choice.
"""

import json
from collections.abc import Mapping
from typing import Any

EVENT_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 64 << 20
GOOD_REASONS = frozenset({"stop", "length", "tool_calls"})
CODE_CHARS_MAX = 40

_EVENT_END = b"\n\n"
_NO_REASON = b'"finish_reason":null'
_HAS_USAGE = b'"usage":{'
# Inside JSON a quote within a text is escaped, so these bytes are a key or a whole value.
_HAS_ERROR = b'"error"'


class BadAnswer(ValueError):
    """The bytes are no answer of this API; the text is the reason to record."""


class EventStream:
    """One streamed answer."""

    def __init__(self) -> None:
        self.usage_tokens: int | None = None
        self._rest = b""
        self._opened = False
        """A token has come; before it there may be an event that only names the role."""
        self._reason: str | None = None
        self._failed = False
        self._done = False

    def feed(self, data: bytes) -> int:
        """How many events with a token these bytes complete.  Raises BadAnswer."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # JSON holds none: it can only be a line's end
            data = data.replace(b"\r\n", b"\n")
        tokens = 0
        *events, self._rest = data.split(_EVENT_END)
        for event in events:
            plain = _NO_REASON in event and _HAS_USAGE not in event and _HAS_ERROR not in event
            tokens += 1 if plain and self._opened else self._read(event)
        if len(self._rest) > EVENT_BYTES_MAX:
            raise BadAnswer("event_too_long")
        return tokens

    def problem(self) -> str:
        """What is wrong with the answer now that it has ended; nothing when it is right."""
        if self._failed:
            return "error_event"
        if self._reason is not None and self._reason not in GOOD_REASONS:
            return f"finish_{self._reason}"[:CODE_CHARS_MAX]
        if self._reason is None and self._done:
            return "done_before_finish" if self._opened else "done_without_choices"
        return "" if self._done else "ended_before_done"

    def _read(self, event: bytes) -> int:
        """An event that is not a plain token: also comments, and lines that are not data."""
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return 0
        payload = b"\n".join(lines)
        if payload == b"[DONE]":
            self._done = True
            return 0
        chunk = _object(payload, "event_not_json")
        self._failed = self._failed or bool(chunk.get("error"))
        self.usage_tokens = _completion_tokens(chunk, self.usage_tokens)
        choices = chunk.get("choices")
        return self._choice(choices[0]) if isinstance(choices, list) and choices else 0

    def _choice(self, choice: object) -> int:
        reason = _reason(choice, "event_malformed")
        self._reason = reason or self._reason
        delta = (choice.get("delta") if isinstance(choice, dict) else None) or {}
        if not isinstance(delta, dict):
            raise BadAnswer("event_malformed")
        if self._reason == "abort" or ("role" in delta and not delta.get("content")):
            return 0
        self._opened = True
        return 1


class WholeAnswer:
    """One answer that does not stream."""

    def __init__(self) -> None:
        self.usage_tokens: int | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> int:
        """Takes the bytes; there are no events to count.  Raises BadAnswer."""
        self._size += len(data)
        if self._size > ANSWER_BYTES_MAX:
            raise BadAnswer("answer_too_long")
        self._pieces.append(data)
        return 0

    def problem(self) -> str:
        """Raises BadAnswer where the answer is no JSON object."""
        answer = _object(b"".join(self._pieces), "answer_not_json")
        if answer.get("error"):
            return "error_answer"
        self.usage_tokens = _completion_tokens(answer, None)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            return "answer_without_choices"
        reason = _reason(choices[0], "answer_malformed")
        return "" if reason in GOOD_REASONS else f"finish_{reason}"[:CODE_CHARS_MAX]


def error_code(status: int, reason_header: str, body: bytes) -> str:
    """What a refusal is counted as: its status, and the code or type of its error where it has one."""
    code = reason_header
    if not code:
        try:
            error: dict[str, Any] = json.loads(body).get("error")
            code = error["code"] if isinstance(error.get("code"), str) else str(error.get("type") or "")
        except (ValueError, AttributeError):
            code = ""
    return f"{status} {code}"[:CODE_CHARS_MAX].strip()


def _object(payload: bytes, problem: str) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        raise BadAnswer(problem) from None
    if not isinstance(value, dict):
        raise BadAnswer(problem)
    return value


def _reason(choice: object, problem: str) -> str | None:
    reason = choice.get("finish_reason") if isinstance(choice, dict) else 0
    if reason is not None and not isinstance(reason, str):
        raise BadAnswer(problem)
    return reason


def _completion_tokens(answer: Mapping[str, Any], known: int | None) -> int | None:
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else known
