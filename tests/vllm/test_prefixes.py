"""What calls have in common is charged once, and a real engine agrees: forty of them as good as at once, and whatever
order they come and go in."""

import asyncio

import pytest

from tests.processes import GatewayProcess, World
from tests.vllm.engine import SLOW_MACHINE, TEST_SECONDS, USABLE_BLOCKS, Vllm
from tests.vllm.prefix_load import AT_ONCE_MIN, forty, gateway_of, ups_and_downs, watched

pytestmark = pytest.mark.timeout(TEST_SECONDS)
TURNS = 3
SECONDS_RATIO_MAX = 1.15
"""Of the best time of kvgate to the best one of clients that know what they have in common, and gate themselves."""


@pytest.fixture
def gateway(real: Vllm, new_world: World) -> GatewayProcess:
    return gateway_of(real, new_world, **SLOW_MACHINE)


async def test_forty_that_begin_alike(real: Vllm, gateway: GatewayProcess) -> None:
    """They pass the gateway in turns with those that pass it by: what those hold is strangers' use, which lowers the
    limit for half a minute."""
    direct, through = [], []
    async with watched(real, gateway) as seen:
        for turn in range(TURNS):
            through.append((await forty(gateway.url, turn, key=gateway.key)).seconds)
    for turn in range(TURNS, 2 * TURNS):
        direct.append((await forty(real.url, turn, blocks_max=USABLE_BLOCKS)).seconds)
    print(
        f"{seen.running} at once, {seen.used} of {USABLE_BLOCKS} blocks; {min(through):.2f} s, best {min(direct):.2f} s"
    )
    assert seen.running >= AT_ONCE_MIN
    seen.judge()
    assert min(through) <= SECONDS_RATIO_MAX * min(direct)


async def test_ups_and_downs(real: Vllm, gateway: GatewayProcess) -> None:
    async with watched(real, gateway) as seen:
        await asyncio.wait_for(ups_and_downs(real, gateway, seed=1), TEST_SECONDS)
    print(f"{seen.running} at once, {seen.used} of {USABLE_BLOCKS} blocks")
    seen.judge()
