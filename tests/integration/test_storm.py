"""A storm of calls of mixed size over a small engine: nothing is preempted, and not because calls are refused.

The engine here computes prompts at 5,000 tokens/s and pays for every running sequence, so its work is what costs, and
work done twice is lost.  (Where steps cost the same however many sequences run, preempting pays in throughput and costs
only silences.)
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.processes import ADMIN_TOKEN, QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Wire, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

USABLE, BLOCK_SIZE = 255, 32
COSTS = ("--step-base-ms", "1", "--step-prefill-us", "200", "--step-running-us", "200", "--speed", "2")
ENGINE = ("--blocks", str(USABLE + 1), "--block-size", str(BLOCK_SIZE), "--max-model-len", "4096", *COSTS)
KEYS = 4
CALLS = 200
UTILISATION = 0.85
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Size:
    prompt_tokens: int
    max_tokens: int
    stream: bool
    key: int

    @property
    def blocks(self) -> int:
        return blocks_of(self.prompt_tokens, self.max_tokens, BLOCK_SIZE)


def mixed_sizes(count: int, seed: int) -> list[Size]:
    chance = random.Random(seed)
    return [
        Size(chance.randint(10, 400), chance.randint(16, 256), chance.random() < 0.2, number % KEYS)
        for number in range(count)
    ]


@dataclass
class Storm:
    """What became of the calls: seconds from the start to each whole answer."""

    urls: Sequence[str]
    keys: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    finished: list[tuple[float, Size]] = field(default_factory=list)
    pools: list[tuple[str, Size]] = field(default_factory=list)

    async def blow(self, sizes: Sequence[Size]) -> None:
        async with asyncio.TaskGroup() as calls:
            for number, size in enumerate(sizes):
                calls.create_task(self._call(self.urls[number % len(self.urls)], size, number))

    async def _call(self, url: str, size: Size, number: int) -> None:
        wire = await Wire.open(url)
        try:
            body = completion(size.prompt_tokens, size.max_tokens, size.stream)
            body["prompt"][0] = 1000 + number  # no two prompts share a block in the engine's prefix cache
            await wire.send(post(self.keys[size.key], body))
            status, headers = await wire.head()
            assert status == 200, (status, headers)
            await self._read(wire, size)
        finally:
            wire.reset()
        self.finished.append((time.monotonic() - self.began, size))
        self.pools.append((headers.get("x-kvgate-pool", ""), size))

    async def _read(self, wire: Wire, size: Size) -> None:
        if size.stream:
            events = await wire.events()
            assert events[-1] == b"data: [DONE]"
            assert sum(b'"text"' in event for event in events) == size.max_tokens
            return
        answer = await wire.rest()
        assert answer["usage"] == answer["usage"] | {
            "prompt_tokens": size.prompt_tokens,
            "completion_tokens": size.max_tokens,
        }

    @property
    def seconds(self) -> float:
        return max(at for at, _ in self.finished)

    def finished_by(self, seconds: float) -> int:
        return sum(at <= seconds for at, _ in self.finished)

    def blocks_by(self, seconds: float) -> Counter[int]:
        """Of each key, what its finished calls reserved: its share is in blocks, and the sizes are not equal."""
        blocks = Counter(dict.fromkeys(range(KEYS), 0))
        for at, size in self.finished:
            blocks[size.key] += size.blocks if at <= seconds else 0
        return blocks


class Watch:
    """Reserved blocks of each pool over what its engines have, at the moments when calls of its lane waited."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {}

    def see(self, fleet: dict[str, Any]) -> None:
        for lane, classes in fleet["queued"].items():
            if sum(classes.values()):
                replicas = fleet["pools"][lane]["replicas"].values()
                share = sum(r["reserved"] for r in replicas) / (USABLE * len(replicas))
                self.shares.setdefault(lane, []).append(share)

    def average(self, pool: str) -> float:
        """Fails where the storm was too short for an average."""
        assert len(self.shares[pool]) >= 20
        return sum(self.shares[pool]) / len(self.shares[pool])


@asynccontextmanager
async def watched(gateway: GatewayProcess) -> AsyncIterator[Watch]:
    watch = Watch()
    task = asyncio.create_task(_sample(gateway, watch))
    try:
        yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _sample(gateway: GatewayProcess, watch: Watch) -> None:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False) as client:
        while True:
            state = (await client.get("/admin/v1/state")).raise_for_status().json()
            watch.see(state["fleets"]["demo"])
            await asyncio.sleep(SAMPLE_SECONDS)


def preemptions(mock: Mock) -> float:
    return mock.metric("vllm:num_preemptions_total")


def start(world: World, pools: list[dict[str, Any]]) -> tuple[list[GatewayProcess], list[str]]:
    """Two processes on one store, and the keys of four callers."""
    config, keys = world.config(
        pools, *({} for _ in range(KEYS)), queue={"seconds_max": 120}, store=QUICK_STORE
    )
    gateways = [world.gateway(config, keys[0], wait=False) for _ in range(2)]
    return [gateway.wait_ready() for gateway in gateways], keys


async def test_storm_over_one_engine(new_world: World) -> None:
    """Everybody is served, faster than without the gateway."""
    behind, bare = new_world.mock(*ENGINE), new_world.mock(*ENGINE)
    gateways, keys = start(new_world, [{"name": "only", "replicas": [behind.url]}])
    sizes = mixed_sizes(CALLS, seed=7)
    storm = Storm([gateway.url for gateway in gateways], keys)
    async with watched(gateways[0]) as watch:
        await storm.blow(sizes)
    assert len(storm.finished) == CALLS
    assert preemptions(behind) == 0
    assert watch.average("only") >= UTILISATION
    half = storm.seconds / 2
    blocks = storm.blocks_by(half)
    assert min(blocks.values()) >= blocks.total() / KEYS / 2, "no key has to wait for others"
    await soon(lambda: all(gateway.is_quiet() for gateway in gateways), "nothing is held")

    without = Storm([bare.url], ["none"] * KEYS)
    with suppress(TimeoutError):
        async with asyncio.timeout(storm.seconds):
            await without.blow(sizes)
    assert preemptions(bare) > 0
    for moment in (half, storm.seconds):
        assert storm.finished_by(moment) >= without.finished_by(moment)


async def test_exact_fit(new_world: World) -> None:
    """Of equal calls that grow side by side as many run as fill the engine to its last block.

    One token less charged would let 63 run instead of 51, and the engine preempt.
    """
    mock = new_world.mock(*ENGINE)
    gateways, keys = start(new_world, [{"name": "only", "replicas": [mock.url]}])
    size = Size(prompt_tokens=100, max_tokens=30, stream=False, key=0)
    assert (size.blocks, (100 + 30 - 1) % BLOCK_SIZE, USABLE % size.blocks) == (5, 1, 0)
    storm = Storm([gateways[0].url], keys)
    async with watched(gateways[0]) as watch:
        await storm.blow([size] * 80)
    assert preemptions(mock) == 0
    assert max(watch.shares["only"]) == 1.0


async def test_storm_over_two_pools(new_world: World) -> None:
    """Each call runs in the pool of its length, and both pools are full while calls wait for them."""
    mocks = {"short": new_world.mock(*ENGINE), "long": new_world.mock(*ENGINE)}
    pools = [
        {"name": "short", "max_prompt_tokens": 200, "replicas": [mocks["short"].url]},
        {"name": "long", "replicas": [mocks["long"].url]},
    ]
    gateways, keys = start(new_world, pools)
    storm = Storm([gateway.url for gateway in gateways], keys)
    async with watched(gateways[0]) as watch:
        await storm.blow(mixed_sizes(CALLS, seed=8))
    assert len(storm.finished) == CALLS
    assert all(pool == ("short" if size.prompt_tokens <= 200 else "long") for pool, size in storm.pools)
    for pool, mock in mocks.items():
        assert preemptions(mock) == 0
        assert watch.average(pool) >= UTILISATION
    await soon(lambda: all(gateway.is_quiet() for gateway in gateways), "nothing is held")
