"""What calls have in common is charged once: more run at once, and none is preempted, however they come and go.

The same against a real engine: `tests/vllm/test_prefixes.py`.
"""

from collections.abc import Iterator

import pytest

from tests.processes import GatewayProcess, Mock, World, world
from tests.vllm.engine import MOCK_OPTIONS
from tests.vllm.prefix_load import AT_ONCE_MIN, forty, gateway_of, ups_and_downs, watched

ALONE_MAX = 6
"""Of the forty that fit at once where each is charged in full."""


@pytest.fixture
def here() -> Iterator[World]:
    with world() as made:
        yield made


def begin(here: World, share: str = "auto", mode: str = "guaranteed") -> tuple[Mock, GatewayProcess]:
    engine = here.mock(
        *MOCK_OPTIONS, "--step-base-ms", "2", "--step-prefill-us", "2", "--step-running-us", "10"
    )
    return engine, gateway_of(engine, here, share, mode)


async def test_forty_that_begin_alike(here: World) -> None:
    engine, gateway = begin(here)
    async with watched(engine, gateway) as seen:
        load = await forty(gateway.url, 1, key=gateway.key)
    print(f"{seen.running} at once, {seen.used} blocks, {load.seconds:.2f} s")
    assert seen.running >= AT_ONCE_MIN
    seen.judge()


async def test_forty_that_begin_alike_and_grow(here: World) -> None:
    """Nothing is learned of their lengths yet, so each is foreseen to go to its limit, as they all do."""
    engine, gateway = begin(here, mode="elastic")
    async with watched(engine, gateway) as seen:
        load = await forty(gateway.url, 1, key=gateway.key)
    print(f"{seen.running} at once, {seen.used} blocks, {load.seconds:.2f} s")
    assert seen.running >= AT_ONCE_MIN
    seen.judge()


async def test_forty_that_are_charged_in_full(here: World) -> None:
    engine, gateway = begin(here, "off")
    async with watched(engine, gateway) as seen:
        await forty(gateway.url, 1, key=gateway.key)
    assert seen.running <= ALONE_MAX
    seen.judge()


async def test_ups_and_downs(here: World) -> None:
    engine, gateway = begin(here)
    async with watched(engine, gateway) as seen:
        await ups_and_downs(engine, gateway, seed=1)
    print(f"{seen.running} at once, {seen.used} blocks")
    seen.judge()
