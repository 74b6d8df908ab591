"""Our changes to uvicorn's protocol, on a real socket with a small application."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from gateway.http.protocol import ProxyProtocol
from tests.wire import Wire

HEAD_SECONDS = 0.05


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with method, path, the names of headers and the body; `/slow` takes longer than a head may."""
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
    await send({"type": "http.response.body", "body": f"{scope['method']} {scope['path']} ".encode() + body})


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr("gateway.http.protocol.HEAD_SECONDS", HEAD_SECONDS)
    config = uvicorn.Config(
        app, http=ProxyProtocol, ws="none", lifespan="off", log_config=None, access_log=False
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


@pytest.mark.parametrize("start", [b"", b"POST / HTTP/1.1\r\nhost:", request("/", b"", *H2C)[:-2]])
async def test_a_head_that_stops_ends_the_connection(url: str, start: bytes) -> None:
    wire = await Wire.open(url)
    await wire.send(start)
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b""
    wire.close()


async def test_a_later_head_that_stops_ends_the_connection_once_the_answer_before_it_is_complete(
    url: str,
) -> None:
    wire = await Wire.open(url)
    await wire.send(request("/slow", b"1") + b"POST / HT")
    assert (await wire.answer()).body == b"POST /slow 1"
    async with asyncio.timeout(5):
        assert await wire._reader.read() == b""
    wire.close()


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
