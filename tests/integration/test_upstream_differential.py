"""The upstream client against aiohttp: both read the same bytes, however they are cut, and must agree."""

import gzip
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import aiohttp
import pytest

from gateway.upstream.api import Headers, UpstreamFailed, UpstreamRequest
from gateway.upstream.client import EngineClient
from gateway.upstream.limits import UpstreamLimits

SECONDS = 2.0
"""For an answer that never ends; all others end by their bytes."""
EVENTS = [b'data: {"choices":[{"index":%d}]}\n\n' % index for index in range(5)]
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


PACKED = gzip.compress(b"".join(EVENTS))
ANSWERS = {
    "stream": CHUNKED + chunked(*EVENTS) + b"0\r\n\r\n",
    "capital hex and extension": CHUNKED + b"1F;a=b\r\n" + b"x" * 31 + b"\r\n0\r\n\r\n",
    "trailers": CHUNKED + chunked(*EVENTS) + b"0\r\nx-end: 1\r\nx-more: 2\r\n\r\n",
    "empty stream": CHUNKED + b"0\r\n\r\n",
    "length": SIZED % 2 + b"{}",
    "length zero": SIZED % 0,
    "until the end": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}",
    "until the end, 1.0": b"HTTP/1.0 200 OK\r\n\r\n{}",
    "close": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "client error": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
    "server error": b"HTTP/1.1 503 \r\ncontent-length: 2\r\n\r\n{}",
    "continue first": b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED % 2 + b"{}",
    "early hints first": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + SIZED % 2 + b"{}",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
    % (len(PACKED), PACKED),
    "gzip in chunks": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    + chunked(PACKED[:9], PACKED[9:])
    + b"0\r\n\r\n",
    "cut in a chunk": CHUNKED + chunked(*EVENTS) + b"ff\r\nhalf",
    "cut after a chunk": CHUNKED + chunked(*EVENTS),
    "cut before the last CRLF": CHUNKED + chunked(*EVENTS) + b"0\r\n",
    "cut in a head": CHUNKED[:40],
    "short": SIZED % 10 + b"{}",
    "bad chunk size": CHUNKED + chunked(EVENTS[0]) + b"xyz\r\n",
    "negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "chunk longer than said": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
    "huge chunk size": CHUNKED + b"fffffffffffffffff\r\nhello\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "bad status line": b"HTTP/1.1 abc OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "space before a colon": b"HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\n{}",
    "a header with a NUL": b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 2\r\n\r\n{}",
    "nothing": b"",
}
STRICTER = {
    ("until the end", True),  # a reset is no proper end of an answer without a length
    ("until the end, 1.0", True),
    ("space before a colon", False),  # RFC 9112, 5.1: to be refused, it has been used to smuggle
    ("space before a colon", True),
}
"""Answers, and whether the connection is reset, that aiohttp takes and we refuse on purpose."""


@dataclass
class Seen:
    """What a caller learns: of a failed answer only that it failed and what was passed on before."""

    ok: bool
    status: int
    body: bytes


class Sink:
    started = True

    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    async def head(self, status: int, headers: Headers) -> None:
        self.status = status

    def take(self, data: bytes) -> bool:
        return False

    def take_chunk(self, chunk: bytes, start: int) -> bool:
        self.data += chunk[start:-2]
        return True

    async def body(self, data: bytes) -> None:
        self.data += data


@contextmanager
def server(raw: bytes, cuts: list[int], reset: bool) -> Iterator[str]:
    """Answers one request with exactly these bytes, cut there, and then ends the connection."""

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                answer(connection)

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = b""
        while not asked.endswith(b"\r\n\r\n{}"):
            asked += connection.recv(65_536)
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            connection.sendall(raw[start:end])
            time.sleep(0.001)  # else the kernel puts the pieces together again
        if reset:
            time.sleep(0.02)  # a reset drops what was not read
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


async def by_ours(url: str) -> Seen:
    upstream = EngineClient(UpstreamLimits(SECONDS, SECONDS, SECONDS, SECONDS))
    sink = Sink()
    try:
        await upstream.exchange(UpstreamRequest(url, "/v1/completions", (), b"{}"), sink)
    except UpstreamFailed:
        return Seen(False, sink.status, bytes(sink.data))
    finally:
        await upstream.close()
    return Seen(True, sink.status, bytes(sink.data))


async def by_aiohttp(url: str) -> Seen:
    seen = Seen(False, 0, b"")
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    with suppress(aiohttp.ClientError, OSError, ValueError):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url + "/v1/completions", data=b"{}", allow_redirects=False) as answer,
        ):
            seen.status = answer.status
            async for data in answer.content.iter_any():
                seen.body += data
            seen.ok = True
    return seen


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_both_read_the_same(name: str, reset: bool) -> None:
    raw = ANSWERS[name]
    chance = random.Random(name)
    for pieces in (0, 1, 4, 12):
        cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(pieces))
        with server(raw, cuts, reset) as url:
            ours = await by_ours(url)
        with server(raw, cuts, reset) as url:
            theirs = await by_aiohttp(url)
        assert ours.ok == (theirs.ok and (name, reset) not in STRICTER), (cuts, ours, theirs)
        if ours.ok:
            assert ours == theirs, cuts
