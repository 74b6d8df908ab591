"""QF-02: a call that is larger than every backend is refused at once, whatever the cluster has in sum.

Four backends of 4,000 blocks: a call of 5,000 would fit into the 16,000 of them together, and into no engine.  A fifth
one of 6,000 makes it fit, as long as that one is up; while it is down the client is asked to come back.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.integration.watched_books import ADMIT, watched_books
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World, sum_of
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

BACKENDS, BACKEND_BLOCKS, LARGE_BLOCKS = 4, 4000, 6000
MAX_MODEL_LEN = 262_144
TOO_LARGE = 5000
SMALL, SMALL_CALLS = (16, 145), 100
REFUSALS = 20
QUICK_SECONDS = 0.005
LOOK_SECONDS = 0.05


def backend(world: World, blocks: int, *options: str) -> Mock:
    context = ("--max-model-len", str(MAX_MODEL_LEN), "--step-prefill-us", "0")
    return world.mock("--blocks", str(blocks + 1), *context, *options)


def backends(world: World) -> list[Mock]:
    return [backend(world, BACKEND_BLOCKS) for _ in range(BACKENDS)]


def serve(world: World, mocks: Sequence[Mock], wait: bool = True) -> GatewayProcess:
    pools = [{"name": "only", "replicas": [mock.url for mock in mocks]}]
    config, (key,) = world.config(pools, store=QUICK_STORE)
    return world.gateway(config, key, wait=wait)


def tokens_of(blocks: int) -> int:
    """Prompt and output of a call that needs so many exactly: the last token's KV is never written."""
    return 16 * blocks + 1


async def call(gateway: GatewayProcess, tokens: int, long_prompt: bool = False) -> Answer:
    """Most of its tokens are its output limit, which the engine does not use, or its prompt."""
    sizes = (tokens - 16, 16) if long_prompt else (16, tokens - 16)
    return await ask(gateway.url, post(gateway.key, completion(*sizes, output_tokens=2)))


def expect_hopeless(answer: Answer) -> None:
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def expect_come_back(answer: Answer) -> None:
    assert (answer.status, answer.code) == (503, "no_backend")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers.get("x-should-retry") != "false"


async def share_of_quick_refusals(gateway: GatewayProcess, code: str) -> float:
    """From the last byte of the body to the last one of the answer."""
    page = await asyncio.to_thread(gateway.metrics)
    lines = [line for line in page.splitlines() if f'reason="{code}"' in line]
    quick = "\n".join(line for line in lines if f'le="{QUICK_SECONDS}"' in line)
    return sum_of("kvgate_refusal_seconds_bucket", quick) / sum_of(
        "kvgate_refusal_seconds_count", "\n".join(lines)
    )


@pytest.mark.parametrize("long_prompt", [True, False], ids=["long-prompt", "long-answer"])
async def test_larger_than_every_backend(new_world: World, long_prompt: bool) -> None:
    """5,000 blocks, and one token more than 4,000 have; small calls run meanwhile, and none of them waits."""
    mocks = backends(new_world)
    gateway = serve(new_world, mocks)
    async with watched_books(str(new_world.store.socket), LOOK_SECONDS) as books:
        sizes = [tokens_of(TOO_LARGE), tokens_of(BACKEND_BLOCKS) + 1]
        for tokens in sizes * REFUSALS:
            expect_hopeless(await call(gateway, tokens, long_prompt))
        assert books.carried_out(ADMIT, "") == 0, "the store was not asked, so nothing was queued"
        large = [call(gateway, tokens, long_prompt) for tokens in sizes * REFUSALS]
        request = post(gateway.key, completion(*SMALL, output_tokens=2))
        small = [ask(gateway.url, request) for _ in range(SMALL_CALLS)]
        refused, answers = await asyncio.gather(asyncio.gather(*large), asyncio.gather(*small))
    for answer in refused:
        expect_hopeless(answer)
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-kvgate-queue-ms"] for answer in answers} == {"0"}
    assert sum(mock.log()["received"] for mock in mocks) == SMALL_CALLS
    assert await share_of_quick_refusals(gateway, "context_length_exceeded") > 0.5, (
        "a busy machine holds some up"
    )


async def test_as_large_as_a_backend(new_world: World) -> None:
    """It runs at once where an engine is idle, and waits where all are busy, until one is idle again."""
    assert blocks_of(16, tokens_of(BACKEND_BLOCKS) - 16) == BACKEND_BLOCKS
    mocks = backends(new_world)
    gateway = serve(new_world, mocks)
    answer = await call(gateway, tokens_of(BACKEND_BLOCKS))
    assert (answer.status, answer.headers["x-kvgate-queue-ms"]) == (200, "0")
    assert answer.headers["x-kvgate-reserved-blocks"] == str(BACKEND_BLOCKS)
    await soon(gateway.is_quiet, "nothing is held")
    held = [await Wire.open(gateway.url) for _ in mocks]
    for wire in held:
        await wire.send(post(gateway.key, completion(*SMALL, stream=True, fail="hang:1")))
        assert (await wire.head())[0] == 200
    assert [mock.log()["started"] for mock in mocks].count(0) == 0, "each is busy"
    waiting = asyncio.create_task(call(gateway, tokens_of(BACKEND_BLOCKS)))
    await soon(lambda: gateway.state()["queue"] == 1, "it waits")
    held[0].reset()
    answer = await waiting
    assert answer.status == 200
    assert answer.headers["x-kvgate-reserved-blocks"] == str(BACKEND_BLOCKS)
    assert answer.headers["x-kvgate-queue-ms"] != "0"
    Wire.hang_up_all()


def states(gateway: GatewayProcess) -> list[str]:
    replicas = gateway.state()["fleets"]["demo"]["pools"]["only"]["replicas"]
    return [row["state"] for row in replicas.values()]


@asynccontextmanager
async def fifth_killed(world: World) -> AsyncIterator[GatewayProcess]:
    """The moment after; before it the call of 5,000 blocks fitted."""
    large = backend(world, LARGE_BLOCKS)
    gateway = serve(world, [*backends(world), large])
    answer = await call(gateway, tokens_of(TOO_LARGE))
    assert (answer.status, answer.headers["x-kvgate-reserved-blocks"]) == (200, str(TOO_LARGE))
    expect_hopeless(await call(gateway, tokens_of(LARGE_BLOCKS) + 1))
    large.process.kill()
    large.process.wait()
    yield gateway


async def test_the_only_backend_that_is_large_enough_is_down(new_world: World) -> None:
    """The client may come back; what not even that one would hold is hopeless as before."""
    async with fifth_killed(new_world) as gateway:
        await soon(lambda: states(gateway).count("up") == BACKENDS, "it is known to be down")
        for long_prompt in (True, False):
            expect_come_back(await call(gateway, tokens_of(TOO_LARGE), long_prompt))
        assert (await call(gateway, sum(SMALL))).status == 200
        expect_hopeless(await call(gateway, tokens_of(LARGE_BLOCKS) + 1))


async def test_a_call_meets_the_end_of_the_only_backend_that_is_large_enough(new_world: World) -> None:
    """It is told so: no other engine could ever hold it, so there is nothing to wait for."""
    async with fifth_killed(new_world) as gateway, asyncio.timeout(HANG_SECONDS):
        answer = await call(gateway, tokens_of(TOO_LARGE))
        assert (answer.status, answer.code) in {(502, "upstream_error"), (503, "no_backend")}


async def test_it_is_down_from_the_start(new_world: World) -> None:
    """Nothing is known of it, so nothing is refused for its size."""
    large = backend(new_world, LARGE_BLOCKS)
    large.process.kill()
    large.process.wait()
    gateway = serve(new_world, [*backends(new_world), large])
    expect_come_back(await call(gateway, tokens_of(TOO_LARGE)))
    assert (await call(gateway, sum(SMALL))).status == 200
