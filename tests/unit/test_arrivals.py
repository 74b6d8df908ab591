"""What engines sent at once is passed on in turns of the loop, each connection's reads in their order."""

import asyncio
import itertools
import random

import pytest

from gateway.upstream.api import Headers, UpstreamRequest
from gateway.upstream.arrivals import SMALL_BYTES_MAX, WAITING_MAX, Arrivals
from gateway.upstream.client import EngineConnection
from gateway.upstream.limits import UpstreamLimits

LARGE = bytes(SMALL_BYTES_MAX + 1)


class Connection:
    def __init__(self, log: list[tuple[str, bytes]], name: str = "one") -> None:
        self.waiting = 0
        self.log = log
        self.name = name
        self.fails = False

    def take(self, data: bytes) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError(self.name)
        self.log.append((self.name, data))


async def turns_until(log: list[tuple[str, bytes]], count: int) -> list[int]:
    """How many had been taken at each turn of the loop."""
    found = [len(log)]
    while len(log) < count:
        await asyncio.sleep(0)
        found.append(len(log))
    return found


async def test_so_many_are_passed_on_in_a_turn_and_others_run_in_between() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals = Arrivals(reads=4)
    for number in range(10):
        arrivals.add(Connection(log, str(number)), b"x")
    assert await turns_until(log, 10) == [4, 8, 10]
    assert [name for name, _ in log] == [str(number) for number in range(10)]


async def test_a_turn_that_is_over_makes_room_for_what_comes_at_once() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals, connection = Arrivals(reads=1), Connection(log)
    for number in range(5):
        arrivals.add(connection, b"%d" % number)
        assert len(log) == number + 1
        await asyncio.sleep(0)


async def test_what_waits_counts_against_the_turn_in_which_it_is_passed_on() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals, connection = Arrivals(reads=2), Connection(log)
    for number in range(4):
        arrivals.add(connection, b"%d" % number)
    await asyncio.sleep(0)
    arrivals.add(connection, b"4")
    assert [data for _, data in log] == [b"0", b"1", b"2", b"3"]
    assert connection.waiting == 1
    await turns_until(log, 5)
    assert connection.waiting == 0


@pytest.mark.parametrize("seed", range(20))
async def test_no_read_overtakes_another_one_of_its_connection(seed: int) -> None:
    chance, log = random.Random(seed), list[tuple[str, bytes]]()
    arrivals = Arrivals(reads=chance.randint(1, 5))
    connections = [Connection(log, str(number)) for number in range(6)]
    sent: dict[str, list[bytes]] = {connection.name: [] for connection in connections}
    for number in range(300):
        connection = chance.choice(connections)
        data = chance.choice([b"%d" % number, LARGE + b"%d" % number])
        sent[connection.name].append(data)
        arrivals.add(connection, data)
        if not chance.randrange(4):
            await asyncio.sleep(0)
        if not chance.randrange(20):
            arrivals.flush(connection)
            assert [d for name, d in log if name == connection.name] == sent[connection.name]
    await turns_until(log, 300)
    for connection in connections:
        assert [data for name, data in log if name == connection.name] == sent[connection.name]
        assert connection.waiting == 0


async def test_a_large_read_does_not_wait_and_what_came_before_it_goes_first() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals = Arrivals(reads=1)
    first, second = Connection(log, "first"), Connection(log, "second")
    arrivals.add(first, b"1")
    arrivals.add(second, b"2")
    arrivals.add(first, b"3")
    arrivals.add(first, LARGE)
    assert log == [("first", b"1"), ("first", b"3"), ("first", LARGE)]
    assert second.waiting == 1
    await turns_until(log, 4)


async def test_of_a_loop_that_is_late_no_more_wait_than_may() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals, connection = Arrivals(reads=1), Connection(log)
    for number in range(WAITING_MAX + 100):
        arrivals.add(connection, b"%d" % number)
    assert connection.waiting == WAITING_MAX
    assert [data for _, data in log] == [b"%d" % number for number in range(100)]


async def test_what_one_raises_stops_nobody_else() -> None:
    log: list[tuple[str, bytes]] = []
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    arrivals = Arrivals(reads=2)
    connections = [Connection(log, str(number)) for number in range(8)]
    connections[4].fails = True
    for connection in connections:
        arrivals.add(connection, b"x")
    await turns_until(log, 7)
    assert [name for name, _ in log] == ["0", "1", "2", "3", "5", "6", "7"]
    assert [str(error) for error in raised] == ["4"]
    assert all(connection.waiting == 0 for connection in connections)


async def test_who_comes_after_a_failure_is_behind_those_who_wait() -> None:
    log: list[tuple[str, bytes]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, __: None)
    arrivals, connection, failing = Arrivals(reads=2), Connection(log), Connection(log)
    for each in (connection, connection, failing, connection):
        arrivals.add(each, b"%d" % len(log))
    failing.fails = True
    await asyncio.sleep(0)
    arrivals.add(connection, b"last")
    await turns_until(log, 4)
    assert log[-1] == ("one", b"last")


async def test_while_little_comes_the_loop_is_asked_nothing() -> None:
    """Where a turn ends matters only to reads that it has no room for."""
    log: list[tuple[str, bytes]] = []
    arrivals, connection = Arrivals(reads=3), Connection(log)
    for used in (1, 2):
        arrivals.add(connection, b"x")
        await asyncio.sleep(0)
        assert (arrivals.left, arrivals._ending) == (3 - used, None)
    arrivals.add(connection, b"x")
    arrivals.add(connection, b"later")
    assert len(log) == 3
    await turns_until(log, 4)
    assert arrivals.left == 2


async def test_an_idle_one_asks_nothing_of_the_loop() -> None:
    log: list[tuple[str, bytes]] = []
    arrivals = Arrivals(reads=2)
    arrivals.add(Connection(log), b"x")
    for _ in itertools.repeat(None, 3):
        await asyncio.sleep(0)
    assert arrivals._ending is None


# -- a connection whose reads wait ---------------------------------------------------------------------------------


class Socket(asyncio.Transport):
    """Keeps nothing; closed when it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: object) -> None: ...

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0


class Reader:
    """A receiver that keeps what it gets."""

    started = True

    def __init__(self) -> None:
        self.got = b""

    async def head(self, status: int, headers: Headers) -> None: ...

    async def body(self, data: bytes) -> None:
        self.got += data

    def take(self, data: bytes) -> bool:
        self.got += data
        return True

    def take_chunk(self, chunk: bytes, start: int) -> bool:
        return False


class Idle(dict[EngineConnection, None]):
    """Kept connections; knows whether one was ever kept."""

    kept = False

    def __setitem__(self, connection: EngineConnection, value: None) -> None:
        self.kept = True
        super().__setitem__(connection, value)


class Answer:
    """One exchange over a connection whose reads all wait until the loop's next turn, or after `reads`."""

    def __init__(self, reads: int = 1) -> None:
        self.idle = Idle()
        self.arrivals = Arrivals(reads)
        self.connection = EngineConnection(self.idle, self.arrivals)
        self.socket, self.reader = Socket(), Reader()
        self.connection.connection_made(self.socket)
        limits = UpstreamLimits(60, 60, 60, 60)
        request = UpstreamRequest("http://engine", "/", (), b"{}")
        self.task = asyncio.create_task(self.connection.exchange(b"", request, self.reader, limits))

    async def read(self, *pieces: bytes) -> None:
        await asyncio.sleep(0)
        self.arrivals.add(Connection([]), b"another one's")
        for piece in pieces:
            self.connection.data_received(piece)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
ENDLESS_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def test_what_a_connection_reads_counts_against_the_turn() -> None:
    answer = Answer(reads=4)
    await answer.read(ENDLESS_HEAD, b"an", b"sw", b"er")  # after one of another connection
    assert (answer.reader.got, answer.connection.waiting, answer.arrivals.left) == (b"answ", 1, 0)
    await asyncio.sleep(0)
    assert (answer.reader.got, answer.arrivals.left) == (b"answer", 3)
    answer.connection.connection_lost(None)
    await answer.task


async def test_a_connection_is_kept_when_its_answer_was_read_in_turns() -> None:
    answer = Answer()
    await answer.read(HEAD, b"an", b"sw")
    await answer.task
    assert answer.reader.got == b"answ"
    assert list(answer.idle) == [answer.connection]
    assert not answer.socket.aborted
    answer.connection.abort()


async def test_a_connection_is_not_kept_while_bytes_of_it_wait() -> None:
    """They belong to no call: the next one would take them for its answer."""
    answer = Answer()
    await answer.read(HEAD + b"answ", b"HTTP/1.1 200 OK\r\n", b"content-length: 0\r\n\r\n", b"more", b"more")
    await answer.task
    assert not answer.idle.kept
    assert answer.socket.aborted


@pytest.mark.parametrize("end", ["eof_received", "connection_lost"])
async def test_what_came_before_the_end_is_read_before_it(end: str) -> None:
    answer = Answer()
    await answer.read(ENDLESS_HEAD, b"an", b"swer")
    answer.connection.eof_received() if end == "eof_received" else answer.connection.connection_lost(None)
    await answer.task
    assert answer.reader.got == b"answer"
