"""One HTTP exchange byte by byte, and what two engines must agree on of its answer."""

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.vllm.asks import Ask

ANSWER_SECONDS = 60.0
BYTES_MAX = 16 * 1024 * 1024
SAME_VALUE_HEADERS = {"server", "content-type", "vary", "allow", "transfer-encoding", "connection"}

FREE_VALUES = {
    *("created", "created_at", "system_fingerprint", "root"),
    *(
        "text",
        "content",
        "delta",
        "prompt",
        "token",
        "tokens",
        "token_strs",
        "token_ids",
        "text_offset",
        "prompt_token_ids",
    ),
    *("logprob", "token_logprobs", "bytes"),
    *("embedding", "data", "score", "relevance_score"),
}
"""Keys whose value depends on the model, its tokenizer or the clock: of a scalar the type counts, of a list of scalars
that it is one.  Objects below them are looked into."""
PROMPT_COUNTS = {
    "prompt_tokens",
    "total_tokens",
    "input_tokens",
    "count",
    "cached_tokens",
    "original_input_tokens",
}
"""These depend on the tokenizer, so they are equal only where the prompt was given as token ids."""

Facts = dict[str, str]
"""What was seen at each path of an answer, such as `body.choices[0].finish_reason`."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    chunks: list[bytes]
    """The body as it was framed on the wire; empty where its length was announced."""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    def json(self) -> Any:
        return json.loads(self.body)


def exchange(url: str, ask: Ask) -> Answer:
    """Send, and read until the server closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), ANSWER_SECONDS) as connection:
        connection.sendall(ask.request())
        raw = b""
        while part := connection.recv(1 << 16):
            raw += part
            assert len(raw) <= BYTES_MAX
    return parse(raw)


def parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = [line.partition(":") for line in lines]
    headers = [(name, value.strip()) for name, _, value in fields]
    framed = ("transfer-encoding", "chunked") in headers
    chunks = list(_unchunked(body)) if framed else []
    return Answer(int(first.split(" ")[1]), headers, b"".join(chunks) if framed else body, chunks)


def _unchunked(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return
        yield rest[:length]
        body = rest[length + 2 :]
    raise AssertionError("the chunked body has no end")


def facts(answer: Answer, *, exact: bool) -> Facts:
    """All of an answer; each of its events has to be one chunk, so that it is on its way the moment it is written.

    `exact`: the prompt was given as token ids, so its count is the same everywhere.
    """
    found = {"headers": ", ".join(name for name, _ in answer.headers), "chunks": str(len(answer.chunks))}
    found |= {f"headers.{name}": value for name, value in answer.headers if name in SAME_VALUE_HEADERS}
    assert answer.chunks == _split(b"".join(answer.chunks)), "chunks that are not events"
    return found | facts_of_content(answer, exact=exact)


def facts_of_content(answer: Answer, *, exact: bool) -> Facts:
    """Status and body."""
    found = {"status": str(answer.status)}
    kind = answer.header("content-type").partition(";")[0]
    if kind == "application/json" and answer.body:
        found |= facts_of_json(answer.json(), exact=exact)
    elif kind == "text/event-stream":
        found |= facts_of_events(_split(answer.body), exact=exact)
    else:
        found["body"] = repr(answer.body)
    return found


def facts_of_json(body: Any, *, exact: bool) -> Facts:
    return dict(_facts(body, "body", "", exact))


def facts_of_events(events: Sequence[bytes], *, exact: bool) -> Facts:
    return dict(_events(events, exact))


def _split(stream: bytes) -> list[bytes]:
    """Its events, each with its end."""
    *events, rest = stream.split(b"\n\n")
    assert not rest, f"a stream that ends within an event: {rest!r}"
    return [event + b"\n\n" for event in events]


def _events(events: Sequence[bytes], exact: bool) -> Iterator[tuple[str, str]]:
    """The events of each choice have their own numbers: which choice is a token ahead is a matter of moments."""
    seen: Counter[str] = Counter()
    for event in events:
        fields = [line.partition(": ") for line in event.decode().strip("\n").split("\n")]
        data = json.loads(fields[-1][2]) if fields[-1][2].startswith("{") else None
        place = _place(data)
        path = f"{place}[{seen[place]}]"
        seen[place] += 1
        for name, _, value in fields:
            if name != "data" or data is None:
                yield f"{path}.{name}", value
        yield from _facts(data, path, "", exact)


def _place(data: Any) -> str:
    if isinstance(data, dict) and data.get("choices"):
        return f"events of choice {data['choices'][0]['index']}"
    return "events"


def _facts(value: object, path: str, key: str, exact: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and key in ("top_logprobs", "prompt_logprobs"):
        yield path, "an object with tokens as keys"
    elif isinstance(value, dict):
        if key not in FREE_VALUES:
            yield f"{path}{{}}", ", ".join(value)
        for name, below in value.items():
            yield from _facts(below, f"{path}.{name}", name, exact)
    elif isinstance(value, list) and (key not in FREE_VALUES or _has_objects(value)):
        yield f"{path}[]", str(len(value))
        for number, below in enumerate(value):
            yield from _facts(below, f"{path}[{number}]", key, exact)
    else:
        yield path, _shown(value, key, exact)


def _has_objects(values: list[object]) -> bool:
    return any(isinstance(value, dict) for value in values)


def _shown(value: object, key: str, exact: bool) -> str:
    if key in FREE_VALUES or (key in PROMPT_COUNTS and not exact):
        return type(value).__name__
    if isinstance(value, str):
        return repr(re.sub(r"[0-9a-f]{8,}|[0-9a-f-]{36}", "*", value))
    return repr(value)


def differences(name: str, one: Facts, other: Facts, sides: tuple[str, str] = ("vllm", "mock")) -> list[str]:
    """One line for each path that differs, in the order of the first answer; of other statuses just what they say."""
    paths = [*one, *(path for path in other if path not in one)]
    if one.get("status") != other.get("status"):
        paths = [path for path in paths if path in ("status", "body.error.message", "body.detail")]
    return [
        f"{name} {path}: {sides[0]} {one.get(path, '-')} | {sides[1]} {other.get(path, '-')}"
        for path in paths
        if one.get(path) != other.get(path)
    ]
