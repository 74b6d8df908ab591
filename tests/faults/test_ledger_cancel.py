"""A client may leave at any moment; the store never keeps anything of it."""

import asyncio
import random

import pytest

from gateway.core.events import StoreAnswered
from gateway.core.order import BATCH_OPS
from gateway.ledger.api import Grant
from gateway.ledger.records import decode_record
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import PATIENT_SECONDS, eventually, running_store, world
from tests.integration.store_clients import OF_A_GATEWAY, counting


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
    """LR-03: 30 ms of delay; nothing waits for a lease, nor for a heartbeat: the next batches carry all."""
    async with world(path, 3000, lease_ms=60_000, heartbeat_ms=200) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=PATIENT_SECONDS)
        proxy.reply_seconds = 0.03
        asks = await asyncio.gather(*(m.reserve(10) for _ in range(STREAMS)))
        before = m.count(StoreAnswered)
        for ask in asks:
            ask.settle(None, None)
        await eventually(lambda: not m.ledger.inflight)
        assert w.empty()
        on_its_way, heartbeats = 1, 1
        assert m.count(StoreAnswered) - before <= on_its_way + -(-STREAMS // BATCH_OPS) + heartbeats
        await nothing_left(w, m)


LATE_SECONDS = 0.05
STREAMS = 300
BURST = 2 * BATCH_OPS


async def many(m, leaving, **changes):
    """Two thousand calls, those of `leaving` with a client that leaves after 0 to 100 ms; the others' answers."""
    chance = random.Random(4)
    asks = [m.open(1 + i, key=f"k{i}", **changes) for i in range(2000)]
    tasks = [asyncio.create_task(ask.granted()) for ask in asks]

    async def leave_later(i, seconds):
        await asyncio.sleep(seconds)
        await leave(asks[i], tasks[i])

    leaves = [asyncio.create_task(leave_later(i, chance.random() / 10)) for i in leaving]
    staying = sorted(set(range(2000)) - set(leaving))
    return leaves, [(i, asks[i], tasks[i]) for i in staying]


async def burst(m):
    """More than one batch of calls at once, after the storm: each gets its place."""
    for ask in await asyncio.gather(*(m.reserve(10) for _ in range(BURST))):
        ask.settle(None, None)


def of_gateways(w):
    """Connections to the store but for the test's own."""
    w.store.ping()
    return counting(w.path)


@pytest.fixture
def leaving():
    chance = random.Random(3)
    return [i for i in range(2000) if chance.random() < 0.7]


async def test_survivors_of_two_thousand_cancellations_hold_their_own(path, leaving):
    """RD-03: 50 ms of latency, clients leave after 0 to 100 ms or never."""
    async with world(path, 10_000_000) as w, of_gateways(w) as clients, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=PATIENT_SECONDS)
        proxy.reply_seconds = LATE_SECONDS
        leaves, staying = await many(m, leaving)
        assert all(
            isinstance(answer, Grant) for answer in await asyncio.gather(*(task for *_, task in staying))
        )
        await asyncio.gather(*leaves)
        await eventually(lambda: m.ledger.inflight == len(staying))
        calls = w.calls()
        assert {id_: (c["key"], c["blocks"], c["state"]) for id_, c in calls.items()} == {
            ask.id: (f"k{i}", 1 + i, "reserved") for i, ask, _ in staying
        }
        assert m.ledger.digest() == ["H", len(staying), sum(int(ask.id, 16) for _, ask, _ in staying) % 2**48]
        proxy.reply_seconds = 0.0
        for _, ask, _ in staying:
            ask.settle(None, None)
        await nothing_left(w, m)
        await burst(m)
        await nothing_left(w, m)
        assert clients.most == clients.now == OF_A_GATEWAY


async def test_survivors_that_waited_in_the_queue_hold_their_own(path, leaving):
    """RD-03, where there is room for few: most survivors are told by the outbox of another batch, and claim."""
    async with world(path, 30_000) as w, of_gateways(w) as clients, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=PATIENT_SECONDS)
        proxy.reply_seconds = LATE_SECONDS
        leaves, staying = await many(m, leaving, wait_ms=60_000, queue_max=2000)

        def record(ask):
            return decode_record("call", w.store.hget(w.key("calls"), ask.id))

        async def checked(i, ask, task):
            answer = await task
            await eventually(lambda: record(ask)["state"] == "reserved")
            call = record(ask)
            assert (call["key"], call["blocks"], call["replica"]) == (f"k{i}", 1 + i, answer.replica)
            ask.settle(None, None)
            return answer.queued

        queued = await asyncio.gather(*(checked(*each) for each in staying))
        assert sum(queued) > len(staying) / 2
        await asyncio.gather(*leaves)
        await nothing_left(w, m)
        proxy.reply_seconds = 0.0
        await burst(m)
        await nothing_left(w, m)
        assert clients.most == clients.now == OF_A_GATEWAY
