"""What a caller is told whose key may hold a part of a pool only."""

import asyncio

from gateway.http.auth import Key
from gateway.mock.engine import EngineConfig
from tests.flow.engines import mock_engine
from tests.flow.world import chat, gateway

HALF = Key("halved", "normal", pool_share=0.5)
NOWHERE = "http://127.0.0.1:9"
"""No call there gets as far as its engine."""


async def test_a_call_larger_than_its_keys_part_never_fits(store_url: str) -> None:
    """Of 1,000 blocks of 16 tokens it may hold 500."""
    async with gateway(store_url, {"a": NOWHERE}, key=HALF) as world:
        refused = await world.visit(chat(max_tokens=8100))
        assert (refused.status, refused.json["error"]["code"]) == (400, "key_cap_exceeded")
        assert "limits.pool_share) is 500" in refused.json["error"]["message"]
        assert refused.header("x-should-retry") == "false"
        await world.quiet()


async def test_a_key_at_its_part_waits_while_others_start(store_url: str) -> None:
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=HALF) as world,
    ):
        release = await world.hold(495, key="halved", pool_share=500_000)
        waiting = asyncio.create_task(world.visit(chat(max_tokens=200)))
        await world.queued(1)
        (await world.hold(400))()
        assert not waiting.done()
        release()
        assert (await waiting).status == 200
        await world.quiet()


async def test_with_the_queue_off_a_key_at_its_part_is_refused_by_name(store_url: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=HALF, queue_max=0) as world:
        release = await world.hold(495, key="halved", pool_share=500_000)
        refused = await world.visit(chat(max_tokens=200))
        assert (refused.status, refused.json["error"]["code"]) == (429, "quota_exceeded")
        assert "would hold 508 KV blocks of a pool" in refused.json["error"]["message"]
        release()
        await world.quiet()
