"""BS-01 to BS-04: replicas that go, are busy, speak of themselves in other words, and are full one by one.

BS-01's traffic is 30 calls a second for some seconds instead of a minute; what has to happen is waited for.  BS-02's
200 calls of each kind are all made.  `source_missing` of BS-03 is `kvgate_engine_unknown{figure="kv_use"}`.
"""

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.core.outcomes import Code
from tests.integration.front import Front, front, whole
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(120)]

SHORT = completion(16, 3)
UP = ("up", [])


def replicas_of(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    (pool,) = gateway.state()["fleets"]["demo"]["pools"].values()
    found: dict[str, dict[str, Any]] = pool["replicas"]
    return found


def state_of(gateway: GatewayProcess, replica: str) -> tuple[str, list[str]]:
    row = replicas_of(gateway)[replica]
    return row["state"], row["rests"]


async def asked(gateway: GatewayProcess, body: dict[str, Any] | None = None) -> Answer:
    return await ask(gateway.url, post(gateway.key, body or SHORT))


# -- BS-01 ---------------------------------------------------------------------------------------------------------

PER_SECOND = 30
ERRORS_MAX = 0.01


class Traffic:
    """Calls that come evenly, whatever becomes of those before."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._calls: list[asyncio.Task[Answer]] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._calls.append(asyncio.create_task(asked(self._gateway)))
            await asyncio.sleep(1 / PER_SECOND)

    async def taken(self, count: int) -> list[Answer]:
        """The next so many, answered."""
        await self.forget()
        await soon(lambda: len(self._calls) >= count, "they are made")
        return list(await asyncio.gather(*self._calls[:count]))

    async def forget(self) -> None:
        """Those until now, when they are answered; whatever they hear counts as well."""
        calls, self._calls = self._calls, []
        await asyncio.gather(*calls)

    async def so_far(self) -> list[Answer]:
        calls, self._calls = self._calls, []
        return list(await asyncio.gather(*calls))

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._calls, return_exceptions=True)


@asynccontextmanager
async def flowing(gateway: GatewayProcess) -> AsyncIterator[Traffic]:
    traffic = Traffic(gateway)
    try:
        yield traffic
    finally:
        await traffic.end()


def errors(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.status != 200]


@contextlib.contextmanager
def silent(port: int) -> Iterator[None]:
    """Nothing that is sent to this port is answered: a queue of connections that is full drops whoever comes."""
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


@contextlib.contextmanager
def other_model(here: World, port: int) -> Iterator[None]:
    here.mock("--model", "another", "--blocks", "401", "--port", str(port))
    yield


Way = Callable[[World, int], contextlib.AbstractContextManager[None]]
WAYS: dict[str, Way] = {
    "its address is silent": lambda _, port: silent(port),
    "it refuses": lambda *_: contextlib.nullcontext(),
    "another model is there": other_model,
}


def three_replicas(here: World) -> tuple[GatewayProcess, list[Mock]]:
    """Replica `c` is the roomiest, so it is the first choice."""
    mocks = [here.mock("--blocks", blocks, "--speed", "inf") for blocks in ("201", "201", "401")]
    replicas = [{"name": name, "url": mock.url} for name, mock in zip("abc", mocks, strict=True)]
    pools = [{"name": "only", "replicas": replicas}]
    config, (key,) = here.config(pools, store=QUICK_STORE, upstream={"connect_seconds": 2})
    return here.gateway(config, key), mocks


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_bs01_a_replica_that_is_gone_costs_no_calls(new_world: World, way: Way) -> None:
    gateway, mocks = await asyncio.to_thread(three_replicas, new_world)
    async with flowing(gateway) as traffic:
        await gone_without_loss(new_world, gateway, mocks[2], traffic, way)


async def gone_without_loss(
    here: World, gateway: GatewayProcess, gone: Mock, traffic: Traffic, way: Way
) -> None:
    assert not errors(await traffic.taken(10))
    assert (await asked(gateway)).headers["x-kvgate-replica"] == "c"
    port = urlsplit(gone.url).port or 0
    await asyncio.to_thread(gone.stop)
    with await asyncio.to_thread(way, here, port):
        await soon(lambda: state_of(gateway, "c")[0] == "down", "it is out of rotation")
        meanwhile = await traffic.so_far()
        assert len(errors(meanwhile)) <= ERRORS_MAX * len(meanwhile), errors(meanwhile)
        afterwards = await traffic.taken(2 * PER_SECOND)
        assert not errors(afterwards)
        assert "c" not in {answer.headers["x-kvgate-replica"] for answer in afterwards}
        await traffic.end()
        await soon(gateway.is_quiet, "nothing is held, there neither")
        assert replicas_of(gateway)["c"]["reserved"] == 0
        too_large = completion(16, 400 * 16 - 16)
        refused = await asked(gateway, too_large)
        assert (refused.status, refused.code) == (503, Code.NO_BACKEND), (
            "its blocks are no part of the budget"
        )


async def test_bs01_without_any_replica_it_is_said_at_once(new_world: World) -> None:
    gateway, mocks = await asyncio.to_thread(three_replicas, new_world)
    for mock in mocks:
        await asyncio.to_thread(mock.stop)
    await soon(lambda: gateway.client.get("/health/ready").status_code == 503, "it is not ready")
    refused = await asked(gateway)
    assert (refused.status, refused.code) == (503, Code.NO_BACKEND)
    assert int(refused.headers["retry-after"]) >= 1
    assert gateway.client.get("/health/live").status_code == 200


# -- BS-02 ---------------------------------------------------------------------------------------------------------

REFUSALS = (400, 401, 404, 413, 422)
EACH = 40
BUSY_BODY = b'{"error":{"message":"busy","type":"Service Unavailable","param":null,"code":503}}'


def busy(status: int, *headers: str) -> bytes:
    return whole(status, BUSY_BODY, *headers)


@asynccontextmanager
async def two_replicas(here: World, **settings: Any) -> AsyncIterator[tuple[GatewayProcess, Front, Mock]]:
    """Replica `b` is roomier and behind a door, so it is the first choice; also its engine."""
    a, b = [
        await asyncio.to_thread(here.mock, "--blocks", blocks, "--speed", "inf") for blocks in ("201", "401")
    ]
    async with front(b.url) as door:
        replicas = [{"name": "a", "url": a.url}, {"name": "b", "url": door.url}]
        config, (key,) = here.config([{"name": "only", "replicas": replicas}], store=QUICK_STORE, **settings)
        gateway = await asyncio.to_thread(here.gateway, config, key)
        try:
            yield gateway, door, b
        finally:
            await asyncio.to_thread(gateway.stop)


async def replica_of(gateway: GatewayProcess) -> str:
    answer = await asked(gateway)
    assert answer.status == 200, answer
    return answer.headers["x-kvgate-replica"]


async def test_bs02_errors_of_clients_say_nothing_against_a_replica(new_world: World) -> None:
    async with two_replicas(new_world) as (gateway, _, b):
        for status in REFUSALS:
            await asyncio.to_thread(b.fail, f"status:{status}", EACH)
            assert [(await asked(gateway)).status for _ in range(EACH)] == [status] * EACH
        assert state_of(gateway, "b") == UP
        answers = [await asked(gateway) for _ in range(len(REFUSALS) * EACH)]
        assert not errors(answers)
        assert {answer.headers["x-kvgate-replica"] for answer in answers} == {"b"}


@pytest.mark.parametrize("status", [429, 503])
async def test_bs02_a_busy_replica_is_left_alone_as_long_as_it_asks(new_world: World, status: int) -> None:
    """Its 429 is passed on as it came, its 503 met elsewhere; nobody asks it again before its time."""
    async with two_replicas(new_world) as (gateway, door, _):
        door.answers["POST"] = busy(status, "retry-after: 50")
        first = await asked(gateway)
        if status == 503:
            assert (first.status, first.headers["x-kvgate-replica"]) == (200, "a")
        else:
            assert (first.status, first.headers["retry-after"], first.body) == (429, "50", BUSY_BODY)
        await soon(lambda: state_of(gateway, "b") == ("draining", ["busy"]), "it rests")
        answered = door.answered
        assert [await replica_of(gateway) for _ in range(20)] == ["a"] * 20
        assert door.answered == answered
        line = 'kvgate_replica_rests{fleet="demo",pool="only",replica="b",why="busy"} 1.0'
        await soon(lambda: line in gateway.metrics(), "the metrics show it")


async def test_bs02_traffic_returns_when_the_time_is_over(new_world: World) -> None:
    """However often it was busy before, no trial is made and nothing is held against it."""
    async with two_replicas(new_world) as (gateway, door, b):
        door.answers["POST"] = busy(503)
        served = []
        while door.answered < 4:  # it is asked again after each rest, and again it is busy
            served.append(await replica_of(gateway))
        assert set(served) == {"a"}
        assert state_of(gateway, "b") in (UP, ("draining", ["busy"]))
        await soon(lambda: state_of(gateway, "b") == ("draining", ["busy"]), "it rests once more")
        received = b.log()["received"]
        door.answers.clear()
        await soon(lambda: state_of(gateway, "b") == UP, "its rest is over")
        assert b.log()["received"] == received, "nobody had to try it"
        assert await replica_of(gateway) == "b"


async def test_bs02_who_has_no_other_replica_waits_until_it_has_time(new_world: World) -> None:
    """The call that was told so hears of it; those behind it wait for the time that the engine gave."""
    mock = await asyncio.to_thread(new_world.mock, "--blocks", "201", "--speed", "inf")
    async with front(mock.url) as door:
        config, (key,) = new_world.config(
            [{"name": "only", "replicas": [{"name": "b", "url": door.url}]}], store=QUICK_STORE
        )
        gateway = await asyncio.to_thread(new_world.gateway, config, key)
        door.answers["POST"] = busy(503, "retry-after: 4")
        first = await asked(gateway)
        assert (first.status, first.code) == (503, Code.NO_BACKEND)
        assert int(first.headers["retry-after"]) >= 4
        await soon(lambda: state_of(gateway, "b") == ("draining", ["busy"]), "it rests")
        door.answers.clear()
        answer = await asked(gateway)
        assert (answer.status, answer.headers["x-kvgate-replica"]) == (200, "b")
        assert int(answer.headers["x-kvgate-queue-position"]) == 1
        await asyncio.to_thread(gateway.stop)


FAILURES = 5


@pytest.mark.parametrize("how", ["500", "reset"])
async def test_bs02_real_failures_open_it_and_a_neutral_trial_does_not_keep_it_shut(
    new_world: World, how: str
) -> None:
    async with two_replicas(new_world) as (gateway, door, _):
        door.answers["POST"] = b"" if how == "reset" else busy(500)
        for _ in range(FAILURES):
            assert await replica_of(gateway) == "a"
        await soon(lambda: state_of(gateway, "b") == ("draining", ["failing"]), "it rests")
        door.answers["POST"] = busy(503)
        tried = door.answered
        await soon(lambda: door.answered >= tried + 2, "two trials were neutral")
        assert state_of(gateway, "b") == ("draining", ["failing"])
        door.answers.clear()
        await soon(lambda: state_of(gateway, "b") == UP, "a trial was answered")
        assert await replica_of(gateway) == "b"


# -- BS-03 ---------------------------------------------------------------------------------------------------------

CONFIG = 'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}",engine="{engine}"}} 1.0'
SAME = CONFIG.format(size=16, blocks=1001, engine=0)
PAGES = {
    "the old name": (f'{SAME}\nvllm:gpu_cache_usage_perc{{engine="0"}} 0.25\n', 0.25),
    "the new name": (f'{SAME}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5\n', 0.5),
    "both": (
        f'{SAME}\nvllm:gpu_cache_usage_perc{{engine="0"}} 0.25\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5\n',
        0.5,
    ),
    "neither": (f"{SAME}\n", None),
    "no number": (f'{SAME}\nvllm:kv_cache_usage_perc{{engine="0"}} NaN\n', None),
}
"""What an engine says, and the use that is read of it."""
UNREADABLE = {
    "5 MB": whole(200, b"# nothing here\n" * 340_000, kind="text/plain"),
    "HTML": whole(200, b"<!doctype html><title>vllm:kv_cache_usage_perc 1.0</title>", kind="text/html"),
    "an error": whole(500, b"no"),
    "nothing": b"",
}
METRICS = "GET /metrics"


def page(text: str) -> bytes:
    return whole(200, text.encode(), kind="text/plain; version=0.0.4")


def sample(gateway: GatewayProcess, name: str, **labels: str) -> float | None:
    """None where there is no series with these labels."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    for line in gateway.metrics().splitlines():
        found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if found and wanted <= set(found[1].split(",")):
            return float(found[2])
    return None


@asynccontextmanager
async def one_replica(here: World, **numbers: int) -> AsyncIterator[tuple[GatewayProcess, Front]]:
    """Its numbers are configured, so that it stays in service whatever its metrics say."""
    mock = await asyncio.to_thread(here.mock, "--blocks", "1001", "--speed", "inf")
    async with front(mock.url) as door:
        row = {"name": "b", "url": door.url, "num_gpu_blocks": 1001, "block_size": 16} | numbers
        config, (key,) = here.config([{"name": "only", "replicas": [row]}], store=QUICK_STORE)
        gateway = await asyncio.to_thread(here.gateway, config, key)
        try:
            yield gateway, door
        finally:
            await asyncio.to_thread(gateway.stop)


async def test_bs03_known_names_are_understood_and_what_is_not_there_is_unknown(new_world: World) -> None:
    """Never 0: there is no such series, `kvgate_engine_unknown` is 1, and the log says it once."""
    async with one_replica(new_world) as (gateway, door):
        for text, use in itertools.chain(PAGES.values(), [PAGES["both"], PAGES["neither"]]):
            door.answers[METRICS] = page(text)
            await soon(
                lambda use=use: (
                    sample(gateway, "kvgate_engine_kv_use_ratio", replica="b") == use
                    and sample(gateway, "kvgate_engine_unknown", figure="kv_use") == (use is None)
                ),
                f"{text}: {use}",
            )
            assert (await asked(gateway)).status == 200
            assert state_of(gateway, "b") == UP
        seen, told = door.answered, "does not state its KV use"
        await soon(lambda: door.answered >= seen + 3, "it is read again and again")
        assert gateway.log.read_text().count(told) == 2, "once for each time that it began"


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE)
async def test_bs03_what_cannot_be_read_never_touches_calls(new_world: World, answer: bytes) -> None:
    async with one_replica(new_world) as (gateway, door):
        door.answers[METRICS] = answer
        seen = door.answered
        await soon(lambda: door.answered >= seen + 3, "it was asked three times")
        answers = [await asked(gateway) for _ in range(10)]
        assert not errors(answers)
        assert state_of(gateway, "b") == UP
        assert replicas_of(gateway)["b"]["limit"] == 1000
        assert sample(gateway, "kvgate_engine_kv_use_ratio", replica="b") is None


@pytest.mark.parametrize("named", [True, False])
async def test_bs03_two_engines_behind_one_url_each_have_their_blocks(new_world: World, named: bool) -> None:
    """As replicas of their own; one replica for both is refused by name."""
    mock = await asyncio.to_thread(new_world.mock, "--blocks", "513", "--data-parallel-size", "2")
    rows = [{"name": f"r{k}", "url": mock.url, "data_parallel_rank": k} for k in range(2)]
    pools = [{"name": "only", "replicas": rows if named else [mock.url]}]
    config, (key,) = new_world.config(pools, store=QUICK_STORE)
    gateway = await asyncio.to_thread(new_world.gateway, config, key, wait=named)
    if named:
        limits = [row["limit"] for row in replicas_of(gateway).values()]
        assert limits == [512, 512]
    else:
        await soon(lambda: "reaches 2 engines" in gateway.log.read_text(), "it is refused in words")


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [({"num_gpu_blocks": 2001}, 1000), ({"num_gpu_blocks": 501}, 500)],
    ids=["more than there are", "fewer"],
)
async def test_bs03_another_number_than_is_configured_is_told_and_the_smaller_one_counts(
    new_world: World, numbers: dict[str, int], limit: int
) -> None:
    async with one_replica(new_world, **numbers) as (gateway, _):
        assert replicas_of(gateway)["b"]["limit"] == limit
        (line,) = [line for line in gateway.log.read_text().splitlines() if "is configured as" in line]
        assert f"{numbers['num_gpu_blocks']}" in line
        assert "1001" in line
        assert "warning" in line.lower()


# -- BS-04 ---------------------------------------------------------------------------------------------------------

BLOCKS = 1000
HELD = 600
PREFILL_TOKENS = 4 * BLOCKS * 16
"""So many that blocks alone rule a replica out."""


def of_blocks(blocks: int) -> dict[str, Any]:
    """A call that holds so many until it is closed."""
    body = completion(blocks * 16 - 15, 16, stream=True, hold_seconds=HELD)
    assert blocks_of(blocks * 16 - 15, 16) == blocks
    return body


async def begin(gateway: GatewayProcess, blocks: int) -> Wire:
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, of_blocks(blocks)))
    return wire


def reserved(gateway: GatewayProcess) -> list[int]:
    rows = replicas_of(gateway).values()
    assert all(row["reserved"] <= BLOCKS for row in rows)
    return [row["reserved"] for row in rows]


@pytest.mark.parametrize("queue", [True, False])
async def test_bs04_room_in_the_fleet_is_no_room_on_a_replica(new_world: World, queue: bool) -> None:
    """Four replicas with 250 blocks free each: 600 are not admitted, four calls of 250 land one on each."""
    mocks = [
        await asyncio.to_thread(
            new_world.mock, "--blocks", str(BLOCKS + 1), "--max-model-len", "16384", "--speed", "inf"
        )
        for _ in range(4)
    ]
    rows = [{"url": mock.url, "prefill_tokens": PREFILL_TOKENS} for mock in mocks]
    pools = [{"name": "only", "replicas": rows}]
    settings = {} if queue else {"queue": {"depth_max": 0}}
    config, (key,) = new_world.config(pools, store=QUICK_STORE, **settings)
    gateways = [await asyncio.to_thread(new_world.gateway, config, key) for _ in range(3)]
    in_turn = itertools.cycle(gateways)
    held = await asyncio.gather(*(begin(next(in_turn), 750) for _ in range(4)))
    await soon(lambda: reserved(gateways[0]) == [750] * 4, "each holds one")
    if queue:
        large = await begin(next(in_turn), 600)
        await soon(lambda: gateways[0].state()["queue"] == 1, "it waits, though 1,000 are free")
        assert reserved(gateways[1]) == [750] * 4
        large.reset()
        await soon(lambda: gateways[0].state()["queue"] == 0, "it has left")
    else:
        refused = await ask(gateways[1].url, post(key, of_blocks(600)))
        assert (refused.status, refused.code) == (429, Code.CAPACITY_EXCEEDED)
    held += await asyncio.gather(*(begin(next(in_turn), 250) for _ in range(4)))
    await soon(lambda: reserved(gateways[2]) == [BLOCKS] * 4, "one on each, and all are full")
    await soon(lambda: [mock.log()["started"] for mock in mocks] == [2] * 4, "so do the engines")
    assert sum(mock.metric("vllm:num_preemptions_total") for mock in mocks) == 0
    for wire in held:
        wire.reset()
    await soon(gateways[0].is_quiet, "all is given back")


def test_the_pages_here_are_those_of_an_engine(new_world: World) -> None:
    """The mock's own page has the name that the newest releases have."""
    mock = new_world.mock("--blocks", "1001")
    assert "vllm:kv_cache_usage_perc" in httpx.get(f"{mock.url}/metrics", trust_env=False).text
