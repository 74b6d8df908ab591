"""Keeps one fleet's channel alive: connects, says hello, sends batches and heartbeats, heals, and does it all again."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from gateway.core.books import FleetConfig
from gateway.core.events import LeaseLost, Observer, StoreUp
from gateway.ledger.channel import Op, Reply, Result
from gateway.ledger.connection import Connection, StoreAway, new_client
from gateway.ledger.records import config_arguments, decode_text

if TYPE_CHECKING:
    from gateway.ledger.valkey import ValkeyLedger

log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.0, 0.05, 0.1, 0.25)
"""Between attempts to reach the store; the last one repeats, so a returning store is noticed within 250 ms."""
PAGE_SIZE = 500
LOG_SECONDS = 10.0
"""An outage is logged once in this time."""


class Keeper:
    """`run` is the only task that uses the connection, so batches, configuration and paging never overlap."""

    def __init__(
        self,
        ledger: "ValkeyLedger",
        connection: Connection,
        url: str,
        wake_prefix: str,
        config: Callable[[], FleetConfig],
        observer: Observer,
    ) -> None:
        self._ledger = ledger
        self._connection = connection
        self._url = url
        self._wake_prefix = wake_prefix
        self._config = config
        self._observer = observer
        self._owner = ""
        self._known_run = ""
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._configure = False
        self._observations: dict[str, bool] = {}
        self._gate_open = False
        self._differs = False
        self._away_since: float | None = time.monotonic()
        self._beat_at = 0.0
        self._logged_at = -LOG_SECONDS

    @property
    def ready(self) -> bool:
        return self._away_since is None and self._gate_open

    @property
    def away_seconds(self) -> float | None:
        """How long the store has been away; None while it answers."""
        return None if self._away_since is None else time.monotonic() - self._away_since

    def wake(self) -> None:
        self._idle.clear()
        self._work.set()

    def reconfigure(self) -> None:
        self._configure = True
        self.wake()

    def observe(self, replica: str, up: bool) -> None:
        self._observations[replica] = up
        self.wake()

    async def drain(self) -> None:
        """Return once nothing is to be sent and the store lists nothing of ours."""
        self._differs = True
        while self._differs or self._ledger.channel.busy or self._ledger.inflight:
            self.wake()
            await self._idle.wait()

    # -- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
            try:
                await self._connect()
                failures = 0
                await self._serve()
            except StoreAway as away:
                failures += 1
                self._note_away(away)
            finally:
                await self._connection.close()

    async def _connect(self) -> None:
        await self._connection.open()
        await self._send_config()
        if not self._owner:
            await self._say_hello()

    async def _serve(self) -> None:
        """Batches until the store goes away."""
        ears = asyncio.create_task(self._listen(self._owner))
        try:
            while True:
                reply = await self._ledger.channel.exchange(self._connection, self._owner, self._heartbeat())
                self._note_up()
                if reply.status == "fenced" or reply.status == "stale":
                    await self._fenced()
                    ears.cancel()
                    ears = asyncio.create_task(self._listen(self._owner))
                    continue
                await self._act_on(reply)
                if not reply.more:
                    await self._rest()
        finally:
            ears.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ears

    async def _act_on(self, reply: Reply) -> None:
        if reply.status == "epoch":
            self._gate_open = False
            self._ledger.redeclare()
            self._declare()
        elif reply.status == "unconfigured":
            await self._send_config()
        for id_, replica in reply.outbox:
            self._ledger.offer(id_, replica)
        if self._differs and not self._ledger.channel.busy:
            self._differs = False
            await self._compare()
        await self._tell_observations()

    async def _rest(self) -> None:
        """Until there is something to send, or the next heartbeat is due."""
        if not self._ledger.channel.busy and not self._differs:
            self._idle.set()
            left = max(self._beat_at - time.monotonic(), 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._work.wait()
        self._work.clear()

    def _heartbeat(self) -> Op | None:
        """Due once a heartbeat; until the gate is open it also asks whether it is."""
        now = time.monotonic()
        if now < self._beat_at:
            return None
        self._beat_at = now + self._config().heartbeat_ms / 1000
        if not self._gate_open:
            self._declare()
        return Op(self._ledger.digest(), self._on_heartbeat)

    def _on_heartbeat(self, result: Result) -> None:
        self._differs = self._differs or result[0] == "differs"

    def _declare(self) -> None:
        self._ledger.channel.declare(self._on_declared)

    def _on_declared(self, result: Result) -> None:
        self._gate_open = result[0] == "open"
        if not self._gate_open:
            self._beat_at = min(self._beat_at, time.monotonic() + min(result[1], 250) / 1000)

    # -- hello and its occasions ---------------------------------------------------------------------------------

    async def _say_hello(self) -> None:
        """Under a new id.  Another run id means that the store lost what it knew of us: then we re-declare by force."""
        self._owner = secrets.token_hex(8)
        reply = decode_text(await self._connection.evaluate("hello", "", self._owner))
        if reply[0] != "ok":
            self._owner = ""
            raise StoreAway(f"hello was answered {reply[0]}")
        run = reply[4]
        force = bool(self._known_run) and run != self._known_run
        self._known_run = run
        self._gate_open = False
        self._beat_at = 0.0
        self._ledger.restart(force)
        self._declare()

    async def _fenced(self) -> None:
        """Our lease is over, or the store lost its data."""
        self._observer(LeaseLost(self._ledger.fleet))
        log.warning("fenced by the store of fleet %s: saying hello under a new owner id", self._ledger.fleet)
        self._owner = ""
        await self._send_config()
        await self._say_hello()

    async def _send_config(self) -> None:
        self._configure = False
        await self._connection.evaluate("configure", "", self._wake_prefix, "fleet", *config_arguments(self._config()))

    async def _tell_observations(self) -> None:
        if self._configure:
            await self._send_config()
        while self._observations:
            replica, up = next(iter(self._observations.items()))
            await self._connection.evaluate("configure", "", self._wake_prefix, "replica", replica, int(up))
            if self._observations.get(replica) == up:
                del self._observations[replica]

    async def _compare(self) -> None:
        listed: dict[str, str] = {}
        after = ""
        while True:
            page = decode_text(await self._connection.evaluate("page", self._owner, after, PAGE_SIZE))
            listed.update(zip(page[::3], page[1::3], strict=True))
            if len(page) < 3 * PAGE_SIZE:
                break
            after = page[-3]
        self._ledger.compare(listed)

    # -- the wake channel ----------------------------------------------------------------------------------------

    async def _listen(self, owner: str) -> None:
        """A wake-up carries no data; one that is lost costs a heartbeat."""
        while True:
            client = new_client(self._url)
            try:
                async with client.pubsub() as pubsub:
                    await pubsub.subscribe(self._wake_prefix + owner)
                    async for _ in pubsub.listen():
                        self.wake()
            except (RedisError, OSError):
                await asyncio.sleep(PAUSES_SECONDS[-1])
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await client.aclose()

    # -- up and down ---------------------------------------------------------------------------------------------

    def _note_up(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            self._observer(StoreUp(True))
            log.info("the store of fleet %s answers", self._ledger.fleet)

    def _note_away(self, away: StoreAway) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._observer(StoreUp(False))
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.error("the store of fleet %s is away: %s", self._ledger.fleet, away)

    def details(self) -> dict[str, Any]:
        return {"owner": self._owner, "ready": self.ready}
