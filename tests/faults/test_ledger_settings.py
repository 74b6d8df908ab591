"""Gateways that disagree: about settings, and about which replicas answer."""

from dataclasses import replace

import pytest

from gateway.core.outcomes import Code, Refusal
from gateway.ledger import keeper
from gateway.ledger.api import Grant
from tests.faults.test_ledger_store import restart
from tests.integration.ledger_world import eventually, running_store, world


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


def state_of(w, replica):
    return w.rows("replicas", "replica").get(replica, {}).get("state")


async def test_the_last_word_of_a_dead_gateway_does_not_stay(path, monkeypatch):
    """It could not reach a replica, said so and died; the one that reaches it says that again."""
    monkeypatch.setattr(keeper, "OBSERVE_SECONDS", 0.1)
    async with world(path, 100) as w:
        living, dying = await w.join(), await w.join()
        await living.ledger.observe("r0", True)
        await dying.ledger.observe("r0", False)
        await eventually(lambda: state_of(w, "r0") == "down")
        await dying.stop()
        await eventually(lambda: state_of(w, "r0") == "up")


async def test_a_lane_that_another_gateway_took_away_comes_back(path):
    """The call is asked to come again, and by then the settings with its lane are in the store."""
    async with world(path, 100) as w:
        ours, theirs = await w.join(), w.add()
        with_lane = w.config
        w.config = replace(w.config, lanes=(("b", ("p",)),))
        theirs.go_on()
        await eventually(lambda: theirs.ledger.ready)
        w.config = with_lane
        answer = await ours.open().granted()
        assert isinstance(answer, Refusal)
        assert (answer.code, answer.retry_ms) == (Code.STORE_UNAVAILABLE, 1000)
        await eventually(lambda: b"\xa1a" in w.store.hget(w.key("meta"), "config"))
        assert isinstance(await ours.open().granted(), Grant)


async def test_a_call_on_a_replica_that_the_settings_lost_is_declared_all_the_same():
    """After the store lost its data its blocks count until it ends, and nobody is placed there."""
    with running_store() as store:
        await declare_on_a_lost_replica(store)


async def declare_on_a_lost_replica(store):
    async with world(str(store.socket), 100, 100) as w:
        m = await w.join()
        running = await m.reserve(60)
        w.config = replace(
            w.config, replicas=tuple(r for r in w.config.replicas if r.name != running.replica)
        )
        restart(store)
        await eventually(lambda: state_of(w, running.replica) == "removed")
        assert w.rows("replicas", "replica")[running.replica]["used"] == 60
        other = await m.reserve(60)
        assert other.replica != running.replica
        running.settle(None, None)
        await eventually(lambda: state_of(w, running.replica) is None)
        assert m.lost == []
