"""Exchanges recorded from a real vLLM: read from `tests/fixtures/vllm`, repeated, and compared key by key."""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm"
ANSWER_SECONDS = 20
LINE_CHARS_MAX = 400
"""The recording cut the bodies that it noted to so many characters."""


@dataclass(frozen=True)
class Reply:
    """An answer as it came: lines of its head, and the pieces of its body, one for each chunk."""

    status: str
    headers: list[tuple[str, str]]
    pieces: list[bytes]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.headers]

    @property
    def chunked(self) -> bool:
        return ("transfer-encoding", "chunked") in self.headers

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


@dataclass(frozen=True)
class Capture:
    name: str
    method: str
    path: str
    body: bytes
    headers: list[tuple[str, str]]
    reply: Reply


def load(name: str) -> Capture:
    """The capture of that name.  Line ends were made LF for the repository; HTTP's own are CR LF."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    notes, _, answer = text.partition("HTTP/1.1 ")
    first, *rest = notes.splitlines() or [""]
    asked, _, extra = first.removeprefix("### ").partition(" -H ")
    method, _, path = asked.strip().partition(" ")
    body, headers = "", [extra] if extra else []
    for line in rest:
        note = line.removeprefix("### ")
        if note.startswith("body"):
            body = note.removeprefix("body").removeprefix(":").strip()
        elif note.startswith("curl: -H "):
            headers.append(note.removeprefix("curl: -H "))
    head, _, tail = answer.partition("\n\n")
    lines = head.rstrip("\n").split("\n")
    reply_headers = [_header(line) for line in lines[1:]]
    pieces = [tail.rstrip("\n").encode()] if tail.strip() else []
    reply = Reply(f"HTTP/1.1 {lines[0]}", reply_headers, pieces)
    if reply.chunked:
        reply = Reply(reply.status, reply_headers, list(_lf_chunks(tail.encode())))
    return Capture(name, method, path, body.encode(), [_header(line) for line in headers], reply)


def repeat(capture: Capture, url: str) -> Reply:
    """Send the request of a capture as its client did, and read the whole answer."""
    parts = urlsplit(url)
    headers = [("host", parts.netloc), ("accept", "*/*")]
    if capture.method == "POST":
        headers += [("content-type", "application/json"), ("content-length", str(len(capture.body)))]
    headers += capture.headers  # like the recording: a second content type follows the first one
    lines = [f"{capture.method} {capture.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    with socket.create_connection((parts.hostname, parts.port), ANSWER_SECONDS) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + capture.body)
        with connection.makefile("rb") as stream:
            status = stream.readline().decode().strip()
            pairs = [_header(line) for line in iter(lambda: stream.readline().decode().strip(), "")]
            reply = Reply(status, pairs, [])
            if reply.chunked:
                pieces = list(_chunks(stream))
            else:
                length = 0 if capture.method == "HEAD" else int(dict(pairs)["content-length"])
                pieces = [stream.read(length)] if length else []
    return Reply(status, pairs, pieces)


def events(piece: bytes) -> list[tuple[str, Any]]:
    """Name and document of the server-sent events in a chunk; "[DONE]" is a string."""
    found = []
    for block in piece.decode().strip("\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def ids(numbers: range, **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": list(numbers), **fields}).encode()


def tens(count: int, **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": [10] * count, **fields}).encode()


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _lf_chunks(raw: bytes) -> Iterator[bytes]:
    while raw:
        size, _, raw = raw.partition(b"\n")
        length = int(size, 16)
        if length == 0:
            return
        yield raw[:length]
        raw = raw[length:].removeprefix(b"\n")


def _chunks(stream: Any) -> Iterator[bytes]:
    while length := int(stream.readline(), 16):
        yield stream.read(length)
        stream.readline()
    stream.readline()


# -- comparing -----------------------------------------------------------------------------------------------------

VARYING = {
    # Chosen anew by each server or each call.
    "id", "item_id", "created", "created_at", "system_fingerprint",
    # What the model says, and how sure it is of it.
    "content", "text", "token", "logprob", "delta",
    # The text of the mock's tokenizer.
    "prompt",
    # What a model that pools makes of its input.
    "embedding", "data", "score", "relevance_score",
    # Measured times.
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
}  # fmt: skip
"""Values of these keys need the same type only."""
ANY_LENGTH = {"prompt_token_ids", "bytes", "tokens", "token_strs"}
"""Lists whose length the tokenizer decides."""
TOKENIZED = {"prompt_tokens", "total_tokens", "input_tokens", "original_input_tokens", "count"}
"""Counts that the tokenizer decides where the prompt is a text."""
ID = re.compile(
    r"(chatcmpl|cmpl|resp|msg|modelperm|embd|pooling|score)[-_]([0-9a-f]{16}|my-req-42|bodyid7|mine)|tiny|model"
)


def difference(expected: Any, actual: Any, path: str = "", *, text_prompt: bool) -> str:
    """The first difference between two documents, or an empty string."""
    key = path.rsplit(".", 1)[-1]
    if type(expected) is not type(actual):
        return f"{path}: {expected!r} became {actual!r}"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{path}: keys {list(expected)} became {list(actual)}"
        pairs = [(expected[name], actual[name], f"{path}.{name}") for name in expected]
    elif isinstance(expected, list):
        if len(expected) != len(actual) and key not in ANY_LENGTH:
            return f"{path}: {len(expected)} items became {len(actual)}"
        pairs = [(one, other, path) for one, other in zip(expected, actual, strict=False)]
        if key in ANY_LENGTH or key == "token_ids":
            return "" if {*map(type, expected)} == {*map(type, actual)} else f"{path}: other types"
    else:
        return _scalar_difference(key, expected, actual, path, text_prompt)
    found = (difference(one, other, place, text_prompt=text_prompt) for one, other, place in pairs)
    return next(filter(None, found), "")


def _scalar_difference(key: str, expected: Any, actual: Any, path: str, text_prompt: bool) -> str:
    if key == "id" and not ID.fullmatch(actual):
        return f"{path}: {actual!r} is no id of vLLM's"
    if key in VARYING or (text_prompt and key in TOKENIZED):
        return ""
    return "" if expected == actual else f"{path}: {expected!r} became {actual!r}"
