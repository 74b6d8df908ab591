"""A server that is no sentinel, or an odd one, is a store that is away: nothing that watches ends by it."""

import asyncio

import pytest

from gateway.ledger.address import parse
from gateway.ledger.sentinel import Sentinels
from gateway.ledger.wire import StoreAway

PONG = b"+PONG\r\n"
ADDRESS = b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n"


@pytest.mark.parametrize(
    "record",
    [b"*2\r\n$4\r\nname\r\n$1\r\nm\r\n", b"*1\r\n$4\r\nname\r\n", b"*-1\r\n", b":1\r\n"],
    ids=["without its epoch", "odd", "nil", "a number"],
)
async def test_an_odd_record(record: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(PONG)
        await reader.read(65_536)
        writer.write(ADDRESS + record)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreAway, match="does not answer as a sentinel"):
            await Sentinels(parse(f"redis+sentinel://127.0.0.1:{port}/m")).find("")
