"""LR-01: a client that opens a stream and drops it keeps nothing, at whatever moment it leaves.

One place in the world, given by a key's cap or by the engine's blocks, and no queue: whatever a dropped stream left
behind would refuse the normal call after it.
"""

import asyncio
import random
from typing import Any

import pytest

from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

ROUNDS = 200
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 1569
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
"""Of every call here; the mock ends most of them long before."""
NO_QUEUE = {"depth_max": 0}


def one_place(world: World, kind: str) -> tuple[GatewayProcess, Mock]:
    usable = BLOCKS if kind == "budget" else 10 * BLOCKS
    limits: dict[str, Any] = {"limits": {"requests_max": 1}} if kind == "requests_max" else {}
    mock = world.mock("--blocks", str(usable + 1), "--step-base-ms", "1")
    config, (key,) = world.config(
        [{"name": "only", "replicas": [mock.url]}], limits, queue=NO_QUEUE, store=QUICK_STORE
    )
    return world.gateway(config, key), mock


class Rounds:
    """Streams that are dropped, each at a moment of its own."""

    def __init__(self, gateway: GatewayProcess, mock: Mock, seed: int) -> None:
        self.gateway = gateway
        self.mock = mock
        self.random = random.Random(seed)
        self.moments = (
            self.at_any_time,
            self.before_headers,
            self.after_headers,
            self.after_frames,
            self.before_done,
        )

    async def run(self, count: int) -> None:
        for number in range(count):
            moment = self.moments[number % len(self.moments)]
            await soon(self.engine_is_done, "the engine has ended the call before")
            self.mock.reset()
            await moment()
            await soon(self.gateway.is_quiet, f"round {number}: quiet after leaving {moment.__name__}")
            await self.check_engine(number, moment.__name__)
            answer = await self.normal_call()
            assert answer.status == 200, (number, moment.__name__, answer)

    def engine_is_done(self) -> bool:
        log = self.mock.log()
        return bool(log["received"] == log["finished"] + log["aborted"])

    async def normal_call(self) -> Answer:
        body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, output_tokens=2)
        return await ask(self.gateway.url, post(self.gateway.key, body))

    async def check_engine(self, number: int, moment: str) -> None:
        """The engine is another process: it hears of the end a moment after the gateway closed the connection."""
        await soon(self.engine_is_done, f"round {number}: the engine heard of {moment}")
        log = self.mock.log()
        never_sent = moment == "at_any_time" and log["received"] == 0
        assert never_sent or log["aborted"] + log["finished"] == 1, (number, moment, log)
        assert moment == "before_done" or log["finished"] == 0, (number, moment, log)

    async def stream(self, **script: Any) -> Wire:
        wire = await Wire.open(self.gateway.url)
        await wire.send(
            post(self.gateway.key, completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True, **script))
        )
        return wire

    async def at_any_time(self) -> None:
        """While the gateway reads, estimates, asks the store, connects or waits: nothing was heard of it yet."""
        wire = await self.stream(hold_seconds=60)
        await asyncio.sleep(self.random.uniform(0, 0.015))
        wire.reset()

    async def before_headers(self) -> None:
        """The engine has the call."""
        wire = await self.stream(hold_seconds=60)
        await soon(lambda: self.mock.log()["started"], "the engine has started")
        wire.reset()

    async def after_headers(self) -> None:
        """Headers come with the first frame; this client reads no further than them."""
        wire = await self.stream()
        await wire.head()
        wire.reset()

    async def after_frames(self) -> None:
        wire = await self.stream()
        await wire.head()
        for _ in range(self.random.choice((2, 2, 3, 5, 10, 40))):
            await wire.event()
        wire.reset()

    async def before_done(self) -> None:
        wire = await self.stream(output_tokens=self.random.randint(1, 5))
        await wire.head()
        while b'"finish_reason":"stop"' not in (await wire.event() or b""):
            continue
        wire.reset()


@pytest.mark.parametrize("kind", ["requests_max", "budget"])
async def test_dropped_streams_keep_nothing(new_world: World, kind: str) -> None:
    gateway, mock = one_place(new_world, kind)
    rounds = Rounds(gateway, mock, seed=1)
    assert (await rounds.normal_call()).status == 200
    await rounds.run(ROUNDS)
    assert gateway.is_quiet()
