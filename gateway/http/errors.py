"""Refusals as a client sees them: status, headers, and the error envelope of OpenAI or of Anthropic."""

import json
import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from gateway.core.outcomes import FLEET_OVERLOAD, OVERLOADED, STATUS, Code, Refusal
from gateway.core.request import Dialect

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RETRY_MS_DEFAULT = 1_000
RETRY_MS_MAX = 60_000
"""OpenAI SDKs give up on what is over 120 s."""
MESSAGE_LENGTH_MAX = 1_000
"""Messages may quote a field of the request."""

_ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: OVERLOADED,
}
"""Where Anthropic's name of an error is not OpenAI's."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Answer(msgspec.Struct, frozen=True):
    """A complete answer but for what belongs to one exchange: request id and connection."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    retry_ms: int | None = None
    """As the headers tell it."""


def answer_of(
    refusal: Refusal,
    overload_status: int,
    jitter: float,
    allow: str = "POST",
    dialect: Dialect = Dialect.OPENAI,
) -> Answer:
    """The answer to a call that is not served.

    `overload_status` is the operator's choice for a fleet's own overload; `jitter` in [1, 1.25] spreads retries;
    `allow` names the methods of the path for a 405.
    """
    status = overload_status if refusal.code in FLEET_OVERLOAD else STATUS[refusal.code][0]
    body = _envelope(refusal, dialect, status)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-kvgate-reason", refusal.code.encode()),
        *refusal.headers,
    ]
    retry_ms = None
    if status in (429, 503) or refusal.code in FLEET_OVERLOAD:
        retry_ms = _retry_ms(refusal, jitter)
        headers += _retry_headers(retry_ms)
    if refusal.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if refusal.should_retry else b"false"))
    if refusal.cached:
        headers.append((b"x-kvgate-refused-by", b"cache"))
    if refusal.code is Code.INVALID_API_KEY:
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110, 11.6.1
    if refusal.code is Code.METHOD_NOT_ALLOWED:
        headers.append((b"allow", allow.encode()))
    return Answer(status, tuple(headers), body, retry_ms)


def error_event(refusal: Refusal, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """The end of a stream that fails after it began: without `[DONE]` OpenAI's SDK takes it for a success."""
    envelope = _envelope(refusal, dialect, STATUS[refusal.code][0])
    if dialect is Dialect.ANTHROPIC:
        return b"event: error\ndata: " + envelope + b"\n\n"
    return b"data: " + envelope + b"\n\ndata: [DONE]\n\n"


def late_error(status: int, body: bytes, dialect: Dialect) -> bytes:
    """An engine's refusal as the end of a stream that was answered 200 before it: the error that its body has."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        error = None
    if not isinstance(error, dict):
        return error_event(Refusal(Code.UPSTREAM_ERROR, f"the engine answered {status}"), dialect)
    if dialect is Dialect.ANTHROPIC:
        shown = json.dumps({"type": "error", "error": error}, separators=(",", ":"))
        return b"event: error\ndata: " + shown.encode() + b"\n\n"
    shown = json.dumps({"error": error}, separators=(",", ":"))
    return b"data: " + shown.encode() + b"\n\ndata: [DONE]\n\n"


def safe_request_id(raw: bytes | None, new: str) -> str:
    """The client's own request id if it is short and plain, else `new`."""
    if raw is None or not _REQUEST_ID.fullmatch(raw):
        return new
    return raw.decode("ascii")


async def send_answer(send: Send, answer: Answer, request_id: str, close: bool) -> None:
    """Write an answer through ASGI.

    `close` where the request's body was not read to its end: the caller ends the answer with an empty piece, once it
    has taken what still comes.
    """
    headers = [*answer.headers, (b"x-request-id", request_id.encode("ascii"))]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": close})


def _retry_ms(refusal: Refusal, jitter: float) -> int:
    """A quota's time is exact; the appointments of a crowd are spread and bounded."""
    if refusal.code is Code.QUOTA_EXCEEDED:
        return max(1, RETRY_MS_DEFAULT if refusal.retry_ms is None else refusal.retry_ms)
    base = RETRY_MS_DEFAULT if refusal.retry_ms is None else refusal.retry_ms
    return min(max(math.ceil(base * jitter), 1_000), RETRY_MS_MAX)


def _retry_headers(retry_ms: int) -> list[tuple[bytes, bytes]]:
    seconds = -(-retry_ms // 1_000)
    return [(b"retry-after", str(seconds).encode()), (b"retry-after-ms", str(retry_ms).encode())]


def _envelope(refusal: Refusal, dialect: Dialect, status: int) -> bytes:
    """ASCII JSON on one line, so that it can be an SSE event; our own faults are not described to clients."""
    message = refusal.message
    if refusal.code is Code.INTERNAL_ERROR:
        message = "internal error; the log has it under this request id"
    type_ = STATUS[refusal.code][1]
    error = {
        "message": _text(message),
        "type": type_,
        "param": None if refusal.param is None else _text(refusal.param),
        "code": refusal.code.value,
    }
    envelope: dict[str, Any] = {"error": error}
    if dialect is Dialect.ANTHROPIC:
        error["type"] = _ANTHROPIC_TYPES.get(status, type_)
        envelope = {"type": "error", **envelope}
    return json.dumps(envelope, separators=(",", ":")).encode("ascii")


def _text(text: str) -> str:
    """Bounded, and without lone surrogates, which no UTF-8 reader accepts."""
    return text[:MESSAGE_LENGTH_MAX].encode("utf-8", "replace").decode("utf-8")
