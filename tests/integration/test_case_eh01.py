"""EH-01: who is refused for a time hears when to come back, and the official clients do so.

37.2 s and 9 h are made by the size of a quota: a running call has emptied its bucket, and the refused one needs what
that gives back in this time.  No test sleeps so long: the official client notes what it would sleep, and what the
client waits for comes about meanwhile.  Anthropic's client asks the same route: its retries do not depend on which.
"""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from tests.processes import QUICK_STORE, GatewayProcess, World, wait_until, world
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CLIENTS = {"openai": openai.OpenAI, "anthropic": anthropic.Anthropic}
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 100
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
JITTER_MAX = 1.25
"""A capacity refusal's time is spread by up to a quarter."""
SETTLING_SECONDS = 1.0
"""A drain is measured over this time at least."""
FEW_SECONDS = 10
SERVED, DEPTH_MAX = 5, 4
MINUTE, PART_OF_MINUTE = 1000, 620
MINUTE_SECONDS = 37.2
DAY, PART_OF_DAY = 2400, 900
DAY_SECONDS = 9 * 3600
NO_QUEUE = {"depth_max": 0}


def body(output_tokens: int = OUTPUT_TOKENS, **script: Any) -> dict[str, Any]:
    return completion(PROMPT_TOKENS, output_tokens, **script)


def retry_seconds(answer: Answer, status: int, code: str, soon: bool = True) -> float:
    """What a refusal for a time tells: whole seconds, at least one, and never less than its milliseconds.

    Where that is not soon, clients are told not to wait for it.
    """
    assert (answer.status, answer.code) == (status, code)
    seconds, milliseconds = answer.headers["retry-after"], answer.headers["retry-after-ms"]
    assert seconds.isdecimal()
    assert milliseconds.isdecimal()
    assert int(seconds) == math.ceil(int(milliseconds) / 1000) >= 1
    assert answer.headers.get("x-should-retry") == (None if soon else "false")
    return int(milliseconds) / 1000


class Official:
    """The official clients; instead of sleeping they note for how long, and do `instead`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        self.instead: Callable[[], object] = _nothing
        clock = SimpleNamespace(**vars(time) | {"sleep": self._sleep})
        for package in CLIENTS:
            monkeypatch.setattr(f"{package}._base_client.time", clock)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.instead()

    async def ask(
        self, gateway: GatewayProcess, which: str, request: dict[str, Any], key: str = ""
    ) -> object:
        """The answer.  Raises what the client raises."""
        client = CLIENTS[which](base_url=gateway.url, api_key=key or gateway.key, max_retries=2)
        return await asyncio.to_thread(self._ask, client, request)

    def _ask(self, client: openai.OpenAI | anthropic.Anthropic, request: dict[str, Any]) -> object:
        with client as made:
            return made.post("/v1/completions", body=request, cast_to=object)

    async def come_back(
        self, gateway: GatewayProcess, which: str, request: dict[str, Any], mend: Callable[[], object]
    ) -> float:
        """It sleeps once, `mend` makes room meanwhile, and it is served; for how long it would have slept."""
        loop = asyncio.get_running_loop()

        def mended() -> None:
            loop.call_soon_threadsafe(mend)
            wait_until(lambda: gateway.is_ready() and gateway.is_quiet(), "there is room")

        self.instead = mended
        answer = await self.ask(gateway, which, request)
        assert isinstance(answer, dict)
        assert answer["choices"]
        (slept,) = self.slept
        return slept


def _nothing() -> None:
    """What a client that must not sleep does instead."""


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Official:
    return Official(monkeypatch)


def serve(
    here: World, places: int = 100, limits: dict[str, float] | None = None, **settings: Any
) -> GatewayProcess:
    mock = here.mock("--max-num-seqs", str(places), "--step-base-ms", "1", "--blocks", "8001")
    replica = {"url": mock.url, "max_num_seqs": places}
    pools = [{"name": "only", "replicas": [replica]}]
    store = QUICK_STORE | settings.pop("store", {})
    config, (key,) = here.config(pools, {"limits": limits or {}}, store=store, **settings)
    return here.gateway(config, key)


async def hold(gateway: GatewayProcess, output_tokens: int = OUTPUT_TOKENS) -> Wire:
    """A stream that runs until its client leaves."""
    wire = await Wire.open(gateway.url)
    request = body(output_tokens, fail="hang:1") | {"stream": True}
    await wire.send(post(gateway.key, request))
    assert (await wire.head())[0] == 200
    return wire


def refused(gateway: GatewayProcess, output_tokens: int = OUTPUT_TOKENS) -> Any:
    return ask(gateway.url, post(gateway.key, body(output_tokens)))


# -- the fleet is full -----------------------------------------------------------------------------------------------


async def drain(gateway: GatewayProcess, call_seconds: float) -> float:
    """Serve some calls one after the other; how long one takes."""
    request = post(gateway.key, body() | {"mock": {"output_tokens": 1, "hold_seconds": call_seconds}})
    began = time.monotonic()
    for _ in range(SERVED):
        answer = await ask(gateway.url, request)
        assert answer.status == 200
    return (time.monotonic() - began) / SERVED


async def fill(gateway: GatewayProcess, waiting: int) -> list[Wire]:
    """One runs, the others wait behind it."""
    wires = [await hold(gateway)]
    for _ in range(waiting):
        wires.append(await Wire.open(gateway.url))
        await wires[-1].send(post(gateway.key, body()))
    await soon(lambda: gateway.state()["queue"] == waiting, "they wait")
    return wires


def leave(wires: list[Wire]) -> None:
    for wire in wires:
        wire.reset()


@pytest.mark.parametrize(
    ("call_seconds", "status", "which"), [(0.1, 429, "openai"), (0.8, 503, "openai"), (0.8, 429, "anthropic")]
)
async def test_a_full_queue(
    new_world: World, official: Official, call_seconds: float, status: int, which: str
) -> None:
    """The time is what the queue takes to drain, as measured; the client sleeps that, a quarter more at most."""
    queue = {"depth_max": DEPTH_MAX, "key_share": 1}
    gateway = serve(new_world, places=1, queue=queue, answers={"overload_status": status})
    measured = await drain(gateway, call_seconds)
    wires = await fill(gateway, DEPTH_MAX)
    told = retry_seconds(await refused(gateway), status, "queue_full")
    estimate = (DEPTH_MAX + 2) * max(measured, SETTLING_SECONDS / SERVED)
    assert 0.5 * estimate < told < 1.5 * JITTER_MAX * estimate
    slept = await official.come_back(gateway, which, body(), lambda: leave(wires))
    assert told / JITTER_MAX <= slept <= FEW_SECONDS


@pytest.mark.parametrize("which", CLIENTS)
async def test_a_wait_in_vain(new_world: World, official: Official, which: str) -> None:
    gateway = serve(new_world, places=1, queue={"seconds_max": 1})
    wire = await hold(gateway)
    told = retry_seconds(await refused(gateway), 429, "queue_timeout")
    assert told <= FEW_SECONDS
    slept = await official.come_back(gateway, which, body(), wire.reset)
    assert 1 <= slept <= FEW_SECONDS


async def test_no_room_and_no_queue(new_world: World) -> None:
    """Those who are refused one after the other are not all called back at the same time."""
    gateway = serve(new_world, places=1, queue=NO_QUEUE)
    measured = await drain(gateway, 0.5)
    await hold(gateway)
    told = [retry_seconds(await refused(gateway), 429, "capacity_exceeded") for _ in range(8)]
    assert told[-1] >= told[0] + 2 * measured
    assert told[-1] <= 1.5 * JITTER_MAX * (len(told) + 1) * measured
    Wire.hang_up_all()


# -- the key's own limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", CLIENTS)
async def test_calls_at_once(new_world: World, official: Official, which: str) -> None:
    gateway = serve(new_world, limits={"requests_max": 1}, queue=NO_QUEUE)
    wire = await hold(gateway)
    assert retry_seconds(await refused(gateway), 429, "quota_exceeded") <= FEW_SECONDS
    assert 0 < await official.come_back(gateway, which, body(), wire.reset) <= FEW_SECONDS


@pytest.mark.parametrize("which", CLIENTS)
async def test_tokens_per_minute(new_world: World, official: Official, which: str) -> None:
    """The true time, to the millisecond: 37.2 s less what went by since the bucket was emptied."""
    gateway = serve(new_world, limits={"output_tokens_per_minute": MINUTE})
    emptied = time.monotonic()
    wire = await hold(gateway, MINUTE)
    answer = await refused(gateway, PART_OF_MINUTE)
    gone_by = time.monotonic() - emptied
    told = retry_seconds(answer, 429, "quota_exceeded")
    assert MINUTE_SECONDS - gone_by <= told <= MINUTE_SECONDS
    assert int(answer.headers["retry-after"]) <= math.ceil(MINUTE_SECONDS)
    slept = await official.come_back(gateway, which, body(PART_OF_MINUTE), wire.reset)
    assert MINUTE_SECONDS - (time.monotonic() - emptied) <= slept <= told


async def test_tokens_per_day(new_world: World, official: Official) -> None:
    """Nine hours, though nobody sleeps that long: the clients give up at once."""
    gateway = serve(new_world, limits={"output_tokens_per_day": DAY})
    emptied = time.monotonic()
    wire = await hold(gateway, DAY)
    told = retry_seconds(await refused(gateway, PART_OF_DAY), 429, "quota_exceeded", soon=False)
    assert DAY_SECONDS - (time.monotonic() - emptied) <= told <= DAY_SECONDS
    for which, error in (("openai", openai.RateLimitError), ("anthropic", anthropic.RateLimitError)):
        with pytest.raises(error) as raised:
            await official.ask(gateway, which, body(PART_OF_DAY))
        assert "limits.output_tokens_per_day" in str(raised.value)
        assert int(raised.value.response.headers["retry-after"]) <= DAY_SECONDS
    assert official.slept == []
    wire.reset()


async def test_it_is_over_when_it_was_said_to_be(new_world: World) -> None:
    """A call that comes in time is refused, one that comes when it was told to is served; each has five seconds."""
    gateway = serve(new_world, limits={"requests_per_minute": 12, "minute_burst": 1 / 12})
    assert (await refused(gateway)).status == 200
    answer = await refused(gateway)
    told = retry_seconds(answer, 429, "quota_exceeded")
    again = time.monotonic() + told
    while (answer := await refused(gateway)).status == 429:
        asked_late = time.monotonic() - again
        assert retry_seconds(answer, 429, "quota_exceeded") <= told
        assert asked_late < told, "served at last"
        await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1000)
    assert time.monotonic() >= again - 0.1


# -- no store, and no hope -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", CLIENTS)
async def test_the_store_is_away(new_world: World, official: Official, which: str) -> None:
    gateway = serve(new_world, store={"on_outage": "refuse"})
    store = new_world.store.process
    assert store
    store.send_signal(signal.SIGSTOP)
    told = retry_seconds(await refused(gateway), 503, "store_unavailable")
    assert told <= FEW_SECONDS
    slept = await official.come_back(gateway, which, body(), lambda: store.send_signal(signal.SIGCONT))
    assert 1 <= slept <= FEW_SECONDS


HOPELESS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "no engine is as large": ("context_length_exceeded", {}, completion(16, 40_000) | {"n": 4}),
    "longer than the context": ("context_length_exceeded", {}, completion(65_536, 1)),
    "more sequences than run": ("too_many_sequences", {}, completion(16, 1) | {"n": 12}),
    "more blocks than the key may hold": ("key_cap_exceeded", {"blocks_max": BLOCKS - 1}, body()),
    "more than a full minute": ("key_cap_exceeded", {"output_tokens_per_minute": OUTPUT_TOKENS - 1}, body()),
    "more than a full day": ("key_cap_exceeded", {"prompt_tokens_per_day": PROMPT_TOKENS - 1}, body()),
}


@pytest.fixture(scope="module")
def caps() -> Iterator[tuple[GatewayProcess, dict[str, str]]]:
    """A gateway with the key of each hopeless call."""
    with world() as here:
        pools = [{"name": "only", "replicas": [{"url": here.mock().url, "max_num_seqs": 10}]}]
        keys = ({"limits": limits} for _, limits, _ in HOPELESS.values())
        config, secrets = here.config(pools, *keys, store=QUICK_STORE)
        yield here.gateway(config, secrets[0]), dict(zip(HOPELESS, secrets, strict=True))


@pytest.mark.parametrize("why", HOPELESS)
async def test_never(caps: tuple[GatewayProcess, dict[str, str]], official: Official, why: str) -> None:
    """No time, and no client tries again."""
    gateway, keys = caps
    code, _, request = HOPELESS[why]
    answer = await ask(gateway.url, post(keys[why], request))
    assert (answer.status, answer.code) == (400, code)
    assert answer.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & set(answer.headers)
    for which, error in (("openai", openai.BadRequestError), ("anthropic", anthropic.BadRequestError)):
        with pytest.raises(error):
            await official.ask(gateway, which, request, keys[why])
    assert official.slept == []
