"""A door before an engine: it passes requests on, or answers some of them itself, as a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

CHUNK = 65_536


def whole(status: int, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    """An answer after which the connection is closed."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", f"content-type: {kind}", *headers]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


class Front:
    """One request on each connection."""

    def __init__(self, engine_url: str) -> None:
        self.url = ""
        self.answers: dict[str, bytes] = {}
        """By how a request line begins: what is answered in the engine's place."""
        self.answered = 0
        self._engine = urlsplit(engine_url)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_length(head))
            line = head.decode("latin-1")
            own = next((answer for begin, answer in self.answers.items() if line.startswith(begin)), None)
            if own is None:
                await self._pass_on(head, body, reader, writer)
            else:
                self.answered += 1
                writer.write(own)
                await writer.drain()
        writer.close()

    async def _pass_on(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until either side has closed; then both are."""
        answer, engine = await asyncio.open_connection(self._engine.hostname, self._engine.port)
        engine.write(head[:-2] + b"connection: close\r\n\r\n" + body)
        there = asyncio.create_task(_copy(answer, writer))
        back = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            engine.transport.abort()
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)


def _length(head: bytes) -> int:
    fields = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return sum(int(value) for name, _, value in fields if name == b"content-length")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def front(engine_url: str) -> AsyncIterator[Front]:
    here = Front(engine_url)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await here.accept(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    here.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield here
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
