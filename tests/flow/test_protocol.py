"""Our changes to uvicorn's protocol, on a real socket with a small application."""

import asyncio
import contextlib
import gc
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.protocol import PIPELINED_MAX, Cycle, ProxyProtocol
from tests.wire import Wire

HEAD_SECONDS = 0.3
"""Where a head is to be late; elsewhere no stall of the machine may make it so."""
LARGE_BYTES = 16 << 20
"""More than the system's buffers take."""
left: list[bytes] = []
"""The queries of those that `/until-left` saw leave."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with method, path, the names of headers and the body; `/slow` takes longer than a late head may."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = b",".join(sorted(name for name, _ in scope["headers"]))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-names", names)]})
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * HEAD_SECONDS)
    if scope["path"] == "/until-left":
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        left.append(scope["query_string"])
        return
    if scope["path"] == "/large":
        body = b"x" * LARGE_BYTES
    await send({"type": "http.response.body", "body": f"{scope['method']} {scope['path']} ".encode() + body})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving() as url:
        yield url


@pytest.fixture
def late_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.protocol.HEAD_SECONDS", HEAD_SECONDS)


@pytest.fixture
async def short_keep_alive() -> AsyncIterator[str]:
    async with serving(timeout_keep_alive=1) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(
        app, http=ProxyProtocol, ws="none", lifespan="off", log_config=None, access_log=False, **options
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


def request(path: str = "/", body: bytes = b"", *lines: str, method: str = "POST") -> bytes:
    fields = (f"{method} {path} HTTP/1.1", "host: x", *lines, f"content-length: {len(body)}", "", "")
    return "\r\n".join(fields).encode() + body


H2C = (
    "connection: Upgrade, HTTP2-Settings",
    "upgrade: h2c",
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
"""What Java's client sends with every call over plain HTTP."""


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_a_body_behind_an_offer_to_upgrade_is_read(url: str, pieces: int) -> None:
    wire = await Wire.open(url)
    raw = request("/a", b"body of the call", *H2C)
    size = -(-len(raw) // pieces)
    for start in range(0, len(raw), size):
        await wire.send(raw[start : start + size])
        await asyncio.sleep(0.001)
    answer = await wire.answer()
    assert answer.body == b"POST /a body of the call"
    assert "upgrade" not in answer.headers["x-names"]
    assert "http2-settings" in answer.headers["x-names"]
    wire.close()


async def test_the_connection_goes_on_after_such_an_offer(url: str) -> None:
    wire = await Wire.open(url)
    await wire.send(request("/a", b"1", *H2C) + request("/b", b"2") + request("/c", b"3", *H2C))
    assert [(await wire.answer()).body for _ in range(3)] == [b"POST /a 1", b"POST /b 2", b"POST /c 3"]
    assert (await wire.ask(request("/d", b"4"))).body == b"POST /d 4"
    wire.close()


async def test_a_chunked_body_behind_an_offer(url: str) -> None:
    wire = await Wire.open(url)
    lines = ("POST / HTTP/1.1", "host: x", "transfer-encoding: chunked", *H2C, "", "")
    answer = await wire.ask("\r\n".join(lines).encode() + b"3\r\nabc\r\n0\r\n\r\n")
    assert answer.body == b"POST / abc"
    wire.close()


async def test_a_websocket_is_an_ordinary_request(url: str) -> None:
    wire = await Wire.open(url)
    answer = await wire.ask(request("/ws", b"", "connection: Upgrade", "upgrade: websocket", method="GET"))
    assert (answer.status, answer.body) == (200, b"GET /ws ")
    wire.close()


async def test_connect_is_refused(url: str) -> None:
    wire = await Wire.open(url)
    answer = await wire.ask(b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")
    assert answer.status == 400
    assert answer.code == "invalid_value"
    wire.close()


@pytest.mark.usefixtures("late_heads")
@pytest.mark.parametrize("start", [b"", b"POST / HTTP/1.1\r\nhost:", request("/", b"", *H2C)[:-2]])
async def test_a_head_that_stops_ends_the_connection(url: str, start: bytes) -> None:
    wire = await Wire.open(url)
    await wire.send(start)
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b""
    wire.close()


@pytest.mark.usefixtures("late_heads")
async def test_a_later_head_that_stops_ends_the_connection_once_the_answer_before_it_is_complete(
    url: str,
) -> None:
    wire = await Wire.open(url)
    await wire.send(request("/slow", b"1") + b"POST / HT")
    assert (await wire.answer()).body == b"POST /slow 1"
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b""
    wire.close()


@pytest.mark.usefixtures("late_heads")
async def test_a_body_may_take_longer_than_a_head(url: str) -> None:
    """Whoever reads it has a limit of its own."""
    wire = await Wire.open(url)
    raw = request("/", b"12")
    await wire.send(raw[:-1])
    await asyncio.sleep(3 * HEAD_SECONDS)
    assert (await wire.ask(raw[-1:])).body == b"POST / 12"
    wire.close()


async def test_an_endless_head_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.protocol.HEAD_BYTES_MAX", 1000)
    wire = await Wire.open(url)
    await wire.send(request("/", b"", f"x-long: {'x' * 500}"))
    assert (await wire.answer()).status == 200
    answer = await wire.ask(request("/", b"", f"x-long: {'x' * 1000}")[:-4])
    assert (answer.status, answer.code) == (400, "invalid_value")
    wire.close()


# -- the answer ----------------------------------------------------------------------------------------------------


class Pipe:
    """A transport that notes each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def cycle(pipe: Pipe, method: str = "POST", keep_alive: bool = True, version: str = "1.1") -> Cycle:
    flow = FlowControl(cast(asyncio.Transport, pipe))
    log = logging.getLogger("test")
    return Cycle(
        scope=cast(Any, {"type": "http", "method": method, "http_version": version}),
        transport=cast(asyncio.Transport, pipe),
        flow=flow,
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[(b"date", b"now")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


async def answered(
    answer: Cycle, *pieces: bytes, headers: Sequence[tuple[bytes, bytes]] = (), status: int = 200
) -> None:
    await answer.send({"type": "http.response.start", "status": status, "headers": list(headers)})
    for number, piece in enumerate(pieces, 1):
        await answer.send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


async def test_the_head_leaves_with_the_first_of_the_body() -> None:
    pipe = Pipe()
    await answered(cycle(pipe), b"one", b"two", b"", headers=[(b"a", b"b")])
    assert pipe.writes == [
        b"HTTP/1.1 200 OK\r\ndate: now\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"0\r\n\r\n",
    ]
    assert not pipe.closed


async def test_a_body_with_a_length_is_one_write() -> None:
    pipe = Pipe()
    await answered(cycle(pipe), b"whole", headers=[(b"content-length", b"5")])
    assert pipe.writes == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 5\r\n\r\nwhole"]


@pytest.mark.parametrize(
    ("headers", "keep_alive"),
    [([(b"connection", b"close")], True), ([], False), ([(b"connection", b"Close")], True)],
)
async def test_a_connection_that_ends_says_so_once_and_is_closed(
    headers: list[tuple[bytes, bytes]], keep_alive: bool
) -> None:
    pipe = Pipe()
    await answered(cycle(pipe, keep_alive=keep_alive), b"", headers=[*headers, (b"content-length", b"0")])
    assert pipe.writes[0].count(b"connection: close\r\n") == 1
    assert pipe.closed


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204), ("POST", 304)])
async def test_an_answer_without_a_body_has_none(method: str, status: int) -> None:
    pipe = Pipe()
    body = b"not sent" if method == "HEAD" else b""
    await answered(cycle(pipe, method), body, status=status)
    (written,) = pipe.writes
    assert written.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in written


@pytest.mark.parametrize("pieces", [(b"longer",), (b"sho",)])
async def test_a_body_of_another_length_than_told_is_an_error(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(RuntimeError, match="than its content-length"):
        await answered(cycle(Pipe()), *pieces, headers=[(b"content-length", b"5")])


@pytest.mark.parametrize("header", [(b"a", b"b\r\nc: d"), (b"a\n", b"b"), (b"a b", b"c"), (b"a", b"\0")])
async def test_a_header_that_would_start_another_line_is_an_error(header: tuple[bytes, bytes]) -> None:
    pipe = Pipe()
    with pytest.raises(RuntimeError, match="header"):
        await answered(cycle(pipe), b"", headers=[header])
    assert pipe.writes == []


async def test_a_body_that_has_come_is_taken_at_once_and_one_that_has_not_is_not() -> None:
    read = cycle(Pipe())
    read.body += b"one"
    assert read.take_body() is None
    read.body += b"two"
    read.more_body = False
    assert read.take_body() == b"onetwo"
    assert read.body == b""


async def test_no_body_is_taken_before_its_client_was_told_to_go_on_or_after_it_left() -> None:
    waiting, gone = cycle(Pipe()), cycle(Pipe())
    waiting.more_body = gone.more_body = False
    waiting.waiting_for_100_continue = True
    assert waiting.take_body() is None
    gone.leave()
    assert gone.take_body() is None


async def test_who_watches_is_told_of_a_leaving_client_once_also_when_it_has_left() -> None:
    told: list[str] = []
    watched, left, ignored = (cycle(Pipe()) for _ in range(3))
    watched.watch(lambda: told.append("watched"))
    ignored.watch(lambda: told.append("ignored"))
    ignored.watch(None)
    assert told == []
    for one in (watched, left, ignored):
        one.leave()
    assert told == ["watched"]
    left.watch(lambda: told.append("left"))
    assert told == ["watched", "left"]


async def test_nothing_is_written_for_a_client_that_has_left() -> None:
    pipe = Pipe()
    answer = cycle(pipe)
    answer.disconnected = True
    await answered(answer, b"one")
    assert pipe.writes == []


async def test_a_connection_that_waits_for_a_next_request_is_closed_in_time(short_keep_alive: str) -> None:
    wire = await Wire.open(short_keep_alive)
    for _ in range(3):
        assert (await wire.ask(request("/", b"1"))).status == 200
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b""
    wire.close()


async def test_nothing_of_a_connection_is_left_for_the_collector(url: str) -> None:
    def living() -> list[Any]:
        return [found for found in gc.get_objects() if isinstance(found, ProxyProtocol | Cycle)]

    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            wire = await Wire.open(url)
            assert (await wire.ask(request("/", b"1"))).status == 200
            wire.close()
        async with asyncio.timeout(5):
            while living():
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_http_1_0_gets_no_chunks() -> None:
    pipe = Pipe()
    await answered(cycle(pipe, keep_alive=False, version="1.0"), b"one", b"two", b"")
    assert pipe.writes == [b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\n\r\none", b"two"]
    assert pipe.closed


# -- who leaves, and who does not read -------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset])
@pytest.mark.parametrize("behind", [b"", request("/b", b"2"), request("/b", b"2") * 5])
async def test_a_client_with_requests_behind_its_answer_is_seen_to_leave(
    url: str, behind: bytes, leave: Any
) -> None:
    left.clear()
    wire = await Wire.open(url)
    await wire.send(request("/until-left?a", b"1") + behind)
    await wire.head()
    leave(wire)
    async with asyncio.timeout(5):
        while left != [b"a"]:
            await asyncio.sleep(0.01)


async def test_what_waits_behind_an_answer_is_answered_in_order(url: str) -> None:
    wire = await Wire.open(url)
    bodies = [b"%d" % number for number in range(3 * PIPELINED_MAX)] + [b"x" * 200_000, b"last"]
    await wire.send(request("/slow", b"1") + b"".join(request("/b", body) for body in bodies))
    assert (await wire.answer()).body == b"POST /slow 1"
    assert [(await wire.answer()).body for _ in bodies] == [b"POST /b " + body for body in bodies]
    wire.close()


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", request("/b") + b"\0\r\n"])
async def test_garbage_behind_a_request_ends_the_connection(url: str, behind: bytes) -> None:
    """With one answer at most: a 400, or that of the request if it had begun."""
    wire = await Wire.open(url)
    await wire.send(request("/slow", b"1") + behind)
    async with asyncio.timeout(5):
        written = await wire._reader.read()
    assert len(re.findall(rb"HTTP/1.1 \d", written)) <= 1
    wire.close()


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", request("/b") + b"garbage\r\n\r\n"])
async def test_no_400_is_written_into_an_answer_that_has_begun(url: str, behind: bytes) -> None:
    wire = await Wire.open(url)
    await wire.send(request("/until-left", b"1"))
    await wire.head()
    await wire.send(behind)
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b"5\r\nbegun\r\n"
    wire.close()


@pytest.mark.parametrize("path", ["/", "/until-left"])
async def test_endless_trailers_end_the_connection_and_are_not_kept(
    url: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("gateway.http.protocol.HEAD_BYTES_MAX", 10_000)
    kept: list[int] = []
    on_header = ProxyProtocol.on_header

    def seen(protocol: ProxyProtocol, name: bytes, value: bytes) -> None:
        on_header(protocol, name, value)
        kept.append(len(protocol.headers))

    monkeypatch.setattr(ProxyProtocol, "on_header", seen)
    wire = await Wire.open(url)
    with contextlib.suppress(ConnectionError):
        await wire.send(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n".encode()
        )
        for number in range(1000):
            await wire.send(b"x-%d: %s\r\n" % (number, b"x" * 1000))
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            while await wire._reader.read(65_536):
                continue
    assert len(kept) > 2
    assert kept[-1] == max(kept) == 2
    wire.close()


async def test_a_long_chunked_body_is_no_framing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.protocol.HEAD_BYTES_MAX", 10_000)
    wire = await Wire.open(url)
    await wire.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(100):
        await wire.send(b"400\r\n" + b"y" * 1024 + b"\r\n")
    answer = await wire.ask(b"0\r\n\r\n")
    assert answer.body == b"POST / " + b"y" * 102_400
    wire.close()


async def test_an_answer_that_nobody_reads_is_dropped_in_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.protocol.UNREAD_SECONDS", 0.2)
    lost = asyncio.Event()
    ended = ProxyProtocol.connection_lost
    monkeypatch.setattr(ProxyProtocol, "connection_lost", lambda *a: (lost.set(), ended(*a)))
    wire = await Wire.open(url)
    wire._reader._transport.pause_reading()  # type: ignore[attr-defined]
    await wire.send(request("/large", b"", "connection: close"))
    async with asyncio.timeout(10):
        await lost.wait()
    wire.reset()


async def test_an_answer_that_is_read_slowly_arrives_whole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer in all than a client may take for the next of it."""
    unread_seconds = 2.5
    monkeypatch.setattr("gateway.http.protocol.UNREAD_SECONDS", unread_seconds)
    wire = await Wire.open(url, limit=1 << 16)
    await wire.send(request("/large", b"", "connection: close"))
    arrived, began = 0, time.monotonic()
    while part := await wire._reader.read(1 << 17):
        arrived += len(part)
        await asyncio.sleep(unread_seconds / 60)
    assert arrived > LARGE_BYTES
    assert time.monotonic() - began > unread_seconds
    wire.close()
