"""Many calls of token ids at once, straight to an engine or through a gateway, and what became of them."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.vllm.engine import BLOCK_SIZE, MODEL
from tests.wire import Wire, post

IDS = range(10, 4000)
"""What the tiny model's vocabulary has beyond its special tokens."""


@dataclass(frozen=True)
class Size:
    prompt_tokens: int
    output_tokens: int

    @property
    def blocks(self) -> int:
        """The last token's KV is never written."""
        return -(-(self.prompt_tokens + self.output_tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class Load:
    calls: int
    seconds: float
    events: int
    """Of output text; at most one a token."""


class Gate:
    """A client that keeps the blocks of what it has under way within a budget; None is no gate."""

    def __init__(self, blocks_max: int | None) -> None:
        self._blocks_max = blocks_max
        self._blocks = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def room(self, blocks: int) -> AsyncIterator[None]:
        if self._blocks_max is None:
            yield
            return
        fits = self._blocks_max - blocks
        async with self._changed:
            await self._changed.wait_for(lambda: self._blocks <= fits)
            self._blocks += blocks
        try:
            yield
        finally:
            async with self._changed:
                self._blocks -= blocks
                self._changed.notify_all()


def ids(seed: int, count: int) -> list[int]:
    """The same for one seed, and for another one different ones from the first on."""
    return random.Random(seed).choices(IDS, k=count)


def call_of(
    size: Size, chance: random.Random, key: str = "none", beginning: Sequence[int] = (), **fields: Any
) -> bytes:
    """A stream of random token ids, which nothing cached can match, that runs to its limit.

    `beginning`: of its prompt.
    """
    body = {
        "model": MODEL,
        "prompt": [*beginning, *chance.choices(IDS, k=size.prompt_tokens - len(beginning))],
        "max_tokens": size.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post(key, body | fields)


async def send_all(
    url: str,
    sizes: Sequence[Size],
    *,
    blocks_max: int | None = None,
    key: str = "none",
    beginning: Sequence[int] = (),
    seed: int | None = None,
) -> Load:
    """All calls at once, each read to its end; `blocks_max` gates them by what each needs.

    `beginning`: of all their prompts; the gate counts its full blocks once.  `seed`: of the rest of them.
    """
    chance = random.Random(len(sizes) if seed is None else seed)
    shared = len(beginning) // BLOCK_SIZE
    gate = Gate(None if blocks_max is None else blocks_max - shared)
    began = time.monotonic()

    async def one(size: Size, request: bytes) -> int:
        async with gate.room(size.blocks - shared):
            return await read(url, size, request)

    requests = [call_of(size, chance, key, beginning) for size in sizes]
    events = await asyncio.gather(*map(one, sizes, requests))
    return Load(len(sizes), time.monotonic() - began, sum(events))


async def read(url: str, size: Size, request: bytes) -> int:
    """The number of text events of a call that got all it asked for."""
    wire = await Wire.open(url)
    try:
        await wire.send(request)
        status, _ = await wire.head()
        assert status == 200, await wire.rest()
        *texts, usage, done = await wire.events()
    finally:
        wire.close()
    assert done == b"data: [DONE]"
    counted = json.loads(usage.removeprefix(b"data: "))["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (
        size.prompt_tokens,
        size.output_tokens,
    )
    return len(texts)
