"""Estimates that follow what an engine reports."""

import json
from typing import Any

import pytest

from gateway.core.factors import OBSERVED_MIN
from tests.flow.engines import Peer, raw_engine, whole
from tests.flow.world import World, chat, gateway

WORDS = [{"role": "user", "content": "word " * 1000}]
ESTIMATE = 1000 + 4 + 3
"""By a counter of words."""
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def answer(tokens: int | None) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
    body = {"choices": [{"index": 0, "finish_reason": "stop"}], **usage}
    return whole(200, json.dumps(body).encode())


class Engine:
    """Reports one number, whatever it is asked."""

    def __init__(self, tokens: int | None = None) -> None:
        self.tokens = tokens

    async def play(self, peer: Peer) -> None:
        await peer.send(answer(self.tokens))


async def reserved_tokens(world: World, **fields: Any) -> int:
    """Of the prompt, to the block."""
    visitor = await world.visit(chat(**{"messages": WORDS, "max_tokens": 1, **fields}))
    assert visitor.status == 200
    return 16 * int(visitor.header("x-kvgate-reserved-blocks") or 0)


def of(tokens: float) -> int:
    return 16 * -(-int(tokens) // 16)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_rises_at_once_and_falls_when_it_is_sure(store_url: str, stream: bool) -> None:
    engine = Engine(3000)
    async with raw_engine(engine.play) as peer, gateway(store_url, {"a": peer.url}, learns=True) as world:
        assert await reserved_tokens(world) == of(ESTIMATE)
        assert of(3000) <= await reserved_tokens(world) <= of(3000 * 1.011)
        await world.quiet()
    engine.tokens = 500
    async with raw_engine(engine.play) as peer, gateway(store_url, {"a": peer.url}, learns=True) as world:
        for _ in range(OBSERVED_MIN):
            assert await reserved_tokens(world) == of(ESTIMATE)
        assert of(500) <= await reserved_tokens(world) <= of(500 * 1.011)
        await world.quiet()


async def test_a_fixed_factor_learns_nothing(store_url: str) -> None:
    engine = Engine(3000)
    async with raw_engine(engine.play) as peer, gateway(store_url, {"a": peer.url}) as world:
        for _ in range(2):
            assert await reserved_tokens(world) == of(ESTIMATE)
        await world.quiet()


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (None, {}),
        (0, {}),
        (
            3000,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 1000}, IMAGE]}]},
        ),
        (3000, {"truncate_prompt_tokens": 5000}),
    ],
    ids=["no usage", "no tokens", "media", "cut by the engine"],
)
async def test_some_answers_teach_nothing(store_url: str, tokens: int | None, fields: dict[str, Any]) -> None:
    engine = Engine(tokens)
    async with raw_engine(engine.play) as peer, gateway(store_url, {"a": peer.url}, learns=True) as world:
        for _ in range(2):
            await reserved_tokens(world, **fields)
        assert await reserved_tokens(world) == of(ESTIMATE)
        await world.quiet()


async def test_prompts_of_a_list_are_corrected_each(store_url: str) -> None:
    engine = Engine(2014)
    text = "word " * 1000
    completions = "/v1/completions"
    async with (
        raw_engine(engine.play) as peer,
        gateway(store_url, {"a": peer.url}, blocks={"a": 4001}, learns=True) as world,
    ):
        await world.visit({"model": "demo", "prompt": text, "max_tokens": 1}, path=completions)
        for count in (2, 20):
            body = {"model": "demo", "prompt": [text] * count, "max_tokens": 1}
            visitor = await world.visit(body, path=completions)
            blocks = int(visitor.header("x-kvgate-reserved-blocks") or 0)
            assert count * 2014 // 16 <= blocks <= count * of(2014 * 1.011) // 16
        await world.quiet()
