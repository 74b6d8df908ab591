"""`store.on_outage: share`, and the gate of a store that is another process than before: who admits what, and how much.

Blocks are counted where they run, at the processes, and not where they are booked.
"""

import asyncio
import concurrent.futures
import contextlib
import random
import signal
import time
from dataclasses import dataclass, field
from itertools import repeat

import pytest
import redis

from gateway.core.events import AdmittedByShare, LeaseLost, StoreAnswered, StoreUp
from gateway.core.identity import Identity
from gateway.core.outcomes import Code, Refusal
from gateway.core.share import Portion
from gateway.ledger.api import Grant
from gateway.ledger.valkey import HoldLimits
from gateway.ledger.verify import snapshot_of
from tests.conformance.books import read_content
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import PATIENT_SECONDS, eventually, running_store, world
from tests.processes import wait_until
from tests.processes import world as processes

SHARE_SECONDS = 30.0
LONG_CALLS, LONG_SECONDS = 0.08, 1.2
"""Some calls outlast an outage and the closing of the gate after it."""
NOTHING = Portion("", False, 0, 0, 0, 0)
LONG_LEASE_MS = 4000
"""A slow machine must not end a lease where none is to end."""


@pytest.fixture
def own_store():
    """One that may be killed; it can save what it holds."""
    with running_store() as store:
        yield store


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


def kill(store):
    store.process.kill()
    store.process.wait()


def save(store):
    with redis.Redis(unix_socket_path=str(store.socket), protocol=2) as client:
        client.save()


async def read_portions(*portions):
    """Wait for a reading in which each process has so many blocks of r0: pairs of member and blocks."""
    await eventually(lambda: all(_portion(m).blocks == blocks for m, blocks in portions))


def _portion(m, replica="r0"):
    return m.ledger.sharing.portions.get(replica, NOTHING)


async def known_away(*members):
    await eventually(lambda: all(m.ledger.sharing.active for m in members))


async def answered(times, *members):
    """The store has answered each of them so many times more: what they had to tell it is booked."""
    before = [m.count(StoreAnswered) for m in members]
    await eventually(
        lambda: all(m.count(StoreAnswered) >= seen + times for m, seen in zip(members, before, strict=True))
    )


async def flood(m, blocks, **changes):
    """Calls until one is refused; the reservations, and the refusal, all without waiting for anything."""
    asks = []
    while True:
        ask = m.open(blocks, **changes)
        with pytest.raises(StopIteration) as answered:
            ask.granted().send(None)
        if isinstance(answered.value.value, Refusal):
            ask.settle(None, None)
            return asks, answered.value.value
        asks.append(ask)


# -- sharing -----------------------------------------------------------------------------------------------------


async def test_a_process_admits_one_call_under_an_idempotency_key(own_store):
    """As long as it lives; what other processes admit is known when the store is back."""
    one, other = (Identity("k", "/v1/completions", body) for body in (b"one", b"other"))
    named = {"once": "a" * 16, "identity": one}
    async with world(str(own_store.socket), 100, lease_ms=LONG_LEASE_MS) as w:
        m = await w.join(share_seconds=SHARE_SECONDS)
        await read_portions((m, 100))
        kill(own_store)
        await known_away(m)
        first = await m.reserve(10, **named)
        for identity, code in ((one, Code.DUPLICATE_IN_PROGRESS), (other, Code.IDEMPOTENCY_KEY_REUSED)):
            second = m.open(10, once="a" * 16, identity=identity)
            refusal = await second.granted()
            assert isinstance(refusal, Refusal)
            assert refusal.code is code
            second.settle(None, None)
        first.settle(None, None)
        (await m.reserve(10, **named)).settle(None, None)
        own_store.start()
        await eventually(lambda: m.ledger.away_seconds is None and w.empty())


@pytest.mark.parametrize("with_data", [False, True])
async def test_each_process_admits_within_its_part_and_all_is_declared_on_return(own_store, with_data):
    async with world(str(own_store.socket), 100, lease_ms=LONG_LEASE_MS) as w:
        first, second = [await w.join(share_seconds=SHARE_SECONDS) for _ in range(2)]
        running = [await first.reserve(30), await second.reserve(11)]
        await read_portions((first, 30 + 29), (second, 11 + 29))
        if with_data:
            save(own_store)
        kill(own_store)
        await known_away(first, second)
        assert first.ledger.ready
        (own, refusal), (others, _) = await flood(first, 10), await flood(second, 10)
        assert (len(own), len(others)) == (2, 2)
        assert refusal.code is Code.STORE_UNAVAILABLE
        assert refusal.retry_ms
        assert "10 KV blocks" in refusal.message
        assert "9 free" in refusal.message
        running.pop(0).settle(None, None)
        own += (await flood(first, 10))[0]
        assert len(own) == 5
        own.pop().settle(None, None)
        assert [m.count(AdmittedByShare) for m in (first, second)] == [5, 2]
        own_store.start()
        live = {ask.id for ask in (*running, *own, *others)}
        await eventually(lambda: w.states() == dict.fromkeys(live, "reserved"))
        await eventually(lambda: first.ledger.ready and second.ledger.ready)
        assert w.used() == 11 + 4 * 10 + 2 * 10
        assert [m.lost for m in (first, second)] == [[], []]
        (await first.reserve(29)).settle(None, None)
        for ask in (*running, *own, *others):
            ask.settle(None, None)
        await eventually(lambda: w.empty() and not first.ledger.inflight and not second.ledger.inflight)
        assert [m.healed() for m in (first, second)] == [{}, {}]


async def test_calls_that_waited_are_served_first_and_in_their_order(own_store):
    """A ticket, and a call whose admit was in flight; under new ids, so nothing is held twice on return."""
    path = str(own_store.socket)
    async with world(path, 100, lease_ms=LONG_LEASE_MS) as w:
        m = await w.join(share_seconds=SHARE_SECONDS)
        running = [await m.reserve(50), await m.reserve(50)]
        await read_portions((m, 100))
        tickets = [m.open(60), m.open(30), m.open(30)]
        waiting = []
        for ask in tickets:
            waiting.append(asyncio.create_task(ask.granted()))
            await eventually(lambda id_=ask.id: w.states().get(id_) == "queued")
        old = [ask.id for ask in tickets]
        save(own_store)
        kill(own_store)
        late = m.open(20)
        asked = asyncio.create_task(late.granted())
        await known_away(m)
        assert not (await flood(m, 1))[0]
        running.pop().settle(None, None)
        await asyncio.gather(waiting[1], asked)
        assert not waiting[0].done()
        assert not waiting[2].done()
        assert not (await flood(m, 1))[0], "what was given back went to those that waited"
        own_store.start()
        await eventually(lambda: m.ledger.ready and set(w.states()) == {*_ids(running, tickets), late.id})
        assert tickets[1].id not in old
        assert w.states()[old[0]] == w.states()[old[2]] == "queued"
        for ask in (*running, tickets[1], late):
            ask.settle(None, None)
        assert all(isinstance(answer, Grant) for answer in await asyncio.gather(waiting[0], waiting[2]))
        for ask in tickets:
            ask.settle(None, None)
        await eventually(lambda: w.empty() and not m.ledger.inflight)
        assert m.healed() == {}


def _ids(*groups):
    return {ask.id for group in groups for ask in group}


async def test_a_grant_whose_answer_was_lost_is_given_back_for_the_one_of_the_share(path):
    """Only this process is cut off; the store gave the call a place under its old id."""
    async with world(path, 60, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, share_seconds=SHARE_SECONDS, reply_seconds=0.4)
        other = await w.join()
        await eventually(lambda: _portion(m, "r1").blocks == 50)
        ask = m.open(40)
        old = ask.id
        proxy.reply_seconds = 1.0
        assert isinstance(await ask.granted(), Grant)
        assert m.count(AdmittedByShare) == 1
        assert set(w.states()) == {old}
        proxy.reply_seconds = 0.0
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        assert ask.id != old
        await eventually(lambda: m.ledger.ready)
        assert other.healed() == m.healed() == {}
        ask.settle(None, None)
        await eventually(lambda: w.empty() and not m.ledger.inflight)


async def test_a_connection_that_breaks_is_no_outage(path):
    async with world(path, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, share_seconds=SHARE_SECONDS, reply_seconds=PATIENT_SECONDS)
        running = await m.reserve(90)
        await read_portions((m, 100))
        ask = m.open(20)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: w.states().get(ask.id) == "queued")
        for times in range(1, 6):
            proxy.cut()
            await eventually(lambda times=times: m.events.count(StoreUp(False)) == times and m.ledger.ready)
        assert not m.ledger.sharing.begun
        running.settle(None, None)
        assert isinstance(await task, Grant)
        assert m.count(AdmittedByShare) == 0
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_store_that_is_silent_is_an_outage_from_its_first_late_reply(path, monkeypatch):
    async with world(path, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, share_seconds=SHARE_SECONDS, reply_seconds=0.35)
        await read_portions((m, 100))
        keeper, begin, late = m.ledger._keeper, m.ledger.sharing.begin, []

        def begin_noted():
            late.append(keeper._failures)
            begin()

        await eventually(lambda: m.ledger.away_seconds is None and not keeper._failures)
        proxy.black_hole = True
        monkeypatch.setattr(m.ledger.sharing, "begin", begin_noted)
        asks = [m.open(10) for _ in range(3)]
        answers = await asyncio.gather(*(ask.granted() for ask in asks))
        assert all(isinstance(answer, Grant) for answer in answers)
        assert late[0] == 0, "no attempt had failed before"
        proxy.black_hole = False
        proxy.cut()
        await eventually(lambda: w.states() == dict.fromkeys(_ids(asks), "reserved"))
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_when_its_time_is_over_calls_are_refused_at_once(own_store):
    passed = [0.0]
    async with world(str(own_store.socket), 100, lease_ms=LONG_LEASE_MS) as w:
        m = await w.join(share_seconds=SHARE_SECONDS, now=lambda: time.monotonic() + passed[0])
        running = await m.reserve(40)
        await read_portions((m, 100))
        kill(own_store)
        await known_away(m)
        shared = (await flood(m, 60))[0]
        passed[0] = SHARE_SECONDS
        assert not m.ledger.sharing.active
        assert not m.ledger.ready
        shared[0].settle(None, None)
        asks, refusal = await flood(m, 1)
        assert (asks, refusal.code) == ([], Code.STORE_UNAVAILABLE)
        own_store.start()
        await eventually(lambda: m.ledger.ready and w.states() == {running.id: "reserved"})
        running.settle(None, None)
        await eventually(w.empty)


async def test_without_a_reading_there_is_nothing_to_share(own_store):
    kill(own_store)
    async with world(str(own_store.socket), 100) as w:
        m = w.add(share_seconds=SHARE_SECONDS, hold=HoldLimits(0.1, 256, 1 << 20))
        m.go_on()
        await eventually(lambda: (m.ledger.away_seconds or 0) > 0.1)
        asks, refusal = await flood(m, 1)
        assert (asks, refusal.code) == ([], Code.STORE_UNAVAILABLE)
        own_store.start()
        await eventually(lambda: m.ledger.ready)


async def test_behind_a_closed_gate_the_books_are_not_read(own_store):
    """They may be old, and hold nothing yet of a process that has not come back."""
    path = str(own_store.socket)
    async with world(path, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        first, second = (
            await w.join(share_seconds=SHARE_SECONDS),
            await w.join(proxy.url, share_seconds=SHARE_SECONDS),
        )
        running = [await first.reserve(20)]
        save(own_store)
        running.append(await second.reserve(60))
        await read_portions((first, 30), (second, 70))
        await proxy.refuse()
        kill(own_store)
        own_store.start()
        await answered(10, first)
        assert first.ledger.away_seconds is None
        assert _portion(first).blocks == 30
        await proxy.open()
        await eventually(lambda: first.ledger.ready and second.ledger.ready)
        for ask in running:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_who_was_cut_off_alone_comes_back_by_force_and_stops_new_admissions(path):
    """Past its lease: the store gave its blocks to another process.  Nobody's stream is cut; the debt is shown."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        alone, m = await w.join(proxy.url, share_seconds=SHARE_SECONDS), await w.join()
        running = await alone.reserve(40)
        await read_portions((alone, 70))
        await proxy.refuse()
        await known_away(alone)
        shared = (await flood(alone, 30))[0]
        taken = await m.reserve(90)
        await proxy.open()
        await eventually(lambda: set(w.states()) == _ids([running, taken], shared))
        assert w.used() == 160
        state = await m.ledger.state()
        assert (state["debt"], state["pools"]["p"]["replicas"]["r0"]["debt"]) == (60, 60)
        assert (alone.lost, alone.count(LeaseLost)) == ([], 1)
        small = m.open(1)
        task = asyncio.create_task(small.granted())
        await eventually(lambda: w.states().get(small.id) == "queued")
        taken.settle(None, None)
        assert isinstance(await task, Grant)
        assert (await m.ledger.state())["debt"] == 0
        for ask in (running, small, *shared):
            ask.settle(None, None)
        await eventually(lambda: w.empty() and not alone.ledger.inflight)
        assert alone.healed() == m.healed() == {}


async def test_after_an_outage_within_the_lease_a_later_lost_lease_is_not_declared_by_force(path):
    async with world(path, 100, lease_ms=3000) as w, store_proxy(path) as proxy:
        sleeper, m = await w.join(proxy.url, share_seconds=SHARE_SECONDS), await w.join()
        await sleeper.reserve(60)
        await read_portions((sleeper, 80))
        await proxy.refuse()
        await known_away(sleeper)
        shared = (await flood(sleeper, 20))[0]
        await proxy.open()
        await eventually(lambda: w.used() == 80 and not sleeper.ledger.channel.busy)
        assert not sleeper.ledger.sharing.begun
        await sleeper.stop()
        new = await m.reserve(100)
        sleeper.go_on()
        await eventually(lambda: sorted(sleeper.lost) == [20, 60])
        assert w.states() == {new.id: "reserved"}
        shared[0].settle(None, None)
        new.settle(None, None)
        await eventually(w.empty)


async def test_a_failed_replica_and_a_first_token_while_the_store_is_away(path):
    async with world(path, 100, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, share_seconds=SHARE_SECONDS)
        await read_portions((m, 100))
        before = await m.reserve(60, prefill=600)
        await eventually(lambda: _portion(m).prefill == 1000)
        await proxy.refuse()
        await known_away(m)
        assert before.replica == "r0"
        await m.ledger.observe("r0", False)
        (shared,), _ = await flood(m, 55, prefill=900)
        assert shared.replica == "r1"
        shared.first_token()
        moved = asyncio.create_task(before.moved("r0"))
        await asyncio.sleep(0.05)
        assert not moved.done(), "no room on the other one yet"
        shared.settle(None, None)
        assert await moved == Grant("r1", moved.result().queue_ms, False)
        before.first_token()
        assert not (await flood(m, 41))[0]
        (small,), _ = await flood(m, 40, prefill=1000)
        small.first_token()
        await proxy.open()
        await eventually(lambda: w.states() == {before.id: "reserved", small.id: "reserved"})
        await eventually(lambda: w.rows("replicas", "replica")["r0"]["state"] == "down")
        rows = w.rows("replicas", "replica")
        assert [(rows[r]["used"], rows[r]["prefill"]) for r in ("r0", "r1")] == [(0, 0), (100, 0)]
        before.settle(None, None)
        small.settle(None, None)
        await eventually(lambda: w.empty() and not m.ledger.inflight)
        assert m.healed() == {}


async def test_a_call_that_ends_with_its_declaration_unanswered_and_to_be_repeated(path, monkeypatch):
    """The batch that declares it meets a new epoch: it is sent again, and so would be the declaration."""
    async with world(path, 100, lease_ms=LONG_LEASE_MS, heartbeat_ms=200) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, share_seconds=SHARE_SECONDS)
        await read_portions((m, 100))
        await proxy.refuse()
        await known_away(m)
        ask = (await flood(m, 100))[0][0]
        channel, seen = m.ledger.channel, []
        send, redeclare = channel.send, m.ledger.redeclare

        def send_into_a_new_epoch(*arguments):
            if channel.declares(ask.id) and not channel.unanswered:
                w.store.hset(w.key("meta"), "run", "another")
            return send(*arguments)

        def repeat_and_end():
            redeclare()
            seen.append((channel.carries(ask.id), channel.declares(ask.id)))
            ask.settle(None, None)

        monkeypatch.setattr(channel, "send", send_into_a_new_epoch)
        monkeypatch.setattr(m.ledger, "redeclare", repeat_and_end)
        await proxy.open()
        await eventually(lambda: seen and m.ledger.ready and not m.ledger.inflight)
        assert seen == [(True, True)]
        await eventually(w.empty)


async def test_caps_of_a_key_and_the_end_of_the_process(own_store):
    async with world(str(own_store.socket), 100, lease_ms=LONG_LEASE_MS) as w:
        m = await w.join(share_seconds=SHARE_SECONDS)
        await read_portions((m, 100))
        kill(own_store)
        await known_away(m)
        asks, refusal = await flood(m, 10, blocks_max=25)
        assert (len(asks), refusal.code) == (2, Code.QUOTA_EXCEEDED)
        assert "limits.blocks_max is 25" in refusal.message
        await m.ledger.close(0.05)
        assert not m.ledger.ready
        assert (await flood(m, 10))[1].code is Code.DRAINING
        assert not m.ledger.inflight, "the store has never heard of them"
        own_store.start()


# -- under load --------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What really runs on each replica, of all processes together."""

    limit: int
    running: dict[str, int] = field(default_factory=dict)
    over: int = 0
    """Blocks admitted above the limit."""
    most: dict[str, int] = field(default_factory=dict)
    """Blocks above the limit, by replica, at the worst moment since this was emptied."""
    grants: int = 0
    admitted: list[tuple[float, int]] = field(default_factory=list)
    given_back: list[tuple[float, int]] = field(default_factory=list)
    """When how many blocks were."""
    ended: bool = False

    def start(self, replica, blocks):
        before = self.running.get(replica, 0)
        self.running[replica] = before + blocks
        self.over += max(0, before + blocks - max(self.limit, before))
        self.most[replica] = max(self.most.get(replica, 0), before + blocks - self.limit)
        self.grants += 1
        self.admitted.append((time.monotonic(), blocks))

    def end(self, replica, blocks):
        self.running[replica] -= blocks
        self.given_back.append((time.monotonic(), blocks))

    def admitted_since(self, moment):
        return _sum_since(moment, self.admitted)

    def moved_since(self, moment):
        """A process that has read the books does not know of it until it reads them again."""
        return self.admitted_since(moment) + _sum_since(moment, self.given_back)


def _sum_since(moment, moved):
    return sum(blocks for at, blocks in moved if at >= moment)


async def _work(m, load, seed):
    rng = random.Random(seed)
    while not load.ended:
        long = rng.random() < LONG_CALLS
        blocks = 5 if long else rng.choice([1, 5, 25, 50, 100])
        ask = m.open(blocks, key=f"k{seed % 3}", wait_ms=rng.choice([20, 1500]))
        try:
            answer = await ask.granted()
            if isinstance(answer, Grant):
                load.start(answer.replica, blocks)
                await asyncio.sleep(LONG_SECONDS if long else rng.uniform(0, 0.02))
                load.end(answer.replica, blocks)
        finally:
            ask.settle(None, None)
        await asyncio.sleep(0.002 if isinstance(answer, Grant) else 0.02)


class Readings:
    """When each member began its last reading of the books: the portions in it are as old."""

    def __init__(self, members):
        self._began = {id(m): 0.0 for m in members}
        for m in members:
            self._note(m)

    def _note(self, m):
        read = m.ledger.sharing.read

        async def noted(connection):
            began = time.monotonic()
            replicas = await read(connection)
            self._began[id(m)] = began
            return replicas

        m.ledger.sharing.read = noted

    @property
    def oldest(self):
        return min(self._began.values())

    async def fresh(self):
        """Each member has read the books once more."""
        now = time.monotonic()
        await eventually(lambda: self.oldest > now)


@contextlib.asynccontextmanager
async def loaded(members, limit, workers=12):
    load = Load(limit)
    tasks = [asyncio.create_task(_work(m, load, i)) for i, m in enumerate(members * workers)]
    try:
        yield load
    finally:
        load.ended = True
        await asyncio.wait_for(asyncio.gather(*tasks), 20)


@pytest.mark.parametrize("with_data", [False, True])
async def test_the_gate_lets_no_block_be_admitted_twice(own_store, with_data):
    """Three processes reach the store again.  Its books are old, and one comes much later than the others; or empty,
    and it comes within the two heartbeats that such a store waits for owners that it does not know."""
    path = str(own_store.socket)
    timing = {"lease_ms": LONG_LEASE_MS, "heartbeat_ms": 50 if with_data else 1000}
    async with world(path, 100, 100, **timing) as w, store_proxy(path) as proxy:
        ways = ("", "", proxy.url)
        members = [await w.join(way, reply_seconds=PATIENT_SECONDS) for way in ways]
        async with loaded(members, 100) as load:
            for times in (2, 3):
                seen = load.grants
                await eventually(lambda seen=seen: load.grants > seen + 100)
                if with_data:
                    save(own_store)
                    await asyncio.sleep(0.1)
                kill(own_store)
                await proxy.refuse()
                own_store.start()
                await eventually(
                    lambda times=times: all(m.events.count(StoreUp(True)) == times for m in members[:2])
                )
                await asyncio.sleep(0.3 if with_data else 0.0)
                assert not any(m.ledger.ready for m in members), "one has not declared yet"
                await proxy.open()
                await eventually(lambda: all(m.ledger.ready for m in members))
        assert load.over == 0
        await eventually(lambda: w.empty() and not any(m.ledger.inflight for m in members), 8)
        assert [m.count(LeaseLost) for m in members] == [0, 0, 0]
        assert (await members[0].ledger.state())["debt"] == 0


async def test_who_comes_after_the_gate_has_opened_is_debt_that_stops_admission(own_store):
    """A process that the new store did not know of: the gate waits two heartbeats, and not for it."""
    path = str(own_store.socket)
    async with world(path, 100, lease_ms=LONG_LEASE_MS) as w, store_proxy(path) as proxy:
        m, late = await w.join(), await w.join(proxy.url)
        old = await late.reserve(70)
        await proxy.refuse()
        kill(own_store)
        own_store.start()
        new = await m.reserve(60)
        await proxy.open()
        await eventually(lambda: set(w.states()) == {old.id, new.id})
        assert (await m.ledger.state())["debt"] == 30
        assert late.lost == []
        ask = m.open(10)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: w.states().get(ask.id) == "queued")
        old.settle(None, None)
        assert isinstance(await task, Grant)
        assert (await m.ledger.state())["debt"] == 0
        for each in (new, ask):
            each.settle(None, None)
        await eventually(w.empty)


@pytest.mark.parametrize("with_data", [False, True])
async def test_shares_exceed_the_limit_by_no_more_than_was_moved_in_the_last_moment(own_store, with_data):
    timing = {"lease_ms": LONG_LEASE_MS, "heartbeat_ms": 50 if with_data else 400}
    async with world(str(own_store.socket), 200, 200, **timing) as w:
        members = [await w.join(share_seconds=SHARE_SECONDS) for _ in range(3)]
        readings = Readings(members)
        async with loaded(members, 200) as load:
            for _ in range(2):
                seen = load.grants
                await eventually(lambda seen=seen: load.grants > seen + 100)
                await readings.fresh()
                if with_data:
                    save(own_store)
                load.most.clear()
                killed, lately = time.monotonic(), load.moved_since(readings.oldest)
                kill(own_store)
                await known_away(*members)
                lately += load.admitted_since(killed)  # what the store had granted before
                seen = load.grants
                await eventually(lambda seen=seen: load.grants > seen + 50)
                own_store.start()
                await eventually(lambda: all(m.ledger.ready and not m.ledger.away_seconds for m in members))
                assert sum(load.most.values()) <= lately
        await eventually(lambda: w.empty() and not any(m.ledger.inflight for m in members), 8)
        assert sum(m.count(AdmittedByShare) for m in members) >= 100
        assert [m.lost for m in members] == [[], [], []]


async def test_a_paused_store_grants_twice_only_in_the_moment_of_its_return(own_store):
    """It is the same process, so its gate is open: who is back first is granted what others have shared."""
    async with world(str(own_store.socket), 200, 200, lease_ms=LONG_LEASE_MS) as w:
        members = [await w.join(share_seconds=SHARE_SECONDS, reply_seconds=PATIENT_SECONDS) for _ in range(3)]
        readings = Readings(members)
        async with loaded(members, 200) as load:
            await eventually(lambda: load.grants > 100)
            for m in members:
                m.be_patient(0.3)
            await readings.fresh()
            load.most.clear()
            stopped, lately = time.monotonic(), load.moved_since(readings.oldest)
            own_store.process.send_signal(signal.SIGSTOP)
            await known_away(*members)
            lately += load.admitted_since(stopped)  # what the store had granted before
            seen = load.grants
            await eventually(lambda: load.grants > seen + 50)
            assert sum(load.most.values()) <= lately
            back = time.monotonic()
            for m in members:
                m.be_patient()
            own_store.process.send_signal(signal.SIGCONT)
            await eventually(lambda: all(m.ledger.away_seconds is None for m in members))
            await answered(10, *members)
            assert sum(load.most.values()) <= lately + load.admitted_since(back)
            over, seen = load.over, load.grants
            await eventually(lambda: load.grants > seen + 50)
            assert load.over == over
        await eventually(lambda: w.empty() and not any(m.ledger.inflight for m in members), 8)
        assert [m.lost for m in members] == [[], [], []]


# -- real processes ----------------------------------------------------------------------------------------------


def _status(gateway):
    """Of a call of 28 blocks that takes long; a stream has to end properly."""
    body = {"model": "demo", "prompt": [1] * 40, "max_tokens": 400, "stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = list(answer.iter_lines())
    assert answer.status_code != 200 or lines[-2:] == ["data: [DONE]", ""]
    return answer.status_code


def _read_the_books(path, times):
    """Each gateway renews its lease so many times more, and reads the books as often."""
    with redis.Redis(unix_socket_path=path, protocol=2) as store:

        def owners():
            return snapshot_of(read_content(store, "demo")).owners

        for _ in range(times):
            before = owners()
            wait_until(
                lambda before=before: all(end > before[owner] for owner, end in owners().items()),
                "a heartbeat of each",
            )


def test_two_gateways_serve_on_without_their_store():
    """300 blocks: 168 run, each gateway's part of the rest is 66, two calls more."""
    timing = {"lease_seconds": 4, "heartbeat_seconds": 0.2, "on_outage": "share"}
    with processes() as here, concurrent.futures.ThreadPoolExecutor(16) as threads:
        mock = here.mock("--blocks", "301", "--step-base-ms", "50")
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=timing)
        gateways = [here.gateway(config, key) for _ in range(2)]
        first = list(map(threads.submit, repeat(_status), gateways * 3))
        wait_until(lambda: gateways[0].state()["leases"] == 6, "all are admitted")
        _read_the_books(str(here.store.socket), 3)
        kill(here.store)
        wait_until(lambda: "kvgate_store_up 0.0" in gateways[1].metrics(), "it is noticed")
        later = list(map(threads.submit, repeat(_status), gateways * 3))
        wait_until(lambda: mock.log()["received"] == 6 + 4, "some of them run beside the first")
        wait_until(lambda: sum(call.done() for call in later) == 2, "the others are refused")
        mock.slow(0.1)
        assert sorted(call.result(20) for call in later) == [200] * 4 + [503] * 2
        assert [call.result(20) for call in first] == [200] * 6
        assert [gateway.metric("kvgate_share_admissions_total") for gateway in gateways] == [2, 2]
        here.store.start()
        wait_until(lambda: all(g.is_ready() and g.is_quiet() for g in gateways), "everything was given back")
        assert gateways[0].state()["debt"] == 0
        assert mock.metric("vllm:num_preemptions_total") == 0
        assert [gateway.metric("kvgate_healed_total") for gateway in gateways] == [0, 0]
