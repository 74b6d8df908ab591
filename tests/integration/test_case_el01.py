"""EL-01: long and odd prompts by the megabyte beside 50 streams, which do not notice.

Two gateways on one engine have 50 streams each, and only one of them is flooded.  The other one tells what the machine
does to any process meanwhile: the threads that count tokens, the client and the engine share two cores with both.  So
milliseconds are compared between the two over the same seconds, and a good round ends them: what the flood does to the
loop it does every time, and what the machine does it does now and then.
"""

import asyncio
import json
import os
import random
import statistics
import string
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.tokens.threads import COUNT_SECONDS_MAX
from tests.flow.test_flood import WORDS
from tests.integration.test_case_el03 import p99
from tests.processes import QUICK_STORE, GatewayProcess, World
from tests.wire import Answer, Wire, ask, completion, post

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(150)]

STREAMS = 50
STEP_MS = 20
STREAM = completion(16, 8_000, stream=True)
LIVE = b"GET /health/live HTTP/1.1\r\nhost: kvgate\r\n\r\n"
CHARS = 1_000_000
TOKENS = 65_536
CONTEXT = 8_192
"""Of the engine.  A million characters may be fewer tokens, as far as their length can tell."""
SMALL_CONTEXT = 2_048
"""Of a key, which they are over for their length alone."""
PER_SECOND = 10
"""English prompts; and as many odd ones, each kind in turn."""
ROUNDS_MAX = 6
ROUND_SECONDS = 3.0
GAP_SECONDS_MAX = 0.025
P99_CHANGE_MAX = 0.10
PROBE_SECONDS = 0.1
HEALTH_SECONDS_MAX = 0.1
BUSY_SECONDS = 20.0
"""What a loaded machine may add to an answer."""
TEXTS = 8
CHEAP_PART_MAX = 0.25
"""Of the processor time of a count: a megabyte's body and its JSON have to be read all the same."""
REFUSED = {(400, "context_length_exceeded"), (429, "capacity_exceeded"), (400, "400")}
"""The second where too much is being counted at once; the last is the engine's own, for whom a million spaces are more
tokens than for our vocabulary, where they just fit into the context."""


def english(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=TOKENS))


ODD: dict[str, Callable[[random.Random], str]] = {
    "a": lambda chance: "a" * CHARS,
    "caret": lambda chance: "^" * CHARS,
    "spaces": lambda chance: " " * CHARS,
    "newlines": lambda chance: "\n" * CHARS,
    "emoji": lambda chance: "\N{GRINNING FACE}" * CHARS,
    "CJK": lambda chance: "".join(map(chr, chance.choices(range(0x4E00, 0x9FA5), k=CHARS))),
    "letters": lambda chance: "".join(chance.choices(string.ascii_letters, k=CHARS)),
}


def request(key: str, text: str) -> bytes:
    body = {"model": "demo", "prompt": text, "max_tokens": 16}
    return post(key, json.dumps(body, ensure_ascii=False).encode())


@dataclass
class Side:
    """One gateway, and what was seen there in this round; all in seconds."""

    gateway: GatewayProcess
    gaps: list[float] = field(default_factory=list)
    """Between two tokens of a stream."""
    probes: list[float] = field(default_factory=list)
    """Until `/health/live` answered."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> None:
        wires = [await Wire.open(self.gateway.url) for _ in range(STREAMS)]
        for wire in wires:
            await wire.send(post(self.gateway.key, STREAM))
            assert (await wire.head())[0] == 200
        self.tasks = [asyncio.create_task(self._follow(wire)) for wire in wires]
        self.tasks.append(asyncio.create_task(self._probe(await Wire.open(self.gateway.url))))

    def forget(self) -> None:
        self.gaps.clear()
        self.probes.clear()

    async def _follow(self, wire: Wire) -> None:
        last = time.perf_counter()
        while await wire.event():
            now = time.perf_counter()
            self.gaps.append(now - last)
            last = now

    async def _probe(self, wire: Wire) -> None:
        while True:
            began = time.perf_counter()
            answer = await wire.ask(LIVE)
            self.probes.append(time.perf_counter() - began)
            assert answer.status == 200
            await asyncio.sleep(PROBE_SECONDS)


@dataclass(frozen=True)
class Compared:
    """The flooded gateway with the other one."""

    gap: float
    """Its longest stop, as its streams show it, beyond the other's."""
    p99_change: float
    health: float
    """Seconds of a slow answer, the third quartile, beyond the other's."""

    @property
    def is_good(self) -> bool:
        return (
            self.gap < GAP_SECONDS_MAX
            and self.p99_change < P99_CHANGE_MAX
            and self.health < HEALTH_SECONDS_MAX
        )


class Scene:
    def __init__(self, world: World) -> None:
        costs = ("--step-base-ms", str(STEP_MS), "--step-running-us", "0", "--step-prefill-us", "0")
        mock = world.mock("--blocks", "60001", "--max-model-len", str(CONTEXT), *costs)
        small = {"limits": {"context_tokens_max": SMALL_CONTEXT}}
        config, (key, self.small_key) = world.config(
            [{"name": "only", "replicas": [mock.url]}], {}, small, store=QUICK_STORE
        )
        gateways = [world.gateway(config, key, wait=False) for _ in range(2)]
        self.flooded, self.other = (Side(gateway.wait_ready()) for gateway in gateways)

    @property
    def gateway(self) -> GatewayProcess:
        return self.flooded.gateway

    async def round(self, odd: list[bytes], long: list[bytes]) -> tuple[Compared, list[Answer]]:
        for side in (self.flooded, self.other):
            side.forget()
        answers = await flood(self.gateway.url, odd, long)
        compared = Compared(
            max(self.flooded.gaps) - max(self.other.gaps),
            p99(self.flooded.gaps) / p99(self.other.gaps) - 1,
            third_quartile(self.flooded.probes) - third_quartile(self.other.probes),
        )
        return compared, answers

    def processor_seconds(self) -> float:
        """That the gateway has used; how busy the machine is does not change it."""
        words = Path(f"/proc/{self.gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def third_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[2]


def unseen(key: str, chance: random.Random) -> list[bytes]:
    """Prompts that were not counted before: a second count of the same costs nothing."""
    return [request(key, english(chance)) for _ in range(int(ROUND_SECONDS * PER_SECOND))]


async def flood(url: str, odd: list[bytes], long: list[bytes]) -> list[Answer]:
    """At their rate, whatever became of those before."""
    began = time.monotonic()
    calls = []
    for number, text in enumerate(long):
        await asyncio.sleep(max(began + number / PER_SECOND - time.monotonic(), 0))
        calls += [asyncio.create_task(ask(url, each)) for each in (text, odd[number % len(odd)])]
    async with asyncio.timeout(COUNT_SECONDS_MAX + BUSY_SECONDS):
        return list(await asyncio.gather(*calls))


@asynccontextmanager
async def streaming(scene: Scene) -> AsyncIterator[None]:
    """Each stream runs to the end of this."""
    sides = (scene.flooded, scene.other)
    for side in sides:
        await side.begin()
    tasks = [task for side in sides for task in side.tasks]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        Wire.hang_up_all()


async def test_streams_do_not_notice_long_prompts(new_world: World) -> None:
    scene = Scene(new_world)
    chance = random.Random(1)
    odd = [request(scene.gateway.key, make(chance)) for make in ODD.values()]
    rounds: list[Compared] = []
    async with streaming(scene):
        while len(rounds) < ROUNDS_MAX and not any(compared.is_good for compared in rounds):
            long = await asyncio.to_thread(unseen, scene.gateway.key, chance)
            compared, answers = await scene.round(odd, long)
            assert {(answer.status, answer.code) for answer in answers} <= REFUSED
            rounds.append(compared)
    assert "PanicException" not in scene.gateway.log.read_text()
    assert rounds[-1].is_good, rounds


async def test_prompts_that_are_too_long_by_their_length_are_not_counted(new_world: World) -> None:
    """The same prompts, for a key whose context they are over for certain, and then for one that has the engine's."""
    scene = Scene(new_world)
    chance = random.Random(2)
    texts = [ODD["letters"](chance) for _ in range(TEXTS)]
    cheap = await processor_seconds(scene, scene.small_key, texts, (403, "context_not_cleared"))
    counted = await processor_seconds(scene, scene.gateway.key, texts, (400, "context_length_exceeded"))
    assert cheap < CHEAP_PART_MAX * counted


async def processor_seconds(scene: Scene, key: str, texts: list[str], expected: tuple[int, str]) -> float:
    before = scene.processor_seconds()
    for text in texts:
        answer = await ask(scene.gateway.url, request(key, text))
        assert (answer.status, answer.code) == expected
    return scene.processor_seconds() - before
