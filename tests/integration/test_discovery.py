"""Discovery and the watch over replicas, against small HTTP servers."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from gateway.core.rests import Why
from gateway.upstream.api import Access, Trouble
from gateway.upstream.breaker import FAILURES_MAX
from gateway.upstream.fleet import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    FleetWatch,
    ReplicaShape,
    ReplicaSpec,
    discover,
)
from gateway.upstream.metrics_text import CacheConfig, read_page
from gateway.upstream.scraper import PAGE_BYTES_MAX, Scraper

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
MODELS = frozenset({MODEL, "llama"})


def cache_line(blocks: object = 256, size: object = 32, engine: str | None = "0") -> str:
    """As vLLM 0.32 writes it, shortened."""
    rank = f'engine="{engine}",' if engine is not None else ""
    return (
        f'vllm:cache_config_info{{_block_size_resolved="True",block_size="{size}",cache_dtype="auto",'
        f'{rank}gpu_memory_utilization="0.92",kv_cache_dtype_skip_layers="[]",num_cpu_blocks="None",'
        f'num_gpu_blocks="{blocks}",num_gpu_blocks_override="256",sliding_window="None"}} 1.0\n'
    )


def metrics(*lines: str) -> bytes:
    head = "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    head += "# TYPE vllm:cache_config_info gauge\n"
    return (head + "".join(lines) + 'vllm:kv_cache_usage_perc{engine="0"} NaN\n').encode()


def models(*ids: str, max_model_len: object = 4096) -> bytes:
    data = [{"id": name, "object": "model", "max_model_len": max_model_len} for name in ids]
    return json.dumps({"object": "list", "data": data}).encode()


class Engine:
    """What one address answers, changed at will by a test."""

    def __init__(self) -> None:
        self.url = ""
        self.health: tuple[int, bytes] | None = (200, b"")
        self.metrics: tuple[int, bytes] | None = (200, metrics(cache_line()))
        self.models: tuple[int, bytes] | None = (200, models("other", MODEL, "llama"))
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def silence(self) -> None:
        self.health = self.metrics = self.models = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            self.heads.append(head)
            await self.answer(path, reader, writer)
        writer.close()

    async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = {"/health": self.health, "/metrics": self.metrics, "/v1/models": self.models}[path]
        if answer is None:
            await reader.read()
            return
        status, body = answer
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
        writer.write(body)
        await writer.drain()


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    here = Engine()
    async with serving(here, 0):
        yield here


@asynccontextmanager
async def serving(here: Engine, port: int) -> AsyncIterator[None]:
    server = await asyncio.start_server(here.serve, "127.0.0.1", port)
    here.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield
    finally:
        server.close()
        for task in here.tasks:
            task.cancel()
        await asyncio.gather(*here.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes the sockets one turn later


def spec(url: str, name: str = "a", **numbers: int) -> ReplicaSpec:
    return ReplicaSpec(pool="short", name=name, url=url, **numbers)


async def found(
    replica: ReplicaSpec, timeout_seconds: float = 10, api_key: str | None = None
) -> ReplicaShape | str:
    async with Scraper() as scraper:
        lets_in = replace(replica, access=Access.of(api_key))
        return await discover(lets_in, MODELS, scraper, timeout_seconds=timeout_seconds)


async def test_an_engine_says_what_it_has() -> None:
    async with engine() as here:
        shape = await found(spec(here.url, max_num_seqs=128, prefill_tokens=32_768))
        names = frozenset({"other", MODEL, "llama"})
        assert shape == ReplicaShape("a", "short", here.url, 256, 32, 4096, 128, 32_768, bases=names)


async def test_an_engine_says_whether_it_keeps_beginnings_and_what_is_an_adapter() -> None:
    async with engine() as here:
        for said, caching in (("True", True), ("False", False), ("None", False)):
            line = cache_line().replace("cache_dtype", f'enable_prefix_caching="{said}",cache_dtype')
            here.metrics = (200, metrics(line))
            data = [{"id": MODEL, "parent": None}, {"id": "llama", "parent": MODEL, "max_model_len": 4096}]
            here.models = (200, json.dumps({"data": [data[0] | {"max_model_len": 4096}, data[1]]}).encode())
            shape = await found(spec(here.url))
            assert isinstance(shape, ReplicaShape), shape
            assert (shape.prefix_caching, shape.bases) == (caching, {MODEL})


async def test_an_alias_is_enough() -> None:
    async with engine() as here:
        here.models = (200, models("llama"))
        assert isinstance(await found(spec(here.url)), ReplicaShape)


async def test_the_fleets_model_gives_the_context_not_another_one() -> None:
    async with engine() as here:
        data = [{"id": "big", "max_model_len": 9_000}, {"id": MODEL, "max_model_len": 2_000}, {"id": "llama"}]
        here.models = (200, json.dumps({"data": data}).encode())
        shape = await found(spec(here.url))
        assert isinstance(shape, ReplicaShape)
        assert shape.max_model_len == 2_000


async def test_the_upstream_key_is_sent() -> None:
    async with engine() as here:
        await found(spec(here.url), api_key="U1")
        assert all(b"authorization: Bearer U1\r\n" in head for head in here.heads)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (metrics(cache_line(engine="0"), cache_line(engine="1")), "reaches 2 engines (0, 1)"),
        (metrics(cache_line(blocks="None")), "does not state its num_gpu_blocks: configure it for replica a"),
        (metrics(cache_line(blocks=0)), "does not state its num_gpu_blocks"),
        (metrics(cache_line(size="None")), "does not state its block_size"),
        (metrics(), "does not state its num_gpu_blocks"),
        (b"<html>hello</html>", "does not state its num_gpu_blocks"),
        (b"\xff\x00" * 100, "does not state its num_gpu_blocks"),
        (b"x" * (PAGE_BYTES_MAX + 1), f"more than {PAGE_BYTES_MAX} bytes"),
    ],
)
async def test_unusable_metrics_are_told_in_words(body: bytes, words: str) -> None:
    async with engine() as here:
        here.metrics = (200, body)
        error = await found(spec(here.url))
        assert isinstance(error, str)
        assert words in error
        assert here.url in error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (models("gpt2"), f"serves gpt2, not llama, {MODEL}"),
        (models(), "serves nothing"),
        (models(MODEL, max_model_len=None), "does not state its max_model_len"),
        (models(MODEL, max_model_len=-1), "is not a list of models"),
        (b'{"data": 5}', "is not a list of models"),
        (b"<html>", "is not a list of models"),
        (b"", "is not a list of models"),
    ],
)
async def test_unusable_models_are_told_in_words(body: bytes, words: str) -> None:
    async with engine() as here:
        here.models = (200, body)
        error = await found(spec(here.url))
        assert isinstance(error, str)
        assert words in error


@pytest.mark.parametrize("status", [307, 404, 500, 503])
async def test_a_status_other_than_200_is_told(status: int) -> None:
    async with engine() as here:
        here.metrics = (status, b"")
        told = str(await found(spec(here.url)))
        assert told.startswith(f"{here.url}/metrics")
        assert told.endswith(f"answers {status}")


async def test_a_silent_engine_is_given_up() -> None:
    async with engine() as here:
        here.silence()
        assert await found(spec(here.url), 0.05) == f"{here.url}/metrics does not answer within 0.05 s"


async def test_a_dripping_engine_is_given_up() -> None:
    class Dripping(Engine):
        async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.005)

    here = Dripping()
    async with serving(here, 0):
        assert await found(spec(here.url), 0.05) == f"{here.url}/metrics does not answer within 0.05 s"


async def test_configured_numbers_fill_in_what_is_not_stated() -> None:
    async with engine() as here:
        here.metrics = (200, metrics())
        here.models = (200, models(MODEL, max_model_len=None))
        shape = await found(spec(here.url, num_gpu_blocks=10, block_size=16, max_model_len=100))
        assert shape == ReplicaShape(
            "a", "short", here.url, 10, 16, 100, 256, 16_384, bases=frozenset({MODEL})
        )


async def test_a_configured_number_lowers_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as here:
        lower = await found(spec(here.url, num_gpu_blocks=100, block_size=16, max_model_len=1_000))
        assert isinstance(lower, ReplicaShape)
        assert (lower.num_gpu_blocks, lower.block_size, lower.max_model_len) == (100, 16, 1_000)
        assert len(caplog.records) == 2, "of a shorter context nothing is said"
        assert "num_gpu_blocks is configured as 100 but the engine states 256; 100 is used" in caplog.text
        caplog.clear()
        higher = await found(spec(here.url, num_gpu_blocks=1_000, block_size=64, max_model_len=9_999))
        assert isinstance(higher, ReplicaShape)
        assert (higher.num_gpu_blocks, higher.block_size, higher.max_model_len) == (256, 32, 4096)
        assert len(caplog.records) == 3
        assert "num_gpu_blocks is configured as 1000 but the engine states 256" in caplog.text


async def test_an_alias_that_the_engine_does_not_serve_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Names are passed on as they are, so calls for it would be answered 404."""
    async with engine() as here:
        here.models = (200, models(MODEL))
        assert isinstance(await found(spec(here.url)), ReplicaShape)
    assert [record.args for record in caplog.records] == [("a", "llama")]


async def test_unreachable_sources_are_forgiven_where_all_numbers_are_configured() -> None:
    async with engine() as here:
        here.metrics = here.models = (404, b"")
        assert isinstance(
            await found(spec(here.url, num_gpu_blocks=10, block_size=16, max_model_len=100)), ReplicaShape
        )
        assert isinstance(await found(spec(here.url, num_gpu_blocks=10, block_size=16)), str)
        here.models = (200, models("gpt2"))
        assert isinstance(
            await found(spec(here.url, num_gpu_blocks=10, block_size=16, max_model_len=100)), str
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (cache_line(engine=None), {"": CacheConfig(256, 32)}),
        (cache_line(blocks=512, size=16, engine="3"), {"3": CacheConfig(512, 16)}),
        (cache_line(blocks=1), {"0": CacheConfig(None, 32)}),  # it keeps no KV
        (cache_line(blocks="-5", size="1e3"), {"0": CacheConfig(None, None)}),
        (cache_line(blocks="9" * 400, size="²"), {"0": CacheConfig(None, None)}),
        ('vllm:cache_config_info{a="\\"b\\\\",num_gpu_blocks="7",engine="0"} 1', {"0": CacheConfig(7, None)}),
        ("vllm:cache_config_info{", {"": CacheConfig(None, None)}),
        ('other{num_gpu_blocks="7"} 1\n# vllm:cache_config_info{num_gpu_blocks="7"}', {}),
        ("\u2028" + cache_line(), {}),
    ],
)
def test_the_text_of_metrics(text: str, expected: dict[str, CacheConfig]) -> None:
    assert read_page(text).configs == expected


class World:
    """A watch whose pauses are written down instead of waited for."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.changes: list[frozenset[str]] = []
        self.busy = 0
        self.failures_left = 0

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0.002)

    async def on_change(self, names: frozenset[str]) -> None:
        self.busy += 1
        assert self.busy == 1
        await asyncio.sleep(0.005)
        self.busy -= 1
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("the store is away")
        self.changes.append(names)


@asynccontextmanager
async def watching(world: World, *specs: ReplicaSpec) -> AsyncIterator[FleetWatch]:
    watch = FleetWatch(
        specs,
        MODELS,
        world.on_change,
        scraper=Scraper(),
        probe_timeout_seconds=1,  # as in production: a busy machine is late now and then
        sleep=world.sleep,
    )
    watch.start()
    try:
        yield watch
    finally:
        await watch.close()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_replica_comes_up_and_is_announced() -> None:
    async with engine() as here, engine() as there:
        world = World()
        async with watching(world, spec(here.url), spec(there.url, "b")) as watch:
            assert not watch.is_up("a")
            await watch.tried()
            assert watch.is_up("a")
            assert watch.is_up("b")
            assert not watch.is_up("unknown")
            await soon(lambda: frozenset().union(*world.changes) == {"a", "b"})
            state = watch.states()[0]
            assert state.shape is not None
            assert (state.spec.name, state.shape.num_gpu_blocks, state.up, state.problem) == (
                "a",
                256,
                True,
                "",
            )


async def test_a_replica_that_does_not_answer_at_start_joins_later() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = World()
    async with watching(world, spec(f"http://127.0.0.1:{port}")) as watch:
        await watch.tried()
        assert not watch.is_up("a")
        assert "ConnectionRefusedError" in watch.states()[0].problem
        await soon(lambda: len(world.pauses) >= 5)
        assert world.pauses[:5] == [1, 2, 4, BACKOFF_MAX_SECONDS, BACKOFF_MAX_SECONDS]
        assert world.changes == [frozenset({"a"})]
        async with serving(Engine(), port):
            await soon(lambda: watch.is_up("a"))
            await soon(lambda: world.changes == [frozenset({"a"}), frozenset({"a"})])


async def test_the_first_attempt_is_announced_once_whatever_came_of_it() -> None:
    """A store may still say `up` of a replica that died while nobody watched."""
    async with engine() as here, engine() as sick, engine() as wrong:
        sick.health = (503, b"")
        wrong.models = (200, models("gpt2"))
        world = World()
        replicas = spec(here.url), spec(sick.url, "sick"), spec(wrong.url, "wrong")
        async with watching(world, *replicas) as watch:
            await watch.tried()
            await soon(lambda: len(world.pauses) >= 20)
            assert [state.up for state in watch.states()] == [True, False, False]
            assert sorted(name for names in world.changes for name in names) == ["a", "sick", "wrong"]


async def test_two_missed_probes_take_a_replica_out_and_one_good_brings_it_back() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.health = (503, b"")
            await soon(lambda: not watch.is_up("a"))
            misses = world.pauses.index(0.5)
            assert world.pauses[misses : misses + 2] == [0.5, 1.0]
            assert watch.states()[0].problem == f"{here.url}/health answers 503"
            here.metrics = (200, metrics(cache_line(blocks=99)))
            here.health = (200, b"")
            await soon(lambda: watch.is_up("a"))
            shape = watch.states()[0].shape
            assert shape is not None
            assert shape.num_gpu_blocks == 99
            await soon(lambda: len(world.changes) == 3)


async def test_one_missed_probe_does_not_take_a_replica_out() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.health = (503, b"")
            await soon(lambda: 0.5 in world.pauses)
            here.health = (200, b"")
            probes = len(here.asked)
            await soon(lambda: len(here.asked) >= probes + 6)
            assert watch.is_up("a")
            assert world.changes == [frozenset({"a"})]


async def test_a_silent_replica_is_taken_out() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.silence()
            await soon(lambda: not watch.is_up("a"))
            assert "does not answer within" in watch.states()[0].problem


async def test_one_that_ends_calls_is_not_silent_however_late_its_health() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            calls = asyncio.create_task(end_calls(watch))
            here.silence()
            probes = len(here.asked)
            await soon(lambda: len(here.asked) >= probes + 4)
            assert watch.is_up("a")
            calls.cancel()
            await soon(lambda: not watch.is_up("a"))


async def end_calls(watch: FleetWatch) -> None:
    """Without end."""
    while True:
        watch.report_success("a")
        await asyncio.sleep(0.01)


async def test_one_that_ends_calls_and_refuses_its_health_is_taken_out() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            calls = asyncio.create_task(end_calls(watch))
            here.health = (503, b"")
            await soon(lambda: not watch.is_up("a"))
            calls.cancel()


async def test_two_refused_connections_in_a_row_take_a_replica_out_at_once() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            watch.report_failure("unknown", Trouble.UNREACHABLE)
            watch.report_failure("a", Trouble.UNREACHABLE)
            watch.report_failure("a", Trouble.BROKEN)
            assert watch.is_up("a")
            watch.report_failure("a", Trouble.UNREACHABLE)
            assert not watch.is_up("a")
            await soon(lambda: watch.is_up("a"))


async def test_a_good_probe_forgives_a_refused_connection() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            watch.report_failure("a", Trouble.UNREACHABLE)
            probes = len(here.asked)
            await soon(lambda: len(here.asked) >= probes + 4)
            watch.report_failure("a", Trouble.UNREACHABLE)
            assert watch.is_up("a")


async def test_another_model_at_the_same_address_is_taken_out_and_stays_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.models = (200, models("gpt2"))
            await soon(lambda: not watch.is_up("a"))
            pauses = len(world.pauses)
            await soon(lambda: len(world.pauses) > pauses + 4)
            assert not watch.is_up("a")
            assert caplog.text.count("serves gpt2, not") == 1
            here.models = (200, models(MODEL))
            await soon(lambda: watch.is_up("a"))


async def test_another_context_length_is_discovered_anew() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.models = (200, models(MODEL, max_model_len=8192))

            def grown() -> bool:
                shape = watch.states()[0].shape
                return watch.is_up("a") and shape is not None and shape.max_model_len == 8192

            await soon(grown)


@pytest.mark.parametrize(
    ("blocks", "size", "words"), [(128, 32, "128"), (512, 32, "512"), (256, 16, "of 16 tokens")]
)
async def test_other_blocks_are_discovered_anew_at_once(
    blocks: int, size: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            await soon(lambda: len(world.changes) == 1)
            here.metrics = (200, metrics(cache_line(blocks, size)))

            def discovered() -> bool:
                shape = watch.states()[0].shape
                assert shape is not None
                return watch.is_up("a") and (shape.num_gpu_blocks, shape.block_size) == (blocks, size)

            await soon(discovered)
            await soon(lambda: len(world.changes) == 3)
            assert BACKOFF_FIRST_SECONDS not in world.pauses
    assert f"replica a is down: its blocks are now {words}" in caplog.text


async def test_several_engines_at_the_same_address_are_taken_out_and_stay_down() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.metrics = (200, metrics(cache_line(engine="0"), cache_line(engine="1")))
            await soon(lambda: 4 in world.pauses)
            assert not watch.is_up("a")
            assert "reaches 2 engines" in watch.states()[0].problem


class Balanced(Engine):
    """Each page of metrics comes from the next one of these processes."""

    def __init__(self, *started_at: float) -> None:
        super().__init__()
        self.processes = list(started_at)

    async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            self.processes.append(self.processes.pop(0))
            started = f"process_start_time_seconds {self.processes[-1]}\n"
            self.metrics = (200, metrics(cache_line(), started))
        await super().answer(path, reader, writer)


async def test_a_url_that_balances_over_engines_is_refused_by_name() -> None:
    here = Balanced(100.0, 200.0)
    async with serving(here, 0):
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: here.asked.count("/metrics") > 12)
            (state,) = watch.states()
            assert not state.up
            assert state.problem.startswith(f"{here.url} balances over several engines")
            assert "each needs a URL of its own" in state.problem


async def test_one_that_begins_to_balance_is_taken_out_and_comes_back_when_it_ends() -> None:
    here = Balanced(100.0)
    async with serving(here, 0):
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: watch.is_up("a"))
            here.processes.append(50.0)
            await soon(lambda: not watch.is_up("a"))
            here.processes.remove(50.0)
            await soon(lambda: watch.is_up("a"))


async def test_a_process_that_follows_another_is_taken_over() -> None:
    here = Balanced(100.0)
    async with serving(here, 0):
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: watch.is_up("a"))
            here.processes = [200.0]
            asked = here.asked.count("/metrics")
            await soon(lambda: here.asked.count("/metrics") >= asked + 4)
            assert watch.is_up("a")
            assert world.changes == [frozenset({"a"})]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (500, b""),
        (200, b""),
        (200, b"\xff\x00<html>"),
        (200, metrics(cache_line(blocks="None", size="None"))),
        (200, metrics(cache_line(blocks="None"))),
        (200, metrics(cache_line(size="None"))),
        (200, b"x" * (PAGE_BYTES_MAX + 1)),
    ],
)
async def test_metrics_that_state_nothing_say_nothing_against_a_replica(
    answer: tuple[int, bytes] | None,
) -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            here.metrics = answer
            asked = here.asked.count("/metrics")
            await soon(lambda: here.asked.count("/metrics") >= asked + 3)
            assert watch.is_up("a")
            assert world.changes == [frozenset({"a"})]


async def test_the_configured_numbers_count_when_blocks_are_compared() -> None:
    """What lies above the configured numbers changes nothing; what lies below them does."""
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url, num_gpu_blocks=100, block_size=16)) as watch:
            await watch.tried()
            here.metrics = (200, metrics(cache_line(blocks=200, size=64)))
            asked = here.asked.count("/metrics")
            await soon(lambda: here.asked.count("/metrics") >= asked + 3)
            assert world.changes == [frozenset({"a"})]
            here.metrics = (200, metrics(cache_line(blocks=99, size=64)))

            def lowered() -> bool:
                shape = watch.states()[0].shape
                return watch.is_up("a") and shape is not None and shape.num_gpu_blocks == 99

            await soon(lowered)


async def test_a_failed_announcement_is_repeated() -> None:
    async with engine() as here:
        world = World()
        world.failures_left = 3
        async with watching(world, spec(here.url)):
            await soon(lambda: world.changes == [frozenset({"a"})])


async def test_changes_during_an_announcement_come_in_the_next_one() -> None:
    async with engine() as here, engine() as there:
        world = World()
        async with watching(world, spec(here.url), spec(there.url, "b")) as watch:
            await watch.tried()
            await soon(lambda: bool(world.changes))
            for _ in range(2):
                watch.report_failure("a", Trouble.UNREACHABLE)
            await soon(lambda: world.busy == 1)
            for _ in range(2):
                watch.report_failure("b", Trouble.UNREACHABLE)
            await soon(lambda: frozenset({"b"}) in [names - {"a"} for names in world.changes[1:]])


async def test_closing_while_a_probe_hangs_is_quick(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with engine() as here:
        here.silence()
        async with watching(World(), spec(here.url)):
            await soon(lambda: bool(here.asked))
    assert not caplog.records
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- another configuration ---------------------------------------------------------------------------------------


async def test_a_replica_that_is_added_comes_up_and_one_that_is_removed_is_forgotten() -> None:
    async with engine() as here, engine() as there:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            watch.update([spec(there.url, "b")], MODELS)
            assert [state.spec.name for state in watch.states()] == ["b"]
            assert not watch.is_up("a")
            await soon(lambda: watch.is_up("b"))
            asked = len(here.asked)
            pauses = len(world.pauses)
            await soon(lambda: len(world.pauses) > pauses + 2)
            assert len(here.asked) == asked, "nobody asks a replica that is gone"


async def test_a_number_that_is_changed_counts_once_the_engine_was_asked_and_the_replica_stays_up() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: bool(world.changes))
            watch.update([spec(here.url, num_gpu_blocks=100)], MODELS)
            seen = []
            while blocks_of(watch) != 100:
                seen.append(watch.is_up("a"))
                await asyncio.sleep(0)
            assert all(seen)
            await soon(lambda: len(world.changes) > 1)
            watch.update([spec(here.url)], MODELS)
            await soon(lambda: blocks_of(watch) == 256)
            assert watch.is_up("a")


async def test_an_engine_that_does_not_answer_the_changed_configuration_goes_down() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            watch.update([spec(here.url)], frozenset({"another-model"}))
            assert watch.is_up("a")
            await soon(lambda: not watch.is_up("a"))
            assert "not another-model" in watch.states()[0].problem


async def test_another_url_is_another_replica() -> None:
    async with engine() as here, engine() as there:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await watch.tried()
            watch.update([spec(there.url)], MODELS)
            assert not watch.is_up("a")
            await soon(lambda: watch.is_up("a"))
            assert watch.states()[0].spec.url == there.url


async def test_a_replica_whose_url_changed_is_told_of_before_it_answers() -> None:
    async with engine() as here, engine() as there:
        there.silence()
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: bool(world.changes))
            watch.update([spec(there.url)], MODELS)
            await soon(lambda: len(world.changes) > 1)
            assert world.changes[-1] == {"a"}
            assert not watch.is_up("a")


async def test_a_renamed_replica_stays_up_and_keeps_what_it_had() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: bool(world.changes))
            watch.update([spec(here.url, "renamed")], MODELS)
            (state,) = watch.states()
            assert (state.up, state.shape and state.shape.name) == (True, "renamed")
            await soon(lambda: {"renamed"} in world.changes)
            assert watch.is_up("renamed")


async def test_the_same_configuration_changes_nothing() -> None:
    async with engine() as here:
        world = World()
        async with watching(world, spec(here.url)) as watch:
            await soon(lambda: bool(world.changes))
            watch.update([spec(here.url)], MODELS)
            pauses = len(world.pauses)
            await soon(lambda: len(world.pauses) > pauses + 2)
            assert len(world.changes) == 1


def blocks_of(watch: FleetWatch) -> int:
    shape = watch.states()[0].shape
    assert shape is not None
    return shape.num_gpu_blocks


# -- a replica that answers, and rests -------------------------------------------------------------------------------

GOOD = json.dumps({"object": "text_completion", "choices": [{"text": "x", "finish_reason": "length"}]})
ENDING = GOOD.replace("length", "abort")


def vital_signs(running: int = 0, aborted: int = 0, awake: int = 1) -> str:
    """As vLLM 0.32 writes them."""
    return (
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0\n'
        f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="awake"}} {awake}.0\n'
        f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="m"}} {aborted}.0\n'
    )


class Patient(Engine):
    """It has vital signs, and an answer to a call of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.completions: tuple[int, bytes] | None = (200, GOOD.encode())
        self.show()

    def show(self, **signs: int) -> None:
        self.metrics = (200, metrics(cache_line(), vital_signs(**signs)))

    @property
    def trials(self) -> int:
        return self.asked.count("/v1/completions")

    async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path != "/v1/completions":
            return await super().answer(path, reader, writer)
        if self.completions is None:
            await reader.read()
            return None
        status, body = self.completions
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        return await writer.drain()


@asynccontextmanager
async def two_of_a_pool(world: World) -> AsyncIterator[tuple[FleetWatch, Patient, Patient]]:
    a, b = Patient(), Patient()
    async with serving(a, 0), serving(b, 0), watching(world, spec(a.url), spec(b.url, "b")) as watch:
        await watch.tried()
        await soon(lambda: frozenset().union(*world.changes) == {"a", "b"})
        world.changes.clear()
        yield watch, a, b


def fail(watch: FleetWatch, name: str, trouble: Trouble = Trouble.BROKEN, times: int = FAILURES_MAX) -> None:
    for _ in range(times):
        watch.report_failure(name, trouble)


async def test_one_that_sleeps_rests_until_it_is_awake() -> None:
    world = World()
    async with two_of_a_pool(world) as (watch, a, _):
        a.show(awake=0)
        await soon(lambda: watch.why_it_rests("a") is Why.ASLEEP)
        assert watch.is_up("a")
        await soon(lambda: world.changes == [frozenset({"a"})])
        a.show(awake=1)
        await soon(lambda: watch.why_it_rests("a") is None)
        await soon(lambda: world.changes == [frozenset({"a"})] * 2)
        assert a.trials == 0


async def test_one_that_ends_a_call_rests_until_a_trial_is_answered() -> None:
    world = World()
    async with two_of_a_pool(world) as (watch, a, b):
        a.completions = (200, ENDING.encode())
        watch.report_failure("a", Trouble.ENDING)
        assert watch.why_it_rests("a") is Why.ENDING
        assert watch.is_up("a")
        await soon(lambda: BACKOFF_MAX_SECONDS in world.pauses)
        assert watch.why_it_rests("a") is Why.ENDING
        assert a.trials >= 3
        a.completions = (200, GOOD.encode())
        await soon(lambda: watch.why_it_rests("a") is None)
        trials, asked = a.trials, len(a.asked)
        await soon(lambda: len(a.asked) >= asked + 9)
        assert (a.trials, b.trials) == (trials, 0)


async def test_what_its_metrics_say_of_aborted_calls_is_looked_into() -> None:
    """A good answer to the trial means that somebody else's calls were ended, and no more."""
    async with two_of_a_pool(World()) as (watch, a, _):
        read = a.asked.count("/metrics")
        await soon(lambda: a.asked.count("/metrics") >= read + 2)  # how many it had aborted before is known
        a.show(aborted=1)
        await soon(lambda: a.trials == 1)
        assert watch.why_it_rests("a") is None
        a.completions = (200, ENDING.encode())
        a.show(aborted=2)
        await soon(lambda: watch.why_it_rests("a") is Why.ENDING)


async def test_failures_in_a_row_close_one_of_two_until_a_trial_is_answered() -> None:
    async with two_of_a_pool(World()) as (watch, a, _):
        a.completions = (500, b"")
        fail(watch, "a", times=FAILURES_MAX - 1)
        watch.report_success("a")
        fail(watch, "a", times=FAILURES_MAX - 1)
        assert watch.why_it_rests("a") is None
        fail(watch, "a", times=1)
        assert watch.why_it_rests("a") is Why.FAILING
        watch.report_success("a")
        assert watch.why_it_rests("a") is Why.FAILING, "a call that began before"
        trials = a.trials
        await soon(lambda: a.trials >= trials + 2)
        assert watch.why_it_rests("a") is Why.FAILING
        a.completions = (404, b"")
        await soon(lambda: watch.why_it_rests("a") is None)


async def test_what_calls_met_does_not_close_the_last_one_of_a_pool() -> None:
    """When the other one is back it does."""
    async with two_of_a_pool(World()) as (watch, a, b):
        a.completions = b.completions = (500, b"")
        fail(watch, "a")
        fail(watch, "b", Trouble.ENDING, 1)
        fail(watch, "b", times=2 * FAILURES_MAX)
        assert (watch.why_it_rests("a"), watch.why_it_rests("b")) == (Why.FAILING, None)
        a.completions = (200, GOOD.encode())
        await soon(lambda: watch.why_it_rests("a") is None)
        await soon(lambda: watch.why_it_rests("b") is Why.ENDING)


async def test_a_suspect_rests_until_a_call_has_ended_there() -> None:
    """One that is the last of its pool, too: what it still runs has blocks that others would be given."""
    async with two_of_a_pool(World()) as (watch, a, b):
        a.show(running=3)
        b.show(awake=0)
        await soon(lambda: watch.why_it_rests("b") is Why.ASLEEP)
        fail(watch, "a", Trouble.SLOW)
        for running in (3, 4):
            a.show(running=running)
            asked = a.asked.count("/metrics")
            await soon(lambda asked=asked: a.asked.count("/metrics") >= asked + 3)
            assert watch.why_it_rests("a") is Why.SUSPECT
        a.show(running=3)
        await soon(lambda: watch.why_it_rests("a") is None)


async def test_a_busy_one_rests_for_a_moment_beside_another() -> None:
    """No trial is needed: time ends it.  The last one of a pool goes on."""
    world = World()
    async with two_of_a_pool(world) as (watch, a, b):
        fail(watch, "a", Trouble.BUSY, 100)
        assert watch.why_it_rests("a") is Why.BUSY
        fail(watch, "b", Trouble.BUSY, 100)
        assert watch.why_it_rests("b") is None
        await soon(lambda: watch.why_it_rests("a") is None)
        assert (a.trials, b.trials) == (0, 0)


async def test_a_busy_one_rests_for_as_long_as_it_asks_for_whoever_else_is_there() -> None:
    async with two_of_a_pool(World()) as (watch, a, b):
        b.show(awake=0)
        await soon(lambda: watch.why_it_rests("b") is Why.ASLEEP)
        watch.report_failure("a", Trouble.BUSY, 50.0)
        watch.report_failure("a", Trouble.BUSY, 2.0)
        asked = len(a.asked)
        await soon(lambda: len(a.asked) >= asked + 9)
        assert watch.why_it_rests("a") is Why.BUSY
        a.health = (503, b"")
        await soon(lambda: not watch.is_up("a"))
        a.health = (200, b"")
        await soon(lambda: watch.is_up("a"))
        assert watch.why_it_rests("a") is None, "another process may be there"


async def test_a_busy_one_that_is_configured_anew_rests_no_longer() -> None:
    async with two_of_a_pool(World()) as (watch, a, b):
        watch.report_failure("a", Trouble.BUSY, 50.0)
        assert watch.why_it_rests("a") is Why.BUSY
        watch.update([spec(a.url, max_num_seqs=7), spec(b.url, "b")], MODELS)
        await soon(lambda: watch.why_it_rests("a") is None)


async def test_another_process_has_done_nothing_wrong() -> None:
    async with two_of_a_pool(World()) as (watch, a, _):
        a.completions = (200, ENDING.encode())
        fail(watch, "a", Trouble.ENDING, 1)
        a.health = (503, b"")
        await soon(lambda: not watch.is_up("a"))
        assert watch.why_it_rests("a") is None
        a.health = (200, b"")
        await soon(lambda: watch.is_up("a"))
        assert watch.why_it_rests("a") is None
