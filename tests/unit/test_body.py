"""Reading a body: limits of bytes and time, and what clients declare."""

import asyncio
from typing import Any

import pytest

from gateway.core.outcomes import Code, Refusal
from gateway.http.body import BodyBudget, BodyShare, ClientLeft, accept_body, read_body

LIMIT_BYTES = 1_000


class Client:
    """Plays ASGI messages; after the last one it stays silent for ever."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.received = 0

    async def receive(self) -> dict[str, Any]:
        if self.received == len(self.messages):
            await asyncio.Event().wait()
        self.received += 1
        return self.messages[self.received - 1]


def chunks(*parts: bytes, end: bool = True) -> list[dict[str, Any]]:
    last = len(parts) - 1
    return [
        {"type": "http.request", "body": part, "more_body": not end or i < last}
        for i, part in enumerate(parts)
    ]


async def read(
    client: Client, *headers: tuple[bytes, bytes], seconds: float = 60, share: BodyShare | None = None
) -> bytes | Refusal:
    share = share or BodyBudget(1 << 20).share()
    return await read_body({"headers": list(headers)}, client.receive, LIMIT_BYTES, seconds, share)


def code_of(result: bytes | Refusal) -> Code:
    assert isinstance(result, Refusal)
    return result.code


@pytest.mark.parametrize("parts", [(b"",), (b"abc",), (b"a", b"", b"bc"), (b"a" * 500, b"b" * 500)])
async def test_a_body_within_the_limit_comes_whole(parts: tuple[bytes, ...]) -> None:
    whole = b"".join(parts)
    assert await read(Client(*chunks(*parts))) == whole
    assert await read(Client(*chunks(*parts)), (b"content-length", str(len(whole)).encode())) == whole


async def test_messages_without_body_are_empty() -> None:
    assert await read(Client({"type": "http.request"})) == b""


@pytest.mark.parametrize("declared", [b"1001", b"9437184", b"0001001", b"9" * 5_000])
async def test_a_declared_length_over_the_limit_is_refused_unread(declared: bytes) -> None:
    client = Client(*chunks(b"x"))
    result = await read(client, (b"content-length", declared))
    assert code_of(result) is Code.BODY_TOO_LARGE
    assert client.received == 0
    assert isinstance(result, Refusal)
    assert "server.body_bytes_max (1000 bytes)" in result.message
    assert len(result.message) < 200


async def test_an_undeclared_body_is_refused_at_the_limit() -> None:
    client = Client(*chunks(*[b"x" * 300] * 10, end=False))
    assert code_of(await read(client)) is Code.BODY_TOO_LARGE
    assert client.received == 4


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"-1")],
        [(b"content-length", b"+5")],
        [(b"content-length", b"5.0")],
        [(b"content-length", b"")],
        [(b"content-length", b"1_0")],
        [(b"content-length", "\u0665".encode())],
        [(b"content-length", b"5"), (b"content-length", b"6")],
        [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
    ],
)
async def test_a_malformed_length_is_refused_unread(headers: list[tuple[bytes, bytes]]) -> None:
    client = Client(*chunks(b"12345"))
    assert code_of(await read(client, *headers)) is Code.INVALID_VALUE
    assert client.received == 0


@pytest.mark.parametrize("body", [b"1234", b"123456", b""])
async def test_a_length_that_is_not_true_is_refused(body: bytes) -> None:
    assert code_of(await read(Client(*chunks(body)), (b"content-length", b"5"))) is Code.INVALID_VALUE


async def test_the_same_length_twice_is_one_length() -> None:
    result = await read(Client(*chunks(b"12345")), (b"content-length", b"5"), (b"content-length", b"5"))
    assert result == b"12345"


@pytest.mark.parametrize("encoding", [b"gzip", b"identity, gzip", b"br", b"x"])
async def test_an_encoded_body_is_refused_unread(encoding: bytes) -> None:
    client = Client(*chunks(b"x"))
    assert code_of(await read(client, (b"content-encoding", encoding))) is Code.UNSUPPORTED_ENCODING
    assert client.received == 0


@pytest.mark.parametrize("encoding", [b"identity", b" Identity ", b""])
async def test_identity_is_no_encoding(encoding: bytes) -> None:
    assert await read(Client(*chunks(b"x")), (b"content-encoding", encoding)) == b"x"


@pytest.mark.parametrize("sent", [(), (b"a",), (b"a", b"b")])
async def test_a_body_that_does_not_come_is_timed_out(sent: tuple[bytes, ...]) -> None:
    result = await read(Client(*chunks(*sent, end=False)), (b"content-length", b"900"), seconds=0.001)
    assert code_of(result) is Code.BODY_TIMEOUT


@pytest.mark.parametrize("sent", [(), (b"a",)])
async def test_a_client_that_leaves_ends_the_reading(sent: tuple[bytes, ...]) -> None:
    client = Client(*chunks(*sent, end=False), {"type": "http.disconnect"})
    with pytest.raises(ClientLeft):
        await read(client)


async def test_cancelling_passes_through() -> None:
    task = asyncio.create_task(read(Client()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_bodies_share_a_budget() -> None:
    """What one request holds is not there for another until it is given back."""
    budget = BodyBudget(1_000)
    first, second = budget.share(), budget.share()
    assert await read(Client(*chunks(b"a" * 400, b"a" * 200)), share=first) == b"a" * 600
    refused = await read(Client(*chunks(b"b" * 300, b"b" * 200)), share=second)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.CAPACITY_EXCEEDED
    assert "server.bodies_bytes_max" in refused.message
    second.give_back()
    first.give_back()
    first.give_back()
    assert await read(Client(*chunks(b"c" * 1_000)), share=budget.share()) == b"c" * 1_000
    assert code_of(await read(Client(*chunks(b"d")), share=budget.share())) is Code.CAPACITY_EXCEEDED


# -- a body that has come


def accepted(
    body: bytes, *headers: tuple[bytes, bytes], share: BodyShare | None = None
) -> tuple[bytes | Refusal, int]:
    """And the bytes that are held for it."""
    share = share or BodyBudget(1 << 20).share()
    scope: dict[str, Any] = {"headers": list(headers)}
    found = accept_body(scope, dict(headers), body, LIMIT_BYTES, share)
    return found, share._held


@pytest.mark.parametrize("body", [b"", b"abc", b"x" * 1000])
@pytest.mark.parametrize("others", [[], [(b"a", b"b"), (b"a", b"c")], [(b"content-encoding", b"identity")]])
def test_one_that_has_come_is_taken_whole(body: bytes, others: list[tuple[bytes, bytes]]) -> None:
    declared = b"content-length", str(len(body)).encode()
    for headers in (others, [declared, *others], [declared, declared, *others]):
        assert accepted(body, *headers) == (body, len(body))


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"12345", [(b"content-length", b"6")], Code.INVALID_VALUE),
        (b"12345", [(b"content-length", b"+5")], Code.INVALID_VALUE),
        (b"12345", [(b"content-length", b"5"), (b"content-length", b"6")], Code.INVALID_VALUE),
        (b"12345", [(b"content-length", b"6"), (b"content-length", b"5")], Code.INVALID_VALUE),
        (b"12345", [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")], Code.INVALID_VALUE),
        (b"12345", [(b"content-length", b"5"), (b"content-encoding", b"gzip")], Code.UNSUPPORTED_ENCODING),
        (b"x" * 1001, [(b"content-length", b"1001")], Code.BODY_TOO_LARGE),
        (b"x" * 1001, [(b"transfer-encoding", b"chunked")], Code.BODY_TOO_LARGE),
    ],
)
def test_one_that_has_come_is_refused_as_one_that_is_read(
    body: bytes, headers: list[tuple[bytes, bytes]], code: Code
) -> None:
    found, held = accepted(body, *headers)
    assert (code_of(found), held) == (code, 0)


def test_one_that_has_come_needs_room_in_the_budget() -> None:
    budget = BodyBudget(1000)
    first, second = budget.share(), budget.share()
    declared = b"content-length", b"600"
    assert accepted(b"x" * 600, declared, share=first) == (b"x" * 600, 600)
    found, held = accepted(b"x" * 600, declared, share=second)
    assert (code_of(found), held) == (Code.CAPACITY_EXCEEDED, 0)
    first.give_back()
    assert accepted(b"x" * 600, declared, share=second) == (b"x" * 600, 600)
