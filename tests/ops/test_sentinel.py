"""The store fails over from a primary to its replica with calls in flight."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.core.events import LeaseLost, StoreUp
from gateway.ledger.api import Grant
from gateway.ledger.connection import Connection
from gateway.ledger.scripts import fleet_keys
from gateway.ledger.state import read_state
from gateway.ledger.wire import StoreAway
from tests.integration.ledger_world import eventually
from tests.ops.partition import TcpProxy, tcp_proxy
from tests.ops.servers import NAME, Node, Watched, sentinel_url, sentinels
from tests.ops.world import MOVE_SECONDS, all_ready, beside, fleet, is_quiet, look_into, traffic
from tests.processes import free_port

SERVERS_ADDRESS = "127.0.0.2"
"""Where sentinels and replicas come from, so that a proxy can tell them from gateways."""


async def promoted(watched: Watched) -> Node:
    """The new primary, when all sentinels agree on it."""
    found: list[Node] = []

    def look() -> bool:
        if node := watched.new_primary():
            found.append(node)
        return bool(found)

    await eventually(look, MOVE_SECONDS)
    return found[0]


def kill(watched: Watched) -> None:
    """Connections break at once; the sentinels need their time."""
    watched.primary.kill()


def hand_over(watched: Watched) -> None:
    """As for maintenance: the old primary lives on as a replica."""
    watched.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", NAME)


@pytest.mark.parametrize("fail_over", [kill, hand_over])
async def test_calls_survive_a_failover(fail_over: Callable[[Watched], None]) -> None:
    """Those that run keep their place, the one that waits gets one."""
    with sentinels() as watched:
        replica = watched.replicas[0]
        async with fleet(watched.primary, 100) as w:
            members = [await w.join(watched.url) for _ in range(2)]
            running = [await m.reserve(45) for m in members]
            ticket = members[0].open(45)
            waiting = asyncio.create_task(ticket.granted())
            await eventually(lambda: w.states().get(ticket.id) == "queued")
            await eventually(lambda: replica.client.hlen(w.key("calls")) == 3)
            fail_over(watched)
            await eventually(lambda: all(m.events.count(StoreUp(False)) for m in members), MOVE_SECONDS)
            await all_ready(*members)
            look_into(w, replica)
            assert w.states() == {**{ask.id: "reserved" for ask in running}, ticket.id: "queued"}
            assert w.used() == 90
            running[0].settle(None, None)
            assert isinstance(await waiting, Grant)
            for ask in (running[1], ticket):
                ask.settle(None, None)
            await eventually(lambda: is_quiet(w, *members))
            assert [m.lost for m in members] == [[], []]
            assert [m.count(LeaseLost) for m in members] == [0, 0]


@asynccontextmanager
async def cuttable(replicas: int, *store: str, down_after_ms: int) -> AsyncIterator[tuple[TcpProxy, Watched]]:
    """A primary that is reached through a proxy, which can cut it off from all servers but from no gateway."""
    port = free_port()
    store = (*store, "--bind-source-addr", SERVERS_ADDRESS)
    settings = (
        f"bind-source-addr {SERVERS_ADDRESS}",
        f"sentinel down-after-milliseconds {NAME} {down_after_ms}",
    )
    async with tcp_proxy(f"127.0.0.1:{port}") as way:
        set_up = sentinels(
            replicas=replicas, port=port, announced=way.host_and_port, store=store, settings=settings
        )
        async with beside(set_up) as watched:
            yield way, watched


async def test_an_old_primary_that_still_answers_is_left_at_once() -> None:
    """It is a sentinel that tells the gateway: the old primary itself goes on as if nothing were."""
    async with cuttable(1, down_after_ms=600) as (way, watched), fleet(watched.primary, 100) as w:
        m = await w.join(watched.url)
        running = await m.reserve(10)
        await eventually(lambda: watched.replicas[0].client.hlen(w.key("calls")) == 1)
        way.cut_off(SERVERS_ADDRESS)
        await promoted(watched)
        look_into(w, watched.replicas[0])
        await eventually(lambda: m.events.count(StoreUp(False)), MOVE_SECONDS)
        await all_ready(m)
        running.settle(None, None)
        await eventually(lambda: is_quiet(w, m))
        assert watched.primary.client.hlen(w.key("calls")) == 1


async def test_half_the_gateways_are_cut_off_with_the_old_primary() -> None:
    """With `min-replicas-to-write` it refuses them before a new one is named, so no block is granted twice.

    When the network is whole again, what runs in that half is declared by force, above the limit, and that stops new
    calls until it is paid.
    """
    safe = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
    async with (
        cuttable(2, *safe, down_after_ms=3500) as (way, watched),
        tcp_proxy(watched.sentinels[0].host_and_port) as way_to_sentinel,
        fleet(watched.primary, 100) as w,
    ):
        inside = await w.join(sentinel_url(way_to_sentinel.host_and_port))
        outside = await w.join(watched.url)
        kept, lost = await outside.reserve(30), await inside.reserve(30)
        async with traffic(inside, outside) as (cut, free):
            await cut.more()
            await free.more()
            way.cut_off(SERVERS_ADDRESS)
            way_to_sentinel.cut_off("127.0.0.1")
            await eventually(watched.any_moved, MOVE_SECONDS)
            named_at = asyncio.get_running_loop().time()
            look_into(w, await promoted(watched))
            await free.more()
            await eventually(lambda: lost.id not in w.states(), MOVE_SECONDS)
            taken = await outside.reserve(60)
            assert cut.granted_at[-1] < named_at
            assert not inside.ledger.ready
            way.heal()
            way_to_sentinel.heal()
            await eventually(lambda: lost.id in w.states(), MOVE_SECONDS)
            await eventually(lambda: w.used() == 120)
            before = len(cut.granted_at), len(free.granted_at)
            await all_ready(inside, outside)
            taken.settle(None, None)
            assert (len(cut.granted_at), len(free.granted_at)) == before
            await cut.more()
            await free.more()
        assert (inside.lost, outside.lost) == ([], [])
        for ask in (kept, lost):
            ask.settle(None, None)
        await eventually(lambda: is_quiet(w, inside, outside))
        for proxy in (way, way_to_sentinel):
            await proxy.stop()


async def test_sentinels_may_want_a_password() -> None:
    """The same as the store; and it is not in what is told about a failure."""
    user = "gate on >hunter2 ~* &* +@all"
    sentinel_settings = (
        f"user {user}",
        "user default off",
        "sentinel sentinel-user gate",
        "sentinel sentinel-pass hunter2",
    )
    with sentinels(
        store=("--user", *user.split()), settings=sentinel_settings, login="gate:hunter2"
    ) as watched:
        url = watched.url.replace("://", "://gate:hunter2@")
        async with fleet(watched.primary, 100) as w:
            m = await w.join(url)
            (await m.reserve(1)).settle(None, None)
            assert (await read_state(url, w.fleet))["reserved"] == 0
            for wrong in (watched.url, url.replace("hunter2", "hunter3"), f"{url}-other"):
                with pytest.raises(StoreAway) as refusal:
                    await Connection(wrong, fleet_keys(w.fleet), lambda event: None).open()
                assert "hunter" not in str(refusal.value)


async def test_of_sentinels_that_disagree_the_one_that_saw_the_last_failover_is_right() -> None:
    with sentinels() as watched:
        async with fleet(watched.primary, 100) as w:
            watched.primary.kill()
            await promoted(watched)
            look_into(w, watched.replicas[0])
            with watched.uninformed() as stale:
                assert stale.names(watched.primary.host_and_port)
                others = (sentinel.host_and_port for sentinel in watched.sentinels)
                for servers in (
                    (stale.host_and_port, *others),
                    (watched.sentinels[0].host_and_port, stale.host_and_port),
                ):
                    connection = Connection(sentinel_url(*servers), fleet_keys(w.fleet), lambda event: None)
                    await connection.open()
                    assert connection.run_id == w.store.info("server")["run_id"]
                    connection.close()


async def test_one_sentinel_is_enough() -> None:
    with sentinels() as watched:
        async with fleet(watched.primary, 100) as w:
            for sentinel in watched.sentinels[:2]:
                sentinel.stop()
            m = await w.join(watched.url)
            (await m.reserve(1)).settle(None, None)


async def test_a_replica_is_no_store() -> None:
    with sentinels() as watched:
        connection = Connection(
            f"redis://{watched.replicas[0].host_and_port}", fleet_keys("f"), lambda event: None
        )
        with pytest.raises(StoreAway, match="it is a replica"):
            await connection.open()
