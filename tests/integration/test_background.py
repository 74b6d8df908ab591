"""Responses in the background and a gateway that ends: what they hold at their engine ends with it, or before."""

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest

from gateway.ledger.state import read_state
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import soon

ENGINE = ("--blocks", "201", "--step-base-ms", "10", "--step-running-us", "0", "--responses-store")
"""A token takes 10 ms."""


def begin(world: World, grace_seconds: float, tokens: int, stream: bool) -> tuple[Mock, GatewayProcess, str]:
    """A response under way, and its id.  Of a stream the client has left."""
    mock = world.mock(*ENGINE)
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = world.config(pools, store=QUICK_STORE, server={"grace_seconds": grace_seconds})
    gateway = world.gateway(config, key)
    body = {"model": "demo", "input": "hi", "max_output_tokens": tokens, "background": True, "stream": stream}
    with gateway.client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200
        if stream:
            first = next(line for line in answer.iter_lines() if line.startswith("data: "))
            document = json.loads(first.removeprefix("data: "))["response"]
        else:
            document = json.loads(answer.read())
            assert document["status"] == "queued"
    assert not gateway.is_quiet()
    return mock, gateway, document["id"]


async def ended(gateway: GatewayProcess) -> int:
    return int(await asyncio.to_thread(gateway.process.wait, HANG_SECONDS))


def at_the_engine(mock: Mock, response_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{mock.url}/v1/responses/{response_id}", trust_env=False).json()
    return found


async def assert_books_empty(world: World) -> None:
    state = await read_state(world.store.url, "demo")
    assert (state["reserved"], state["leases"], state["queue"]) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_grace_period_is_cancelled_at_its_engine(
    new_world: World, stream: bool
) -> None:
    mock, gateway, response_id = begin(new_world, 0.5, 3000, stream)
    gateway.process.send_signal(signal.SIGTERM)
    assert await ended(gateway) == 0
    assert at_the_engine(mock, response_id)["status"] == "cancelled"
    await soon(lambda: mock.metric("vllm:num_requests_running") == 0, "the engine has dropped it")
    await assert_books_empty(new_world)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ends_within_it_is_waited_for(new_world: World, stream: bool) -> None:
    mock, gateway, response_id = begin(new_world, 2 * HANG_SECONDS, 100, stream)
    gateway.process.send_signal(signal.SIGTERM)
    assert await ended(gateway) == 0
    response = at_the_engine(mock, response_id)
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 100)
    await assert_books_empty(new_world)
