"""Elastic pools on real processes: what they learn, how many calls run, and what a gateway that dies leaves behind."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from gateway.core.urgency import YIELDING
from tests.processes import ADMIN_TOKEN, GatewayProcess, Mock, World, wait_until

BLOCKS = 401
LIMIT = 1000
WHOLE = -(-(LIMIT + 10) // 16)
"""Blocks of a call's whole demand, about."""
WRITTEN = 40
LEARNED_FROM = 120
AT_ONCE = 40
OPTIONS = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "256")


def call(gateway: GatewayProcess, written: int = WRITTEN, limit: int = LIMIT, key: str = "") -> str:
    """One streamed call, to its end; what its last choice says."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": limit,
        "stream": True,
        "mock": {"output_tokens": written},
    }
    headers = {"authorization": f"Bearer {key or gateway.key}"}
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers, timeout=120
    ) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
    assert "usage" not in text
    *_, last, done = (line for line in text.splitlines() if line)
    assert done == "data: [DONE]"
    return str(json.loads(last[6:])["choices"][0]["finish_reason"])


@contextmanager
def together(gateway: GatewayProcess, count: int, *sizes: int) -> Iterator[list[Future[str]]]:
    """`sizes`: as of `call`."""
    with ThreadPoolExecutor(count) as threads:
        yield [threads.submit(call, gateway, *sizes) for _ in range(count)]


def running(gateway: GatewayProcess, count: int) -> int:
    """How many of so many calls run once all run or wait."""

    def all_are_there() -> bool:
        state = gateway.state()
        return bool(state["leases"] + state["queue"] == count)

    wait_until(all_are_there, f"{count} calls run or wait")
    # A state is read in parts: who waits was read before the last of them came.
    return int(gateway.state()["leases"])


def pools(mode: str, mocks: list[Mock]) -> list[dict[str, Any]]:
    return [{"name": "all", "mode": mode, "replicas": [mock.url for mock in mocks]}]


def configure(world: World, mode: str, mocks: list[Mock]) -> str:
    """Also of running gateways; the keys stay."""
    store = {"lease_seconds": 2, "heartbeat_seconds": 0.5}
    _, (key,) = world.config(pools(mode, mocks), store=store, queue={"seconds_max": 120})
    return key


def at_once(gateway: GatewayProcess, mocks: list[Mock]) -> int:
    """How many calls run at once while engines are slow; all end well."""
    for mock in mocks:
        mock.slow(30)
    with together(gateway, AT_ONCE) as calls:
        found = running(gateway, AT_ONCE)
        for mock in mocks:
            mock.slow(0.02)
        assert {each.result(120) for each in calls} == {"stop"}
    wait_until(gateway.is_quiet, "nothing is held")
    return found


def test_more_calls_run_when_it_is_known_that_they_are_short(new_world: World) -> None:
    mocks = [new_world.mock(*OPTIONS) for _ in range(2)]
    key = configure(new_world, "elastic", mocks)
    config = new_world.folder / "kvgate.yaml"
    gateway = new_world.gateway(config, key)
    guaranteed = 2 * (BLOCKS // WHOLE)
    assert at_once(gateway, mocks) == guaranteed
    for _ in range(LEARNED_FROM // 20):
        with together(gateway, 20) as calls:
            assert {each.result(120) for each in calls} == {"stop"}
    other = new_world.gateway(config, key)
    wait_until(lambda: knows(other) >= LEARNED_FROM, "another gateway knows what was learned")
    assert at_once(other, mocks) > 2 * guaranteed
    assert [mock.metric("vllm:num_preemptions_total") for mock in mocks] == [0, 0]
    assert other.metric("kvgate_unmetered_streams_total") == 0
    shown = status(other, "--lengths")
    assert "fleet demo, class normal, demo:" in shown
    assert "SURVIVAL" in shown
    assert (
        'kvgate_learned_length_tokens{class="normal",fleet="demo",model="demo",quantile="0.5"}'
        in other.metrics()
    )


def knows(gateway: GatewayProcess) -> int:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    kinds = gateway.client.get("/admin/v1/lengths", headers=headers).json()["fleets"]["demo"]
    return sum(kind["calls"] for kind in kinds)


def status(gateway: GatewayProcess, *options: str) -> str:
    environ = {"KVGATE_ADMIN_URL": gateway.url, "KVGATE_ADMIN_TOKEN": ADMIN_TOKEN}
    command = [sys.executable, "-m", "gateway", "status", *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_a_gateway_that_dies_leaves_nothing_held(new_world: World) -> None:
    mocks = [new_world.mock(*OPTIONS) for _ in range(2)]
    key = configure(new_world, "elastic", mocks)
    config = new_world.folder / "kvgate.yaml"
    dying, living = (new_world.gateway(config, key) for _ in range(2))
    with together(dying, 10, 4900, 5000) as calls:
        wait_until(lambda: grown(dying) > 0, "some calls have grown")
        for mock in mocks:
            mock.slow(100)  # none ends before its gateway
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait()
        for each in calls:
            with pytest.raises(httpx.HTTPError):
                each.result(60)
    for mock in mocks:
        mock.slow(0.1)
    wait_until(living.is_quiet, "what the dead one held is given back")
    with together(living, 2 * (BLOCKS // WHOLE)) as calls:
        assert {each.result(60) for each in calls} == {"stop"}
    wait_until(living.is_quiet, "nothing is held")
    state = living.state()["fleets"]["demo"]["pools"]["all"]["replicas"]
    assert [replica["sequences"] for replica in state.values()] == [0, 0]
    assert [mock.metric("vllm:num_preemptions_total") for mock in mocks] == [0, 0]


def grown(gateway: GatewayProcess) -> int:
    """Calls that have reached each age from 128 tokens on."""
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    kinds = gateway.client.get("/admin/v1/lengths", headers=headers).json()["fleets"]["demo"]
    return int(sum(age["entered"] for kind in kinds for age in kind["ages"] if age["tokens"] >= 128))


def test_a_pool_that_becomes_guaranteed_is_so_for_new_calls(new_world: World) -> None:
    mocks = [new_world.mock(*OPTIONS)]
    key = configure(new_world, "elastic", mocks)
    config = new_world.folder / "kvgate.yaml"
    gateway = new_world.gateway(config, key)
    for _ in range(4):
        with together(gateway, 20) as calls:
            assert {each.result(120) for each in calls} == {"stop"}
    assert at_once(gateway, mocks) > BLOCKS // WHOLE
    text = config.read_text()
    config.write_text(text.replace('"mode": "elastic"', '"mode": "guaranteed"'))
    wait_until(lambda: "kvgate.yaml reloaded" in gateway.log.read_text(), "the change is used")
    assert at_once(gateway, mocks) == BLOCKS // WHOLE


def test_in_a_shared_pool_only_elastic_calls_are_preempted(new_world: World) -> None:
    """Those that write far more than was learned; the guaranteed ones come last, and are an engine's first choice."""
    mock = new_world.mock(*OPTIONS, "--scheduling-policy", "priority")
    config, (key, promised) = new_world.config(
        pools("shared", [mock]), {}, {"mode": "guaranteed"}, queue={"seconds_max": 120}
    )
    gateway = new_world.gateway(config, key)
    for _ in range(LEARNED_FROM // 20):
        with together(gateway, 20) as calls:
            assert {each.result(120) for each in calls} == {"stop"}
    mock.slow(30)  # until all are there
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(call, gateway, LIMIT) for _ in range(6)]
        assert running(gateway, 6) == 6
        calls += [threads.submit(call, gateway, LIMIT, key=promised) for _ in range(2)]
        assert running(gateway, 8) == 8
        mock.slow(0.1)
        assert {each.result(120) for each in calls} == {"length"}
    told = mock.log()["requests"][-8:]
    preempted = {call["body"].get("priority", 0) for call in told if call["preemptions"]}
    assert preempted == {YIELDING}
    wait_until(gateway.is_quiet, "nothing is held")
