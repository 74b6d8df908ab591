"""The way to the store itself: it ends, whatever it was told to keep."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.faults.proxy import store_proxy
from tests.processes import HANG_SECONDS


@pytest.mark.parametrize("kept", ["requests", "replies"])
async def test_it_ends_with_what_it_keeps(kept: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        target = str(Path(folder) / "echo.sock")
        async with await asyncio.start_unix_server(_echo, target):
            async with asyncio.timeout(HANG_SECONDS), store_proxy(target) as proxy:
                reader, writer = await asyncio.open_unix_connection(proxy.url.removeprefix("unix://"))
                await _ask(reader, writer)
                if kept == "requests":
                    proxy.hold_requests()
                else:
                    proxy.reply_seconds = 3600.0
                writer.write(b"kept\n")
                await asyncio.sleep(0.05)  # it arrives there
            assert await reader.read() == b""
            writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\n")
    assert await reader.readline() == b"hello\n"


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line)
    writer.close()
