"""Streams of responses in the background on a real vLLM: it goes on without its client, which comes back or cancels."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest

from tests.processes import GatewayProcess, World, wait_until
from tests.vllm.engine import MODEL, SLOW_MACHINE, TEST_SECONDS, Vllm

pytestmark = pytest.mark.timeout(TEST_SECONDS)
PATH = "/v1/responses"
RUNNING = "vllm:num_requests_running"
SECONDS = 120.0
TRIES = 5
TOKENS = 3000
"""Seconds of work, so that a client can leave in the middle of it."""


@pytest.fixture
def gateway(real: Vllm, new_world: World) -> GatewayProcess:
    pools = [{"name": "only", "replicas": [real.url]}]
    config, keys = new_world.config(pools, fleet={"model": MODEL, "safe_fraction": 1.0}, **SLOW_MACHINE)
    return new_world.gateway(config, keys[0])


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def begun(gateway: GatewayProcess, tokens: int, count: int) -> list[dict[str, Any]]:
    """The first events of one whose client then leaves."""
    body = {
        "model": MODEL,
        "input": "def foo",
        "max_output_tokens": tokens,
        "ignore_eos": True,
        "background": True,
        "stream": True,
    }
    with gateway.client.stream("POST", PATH, json=body, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        return list(islice(events(answer), count))


def test_a_client_leaves_and_comes_back(real: Vllm, gateway: GatewayProcess) -> None:
    seen = begun(gateway, TOKENS, 6)
    response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    query = {"stream": "true", "starting_after": last}
    with gateway.client.stream("GET", f"{PATH}/{response_id}", params=query, timeout=SECONDS) as answer:
        rest = list(events(answer))
    numbers = [event["sequence_number"] for event in seen + rest]
    assert numbers == list(range(len(numbers)))
    assert rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"]["usage"]["output_tokens"] == TOKENS
    wait_until(gateway.is_quiet, "its blocks are back", SECONDS)


def test_one_that_nobody_waits_for_comes_to_its_end(real: Vllm, gateway: GatewayProcess) -> None:
    response_id = begun(gateway, TOKENS, 4)[0]["response"]["id"]
    wait_until(gateway.is_quiet, "its blocks are back", SECONDS)
    response = gateway.client.get(f"{PATH}/{response_id}", timeout=SECONDS).json()
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", TOKENS)
    wait_until(lambda: real.metric(RUNNING) == 0, "the engine is at rest", SECONDS)


def test_one_that_is_cancelled_while_it_is_read(real: Vllm, gateway: GatewayProcess) -> None:
    """vLLM tells those who read it nothing of that; kvgate ends their stream and the place of the call."""
    assert any(cancelled(gateway) for _ in range(TRIES)), "each was over before it could be cancelled"
    wait_until(gateway.is_quiet, "its blocks are back", SECONDS)
    wait_until(lambda: real.metric(RUNNING) == 0, "the engine has dropped it", SECONDS)


def cancelled(gateway: GatewayProcess) -> bool:
    """False where it came to its end before."""
    body = {"model": MODEL, "input": "def foo", "max_output_tokens": TOKENS, "ignore_eos": True}
    with gateway.client.stream(
        "POST", PATH, json=body | {"background": True, "stream": True}, timeout=SECONDS
    ) as answer:
        found = events(answer)
        response_id = next(found)["response"]["id"]
        told = gateway.client.post(f"{PATH}/{response_id}/cancel", timeout=SECONDS)
        last = list(found)[-1]
    if told.status_code == 200:
        assert last["error"]["code"] == "response_cancelled"
        return True
    assert "Cannot cancel" in told.text
    assert (last["type"], last["response"]["usage"]["output_tokens"]) == ("response.completed", TOKENS)
    return False
