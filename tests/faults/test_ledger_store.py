"""The store pauses, loses its data, is full, slow or away; owners sleep and come back."""

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace

import pytest
import redis

from gateway.core.events import LeaseLost, StoreUp
from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Grant
from gateway.ledger.keeper import LOG_SECONDS, PAUSES_SECONDS
from gateway.ledger.records import decode_step
from gateway.ledger.scripts import fleet_keys, library
from gateway.ledger.valkey import HoldLimits
from gateway.ledger.wire import StoreAway
from tests.conformance.twin import IN_FULL, pack_op
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import HOLD, PATIENT_SECONDS, eventually, running_store, world


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


@pytest.fixture
def own_store():
    """One that may be killed; it can save what it holds."""
    with running_store() as store:
        yield store


def restart(store, with_data=False):
    """Another process on the same socket, empty or with what the old one held."""
    if with_data:
        with redis.Redis(unix_socket_path=str(store.socket), protocol=2) as client:
            client.save()
    store.process.kill()
    store.process.wait()
    store.start()


# -- leases ------------------------------------------------------------------------------------------------------


async def test_a_pause_of_the_store_ends_no_lease(own_store):
    async with world(str(own_store.socket), 1000) as w:
        members = [await w.join(reply_seconds=0.2) for _ in range(2)]
        asks = [await m.reserve(10) for m in members for _ in range(5)]
        os.kill(own_store.process.pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(own_store.process.pid, signal.SIGCONT)
        await eventually(lambda: all(m.ledger.ready for m in members))
        await asyncio.sleep(0.2)
        assert w.states() == {ask.id: "reserved" for ask in asks}
        assert [m.count(LeaseLost) for m in members] == [0, 0]
        assert [m.healed() for m in members] == [{}, {}]
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_a_dead_owner_is_reaped_and_its_blocks_are_granted(path):
    async with world(path, 100) as w:
        dead, m = await w.join(), await w.join()
        await dead.reserve(100)
        await dead.stop()
        ask = await m.reserve(100)
        assert w.states() == {ask.id: "reserved"}
        ask.settle(None, None)
        await eventually(w.empty)


@pytest.mark.parametrize("taken", [0, 60])
@pytest.mark.parametrize("keep", [False, True])
async def test_an_owner_that_slept_keeps_its_place_where_there_is_room(path, taken, keep):
    """CD-04: and its late settle gives back nobody else's."""
    async with world(path, 100) as w:
        sleeper, m = await w.join(keep_lost=keep), await w.join()
        old = await sleeper.reserve(60)
        await sleeper.stop()
        new = await m.reserve(taken or 10)
        await eventually(lambda: w.states() == {new.id: "reserved"})
        sleeper.go_on()
        await eventually(lambda: sleeper.ledger.ready)
        stays = keep or not taken
        await eventually(lambda: (old.id in w.states()) == stays)
        await eventually(lambda: sleeper.lost == ([] if stays else [60]))
        assert sleeper.count(LeaseLost) == 1
        assert w.used() == (60 if stays else 0) + new.admission.blocks
        old.settle(None, None)
        await eventually(lambda: w.states() == {new.id: "reserved"})
        assert w.used() == new.admission.blocks
        assert sleeper.lost == ([] if stays else [60]), "told once"
        new.settle(None, None)
        await eventually(w.empty)


async def test_tickets_of_an_owner_that_slept_are_asked_for_again(path):
    async with world(path, 100) as w:
        sleeper, m = await w.join(), await w.join()
        held = await m.reserve(100)
        ask = sleeper.open(60)
        task = asyncio.create_task(ask.granted())
        await eventually(lambda: w.states().get(ask.id) == "queued")
        await sleeper.stop()
        await eventually(lambda: ask.id not in w.states())
        sleeper.go_on()
        await eventually(lambda: w.states().get(ask.id) == "queued")
        held.settle(None, None)
        assert isinstance(await task, Grant)
        ask.settle(None, None)
        await eventually(w.empty)


# -- lost data ---------------------------------------------------------------------------------------------------


async def test_a_store_that_lost_its_data_is_told_everything_again_before_it_admits(own_store):
    """Two processes; the second reaches the new store later than the first."""
    path = str(own_store.socket)
    async with world(path, 100, lease_ms=3000, heartbeat_ms=300) as w, store_proxy(path) as proxy:
        first, second = await w.join(), await w.join(proxy.url)
        running = [await first.reserve(40), await second.reserve(40)]
        ticket = second.open(50)
        waiting = asyncio.create_task(ticket.granted())
        await eventually(lambda: ticket.phase.name == "QUEUED")
        await proxy.refuse()
        restart(own_store)
        await eventually(lambda: w.states() == {running[0].id: "reserved"})
        late = first.open(30)
        asked = asyncio.create_task(late.granted())
        off = await first.open(30, queue_max=0).granted()
        assert off.code is Code.STORE_UNAVAILABLE
        assert off.retry_ms
        await eventually(lambda: w.states().get(late.id) == "queued")
        await proxy.open()
        await eventually(lambda: first.ledger.ready and second.ledger.ready)
        await eventually(lambda: w.states().get(ticket.id) == "queued")
        assert w.states() == {
            **{ask.id: "reserved" for ask in running},
            late.id: "queued",
            ticket.id: "queued",
        }
        assert w.used() == 80
        for ask in running:
            ask.settle(None, None)
        answers = await asyncio.gather(asked, waiting)
        assert all(isinstance(answer, Grant) for answer in answers)
        for ask in (late, ticket):
            ask.settle(None, None)
        await eventually(w.empty)
        assert [m.lost for m in (first, second)] == [[], []]
        assert [m.healed() for m in (first, second)] == [{}, {}]
        assert [m.count(LeaseLost) for m in (first, second)] == [0, 0]


async def test_an_idle_process_notices_the_end_of_the_store_at_once(own_store):
    """It does not call itself ready until its next heartbeat, which here never comes."""
    async with world(str(own_store.socket), 100) as w:
        m = await w.join()
        w.config = replace(w.config, lease_ms=60_000, heartbeat_ms=30_000)
        m.ledger.reconfigure()
        await eventually(lambda: w.store.pubsub_channels(w.key("wake:*")))
        await asyncio.sleep(0.1)
        own_store.process.kill()
        own_store.process.wait()
        await eventually(lambda: not m.ledger.ready)
        own_store.start()


async def test_running_calls_are_declared_by_force_above_a_lowered_limit(own_store):
    async with world(str(own_store.socket), 100) as w:
        m = await w.join()
        asks = [await m.reserve(45), await m.reserve(45)]
        w.config = _with_limit(w.config, 50)
        restart(own_store)
        await eventually(lambda: len(w.states()) == 2)
        assert w.used() == 90
        assert m.lost == []
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


def _with_limit(config, limit):
    return replace(config, replicas=tuple(replace(r, limit=limit) for r in config.replicas))


async def test_what_was_observed_of_replicas_is_told_to_a_new_store(own_store):
    async with world(str(own_store.socket), 100, 100) as w:
        m = await w.join()
        await m.ledger.observe("r0", False)
        await m.ledger.observe("r1", False)
        await m.ledger.observe("r1", True)
        await m.ledger.observe("nobody", False)
        await eventually(lambda: w.rows("replicas", "replica")["r0"]["state"] == "down")
        restart(own_store)
        await eventually(lambda: w.rows("replicas", "replica").get("r0", {}).get("state") == "down")
        assert w.rows("replicas", "replica")["r1"]["state"] == "up"


async def test_a_store_restarted_with_its_data_goes_on(own_store):
    async with world(str(own_store.socket), 100) as w:
        members = [await w.join(), await w.join()]
        running = [await m.reserve(45) for m in members]
        ticket = members[0].open(45)
        waiting = asyncio.create_task(ticket.granted())
        await eventually(lambda: w.states().get(ticket.id) == "queued")
        epoch = int(w.store.hget(w.key("meta"), "epoch"))
        restart(own_store, with_data=True)
        await eventually(lambda: int(w.store.hget(w.key("meta"), "epoch")) == epoch + 1)
        await eventually(lambda: all(m.ledger.ready for m in members))
        assert w.states() == {**{ask.id: "reserved" for ask in running}, ticket.id: "queued"}
        assert [m.count(LeaseLost) for m in members] == [0, 0]
        running[0].settle(None, None)
        assert isinstance(await waiting, Grant)
        for ask in (running[1], ticket):
            ask.settle(None, None)
        await eventually(w.empty)
        assert [m.healed() for m in members] == [{}, {}]


async def test_a_store_restarted_with_older_data_learns_what_it_missed(path):
    """A failover to a replica that was behind: the books are those of before two calls came and one went."""
    async with world(path, 100) as w:
        m = await w.join()
        gone = await m.reserve(20)
        saved = {key: w.store.dump(key) for key in w.key_names()}
        gone.settle(None, None)
        await eventually(w.empty)
        running, ticket = await m.reserve(90), m.open(50)
        waiting = asyncio.create_task(ticket.granted())
        await eventually(lambda: w.states().get(ticket.id) == "queued")
        with w.store.pipeline() as together:
            together.delete(*saved)
            for key, content in saved.items():
                if content:
                    together.restore(key, 0, content, replace=True)
            together.hset(w.key("meta"), "run", "another")
            together.execute()
        await eventually(lambda: w.states() == {running.id: "reserved", ticket.id: "queued"})
        assert w.used() == 90
        assert m.healed()["settled"] == 1
        running.settle(None, None)
        assert isinstance(await waiting, Grant)
        ticket.settle(None, None)
        await eventually(w.empty)


async def test_after_a_restart_with_data_a_lost_lease_is_not_declared_by_force(own_store):
    async with world(str(own_store.socket), 100) as w:
        sleeper, m = [await w.join(reply_seconds=PATIENT_SECONDS) for _ in range(2)]
        old = await sleeper.reserve(60)
        restart(own_store, with_data=True)
        await eventually(lambda: all(each.events.count(StoreUp(True)) == 2 for each in (sleeper, m)))
        await eventually(lambda: all(each.ledger.ready for each in (sleeper, m)))
        await sleeper.stop()
        new = await m.reserve(60)
        sleeper.go_on()
        await eventually(lambda: sleeper.lost == [60])
        assert w.states() == {new.id: "reserved"}
        old.settle(None, None)
        new.settle(None, None)
        await eventually(w.empty)


async def test_a_store_that_forgot_its_scripts_gets_them_again(path):
    async with world(path, 100) as w:
        m = await w.join(reply_seconds=PATIENT_SECONDS)
        ask = await m.reserve(10)
        w.store.function_flush()
        await eventually(lambda: m.events.count(StoreUp(False)) == 1)
        (await m.reserve(10)).settle(None, None)
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_store_that_was_flushed_is_filled_again(own_store):
    async with world(str(own_store.socket), 100) as w:
        m = await w.join()
        ask = await m.reserve(10)
        w.store.flushall()
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        await eventually(lambda: m.ledger.ready)
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_full_store_still_takes_settles(own_store):
    async with world(str(own_store.socket), 1000) as w:
        m = await w.join()
        asks = [await m.reserve(10) for _ in range(50)]
        w.store.config_set("maxmemory", 1)
        asks += [await m.reserve(10) for _ in range(5)]
        for ask in asks:
            ask.settle(None, None)
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)
        assert m.healed() == {}
        restart(own_store)
        await eventually(lambda: m.ledger.ready)


# -- the digest --------------------------------------------------------------------------------------------------


def step(w, owner, *ops):
    """A batch of that owner that its process knows nothing of."""
    batch = w.rows("sessions", "session")[owner]["batch"] + 1
    name, keys = library().function("step"), fleet_keys(w.fleet)
    packed = [pack_op(op) for op in ops]
    reply = w.store.execute_command("FCALL", name, len(keys), *keys, "", owner, batch, "w:", *packed)
    return decode_step(reply)[5]


FOREIGN = [
    *("A", "00000000aa", "k", "normal", "a", 7, 1, 0, 7, 5000, 1, -1, -1, -1, 9, 9),
    *([], [], [], "", "", 0, *IN_FULL),
]


@pytest.mark.parametrize("busy", [False, True])
async def test_a_difference_is_found_and_mended(path, busy, monkeypatch):
    """The store lost one of our calls and holds one that we do not; more than a page of others are right."""
    monkeypatch.setattr("gateway.ledger.keeper.PAGE_SIZE", 3)
    async with world(path, 1000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        asks = [await m.reserve(10) for _ in range(7)]
        traffic = [asyncio.create_task(come_and_go(m, i / 1000)) for i in range(10 if busy else 0)]
        proxy.reply_seconds = 0.005
        owner = w.calls()[asks[0].id]["owner"]
        assert step(w, owner, ["S", asks[0].id, -1, -1, [], ""], FOREIGN) == [["settled"], ["grant", "r0"]]
        await eventually(lambda: m.healed() == {"settled": 1, "redeclared": 1})
        for task in traffic:
            task.cancel()
        await asyncio.gather(*traffic, return_exceptions=True)
        await eventually(lambda: w.states() == {ask.id: "reserved" for ask in asks})
        assert m.lost == []
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {"settled": 1, "redeclared": 1}, "once"


async def come_and_go(m, pause_seconds):
    """Several, each of another rhythm, leave something to send whenever a reply comes."""
    while True:
        ask = m.open(1)
        try:
            await ask.granted()
            await asyncio.sleep(pause_seconds)
        finally:
            ask.settle(None, None)


async def test_a_call_that_the_store_has_elsewhere_is_ended_and_counted(path):
    async with world(path, 100, 100) as w:
        m = await w.join()
        ask = await m.reserve(10)
        ask.replica = "r1" if ask.replica == "r0" else "r0"
        w.store.hset(w.key("meta"), "run", "another")
        await eventually(lambda: m.lost == [10])
        await eventually(w.empty)
        assert m.healed() == {"error": 1}


# -- outages -----------------------------------------------------------------------------------------------------


async def _refused(ask):
    started = time.monotonic()
    answer = await ask.granted()
    assert isinstance(answer, Refusal)
    assert answer.code is Code.STORE_UNAVAILABLE
    assert answer.retry_ms
    ask.settle(None, None)
    return time.monotonic() - started


@pytest.mark.parametrize("how", ["refuses", "swallows"])
async def test_calls_are_held_a_while_then_refused_then_refused_at_once(path, how, monkeypatch):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, HoldLimits(0.4, 256, 1 << 20), reply_seconds=0.2)
        running = await m.reserve(10)
        await eventually(lambda: m.ledger.ready)
        m.events.clear()
        if how == "refuses":
            await proxy.refuse()
        else:
            proxy.black_hole = True
        assert await _refused(m.open(10)) >= 0.4
        await eventually(lambda: (m.ledger._keeper.away_seconds or 0) > 0.4)
        assert not m.ledger.ready
        for _ in range(3):
            call = m.open(10).granted()
            with pytest.raises(StopIteration) as answered:
                call.send(None)  # without waiting for anything
            assert answered.value.value.code is Code.STORE_UNAVAILABLE
        assert m.events.count(StoreUp(False)) == 1
        attempts, connect = [], m.ledger._keeper._connect

        async def connect_noted():
            attempts.append(1)
            await connect()

        proxy.black_hole = False
        if how == "refuses":
            await proxy.open()
        m.be_patient()
        monkeypatch.setattr(m.ledger._keeper, "_connect", connect_noted)
        await eventually(lambda: m.ledger.ready)
        assert len(attempts) <= 1, "the next one is good"
        assert PAUSES_SECONDS[-1] <= 0.25, "and it comes soon"
        (await m.reserve(10)).settle(None, None)
        running.settle(None, None)
        await eventually(w.empty)
        assert m.lost == []


async def test_a_call_that_is_held_is_granted_when_the_store_returns(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url)
        await proxy.refuse()
        await eventually(lambda: not m.ledger.ready)
        asks = [m.open(10) for _ in range(5)]
        tasks = [asyncio.create_task(ask.granted()) for ask in asks]
        await asyncio.sleep(0.1)
        await proxy.open()
        assert all(isinstance(answer, Grant) for answer in await asyncio.gather(*tasks))
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_an_outage_is_logged_once_in_a_while_whatever_its_reasons(path, caplog):
    """It breaks off, then nobody listens, then nothing is answered."""
    passed = [0.0]
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=0.1, now=lambda: time.monotonic() + passed[0])

        async def fails(times):
            expected = m.ledger._keeper._failures + times
            await eventually(lambda: m.ledger._keeper._failures >= expected)

        def logged():
            return [record.message for record in caplog.records if record.levelno >= logging.ERROR]

        await proxy.refuse()
        await fails(3)
        assert len(logged()) == 1
        proxy.black_hole = True
        await proxy.open()
        await fails(2)
        assert len(logged()) == 1
        passed[0] = LOG_SECONDS
        await fails(2)
        assert len(logged()) == 2
        assert "is away" in logged()[-1]
        proxy.black_hole = False
        await eventually(lambda: m.ledger.ready)


async def test_replies_a_little_late_are_only_slow(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, reply_seconds=PATIENT_SECONDS)
        proxy.reply_seconds = 0.3
        ask = await m.reserve(10)
        ask.settle(None, None)
        await eventually(lambda: m.ledger.inflight == 0)
        assert m.events.count(StoreUp(False)) == 0


async def test_a_long_turn_of_our_own_is_no_slow_store(path):
    """The reply has come, and nobody has looked: calls that ask in the same turn are not refused."""
    async with world(path, 100) as w:
        m = await w.join(hold=HoldLimits(2, 3, 1 << 20))

        async def dawdle():
            time.sleep(0.4)  # noqa: ASYNC251  # this is what it is about

        asks = [m.open(10) for _ in range(8)]
        calls = [ask.granted() for ask in asks]
        calls.insert(4, dawdle())
        answers = await asyncio.gather(*calls)
        answers.pop(4)
        assert all(isinstance(answer, Grant) for answer in answers), answers
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


@pytest.mark.parametrize(
    ("hold", "bytes_each", "held", "words"),
    [
        (HoldLimits(HOLD.seconds, 3, 1 << 20), 10, 3, "store.hold_calls_max is 3"),
        (HoldLimits(HOLD.seconds, 100, 1000), 300, 3, "store.hold_bytes_max is 1000"),
    ],
)
@pytest.mark.parametrize("how", ["away", "slow"])
async def test_few_calls_are_held(path, how, hold, bytes_each, held, words):
    """Also in the time before a slow store counts as away."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, hold, reply_seconds=PATIENT_SECONDS)
        if how == "away":
            await proxy.refuse()
            await eventually(lambda: not m.ledger.ready)
        else:
            proxy.reply_seconds = 0.8
            await eventually(lambda: m.ledger._keeper.slow)
        asks = [m.open(10, body_bytes=bytes_each) for _ in range(held)]
        tasks = [asyncio.create_task(ask.granted()) for ask in asks]
        await asyncio.sleep(0)
        answer = await m.open(10, body_bytes=bytes_each).granted()
        assert answer.code is Code.STORE_UNAVAILABLE
        assert words in answer.message
        proxy.reply_seconds = 0.0
        if how == "away":
            await proxy.open()
        assert all(isinstance(answer, Grant) for answer in await asyncio.gather(*tasks))
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_a_client_that_left_is_not_held(path):
    """Its op is under way, its body is not kept."""
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, HoldLimits(HOLD.seconds, 1, 1 << 20), reply_seconds=PATIENT_SECONDS)
        proxy.reply_seconds = 0.8
        left = m.open(10)
        task = asyncio.create_task(left.granted())
        await eventually(lambda: left.id in w.states() and m.ledger._keeper.slow)
        assert (await m.open(10).granted()).code is Code.STORE_UNAVAILABLE
        task.cancel()
        left.settle(None, None)
        proxy.reply_seconds = 0.0
        (await m.reserve(10)).settle(None, None)
        await eventually(w.empty)


async def test_with_refuse_nothing_is_held(path):
    async with world(path, 100) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, HoldLimits(0, 256, 1 << 20), reply_seconds=0.2)
        await proxy.refuse()
        await eventually(lambda: not m.ledger.ready)
        call = m.open(10).granted()
        with pytest.raises(StopIteration) as answered:
            call.send(None)
        assert answered.value.value.code is Code.STORE_UNAVAILABLE
        await proxy.open()
        await eventually(lambda: m.ledger.ready)
        (await m.reserve(10)).settle(None, None)
        await eventually(w.empty)


async def test_a_burst_meets_a_slow_store_on_one_connection(path):
    async with world(path, 100_000) as w, store_proxy(path) as proxy:
        before = len(w.store.client_list())
        m = await w.join(proxy.url)
        proxy.reply_seconds = 0.005
        asks = [m.open(10) for _ in range(1000)]
        answers = await asyncio.gather(*(ask.granted() for ask in asks))
        assert all(isinstance(answer, Grant) for answer in answers)
        assert len(w.store.client_list()) - before <= 2
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_calls_that_run_are_not_touched_by_an_outage(path):
    async with world(path, 100, lease_ms=60_000) as w, store_proxy(path) as proxy:
        m = await w.join(proxy.url, HOLD, reply_seconds=0.1)
        asks = [await m.reserve(10) for _ in range(3)]
        await proxy.refuse()
        await eventually(lambda: not m.ledger.ready)
        asks[0].settle(None, None)
        asks[1].first_token()
        await proxy.open()
        await eventually(lambda: w.states() == {ask.id: "reserved" for ask in asks[1:]})
        for ask in asks[1:]:
            ask.settle(None, None)
        await eventually(w.empty)
        assert m.lost == []
        assert m.healed() == {}


async def test_a_store_that_fails_after_every_batch_is_asked_less_and_less(path, monkeypatch):
    """One script of it is broken, and the connection ends with the error: a batch that went well does not start the
    pauses anew."""

    async def fails(_keeper):
        raise StoreAway("ERR one script is broken")

    async with world(path, 100) as w:
        m = await w.join()
        monkeypatch.setattr("gateway.ledger.keeper.Keeper._compare", fails)
        keeper = m.ledger._keeper
        keeper._differs = True
        keeper.wake()
        await eventually(lambda: keeper._failures > len(PAUSES_SECONDS))
