"""A fleet whose prompts are counted as its engines count them."""

import asyncio
import math
from functools import partial

import pytest

from gateway.core.prefixes import PromptCount
from gateway.core.request import GenerationRequest
from gateway.mock.engine import EngineConfig
from tests.flow.engines import mock_engine
from tests.flow.world import MESSAGES, WordCounter, World, chat, gateway, soon

NOWHERE = "http://127.0.0.1:9"
COMPLETIONS = "/v1/completions"


class Told:
    """Knows one number, or none."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.requests: list[GenerationRequest] = []

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        await asyncio.sleep(0)
        self.requests.append(request)
        return None if self.tokens is None else [PromptCount(self.tokens) for _ in request.prompts]


async def test_what_it_counts_is_reserved(store_url: str) -> None:
    estimates = WordCounter()
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as engine,
        gateway(store_url, {"a": engine.url}, counter=estimates, model_counter=Told(1_000)) as world,
    ):
        visitor = await world.visit(chat(max_tokens=8))
        assert (visitor.status, visitor.header("x-kvgate-reserved-blocks")) == (200, "63")
        visitor = await world.visit(
            {"model": "demo", "prompt": ["a", "b"], "max_tokens": 8}, path=COMPLETIONS
        )
        assert (visitor.status, visitor.header("x-kvgate-reserved-blocks")) == (200, "126")
        assert estimates.counts == 0
        await world.quiet()


async def test_what_it_cannot_tell_is_estimated(store_url: str) -> None:
    estimates, told = WordCounter(), Told(None)
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as engine,
        gateway(store_url, {"a": engine.url}, counter=estimates, model_counter=told) as world,
    ):
        visitor = await world.visit(chat(max_tokens=8))
        assert (visitor.status, visitor.header("x-kvgate-reserved-blocks")) == (200, "1")
        assert (len(told.requests), estimates.counts) == (1, 1)
        await world.quiet()


async def test_token_ids_are_counted_already(store_url: str) -> None:
    told = Told(1_000)
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as engine,
        gateway(store_url, {"a": engine.url}, model_counter=told) as world,
    ):
        visitor = await world.visit({"model": "demo", "prompt": [1, 2, 3], "max_tokens": 8}, path=COMPLETIONS)
        assert (visitor.status, visitor.header("x-kvgate-reserved-blocks")) == (200, "1")
        assert not told.requests
        await world.quiet()


@pytest.mark.parametrize("words", [1, 8_000], ids=["short", "long"])
async def test_a_prompt_too_long_for_its_context_is_refused_by_its_count(store_url: str, words: int) -> None:
    messages = [{"role": "user", "content": "word " * words}]
    async with gateway(store_url, {"a": NOWHERE}, model_counter=Told(9_000)) as world:
        visitor = await world.visit(chat(messages=messages))
    assert (visitor.status, visitor.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least 9000 tokens" in visitor.json["error"]["message"]


async def test_it_is_not_asked_of_a_call_that_is_refused_anyway(store_url: str) -> None:
    """By its bytes, or because the store would refuse any."""
    told = Told(10)
    async with gateway(store_url, {"a": NOWHERE}, model_counter=told, queue_max=1) as world:
        hopeless = await world.visit(chat(messages=[{"role": "user", "content": "x" * 2_000_000}]))
        assert hopeless.json["error"]["code"] == "context_length_exceeded"
        release = await world.hold(1000)
        waiting = asyncio.create_task(world.hold(1, key="anonymous", queue_max=1))
        await world.queued(1)
        for words in (1, 8_000):
            refused = await world.visit(chat(messages=[{"role": "user", "content": "word " * words}]))
            assert refused.json["error"]["code"] == "queue_full"
        assert not told.requests
        release()
        (await waiting)()
        await world.visit(chat(messages=MESSAGES))
        assert len(told.requests) == 1
        await world.quiet()


def is_filled(world: World, part: float) -> bool:
    return world.ledger.fill == part


async def test_it_is_asked_only_while_little_room_is_left(store_url: str) -> None:
    """Of 1,000 blocks 700 are the bound; what the store says of them is known with the next heartbeat."""
    told = Told(100)
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as engine,
        gateway(store_url, {"a": engine.url}, model_counter=told, notes_fill=True) as world,
    ):
        for held, asked in ((0, 0), (699, 0), (700, 1), (0, 1)):
            release = await world.hold(held) if held else lambda: None
            await soon(partial(is_filled, world, held / 1000), f"the gateway knows that {held} are held")
            await world.visit(chat())
            assert len(told.requests) == asked
            release()
        await world.quiet()


async def test_while_it_is_not_known_how_much_is_left_it_is_asked(store_url: str) -> None:
    told = Told(100)
    async with gateway(store_url, {"a": NOWHERE}, model_counter=told, notes_fill=False) as world:
        assert world.ledger.fill is None
        await world.visit(chat())
        assert len(told.requests) == 1
