"""What calls hold together, when a gateway dies, sleeps or the store loses its data."""

import pytest

from gateway.core.segments import Segment
from gateway.ledger.records import NODE_WIDTH
from tests.faults.test_ledger_store import restart
from tests.integration.ledger_world import World, eventually, running_store, world

SEGMENT = Segment("a" * 32, 40)
BEGINNING = {"segments": (SEGMENT,), "block_size": 16}
PATIENT = {"lease_ms": 3000, "heartbeat_ms": 300}


@pytest.fixture
def own_store():
    with running_store() as store:
        yield store


def counts(w: World) -> list[tuple[int, int]]:
    """Holders and newcomers of each node."""
    each = [row["nodes"] for row in w.rows("prefixes", "node").values()]
    return [(nodes[at + 3], nodes[at + 4]) for nodes in each for at in range(0, len(nodes), NODE_WIDTH)]


@pytest.mark.parametrize("computed", [True, False])
async def test_a_dead_gateway_leaves_the_nodes_that_it_was_in(own_store, computed):
    """Who is left holds the blocks; the last one gives them back."""
    async with world(str(own_store.socket), 100) as w:
        dead, member = await w.join(), await w.join()
        await w.learn_cache(member)
        first = await dead.reserve(50, **BEGINNING)
        first.first_token()
        await eventually(lambda: counts(w) == [(1, 0)])
        second = await member.reserve(45, **BEGINNING)
        third = await dead.reserve(45, **BEGINNING)
        if computed:
            second.first_token()
            third.first_token()
        await eventually(lambda: counts(w) == [(3, 0) if computed else (1, 2)])
        await dead.stop()
        await eventually(lambda: w.states() == {second.id: "reserved"})
        assert counts(w) == [(1, 0) if computed else (0, 1)]
        assert w.used() == 45
        second.settle(None, None)
        await eventually(w.empty)


async def test_a_gateway_that_slept_is_again_in_the_nodes_that_it_was_in(own_store):
    """Where others hold its beginning it needs room for the rest alone."""
    async with world(str(own_store.socket), 100) as w:
        sleeper, member = await w.join(), await w.join()
        await w.learn_cache(member)
        first = await member.reserve(50, **BEGINNING)
        first.first_token()
        await eventually(lambda: counts(w) == [(1, 0)])
        second = await sleeper.reserve(50, **BEGINNING)
        second.first_token()
        await eventually(lambda: counts(w) == [(2, 0)])
        await eventually(lambda: second.shared == 40)
        await sleeper.stop()
        await eventually(lambda: w.states() == {first.id: "reserved"})
        third = await member.reserve(40)
        sleeper.go_on()
        await eventually(lambda: sleeper.ledger.ready and len(w.states()) == 3)
        assert counts(w) == [(2, 0)]
        assert w.used() == 40 + 10 + 10 + 40
        assert sleeper.lost == []
        for ask in (first, second, third):
            ask.settle(None, None)
        await eventually(w.empty)


async def test_a_store_that_lost_its_data_learns_what_is_shared(own_store):
    """The sums are what they were; nothing more is shared until the engine's metrics were read again."""
    async with world(str(own_store.socket), 100, **PATIENT) as w:
        one, other = await w.join(), await w.join()
        await w.learn_cache(one)
        first = await one.reserve(50, **BEGINNING)
        first.first_token()
        await eventually(lambda: counts(w) == [(1, 0)])
        second = await other.reserve(45, **BEGINNING)
        await eventually(lambda: first.shared == 40)
        assert w.used() == 55
        restart(own_store)
        await eventually(lambda: one.ledger.ready and other.ledger.ready and len(w.states()) == 2)
        await eventually(lambda: counts(w) == [(1, 1)])
        assert w.used() == 55
        await w.learn_cache(one)
        third = await one.reserve(45, **BEGINNING)
        assert w.used() == 60
        second.first_token()
        await eventually(lambda: counts(w) == [(2, 1)])
        for ask in (first, second, third):
            ask.settle(None, None)
        await eventually(w.empty)


async def test_an_engine_that_was_restarted_meanwhile_is_shared_by_nobody_who_came_before(own_store):
    """The store is told of the old cache by the calls, and of the new one by its reader."""
    async with world(str(own_store.socket), 200, **PATIENT) as w:
        member = await w.join()
        await w.learn_cache(member)
        first = await member.reserve(50, **BEGINNING)
        first.first_token()
        await eventually(lambda: counts(w) == [(1, 0)] and first.shared == 40)
        restart(own_store)
        await eventually(lambda: member.ledger.ready and counts(w) == [(1, 0)])
        await w.learn_cache(member, process=2.0)
        second = await member.reserve(50, **BEGINNING)
        assert w.used() == 100
        second.first_token()
        await eventually(lambda: sorted(counts(w)) == [(1, 0), (1, 0)])
        for ask in (first, second):
            ask.settle(None, None)
        await eventually(w.empty)
