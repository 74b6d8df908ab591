"""`/v1/chat/completions/batch` through a whole gateway: all conversations of a call are reserved together."""

from typing import Any

import pytest

from gateway.core.outcomes import Code, Outcome
from gateway.mock.engine import EngineConfig
from tests.flow.engines import mock_engine
from tests.flow.world import MESSAGES, gateway

BATCH = "/v1/chat/completions/batch"
EACH = -(-(8 + 20 - 1) // 16)
"""Blocks of `hi` and 20 tokens."""


def body_of(count: int, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [MESSAGES] * count, "max_tokens": 20, **fields}


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_call_reserves_for_each_of_its_conversations(store_url: str, fields: dict[str, Any]) -> None:
    async with mock_engine(EngineConfig(), speed=100) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body_of(3, **fields), path=BATCH)
        assert visitor.status == 200, visitor.body
        assert [choice["index"] for choice in visitor.json["choices"]] == [0, 1, 2]
        assert visitor.header("x-kvgate-reserved-blocks") == str(3 * EACH)
        assert (visitor.header("x-kvgate-output-limit"), visitor.header("x-prompt-tokens")) == ("20", "24")
        (request,) = mock.app.journal.shown()["requests"]
        assert (request["path"], request["body"]) == (BATCH, body_of(3, **fields))
        end = world.only_end()
        assert (end.outcome, end.route, end.reserved_blocks) == (Outcome.COMPLETED, BATCH, 3 * EACH)
        assert (end.prompt_tokens, end.output_tokens, end.unused_blocks) == (24, 60, 0)
        await world.quiet()


async def test_it_waits_until_there_is_room_for_all(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=100) as mock, gateway(store_url, {"a": mock.url}) as world:
        give_back = await world.hold(1000 - 3 * EACH + 1)
        visitor = await world.visit(body_of(3), path=BATCH, headers={"x-kvgate-deadline-ms": "1"})
        assert (visitor.status, visitor.json["error"]["code"]) == (429, Code.QUEUE_TIMEOUT)
        give_back()
        assert (await world.visit(body_of(3), path=BATCH)).status == 200
        await world.quiet()


async def test_more_conversations_than_an_engine_runs_at_once_never_fit(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=100) as mock, gateway(store_url, {"a": mock.url}) as world:
        visitor = await world.visit(body_of(257), path=BATCH)
        assert (visitor.status, visitor.json["error"]["code"]) == (400, Code.TOO_MANY_SEQUENCES)
        assert visitor.header("x-should-retry") == "false"
        await world.quiet()
