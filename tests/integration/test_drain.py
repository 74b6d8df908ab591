"""An operator drains replicas by the command line: for every gateway at once, and until he says otherwise."""

import asyncio
import json
from typing import Any

import pytest

from gateway.cli import main
from gateway.core.outcomes import Code
from tests.integration.test_admin_keys import admin_of
from tests.processes import ADMIN_TOKEN, QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Wire, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

LONG = completion(16, 500, True, output_tokens=500)
SHORT = completion(16, 3, True, output_tokens=3)
SECONDS = 30.0
"""For whatever has to happen; a busy machine may stand still for seconds."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command line prints to the operator of a gateway, and its status."""

    def ask(gateway: GatewayProcess, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("KVGATE_ADMIN_URL", gateway.url)
        monkeypatch.setenv("KVGATE_ADMIN_TOKEN", ADMIN_TOKEN)
        capsys.readouterr()
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return ask


def two_replicas(here: World, count: int, **settings: Any) -> tuple[list[GatewayProcess], list[Mock]]:
    """Replica `b` is the roomier one, so it is the first choice."""
    mocks = [here.mock("--blocks", blocks, "--step-base-ms", "5") for blocks in ("201", "401")]
    replicas = [{"name": name, "url": mock.url} for name, mock in zip("ab", mocks, strict=True)]
    config, (key,) = here.config([{"name": "only", "replicas": replicas}], store=QUICK_STORE, **settings)
    return [here.gateway(config, key) for _ in range(count)], mocks


async def stream(gateway: GatewayProcess, body: dict[str, Any]) -> tuple[Wire, str]:
    """A call whose answer has begun, and the replica that it runs on."""
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, body))
    status, headers = await wire.head()
    assert status == 200
    return wire, headers["x-kvgate-replica"]


async def complete(wire: Wire) -> bool:
    """The rest of the stream holds no error."""
    *_, last, done = await wire.events()
    return done == b"data: [DONE]" and b'"error"' not in last


def replicas_of(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = gateway.state()["fleets"]["demo"]["pools"]["only"]["replicas"]
    return found


def state_of(gateway: GatewayProcess, replica: str) -> tuple[str, list[str]]:
    row = replicas_of(gateway)[replica]
    return row["state"], row["rests"]


async def test_no_gateway_sends_anything_there_and_what_runs_finishes(new_world: World, told: Any) -> None:
    (first, second), (a, b) = two_replicas(new_world, 2)
    running, replica = await stream(second, LONG)
    assert replica == "b"
    assert told(first, "drain", "b") == (
        0,
        "replica b of fleet demo gets no new calls; `kvgate status` shows what still runs there\n",
    )
    for gateway in (first, second):
        wire, replica = await stream(gateway, SHORT)
        assert (replica, await complete(wire)) == ("a", True)
        assert state_of(gateway, "b") == ("draining", ["drained"])
    assert await complete(running)
    await soon(first.is_quiet, "all was given back", SECONDS)
    assert (a.log()["finished"], b.log()["finished"]) == (2, 1)
    status, printed = told(second, "status")
    assert status == 0
    assert any(
        line.split()[:5] == ["demo", "only", "b", "draining", "drained"] for line in printed.splitlines()
    )
    assert told(second, "undrain", "b") == (0, "replica b of fleet demo may get calls again\n")
    assert (await stream(first, SHORT))[1] == "b"


async def test_a_drain_outlasts_gateways_and_the_replicas_restart(new_world: World, told: Any) -> None:
    (gateway,), _ = two_replicas(new_world, 1)
    told(gateway, "drain", "b")
    config = new_world.folder / "kvgate.yaml"
    key = gateway.key
    gateway.stop()
    anew = new_world.gateway(config, key)
    assert (await stream(anew, SHORT))[1] == "a"
    await soon(lambda: state_of(anew, "b") == ("draining", ["drained"]), "the store says so", SECONDS)
    line = 'kvgate_replica_state{fleet="demo",pool="only",replica="b",state="draining"} 1.0'
    await soon(lambda: line in anew.metrics(), "the metrics show it", SECONDS)


async def test_who_waits_for_the_only_replica_is_served_when_it_is_back(new_world: World, told: Any) -> None:
    (gateway,), (a, _) = two_replicas(new_world, 1)
    a.stop()
    await soon(lambda: state_of(gateway, "a")[0] == "down", "a is down", SECONDS)
    told(gateway, "drain", "b")
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, SHORT))
    await soon(lambda: gateway.state()["queue"] == 1, "it waits", SECONDS)
    told(gateway, "undrain", "b")
    assert (await wire.head())[0] == 200
    assert await complete(wire)


async def test_who_waits_in_vain_is_told_why(new_world: World, told: Any) -> None:
    (gateway,), _ = two_replicas(new_world, 1, queue={"seconds_max": 1})
    for replica in "ab":
        told(gateway, "drain", replica)
    await soon(lambda: state_of(gateway, "a")[0] == "draining", "the heartbeat told it", SECONDS)
    wire = await Wire.open(gateway.url)
    answer = await wire.ask(post(gateway.key, SHORT))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (429, Code.QUEUE_TIMEOUT)
    assert "every replica of lane only drains: it gets no new requests" in error["message"]


async def test_with_the_queue_off_it_is_told_at_once(new_world: World, told: Any) -> None:
    (gateway,), _ = two_replicas(new_world, 1, queue={"depth_max": 0})
    for replica in "ab":
        told(gateway, "drain", replica)
    answer = await (await Wire.open(gateway.url)).ask(post(gateway.key, SHORT))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (503, Code.NO_BACKEND)
    assert "drains, so it gets no new requests; queue.depth_max is 0" in error["message"]


def test_what_is_wrong_is_named(new_world: World, told: Any) -> None:
    (gateway,), _ = two_replicas(new_world, 1)
    assert told(gateway, "drain", "c") == (
        2,
        "kvgate: no fleet has a replica 'c'; `kvgate status` lists them\n",
    )
    status, printed = told(gateway, "undrain", "a", "--fleet", "other")
    assert (status, printed) == (2, "kvgate: fleet: there is no fleet 'other', known are demo\n")
    assert told(gateway, "drain", "a", "--fleet", "demo")[0] == 0
    with admin_of(gateway) as admin:
        for fields, field in (({"fleet": "demo"}, "closed"), ({"closed": True}, "fleet"), ({"x": 1}, "x")):
            error = admin("POST", "/gate", 400, json=fields)["error"]
            assert (error["code"], error["param"]) == (Code.INVALID_VALUE, field)
        for fields, field in (({}, "replica"), ({"replica": 3}, "replica"), ({"replica": "a", "x": 1}, "x")):
            error = admin("POST", "/drain", 400, json=fields)["error"]
            assert (error["code"], error["param"]) == (Code.INVALID_VALUE, field)


async def test_a_fleet_is_closed_and_opened_for_all_gateways(new_world: World, told: Any) -> None:
    """What runs goes on."""
    (first, second), _ = two_replicas(new_world, 2)
    running, _ = await stream(second, LONG)
    assert told(first, "gate", "close", "demo") == (0, "fleet demo takes no new calls\n")
    for gateway in (first, second):
        answer = await (await Wire.open(gateway.url)).ask(post(gateway.key, SHORT))
        assert (answer.status, answer.code) == (429, Code.GATE_CLOSED)
        assert 5 <= int(answer.headers["retry-after"]) <= 7
    assert "fleet demo: closed to new calls, 1 run" in told(second, "status")[1]
    await soon(lambda: 'kvgate_gate_closed{fleet="demo"} 1.0' in first.metrics(), "it is shown", SECONDS)
    assert await complete(running)
    assert told(second, "gate", "open", "demo") == (0, "fleet demo takes calls\n")
    wire, _ = await stream(first, SHORT)
    assert await complete(wire)
    status, printed = told(first, "gate", "close", "other")
    assert (status, printed) == (2, "kvgate: fleet: there is no fleet 'other', known are demo\n")


async def test_a_store_that_is_away_is_told(new_world: World, told: Any) -> None:
    (gateway,), _ = two_replicas(new_world, 1)
    new_world.store.stop()
    status, printed = await asyncio.to_thread(told, gateway, "drain", "a")
    assert (status, printed) == (
        2,
        "kvgate: the store does not answer: whether that was done is not known\n",
    )
