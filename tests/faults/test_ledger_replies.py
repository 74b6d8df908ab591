"""Replies that never come, and copies of requests that come too late, change nothing twice."""

import asyncio

import pytest

from gateway.ledger.api import Grant
from gateway.ledger.connection import Connection
from gateway.ledger.scripts import fleet_keys, library
from gateway.ledger.wire import StoreAway
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import eventually, running_store, world


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


def packed(letter: str, ask) -> bytes:
    """How an op of that call begins on the wire."""
    return b"\xa1" + letter.encode() + b"\xaa" + ask.id.encode()


async def test_the_reply_to_an_admit_is_lost(path):
    async with world(path, 1000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = m.open(100)
        proxy.swallow = packed("A", ask)
        assert isinstance(await ask.granted(), Grant)
        assert proxy.swallowed == 1
        assert w.used() == 100
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


async def test_the_reply_to_a_settle_is_lost(path):
    async with world(path, 1000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask, stays = await m.reserve(100), await m.reserve(7)
        proxy.swallow = packed("S", ask)
        ask.settle(None, None)
        await eventually(lambda: m.ledger.inflight == 1)
        assert proxy.swallowed == 1
        assert w.states() == {stays.id: "reserved"}
        stays.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


async def test_the_reply_to_a_move_is_lost(path):
    async with world(path, 100, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = m.open(60)
        first = await ask.granted()
        proxy.swallow = packed("M", ask)
        second = await ask.moved(first.replica)
        assert proxy.swallowed == 1
        assert isinstance(second, Grant)
        assert second.replica != first.replica
        assert w.used() == 60
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


@pytest.mark.parametrize("letter", ["K", "F"])
async def test_the_reply_to_a_claim_or_first_token_is_lost(path, letter):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        held = await m.reserve(100)
        ask = m.open(60, prefill=800)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: w.states().get(ask.id) == "queued")
        proxy.swallow = packed(letter, ask)
        held.settle(None, None)
        assert isinstance(await task, Grant)
        ask.first_token()
        await eventually(lambda: proxy.swallowed == 1 and not m.ledger.channel.busy)
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        assert w.rows("replicas", "replica")["r0"]["prefill"] == 0
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


async def test_the_reply_to_a_hello_is_lost(path):
    """The session of the lost hello stays empty; calls are declared under the one that was answered."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = await m.reserve(60)
        await m.stop()
        m.events.clear()
        for owner in w.rows("sessions", "session"):
            w.store.hdel(w.key("sessions"), owner)
        proxy.swallow = library().function("hello").encode()
        m.go_on()
        await eventually(lambda: proxy.swallowed == 1 and w.states() == {ask.id: "reserved"})
        await eventually(lambda: _session_of(w, ask).get("count") == 1)
        await eventually(lambda: m.ledger.ready)
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


def _session_of(w, ask):
    return w.rows("sessions", "session").get(w.calls()[ask.id]["owner"], {})


async def test_nothing_is_sent_again_behind_the_batch_numbers(tmp_path):
    """A connection that breaks is one attempt; what is tried again is for the keeper to say."""
    attempts = []

    async def break_off(reader, writer):
        attempts.append(await reader.read(1))
        writer.close()

    server = await asyncio.start_unix_server(break_off, tmp_path / "s")
    connection = Connection(f"unix://{tmp_path}/s", fleet_keys("f"), lambda event: None, reply_seconds=3)
    with pytest.raises(StoreAway):
        await connection.open()
    with pytest.raises(StoreAway):
        await connection.evaluate("step")
    server.close()
    await server.wait_closed()
    assert attempts == [b"*"]


async def test_a_late_copy_of_an_admit_does_nothing_after_its_settle(path):
    async with world(path, 1000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=0.2)
        held = proxy.hold_requests()
        ask = m.open(100)
        assert isinstance(await ask.granted(), Grant), "by way of a new connection"
        ask.settle(None, None)
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)
        await proxy.release(held)
        (await m.reserve(1)).settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


async def test_late_copies_of_a_wave_of_calls_do_nothing(path):
    """Admits, settles and moves, cut off at any moment."""
    async with world(path, 5000, 5000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=0.1)
        held = []
        for _ in range(6):
            held += proxy.hold_requests()
            asks = await asyncio.gather(*(m.reserve(10) for _ in range(50)))
            moving = [asyncio.create_task(ask.moved(ask.replica)) for ask in asks[:10]]
            for ask in asks[10:]:
                ask.settle(None, None)
            await asyncio.gather(*moving)
            await eventually(lambda: w.used() == 100)
            for ask in asks[:10]:
                ask.settle(None, None)
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)
        await proxy.release(held)
        (await m.reserve(1)).settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}
