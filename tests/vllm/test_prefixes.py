"""What calls have in common is charged once, and a real engine agrees: forty of them as good as at once, and whatever
order they come and go in."""

import asyncio
from typing import NamedTuple

import pytest

from tests.processes import GatewayProcess, World
from tests.vllm.cores import apart
from tests.vllm.engine import SLOW_MACHINE, TEST_SECONDS, USABLE_BLOCKS, Vllm
from tests.vllm.prefix_load import AT_ONCE_MIN, forty, gateway_of, ups_and_downs, watched

pytestmark = pytest.mark.timeout(TEST_SECONDS)
TURNS = 5
RATIO_MAX = 1.15
"""Of the best of kvgate to the best of clients that know what they have in common, and gate themselves."""
CALM_RATIO_MAX = 1.1
"""Of the second best time to the best one: where they differ by more, the machine had other things to do."""
STEPS = "vllm:iteration_tokens_total_count"


@pytest.fixture
def gateway(real: Vllm, new_world: World) -> GatewayProcess:
    return gateway_of(real, new_world, **SLOW_MACHINE)


class Took(NamedTuple):
    seconds: float
    steps: float
    """Of the engine: its own clock, which stands still for nothing else on the machine."""


async def timed(real: Vllm, turn: int, gateway: GatewayProcess | None = None) -> Took:
    before = real.metric(STEPS)
    url, key, blocks_max = (gateway.url, gateway.key, None) if gateway else (real.url, "none", USABLE_BLOCKS)
    load = await forty(url, turn, key=key, blocks_max=blocks_max)
    return Took(load.seconds, real.metric(STEPS) - before)


def ratio(through: list[float], direct: list[float]) -> float:
    return min(through) / min(direct)


def is_calm(seconds: list[float]) -> bool:
    best, second, *_ = sorted(seconds)
    return second <= CALM_RATIO_MAX * best


async def test_forty_that_begin_alike(real: Vllm, gateway: GatewayProcess) -> None:
    async with watched(real, gateway) as seen:
        await forty(gateway.url, 0, key=gateway.key)
    print(f"{seen.running} at once, {seen.used} of {USABLE_BLOCKS} blocks")
    assert seen.running >= AT_ONCE_MIN
    seen.judge()


async def test_forty_that_begin_alike_take_no_longer_than_they_must(
    real: Vllm, gateway: GatewayProcess
) -> None:
    """Those that pass the gateway by come last: their use of the engine is strangers', and shares nothing with anybody
    in the books.  The engine has a core to itself both times, as it has its own machine elsewhere: what a gateway takes
    from the processor of an engine is not what is asked here."""
    with apart(real.process.pid, gateway.process.pid):
        through = [await timed(real, turn, gateway) for turn in range(1, 1 + TURNS)]
        direct = [await timed(real, turn) for turn in range(1 + TURNS, 1 + 2 * TURNS)]
    for name, found in (("kvgate", through), ("direct", direct)):
        print(f"{name}: " + ", ".join(f"{took.seconds:.2f} s and {took.steps:.0f} steps" for took in found))
    assert ratio([took.steps for took in through], [took.steps for took in direct]) <= RATIO_MAX
    seconds = [[took.seconds for took in found] for found in (through, direct)]
    if all(map(is_calm, seconds)):
        assert ratio(*seconds) <= RATIO_MAX


async def test_ups_and_downs(real: Vllm, gateway: GatewayProcess) -> None:
    async with watched(real, gateway) as seen:
        await asyncio.wait_for(ups_and_downs(real, gateway, seed=1), TEST_SECONDS)
    print(f"{seen.running} at once, {seen.used} of {USABLE_BLOCKS} blocks")
    seen.judge()
