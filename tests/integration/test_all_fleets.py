"""`limits.all_fleets`: one key, two fleets, several gateways and workers, all real processes on one store."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from gateway.app import Gateway
from gateway.cli import main
from gateway.config import Secrets, load
from gateway.core.quota import ALL_FLEETS
from gateway.http.auth import new_key
from gateway.ledger.scripts import fleet_keys
from gateway.ledger.valkey import ValkeyLedger
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, World
from tests.wire import Answer, Wire, ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

FLEETS = ("red", "blue")
LIMITED = {"name": "limited", "limits": {ALL_FLEETS: {"requests_max": 1}}}


def configured(world: World, *keys: dict[str, Any], **settings: Any) -> tuple[Path, list[str]]:
    """Two fleets of one mock engine each."""
    fleets = [
        {
            "model": name,
            "pools": [{"name": "only", "replicas": [world.mock("--model", name).url]}],
            "safe_fraction": 1.0,
        }
        for name in FLEETS
    ]
    return world.config([], *keys, fleets=fleets, store=QUICK_STORE, **settings)


def call(key: str, fleet: str, **script: Any) -> bytes:
    return post(key, {**completion(16, 16, **script), "model": fleet})


async def running(gateway: GatewayProcess, key: str, fleet: str) -> Wire:
    """A stream that goes on until it is hung up."""
    wire = await Wire.open(gateway.url)
    await wire.send(call(key, fleet, stream=True, fail="hang:1"))
    assert (await wire.head())[0] == 200
    return wire


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rows))
    os.replace(new, path)


async def verified(config: Path, *options: str) -> int:
    """The exit status of `kvgate verify`, which runs a loop of its own."""
    return await asyncio.to_thread(main, ["verify", "--config", str(config), *options])


def held(world: World) -> int:
    """Calls within the limits, as the store has them."""
    with redis.Redis(unix_socket_path=str(world.store.socket), protocol=2) as store:
        return int(store.hlen(fleet_keys(ALL_FLEETS)[2]))


async def test_a_limit_holds_over_fleets_and_gateways(
    new_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    config, (key, free) = configured(new_world, LIMITED, {"name": "free"})
    first, second = (new_world.gateway(config, key) for _ in range(2))
    stream = await running(first, key, "red")
    waiting = asyncio.create_task(ask(second.url, call(key, "blue")))

    def shown() -> Any:
        return second.state()[ALL_FLEETS]

    await soon(lambda: shown()["queue"] == 1, "it waits for the stream on the other fleet")
    assert shown() == {
        "leases": 1,
        "queue": 1,
        "queued": {ALL_FLEETS: {"normal": 1}},
        "keys": {"limited": {"requests": 1}},
    }
    state = second.state()
    assert (state["queue"], state["fleets"]["blue"]["queue"], state["leases"]) == (0, 0, 1)
    depth = f'kvgate_queue_depth{{class="normal",fleet="{ALL_FLEETS}",lane=""}} 1.0'
    await soon(lambda: depth in second.metrics(), "a scrape shows it")
    assert (await ask(second.url, call(free, "red"))).status == 200, "it is nobody else's limit"
    assert await verified(config) == 0
    assert "fleet all_fleets: the books hold: 1 calls on 1 replicas, 1 waiting" in capsys.readouterr().out
    stream.reset()
    answer = await waiting
    assert answer.status == 200
    assert int(answer.headers["x-kvgate-queue-ms"]) > 0
    await soon(lambda: held(new_world) == 0, "nothing is held")


async def test_limits_come_to_be_with_a_change_of_the_keys_and_count_for_all_workers(
    new_world: World,
) -> None:
    """No gateway is taken out meanwhile."""
    config, (key,) = configured(new_world, {"name": "limited"})
    gateway = new_world.gateway(config, key, "--workers", "2")
    assert gateway.state()[ALL_FLEETS] is None
    secret, digest = new_key()
    path = new_world.folder / "keys.yaml"
    rows = json.loads(path.read_text())
    limits = {ALL_FLEETS: {"requests_per_day": 6}}
    problems: set[str] = set()

    async def probe() -> None:
        while True:
            wire = await Wire.open(gateway.url)
            answer = await wire.ask(b"GET /health/ready HTTP/1.1\r\nhost: kvgate\r\n\r\n")
            problems.add(str(answer.json()["problem"]))
            wire.close()
            await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    write(path, [*rows, {"name": "new", "sha256": digest, "limits": limits}])
    answers: list[Answer] = []
    async with asyncio.timeout(HANG_SECONDS):
        while sum(answer.status == 200 for answer in answers) < 6:
            batch = [ask(gateway.url, call(secret, fleet)) for fleet in FLEETS]
            answers += await asyncio.gather(*batch)
    statuses = [answer.status for answer in answers]
    assert statuses.count(200) == 6
    assert set(statuses) <= {200, 401, 429}, "401 until all workers know the key"
    for fleet in FLEETS * 4:
        answer = await ask(gateway.url, call(secret, fleet))
        assert (answer.status, answer.code) == (429, "quota_exceeded")
        assert "limits.all_fleets.requests_per_day, which is 6" in answer.json()["error"]["message"]
    probing.cancel()
    assert not [problem for problem in problems if ALL_FLEETS in problem], "another worker may just start"
    assert gateway.state()[ALL_FLEETS]["keys"] == {"new": {"requests": 0}}


async def test_a_gateway_that_ends_gives_its_places_within_the_limits_back(new_world: World) -> None:
    config, (key,) = configured(new_world, LIMITED, server={"grace_seconds": 0.2})
    gateway = new_world.gateway(config, key)
    stream = await running(gateway, key, "red")
    waiting = asyncio.create_task(ask(gateway.url, call(key, "blue")))
    await soon(lambda: held(new_world) == 2, "one runs, one waits")
    gateway.process.send_signal(signal.SIGTERM)
    assert ((await waiting).status, (await stream.events())[-1]) == (503, b"data: [DONE]")
    gateway.process.wait(HANG_SECONDS)
    assert held(new_world) == 0


@pytest.mark.parametrize(("key", "closes"), [(LIMITED, 1), ({}, 0)], ids=["limited", "free"])
async def test_the_end_waits_until_the_limits_list_nothing(
    new_world: World, key: dict[str, Any], closes: int
) -> None:
    """In this process: a real end is as quick as the fleets' own, which hides it."""
    config, _ = configured(new_world, key)
    gateway = Gateway(load(config, {}), Secrets(None, {}))
    await gateway.start()
    with mock.patch.object(ValkeyLedger, "close", autospec=True, side_effect=ValkeyLedger.close) as close:
        await gateway.stop()
    closed = [call_.args[0].fleet for call_ in close.mock_calls]
    assert sorted(closed) == sorted([*FLEETS, *[ALL_FLEETS] * closes])


async def test_verify_passes_over_limits_that_no_key_ever_had(
    new_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    config, (key,) = configured(new_world)
    new_world.gateway(config, key)
    assert await verified(config) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FLEETS)
    assert await verified(config, "--fleet", ALL_FLEETS) == 2
    assert "does not know it" in capsys.readouterr().err
