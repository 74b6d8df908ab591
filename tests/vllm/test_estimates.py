"""What kvgate estimates of a prompt, beside what a real vLLM counts: no difference in either exact mode."""

import json
import os
from typing import Any

import httpx
import pytest

from gateway.core.request import Endpoint
from tests.processes import GatewayProcess, World, wait_until
from tests.vllm.engine import MODEL, TEST_SECONDS, Vllm
from tests.vllm.environment import place
from tests.vllm.prompt_requests import CHATS, COMPLETIONS

pytestmark = pytest.mark.timeout(TEST_SECONDS)
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": "def foo(x): 東京"}]},
    "system": {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
    },
}
ASKED = {Endpoint.CHAT: CHATS, Endpoint.COMPLETIONS: COMPLETIONS, Endpoint.MESSAGES: MESSAGES}


@pytest.fixture(params=["engine", "files"])
def gateway(request: pytest.FixtureRequest, real: Vllm, new_world: World) -> GatewayProcess:
    tokenizer = "engine" if request.param == "engine" else str(place(os.environ) / "model")
    fleet = {"model": MODEL, "tokenizer": tokenizer, "exact_above": 0}
    pools = [{"name": "only", "replicas": [real.url]}]
    config, keys = new_world.config(pools, fleet=fleet, log={"level": "info", "format": "json"})
    return new_world.gateway(config, keys[0])


def calls_of(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """Of the log, those that an engine answered."""
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("prompt_tokens") is not None]


def test_nothing_is_off(real: Vllm, gateway: GatewayProcess, request: pytest.FixtureRequest) -> None:
    """Calls that vLLM refuses are none; with files, Anthropic's protocol is estimated."""
    is_engine = request.node.callspec.params["gateway"] == "engine"
    headers = {"authorization": f"Bearer {gateway.key}"}
    answered: list[str] = []
    with httpx.Client(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as client:
        for endpoint, bodies in ASKED.items():
            if endpoint is Endpoint.MESSAGES and not is_engine:
                continue
            for name, body in bodies.items():
                answer = client.post(endpoint, json={"model": MODEL, "max_tokens": 1, **body})
                if answer.status_code == 200:
                    answered.append(f"{endpoint} {name}")
    wait_until(lambda: len(calls_of(gateway)) == len(answered), "all calls are in the log")
    counts = [(call["prompt_tokens_estimated"], call["prompt_tokens"]) for call in calls_of(gateway)]
    print(f"\n{len(counts)} calls of {sum(map(len, ASKED.values()))} were answered")
    wrong = [f"{name}: {pair}" for name, pair in zip(answered, counts, strict=True) if pair[0] != pair[1]]
    assert not wrong, wrong
    assert len(answered) >= 15
