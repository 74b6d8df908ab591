"""Random calls, faults and leavings, by seed: nothing stays behind and every call is told exactly once."""

import asyncio
import random
from collections import Counter

import pytest

from gateway.core.outcomes import Outcome
from gateway.mock.engine import EngineConfig
from gateway.upstream.limits import UpstreamLimits
from tests.flow.driver import CHAT, NEVER, Visitor
from tests.flow.engines import mock_engine
from tests.flow.world import World, chat, gateway, outcomes, soon

CALLS = 100
AT_ONCE = 20
FAULTS = [
    "reset_before_headers", "reset_after_headers", "reset_after_events:3", "cut_after_events:2", "error_event",
    "error_event:2", "done_only", "finish_abort", "finish_abort:3", "status:400", "status:429", "status:500",
    "status:503", "hang", "hang:2", "garbage", "gzip",
]  # fmt: skip
LIMITS = UpstreamLimits(5, 0.1, 0.1, 0.1)


class Traffic:
    """What one seed makes of `CALLS` calls."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self) -> dict[str, object]:
        pick = self._random
        fields: dict[str, object] = {
            "max_tokens": pick.choice([1, 8, 40, 400]),
            "stream": pick.random() < 0.7,
        }
        script: dict[str, object] = {"output_tokens": pick.randint(1, 20)}
        if pick.random() < 0.4:
            script["fail"] = pick.choice(FAULTS)
        return chat(**fields, mock=script)

    def visitor(self, world: World) -> Visitor:
        pick = self._random
        leaves = pick.random() < 0.3
        return Visitor(
            world.app,
            b"{" if pick.random() < 0.05 else self.body(),
            path=CHAT,
            pieces=pick.randint(1, 3),
            leave_after_receives=pick.randint(0, 3) if leaves and pick.random() < 0.3 else NEVER,
            leave_after_sends=pick.randint(1, 6) if leaves else NEVER,
        )

    def turns_to_live(self) -> int:
        """Turns of the loop after which the task is cancelled from outside."""
        return self._random.randint(0, 400) if self._random.random() < 0.15 else NEVER


async def live(visitor: Visitor, turns: int, slots: asyncio.Semaphore) -> None:
    async with slots:
        task = asyncio.create_task(visitor.run())
        while turns < NEVER and not task.done():
            if not turns:
                task.cancel()
                break
            turns -= 1
            await asyncio.sleep(0)
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled() or task.exception() is None


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_stays_behind(store_url: str, seed: int) -> None:
    traffic = Traffic(seed)
    config = EngineConfig(blocks=41, step_base_ms=1)
    async with mock_engine(config, speed=4) as first, mock_engine(config, speed=4) as second:
        urls, blocks = {"a": first.url, "b": second.url}, {"a": 41, "b": 41}
        async with gateway(store_url, urls, blocks=blocks, limits=LIMITS, wait_ms=400, queue_max=8) as world:
            slots = asyncio.Semaphore(AT_ONCE)
            visitors = [traffic.visitor(world) for _ in range(CALLS)]
            await asyncio.gather(*(live(visitor, traffic.turns_to_live(), slots) for visitor in visitors))
            await world.quiet()
            for mock in (first, second):
                await soon(lambda mock=mock: not mock.open_calls, "every engine's calls have ended")
            told = outcomes(world.ended)
            assert sum(told.values()) == CALLS
            assert all(told[outcome] for outcome in Outcome)
            assert max(Counter(end.request_id for end in world.ended).values()) == 1
            for visitor in visitors:
                expect_whole(visitor)


def expect_whole(visitor: Visitor) -> None:
    """A client that stayed has either a whole answer or a stream that says how it ended."""
    if visitor.complete and visitor.status == 200 and b"data: " in visitor.body[:6]:
        assert visitor.body.endswith(b"data: [DONE]\n\n")
        assert visitor.body.count(b"data: [DONE]") == 1
