"""What engines say moves the limits of a running gateway: strangers take blocks away, prefill alone never does."""

from typing import Any

import pytest

from tests.flow.world import soon_true
from tests.processes import QUICK_STORE, GatewayProcess, World
from tests.wire import Wire, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PATIENCE_SECONDS = 30.0
BLOCKS = 8001
LONG_STREAM = 60_000
"""Tokens that no test waits for."""


def row(gateway: GatewayProcess) -> dict[str, Any]:
    """The replica's; nothing while the store was not read."""
    pools = gateway.state()["fleets"]["demo"]["pools"]
    return next(iter(pools["only"]["replicas"].values())) if pools else {}


def start(world: World, url: str) -> tuple[GatewayProcess, str]:
    config, (key,) = world.config([{"name": "only", "replicas": [url]}], store=QUICK_STORE)
    return world.gateway(config, key), key


async def test_calls_that_pass_the_gateway_by_take_their_blocks_from_the_limit(
    new_world: World,
) -> None:
    mock = new_world.mock("--blocks", str(BLOCKS), "--step-base-ms", "20")
    gateway, _ = start(new_world, mock.url)
    await soon(lambda: row(gateway).get("limit") == BLOCKS - 1, "all are there", PATIENCE_SECONDS)
    stranger = await Wire.open(mock.url)
    await stranger.send(post("", completion(3200, LONG_STREAM, stream=True)))
    lowered = await soon(
        lambda: (now := row(gateway)) and now["limit"] <= BLOCKS - 1 - 200 and now["engine"] and now,
        "they are subtracted",
        PATIENCE_SECONDS,
    )
    shown = lowered["engine"]
    assert shown["strangers"] >= 200
    assert shown["running"] == 1
    assert shown["preemptions"] == 0
    assert shown["swaps"] is None
    await soon(
        lambda: gateway.metric("kvgate_engine_strangers_blocks") >= 200,
        "the metric has them",
        PATIENCE_SECONDS,
    )


async def test_where_an_engine_holds_more_than_it_should_nothing_is_shared_any_more(new_world: World) -> None:
    """It may keep copies of what is charged once: with `--long-prefill-token-threshold` it does."""
    mock = new_world.mock("--blocks", str(BLOCKS), "--step-base-ms", "100")
    gateway, key = start(new_world, mock.url)
    await soon(lambda: row(gateway).get("engine"), "its metrics were read", PATIENCE_SECONDS)
    holder = await Wire.open(gateway.url)
    await holder.send(post(key, completion(3200, 2000, stream=True)))

    async def found() -> int:
        wire = await Wire.open(gateway.url)
        await wire.send(post(key, completion(3200, 1, stream=True)))
        status, headers = await wire.head()
        assert status == 200
        wire.close()
        return int(headers.get("x-kvgate-shared-blocks", 0))

    await soon_true(found, "others share what it holds")
    # The ledger has 325 blocks for it and the others, the engine comes to hold 500 more than the prompt.
    stranger = await Wire.open(mock.url)
    other = completion(8000, LONG_STREAM, stream=True) | {"prompt": [8] * 8000}
    await stranger.send(post("", other))
    doubts = "kvgate_prefix_doubts_total"
    await soon(lambda: gateway.metric(doubts) == 1, "its cache is doubted", PATIENCE_SECONDS)
    assert await found() == 0
    assert gateway.metric(doubts) == 1


async def test_a_prefill_bound_load_lowers_prefill_and_never_blocks(new_world: World) -> None:
    """24 prompts of 8k: the engine computes one at a time, the others wait inside it while blocks are free."""
    mock = new_world.mock(
        "--blocks", str(24 * 520), "--step-prefill-us", "1000", "--max-num-batched-tokens", "2048"
    )
    gateway, key = start(new_world, mock.url)
    before = await soon(lambda: row(gateway), "the store was read", PATIENCE_SECONDS)
    for _ in range(24):
        wire = await Wire.open(gateway.url)
        await wire.send(post(key, completion(8000, 64, stream=True)))
    seen: list[dict[str, Any]] = []

    def lowered() -> bool:
        seen.extend(filter(None, [row(gateway)]))
        return bool(seen and seen[-1]["prefill_tokens_limit"] < 16_384)

    await soon(lowered, "the prefill budget is lowered", PATIENCE_SECONDS)
    assert {state["limit"] for state in seen} == {before["limit"]}
    assert {state["sequences_limit"] for state in seen} == {256}
    assert seen[-1]["engine"]["waiting"] > 0


async def test_data_parallel_ranks_are_replicas_of_their_own(new_world: World) -> None:
    """Each has its own blocks, and a call runs where they are reserved, whichever rank its client asked for."""
    mock = new_world.mock("--blocks", "1001", "--data-parallel-size", "2", "--step-base-ms", "20")
    ranks = [{"url": mock.url, "name": f"rank-{rank}", "data_parallel_rank": rank} for rank in (0, 1)]
    config, (key,) = new_world.config([{"name": "only", "replicas": ranks}], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)

    def rows() -> dict[str, Any]:
        pools = gateway.state()["fleets"]["demo"]["pools"]
        return dict(pools["only"]["replicas"]) if pools else {}

    await soon(
        lambda: [row["limit"] for row in rows().values()] == [1000, 1000], "both are there", PATIENCE_SECONDS
    )
    for _ in range(2):
        wire = await Wire.open(gateway.url)
        request = post(key, completion(1600, 8000, stream=True))
        await wire.send(request.replace(b"host: kvgate\r\n", b"host: kvgate\r\nx-data-parallel-rank: 1\r\n"))
        status, _ = await wire.head()
        assert status == 200

    def running() -> list[int | None]:
        return [(row["engine"] or {}).get("running") for row in rows().values()]

    await soon(lambda: running() == [1, 1], "one runs on each", PATIENCE_SECONDS)
    assert [row["reserved"] for row in rows().values()] == [600, 600]
