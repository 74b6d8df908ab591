"""Calls that begin alike, through a gateway whose engine has just room for them if that is held once: what became of
them, and what the books had beside what the engine held."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.processes import GatewayProcess, World
from tests.vllm.beside import Look, Watch, shortfalls
from tests.vllm.engine import BLOCK_SIZE, MODEL, USABLE_BLOCKS
from tests.vllm.load import Load, Size, call_of, ids, read, send_all
from tests.wire import Wire, ask, post, soon

NAME = "engine"
SHARED_BLOCKS = 32
SHARED_TOKENS = SHARED_BLOCKS * BLOCK_SIZE
SIZE = Size(SHARED_TOKENS + BLOCK_SIZE, 256)
"""Of each of the forty calls: 9 blocks of its own, so that 24 of them fit beside what all begin with, and 6 alone."""
CALLS = 40
PREEMPTIONS, KV_USAGE = "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc"
AT_ONCE_MIN = 20
ROUNDS = 4
LOOK_SECONDS = 0.02
WORK_SECONDS = 120.0
"""For dozens of calls on a machine that is busy."""


class Engine(Protocol):
    url: str

    def metric(self, name: str) -> float: ...


@dataclass
class Seen:
    """Of one engine behind one gateway."""

    looks: list[Look] = field(default_factory=list)
    preemptions: float = 0.0

    @property
    def running(self) -> int:
        """Sequences, at most."""
        return max(look.sights[NAME].running for look in self.looks)

    @property
    def used(self) -> int:
        """Blocks of the engine, at most."""
        return max(look.sights[NAME].used for look in self.looks)

    def judge(self) -> None:
        """Nothing was preempted, and the ledger was never below the engine."""
        assert self.preemptions == 0
        assert not [one for one in shortfalls(self.looks, []) if one.is_long]


def gateway_of(
    engine: Engine, world: World, share: str = "auto", mode: str = "guaranteed", **settings: Any
) -> GatewayProcess:
    """One process with one pool: the engine, whose blocks may be given away to the last one."""
    pools = [{"name": "only", "mode": mode, "replicas": [{"name": NAME, "url": engine.url}]}]
    fleet = {"model": MODEL, "safe_fraction": 1.0, "share_prefixes": share}
    config, (key,) = world.config(pools, fleet=fleet, queue={"seconds_max": 600}, **settings)
    return world.gateway(config, key)


@asynccontextmanager
async def watched(engine: Engine, gateway: GatewayProcess) -> AsyncIterator[Seen]:
    """While it is open; at its end all is given back."""
    seen, before = Seen(), engine.metric(PREEMPTIONS)
    engines: Any = {NAME: engine}
    async with Watch(gateway, engines, USABLE_BLOCKS, LOOK_SECONDS) as watch:
        yield seen
    await soon(gateway.is_quiet, "nothing is held")
    await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
    seen.looks, seen.preemptions = watch.looks, engine.metric(PREEMPTIONS) - before


async def forty(url: str, seed: int, *, key: str = "none", blocks_max: int | None = None) -> Load:
    """Calls that begin alike, and like none of another seed."""
    beginning = ids(1000 + seed, SHARED_TOKENS)
    return await send_all(
        url, [SIZE] * CALLS, key=key, blocks_max=blocks_max, beginning=beginning, seed=2000 + seed
    )


async def ups_and_downs(engine: Engine, gateway: GatewayProcess, seed: int) -> None:
    """Round by round: many at once, who came first leaves while others go on, strangers among them, and an engine whose
    cache is emptied in between.  Each waits for its place, so there is never less to do than there is room."""
    chance = random.Random(seed)
    for number in range(ROUNDS):
        beginning = ids(3000 + seed * ROUNDS + number % 2, SHARED_TOKENS)
        first = await _begun(gateway, Size(SIZE.prompt_tokens, 512), chance, beginning)
        sizes = [
            Size(SIZE.prompt_tokens + chance.randrange(1, 200), chance.randrange(16, 320)) for _ in range(24)
        ]
        others = [asyncio.create_task(_call(gateway, size, chance, beginning)) for size in sizes]
        strangers = [asyncio.create_task(_call(gateway, Size(200, 200), chance, ())) for _ in range(12)]
        await _reset(engine)  # without effect while one of them runs; this process may have stood still
        await soon(_half_done(others), "half of them are through", WORK_SECONDS)
        (first.close if number % 2 else first.reset)()
        await asyncio.gather(*others, *strangers)
        await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
        assert await _reset(engine) is True


def _half_done(tasks: list["asyncio.Task[int]"]) -> Callable[[], bool]:
    return lambda: 2 * sum(task.done() for task in tasks) >= len(tasks)


async def _begun(gateway: GatewayProcess, size: Size, chance: random.Random, beginning: list[int]) -> Wire:
    """A call whose first token has come."""
    wire = await Wire.open(gateway.url)
    await wire.send(call_of(size, chance, gateway.key, beginning))
    status, _ = await wire.head()
    assert status == 200, await wire.rest()
    assert await wire.event()
    return wire


async def _call(gateway: GatewayProcess, size: Size, chance: random.Random, beginning: Any) -> int:
    return await read(gateway.url, size, call_of(size, chance, gateway.key, beginning))


async def _reset(engine: Engine) -> bool:
    answer = await ask(engine.url, post("none", {}, path="/reset_prefix_cache"))
    assert answer.status == 200, answer.body
    return bool(answer.json()["success"])
