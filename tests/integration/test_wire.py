"""One socket to the store: logging in, replies in order, and what any failure does to those who wait."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import redis

from gateway.ledger.address import parse
from gateway.ledger.wire import StoreAway, Wire, connect
from tests.integration.ledger_world import running_store

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[str]:
    """A store that answers as it is told; `serve` plays one connection."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield f"redis://{host}:{port}"


def answering(reply: bytes) -> Serve:
    """Once, to whatever comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(reply)
        await writer.drain()
        await reader.read(65_536)

    return serve


async def outcome(answer: Awaitable[object]) -> object:
    async with asyncio.timeout(30):
        try:
            return await answer
        except StoreAway as away:
            return str(away)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def test_replies_come_in_order_and_take_sees_them_first() -> None:
    with running_store() as store:
        wire = await connect(parse(store.url))
        seen: list[object] = []

        def take(reply: object) -> object:
            seen.append(reply)
            return ("taken", reply)

        answers = [wire.submit(("ECHO", str(i)), take) for i in range(100)]
        assert await asyncio.gather(*answers) == [("taken", b"%d" % i) for i in range(100)]
        assert seen == [b"%d" % i for i in range(100)]
        wire.end("over")


@contextmanager
def guarded_store(user: str, password: str) -> Iterator[int]:
    """A real store on a TCP port that wants a password."""
    port = free_port()
    with (
        running_store("--port", str(port)) as store,
        redis.Redis(unix_socket_path=str(store.socket)) as owner,
    ):
        owner.execute_command("ACL", "SETUSER", user, "on", "resetpass", f">{password}", "~*", "&*", "+@all")
        yield port


@pytest.mark.parametrize("user", ["default", "operator"])
async def test_the_url_says_how_to_log_in_and_which_database(user: str) -> None:
    with guarded_store(user, "p%ss") as port:
        name = "" if user == "default" else user
        wire = await connect(parse(f"redis://{name}:p%25ss@127.0.0.1:{port}/3"))
        told = await wire.submit(("CLIENT", "INFO"))
        assert b" db=3 " in told
        assert f" user={user} ".encode() in told
        wire.end("over")


async def test_a_wrong_password_is_the_end_and_is_not_told() -> None:
    with guarded_store("default", "right") as port, pytest.raises(StoreAway, match="WRONGPASS") as failure:
        await connect(parse(f"redis://:wrong-one@127.0.0.1:{port}"))
    assert "wrong-one" not in str(failure.value)


async def test_an_error_of_the_store_ends_everything_that_waits() -> None:
    with running_store() as store:
        wire = await connect(parse(store.url))
        good, bad, after = (wire.submit(c) for c in (("PING",), ("EVALSHA", "0" * 40, 0), ("PING",)))
        assert await outcome(good) == b"PONG"
        assert "NOSCRIPT" in str(await outcome(bad))
        assert "NOSCRIPT" in str(await outcome(after))
        assert "NOSCRIPT" in str(await outcome(wire.submit(("PING",))))


@pytest.mark.parametrize(
    ("reply", "why"),
    [(b"", "closed"), (b"+half", "closed"), (b"hello\r\n", "ProtocolError"), (b"+PONG\r\n+and more\r\n", "and more")],
    ids=["nothing", "half a line", "another protocol", "one too many"],
)  # fmt: skip
async def test_what_is_no_reply_is_the_end(reply: bytes, why: str) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(reply)
        await writer.drain()

    async with server(once) as url:
        wire = await connect(parse(url))
        first = await outcome(wire.submit(("PING",)))
        assert first == b"PONG" or why in str(first)
        assert why in str(await outcome(wire.submit(("PING",))))


async def test_a_take_that_fails_fails_its_own_command_only() -> None:
    with running_store() as store:
        wire = await connect(parse(store.url))
        failing = wire.submit(("PING",), lambda reply: 1 / 0)
        after = wire.submit(("PING",))
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await outcome(after) == b"PONG"
        wire.end("over")


async def test_ending_it_is_told_to_those_who_wait_and_to_those_who_come() -> None:
    async with server(answering(b"")) as url:
        wire = await connect(parse(url))
        waiting = wire.submit(("PING",))
        wire.end("no reply within 1 s")
        assert await outcome(waiting) == "no reply within 1 s"
        assert await outcome(wire.submit(("PING",))) == "no reply within 1 s"


async def test_one_that_nobody_opened_is_away() -> None:
    assert await outcome(Wire().submit(("PING",))) == "not connected"


async def test_a_reply_to_one_that_was_given_up_is_skipped() -> None:
    with running_store() as store:
        wire = await connect(parse(store.url))
        given_up, after = wire.submit(("ECHO", "a")), wire.submit(("ECHO", "b"))
        given_up.cancel()
        assert await outcome(after) == b"b"
        wire.end("over")


async def test_it_ends_after_its_reader_has_returned() -> None:
    """uvloop's TLS writes what it has left when the reader returns: to a transport that the reader has closed."""
    ended: list[str] = []
    transport = cast(asyncio.Transport, SimpleNamespace(abort=lambda: ended.append("aborted"), write=len))
    wire = Wire()
    wire.connection_made(transport)
    answer = wire.submit(("PING",))
    wire.data_received(b"-ERR no\r\n")
    assert (wire.why, ended) == ("ERR no", [])
    with pytest.raises(StoreAway):
        await answer
    await asyncio.sleep(0)
    assert ended == ["aborted"]
    other = Wire()
    other.connection_made(transport)
    other.end("closed by this side")
    assert ended == ["aborted"] * 2
