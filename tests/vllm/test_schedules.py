"""The mock's scheduler meets the same fate as a real one: preemptions, exact fits, prefix hits, calls that leave."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from tests.processes import Mock
from tests.vllm.answers import exchange
from tests.vllm.asks import TEXT, Ask, text
from tests.vllm.engine import BLOCK_SIZE, MODEL, TEST_SECONDS, USABLE_BLOCKS, Vllm
from tests.vllm.load import IDS, Size, call_of, ids, read, send_all
from tests.wire import Wire, soon

pytestmark = pytest.mark.timeout(TEST_SECONDS)
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
LOOK_SECONDS = 0.02
STORM = [Size(256, 512)] * 40


class Engine(Protocol):
    url: str

    def metric(self, name: str) -> float: ...


@pytest.fixture(params=["vllm", "mock"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue("real" if request.param == "vllm" else "mock")
    return found


async def preemptions(engine: Engine, sizes: list[Size], *, blocks_max: int | None = None) -> float:
    before = engine.metric(PREEMPTIONS)
    load = await send_all(engine.url, sizes, blocks_max=blocks_max)
    await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
    found = engine.metric(PREEMPTIONS) - before
    print(f"{load.calls} calls in {load.seconds:.1f} s, {load.events} events, {found:.0f} preemptions")
    return found


async def test_storm(engine: Engine) -> None:
    assert 30 <= await preemptions(engine, STORM) <= 50


async def test_gated_storm(engine: Engine) -> None:
    assert await preemptions(engine, STORM, blocks_max=USABLE_BLOCKS) == 0


async def test_last_block(engine: Engine) -> None:
    """15 calls side by side end with every block of the pool in use."""
    size = Size(33, 512)
    assert size.blocks * 15 == USABLE_BLOCKS
    assert await preemptions(engine, [size] * 30, blocks_max=USABLE_BLOCKS) == 0


def test_one_token_too_many(engine: Engine) -> None:
    """A token less is room for all, as `test_last_block` shows; with it, each needs one block more in its last step."""
    size = Size(34, 512)
    assert (size.blocks, size.blocks * 15) == (18, 270)
    assert preemptions_together(engine, size, 15) >= 1


def test_one_block_too_many(engine: Engine) -> None:
    """The last block of each is held for the last 32 steps."""
    size = Size(33, 480)
    assert size.blocks * 16 == USABLE_BLOCKS + 1
    assert preemptions_together(engine, size, 16) >= 1


def preemptions_together(engine: Engine, size: Size, count: int) -> float:
    """Of so many prompts in one call, so that they grow in step: calls of their own may come apart from each other."""
    before = engine.metric(PREEMPTIONS)
    prompts = [random.Random(number).choices(IDS, k=size.prompt_tokens) for number in range(count)]
    answer = exchange(engine.url, text("together", size.output_tokens, prompt=prompts))
    assert answer.json()["usage"]["completion_tokens"] == count * size.output_tokens
    return engine.metric(PREEMPTIONS) - before


def prefix_cases() -> list[tuple[str, dict[str, Any]]]:
    """Names and bodies of calls that follow each other."""
    ids = random.Random(5).choices(IDS, k=8 * BLOCK_SIZE)
    other = random.Random(6).choices(IDS, k=8 * BLOCK_SIZE)
    aligned, odd = ids[: 4 * BLOCK_SIZE], ids[: 4 * BLOCK_SIZE + 7]
    return [
        ("new", {"prompt": aligned}),
        ("again, the last token is always computed", {"prompt": aligned}),
        ("a little longer", {"prompt": odd}),
        ("again", {"prompt": odd}),
        ("twice as long", {"prompt": ids}),
        ("the half of it", {"prompt": aligned}),
        ("same head, other tail", {"prompt": aligned + other[:BLOCK_SIZE]}),
        ("other head, same tail", {"prompt": other[:BLOCK_SIZE] + aligned}),
        ("one token less than a block", {"prompt": ids[: BLOCK_SIZE - 1]}),
        ("one block", {"prompt": ids[:BLOCK_SIZE]}),
        ("one block and a token", {"prompt": ids[: BLOCK_SIZE + 1]}),
        ("salted", {"prompt": aligned, "cache_salt": "salt"}),
        ("salted again", {"prompt": aligned, "cache_salt": "salt"}),
        ("other salt", {"prompt": aligned, "cache_salt": "pepper"}),
        ("two choices", {"prompt": odd, "n": 2}),
        ("a known and a new prompt", {"prompt": [odd, other]}),
        ("a new and a known prompt", {"prompt": [other[: -BLOCK_SIZE - 1], odd]}),
        ("log probabilities of its prompt", {"prompt": odd, "prompt_logprobs": 0}),
        ("the same by echo", {"prompt": odd, "echo": True, "logprobs": 0}),
        ("of its answer alone", {"prompt": odd, "logprobs": 0}),
        ("echo without any", {"prompt": odd, "echo": True}),
    ]


SHARED_BLOCKS = 32
SHARED_TOKENS = SHARED_BLOCKS * BLOCK_SIZE
TOGETHER = {2: 3039, 6: 1152, 24: 256}
"""So many calls that begin alike, with outputs such that they fit with one copy of it and do not with two."""


@pytest.mark.parametrize("calls", TOGETHER)
async def test_calls_that_begin_alike_and_come_at_once_hold_one_copy_of_it(
    engine: Engine, calls: int
) -> None:
    """Whoever is admitted in a step finds what another one is to compute in the same step."""
    size = Size(SHARED_TOKENS + BLOCK_SIZE + 1, TOGETHER[calls])
    together = SHARED_BLOCKS + calls * (size.blocks - SHARED_BLOCKS)
    assert together <= USABLE_BLOCKS < together + SHARED_BLOCKS
    before = engine.metric(PREEMPTIONS), engine.metric(PREFIX_HITS)
    async with Peak(engine) as peak:
        await send_all(engine.url, [size] * calls, beginning=ids(100 + calls, SHARED_TOKENS))
    await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
    print(f"{calls} calls: {peak.blocks} blocks seen, {together} at most")
    assert engine.metric(PREEMPTIONS) == before[0]
    assert engine.metric(PREFIX_HITS) - before[1] == (calls - 1) * SHARED_TOKENS
    assert SHARED_BLOCKS < peak.blocks <= together


async def test_a_cache_that_is_reset_under_calls_that_begin_alike(engine: Engine) -> None:
    """Not while blocks are held, unless what runs may be preempted for it: then they share again."""
    size, beginning = Size(SHARED_TOKENS + BLOCK_SIZE + 1, TOGETHER[2]), ids(99, SHARED_TOKENS)
    before = engine.metric(PREEMPTIONS)
    chance = random.Random(99)
    running = [
        asyncio.create_task(read(engine.url, size, call_of(size, chance, beginning=beginning)))
        for _ in range(2)
    ]
    await soon(lambda: engine.metric(RUNNING) == 2, "both run")
    assert reset(engine.url) is False
    assert reset(engine.url, "?reset_running_requests=true") is True
    await asyncio.gather(*running)
    assert engine.metric(PREEMPTIONS) - before == 2
    await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
    assert reset(engine.url) is True
    assert cached_tokens(engine.url, {"prompt": beginning}) == 0


def reset(url: str, query: str = "") -> bool:
    answer = exchange(url, Ask("reset", f"/reset_prefix_cache{query}"))
    assert answer.status == 200, answer.body
    return bool(answer.json()["success"])


class Peak:
    """The most blocks that an engine said to hold, looked at again and again while it is open."""

    def __init__(self, engine: Engine) -> None:
        self.blocks = 0
        self._engine = engine

    async def __aenter__(self) -> "Peak":
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _look(self) -> None:
        while True:
            usage = await asyncio.to_thread(self._engine.metric, KV_USAGE)
            self.blocks = max(self.blocks, round(usage * USABLE_BLOCKS))
            await asyncio.sleep(LOOK_SECONDS)


def cached_tokens(url: str, body: dict[str, Any]) -> int:
    fixed = {"model": MODEL, "max_tokens": 2, "ignore_eos": True}
    answer = exchange(url, Ask("prefix", TEXT, fixed | body))
    assert answer.status == 200, answer.body
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prefix_hits(real: Vllm, mock: Mock) -> None:
    wrong, hits = [], 0
    for name, body in prefix_cases():
        expected, given = cached_tokens(real.url, body), cached_tokens(mock.url, body)
        hits += expected > 0
        if expected != given:
            wrong.append(f"{name}: vllm {expected} | mock {given}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert hits > len(prefix_cases()) / 2


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["fin", "rst"])
async def test_usage_is_back_when_a_call_leaves(engine: Engine, leave: Callable[[Wire], None]) -> None:
    request = call_of(Size(1000, 3000), random.Random(1))
    wire = await Wire.open(engine.url)
    await wire.send(request)
    await wire.head()
    assert await wire.event()
    assert engine.metric(KV_USAGE) > 0
    left = time.monotonic()
    leave(wire)
    await soon(lambda: engine.metric(KV_USAGE) == 0, "all blocks are free")
    print(f"free after {1000 * (time.monotonic() - left):.0f} ms")
