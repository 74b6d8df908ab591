"""Several workers as one: what they count and hold is the same whichever is asked, and outlives each of them."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.telemetry import workers as workers_module
from gateway.telemetry.counted import Snapshot, Totals
from gateway.telemetry.workers import ANSWER_SECONDS, Place, Workers, workers_folder
from tests.processes import ADMIN_TOKEN, HANG_SECONDS, QUICK_STORE, GatewayProcess, Mock, World, sum_of
from tests.wire import Wire, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

SLOW_SECONDS = 1.0
"""What a loaded machine may add to a scrape."""
METRICS = b"GET /metrics HTTP/1.1\r\nhost: kvgate\r\n\r\n"
STATE = (
    f"GET /admin/v1/state HTTP/1.1\r\nhost: kvgate\r\nauthorization: Bearer {ADMIN_TOKEN}\r\n\r\n".encode()
)
CALLS = "kvgate_admission_requests_total"
INFLIGHT = "kvgate_inflight_requests"
MISSING = "kvgate_scrape_missing_workers"


# -- one room, several workers in it -----------------------------------------------------------------------------


class Counting:
    """A worker without a gateway: it counts, and how often it was asked."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.counted = 0
        self.snapshots = 0
        self.workers = Workers(Place(folder, number, count), self.snapshot)

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return Snapshot(os.getpid(), Totals({"n": {(): self.counted}}, {}), {"demo": self.counted}, True)


Room = Callable[..., Awaitable[list[Counting]]]


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    """Workers at the numbers given, of `count`; all of them if none are given."""
    started: list[Counting] = []

    async def start(*numbers: int, count: int = 3) -> list[Counting]:
        found = [Counting(tmp_path, number, count) for number in numbers or range(count)]
        for worker in found:
            await worker.workers.start()
        started.extend(found)
        return found

    yield start
    for worker in started:
        await worker.workers.stop()


async def test_all_are_asked(room: Room) -> None:
    everyone = await room()
    for number, worker in enumerate(everyone):
        worker.counted = 10**number
    for worker in everyone:
        roll = await worker.workers.call_roll()
        assert sorted(roll.answered) == [0, 1, 2]
        assert (roll.inflight(), list(roll.left), roll.missing) == ({"demo": 111}, [], 0)


async def test_what_was_shown_stays(room: Room, tmp_path: Path) -> None:
    one, two, _ = await room()
    two.counted = 5
    await one.workers.call_roll()
    two.counted = 6
    await two.workers.call_roll()
    for name in ("0", "1", "2"):
        (tmp_path / f"{name}.sock").unlink()
    roll = await one.workers.call_roll()
    assert (sorted(roll.answered), roll.missing) == ([0], 2)
    assert [left.totals.counters["n"][()] for left in roll.left] == [6, 0]
    assert roll.inflight() == {"demo": 0}
    successor = Counting(tmp_path, 1, 3).workers.inherited()
    assert successor is not None
    assert successor.counters["n"][()] == 6


async def test_what_is_counted_at_the_end_stays(room: Room, tmp_path: Path) -> None:
    (one,) = await room(0)
    one.counted = 4
    await one.workers.stop()
    left = Counting(tmp_path, 0, 3).workers.inherited()
    assert left is not None
    assert left.counters["n"][()] == 4


def test_the_first_at_a_place_inherits_nothing(tmp_path: Path) -> None:
    assert Counting(tmp_path, 0, 3).workers.inherited() is None


@pytest.mark.parametrize("left", [b"", b"\xff" * 10, msgspec.msgpack.encode({"pid": 1})])
def test_a_damaged_file_is_as_none(tmp_path: Path, left: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.snapshot").write_bytes(left)
    assert Counting(tmp_path, 0, 3).workers.inherited() is None
    assert "cannot be read" in caplog.text


SILENT = b""
"""Accepts, and neither answers nor closes."""


@pytest.mark.parametrize(
    "answer",
    [
        SILENT,
        b"\x00",
        b"\x00\x00\x00\x05abc",
        b"\x00\x00\x00\x03abc",
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x00\x00\x00\x00",
    ],
    ids=["silent", "half a length", "half an answer", "no snapshot", "too long", "empty"],
)
async def test_who_does_not_answer_is_missing(room: Room, tmp_path: Path, answer: bytes) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if answer == SILENT:
            await reader.read()
        writer.close()

    one, _ = await room(0, 1)
    async with await asyncio.start_unix_server(odd, str(tmp_path / "2.sock")):
        async with asyncio.timeout(ANSWER_SECONDS + 10):
            roll = await one.workers.call_roll()
    assert (sorted(roll.answered), list(roll.left), roll.missing) == ([0, 1], [], 1)


async def test_an_answer_has_a_bound(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = await room(count=2)
    assert (await one.workers.call_roll()).missing == 0
    monkeypatch.setattr(workers_module, "SNAPSHOT_BYTES_MAX", 10)
    assert (await one.workers.call_roll()).missing == 1


class Held:
    """Workers that answer once they are let; each answer tells how many were asked before."""

    def __init__(self) -> None:
        self.asked = 0
        self.let = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        snapshot = Snapshot(1, Totals({}, {}), {"demo": self.asked}, True)
        self.asked += 1
        await self.let.wait()
        raw = msgspec.msgpack.encode(snapshot)
        writer.write(len(raw).to_bytes(4, "big") + raw)
        writer.close()


async def test_all_are_asked_at_once(room: Room, tmp_path: Path) -> None:
    """Each of two answers when both were asked."""
    held = Held()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if held.asked == 1:
            held.let.set()
        await held.answer(reader, writer)

    (one,) = await room(0)
    paths = [str(tmp_path / f"{number}.sock") for number in (1, 2)]
    async with (
        await asyncio.start_unix_server(answer, paths[0]),
        await asyncio.start_unix_server(answer, paths[1]),
    ):
        roll = await one.workers.call_roll()
        held.let.set()
    assert roll.missing == 0


async def test_who_comes_while_others_ask_shares_the_next_question(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many scrape at once, a worker is asked twice; and nobody is told of the time before it came."""
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 10.0)
    held = Held()
    (one,) = await room(0, count=2)
    async with await asyncio.start_unix_server(held.answer, str(tmp_path / "1.sock")):
        first = asyncio.create_task(one.workers.call_roll())
        await soon(lambda: held.asked == 1, "the first asks")
        crowd = [asyncio.create_task(one.workers.call_roll()) for _ in range(100)]
        await asyncio.sleep(0)
        held.let.set()
        assert (await first).inflight() == {"demo": 0}
        assert {roll.inflight()["demo"] for roll in await asyncio.gather(*crowd)} == {1}
    assert held.asked == 2


async def test_who_leaves_does_not_take_the_question_along(room: Room) -> None:
    one, _ = await room(count=2)
    asking = [asyncio.create_task(one.workers.call_roll()) for _ in range(2)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert (await asking[1]).missing == 0
    assert asking[0].cancelled()
    assert (await one.workers.call_roll()).missing == 0


async def test_who_does_not_read_is_cut_off(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker keeps for one that asked and stands still is given up."""
    monkeypatch.setattr(Counting, "snapshot", _large_snapshot)
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 0.05)
    await room(0)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "0.sock"), limit=1)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(HANG_SECONDS):
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < LARGE_BYTES
    writer.close()


LARGE_BYTES = 8_000_000


def _large_snapshot(self: Counting) -> Snapshot:
    return Snapshot(1, Totals({"x" * LARGE_BYTES: {}}, {}), {}, True)


async def test_a_place_without_a_socket_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    worker = Counting(deep, 0, 2)
    await worker.workers.start()
    assert "cannot ask this one" in caplog.text
    assert (await worker.workers.call_roll()).missing == 1
    await worker.workers.stop()


def test_the_folder_is_private_and_goes_with_its_parent() -> None:
    with workers_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        Path(folder, "0.snapshot").write_bytes(b"left")
    assert not Path(folder).exists()


# -- real ones ---------------------------------------------------------------------------------------------------


def workers_of(gateway: GatewayProcess) -> dict[int, int]:
    """Its workers: number -> process."""
    pid = gateway.process.pid
    found: dict[int, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it may end meanwhile
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--worker" in words:
                found[int(words[words.index(b"--worker") + 1])] = int(child)
    return found


def folder_of(gateway: GatewayProcess) -> Path:
    words = Path(f"/proc/{next(iter(workers_of(gateway).values()))}/cmdline").read_bytes().split(b"\0")
    return Path(words[words.index(b"--workers-folder") + 1].decode())


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """They stand still, as on a machine that has no time for them."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            _wait_until_stopped(pid)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def connections_to(gateway: GatewayProcess, number: int, count: int) -> list[Wire]:
    """Connections that this worker serves: nobody else could accept them."""
    others = [pid for other, pid in workers_of(gateway).items() if other != number]
    with stopped(*others):
        wires = [await Wire.open(gateway.url) for _ in range(count)]
        for wire in wires:
            assert (await wire.ask(b"GET /health/live HTTP/1.1\r\nhost: kvgate\r\n\r\n")).status == 200
    return wires


async def connection_to(gateway: GatewayProcess, number: int) -> Wire:
    (wire,) = await connections_to(gateway, number, 1)
    return wire


async def page(wire: Wire) -> str:
    answer = await wire.ask(METRICS)
    assert answer.status == 200
    return answer.body.decode()


async def state(wire: Wire) -> dict[str, Any]:
    found: dict[str, Any] = (await wire.ask(STATE)).json()
    return found


async def several(
    world: World, workers: int = 3, *, store: str | None = None, **settings: Any
) -> tuple[GatewayProcess, Path, Mock]:
    """A gateway whose workers are all there."""
    mock = world.mock("--blocks", "20000", "--step-base-ms", "2", "--step-running-us", "0")
    pools = [{"name": "only", "replicas": [mock.url]}]
    where = QUICK_STORE | ({"url": store} if store else {})
    config, (key,) = world.config(pools, store=where, **settings)
    gateway = world.gateway(config, key, "--workers", str(workers))
    await all_there(gateway)
    return gateway, config, mock


async def all_there(gateway: GatewayProcess) -> None:
    def nobody_is_missing() -> bool:
        text = gateway.metrics()
        return MISSING in text and sum_of(MISSING, text) == 0

    await soon(nobody_is_missing, "every worker answers")


async def call(wire: Wire, key: str, max_tokens: int = 2) -> None:
    answer = await wire.ask(post(key, completion(16, max_tokens)))
    assert answer.status == 200


async def open_stream(wire: Wire, key: str) -> Wire:
    """One that runs until it is hung up."""
    await wire.send(post(key, completion(16, 1000, True, hold_seconds=120)))
    return wire


async def test_every_worker_shows_all(new_world: World) -> None:
    """MC-02: 100 streams and some finished calls, on connections of every worker; every worker is asked, five times."""
    gateway, _, mock = await several(new_world, 4)
    wires = [await connection_to(gateway, number) for number in range(4)]
    for number, wire in enumerate(wires):
        for _ in range(5 + number):
            await call(wire, gateway.key)
    streams: list[Wire] = []
    for number, count in enumerate((10, 20, 30, 40)):
        streams += [await open_stream(w, gateway.key) for w in await connections_to(gateway, number, count)]
    await soon(lambda: mock.log()["started"] == 26 + 100, "the streams run")
    for round_ in range(20):
        text = await page(wires[round_ % 4])
        assert (sum_of(CALLS, text), sum_of(INFLIGHT, text), sum_of(MISSING, text)) == (26, 100, 0)
        assert sum_of("kvgate_queue_wait_seconds_count", text) == 26
        assert (await state(wires[round_ % 4]))["inflight"] == 100
    held = (await state(wires[0]))["reserved"]
    await soon(lambda: gateway.metric("kvgate_reserved_blocks") == held, "the store is shown once")
    processes = [line for line in gateway.metrics().splitlines() if line.startswith("process_open_fds{")]
    assert [line.split("}")[0] for line in processes] == [f'process_open_fds{{worker="{n}"' for n in range(4)]
    for wire in streams:
        wire.reset()
    await soon(lambda: gateway.metric(INFLIGHT) == 0, "nothing runs any more")
    assert gateway.metric(CALLS) == 26 + 100


async def kill(gateway: GatewayProcess, number: int, sig: int = signal.SIGKILL) -> None:
    """And wait for its successor's first answer."""
    killed = workers_of(gateway)[number]
    os.kill(killed, sig)
    await soon(lambda: workers_of(gateway).get(number, killed) != killed, "another one is started")
    await all_there(gateway)


async def test_the_counts_outlive_a_killed_worker(new_world: World) -> None:
    """To the last one that a scrape had shown, and once each; each time and for all places."""
    gateway, _, _ = await several(new_world)
    files = {f"{number}.{kind}" for number in range(3) for kind in ("sock", "snapshot", "new")}
    expected = 0
    for number in (0, 1, 0):
        wire = await connection_to(gateway, number)
        for _ in range(5):
            await call(wire, gateway.key)
        expected += 5
        before = gateway.metrics()
        assert sum_of(CALLS, before) == expected
        wire.reset()
        await kill(gateway, number)
        after = gateway.metrics()
        assert sum_of(CALLS, after) == expected
        names = ("kvgate_queue_wait_seconds_count", "kvgate_reserved_unused_blocks_bucket")
        assert [sum_of(name, after) for name in names] == [sum_of(name, before) for name in names]
        assert {file.name for file in folder_of(gateway).iterdir()} <= files


async def test_a_worker_that_is_told_to_end_leaves_all_it_counted(new_world: World) -> None:
    """No scrape had shown it."""
    gateway, _, _ = await several(new_world)
    wire = await connection_to(gateway, 1)
    for _ in range(5):
        await call(wire, gateway.key)
    wire.reset()
    await kill(gateway, 1, signal.SIGTERM)
    assert gateway.metric(CALLS) == 5


async def test_counters_never_go_down_while_workers_are_killed_under_load(new_world: World) -> None:
    gateway, _, _ = await several(new_world)
    loads = [asyncio.create_task(_load(gateway)) for _ in range(6)]
    seen: list[float] = []
    try:
        await soon(lambda: gateway.metric(CALLS) > 0, "calls end")
        for number in (0, 2):
            os.kill(workers_of(gateway)[number], signal.SIGKILL)
            ends = time.monotonic() + HANG_SECONDS
            missing = -1.0
            while missing != 0 or len(workers_of(gateway)) < 3:
                assert time.monotonic() < ends
                text = await _fresh_page(gateway)
                seen.append(sum_of(CALLS, text))
                missing = sum_of(MISSING, text)
    finally:
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1]
    Wire.hang_up_all()
    await soon(lambda: gateway.metric(INFLIGHT) == 0, "the gauges tell of the living")
    assert gateway.metric(CALLS) >= seen[-1]


async def _load(gateway: GatewayProcess) -> None:
    """Calls one after the other; those of a killed worker fail, and go on with another."""
    while True:
        with contextlib.suppress(OSError, EOFError):
            wire = await Wire.open(gateway.url)
            while True:
                await call(wire, gateway.key)


async def _fresh_page(gateway: GatewayProcess) -> str:
    """Of a worker that lives: the connection of one that is killed meanwhile has no answer."""
    while True:
        with contextlib.suppress(OSError, EOFError):
            wire = await Wire.open(gateway.url)
            text = await page(wire)
            wire.close()
            return text


async def test_a_worker_that_stands_still_is_waited_for_half_a_second(new_world: World) -> None:
    """It is left out and said to be; what it had counted stays."""
    gateway, _, _ = await several(new_world)
    wires = [await connection_to(gateway, number) for number in range(3)]
    for wire in wires:
        await call(wire, gateway.key)
    stream = await open_stream(await connection_to(gateway, 0), gateway.key)
    assert sum_of(CALLS, await page(wires[0])) == 3
    with stopped(workers_of(gateway)[2]):
        took: list[float] = []
        for wire in (*wires[:2], wires[0]):
            begun = time.monotonic()
            text = await page(wire)
            took.append(time.monotonic() - begun)
            assert (sum_of(CALLS, text), sum_of(MISSING, text), sum_of(INFLIGHT, text)) == (3, 1, 1)
        # The quickest: a loaded machine may be late, and a wait that is too long is too long each time.
        assert ANSWER_SECONDS * 0.9 <= min(took) < ANSWER_SECONDS + SLOW_SECONDS
    await all_there(gateway)
    assert sum_of(CALLS, await page(wires[2])) == 3
    stream.reset()


async def test_every_worker_follows_the_configuration(new_world: World) -> None:
    """With the embedded store that they share, whose URL is the parent's word."""
    gateway, config, _ = await several(new_world, store="embedded")
    document = json.loads(config.read_text())
    document["fleets"][0]["aliases"] = ["renamed"]
    config.write_text(json.dumps(document))
    models = (
        f"GET /v1/models HTTP/1.1\r\nhost: kvgate\r\nauthorization: Bearer {gateway.key}\r\n\r\n".encode()
    )
    for number in range(3):
        wire = await connection_to(gateway, number)
        async with asyncio.timeout(HANG_SECONDS):
            while [m["id"] for m in (await wire.ask(models)).json()["data"]] != ["demo", "renamed"]:
                await asyncio.sleep(0.05)
    document["classes"] = [{"name": "other", "share": 1.0}]
    config.write_text(json.dumps(document))
    failures = 'kvgate_reload_failures_total{file="config"}'
    await soon(lambda: f"{failures} 3.0" in gateway.metrics(), "each worker says that it cannot")


@pytest.mark.parametrize("workers", [1, 2])
async def test_another_store_is_a_change_that_wants_a_restart(new_world: World, workers: int) -> None:
    """Also where the running one is embedded, and where its URL is not the file's."""
    mock = new_world.mock()
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = new_world.config(pools, store=QUICK_STORE | {"url": "embedded"})
    gateway = new_world.gateway(config, key, "--workers", str(workers))
    failures = 'kvgate_reload_failures_total{file="config"}'
    await soon(lambda: f"{failures} 0.0" in gateway.metrics(), "nothing is wrong with the file")
    document = json.loads(config.read_text())
    document["store"]["url"] = "redis://127.0.0.1:9"
    config.write_text(json.dumps(document))
    await soon(lambda: f"{failures} {workers}.0" in gateway.metrics(), "each worker says that it cannot")


async def test_one_worker_has_no_socket_and_no_folder(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
    gateway = new_world.gateway(config, key, "--workers", "1")
    text = gateway.metrics()
    assert MISSING not in text
    assert 'worker="' not in text
    assert workers_of(gateway) == {}
    assert unix_sockets_of(gateway) == []


def unix_sockets_of(gateway: GatewayProcess) -> list[str]:
    """The paths of those that it listens on or has accepted."""
    held = {os.readlink(link) for link in Path(f"/proc/{gateway.process.pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) == 8 and f"socket:[{row[6]}]" in held]
