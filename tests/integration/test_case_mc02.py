"""MC-02: 100 streams on four workers, of which one after the other is killed and replaced.

What a page sums up is the truth of the living, and what it counts never goes down.  The case kills 50 times; here it is
eight, each worker twice, unless KVGATE_TEST_LONG is set.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.test_workers import CALLS, INFLIGHT, METRICS, MISSING, folder_of, several, workers_of
from tests.processes import HANG_SECONDS, GatewayProcess, World, sum_of
from tests.wire import Wire, completion, post, soon

LONG = bool(os.environ.get("KVGATE_TEST_LONG"))
KILLS = 50 if LONG else 8
pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(600 if LONG else 150)]

WORKERS = 4
STREAMS = 100
SCRAPES = 20
IDLE_SECONDS = 900
FILES_A_WORKER = 3
"""Its socket, its counts, and for a moment those that replace them."""
FOLDER_GROWTH = 1.5
"""Counts of more digits, no more of them."""
LEASE_SECONDS = 6.0
"""After it what a killed worker held is free again."""
BODY = completion(16, 16, stream=True, fail="hang:1")


class Streams:
    """Each gives an event and then is silent until it is hung up, or its worker is gone."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.opened = 0
        self.live: dict[asyncio.Task[None], Wire] = {}
        self._gateway = gateway

    async def fill(self) -> None:
        """Up to STREAMS, each with its first event."""
        missing = STREAMS - len(self.live)
        for wire in await asyncio.gather(*(self._open() for _ in range(missing))):
            task = asyncio.create_task(_ended(wire))
            self.live[task] = wire
            task.add_done_callback(self.live.pop)
        self.opened += missing

    async def hang_up(self) -> None:
        tasks = list(self.live)
        for wire in tuple(self.live.values()):
            wire.reset()
        await asyncio.wait(tasks)

    async def _open(self) -> Wire:
        wire = await Wire.open(self._gateway.url)
        await wire.send(post(self._gateway.key, BODY))
        assert (await wire.head())[0] == 200
        assert await wire.event()
        return wire


async def _ended(wire: Wire) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            with contextlib.suppress(TimeoutError):
                assert await wire.event() is None, "an event of a silent engine"
                return


class Pages:
    """Scrapes one after the other, each on a connection of its own, that is of whichever worker takes it."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.statuses: list[int] = []
        self.unanswered = 0
        """Their workers were killed before they answered."""
        self.fallen: list[str] = []
        """Counters, and counts of histograms, below what a page before had shown."""
        self._gateway = gateway
        self._counts: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def scrape(self) -> str:
        """An answered one.  One at a time: of two at once neither is the later one."""
        async with self._turn:
            while True:
                try:
                    wire = await Wire.open(self._gateway.url)
                    answer = await wire.ask(METRICS)
                except (OSError, EOFError):
                    self.unanswered += 1
                    continue
                wire.close()
                self.statuses.append(answer.status)
                page = answer.body.decode()
                self._compare(page)
                return page

    async def forever(self) -> None:
        while True:
            await self.scrape()
            await asyncio.sleep(0.05)

    def _compare(self, page: str) -> None:
        counts = counts_of(page)
        self.fallen += [name for name, count in self._counts.items() if counts.get(name, 0.0) < count]
        self._counts = counts


def counts_of(page: str) -> dict[str, float]:
    """Ours; those of a process (its seconds of processor time) end with it."""
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("kvgate_"))
    endings = ("_total", "_count", "_bucket")
    return {name: float(value) for name, value in rows if name.partition("{")[0].endswith(endings)}


@asynccontextmanager
async def scraping(pages: Pages) -> AsyncIterator[None]:
    task = asyncio.create_task(pages.forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


class Scene:
    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.streams = Streams(gateway)
        self.pages = Pages(gateway)

    async def shows(self, inflight: int) -> None:
        """A page on which no worker is missing, and that has so many calls."""
        async with asyncio.timeout(HANG_SECONDS):
            while not _is_whole(await self.pages.scrape(), inflight):
                await asyncio.sleep(0.02)

    async def kill(self, number: int) -> None:
        """And wait for its successor."""
        killed = workers_of(self.gateway)[number]
        os.kill(killed, signal.SIGKILL)
        await soon(lambda: workers_of(self.gateway).get(number, killed) != killed, "another is started")
        await self.shows(len(self.streams.live))
        await self.streams.fill()
        await self.shows(STREAMS)

    def folder(self) -> tuple[int, int]:
        """Files and their bytes."""
        sizes = [size for file in folder_of(self.gateway).iterdir() if (size := _bytes_of(file)) is not None]
        return len(sizes), sum(sizes)


def _is_whole(page: str, inflight: int) -> bool:
    return sum_of(MISSING, page) == 0 and sum_of(INFLIGHT, page) == inflight


def _bytes_of(file: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):  # replaced in this moment
        return file.stat().st_size
    return None


async def test_pages_are_true_while_workers_are_killed(new_world: World) -> None:
    gateway, _, _ = await several(new_world, WORKERS, upstream={"idle_seconds": IDLE_SECONDS})
    scene = Scene(gateway)
    await scene.streams.fill()
    await scene.shows(STREAMS)
    for _ in range(SCRAPES):
        assert sum_of(INFLIGHT, await scene.pages.scrape()) == STREAMS
    await scene.kill(0)
    _, bytes_before = scene.folder()
    async with scraping(scene.pages):
        for number in range(1, KILLS):
            await scene.kill(number % WORKERS)
            files, bytes_ = scene.folder()
            assert files <= FILES_A_WORKER * WORKERS
            assert bytes_ <= FOLDER_GROWTH * bytes_before
        await scene.streams.hang_up()
        await scene.shows(0)
    assert set(scene.pages.statuses) == {200}
    assert scene.pages.unanswered <= KILLS, "a scrape failed although no worker was killed under it"
    assert scene.pages.fallen == []
    assert scene.streams.opened > STREAMS, "no worker that was killed had streams"
    await soon(gateway.is_quiet, "what killed workers held is free", LEASE_SECONDS + 10)
    page = await scene.pages.scrape()
    assert (sum_of(INFLIGHT, page), sum_of("kvgate_queue_depth", page)) == (0, 0)
    assert STREAMS <= sum_of(CALLS, page) <= scene.streams.opened
