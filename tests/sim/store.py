"""The store: a server that speaks Redis' protocol and runs the scripts as their specification, `core/books.py`."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import hiredis
import msgspec

from gateway.core.books import Books, FleetConfig, ReplicaConfig
from gateway.ledger.records import string_of
from gateway.ledger.scripts import library
from tests.sim.loop import Process
from tests.sim.network import Network, Transport

HOST = "store.sim"
URL = f"redis://{HOST}:6379"
START_MS = 1_700_000_000_000
Placement = tuple[str, int]
"""Replica and number of the attempt."""


class Store:
    """One server process after the other, with the books that each begins with."""

    def __init__(self, network: Network, ran: Callable[["Store", str, Process, str], None]) -> None:
        """`ran` is told of each script: its name, who sent it and the owner that it was for."""
        self.process = Process("store")
        self.books = Books()
        self.run = ""
        self.restarts = 0
        self.clock_offset_ms = 0
        self.copies_share = 0.0
        """Of the batches that are carried out once more a little later, as when a connection broke under the first copy
        and the second one was faster."""
        self.wakes_lost = False
        """Wake-ups are not delivered."""
        self.libraries: set[str] = set()
        """By name: as with a library, what it is called says what it is."""
        self.subscribers: dict[str, dict[StoreConnection, None]] = {}
        self.unclaimed: dict[str, Placement] = {}
        self._saved = Books()
        self._network = network
        self._ran = ran
        self._listener = network.listen(HOST, lambda: StoreConnection(self), self.process.context)
        self._begin()

    def _begin(self) -> None:
        self.restarts += 1
        self.run = f"run{self.restarts}"
        self.libraries = set()
        self.unclaimed = self._unclaimed()
        self._listener.refuses = False

    @property
    def down(self) -> bool:
        return self._listener.refuses

    @property
    def now_ms(self) -> int:
        return START_MS + int(self._network.loop.time() * 1000) + self.clock_offset_ms

    # -- faults --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """What a later restart may begin with."""
        self._saved = copy.deepcopy(self.books)

    def kill(self) -> None:
        self._listener.refuses = True
        for connection in self._network.between(None, HOST):
            self._network.cut(connection)
        self.subscribers.clear()

    def start(self, data: str) -> None:
        """Again, with its data (`kept`), with what it saved once (`old`) or with nothing (`lost`)."""
        if data == "old":
            self.books = copy.deepcopy(self._saved)
        elif data == "lost":
            self.books = Books()
        self._begin()

    # -- commands ------------------------------------------------------------------------------------------------

    def answer(self, connection: "StoreConnection", command: list[bytes]) -> bytes:
        reply = self.execute(connection, command)
        if command[0] == b"FCALL" and self._network.chance(self.copies_share):
            loop, late_seconds = self._network.loop, self._network.late_seconds() / 20  # about a round trip
            loop.call_later(late_seconds, self._carry_out_copy, connection, command, self.run)
        return reply

    def _carry_out_copy(self, connection: "StoreConnection", command: list[bytes], run: str) -> None:
        """Of a batch only: no other script is sent again after it was answered."""
        if run == self.run and not self.down and command[1].endswith(b"_step"):
            self.execute(connection, command)

    def execute(self, connection: "StoreConnection", command: list[bytes]) -> bytes:
        name, *arguments = command
        match name.upper():
            case b"FCALL":
                return self._evaluate(connection, arguments)
            case b"FUNCTION" if arguments[0] == b"LIST":
                return encode([["library_name", name] for name in self.libraries])
            case b"FUNCTION":
                self.libraries.add(library().name)
                return encode(library().name)
            case b"INFO":
                return encode(f"run_id:{self.run}\r\nrole:master\r\n")
            case b"SUBSCRIBE":
                channel = arguments[0].decode()
                self.subscribers.setdefault(channel, {})[connection] = None
                return encode(["subscribe", channel, 1])
            case b"CLIENT" | b"SELECT" | b"PING":
                return b"+OK\r\n"
            case _:
                raise AssertionError(f"the simulated store knows no {name!r}")

    def _evaluate(self, connection: "StoreConnection", arguments: list[bytes]) -> bytes:
        loaded, _, script = arguments[0].decode().rpartition("_")
        if loaded not in self.libraries:
            return b"-ERR Function not found\r\n"
        client = connection.client
        given = arguments[2 + int(arguments[1]) :]
        reply = self._run(script, given)
        self._wake(given)
        self._ran(self, script, client, given[1].decode() if script in ("hello", "step") else "")
        return encode(reply)

    def _run(self, script: str, given: list[bytes]) -> Any:
        books, now = self.books, self.now_ms
        match script:
            case "step":
                ops = [decode_op(packed) for packed in given[4:]]
                reply = books.step(now, self.run, given[1].decode(), int(given[2]), ops)
                return [*reply[:5], msgspec.msgpack.encode(reply[5]), reply[6]] if len(reply) > 5 else reply
            case "hello":
                return books.hello(now, self.run, given[1].decode())
            case "configure" if given[2] == b"fleet":
                return books.configure(now, self.run, decode_config(given[3], given[4]))
            case "configure" if given[2] == b"seat":
                return books.seat(now, self.run, given[3].decode(), given[4].decode())
            case "configure" if given[2] == b"learn":
                learned = [int(number) for number in given[6:9]]
                scraper, name, told = given[3].decode(), given[4].decode(), given[9].decode()
                return books.learn(now, self.run, scraper, name, int(given[5]), learned, told, int(given[10]))
            case "configure" if given[2] == b"distrust":
                return books.distrust(now, self.run, given[3].decode(), int(given[4]))
            case "configure" if given[2] == b"rest":
                return books.rest(now, self.run, *(argument.decode() for argument in given[3:6]))
            case "configure" if given[2] == b"shut":
                return books.set_shut(now, self.run, given[3] == b"1")
            case "configure":
                return books.observe(now, self.run, given[3].decode(), given[4] == b"1")
            case "page":
                return self._page(given[0].decode(), given[1].decode(), int(given[2]))
        raise AssertionError(script)

    def _page(self, owner: str, after: str, size: int) -> list[str]:
        ids = sorted(c.id for c in self.books.calls.values() if c.owner == owner and c.id > after)
        calls = [self.books.calls[id_] for id_ in ids[:size]]
        return [item for call in calls for item in (call.id, call.state, call.replica)]

    # -- wake-ups ------------------------------------------------------------------------------------------------

    def _unclaimed(self) -> dict[str, Placement]:
        return {c.id: (c.replica, c.attempt) for c in self.books.calls.values() if c.state == "unclaimed"}

    def _wake(self, given: list[bytes]) -> None:
        """One message for each owner with a grant that this script made, and no data."""
        before, self.unclaimed = self.unclaimed, self._unclaimed()
        new = [id_ for id_, place in self.unclaimed.items() if before.get(id_) != place]
        if self.wakes_lost:
            return
        for owner in dict.fromkeys(self.books.calls[id_].owner for id_ in new):
            for channel, connections in self.subscribers.items():
                if channel.endswith(f"wake:{owner}"):
                    for connection in connections:
                        connection.write(encode(["message", channel, ""]))


class StoreConnection(asyncio.Protocol):
    """The server's end of one connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commands = hiredis.Reader()
        self._transport: Transport | None = None

    @property
    def client(self) -> Process:
        assert self._transport is not None
        assert self._transport.peer is not None
        return self._transport.peer

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._commands.feed(data)
        while (command := self._commands.gets()) is not False:
            self.write(self._store.answer(self, command))

    def connection_lost(self, exc: Exception | None) -> None:
        for connections in self._store.subscribers.values():
            connections.pop(self, None)


PATHS = {"A": 24, "Q": 20, "R": 19, "Z": 4}
"""Where an op has its path: text for the scripts, bytes for the specification."""


def decode_op(packed: bytes) -> list[Any]:
    values = msgspec.msgpack.decode(packed, type=list[msgspec.Raw])
    at = PATHS.get(msgspec.msgpack.decode(values[0]))
    return [string_of(v) if i == at else msgspec.msgpack.decode(v) for i, v in enumerate(values)]


def encode(value: Any) -> bytes:
    """A reply in RESP 2."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return b"$%d\r\n%b\r\n" % (len(data), data)
    return b"*%d\r\n%b" % (len(value), b"".join(map(encode, value)))


def decode_config(packed_fleet: bytes, packed_replicas: bytes) -> FleetConfig:
    """What `records.config_arguments` packed."""
    lease_ms, heartbeat_ms, overtake_blocks, lanes, classes, *_ = msgspec.msgpack.decode(packed_fleet)
    return FleetConfig(
        lease_ms,
        heartbeat_ms,
        overtake_blocks,
        tuple((name, tuple(pools)) for name, pools in lanes),
        tuple((name, share) for name, share in classes),
        tuple(ReplicaConfig(*row) for row in msgspec.msgpack.decode(packed_replicas)),
    )
