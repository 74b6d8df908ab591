"""A client may leave at any moment; the store never keeps anything of it."""

import asyncio
import random
from dataclasses import replace

import pytest

from gateway.ledger.api import Grant
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import HOLD, eventually, running_store, world


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


async def leave(ask, task):
    """What the request path does when its client leaves: the task is cancelled, and its `finally` settles."""
    task.cancel()
    await asyncio.wait([task])
    ask.settle(None, None)


async def nothing_left(w, m):
    await eventually(lambda: w.empty() and m.ledger.inflight == 0)
    assert m.healed() == {}, "no digest had to find it"
    assert m.ledger.digest() == ["H", 0, 0]


async def test_before_the_admit_was_sent(path):
    """Another one's is on its way."""
    async with world(path, 100) as w:
        m = await w.join()
        first, ask = m.open(10), m.open(10)
        task = asyncio.create_task(first.granted())
        call = ask.granted()
        await asyncio.sleep(0)
        call.send(None)  # as far as its first wait
        assert m.ledger.channel.busy
        call.close()
        ask.settle(None, None)
        assert m.ledger.inflight == 1
        assert isinstance(await task, Grant)
        assert w.states() == {first.id: "reserved"}
        first.settle(None, None)
        await nothing_left(w, m)


async def test_while_the_admit_is_in_flight(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        proxy.reply_seconds = 0.1
        ask = m.open(10)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: ask.id in w.states())
        await leave(ask, task)
        assert m.ledger.inflight == 1
        await nothing_left(w, m)


async def test_while_queued(path):
    async with world(path, 100) as w:
        m = await w.join()
        held = await m.reserve(100)
        ask = m.open(10)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: w.states().get(ask.id) == "queued")
        await leave(ask, task)
        held.settle(None, None)
        await nothing_left(w, m)


async def test_after_the_grant_before_its_owner_knows(path):
    """Another process gives the place back; the outbox of the one that left holds a grant that nobody wants."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        other, m = await w.join(), await w.join(proxy.url)
        held = await other.reserve(100)
        ask = m.open(100)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: ask.phase.name == "QUEUED")
        proxy.reply_seconds = 0.15
        held.settle(None, None)
        await eventually(lambda: w.states() == {ask.id: "unclaimed"})
        await leave(ask, task)
        await nothing_left(w, m)


async def test_while_the_claim_is_in_flight(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        other, m = await w.join(), await w.join(proxy.url)
        held = await other.reserve(100)
        ask = m.open(100)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: ask.phase.name == "QUEUED")
        proxy.reply_seconds = 0.1
        held.settle(None, None)
        assert isinstance(await task, Grant)
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        ask.settle(None, None)
        await nothing_left(w, m)


async def test_while_moving(path):
    async with world(path, 100, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = m.open(60)
        grant = await ask.granted()
        proxy.reply_seconds = 0.1
        sent = m.open(60)
        first = asyncio.create_task(sent.granted())
        await eventually(lambda: sent.id in w.states())
        moves = [(ask, asyncio.create_task(ask.moved(grant.replica)))]
        await asyncio.sleep(0)
        await leave(*moves[0])  # not sent
        await first
        moves = [(sent, asyncio.create_task(sent.moved(sent.replica)))]
        await eventually(lambda: w.calls().get(sent.id, {}).get("exclude"))
        await leave(*moves[0])  # in flight
        await nothing_left(w, m)


async def test_while_the_settle_is_in_flight(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = await m.reserve(10)
        proxy.reply_seconds = 0.1
        ask.settle(None, None)
        await eventually(w.empty)
        ask.settle(None, None)
        assert m.ledger.inflight == 1
        await nothing_left(w, m)


async def test_while_a_running_call_is_declared_again(path):
    """A settle takes the declaration back that was not sent; else the store would keep a call without an owner."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        ask = await m.reserve(10)
        proxy.reply_seconds = 0.05
        w.store.hset(w.key("meta"), "run", "another")
        await eventually(lambda: m.ledger.channel.declares(ask.id))
        ask.settle(None, None)
        assert not m.ledger.channel.declares(ask.id)
        await nothing_left(w, m)


async def test_fifty_clients_leave_before_the_reply(path):
    """LR-04: replies are 200 ms late, clients leave after 100 ms."""
    async with world(path, 1000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        proxy.reply_seconds = 0.2
        for _ in range(5):
            asks = [m.open(100, queue_max=1000) for _ in range(10)]
            tasks = [asyncio.create_task(ask.granted()) for ask in asks]
            await asyncio.sleep(0.1)
            for ask, task in zip(asks, tasks, strict=True):
                await leave(ask, task)
        proxy.reply_seconds = 0.0
        await nothing_left(w, m)
        (await m.reserve(1000)).settle(None, None)
        await nothing_left(w, m)


async def test_three_hundred_streams_end_at_once(path):
    """LR-03: 30 ms of delay; nothing waits for a lease."""
    async with world(path, 3000, lease_ms=60_000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        proxy.reply_seconds = 0.03
        asks = await asyncio.gather(*(m.reserve(10) for _ in range(300)))
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty, seconds=1.03)
        await nothing_left(w, m)


async def test_survivors_of_two_thousand_cancellations_hold_their_own(path):
    """RD-03: 50 ms of latency, clients leave after 0 to 100 ms or never."""
    chance = random.Random(3)
    async with world(path, 10_000_000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, hold=replace(HOLD, seconds=20))  # a busy machine may be late for a moment
        proxy.reply_seconds = 0.05
        asks = [m.open(1 + i, key=f"k{i}") for i in range(2000)]
        tasks = [asyncio.create_task(ask.granted()) for ask in asks]
        leaving = [i for i in range(2000) if chance.random() < 0.7]

        async def leave_later(i, seconds):
            await asyncio.sleep(seconds)
            await leave(asks[i], tasks[i])

        await asyncio.gather(*(leave_later(i, chance.random() / 10) for i in leaving))
        staying = sorted(set(range(2000)) - set(leaving))
        answers = await asyncio.gather(*(tasks[i] for i in staying), return_exceptions=True)
        granted = [i for i, answer in zip(staying, answers, strict=True) if isinstance(answer, Grant)]
        assert granted == staying
        for i in set(staying) - set(granted):
            asks[i].settle(None, None)
        await eventually(lambda: m.ledger.inflight == len(granted))
        calls = w.calls()
        assert {id_: (c["key"], c["blocks"], c["state"]) for id_, c in calls.items()} == {
            asks[i].id: (f"k{i}", 1 + i, "reserved") for i in granted
        }
        assert m.ledger.digest() == ["H", len(granted), sum(int(asks[i].id, 16) for i in granted) % 2**48]
        proxy.reply_seconds = 0.0
        for i in granted:
            asks[i].settle(None, None)
        await nothing_left(w, m)
