import asyncio
import socket
from contextlib import closing

import pytest

from gateway.mock.serve import _listen


async def test_connections_do_not_wait_for_acknowledgements() -> None:
    """An engine's answer is many small writes: with Nagle's algorithm the second one waits 40 ms."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    (listener,) = _listen("127.0.0.1", 0, 1)
    async with await asyncio.start_server(note, sock=listener):
        _, client = await asyncio.open_connection(*listener.getsockname())
        assert await accepted
        client.close()


def test_taken_port_is_an_error() -> None:
    (first,) = _listen("127.0.0.1", 0, 1)
    with closing(first), pytest.raises(OSError, match="in use"):
        _listen("127.0.0.1", first.getsockname()[1], 1)
