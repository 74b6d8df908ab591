"""What operators see of a fleet."""

import asyncio
import time

import pytest

from gateway.ledger.wire import StoreAway
from tests.integration.ledger_world import WAIT_SECONDS, eventually, running_store, world


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


async def test_replicas_calls_queue_and_holdings(path, monkeypatch):
    """Also where the store tells it in pages."""
    monkeypatch.setattr("gateway.ledger.state.PAGE_SIZE", 2)
    async with world(path, 1000, 50) as w:
        m = await w.join()
        running = [await m.reserve(10, key="k1", prefill=900)]
        waiting = [m.open(900, key="k2"), m.open(900, key="k2"), m.open(900, class_="high")]
        held = await m.reserve(900, key="k2")
        tasks = [asyncio.create_task(ask.granted()) for ask in waiting]
        await eventually(lambda: list(w.states().values()).count("queued") == 3)
        state = await m.ledger.state()
        replicas = state["pools"]["p"]["replicas"]
        assert replicas["r1"] == {
            "limit": 50, "reserved": 0, "debt": 0, "sequences": 0, "sequences_limit": 5000, "prefill_tokens": 0,
            "prefill_tokens_limit": 1000, "state": "up", "rests": [], "engine": None, "mode": "guaranteed", "demand": 0,
            "elastic": 0, "shared_blocks": 0, "soft_blocks": 0, "soft_holds": 0,
        }  # fmt: skip
        assert replicas["r0"] == {
            "limit": 1000, "reserved": 910, "debt": 0, "sequences": 2, "sequences_limit": 5000, "prefill_tokens": 900,
            "prefill_tokens_limit": 1000, "state": "up", "rests": [], "engine": None, "mode": "guaranteed",
            "demand": 910, "elastic": 0, "shared_blocks": 0, "soft_blocks": 0, "soft_holds": 0,
        }  # fmt: skip
        assert (state["reserved"], state["leases"], state["queue"]) == (910, 2, 3)
        assert state["queued"] == {"a": {"normal": 2, "high": 1}}
        assert state["keys"]["k1"] == {"blocks": 10, "requests": 1}
        assert state["keys"]["k2"] == {"blocks": 900, "requests": 1}
        for ask in (*waiting, held, *running):
            ask.settle(None, None)
        await asyncio.gather(*tasks)
        await eventually(w.empty)


async def test_all_pages_of_many_calls(path):
    async with world(path, 100_000) as w:
        m = await w.join()
        asks = [m.open(1, key=f"k{i % 700}") for i in range(1500)]
        await asyncio.gather(*(ask.granted() for ask in asks))
        state = await m.ledger.state()
        assert (state["reserved"], state["leases"]) == (1500, 1500)
        assert sum(key["requests"] for key in state["keys"].values()) == 1500
        await m.ledger.close(5)
        assert w.empty()


async def test_a_fleet_that_the_store_does_not_know_is_empty(path):
    async with world(path, 100) as w:
        state = await w.add().ledger.state()
        counts = {"reserved": 0, "debt": 0, "leases": 0, "queue": 0}
        assert state == {"pools": {}, "queued": {}, "keys": {}, "gate": "open", **counts}


@pytest.mark.parametrize("how", ["nobody listens", "nobody answers"])
async def test_a_store_that_is_away_is_said_so(path, how, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.ledger.state.READ_SECONDS", 0.1)
    server, ended = None, asyncio.Event()

    async def read_only(reader, writer):
        await reader.read()
        writer.close()
        ended.set()

    if how == "nobody answers":
        server = await asyncio.start_unix_server(read_only, tmp_path / "s")
    async with world(path, 100) as w:
        ledger = w.add(f"unix://{tmp_path}/s").ledger
        started = time.monotonic()
        with pytest.raises(StoreAway):
            await ledger.state()
        assert time.monotonic() - started < WAIT_SECONDS
        if server:
            await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
    if server:
        server.close()
        await server.wait_closed()
