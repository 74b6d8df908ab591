"""Connections in virtual time: bytes in order, late by a latency, held up by a partition or lost with a connection.

What is on its way when one side closes still arrives, as on a real network: that is how a late copy of a batch comes
to be executed after its sender has given it up and sent it again elsewhere.
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.loop import PROCESS, Process, VirtualLoop

LATENCY_SECONDS = (0.0002, 0.001)
LATE_SECONDS = 0.02
"""Mean delay of a message whose connection broke: its copy on the next connection comes first or second."""
Factory = Callable[[], asyncio.BaseProtocol]


class Route:
    """The way between one process and one host, both directions."""

    def __init__(self) -> None:
        self.latency_seconds = LATENCY_SECONDS
        self.up_held = False
        """Bytes towards the host wait; connections are not answered."""
        self.down_held = False
        self.breaks = 0.0
        """Share of the messages to the host that end their connection for the sender, and arrive late all the same."""


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: "Network", route: Route, is_up: bool) -> None:
        self.start: Transport | None = None
        self.end: Transport | None = None
        """Where it leads to."""
        self._network = network
        self._route = route
        self._is_up = is_up
        self._on_way: deque[bytes | Exception | None] = deque()
        self._last_at = 0.0

    @property
    def held(self) -> bool:
        return self._route.up_held if self._is_up else self._route.down_held

    def send(self, item: bytes | Exception | None) -> None:
        """Bytes, None for the end, an exception for a reset."""
        assert self.end is not None
        self._on_way.append(item)
        loop, late_seconds = self._network.loop, self._network.latency(self._route)
        if self._is_up and item and self._network.chance(self._route.breaks):
            late_seconds += self._network.late_seconds()
            assert self.start is not None
            loop.call_later(
                self._network.latency(self._route), self.start.break_off, context=self.start.context
            )
        self._last_at = max(self._last_at, loop.time() + late_seconds)
        loop.call_at(self._last_at, self._arrive, context=self.end.context)

    def _arrive(self) -> None:
        if self.held:
            self._network.hold(self)
        else:
            self.flush(1)

    def flush(self, count: int | None = None) -> None:
        """Deliver what is on its way, all of it or the first `count` pieces."""
        assert self.end is not None
        for _ in range(len(self._on_way) if count is None else count):
            if not self._on_way:
                return
            self.end.arrived(self._on_way.popleft())

    def lose(self, random_: random.Random) -> None:
        """What is on its way is lost, but for a beginning that may be a part of a message."""
        items, self._on_way = self._on_way, deque()
        for item in items:
            if not isinstance(item, bytes) or random_.random() < 0.5:
                if isinstance(item, bytes) and self.end is not None and random_.random() < 0.5:
                    self.end.arrived(item[: random_.randrange(len(item) + 1)])
                return
            if self.end is not None:
                self.end.arrived(item)


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: "Network", pipe: Pipe, context: contextvars.Context) -> None:
        super().__init__()
        self.context = context
        self.process: Process | None = context.get(PROCESS)
        self.peer: Process | None = None
        self._network = network
        self._pipe = pipe
        self._protocol: Any = None
        self._closed = False
        self._gone = False
        self._reading = True
        self._unread: deque[bytes | Exception | None] = deque()

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def arrived(self, item: bytes | Exception | None) -> None:
        self._unread.append(item)
        self._read()

    def _read(self) -> None:
        while self._unread and self._reading and not self._closed:
            item = self._unread.popleft()
            if isinstance(item, bytes):
                self._protocol.data_received(item)
            elif item is None:
                if not self._protocol.eof_received():
                    self.close()
            else:
                self.vanish(item)

    # -- asyncio's side ------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if not self._closed and not (self.process and self.process.dead):
            self._pipe.send(bytes(data))

    def close(self) -> None:
        if not self._closed:
            self._pipe.send(None)
            self.vanish(None)

    def abort(self) -> None:
        self.close()

    def break_off(self) -> None:
        """This end is told that the connection is gone; what it sent before arrives."""
        if not self._closed:
            self._pipe.send(None)
            self.vanish(ConnectionResetError("broken off by the network"))

    def vanish(self, error: Exception | None) -> None:
        """This end is gone; the other one hears of it in its own way."""
        if not self._closed:
            self._closed = True
            self._network.forget(self)
            self._network.loop.call_soon(self._lose, error, context=self.context)

    def _lose(self, error: Exception | None) -> None:
        if not self._gone:
            self._gone = True
            self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._network.loop.call_soon(self._read, context=self.context)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered here."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Connection:
    """Both ends, as the network sees them."""

    def __init__(self, client: Transport, server: Transport, up: Pipe, down: Pipe, host: str) -> None:
        self.client, self.server = client, server
        self.up, self.down = up, down
        self.host = host


class Listener:
    def __init__(self, factory: Factory, context: contextvars.Context) -> None:
        self.factory = factory
        self.context = context
        self.refuses = False


class Network:
    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.listeners: dict[str, Listener] = {}
        self.connections: dict[Connection, None] = {}
        self._random = random.Random(seed)
        self._routes: dict[tuple[str, str], Route] = {}
        self._held: dict[Pipe, None] = {}
        loop.network = self

    def listen(self, host: str, factory: Factory, context: contextvars.Context) -> Listener:
        self.listeners[host] = Listener(factory, context)
        return self.listeners[host]

    def route(self, process: str, host: str) -> Route:
        return self._routes.setdefault((process, host), Route())

    def latency(self, route: Route) -> float:
        return self._random.uniform(*route.latency_seconds)

    def chance(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def late_seconds(self) -> float:
        """Between one round trip and many."""
        return self._random.expovariate(1 / LATE_SECONDS)

    async def connect(self, factory: Factory, host: str, port: int) -> tuple[Transport, Any]:
        """Raises OSError; waits while the way is held up."""
        process = PROCESS.get()
        assert process is not None
        if process.dead:
            raise OSError("this process was killed")
        route, listener = self.route(process.name, host), self.listeners[host]
        await asyncio.sleep(2 * self.latency(route))
        while route.up_held or route.down_held:
            await asyncio.sleep(0.05)
        if listener.refuses:
            raise ConnectionRefusedError(f"{host} refuses")
        up, down = Pipe(self, route, is_up=True), Pipe(self, route, is_up=False)
        client = up.start = down.end = Transport(self, up, process.context)
        server = down.start = up.end = Transport(self, down, listener.context)
        client.peer, server.peer = server.process, client.process
        self.connections[Connection(client, server, up, down, host)] = None
        protocol = factory()
        client.begin(protocol)
        listener.context.copy().run(server.begin, listener.factory())
        return client, protocol

    def forget(self, transport: Transport) -> None:
        """Connections without a living end are not listed."""
        for connection in list(self.connections):
            if connection.client.is_closing() and connection.server.is_closing():
                del self.connections[connection]

    # -- faults --------------------------------------------------------------------------------------------------

    def hold(self, pipe: Pipe) -> None:
        self._held[pipe] = None

    def release(self) -> None:
        """Let go what waited on ways that are free again."""
        for pipe in [pipe for pipe in self._held if not pipe.held]:
            del self._held[pipe]
            assert pipe.end is not None
            self.loop.call_soon(pipe.flush, context=pipe.end.context)

    def between(self, process: str | None, host: str) -> list[Connection]:
        return [
            c
            for c in self.connections
            if c.host == host and (process is None or (c.client.process and c.client.process.name == process))
        ]

    def cut(self, connection: Connection) -> None:
        """A reset in both directions; of what is on its way a part arrives."""
        for pipe in (connection.up, connection.down):
            assert pipe.end is not None
            pipe.end.context.copy().run(pipe.lose, self._random)
        for end in (connection.client, connection.server):
            end.vanish(ConnectionResetError("reset by the network"))

    def kill(self, process: Process) -> None:
        """All its connections end for the others; it does not know."""
        for connection in list(self.connections):
            if connection.client.process is process and not connection.client.is_closing():
                connection.up.send(ConnectionResetError("its process was killed"))
