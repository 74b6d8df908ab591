"""RD-01: the store refuses connections under steady calls and is back later; `refuse` and `share` do as they say.

The case stops the store for 20 s; here it is known to be away for 5 s, so that both ways fit the tier.  What a call
holds is counted at its client, from the first byte of its answer to the last: never longer than it was held.
"""

import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass, field

import pytest

from tests.faults.callers import COMPLETE, LOST, Caller
from tests.integration.arrivals import Arrivals, arriving
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import blocks_of, completion, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PER_SECOND = 50
AWAY_SECONDS = 5.0
"""From when both gateways show it."""
REFUSED_SECONDS = 0.05
BUDGET = 600
STEP_MS = 50
"""Of the engine: a token of every stream takes this long."""
PROMPT_TOKENS, OUTPUT_TOKENS = 140, 10
"""Of a steady call: half a second, so that about 250 blocks are held by them."""
STREAM_TOKENS = 420
"""Of a stream: far longer than the store is away, on a busy machine, too."""
QUICK = 0.1
"""The engine's steps when nobody has to outlast anything any more."""
STREAMS = 2
"""At each gateway, from before the outage."""
CROWD = 30
"""At each gateway: streams that come while the store is away, and need more than its share."""
UNHEARD_BLOCKS = 50
"""So much may a gateway hold that a client has not heard of, or the other way round: five calls."""
STREAM_BLOCKS = blocks_of(PROMPT_TOKENS, STREAM_TOKENS)


@dataclass
class Watch:
    """What every gateway shows, and what clients hold, looked at all the time."""

    gateways: list[GatewayProcess]
    arrivals: Arrivals
    callers: list[Caller]
    peaks: dict[str, int] = field(default_factory=dict)
    """Most blocks ever held at a gateway, by its URL."""
    uneven: list[tuple[float, int]] = field(default_factory=list)
    """At which moment one gateway held how much more than the other."""
    peak: int = 0
    """Most blocks ever held at all of them."""
    up: list[tuple[float, float, float]] = field(default_factory=list)
    """When a gateway was asked, when it answered, and whether it said that the store answers."""
    negative: list[str] = field(default_factory=list)

    async def hold(self) -> None:
        while True:
            held = {gateway.url: self.arrivals.blocks[gateway.url] for gateway in self.gateways}
            for caller in self.callers:
                held[caller.gateway.url] += caller.streams * STREAM_BLOCKS
            for url, blocks in held.items():
                self.peaks[url] = max(self.peaks.get(url, 0), blocks)
            self.uneven.append((time.monotonic(), max(held.values()) - min(held.values())))
            self.peak = max(self.peak, sum(held.values()))
            await asyncio.sleep(0.02)

    async def scrape(self) -> None:
        while True:
            for gateway in self.gateways:
                asked_at = time.monotonic()
                page = await asyncio.to_thread(gateway.metrics)
                lines = [line for line in page.splitlines() if line.startswith("kvgate_")]
                self.negative += [line for line in lines if " -" in line and "estimate_error" not in line]
                self.up += [
                    (asked_at, time.monotonic(), float(line.split()[1]))
                    for line in lines
                    if line.startswith("kvgate_store_up ")
                ]
            await asyncio.sleep(0.2)


@dataclass
class Outage:
    """When the store was away, in seconds of the monotonic clock."""

    began: float
    noticed: float
    ended: float
    over: float
    """Every gateway shows that it answers and is ready."""


@dataclass
class Scene:
    world: World
    mock: Mock
    gateways: list[GatewayProcess]
    callers: list[Caller] = field(default_factory=list)

    def stream(self, group: str, count: int) -> None:
        """So many streams at each gateway."""
        for gateway in self.gateways:
            tokens = PROMPT_TOKENS + STREAM_TOKENS
            self.callers += [Caller(gateway, group, tokens, STREAM_TOKENS) for _ in range(count)]

    def group(self, name: str) -> list[Caller]:
        return [caller for caller in self.callers if caller.group == name]

    def all_show(self, up: bool) -> bool:
        return all(gateway.metric("kvgate_store_up") == up for gateway in self.gateways)

    def is_whole(self) -> bool:
        return self.all_show(True) and all(gateway.is_ready() for gateway in self.gateways)

    async def outage(self, crowd: int) -> Outage:
        began = time.monotonic()
        assert self.world.store.process
        self.world.store.process.kill()
        self.world.store.process.wait()
        await soon(lambda: self.all_show(False), "the gauge shows that the store is away")
        noticed = time.monotonic()
        self.stream("crowd", crowd)
        await asyncio.sleep(AWAY_SECONDS)
        ended = time.monotonic()
        await asyncio.to_thread(self.world.store.start)
        await soon(self.is_whole, "all is well again")
        return Outage(began, noticed, ended, time.monotonic())

    async def quiet(self) -> None:
        await soon(lambda: all(gateway.is_quiet() for gateway in self.gateways), "all was given back")
        for gateway in self.gateways:
            assert gateway.state()["debt"] == 0
            assert gateway.metric("kvgate_healed_total") == 0
            assert await Caller(gateway, "afterwards", 20, 3).ended() == COMPLETE

    def check_logs(self) -> None:
        """One error of each gateway, for the outage is shorter than the time in which it is told once."""
        for gateway in self.gateways:
            records = [json.loads(line) for line in gateway.log.read_text().splitlines()]
            errors = [record["message"] for record in records if record["level"] == "error"]
            assert len(errors) == 1, errors
            assert "the store of fleet demo is away" in errors[0]


def start(world: World, on_outage: str) -> Scene:
    costs = ("--step-base-ms", str(STEP_MS), "--step-running-us", "0", "--step-prefill-us", "0")
    mock = world.mock("--blocks", str(BUDGET + 1), *costs)
    store = QUICK_STORE | {"on_outage": on_outage, "hold_seconds": 2}
    config, (key,) = world.config([{"name": "only", "replicas": [mock.url]}], store=store)
    gateways = [world.gateway(config, key, wait=False) for _ in range(2)]
    return Scene(world, mock, [gateway.wait_ready() for gateway in gateways])


async def play(scene: Scene, crowd: int) -> tuple[Watch, Outage]:
    """Streams, steady calls, the outage in their midst, and a second of steady calls after it."""
    scene.stream("streams", STREAMS)
    body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True)
    async with arriving(scene.gateways, body, PER_SECOND) as arrivals:
        watch = Watch(scene.gateways, arrivals, scene.callers)
        watching = [asyncio.create_task(watch.hold()), asyncio.create_task(watch.scrape())]
        try:
            await asyncio.sleep(1.5)
            outage = await scene.outage(crowd)
            assert all(caller.streams for caller in scene.group("streams"))
            await asyncio.to_thread(scene.mock.slow, QUICK)
            for caller in scene.group("crowd"):
                caller.leave()
            await asyncio.sleep(1)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
    return watch, outage


async def judge(scene: Scene, watch: Watch, outage: Outage) -> None:
    """What holds for both ways."""
    assert [await caller.ended() for caller in scene.group("streams")] == [COMPLETE] * STREAMS * 2
    assert not watch.negative
    assert {up for asked, told, up in watch.up if outage.noticed < asked and told < outage.ended} == {0.0}
    around = watch.arrivals.answered(0, outage.began) + watch.arrivals.between(outage.over, math.inf)
    assert {seen.status for seen in around} == {200}
    refused = [seen for seen in watch.arrivals.seen if seen.status != 200]
    assert {(seen.status, seen.code) for seen in refused} <= {(503, "store_unavailable")}
    assert all(seen.retry_after >= 1 for seen in refused)
    await scene.quiet()
    scene.check_logs()


async def test_refuse(new_world: World) -> None:
    scene = start(new_world, "refuse")
    watch, outage = await play(scene, crowd=0)
    await judge(scene, watch, outage)
    away = watch.arrivals.answered(outage.noticed, outage.ended)
    assert len(away) > PER_SECOND * AWAY_SECONDS / 2
    assert {seen.status for seen in away} == {503}
    # The half of them, for a busy machine holds some up, on the client's side too.
    assert statistics.median(seen.seconds for seen in away) < REFUSED_SECONDS


async def test_share(new_world: World) -> None:
    """More is asked of each gateway than its share, and neither admits more."""
    scene = start(new_world, "share")
    watch, outage = await play(scene, crowd=CROWD)
    await judge(scene, watch, outage)
    assert {caller.ending for caller in scene.group("crowd")} == {"503 `store_unavailable`", LOST}
    assert BUDGET * 0.8 <= watch.peak <= BUDGET  # what is left over of a share is too small for a stream
    uneven = max(blocks for at, blocks in watch.uneven if outage.began - 1 <= at <= outage.noticed)
    assert max(watch.peaks.values()) <= BUDGET / 2 + (uneven + UNHEARD_BLOCKS) / 2, watch.peaks
    for gateway in scene.gateways:
        assert gateway.metric("kvgate_share_admissions_total") > 0
