"""One process, one real store: what a call is told, and what the store holds of it then."""

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import redis

from gateway.core import quota
from gateway.core.events import StoreUp
from gateway.core.forecast import KNOWN_MIN, Course
from gateway.core.order import FORECAST_MARGIN_PERCENT
from gateway.core.outcomes import Code, Refusal
from gateway.core.quota import Quota, Units
from gateway.ledger.api import Ahead, Grant
from gateway.ledger.state import read_state
from tests.integration.ledger_world import (
    HOLD,
    PATIENT_SECONDS,
    WAIT_SECONDS,
    demand,
    eventually,
    running_store,
    world,
)

LEDGER_DOCUMENT = Path(__file__).parents[2] / "docs/ledger.md"


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


async def test_a_call_that_fits_is_granted_at_once(path):
    async with world(path, 100) as w:
        m = await w.join()
        ask = m.open(60)
        answer = await ask.granted()
        assert isinstance(answer, Grant)
        assert (answer.replica, answer.queued) == ("r0", False)
        assert w.states() == {ask.id: "reserved"}
        assert w.used() == 60
        ask.settle(50, 60)
        ask.settle(None, None)
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)


async def test_a_settle_wakes_the_next_in_line(path):
    """No heartbeat comes before it."""
    async with world(path, 100) as w:
        first, second = await w.join(), await w.join()
        w.config = replace(w.config, lease_ms=60_000, heartbeat_ms=30_000)
        for m in (first, second):
            m.ledger.reconfigure()
        await eventually(lambda: len(w.store.pubsub_channels(w.key("wake:*"))) == 2)
        held = await first.reserve(100)
        asks = [second.open(100), first.open(100)]
        waits = [asyncio.create_task(ask.granted()) for ask in asks]
        await eventually(lambda: sorted(w.states().values()) == ["queued", "queued", "reserved"])
        running = held
        while waits:
            running.settle(None, None)
            done, _ = await asyncio.wait(waits, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1, "nobody was woken"
            answer = done.pop().result()
            assert isinstance(answer, Grant)
            assert answer.queued
            running = next(ask for ask in asks if ask.replica and ask is not running)
            waits = [wait for wait in waits if not wait.done()]
            await eventually(lambda: list(w.states().values()).count("reserved") == 1)
        running.settle(None, None)
        await eventually(w.empty)


async def test_a_call_that_waited_too_long_is_told_so_and_forgotten(path):
    async with world(path, 100) as w:
        m = await w.join()
        held = await m.reserve(100)
        ask = m.open(10, wait_ms=80)
        started = time.monotonic()
        answer = await ask.granted()
        waited_ms = (time.monotonic() - started) * 1000
        assert isinstance(answer, Refusal)
        assert answer.code is Code.QUEUE_TIMEOUT
        assert "queue.seconds_max" in answer.message
        assert "80 ms" in answer.message
        assert answer.retry_ms
        assert waited_ms >= 79
        ask.settle(None, None)
        await eventually(lambda: w.states() == {held.id: "reserved"})
        assert not w.store.exists(w.key("deadlines"), w.key("queue"))
        held.settle(None, None)
        await eventually(w.empty)


REFUSALS = [
    ("never fits", {"blocks": 101}, Code.CONTEXT_LENGTH_EXCEEDED, ("101", "100"), False),
    (
        "above the key's cap",
        {"blocks": 30, "blocks_max": 20},
        Code.KEY_CAP_EXCEEDED,
        ("30", "blocks_max", "20"),
        False,
    ),
    (
        "above the key's part of a pool",
        {"blocks": 51, "pool_share": 500_000},
        Code.KEY_CAP_EXCEEDED,
        ("needs 51", "limits.pool_share", "is 50"),
        False,
    ),
    ("queue off", {"queue_max": 0}, Code.CAPACITY_EXCEEDED, ("10", "queue.depth_max is 0"), None),
    (
        "queue full",
        {"blocks": 50, "queue_max": 1},
        Code.QUEUE_FULL,
        ("1 requests", "queue.depth_max is 1"),
        None,
    ),
    (
        "calls of the key",
        {"requests_max": 2, "queue_max": 0},
        Code.QUOTA_EXCEEDED,
        ("hold 3", "limits.requests_max is 2"),
        None,
    ),
    (
        "blocks of the key",
        {"blocks_max": 105, "queue_max": 0},
        Code.QUOTA_EXCEEDED,
        ("hold 110", "limits.blocks_max is 105"),
        None,
    ),
    (
        "part of a pool of the key",
        {"pool_share": 500_000, "queue_max": 0},
        Code.QUOTA_EXCEEDED,
        ("hold 110 KV blocks of a pool", "limits.pool_share", "is 50"),
        None,
    ),
    ("no time", {"wait_ms": 0}, Code.QUEUE_TIMEOUT, ("0 ms",), None),
]


@pytest.mark.parametrize(
    ("change", "code", "words", "again"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
async def test_a_refusal_names_knob_measure_and_limit(path, change, code, words, again):
    """One call fills the replica with two of the key's calls, and one of another key waits in the lane."""
    async with world(path, 100) as w:
        m = await w.join()
        held = [await m.reserve(50), await m.reserve(50)]
        waiter = m.open(50, key="other")
        waiting = asyncio.create_task(waiter.granted())
        await eventually(lambda: "queued" in w.states().values())
        ask = m.open(**change)
        answer = await ask.granted()
        assert isinstance(answer, Refusal)
        assert answer.code is code
        for word in words:
            assert word in answer.message
        assert answer.should_retry is again
        assert (answer.retry_ms is None) == (again is False)
        for each in (ask, waiter, *held):
            each.settle(None, None)
        assert (await waiting).code is Code.DRAINING
        await eventually(lambda: w.empty() and m.ledger.inflight == 0)


async def test_no_replica_that_is_up_is_no_backend_and_its_return_is_heard(path):
    async with world(path, 100) as w:
        m = await w.join()
        await m.ledger.observe("r0", False)
        await eventually(lambda: w.rows("replicas", "replica")["r0"]["state"] == "down")
        answer = await m.open(10).granted()
        assert answer.code is Code.NO_BACKEND
        assert answer.retry_ms
        await m.ledger.observe("r0", True)
        await eventually(lambda: w.rows("replicas", "replica")["r0"]["state"] == "up")
        (await m.reserve(10)).settle(None, None)
        await eventually(w.empty)


async def test_a_new_limit_reaches_the_store(path):
    async with world(path, 100) as w:
        m = await w.join()
        w.config = replace(w.config, replicas=(replace(w.config.replicas[0], limit=40),))
        m.ledger.reconfigure()
        await eventually(lambda: w.rows("replicas", "replica")["r0"]["limit"] == 40)


async def test_a_key_at_its_cap_waits_for_its_own_release(path):
    async with world(path, 100) as w:
        m = await w.join()
        held = await m.reserve(10, requests_max=1)
        ask = m.open(10, requests_max=1)
        waiting = asyncio.create_task(ask.granted())
        await eventually(lambda: w.store.exists(w.key("parked")))
        (await m.reserve(10, key="other")).settle(None, None)
        assert not waiting.done()
        held.settle(None, None)
        assert isinstance(await waiting, Grant)
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_move_goes_elsewhere_and_is_paid_once(path):
    async with world(path, 100, 100) as w:
        m = await w.join()
        ask = m.open(60)
        first = await ask.granted()
        second = await ask.moved(first.replica)
        assert {first.replica, second.replica} == {"r0", "r1"}
        assert w.calls()[ask.id]["exclude"] == [first.replica]
        await eventually(lambda: w.states() == {ask.id: "reserved"})
        ask.settle(None, None)
        await eventually(w.empty)
        assert m.healed() == {}


@pytest.mark.parametrize("wait_ms", [0, 5000])
async def test_a_move_needs_no_time_in_the_queue(path, wait_ms):
    """With the queue off, too, the other replica is tried."""
    async with world(path, 100, 100) as w:
        m = await w.join()
        ask = m.open(60, wait_ms=wait_ms, queue_max=0)
        first = await ask.granted()
        second = await ask.moved(first.replica)
        assert isinstance(second, Grant)
        assert second.replica != first.replica
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_move_without_a_place_elsewhere_ends_with_the_time_to_wait(path):
    async with world(path, 100) as w:
        m = await w.join()
        ask = m.open(60, wait_ms=100)
        first = await ask.granted()
        assert (await ask.moved(first.replica)).code is Code.QUEUE_TIMEOUT
        ask.settle(None, None)
        await eventually(w.empty)


async def test_the_first_token_gives_the_prefill_share_back(path):
    async with world(path, 100) as w:
        m = await w.join()
        first = await m.reserve(10, prefill=800)
        second = m.open(10, prefill=800)
        waiting = asyncio.create_task(second.granted())
        await eventually(lambda: w.states().get(second.id) == "queued")
        first.first_token()
        first.first_token()
        assert isinstance(await waiting, Grant)
        assert w.rows("replicas", "replica")["r0"]["prefill"] == 800
        first.settle(None, None)
        second.settle(None, None)
        await eventually(w.empty)
        assert w.rows("replicas", "replica")["r0"]["prefill"] == 0


async def test_a_full_queue_is_remembered_for_a_moment(path):
    clock = [100.0]
    async with world(path, 100) as w:
        m = w.add(now=lambda: clock[0])
        clock_goes_on = asyncio.create_task(_run_clock(clock))
        m.go_on()
        await eventually(lambda: m.ledger.ready)
        clock_goes_on.cancel()
        held = await m.reserve(100)
        asked = time.monotonic()
        assert (await m.open(10, queue_max=0, wait_ms=0).granted()).code is Code.CAPACITY_EXCEEDED
        assert m.ledger.known_refusal(["a"], "normal", "k") is None, "only a full queue is remembered"
        waiter = m.open(10, queue_max=1)
        waiting = asyncio.create_task(waiter.granted())
        await eventually(lambda: w.states().get(waiter.id) == "queued")
        assert (await m.open(10, queue_max=1).granted()).code is Code.QUEUE_FULL
        known = m.ledger.known_refusal(["a"], "normal", "k")
        assert known.code is Code.QUEUE_FULL
        assert known.cached
        assert m.ledger.known_refusal(["a", "b"], "normal", "k") is None
        assert m.ledger.known_refusal(["a"], "high", "k") is None
        assert m.ledger.known_refusal(["a"], "normal", "other") is None, (
            "a full queue may have room for another key"
        )
        assert m.ledger.known_refusal([], "normal", "k") is None
        clock[0] += 0.011
        assert m.ledger.known_refusal(["a"], "normal", "k") is None, "one call in 10 ms goes through"
        assert m.ledger.known_refusal(["a"], "normal", "k") == known
        clock[0] += 0.05
        assert m.ledger.known_refusal(["a"], "normal", "k") is None, "50 ms are over"
        assert (await m.open(10, queue_max=1).granted()).code is Code.QUEUE_FULL
        waiter.settle(None, None)
        assert m.ledger.known_refusal(["a"], "normal", "k") is None, "something was given back"
        held.settle(None, None)
        await waiting
        assert time.monotonic() - asked < 30
        await eventually(w.empty)


async def _run_clock(clock):
    while True:
        await asyncio.sleep(0.01)
        clock[0] += 0.01


async def test_two_fleets_in_one_store_do_not_see_each_other(path):
    async with world(path, 100) as one, world(path, 100) as other:
        here, there = await one.join(), await other.join()
        a, b = await here.reserve(100), await there.reserve(100)
        assert list(one.states()) == [a.id]
        assert list(other.states()) == [b.id]
        assert (await here.ledger.state())["reserved"] == 100
        a.settle(None, None)
        await eventually(one.empty)
        assert other.used() == 100
        b.settle(None, None)
        await eventually(other.empty)
        for m in (here, there):
            await m.stop()


async def test_of_two_processes_racing_for_the_last_places_exactly_as_many_win(path):
    async with world(path, 100) as w:
        members = [await w.join(), await w.join()]
        for _ in range(50):
            asks = [members[i % 2].open(10, queue_max=0) for i in range(64)]
            answers = await asyncio.gather(*(ask.granted() for ask in asks))
            assert sum(isinstance(answer, Grant) for answer in answers) == 10
            assert {a.code for a in answers if isinstance(a, Refusal)} == {Code.CAPACITY_EXCEEDED}
            assert w.used() == 100
            w.check()
            for ask in asks:
                ask.settle(None, None)
            await eventually(w.empty)
        assert [m.healed() for m in members] == [{}, {}]


async def test_a_process_needs_two_connections_however_many_calls_it_has(path):
    async with world(path, 100_000) as w:
        before = len(w.store.client_list())
        m = await w.join()
        asks = [m.open(10) for _ in range(1000)]
        answers = await asyncio.gather(*(ask.granted() for ask in asks))
        assert all(isinstance(answer, Grant) for answer in answers)
        assert len(w.store.client_list()) - before <= 2
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)


async def test_close_returns_when_the_store_lists_nothing_of_the_process(path):
    async with world(path, 100) as w:
        m, other = await w.join(), await w.join()
        stays = await other.reserve(10)
        asks = [await m.reserve(10) for _ in range(9)]
        waiting = [asyncio.create_task(m.open(10).granted()) for _ in range(100)]
        await eventually(lambda: list(w.states().values()).count("queued") == 100)
        late = [asyncio.create_task(m.open(10).granted()) for _ in range(10)]
        await asyncio.sleep(0)
        await m.ledger.close(5)
        assert w.states() == {stays.id: "reserved"}
        assert m.ledger.inflight == 0
        assert {(await each).code for each in waiting + late} == {Code.DRAINING}
        assert (await m.open(10).granted()).code is Code.DRAINING
        for ask in asks:
            ask.settle(None, None)
        stays.settle(None, None)
        await eventually(w.empty)


async def test_close_finds_what_the_process_does_not_know_of(path):
    """The list of the store decides, not the memory of the process."""
    async with world(path, 100) as w:
        m = await w.join()
        ask = await m.reserve(10)
        m.ledger._asks.clear()
        await m.ledger.close(5)
        assert w.empty(), ask.id


async def test_close_gives_up_on_a_store_that_is_away(path):
    async with world(path, 100) as w:
        m = await w.join()
        ask = await m.reserve(10)
        await m.stop()
        started = time.monotonic()
        await asyncio.wait_for(m.ledger.close(0.1), WAIT_SECONDS)
        assert time.monotonic() - started >= 0.1
        m.go_on()
        await eventually(w.empty)
        assert ask.id not in w.states()


async def test_a_failure_of_our_own_is_told_and_everything_starts_anew(path, caplog, monkeypatch):
    """It counts as an outage."""
    async with world(path, 100) as w:
        m = await w.join(reply_seconds=PATIENT_SECONDS)
        ask = await m.reserve(10)
        real, failures = m.ledger.digest, []

        def digest():
            if len(failures) < 2:
                failures.append(1)
                raise ZeroDivisionError("planted")
            return real()

        monkeypatch.setattr(m.ledger, "digest", digest)
        await eventually(lambda: m.events.count(StoreUp(False)) == 2 and m.ledger.ready)
        assert "ZeroDivisionError: planted" in caplog.text
        assert w.states() == {ask.id: "reserved"}
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_result_that_cannot_be_taken_harms_no_other_call(path, caplog, monkeypatch):
    async with world(path, 100) as w:
        m = await w.join()
        asks = [m.open(10) for _ in range(3)]
        take = type(asks[0])._take_answer

        def fail_for_the_first(ask, result):
            if ask is asks[0]:
                raise ZeroDivisionError("planted")
            take(ask, result)

        monkeypatch.setattr(type(asks[0]), "_take_answer", fail_for_the_first)
        tasks = [asyncio.create_task(ask.granted()) for ask in asks]
        await asyncio.wait(tasks[1:], timeout=WAIT_SECONDS)
        assert [isinstance(task.result(), Grant) for task in tasks[1:]] == [True, True]
        assert "planted" in caplog.text
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_an_admit_leaves_in_the_turn_that_asks(path):
    """While nothing else is on its way; under load a turn of the loop is a millisecond."""
    async with world(path, 100) as w:
        m = await w.join()
        await eventually(lambda: not m.ledger.channel.busy)
        call = (ask := m.open(10)).granted()
        call.send(None)
        assert m.ledger.channel.unanswered
        call.close()
        ask.settle(None, None)
        await eventually(w.empty)


async def test_the_rights_of_a_store_user_that_the_documents_name_are_enough(path):
    line = re.search(r"^ACL SETUSER kvgate .*$", LEDGER_DOCUMENT.read_text(), re.MULTILINE)
    assert line
    with redis.Redis(unix_socket_path=path, protocol=2) as store:
        store.execute_command(*line[0].split())
        try:
            async with world(path, 100) as w:
                m = await w.join(f"unix://kvgate:PASSWORD@{path}")
                running, waiting = await m.reserve(60), m.open(60)
                answer = asyncio.create_task(waiting.granted())
                await eventually(lambda: w.states() == {running.id: "reserved", waiting.id: "queued"})
                running.settle(None, None)
                assert isinstance(await answer, Grant)
                state = await read_state(f"unix://kvgate:PASSWORD@{path}", w.fleet)
                assert (state["leases"], state["reserved"]) == (1, 60)
                waiting.settle(None, None)
                await eventually(w.empty)
        finally:
            store.acl_deluser("kvgate")


async def test_a_full_queue_takes_a_call_of_a_key_that_waits_for_less(path):
    """Whoever has to go hears it at once, on whichever process it waits."""
    room = {"queue_max": 2, "queue_key_max": 2}
    async with world(path, 100) as w:
        crowd, other = await w.join(), await w.join()
        w.config = replace(w.config, lease_ms=60_000, heartbeat_ms=30_000)  # only a wake-up is in time
        for m in (crowd, other):
            m.ledger.reconfigure()
        await eventually(lambda: len(w.store.pubsub_channels(w.key("wake:*"))) == 2)
        running = await crowd.reserve(100)
        asks = [crowd.open(10, key="a", **room) for _ in range(2)]
        waits = [asyncio.create_task(ask.granted()) for ask in asks]
        await eventually(lambda: all(ask.queued for ask in asks))
        asks[1]._on_admit(asks[1].id, ["ticket", 9, 1000])
        assert (asks[1]._position, asks[1]._predicted_ms) == (2, None), (
            "asked again, it is still the first ticket"
        )
        again = crowd.ledger.refusal_of(asks[1].admission, ["refused", "queue_full", "displaced", 0, 0, 1000])
        assert (again.waited, crowd.ledger.known_refusal(["a"], "normal", "a")) == (True, None)
        newcomer = other.open(10, key="b", **room)
        granted = asyncio.create_task(newcomer.granted())
        refusal = await asyncio.wait_for(waits[1], WAIT_SECONDS)
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.QUEUE_FULL
        assert "a request of another key has taken the place" in refusal.message
        await eventually(
            lambda: w.states() == {running.id: "reserved", asks[0].id: "queued", newcomer.id: "queued"}
        )
        late = await other.open(10, key="b", **room).granted()
        assert isinstance(late, Refusal)
        assert "queue.depth_max is 2" in late.message, "both keys wait for as much"
        running.settle(None, None)
        for ask, wait in ((asks[0], waits[0]), (newcomer, granted)):
            assert isinstance(await wait, Grant)
            ask.settle(None, None)
        asks[1].settle(None, None)
        await eventually(w.empty)


NOBODY = Ahead(0, 0)


async def test_a_question_is_answered_without_taking_anything(path):
    """Refused by the queue where the call would be, of whatever size; nobody answers for a process that sleeps."""
    async with world(path, 100) as w:
        m = await w.join()
        running = await m.reserve(100)
        question = demand(90, queue_max=1)
        assert await m.ledger.would_refuse(question, 10, NOBODY) is None
        with m.ledger.counted(question):
            others = {(1, 1): question, (1, 0): demand(90, key="b"), (0, 0): demand(90, class_="low")}
            for places, other in others.items():
                with m.ledger.counted(other) as ahead:
                    assert ahead == places
            assert (await m.ledger.would_refuse(question, 10, Ahead(1, 1))).code is Code.QUEUE_FULL
        with m.ledger.counted(question) as ahead:
            assert ahead == NOBODY
        assert await m.ledger.would_refuse(question, 10, NOBODY) is None
        waiter = m.open(10, queue_max=1)
        waiting = asyncio.create_task(waiter.granted())
        await eventually(lambda: w.states() == {running.id: "reserved", waiter.id: "queued"})
        refusal = await m.ledger.would_refuse(question, 10, NOBODY)
        assert (refusal.code, refusal.waited) == (Code.QUEUE_FULL, False)
        assert refusal.retry_ms > 0
        assert w.states() == {running.id: "reserved", waiter.id: "queued"}
        await m.stop()
        assert await m.ledger.would_refuse(question, 10, NOBODY) is None
        m.go_on()
        running.settle(None, None)
        assert isinstance(await waiting, Grant)
        waiter.settle(None, None)
        await eventually(w.empty)


async def test_a_call_that_would_wait_in_vain_is_refused_at_once(path):
    """Once somebody has waited for as long as blocks given back are looked at: before that nothing is known."""
    async with world(path, 100) as w:
        m = await w.join()
        w.config = replace(w.config, lease_ms=60_000, heartbeat_ms=30_000)
        m.ledger.reconfigure()
        running = [await m.reserve(50), await m.reserve(50)]
        patient = [m.open(50, wait_ms=60_000) for _ in range(2)]
        waits = [asyncio.create_task(ask.granted()) for ask in patient]
        await eventually(lambda: list(w.states().values()).count("queued") == 2)
        hopeful = m.open(100, wait_ms=200)
        assert (await hopeful.granted()).code is Code.QUEUE_TIMEOUT
        hopeful.settle(None, None)
        w.store.hincrby(w.key("meta"), "clock", 15_000)
        running.pop().settle(None, None)
        assert isinstance(await waits[0], Grant)
        refusal = await m.open(100, wait_ms=500).granted()
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.PREDICTED_WAIT
        assert re.search(r"expected to take \d+ ms, the request may wait 500 ms", refusal.message)
        last = m.open(50, wait_ms=60_000)
        answer = asyncio.create_task(last.granted())
        await eventually(lambda: w.states().get(last.id) == "queued")
        for ask in (running.pop(), patient[0]):
            ask.settle(None, None)
        grant = await answer
        assert isinstance(grant, Grant)
        assert (grant.position, grant.queued) == (2, True)
        assert grant.predicted_ms
        for ask in (patient[1], last):
            ask.settle(None, None)
        await eventually(w.empty)


async def test_an_empty_quota_is_remembered_for_a_moment(path):
    """Until its time has come, something of the key is given back, or 50 ms are over."""
    clock = [100.0]
    refill_ms = 20_000
    taken = quota.charges([Quota(0, quota.MINUTE_US // 1000 // refill_ms, 1)], Units(1))
    async with world(path, 100) as w:
        m = w.add(now=lambda: clock[0])
        clock_goes_on = asyncio.create_task(_run_clock(clock))
        m.go_on()
        await eventually(lambda: m.ledger.ready)
        clock_goes_on.cancel()
        first = await m.reserve(10, charges=taken)
        refusal = await m.open(10, charges=taken).granted()
        assert refusal.code is Code.QUOTA_EXCEEDED
        assert 0 < refusal.retry_ms <= refill_ms
        known = m.ledger.known_refusal(["a"], "normal", "k")
        assert known == msgspec.structs.replace(refusal, cached=True)
        assert m.ledger.known_refusal(["a"], "normal", "other") is None
        clock[0] += 0.051
        assert m.ledger.known_refusal(["a"], "normal", "k") is None
        await m.open(10, charges=taken).granted()
        assert m.ledger.known_refusal(["a"], "normal", "k")
        first.settle(None, None, Units())
        assert m.ledger.known_refusal(["a"], "normal", "k") is None, "something was given back"
        await eventually(w.empty)
        again = await m.reserve(10, charges=taken)
        again.settle(None, None)
        await eventually(w.empty)


async def test_a_ledger_that_was_not_needed_for_long_has_not_missed_its_store(path):
    """Its first calls wait for the connection, as those of a process that has just started."""
    skipped = [0.0]
    async with world(path, 100) as w:
        m = w.add(now=lambda: time.monotonic() + skipped[0])
        skipped[0] = 2 * HOLD.seconds
        m.go_on()
        await asyncio.sleep(0)
        (await m.reserve(10)).settle(None, None)
        await eventually(w.empty)


async def test_a_waiting_call_is_told_when_a_stream_of_another_process_is_foreseen_to_end(path):
    """Eight went to their limits before it, and half of its own took 5 s: so does the other half."""
    async with world(path, 100) as w:
        busy, other = await w.join(), await w.join()
        limit, now = 1000, busy.ledger.now()
        for _ in range(KNOWN_MIN):
            ended = await busy.reserve(100, tokens_max=limit, course=lambda: Course(limit, now - 10, now))
            ended.settle(100, 100)
        await busy.reserve(100, tokens_max=limit, course=lambda: Course(limit // 2, now - 5, now))
        await eventually(lambda: w.store.hlen(w.key("forecast")) == 1)
        ask = other.open(10, wait_ms=60_000)
        waiting = asyncio.create_task(ask.granted())
        await eventually(lambda: ask.queued)
        most_ms, passed_ms = 500 * 5000 / 499, 1000 * (other.ledger.now() - now)
        told_ms = ask._predicted_ms * 100 / (100 + FORECAST_MARGIN_PERCENT)
        assert most_ms - passed_ms - 5 < told_ms <= most_ms + 1
        waiting.cancel()
        await asyncio.wait([waiting])
        ask.settle(None, None)


async def test_what_cannot_be_foreseen_is_not_told(path):
    async with world(path, 100) as w:
        m = await w.join()
        for _ in range(KNOWN_MIN):
            (await m.reserve(10)).settle(10, 10)
        await m.reserve(10)
        assert m.ledger.heartbeat() == [*m.ledger.digest(), []]
