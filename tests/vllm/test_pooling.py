"""A real vLLM that embeds: the mock answers as it does, and kvgate reserves what it holds."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.processes import GatewayProcess, Mock, World, sum_of
from tests.vllm.answers import differences, exchange, facts
from tests.vllm.asks import EMBED, POOLED, Ask
from tests.vllm.engine import (
    BLOCK_SIZE,
    MOCK_OPTIONS,
    MODEL,
    POOLING_OPTIONS,
    TEST_SECONDS,
    USABLE_BLOCKS,
    Vllm,
)

pytestmark = pytest.mark.timeout(TEST_SECONDS)
KV_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
SEQUENCES_MAX = 8
"""As in POOLING_OPTIONS."""
INPUT_BLOCKS = 30
POLL_SECONDS = 0.005


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    engine = Mock(*MOCK_OPTIONS, *POOLING_OPTIONS)
    yield engine
    engine.stop()


@pytest.fixture
def gateway(pooling: Vllm, new_world: World) -> GatewayProcess:
    replica = {"url": pooling.url, "max_num_seqs": SEQUENCES_MAX}
    config, keys = new_world.config(
        [{"name": "only", "replicas": [replica]}], fleet={"model": MODEL}, queue={"seconds_max": 120}
    )
    return new_world.gateway(config, keys[0])


@pytest.mark.parametrize("ask", POOLED, ids=[ask.name for ask in POOLED])
def test_same_answer(pooling: Vllm, mock: Mock, ask: Ask) -> None:
    expected, given = (facts(exchange(url, ask), exact=ask.exact) for url in (pooling.url, mock.url))
    assert not differences(ask.name, expected, given)


async def test_no_more_is_held_than_is_reserved(pooling: Vllm, gateway: GatewayProcess) -> None:
    """Of 64 inputs the engine runs eight at once; its metrics are looked at all the while."""
    inputs = [[number] * (INPUT_BLOCKS * BLOCK_SIZE) for number in range(10, 74)]
    headers = {"authorization": f"Bearer {gateway.key}"}
    held = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        send = client.post(f"{gateway.url}{EMBED}", json={"model": MODEL, "input": inputs}, headers=headers)
        call = asyncio.create_task(send)
        while not call.done():
            page = await client.get(f"{pooling.url}/metrics")
            held = max(held, sum_of(KV_USAGE, page.text) * USABLE_BLOCKS)
            await asyncio.sleep(POLL_SECONDS)
        answer = await call
    assert answer.status_code == 200
    blocks = int(answer.headers["x-kvgate-reserved-blocks"])
    print(f"64 inputs of {INPUT_BLOCKS} blocks: {blocks} reserved, at most {held:.0f} seen in use")
    assert blocks == SEQUENCES_MAX * INPUT_BLOCKS
    assert held <= blocks + 0.5  # the metric is a fraction
    assert pooling.metric(PREEMPTIONS) == 0
