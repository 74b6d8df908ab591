"""The upstream client against servers that send exact bytes."""

import asyncio
import gc
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.headers import answer_headers, request_headers
from gateway.upstream.api import Headers, UpstreamFailed, UpstreamRequest
from gateway.upstream.client import EngineClient, tls_context
from gateway.upstream.limits import KEEPALIVE_SECONDS, UpstreamLimits

SHORT = 0.08
LONG = 20.0
LIMITS = UpstreamLimits(LONG, LONG, LONG, LONG)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"choices":[{"index":0}]}\n\n'
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection:
    """One accepted connection, with what was read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.requests: list[tuple[bytes, bytes]] = []
        self.gone = asyncio.Event()

    async def request(self) -> bytes:
        """Read one request whole; returns its head."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        self.requests.append((head, await self.reader.readexactly(length)))
        return head

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def until_gone(self) -> None:
        """Returns when the other side has closed."""
        with suppress(OSError):
            while await self.reader.read(65_536):
                pass
        self.gone.set()

    def reset(self) -> None:
        """Close with a TCP reset."""
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()


class Engine:
    def __init__(self, url: str) -> None:
        self.url = url
        self.connections: list[Connection] = []

    @property
    def requests(self) -> list[tuple[bytes, bytes]]:
        return [request for connection in self.connections for request in connection.requests]


@asynccontextmanager
async def engine(script: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Engine]:
    """A server that plays `script` on each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        here.connections.append(connection)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await script(connection)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    here = Engine(f"http://{host}:{port}")
    try:
        yield here
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes the sockets one turn later


@asynccontextmanager
async def client(limits: UpstreamLimits = LIMITS) -> AsyncIterator[EngineClient]:
    upstream = EngineClient(limits)
    try:
        yield upstream
    finally:
        await upstream.close()


class Sink:
    """Collects an answer."""

    def __init__(self, *, starts: bool = True) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.data = b""
        self._starts = starts

    @property
    def started(self) -> bool:
        return self._starts and b"data:" in self.data

    async def head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, list(headers)

    def take(self, data: bytes) -> bool:
        return False

    async def body(self, data: bytes) -> None:
        self.data += data


def call(url: str, body: bytes = b"{}", headers: Sequence[tuple[bytes, bytes]] = ()) -> UpstreamRequest:
    return UpstreamRequest(url, "/v1/chat/completions", headers, body)


async def failing(upstream: EngineClient, url: str, sink: Sink) -> UpstreamFailed:
    with pytest.raises(UpstreamFailed) as caught:
        await upstream.exchange(call(url), sink)
    return caught.value


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_stream_is_relayed_byte_for_byte() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT), chunk(EVENT[:7]), chunk(EVENT[7:]), LAST_CHUNK)
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url, b'{"a":1}', [(b"content-type", b"application/json")]), sink)
        assert (sink.status, sink.data) == (200, EVENT + EVENT)
        assert sink.headers == [(b"content-type", b"text/event-stream; charset=utf-8")]
        head, body = server.requests[0]
        assert body == b'{"a":1}'
        assert head.lower().split(b"\r\n") == [
            b"post /v1/chat/completions http/1.1",
            b"host: " + server.url.removeprefix("http://").encode(),
            b"content-type: application/json",
            b"content-length: 7",
            b"",
            b"",
        ]


async def test_a_finished_connection_is_used_again() -> None:
    async def script(peer: Connection) -> None:
        while True:
            await peer.request()
            await peer.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
            )

    async with engine(script) as server, client() as upstream:
        for _ in range(3):
            await upstream.exchange(call(server.url), Sink())
        assert len(server.connections) == 1
        assert len(server.requests) == 3


@pytest.mark.parametrize("size", [1_048_576, 3_000_000])
async def test_a_large_body_arrives_whole(size: int) -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with engine(script) as server, client() as upstream:
        await upstream.exchange(call(server.url, b"x" * size), Sink())
        assert server.requests[0][1] == b"x" * size
        assert b"content-type" not in server.requests[0][0].lower()


async def answer_once_then_close(peer: Connection) -> None:
    """As an engine whose keep-alive time ends just as the next request is on its way."""
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    await peer.request()


async def test_a_request_that_met_a_closing_connection_is_sent_again_on_a_new_one() -> None:
    async with engine(answer_once_then_close) as server, client() as upstream:
        await upstream.exchange(call(server.url), Sink())
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == b"{}"
        assert len(server.connections) == 2


async def test_a_request_alone_neither_takes_nor_leaves_a_connection() -> None:
    async def script(peer: Connection) -> None:
        while True:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with engine(script) as server, client() as upstream:
        await upstream.exchange(call(server.url), Sink())
        for _ in range(2):
            await upstream.exchange(replace(call(server.url), alone=True), Sink())
        await upstream.exchange(call(server.url), Sink())
        assert [len(peer.requests) for peer in server.connections] == [2, 1, 1]


async def test_a_request_is_not_sent_again_once_an_engine_may_have_worked_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.upstream.client.STALE_SECONDS", 0.0)
    async with engine(answer_once_then_close) as server, client() as upstream:
        await upstream.exchange(call(server.url), Sink())
        error = await failing(upstream, server.url, Sink())
        assert not error.connecting
        assert not error.timed_out
        assert len(server.requests) == 2


async def test_a_request_is_not_sent_again_after_the_first_byte_of_an_answer() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await peer.request()
        await peer.send(b"HTTP/1.1 2")

    async with engine(script) as server, client() as upstream:
        await upstream.exchange(call(server.url), Sink())
        await failing(upstream, server.url, Sink())
        assert len(server.requests) == 2


async def test_a_new_connection_that_closes_without_a_byte_is_not_tried_again() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()

    async with engine(script) as server, client() as upstream:
        await failing(upstream, server.url, Sink())
        assert len(server.requests) == 1


async def test_a_connection_closed_while_idle_is_not_used() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        peer.writer.close()
        peer.gone.set()

    async with engine(script) as server, client() as upstream:
        await upstream.exchange(call(server.url), Sink())
        await server.connections[0].gone.wait()
        await asyncio.sleep(0.01)
        await upstream.exchange(call(server.url), Sink())
        assert len(server.connections) == 2


def test_idle_connections_are_dropped_before_uvicorn_drops_them() -> None:
    assert KEEPALIVE_SECONDS < 5


async def test_a_refused_connection_is_known_to_have_sent_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with client() as upstream:
            error = await failing(upstream, url, Sink())
    assert error.connecting
    assert not error.timed_out


@pytest.mark.parametrize("ending", ["closed", "reset", "answered"])
async def test_a_connection_lost_before_its_first_request_is_known_to_have_sent_nothing(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """On a busy loop the caller's turn may come after that of what the engine did meanwhile; here it always does."""

    async def script(peer: Connection) -> None:
        if ending == "reset":
            peer.reset()
        elif ending == "answered":
            await peer.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
            await peer.until_gone()

    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def connect_late(*args: Any, **options: Any) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        made = await connect(*args, **options)
        await soon(made[0].is_closing)
        return made

    monkeypatch.setattr(loop, "create_connection", connect_late)
    async with asyncio.timeout(30), engine(script) as server, client() as upstream:
        error = await failing(upstream, server.url, Sink())
        assert len(server.connections) == 1
    assert error.connecting
    assert not error.timed_out


async def test_a_dropped_connection_attempt_times_out() -> None:
    """A full accept queue drops SYNs, as a dead address does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect(address)
            fillers.append(filler)
        async with client(UpstreamLimits(SHORT, LONG, LONG, LONG)) as upstream:
            error = await failing(upstream, f"http://127.0.0.1:{address[1]}", Sink())
        for filler in fillers:
            filler.close()
    assert error.connecting
    assert error.timed_out
    assert "0.08 s" in error.detail


async def test_slow_headers_time_out_whatever_drips() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await peer.send(b"x-drip: 1\r\n")
            await asyncio.sleep(0.01)

    async with engine(script) as server, client(UpstreamLimits(LONG, SHORT, LONG, LONG)) as upstream:
        error = await failing(upstream, server.url, Sink())
    assert error.timed_out
    assert not error.connecting


async def test_comments_do_not_hold_off_the_first_event_limit() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b": keep-alive\n\n"))
            await asyncio.sleep(0.01)

    async with engine(script) as server, client(UpstreamLimits(LONG, LONG, SHORT, LONG)) as upstream:
        sink = Sink()
        error = await failing(upstream, server.url, sink)
        assert error.timed_out
        assert "first event" in error.detail
        assert sink.data.startswith(b": keep-alive\n\n")


async def test_the_idle_limit_counts_from_the_first_event_on() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT))
        await peer.until_gone()

    async with engine(script) as server, client(UpstreamLimits(LONG, LONG, LONG, SHORT)) as upstream:
        sink = Sink()
        error = await failing(upstream, server.url, sink)
        assert error.timed_out
        assert sink.data == EVENT
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)


async def test_a_stream_slower_than_idle_may_still_take_its_time_to_the_first_event() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await asyncio.sleep(3 * SHORT)
        await peer.send(chunk(EVENT), LAST_CHUNK)

    async with engine(script) as server, client(UpstreamLimits(LONG, LONG, LONG, SHORT)) as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == EVENT


async def test_a_plain_answer_has_no_first_event() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{")
        await asyncio.sleep(3 * SHORT)
        await peer.send(b"}")

    async with engine(script) as server, client(UpstreamLimits(LONG, LONG, SHORT, LONG)) as upstream:
        sink = Sink(starts=False)
        await upstream.exchange(call(server.url), sink)
        assert sink.data == b"{}"


BROKEN = {
    "nothing": b"",
    "garbage": b"this is not HTTP\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "cut in a chunk": STREAM_HEAD + b"ff\r\n" + EVENT,
    "cut between chunks": STREAM_HEAD + chunk(EVENT),
    "bad chunk size": STREAM_HEAD + chunk(EVENT) + b"zz\r\n",
    "short of its length": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{}",
    "redirect": b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /\r\ncontent-length: 0\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 110 + b"content-length: 0\r\n\r\n",
    "unknown encoding": b"HTTP/1.1 200 OK\r\ncontent-encoding: compress\r\ncontent-length: 2\r\n\r\n{}",
    "bad gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 8\r\n\r\nnot gzip",
}

COMPLETE = {"redirect", "not modified", "unknown encoding"}
"""Refused, but whole: their connection may serve the next call."""


@pytest.mark.parametrize("ending", ["close", "reset", "stay"])
@pytest.mark.parametrize("name", BROKEN)
async def test_broken_answers_fail_and_their_connection_is_closed(name: str, ending: str) -> None:
    needs_an_end = name in {
        "nothing",
        "half a head",
        "cut in a chunk",
        "cut between chunks",
        "short of its length",
    }

    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(BROKEN[name])
        if ending == "close" or (ending == "stay" and needs_an_end):
            peer.writer.write_eof()
        elif ending == "reset":
            peer.reset()
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        error = await failing(upstream, server.url, Sink())
        assert not error.connecting
        assert not error.timed_out
        assert len(error.detail) <= 200
        if name in COMPLETE:
            await upstream.close()
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)
        assert len(server.requests) == 1


async def test_events_before_the_cut_are_delivered() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(EVENT) * 3 + b"ff\r\nhalf")

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await failing(upstream, server.url, sink)
        assert sink.data == EVENT * 3 + b"half"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_an_error_status_is_an_answer(status: int) -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 %d X\r\nretry-after: 3\r\ncontent-length: 4\r\n\r\nnope" % status)

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert (sink.status, sink.data, sink.headers) == (status, b"nope", [(b"retry-after", b"3")])


async def test_an_early_answer_to_an_unread_body_closes_the_connection() -> None:
    async def script(peer: Connection) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url, b"x" * 20_000_000), sink)
        assert sink.status == 413
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)


async def test_a_compressed_answer_is_decoded() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        packed = gzip.compress(b"{}" * 500)
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\nvary: Origin\r\n\r\n"
        await peer.send(head % len(packed) + packed)

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == b"{}" * 500
        assert sink.headers == [(b"vary", b"Origin")]


async def test_cookies_and_the_environments_proxy_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def script(peer: Connection) -> None:
        while True:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        await upstream.exchange(call(server.url), sink)
        assert sink.headers == []
        assert b"cookie" not in server.requests[1][0].lower()


async def test_a_slow_reader_blocks_the_engine() -> None:
    """Far more is offered than taken: what the engine gets rid of is bounded by buffers, not by the answer."""
    piece = b"data: " + b"x" * 65_528 + b"\n\n"
    sent = 0
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def script(peer: Connection) -> None:
        nonlocal sent
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        peer.writer.transport.set_write_buffer_limits(high=65_536)
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(1_000):
            await peer.send(chunk(piece))
            sent += len(piece)
        await peer.send(LAST_CHUNK)

    class Slow(Sink):
        async def body(self, data: bytes) -> None:
            asked.set()
            await go_on.wait()
            self.data = data
            self.total = getattr(self, "total", 0) + len(data)

    idle_seconds = 0.5
    limits = UpstreamLimits(LONG, LONG, LONG, idle_seconds)
    async with engine(script) as server, client(limits) as upstream:
        sink = Slow()
        task = asyncio.create_task(upstream.exchange(call(server.url), sink))
        await asked.wait()
        before = -1
        while sent != before:  # until nothing moves for longer than the idle limit
            before = sent
            await asyncio.sleep(2 * idle_seconds)
        assert sent < 20_000_000
        assert not task.done()
        go_on.set()
        await task
        assert sink.total == 1_000 * len(piece)


@pytest.mark.parametrize("moment", ["accepted", "head", "body"])
async def test_a_cancelled_call_closes_its_connection(moment: str) -> None:
    reached = asyncio.Event()

    async def script(peer: Connection) -> None:
        await peer.request()
        if moment == "head":
            await peer.send(STREAM_HEAD)
        if moment == "body":
            await peer.send(STREAM_HEAD, chunk(EVENT))
        if moment == "accepted":
            reached.set()
        await peer.until_gone()

    class Noting(Sink):
        async def head(self, status: int, headers: Headers) -> None:
            if moment == "head":
                reached.set()

        async def body(self, data: bytes) -> None:
            reached.set()

    async with engine(script) as server, client() as upstream:
        task = asyncio.create_task(upstream.exchange(call(server.url), Noting()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)


async def test_a_cancelled_upload_does_not_linger() -> None:
    """The engine reads nothing: closing politely would wait for it for ever."""
    accepted = asyncio.Event()
    gone = asyncio.Event()

    async def script(peer: Connection) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        accepted.set()
        await gone.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        task = asyncio.create_task(upstream.exchange(call(server.url, b"x" * 50_000_000), Sink()))
        await accepted.wait()
        (transport,) = client_transports()
        await soon(lambda: transport.get_write_buffer_size() > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)  # the loop closes the socket one turn later
        raw = transport.get_extra_info("socket")  # uvloop has none once it is closed
        assert raw is None or raw.fileno() == -1
        gone.set()


def client_transports() -> list[asyncio.WriteTransport]:
    """The connections that the client holds, busy or kept."""
    protocols = [found for found in gc.get_objects() if type(found).__name__ == "EngineConnection"]
    return [found._transport for found in protocols if found.usable]


async def test_nothing_of_a_closed_connection_is_left_for_the_collector() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT) + LAST_CHUNK)
        await peer.until_gone()

    def living() -> list[object]:
        return [
            found for found in gc.get_objects() if type(found).__name__ in ("EngineConnection", "Exchange")
        ]

    async with engine(script) as server, client() as upstream:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await upstream.exchange(replace(call(server.url), alone=True), Sink())
            await soon(lambda: not living())
        finally:
            gc.enable()


@pytest.mark.parametrize("where", ["head", "body"])
@pytest.mark.parametrize(
    "error", [ConnectionResetError("client"), TimeoutError("client"), RuntimeError("ours")]
)
async def test_an_exception_of_the_receiver_passes_and_closes(where: str, error: Exception) -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT))
        await peer.until_gone()

    class Broken(Sink):
        async def head(self, status: int, headers: Headers) -> None:
            if where == "head":
                raise error

        async def body(self, data: bytes) -> None:
            raise error

    async with engine(script) as server, client() as upstream:
        with pytest.raises(type(error)) as caught:
            await upstream.exchange(call(server.url), Broken())
        assert caught.value is error
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)


async def test_after_a_broken_answer_the_next_call_gets_its_own() -> None:
    answers = iter([chunk(b"data: left over\n\n"), chunk(EVENT) + LAST_CHUNK])

    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + next(answers))
        await peer.until_gone()

    class Leaving(Sink):
        async def body(self, data: bytes) -> None:
            raise RuntimeError

    async with engine(script) as server, client() as upstream:
        with pytest.raises(RuntimeError):
            await upstream.exchange(call(server.url), Leaving())
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == EVENT
        assert len(server.connections) == 2


async def test_a_wave_of_cancelled_calls_leaves_a_working_client() -> None:
    async def script(peer: Connection) -> None:
        while True:
            await peer.request()
            await asyncio.sleep(0.005)
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with engine(script) as server, client() as upstream:
        for turn in range(10):
            wave = [asyncio.create_task(upstream.exchange(call(server.url), Sink())) for _ in range(20)]
            await asyncio.sleep(turn / 1_000)
            for task in wave:
                task.cancel()
            await asyncio.gather(*wave, return_exceptions=True)
        sinks = [Sink() for _ in range(20)]
        await asyncio.gather(*(upstream.exchange(call(server.url), sink) for sink in sinks))
        assert [sink.data for sink in sinks] == [b"{}"] * 20
        assert len(client_transports()) <= 40


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_connection_left_unread_is_not_used_again(how: str) -> None:
    """The answer's end comes in the same read as a delivery that a slow client suspends, and then the client leaves."""

    async def script(peer: Connection) -> None:
        while True:
            await peer.request()
            await peer.send(STREAM_HEAD + chunk(EVENT) + LAST_CHUNK)

    class Stuck(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.waits = asyncio.get_running_loop().create_future()
            self.reached = asyncio.Event()

        async def body(self, data: bytes) -> None:
            self.reached.set()
            await self.waits

    async with engine(script) as server, client(UpstreamLimits(LONG, 2, LONG, LONG)) as upstream:
        stuck = Stuck()
        task = asyncio.create_task(upstream.exchange(call(server.url), stuck))
        await stuck.reached.wait()
        if how == "cancelled":
            task.cancel()
        else:
            stuck.waits.set_exception(ConnectionResetError("client"))
        await asyncio.gather(task, return_exceptions=True)
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == EVENT
        assert len(server.connections) == 2


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 2", b"\0\0"])
async def test_bytes_behind_an_answer_do_not_change_it(behind: bytes) -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope" + behind)
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert (sink.status, sink.data) == (404, b"nope")
        await asyncio.wait_for(server.connections[0].gone.wait(), 10)


async def test_a_receiver_that_has_raised_is_not_called_again() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT), chunk(EVENT), LAST_CHUNK)
        await peer.until_gone()

    class Broken(Sink):
        calls = 0

        async def body(self, data: bytes) -> None:
            self.calls += 1
            raise RuntimeError(self.calls)

    async with engine(script) as server, client() as upstream:
        sink = Broken()
        with pytest.raises(RuntimeError, match="1"):
            await upstream.exchange(call(server.url), sink)
        assert sink.calls == 1


async def test_of_a_head_that_is_too_long_nothing_is_passed_on() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 110 + b"content-length: 2\r\n\r\n{}")
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await failing(upstream, server.url, sink)
        assert (sink.status, sink.data) == (0, b"")


async def test_trailers_without_end_are_a_failure() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, chunk(EVENT), b"0\r\nx: ")
        while True:
            await peer.send(b"y" * 65_536)

    async with engine(script) as server, client() as upstream:
        error = await failing(upstream, server.url, Sink())
        assert "too long" in error.detail


@pytest.mark.parametrize("end", ["chunk in a later read", "closed"])
async def test_a_compressed_answer_that_is_cut_off_fails(end: str) -> None:
    packed = gzip.compress(EVENT * 50)[:-9]
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n"

    async def script(peer: Connection) -> None:
        await peer.request()
        if end == "closed":
            await peer.send(head + b"\r\n" + packed)
            return
        await peer.send(head + b"transfer-encoding: chunked\r\n\r\n" + chunk(packed))
        await asyncio.sleep(0.05)
        await peer.send(LAST_CHUNK)
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        assert "cut off" in (await failing(upstream, server.url, Sink())).detail


async def test_all_members_of_a_compressed_answer_are_decoded() -> None:
    async def script(peer: Connection) -> None:
        await peer.request()
        packed = gzip.compress(b"{") + gzip.compress(b"}")
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
        await peer.send(head + packed)
        await peer.until_gone()

    async with engine(script) as server, client() as upstream:
        sink = Sink()
        await upstream.exchange(call(server.url), sink)
        assert sink.data == b"{}"


async def test_a_closed_client_sends_nothing() -> None:
    async with client() as upstream:
        await upstream.close()
        error = await failing(upstream, "http://127.0.0.1:1", Sink())
    assert error.connecting


async def test_an_unreadable_authority_file_is_refused_at_once(tmp_path: object) -> None:
    with pytest.raises(OSError, match="No such file"):
        tls_context(f"{tmp_path}/none.pem")


def test_engines_get_allowed_headers_only() -> None:
    sent = [
        (b"Authorization", b"Bearer kvg_secret"),
        (b"X-Api-Key", b"kvg_secret"),
        (b"Api-Key", b"kvg_secret"),
        (b"Cookie", b"a=b"),
        (b"Proxy-Authorization", b"Basic x"),
        (b"Connection", b"close, X-Session-Id"),
        (b"X-Session-Id", b"1"),
        (b"TE", b"trailers"),
        (b"Trailer", b"x"),
        (b"Upgrade", b"h2c"),
        (b"Expect", b"100-continue"),
        (b"X-Forwarded-For", b"10.0.0.1"),
        (b"Host", b"evil"),
        (b"Accept-Encoding", b"gzip"),
        (b"Content-Length", b"5"),
        (b"X-Request-Id", b"theirs"),
        (b"X-Kvgate-Priority", b"high"),
        (b"Content-Type", b"application/json"),
        (b"Traceparent", b"00-1"),
        (b"User-Agent", b"a\r\nx: y"),
        (b"Baggage", "ü".encode()),
    ]
    expected = [
        (b"content-type", b"application/json"),
        (b"traceparent", b"00-1"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"ours"),
    ]
    assert request_headers(sent, "ours") == expected


def test_clients_do_not_get_what_belongs_to_the_engines_connection() -> None:
    raw = [
        (b"Date", b"x"),
        (b"Server", b"uvicorn"),
        (b"Set-Cookie", b"a=b"),
        (b"Content-Length", b"5"),
        (b"Content-Encoding", b"gzip"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Connection", b"keep-alive, x-hop"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Hop", b"1"),
        (b"X-Request-Id", b"engine"),
        (b"X-Kvgate-Replica", b"spoofed"),
        (b"Content-Type", b"application/json"),
        (b"Vary", b"Origin"),
        (b"Vary", b"Accept"),
    ]
    assert answer_headers(raw) == [
        (b"content-type", b"application/json"),
        (b"vary", b"Origin"),
        (b"vary", b"Accept"),
    ]
