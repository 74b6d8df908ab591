"""Where a chunk of an answer may be written as it is: nowhere while its client does not read, has left or has all."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.http.protocol import Cycle, ProxyProtocol
from gateway.http.relay import WRITER

START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
REQUEST = b"POST / HTTP/1.%d\r\nhost: x\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"

Send = Callable[[Any], Awaitable[None]]


class Socket(asyncio.Transport):
    """Takes everything, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})

    def write(self, data: object) -> None: ...

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Client:
    """A client's connection whose requests are answered by hand."""

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.cycles: list[Cycle] = []
        self.answered: list[asyncio.Event] = []
        config = uvicorn.Config(self.app, interface="asgi3", ws="none", lifespan="off", log_config=None)
        config.load()
        self.protocol = ProxyProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        self.protocol.connection_made(Socket())

    async def app(self, scope: Any, receive: object, send: Send) -> None:
        self.sends.append(send)
        self.cycles.append(scope["extensions"][WRITER])
        self.answered.append(asyncio.Event())
        await self.answered[-1].wait()

    async def ask(self, version: int = 1) -> tuple[Cycle, Send]:
        self.protocol.data_received(REQUEST % version)
        while len(self.cycles) < self.protocol.server_state.total_requests + 1:
            await asyncio.sleep(0)
        return self.cycles[-1], self.sends[-1]

    async def leave(self) -> None:
        self.protocol.connection_lost(None)
        for event in self.answered:
            event.set()
        await asyncio.sleep(0)


async def body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def test_there_is_a_place_while_the_answer_goes_out_in_chunks() -> None:
    client = Client()
    cycle, send = await client.ask()
    assert cycle.chunk_to is None
    await send(START)
    assert cycle.chunk_to is None  # its head goes out with the first of the body
    await body(send, b"a")
    assert cycle.chunk_to == cycle.transport.write
    await body(send, b"", more=False)
    assert cycle.chunk_to is None
    client.answered[-1].set()
    later, send = await client.ask()
    await send(START)
    await body(send, b"a")
    assert (cycle.chunk_to, later.chunk_to) == (None, cycle.transport.write)
    await client.leave()


async def test_a_client_that_does_not_read_is_no_place() -> None:
    client = Client()
    cycle, send = await client.ask()
    await send(START)
    await body(send, b"a")
    client.protocol.pause_writing()
    assert cycle.chunk_to is None
    client.protocol.resume_writing()
    assert cast(Any, cycle).chunk_to == cycle.transport.write
    await client.leave()


async def test_nor_is_one_that_has_left() -> None:
    client = Client()
    cycle, send = await client.ask()
    await send(START)
    await body(send, b"a")
    await client.leave()
    assert cycle.chunk_to is None


@pytest.mark.parametrize(("version", "header"), [(0, b"x"), (1, b"content-length")])
async def test_an_answer_in_another_framing_has_none(version: int, header: bytes) -> None:
    client = Client()
    cycle, send = await client.ask(version)
    await send({**START, "headers": [(header, b"3")]})
    await body(send, b"abc")
    assert cycle.chunk_to is None
    await client.leave()
