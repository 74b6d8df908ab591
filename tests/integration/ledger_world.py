"""A fleet of its own in a real store, and the gateway processes that share it, each a `ValkeyLedger` with its task."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.capacity import Learned, Reading
from gateway.core.events import Event, Healed
from gateway.core.identity import Identity
from gateway.ledger.api import Admission, Grant
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.records import decode_record
from gateway.ledger.reservation import Ask
from gateway.ledger.scripts import KEY_NAMES, key_prefix
from gateway.ledger.valkey import HoldLimits, ValkeyLedger

WAIT_SECONDS = 30.0
"""Longest that a test waits for what has to happen; a busy machine may stand still for seconds."""
HOLD = HoldLimits(seconds=40.0, calls_max=256, bytes_max=1 << 26)
"""Longer than a test waits: who wants a call refused says for how long it is held."""
PATIENT_SECONDS = 40.0
"""For replies, where no stall of the machine may look like an outage."""
_numbers = itertools.count()


@contextmanager
def running_store(*options: str) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(*options)
    try:
        store.start()
        yield store
    finally:
        store.stop()


def fleet_config(
    *limits: int, lease_ms: int = 600, heartbeat_ms: int = 50, sequences_max: int = 5000
) -> FleetConfig:
    """One pool; a replica `r0`, `r1`... for each limit."""
    replicas = (
        ReplicaConfig(f"r{i}", "p", limit, limit, sequences_max, 1000) for i, limit in enumerate(limits)
    )
    classes = (("high", 0), ("normal", 200))
    return FleetConfig(lease_ms, heartbeat_ms, max(limits), (("a", ("p",)),), classes, tuple(replicas))


def demand(blocks: int = 10, **changes: Any) -> Admission:
    values: dict[str, Any] = {
        "key": "k", "class_": "normal", "lane": "a", "blocks": blocks, "sequences": 1, "prefill": 0, "cost": blocks,
        "wait_ms": 60_000, "weight": 1, "blocks_max": -1, "requests_max": -1, "queue_max": 1000,
        "queue_key_max": 1000, "identity": Identity("k", "/v1/completions", b"%d" % next(_numbers)),
    }  # fmt: skip
    return Admission(**{**values, **changes})


async def eventually(holds: Callable[[], Any], seconds: float = WAIT_SECONDS) -> None:
    """Return as soon as it holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@dataclass
class Member:
    """One gateway process."""

    ledger: ValkeyLedger
    events: list[Event] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Blocks of the calls whose place was given away, as they were told."""
    task: "asyncio.Task[None] | None" = None

    def open(self, blocks: int = 10, **changes: Any) -> Ask:
        return self.ledger.open(demand(blocks, **changes), lambda: self.lost.append(blocks))

    async def reserve(self, blocks: int = 10, **changes: Any) -> Ask:
        """A call that is running."""
        ask = self.open(blocks, **changes)
        answer = await asyncio.wait_for(ask.granted(), WAIT_SECONDS)
        assert isinstance(answer, Grant), answer
        return ask

    def go_on(self) -> None:
        self.task = asyncio.create_task(self.ledger.run())

    async def stop(self) -> None:
        """The process sleeps, or is dead: it sends nothing any more."""
        if self.task:
            self.task.cancel()
            await asyncio.wait([self.task])
            self.task = None

    def be_patient(self, reply_seconds: float = PATIENT_SECONDS) -> None:
        """From its next command on it waits so long for a reply."""
        self.ledger._keeper._connection._reply_seconds = reply_seconds

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def healed(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, Healed):
                found[event.kind] = found.get(event.kind, 0) + event.count
        return found


class World:
    def __init__(self, path: str, config: FleetConfig) -> None:
        self.fleet = f"f{next(_numbers)}"
        self.path = path
        self.config = config
        self.store = redis.Redis(unix_socket_path=path, protocol=2)
        self.members: list[Member] = []

    async def join(self, url: str = "", hold: HoldLimits = HOLD, **options: Any) -> Member:
        """A process that is ready to serve."""
        member = self.add(url, hold, **options)
        member.go_on()
        await eventually(lambda: member.ledger.ready)
        return member

    def add(self, url: str = "", hold: HoldLimits = HOLD, **options: Any) -> Member:
        """A process that does not run yet."""
        events: list[Event] = []
        url = url or f"unix://{self.path}"
        ledger = ValkeyLedger(url, self.fleet, lambda: self.config, hold, events.append, **options)
        self.members.append(Member(ledger, events))
        return self.members[-1]

    async def learn_cache(self, member: Member, replica: str = "r0", process: float = 1.0) -> None:
        """It reads that the engine, whose process began then, has a prefix cache."""
        seat = await member.ledger.seats.seat(replica)
        assert seat
        engine = Reading(num_gpu_blocks=1000, started_at=process, prefix_caching=True)
        assert await member.ledger.seats.learn(
            replica, seat.number + 1, Learned(engine=engine), seat.configured
        )

    # -- what the store holds ------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        return key_prefix(self.fleet) + name

    def rows(self, name: str, kind: str) -> dict[str, dict[str, Any]]:
        return {k.decode(): decode_record(kind, v) for k, v in self.store.hgetall(self.key(name)).items()}

    def calls(self) -> dict[str, dict[str, Any]]:
        return self.rows("calls", "call")

    def states(self) -> dict[str, str]:
        return {id_: call["state"] for id_, call in self.calls().items()}

    def used(self) -> int:
        return sum(row["used"] for row in self.rows("replicas", "replica").values())

    def empty(self) -> bool:
        """No call is left, nor a trace of one in any index."""
        left = ("calls", "queue", "order", "parked", "owned", "outbox", "deadlines", "prefixes")
        return not any(self.store.exists(self.key(name)) for name in left) and self.used() == 0

    def check(self) -> None:
        """What has to be true after every script."""
        calls = self.calls().values()
        for name, row in self.rows("replicas", "replica").items():
            held = [c for c in calls if c["replica"] == name]
            assert row["used"] == sum(c["held"] for c in held) + row["shared"]
            assert row["sequences"] == sum(c["sequences"] for c in held)
            assert row["prefill"] == sum(c["prefilling"] for c in held)

    def key_names(self) -> list[str]:
        return [self.key(name) for name in KEY_NAMES]


@asynccontextmanager
async def world(path: str, *limits: int, **options: Any) -> AsyncIterator[World]:
    """On leaving: nothing failed unheard on the loop, and no task is left."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    before = asyncio.all_tasks()
    built = World(path, fleet_config(*limits, **options))
    try:
        yield built
        built.check()
    finally:
        for member in built.members:
            await member.stop()
        built.store.close()
    await asyncio.sleep(0)
    assert not failures, failures
    assert asyncio.all_tasks() <= before
