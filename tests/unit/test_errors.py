"""Refusals on the wire: envelope, headers, and nothing of our inside."""

import json
import re
from typing import Any

import pytest

from gateway.core.outcomes import FLEET_OVERLOAD, STATUS, Code, Refusal
from gateway.core.request import Dialect
from gateway.http.errors import Answer, answer_of, error_event, safe_request_id, send_answer


def header(answer: Answer, name: bytes) -> bytes | None:
    return dict(answer.headers).get(name)


def answer(code: Code, retry_ms: int | None = None, jitter: float = 1.0, **more: Any) -> Answer:
    return answer_of(Refusal(code, "why", retry_ms=retry_ms, **more), 429, jitter)


def retry(answer: Answer) -> tuple[bytes | None, bytes | None]:
    return header(answer, b"retry-after"), header(answer, b"retry-after-ms")


@pytest.mark.parametrize("code", Code)
def test_every_code_has_the_envelope(code: Code) -> None:
    given = answer(code, param="model")
    body = json.loads(given.body)
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, "model")
    assert body["error"]["type"] == STATUS[code][1]
    assert header(given, b"content-type") == b"application/json"
    assert header(given, b"content-length") == str(len(given.body)).encode()
    assert header(given, b"x-kvgate-reason") == code.encode()


ANTHROPICS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error",
}  # fmt: skip
"""As its documents name them; other statuses have no name of their own there."""


@pytest.mark.parametrize("code", Code)
def test_anthropics_clients_get_their_own_envelope(code: Code) -> None:
    refusal = Refusal(code, "why", param="model")
    given, plain = (answer_of(refusal, 429, 1.0, dialect=dialect) for dialect in reversed(Dialect))
    body = json.loads(given.body)
    assert (given.status, list(body), body["type"]) == (plain.status, ["type", "error"], "error")
    assert body["error"] | {"type": ""} == json.loads(plain.body)["error"] | {"type": ""}
    assert body["error"]["type"] == ANTHROPICS.get(given.status, body["error"]["type"])
    assert dict(given.headers) | {b"content-length": b""} == dict(plain.headers) | {b"content-length": b""}
    assert error_event(refusal, Dialect.ANTHROPIC) == b"event: error\ndata: " + given.body + b"\n\n"


def test_an_overload_that_the_operator_calls_529_has_anthropics_name_for_it() -> None:
    given = answer_of(Refusal(Code.QUEUE_FULL, "why"), 529, 1.0, dialect=Dialect.ANTHROPIC)
    assert (given.status, json.loads(given.body)["error"]["type"]) == (529, "overloaded_error")


@pytest.mark.parametrize("overload_status", [429, 503, 529])
@pytest.mark.parametrize("code", Code)
def test_the_operator_chooses_the_status_of_overload_only(code: Code, overload_status: int) -> None:
    given = answer_of(Refusal(code, "why"), overload_status, 1.0)
    assert given.status == (overload_status if code in FLEET_OVERLOAD else STATUS[code][0])
    may_retry = given.status in (429, 503, 529)
    assert all((value is not None) == may_retry for value in (*retry(given), given.retry_ms))


@pytest.mark.parametrize(
    ("code", "retry_ms", "jitter", "expected"),
    [
        (Code.QUEUE_FULL, 2_000, 1.25, (b"3", b"2500")),
        (Code.QUEUE_FULL, 2_000, 1.0, (b"2", b"2000")),
        (Code.QUEUE_FULL, 2_001, 1.0, (b"3", b"2001")),
        (Code.QUEUE_FULL, 0, 1.0, (b"1", b"1000")),
        (Code.QUEUE_FULL, 59_000, 1.25, (b"60", b"60000")),
        (Code.CAPACITY_EXCEEDED, None, 1.0, (b"1", b"1000")),
        (Code.STORE_UNAVAILABLE, None, 1.0, (b"1", b"1000")),
        (Code.DRAINING, 10**12, 1.0, (b"60", b"60000")),
        (Code.QUOTA_EXCEEDED, 86_400_000, 1.25, (b"86400", b"86400000")),
        (Code.QUOTA_EXCEEDED, 250, 1.25, (b"1", b"250")),
        (Code.QUOTA_EXCEEDED, 0, 1.0, (b"1", b"1")),
        (Code.QUOTA_EXCEEDED, None, 1.25, (b"1", b"1000")),
    ],
)
def test_when_to_come_back(
    code: Code, retry_ms: int | None, jitter: float, expected: tuple[bytes, bytes]
) -> None:
    given = answer(code, retry_ms, jitter)
    assert retry(given) == expected
    assert given.retry_ms == int(expected[1])


def test_flags_become_headers() -> None:
    assert header(answer(Code.CONTEXT_LENGTH_EXCEEDED, should_retry=False), b"x-should-retry") == b"false"
    assert header(answer(Code.QUEUE_FULL, should_retry=True), b"x-should-retry") == b"true"
    assert header(answer(Code.QUEUE_FULL), b"x-should-retry") is None
    assert header(answer(Code.QUEUE_FULL, cached=True), b"x-kvgate-refused-by") == b"cache"
    assert header(answer(Code.QUEUE_FULL), b"x-kvgate-refused-by") is None
    assert header(answer(Code.METHOD_NOT_ALLOWED), b"allow") == b"POST"
    assert header(answer(Code.INVALID_API_KEY), b"www-authenticate") == b"Bearer"


def test_an_internal_error_says_nothing_of_itself() -> None:
    given = answer_of(Refusal(Code.INTERNAL_ERROR, "KeyError in /srv/gateway/flow.py at 10.0.0.7"), 429, 1.0)
    assert not re.search(rb"KeyError|flow|10\.0|srv", given.body)


@pytest.mark.parametrize("text", ["\r\nx: y", "\ud800", "\u2028data: x", '"quotes"', "é" * 5_000, "\x00"])
def test_quoted_input_cannot_break_the_answer(text: str) -> None:
    refusal = Refusal(Code.INVALID_VALUE, text, text)
    body = answer_of(refusal, 429, 1.0).body
    assert body.isascii()
    assert len(body) < 20_000
    message = json.loads(body)["error"]["message"]
    assert message == text[:1_000].replace("\ud800", "?")
    assert error_event(refusal) == b"data: " + body + b"\n\ndata: [DONE]\n\n"
    assert body.count(b"\n") == body.count(b"\r") == 0


@pytest.mark.parametrize("raw", [b"a", b"req-1_2.3:4", b"x" * 128])
def test_a_plain_request_id_is_kept(raw: bytes) -> None:
    assert safe_request_id(raw, "new") == raw.decode()


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"x" * 129,
        b"x" * 100_000,
        b"a\r\nset-cookie: x",
        b"a\n",
        b'a"b',
        b"{tag}",
        b"\xc3\xa9",
        b"a b",
    ],
)
def test_an_unsafe_request_id_is_replaced(raw: bytes | None) -> None:
    assert safe_request_id(raw, "new") == "new"


@pytest.mark.parametrize("close", [False, True])
async def test_an_answer_is_sent_whole(close: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    given = answer(Code.BODY_TOO_LARGE)
    await send_answer(send, given, "id-1", close)
    start, body = sent
    assert (start["type"], start["status"]) == ("http.response.start", 413)
    assert (b"x-request-id", b"id-1") in start["headers"]
    assert ((b"connection", b"close") in start["headers"]) is close
    assert body == {"type": "http.response.body", "body": given.body, "more_body": close}
