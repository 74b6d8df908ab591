"""What processes and operators say of replicas that get no new calls, as the production ledger carries it."""

from collections.abc import Iterator

import pytest

from gateway.core.order import OPERATOR
from gateway.core.rests import Why
from gateway.ledger.records import decode_rests
from tests.integration.ledger_world import World, eventually, running_store, world


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_store() as store:
        yield str(store.socket)


def state(w: World, replica: str = "r0") -> str:
    return str(w.rows("replicas", "replica")[replica]["state"])


def reasons(w: World) -> list[tuple[str, str]]:
    """Replica and why."""
    rests = decode_rests(w.store.hget(w.key("meta"), "rests") or b"")
    return sorted((replica, why) for (replica, _), why in rests.items())


async def test_a_processs_word_ends_with_its_lease_and_is_said_again(path: str) -> None:
    async with world(path, 100, 100) as w:
        one, other = await w.join(), await w.join()
        one.ledger.rest("r0", Why.ASLEEP)
        await one.ledger.observe("r0", True)
        await eventually(lambda: state(w) == "draining")
        await one.stop()
        await other.ledger.observe("r0", True)
        await eventually(lambda: state(w) == "up")
        assert reasons(w) == []
        one.go_on()
        await eventually(lambda: state(w) == "draining")
        one.ledger.rest("r0", "")
        await eventually(lambda: state(w) == "up")


async def test_it_is_told_to_a_store_that_was_emptied(path: str) -> None:
    async with world(path, 100, 100) as w:
        m = await w.join()
        m.ledger.rest("r0", Why.ENDING)
        await eventually(lambda: state(w) == "draining")
        w.store.delete(*w.key_names())
        await eventually(lambda: w.store.exists(w.key("replicas")) and state(w) == "draining")


async def test_an_operators_word_holds_beside_a_processs(path: str) -> None:
    async with world(path, 100, 100) as w:
        m = await w.join()
        m.ledger.rest("r0", Why.SUSPECT)
        assert await m.ledger.drain("r0", True) is None
        await eventually(lambda: reasons(w) == [("r0", "drained"), ("r0", "suspect")])
        assert decode_rests(w.store.hget(w.key("meta"), "rests"))["r0", OPERATOR] == Why.DRAINED
        m.ledger.rest("r0", "")
        await eventually(lambda: reasons(w) == [("r0", "drained")])
        assert state(w) == "draining"
        assert await m.ledger.drain("r0", False) is None
        assert state(w) == "up"


async def test_a_replica_that_the_store_does_not_know_cannot_be_drained(path: str) -> None:
    async with world(path, 100) as w:
        m = await w.join()
        refusal = await m.ledger.drain("r9", True)
        assert refusal is not None
        assert "does not know" in refusal.message


async def test_a_process_knows_which_replicas_drain(path: str) -> None:
    """It admits nobody there while it has to do without the store."""
    async with world(path, 100, 100) as w:
        m, other = await w.join(), await w.join()
        for replica in ("r0", "r1"):
            await m.ledger.observe(replica, True)
        await eventually(lambda: dict(m.ledger.observed) == {"r0": True, "r1": True})
        assert await other.ledger.drain("r0", True) is None
        await eventually(lambda: m.ledger.draining == {"r0"})
        assert dict(m.ledger.observed) == {"r0": False, "r1": True}
        m.ledger.rest("r1", Why.ASLEEP)
        assert dict(m.ledger.observed) == {"r0": False, "r1": False}
