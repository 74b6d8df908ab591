"""Pausing, sleeping and emptying the cache: the routes of vLLM's dev mode, and what calls see meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from tests.processes import Mock
from tests.vllm.answers import differences, exchange, facts
from tests.vllm.asks import Ask
from tests.vllm.engine import MODEL, TEST_SECONDS, Vllm
from tests.wire import Wire, post

pytestmark = pytest.mark.timeout(TEST_SECONDS)
SILENT_SECONDS = 1.0
COUNTED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def look(path: str) -> Ask:
    return Ask(f"GET {path}", path, method="GET")


def do(path: str) -> Ask:
    return Ask(f"POST {path}", path)


STEPS = [
    *(look("/is_paused"), look("/is_sleeping"), do("/reset_prefix_cache")),
    *(do("/pause?mode=keep"), look("/is_paused"), look("/health"), do("/pause?mode=keep"), do("/resume")),
    *(look("/is_paused"), do("/resume"), do("/pause?mode=abort"), do("/resume")),
    *(do("/pause?mode=wait"), do("/resume"), do("/pause"), do("/resume"), do("/pause?mode=nope")),
    *(
        do("/sleep?level=1&mode=keep"),
        look("/is_sleeping"),
        look("/health"),
        do("/wake_up"),
        look("/is_sleeping"),
    ),
    *(do("/sleep?level=0"), look("/is_sleeping"), look("/is_paused"), do("/wake_up"), do("/wake_up")),
    *(do("/sleep?level=nope"), look("/get_world_size"), look("/pause"), do("/is_paused")),
]


def test_same_answers(real: Vllm, mock: Mock) -> None:
    found = []
    for number, ask in enumerate(STEPS):
        expected, given = (facts(exchange(engine.url, ask), exact=True) for engine in (real, mock))
        found += differences(f"{number}. {ask.name}", expected, given)
    assert not found, "\n" + "\n".join(found)


@pytest.fixture(params=["vllm", "mock"])
def engine(request: pytest.FixtureRequest, real: Vllm, mock: Mock) -> Vllm | Mock:
    return real if request.param == "vllm" else mock


@pytest.fixture
async def hang_up() -> AsyncIterator[None]:
    yield
    Wire.hang_up_all()


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize(
    ("rest", "work", "told"),
    [("/pause?mode=keep", "/resume", "/is_paused"), ("/sleep?level=1&mode=keep", "/wake_up", "/is_sleeping")],
    ids=["paused", "asleep"],
)
async def test_calls_hang_unseen(engine: Vllm | Mock, rest: str, work: str, told: str) -> None:
    """Calls to an engine at rest get no byte but the headers of a stream, are counted nowhere, and go on afterwards."""
    assert exchange(engine.url, do(rest)).status == 200
    try:
        stream, whole = await begin(engine, stream=True), await begin(engine)
        await stream.head()
        await asyncio.gather(hear_nothing(stream.event()), hear_nothing(whole.head()))
        assert [engine.metric(name) for name in COUNTED] == [0, 0, 0]
        assert True in exchange(engine.url, look(told)).json().values()
    finally:
        exchange(engine.url, do(work))
    assert len(await stream.events()) == 4
    assert (await whole.answer()).status == 200


async def begin(engine: Vllm | Mock, *, stream: bool = False) -> Wire:
    wire = await Wire.open(engine.url)
    body = {"model": MODEL, "prompt": [20, 21, 22], "max_tokens": 3, "ignore_eos": True, "stream": stream}
    await wire.send(post("none", body))
    return wire


async def hear_nothing(reading: Awaitable[object]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SILENT_SECONDS):
            await reading
