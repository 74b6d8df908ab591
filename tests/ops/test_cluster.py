"""The store is a cluster: the connection goes to the owner of the fleet's slot, wherever that moves."""

import asyncio

import pytest
import redis
from redis.crc import key_slot

from gateway.core.events import Healed, StoreUp
from gateway.ledger.address import Server, parse
from gateway.ledger.api import Grant
from gateway.ledger.cluster import Cluster
from gateway.ledger.connection import REPLY_SECONDS, Connection, listen
from gateway.ledger.scripts import CALLERS_KEYS, fleet_keys, library
from gateway.ledger.state import read_state
from gateway.ledger.wire import StoreAway
from tests.integration.ledger_world import PATIENT_SECONDS, WAIT_SECONDS, World, eventually
from tests.integration.test_shared_keys import Process
from tests.ops.servers import Nodes, cluster
from tests.ops.world import MOVE_SECONDS, all_ready, fleet, is_quiet, look_into, traffic


def owner(nodes: Nodes, w: World) -> int:
    return nodes.owner_of(w.key("meta"))


def other(nodes: Nodes, w: World) -> int:
    return (owner(nodes, w) + 1) % len(nodes.nodes)


@pytest.mark.parametrize(
    ("half_way_seconds", "reply_seconds"), [(0.3, PATIENT_SECONDS), (1.5, REPLY_SECONDS)]
)
async def test_a_slot_moves_under_load(half_way_seconds: float, reply_seconds: float) -> None:
    """Half-way it answers TRYAGAIN, and ASK when all keys are gone; then MOVED.  Calls wait, and are admitted once.

    A batch has some time until its connection counts as lost: half-way for less is no outage, for longer it is one.
    """
    with cluster() as nodes:
        async with fleet(nodes.nodes[0], 100) as w:
            look_into(w, nodes.nodes[owner(nodes, w)])
            members = [await w.join(nodes.url, reply_seconds=reply_seconds) for _ in range(2)]
            running = [await m.reserve(20) for m in members]
            async with traffic(*members) as loads:
                for load_ in loads:
                    await load_.more()
                key, to = w.key("meta"), other(nodes, w)
                source = nodes.begin_move(key, to)
                nodes.move_keys(key, source, to, 2)
                await asyncio.sleep(half_way_seconds)
                while nodes.move_keys(key, source, to, 100):
                    pass
                await asyncio.sleep(half_way_seconds)
                if half_way_seconds > reply_seconds:
                    await eventually(lambda: all(m.events.count(StoreUp(False)) for m in members))
                else:
                    assert [m.events.count(StoreUp(False)) for m in members] == [0, 0]
                nodes.end_move(key, to)
                look_into(w, nodes.nodes[to])
                for load_ in loads:
                    await load_.more()
            await all_ready(*members)
            await eventually(lambda: set(w.states()) == {ask.id for ask in running})
            assert w.used() == 40
            assert (await read_state(nodes.url, w.fleet))["reserved"] == 40
            for ask in running:
                ask.settle(None, None)
            await eventually(lambda: is_quiet(w, *members))
            assert [m.lost for m in members] == [[], []]
            assert [m.count(Healed) for m in members] == [0, 0]


async def test_keys_are_followed_wherever_their_slot_is() -> None:
    """It is another one than those of the fleets."""
    with cluster() as nodes:
        one, two = Process(nodes.url), Process(nodes.url)
        assert await one.put("a") == 0
        await two.keys.poll()
        key = CALLERS_KEYS[0]
        to = (nodes.owner_of(key) + 1) % len(nodes.nodes)
        source = nodes.begin_move(key, to)
        while nodes.move_keys(key, source, to, 100):
            pass
        nodes.end_move(key, to)
        await one.keys.poll()  # hears MOVED
        assert await one.put("b") == 0
        await two.keys.poll()
        await two.keys.poll()
        assert two.entries == one.entries == {"a": b"{}", "b": b"{}"}
        for process in (one, two):
            process.keys.close()


async def test_nobody_can_serve_a_slot_that_is_half_way() -> None:
    """Why ASK is answered by waiting: of the keys that a script declares some never exist, and the node that takes the
    slot over says TRYAGAIN to those, also when it was asked as ASK wants it."""
    with cluster() as nodes:
        async with fleet(nodes.nodes[0], 100) as w:
            look_into(w, nodes.nodes[owner(nodes, w)])
            m = await w.join(nodes.url)
            await m.stop()
            key, to = w.key("meta"), other(nodes, w)
            source, keys = nodes.begin_move(key, to), fleet_keys(w.fleet)
            nodes.nodes[to].client.function_load(library().text)
            call = ("FCALL", library().function("page"), len(keys), *keys, "owner", "", 9)
            nodes.move_keys(key, source, to, 1)
            with pytest.raises(redis.exceptions.TryAgainError):
                nodes.nodes[source].client.execute_command(*call)
            while nodes.move_keys(key, source, to, 100):
                pass
            with pytest.raises(redis.exceptions.AskError):
                nodes.nodes[source].client.execute_command(*call)
            with nodes.nodes[to].client.pipeline(transaction=False) as asking:
                asking.execute_command("ASKING")
                asking.execute_command(*call)
                with pytest.raises(redis.exceptions.TryAgainError):
                    asking.execute()
            nodes.end_move(key, to)
            look_into(w, nodes.nodes[to])


async def test_a_wake_up_reaches_who_listens_on_another_node() -> None:
    """PUBLISH goes to all nodes of a cluster: a subscription need not follow the slot."""
    with cluster() as nodes:
        channel = "{kvgate:somewhere}:wake:me"
        heard = asyncio.Event()
        ears = asyncio.create_task(listen(nodes.url, channel, heard.set))
        home = nodes.owner_of(channel)
        await eventually(lambda: nodes.nodes[home].client.pubsub_channels(channel))
        for node in nodes.nodes:
            heard.clear()
            node.client.publish(channel, "")
            await asyncio.wait_for(heard.wait(), WAIT_SECONDS)
        ears.cancel()
        await asyncio.wait([ears])


async def test_a_cluster_that_lost_a_node_is_an_outage() -> None:
    """With `cluster-require-full-coverage` the others refuse everything (CLUSTERDOWN) until it is back, empty."""
    with cluster() as nodes:
        async with fleet(nodes.nodes[0], 100) as w:
            home = owner(nodes, w)
            look_into(w, nodes.nodes[home])
            m = await w.join(nodes.url)
            running = await m.reserve(20)
            lost = nodes.nodes[other(nodes, w)]
            lost.kill()
            await eventually(lambda: m.events.count(StoreUp(False)), MOVE_SECONDS)
            assert not m.ledger.ready
            lost.store.start()
            await all_ready(m)
            assert w.states() == {running.id: "reserved"}
            running.settle(None, None)
            await eventually(lambda: is_quiet(w, m))
            assert m.lost == []


async def test_the_owner_of_the_slot_dies_and_comes_back_empty() -> None:
    with cluster() as nodes:
        async with fleet(nodes.nodes[0], 100) as w:
            home = nodes.nodes[owner(nodes, w)]
            look_into(w, home)
            m = await w.join(nodes.url)
            running, ticket = await m.reserve(60), m.open(60)
            waiting = asyncio.create_task(ticket.granted())
            await eventually(lambda: w.states().get(ticket.id) == "queued")
            home.kill()
            home.store.start()
            await eventually(lambda: m.events.count(StoreUp(False)))
            await all_ready(m)
            assert w.states() == {running.id: "reserved", ticket.id: "queued"}
            await all_ready(m)
            running.settle(None, None)
            assert isinstance(await waiting, Grant)
            ticket.settle(None, None)
            await eventually(lambda: is_quiet(w, m))


async def test_any_node_of_the_url_is_enough() -> None:
    with cluster() as nodes:
        async with fleet(nodes.nodes[0], 100) as w:
            home = owner(nodes, w)
            look_into(w, nodes.nodes[home])
            first = nodes.nodes[other(nodes, w)].host_and_port
            m = await w.join(f"redis+cluster://127.0.0.1:1,{first}")
            (await m.reserve(1)).settle(None, None)
            with pytest.raises(StoreAway, match="Connect"):
                await Connection(
                    "redis+cluster://127.0.0.1:1", fleet_keys(w.fleet), lambda event: None
                ).open()


async def test_a_node_that_names_the_new_owner_is_believed() -> None:
    """Nobody else has to answer; and only for the fleet's own slot."""
    key, nowhere = "{kvgate:f}:meta", parse("redis+cluster://127.0.0.1:1")
    slot = key_slot(key.encode())
    assert await Cluster(nowhere, key).find(f"MOVED {slot} h:7") == Server("h", 7)
    assert await Cluster(nowhere, key).find(f"MOVED {slot} ::1:7") == Server("::1", 7)
    for why in ("", f"MOVED {slot} :7", f"MOVED {slot + 1} h:7", "CLUSTERDOWN The cluster is down"):
        with pytest.raises(StoreAway):
            await Cluster(nowhere, key).find(why)
