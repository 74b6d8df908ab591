"""Calls of gateway processes that begin alike, on a real store: what is charged, and what each process knows of it."""

import asyncio
import json

import pytest

from gateway.core.segments import Segment
from gateway.ledger.api import Grant
from gateway.ledger.state import read_state
from gateway.ledger.verify import verify
from tests.integration.ledger_world import World, eventually, running_store, world

SEGMENTS = (Segment("a" * 32, 40), Segment("b" * 32, 20))


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


def beginning(*segments: Segment) -> dict[str, object]:
    return {"segments": segments or SEGMENTS, "block_size": 16}


async def holders(w: World, count: int) -> None:
    """Until so many calls hold each segment."""
    await eventually(
        lambda: [row["nodes"][3] for row in w.rows("prefixes", "node").values()] == [count, count]
    )


async def test_a_call_that_begins_as_another_is_charged_for_the_rest(path):
    """Whatever process has it; its grant tells, and the state for operators."""
    async with world(path, 100) as w:
        one, other = await w.join(), await w.join()
        await w.learn_cache(one)
        first = await one.reserve(70, **beginning())
        first.first_token()
        await holders(w, 1)
        second = other.open(70, **beginning())
        grant = await second.granted()
        assert isinstance(grant, Grant)
        assert grant.shared == 60
        assert grant.cache > 0
        assert w.used() == 80
        second.first_token()
        await holders(w, 2)
        url = f"unix://{path}"
        state = await read_state(url, w.fleet)
        assert json.loads(json.dumps(state))["pools"]["p"]["replicas"]["r0"]["shared_blocks"] == 60
        report = await verify(url, w.fleet)
        assert report.violations == ()
        first.settle(None, None)
        await holders(w, 1)
        assert w.used() == 70
        second.settle(None, None)
        await eventually(w.empty)


async def test_a_call_that_waited_is_told_by_the_outbox_what_it_shares(path):
    async with world(path, 100) as w:
        one, other = await w.join(), await w.join()
        await w.learn_cache(one)
        first = await one.reserve(70, **beginning())
        task = asyncio.create_task((second := other.open(70, **beginning())).granted())
        await eventually(lambda: w.states().get(second.id) == "queued")
        first.first_token()
        grant = await task
        assert isinstance(grant, Grant)
        assert (grant.queued, grant.shared) == (True, 60)
        for ask in (first, second):
            ask.settle(None, None)
        await eventually(w.empty)


async def test_a_first_token_is_told_of_short_prompts_that_begin_with_segments(path):
    """Once; also after a move, which shares anew."""
    async with world(path, 100, 100) as w:
        member = await w.join()
        for replica in ("r0", "r1"):
            await w.learn_cache(member, replica)
        ask = await member.reserve(70, **beginning())
        ask.first_token()
        ask.first_token()
        await holders(w, 1)
        moved = await ask.moved(ask.replica)
        assert isinstance(moved, Grant)
        assert w.rows("prefixes", "node") == {}
        ask.first_token()
        await holders(w, 1)
        assert ask.shared <= 60
        await eventually(lambda: ask.shared == 60)
        ask.settle(None, None)
        await eventually(w.empty)


async def test_a_cache_that_is_distrusted_is_shared_by_nobody(path):
    async with world(path, 200) as w:
        member = await w.join()
        await w.learn_cache(member)
        first = await member.reserve(70, **beginning())
        first.first_token()
        await holders(w, 1)
        second = member.open(70, **beginning())
        grant = await second.granted()
        assert isinstance(grant, Grant)
        await member.ledger.distrust("r0", grant.cache)
        await w.learn_cache(member)
        third = await member.reserve(70, **beginning())
        assert w.used() == 60 + 10 + 10 + 70
        for ask in (first, second, third):
            ask.settle(None, None)
        await eventually(w.empty)


async def test_distrust_waits_for_no_store():
    """Nor does it fail."""
    with running_store() as store:
        async with world(str(store.socket), 100) as w:
            member = await w.join()
            store.process.kill()
            store.process.wait()
            await member.ledger.distrust("r0", 1)
            store.start()
            await eventually(lambda: member.ledger.ready)


async def test_a_call_goes_to_a_replica_that_it_prefers(path):
    async with world(path, 100, 100, 100) as w:
        member = await w.join()
        ask = await member.reserve(5, prefer=("r2", "gone"))
        assert ask.replica == "r2"
        ask.settle(None, None)
        await eventually(w.empty)
