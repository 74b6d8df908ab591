"""Real processes with streams in flight, something that goes wrong among them, and the time until all is right again.

A `Scene` is two gateways on one store, each by a way of its own that can be made slow or broken, and two mock engines.
Streams fill the engines, calls wait at both gateways, and then a fault strikes.  While it lasts the books are looked at
again and again; afterwards they must be exactly what the clients have open, and in the end empty.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from gateway.core.invariants import Snapshot, violations
from gateway.core.learned import LearnedLengths
from gateway.core.lengths import Watched
from gateway.core.modes import Mode
from gateway.ledger.lengths import SharedLengths
from gateway.ledger.verify import snapshot_of
from tests.conformance.books import read_content
from tests.faults.callers import COMPLETE, Caller, Crowd, error_event
from tests.faults.proxy import StoreProxy, store_proxy
from tests.processes import ADMIN_TOKEN, GatewayProcess, Mock, World, world
from tests.wire import blocks_of, soon

LEASE_SECONDS = 1.5
HEARTBEAT_SECONDS = 0.25
GATEWAYS = REPLICAS = 2
STEP_MS = 10
"""Of the mock engines: a token of every stream takes this long."""
FLEET = "demo"
PROMPT_TOKENS = 40
KIND = "normal:demo"
LEARNED_CALLS = 300
WHOLE_SECONDS = 30.0
"""Longest that a fault may leave its mark."""
LOOK_SECONDS = 0.05
"""Between two looks at the books."""


@dataclass(frozen=True)
class Size:
    """How much is in flight when the fault strikes."""

    streams: int
    """At each gateway."""
    waiting: int
    """At each gateway."""


SHORT = Size(streams=3, waiting=1)
FULL = Size(streams=12, waiting=4)


@dataclass(frozen=True)
class Needs:
    """What a fault's scene is made of."""

    stream_tokens: int = 250
    """Output of each stream; with `STEP_MS` its length in time, which has to be longer than the fault."""
    waiting_tokens: int = 30
    """Output of each call that waits.  It needs as many blocks as a stream."""
    room: bool = False
    """The engines have twice the blocks that the streams need, and nobody waits."""
    store_options: tuple[str, ...] = ()
    proxied: bool = False
    """Each gateway reaches the store by a `StoreProxy`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the gateways, by section."""
    may_exceed: bool = False
    """More may be held on a replica than its limit."""
    mode: Mode = Mode.GUARANTEED
    """Of the pool."""
    learned: tuple[int, ...] = ()
    """Output tokens at which calls ended before."""


@dataclass(frozen=True)
class Found:
    """What a run showed; one row of the table."""

    in_flight: dict[str, int]
    """Clients by group, when the fault struck."""
    seen: dict[str, dict[str, int]]
    """What they saw: group -> ending -> clients."""
    leaked_blocks: int
    whole_seconds: float


class Scene:
    def __init__(self, here: World, size: Size, needs: Needs) -> None:
        self.here = here
        self.size = size
        self.needs = needs
        self.crowd = Crowd()
        self.mocks: list[Mock] = []
        self.gateways: list[GatewayProcess] = []
        self.living: list[GatewayProcess] = []
        """Gateways that should work."""
        self.proxies: list[StoreProxy] = []
        self.store = redis.Redis(unix_socket_path=str(here.store.socket), protocol=2)
        self.in_flight: dict[str, int] = {}
        self.whole_seconds = 0.0
        self._mended_at = 0.0
        self.wrong: list[str] = []
        """What looks at the books found."""

    # -- before ------------------------------------------------------------------------------------------------------

    async def start(self, stack: AsyncExitStack) -> None:
        blocks = self.size.streams * blocks_of(PROMPT_TOKENS, self.needs.stream_tokens)
        sizes = ("--blocks", str(blocks * (1 + self.needs.room) + 1), "--step-base-ms", str(STEP_MS))
        options = (*sizes, "--step-running-us", "0", "--step-prefill-us", "0")
        starts = (asyncio.to_thread(self.here.mock, *options) for _ in range(REPLICAS))
        self.mocks = list(await asyncio.gather(*starts))
        await self._teach()
        config, (key,) = self._config()
        for _ in range(GATEWAYS):
            environ = {}
            if self.needs.proxied:
                proxy = await stack.enter_async_context(store_proxy(str(self.here.store.socket), tcp=True))
                self.proxies.append(proxy)
                environ = {"KVGATE_STORE__URL": proxy.url}
            self.gateways.append(self.here.gateway(config, key, wait=False, **environ))
        self.living = list(self.gateways)
        await asyncio.gather(*(asyncio.to_thread(gateway.wait_ready) for gateway in self.gateways))
        await soon(lambda: all(map(self._has_learned, self.gateways)), "every gateway knows what was learned")

    async def _teach(self) -> None:
        """As gateways that are no more have told the store."""
        if not self.needs.learned:
            return
        lengths = LearnedLengths()
        for written in self.needs.learned * (LEARNED_CALLS // len(self.needs.learned)):
            news: dict[int, tuple[int, int]] = {}
            Watched().end(written, True, news)
            lengths.observe(KIND, news)
        shared = SharedLengths(self.here.store.url, FLEET, lengths, lambda _: None, reply_seconds=30)
        await shared.exchange()
        shared.close()

    def _has_learned(self, gateway: GatewayProcess) -> bool:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        found = gateway.client.get("/admin/v1/lengths", headers=headers).raise_for_status().json()
        return bool(found["fleets"][FLEET]) or not self.needs.learned

    def _config(self) -> Any:
        settings = {name: dict(section) for name, section in self.needs.settings.items()}
        timing = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": HEARTBEAT_SECONDS}
        store = timing | settings.pop("store", {})
        pool = {"name": "only", "mode": self.needs.mode, "replicas": [mock.url for mock in self.mocks]}
        return self.here.config([pool], store=store, **settings)

    async def fill(self) -> None:
        """Streams at every gateway, and, where the engines are full then, calls that wait."""
        for gateway in self.gateways:
            for _ in range(self.size.streams):
                self.call(gateway)
        await self.crowd.begun(self.size.streams * len(self.gateways))
        if self.needs.room:
            return
        for gateway in self.gateways:
            for _ in range(self.size.waiting):
                self.call(gateway, "waiting", self.needs.waiting_tokens)
        waiting = self.size.waiting * len(self.gateways)
        await soon(lambda: _counts(self.books())[1] == waiting, f"{waiting} calls wait")
        await self._replies_arrived()

    async def _replies_arrived(self) -> None:
        """What the store knows its gateways know too: each has sent another heartbeat, and so had its last reply."""
        before = self.books().owners

        def renewed() -> bool:
            return all(end > before[owner] for owner, end in self.books().owners.items())

        await soon(renewed, "every gateway's lease is renewed")

    def call(
        self, gateway: GatewayProcess, group: str = "streams", output_tokens: int = 0, **script: Any
    ) -> Caller:
        """One more client.  Every call needs the blocks of a stream, and ends earlier where its output is shorter."""
        tokens = PROMPT_TOKENS + self.needs.stream_tokens
        output_tokens = output_tokens or self.needs.stream_tokens
        return self.crowd.add(Caller(gateway, group, tokens, output_tokens, **script))

    def call_each(self, group: str, output_tokens: int = 30, **script: Any) -> list[Caller]:
        """One more client of each living gateway."""
        return [self.call(gateway, group, output_tokens, **script) for gateway in self.living]

    # -- the fault ---------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """What is in flight now is what the table tells."""
        groups = [caller.group for caller in self.crowd.callers if not caller.ending]
        self.in_flight = {group: groups.count(group) for group in dict.fromkeys(groups)}
        self._mended_at = time.monotonic()

    def mended(self) -> None:
        """The fault is over: from now on it counts how long its marks stay."""
        self._mended_at = time.monotonic()

    def lose(self, gateway: GatewayProcess) -> None:
        """It does not count any more."""
        self.living.remove(gateway)

    def kill_store(self) -> None:
        assert self.here.store.process
        self.here.store.process.kill()
        self.here.store.process.wait()

    # -- what clients saw --------------------------------------------------------------------------------------------

    def expect(self, endings: Mapping[str, str]) -> None:
        """All clients of a group saw the same."""
        seen = {group: set(found) for group, found in self.crowd.endings().items()}
        assert seen == {group: {ending} for group, ending in endings.items()}, self.crowd.endings()

    def expect_at(self, gateway: GatewayProcess, streams: str | Mapping[str, int], waiting: str = "") -> None:
        """All clients of that gateway saw the same, or so many of its streams each; `waiting` where calls waited."""
        seen = self.crowd.endings(lambda caller: caller.gateway is gateway)
        expected = {"streams": {streams: self.size.streams} if isinstance(streams, str) else streams}
        if waiting:
            expected["waiting"] = {waiting: self.size.waiting}
        assert seen == expected

    def expect_places_lost(self, slept: GatewayProcess, other: GatewayProcess) -> None:
        """As many streams of one lost their place as calls waited at the other; these and all others were served."""
        lost = self.size.waiting
        self.expect_at(slept, {COMPLETE: self.size.streams - lost, error_event("lease_lost"): lost}, COMPLETE)
        self.expect_at(other, COMPLETE, COMPLETE)

    # -- after -------------------------------------------------------------------------------------------------------

    async def whole(self) -> None:
        """Note how long it takes until all is as it should be."""
        await self.settled()
        self.whole_seconds = time.monotonic() - self._mended_at

    async def over(self) -> None:
        """All is as it should be, and every client has its end."""
        await self.whole()
        await self.crowd.ended()

    async def settled(self) -> None:
        """Every living gateway is ready, and the books are exactly what its clients have open."""
        await soon(self._is_whole, "the books are what clients have open", WHOLE_SECONDS)

    def _is_whole(self) -> bool:
        before = self._open_here()
        try:
            books = self.books()
        except (redis.RedisError, OSError, KeyError):
            return False
        return (
            before == self._open_here() == _counts(books)
            and all(gateway.is_ready() for gateway in self.living)
            and not violations(books)
        )

    def _open_here(self) -> tuple[int, int]:
        """Calls of living gateways that stream, and that wait to."""
        calls = [c for c in self.crowd.callers if not c.ending and c.gateway in self.living]
        streaming = sum(caller.streams for caller in calls)
        return streaming, len(calls) - streaming

    async def quiet(self) -> None:
        """All clients have their end, and nothing is held anywhere; a new call is served by every living gateway."""
        await self.crowd.ended()
        await soon(self._is_quiet, "all was given back", WHOLE_SECONDS)
        for gateway in self.living:
            assert await Caller(gateway, "afterwards", 20, 3).ended() == COMPLETE
        await soon(self._is_quiet, "all was given back again", WHOLE_SECONDS)
        self._judge(self.books())
        assert not self.wrong, self.wrong[:5]

    def _is_quiet(self) -> bool:
        states = [gateway.state() for gateway in self.living]
        return (
            all(_sums(state) == NOTHING for state in states)
            and _counts(self.books()) == (0, 0)
            and self._engine_sum("vllm:num_requests_running") == 0
        )

    @property
    def preemptions(self) -> float:
        """Of the engines that are left: more was admitted than they have room for."""
        return self._engine_sum("vllm:num_preemptions_total")

    def _engine_sum(self, metric: str) -> float:
        return sum(mock.metric(metric) for mock in self.mocks if mock.process.poll() is None)

    def found(self) -> Found:
        leaked = sum(replica.used for replica in self.books().replicas.values())
        return Found(self.in_flight, self.crowd.endings(), leaked, round(self.whole_seconds, 2))

    # -- all the time ------------------------------------------------------------------------------------------------

    def books(self) -> Snapshot:
        """Raises RedisError or OSError while the store is away, and KeyError until a gateway has configured it."""
        return snapshot_of(read_content(self.store, FLEET))

    async def look(self) -> None:
        """At the books, until cancelled: what must hold holds while the fault lasts, too."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(redis.RedisError, OSError, KeyError):
                self._judge(await asyncio.to_thread(self.books))

    def _judge(self, books: Snapshot) -> None:
        self.wrong += [str(violation) for violation in violations(books)]
        if self.needs.may_exceed:
            return
        for name, replica in books.replicas.items():
            if replica.used > replica.limit:
                self.wrong.append(f"{name} holds {replica.used} blocks of {replica.limit}")


NOTHING = (0, 0, 0, 0, 0)


def _counts(books: Snapshot) -> tuple[int, int]:
    """Calls that hold a place, and that wait."""
    queued = sum(len(calls) for calls in books.waiting.values())
    return len(books.calls) - queued, queued


def _sums(state: dict[str, Any]) -> tuple[int, ...]:
    rows = [row for pool in state["fleets"][FLEET]["pools"].values() for row in pool["replicas"].values()]
    debt = sum(max(0, row["reserved"] - row["limit"]) for row in rows)
    return (state["reserved"], state["leases"], state["queue"], state["inflight"], debt)


@asynccontextmanager
async def scene(size: Size, needs: Needs) -> AsyncIterator[Scene]:
    with world(*needs.store_options) as here:
        async with AsyncExitStack() as stack:
            built = Scene(here, size, needs)
            stack.callback(built.store.close)
            await built.start(stack)
            watching = asyncio.create_task(built.look())
            try:
                yield built
            finally:
                watching.cancel()
                await asyncio.wait([watching])
                for caller in built.crowd.callers:
                    caller.leave()
                await asyncio.to_thread(_stop, built.gateways)


def _stop(gateways: Sequence[GatewayProcess]) -> None:
    """While the proxies still stand: a gateway gives back what it holds before it ends."""
    for gateway in gateways:
        if gateway.process.poll() is None:
            gateway.process.send_signal(signal.SIGCONT)
            gateway.process.terminate()
    for gateway in gateways:
        gateway.stop()
