"""Which headers cross the gateway, in each direction.  Names are lower case, as ASGI has them."""

import re
from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]
_PLAIN = re.compile(rb"[ -~]*").fullmatch

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1, with `proxy-connection` of old clients."""

_NOT_FOR_CLIENTS = _HOP_BY_HOP | {
    b"server",
    b"date",
    b"set-cookie",
    b"content-length",
    b"content-encoding",
    b"x-request-id",
    b"x-prompt-tokens",
}
"""Hop by hop, the engine's own, or no longer true of the decoded and inspected body."""

PROMPT_TOKENS = b"x-prompt-tokens"
"""The estimate of a call's prompts, for engines and whatever routes between here and there, and for clients."""
_RANK = b"x-data-parallel-rank"
_NOTHING: frozenset[bytes] = frozenset()
FOR_ENGINES = frozenset(
    {
        b"content-type",
        b"accept",
        b"user-agent",
        b"traceparent",
        b"tracestate",
        b"baggage",
        b"x-session-id",
        b"x-claude-code-session-id",
        _RANK,
        b"endpoint-load-metrics-format",
    }
)


def answer_headers(raw: Iterable[Header]) -> list[Header]:
    """The headers of an engine's answer that a client gets; the body they go with is decoded."""
    passed: list[Header] = []
    named = _NOTHING
    for raw_name, value in raw:
        name = raw_name.lower()
        if name == b"connection":
            named |= _named(value)
        elif name not in _NOT_FOR_CLIENTS and not name.startswith(b"x-kvgate-"):
            passed.append((name, value))
    return [header for header in passed if header[0] not in named] if named else passed


def request_headers(client_headers: Iterable[Header], request_id: str) -> list[Header]:
    """The headers that an engine gets beside those of its pool: an allow-list of the client's, our request id.

    A value that is not printable ASCII stays behind: HTTP gives it no meaning that both sides agree on.
    """
    passed: list[Header] = []
    named = _NOTHING
    for raw_name, value in client_headers:
        name = raw_name.lower()
        if name in FOR_ENGINES:
            if _PLAIN(value):
                passed.append((name, value))
        elif name == b"connection":
            named |= _named(value)
    if named:
        passed = [header for header in passed if header[0] not in named]
    passed.append((b"accept-encoding", b"identity"))
    passed.append((b"x-request-id", request_id.encode("ascii")))
    return passed


def pinned(headers: Sequence[Header], rank: int | None) -> Sequence[Header]:
    """For one data-parallel rank of an engine, whatever rank the client asked for: its blocks are reserved there."""
    if rank is None:
        return headers
    return [*(header for header in headers if header[0] != _RANK), (_RANK, b"%d" % rank)]


def prompt_estimate(prompt_tokens: int) -> Header:
    """For one call: the client's own word for it is not on the allow-list, so the name is free.

    `prompt_tokens` are those of all its prompts together, as they are reserved.
    """
    return PROMPT_TOKENS, b"%d" % prompt_tokens


def _named(connection: bytes) -> frozenset[bytes]:
    """What a `Connection` header takes along."""
    return frozenset(token.strip().lower() for token in connection.split(b","))
