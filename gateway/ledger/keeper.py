"""Keeps one fleet's channel alive: connects, says hello, sends batches and heartbeats, heals, and does it all again."""

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Never

from gateway.core.books import FleetConfig
from gateway.core.events import LeaseLost, Observer, StoreUp
from gateway.core.fill import fill
from gateway.deadline import Deadline
from gateway.ledger.channel import Op, Reply, Result
from gateway.ledger.connection import Connection, listen
from gateway.ledger.records import config_arguments, decode_text
from gateway.ledger.share import read_replicas
from gateway.ledger.wire import StoreAway

if TYPE_CHECKING:
    from gateway.ledger.valkey import ValkeyLedger

log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.0, 0.05, 0.1, 0.25)
"""Between attempts to reach the store; the last one repeats, so a returning store is noticed within 250 ms."""
SLOW_SECONDS = 0.25
"""A batch unanswered for so long is the beginning of an outage: from then on few calls may wait for the store."""
LOOK_SECONDS = 0.01
"""For the sockets to be read before a batch is taken for unanswered."""
GATE_SECONDS = 0.25
"""Between questions whether the gate is open."""
GATHER_TURNS = 2
"""Turns of the loop that a batch waits for more: bytes are read in the first, in the second tasks act on them."""
GATHERED_ENOUGH = 16
"""Ops.  More make an op hardly cheaper."""
PAGE_SIZE = 500
OBSERVE_SECONDS = 3.0
"""What this process sees of replicas is told again so often: the last word of one that died must not stay."""
LOG_SECONDS = 10.0
"""An outage is logged once in this time, with its reason of that moment; only a new internal error comes beside it."""


class Keeper:
    """`run` is the only task that waits for the connection, so batches, configuration and paging never overlap."""

    _late: Deadline
    """Of the batch on its way, and `_beat` of a rest, while `run` runs."""
    _beat: Deadline

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
        self._now = ledger.now
        self._connection = connection
        self._url = url
        self._wake_prefix = wake_prefix
        self._config = config
        self._observer = observer
        self._owner = ""
        self._known_run = ""
        """The server process that last carried a batch of ours out."""
        self._work = asyncio.Event()
        """Ends a rest."""
        self._has_work = False
        """Something was put in since the last rest: there is none now."""
        self._resting = False
        """The task waits for work, so a batch can be sent for it."""
        self._sent: Awaitable[Reply] | None = None
        self._idle = asyncio.Event()
        self._configure = False
        self.observed: dict[str, bool] = {}
        """Whether each replica answers that this process has seen stop or resume."""
        self.rests: dict[str, str] = {}
        """Why each replica rests that has ever rested, as this process sees it; '' = it does no longer."""
        self._untold: set[str] = set()
        """Replicas of which the store does not have the last that was seen."""
        self._told_run = ""
        self._tell_at = 0.0
        self._errands: deque[tuple[tuple[str | int, ...], asyncio.Future[Any]]] = deque()
        """Of `configure`, asked for by others: whoever asks waits for its answer before it asks again."""
        self._policy = 0
        """Number of the settings in the store when we last looked."""
        self._gate_open = False
        self.opened = False
        """The gate was open once."""
        self._differs = False
        self._listed = 0
        """Calls of ours in the list that the store last gave."""
        self._looked = False
        """It was not answered when it should have been, and the sockets are being read once more."""
        self.slow = False
        """The batch on its way should have been answered by now."""
        self._away_since: float | None = self._now()
        self._failures = 0
        self._batches = 0
        """Carried out by the store."""
        self._beat_at = 0.0
        self._read_at = 0.0
        """When the books are read again for this process's share."""
        self._logged, self._logged_at = "", -math.inf

    @property
    def ready(self) -> bool:
        return self._away_since is None and self._gate_open

    @property
    def away_seconds(self) -> float | None:
        """How long the store has been away; None while it answers."""
        return None if self._away_since is None else self._now() - self._away_since

    def wake(self) -> None:
        """There is something to send: while nothing else is on its way it goes now, a turn of the loop may be long."""
        self._has_work = True
        if not self._resting:
            return
        self._work.set()
        if self._ledger.channel.busy:
            self._send()

    def reconfigure(self) -> None:
        self._configure = True
        self.wake()

    def observe(self, replica: str, up: bool) -> None:
        self.observed[replica] = up
        self._untold.add(replica)
        self.wake()

    def ask(self, *arguments: str | int) -> "asyncio.Future[Any]":
        """The answer of `configure`, which is sent as soon as nothing else is on its way.  Raises StoreAway."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._away_since is not None:
            answer.set_exception(StoreAway("the store does not answer"))
            return answer
        self._errands.append((arguments, answer))
        self.wake()
        return answer

    def rest(self, replica: str, why: str) -> None:
        if self.rests.get(replica, "") == why:
            return
        self.rests[replica] = why
        self._untold.add(replica)
        self.wake()

    async def drain(self) -> None:
        """Return once every call of ours was answered its settle and the store lists nothing of ours."""
        self._listed = 1
        while self._listed or self._ledger.holding:
            self._differs = True
            self._idle.clear()
            self.wake()
            await self._idle.wait()

    # -- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled.  A failure of our own is logged and treated as an outage: everything starts anew."""
        if self._away_since is not None:  # nobody has looked for it yet
            self._away_since = self._now()
        loop = asyncio.get_running_loop()
        self._late, self._beat = Deadline(loop, self._look_again), Deadline(loop, self._work.set)
        try:
            await self._run()
        finally:
            self._late.close()
            self._beat.close()

    async def _run(self) -> Never:
        while True:
            try:
                await self._connect()
                await self._serve()
            except StoreAway as away:
                self._note_away(str(away))
            except Exception as failure:
                self._differs = True
                self._note_away(f"an internal error, {failure!r}", with_traceback=True)
            finally:
                self._forget_sent()
                self._connection.close()
                self._drop_errands()
            await asyncio.sleep(PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS) - 1)])
            self._failures += 1

    async def _connect(self) -> None:
        await self._connection.open()
        if self._connection.run_id != self._told_run:
            self._untold.update(self.observed)
        await self._send_config()
        if not self._owner:
            await self._say_hello()

    async def _serve(self) -> None:
        """Batches until the store goes away.

        An owner fenced twice without a batch between means a store that forgets at once: that is an outage, and what
        comes next has to wait for a pause.
        """
        fenced_at = -1
        while True:
            async with self._listening():
                await self._serve_owner()
            if self._batches == fenced_at:
                self._owner = ""
                raise StoreAway("it forgets owners at once")
            fenced_at = self._batches
            await self._fenced()

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """A wake-up carries no data; one that is lost costs a heartbeat."""
        ears = asyncio.create_task(listen(self._url, self._wake_prefix + self._owner, self.wake))
        try:
            yield
        finally:
            ears.cancel()
            await asyncio.wait([ears])

    async def _serve_owner(self) -> None:
        """Batches until this owner is fenced."""
        while True:
            reply = await self._exchange()
            if reply.status in ("fenced", "stale"):
                return
            await self._act_on(reply)
            self._failures = 0
            if reply.more:
                continue
            await self._rest()
            if not self._sent:
                await self._gather()

    async def _gather(self) -> None:
        """What came while a batch was on its way is not alone: in two turns of the loop its like comes as well, from
        calls whose bytes are here already.  A batch costs as much as five calls in it, in the store and here.
        """
        channel = self._ledger.channel
        for _ in range(GATHER_TURNS):
            if not channel.busy or channel.unanswered or channel.gathered >= GATHERED_ENOUGH:
                return
            await asyncio.sleep(0)

    async def _exchange(self) -> Reply:
        if self._sent is None:
            self._send()
        assert self._sent is not None
        reply = await self._sent
        self._forget_sent()
        self._gate_open = self._gate_open and reply.status == "ok"
        self._note_up(session_kept=reply.status in ("ok", "epoch"))
        if reply.status == "ok":
            self._notice_policy(reply.policy)
            self._batches += 1
            self._known_run = self._connection.run_id
        return reply

    def _send(self) -> None:
        self._resting = False
        self._late.set(SLOW_SECONDS)
        self._sent = self._ledger.channel.send(self._connection, self._owner, self._heartbeat)

    def _look_again(self) -> None:
        """It may be this process that was busy: on uvloop timers go first, and the reply may lie there unread."""
        if self._looked:
            self.slow = True
        else:
            self._looked = True
            self._late.set(LOOK_SECONDS)

    def _forget_sent(self) -> None:
        self._late.clear()
        self._sent = None
        self._looked = self.slow = False

    def _notice_policy(self, policy: int) -> None:
        if policy != self._policy:
            log.warning(
                "another gateway has changed the settings of fleet %s in the store", self._ledger.fleet
            )
            self._policy = policy

    async def _act_on(self, reply: Reply) -> None:
        if reply.status == "epoch":
            self._gate_open = False
            self._ledger.redeclare()
            self._declare()
        elif reply.status == "unconfigured":
            await self._send_config()
            self._untold.update(self.observed)
        if self._differs and not self._ledger.channel.unanswered:
            await self._compare()
        if self._configure:
            await self._send_config()
        if self._untold or self._now() >= self._tell_at:
            await self._tell_observations()
        if self._errands:
            await self._run_errands()
        if reply.status == "ok":
            await self._read_replicas()

    async def _rest(self) -> None:
        """Until there is something to send, or the next heartbeat is due."""
        if not self._ledger.channel.busy and not self._differs:
            self._idle.set()
            if not self._has_work:
                await self._sleep()
        self._has_work = False

    async def _sleep(self) -> None:
        self._work.clear()
        self._resting = True
        self._beat.set(max(self._beat_at - self._now(), 0))
        try:
            await self._work.wait()
        finally:
            self._resting = False
            self._beat.clear()

    def _heartbeat(self) -> Op | None:
        """Due once a heartbeat; until the gate is open it also asks whether it is."""
        now = self._now()
        if now < self._beat_at:
            return None
        self._beat_at = now + self._config().heartbeat_ms / 1000
        if not self._gate_open:
            self._declare()
        return Op(self._ledger.heartbeat(), self._on_heartbeat)

    def _on_heartbeat(self, result: Result) -> None:
        self._differs = self._differs or result[0] == "differs"
        self._ledger.draining = frozenset(result[1:])

    def _declare(self) -> None:
        self._ledger.channel.declare(self._on_declared)

    def _on_declared(self, result: Result) -> None:
        was_open, self._gate_open = self._gate_open, result[0] == "open"
        if self._gate_open and not was_open:
            self.opened = True
            log.info("admission to fleet %s is open", self._ledger.fleet)
        if not self._gate_open:
            self._beat_at = min(self._beat_at, self._now() + GATE_SECONDS)

    # -- hello and its occasions ---------------------------------------------------------------------------------

    async def _say_hello(self) -> None:
        """Under a new id.  Another server process means that what it knew of us is lost: then we re-declare by force.

        An id whose hello was not answered is not used: the hello may still arrive and take a session back to its start.
        """
        owner = secrets.token_hex(8)
        reply = decode_text(await self._connection.evaluate("hello", "", owner))
        if reply[0] != "ok":
            raise StoreAway(f"hello was answered {reply[0]}")
        self._owner = owner
        self._gate_open = False
        self._beat_at = 0.0
        self._ledger.restart(force=self._lost_data)
        self._untold.update(self.rests)  # what the owner before said ended with it
        self._declare()

    @property
    def _lost_data(self) -> bool:
        return bool(self._known_run) and self._connection.run_id != self._known_run

    async def _fenced(self) -> None:
        """Our lease is over, or the store lost its data."""
        if self._lost_data:
            log.warning(
                "the store of fleet %s was started anew: declaring again what runs", self._ledger.fleet
            )
        else:
            log.warning(
                "fenced by the store of fleet %s: saying hello under a new owner id", self._ledger.fleet
            )
            self._observer(LeaseLost(self._ledger.fleet))
        self._owner, self._gate_open = "", False
        await self._send_config()
        await self._say_hello()

    async def _send_config(self) -> None:
        self._configure = False
        config = self._config()
        try:
            reply = await self._connection.evaluate(
                "configure", "", self._wake_prefix, "fleet", *config_arguments(config)
            )
        except StoreAway:
            self._configure = True
            raise
        self._policy = reply[3]
        for replica in self.observed.keys() - {r.name for r in config.replicas}:
            del self.observed[replica]
            self._untold.discard(replica)

    async def _tell_observations(self) -> None:
        if self._now() >= self._tell_at:
            self._tell_at = self._now() + OBSERVE_SECONDS
            self._untold.update(self.observed)
        while self._untold:
            replica = min(self._untold)
            why, up = self.rests.get(replica), self.observed.get(replica)
            if why is not None:  # before the store lets it answer
                await self._tell("rest", self._owner, replica, why)
            if up is not None:
                await self._tell("replica", replica, int(up))
            if (self.rests.get(replica), self.observed.get(replica)) == (why, up):
                self._untold.discard(replica)
        self._told_run = self._connection.run_id

    async def _run_errands(self) -> None:
        while self._errands:
            arguments, answer = self._errands[0]
            if not answer.done():
                reply = await self._connection.evaluate("configure", "", self._wake_prefix, *arguments)
                if not answer.done():
                    answer.set_result(decode_text(reply))
            self._errands.popleft()

    def _drop_errands(self) -> None:
        while self._errands:
            _, answer = self._errands.popleft()
            answer.cancel()

    async def _tell(self, kind: str, *arguments: str | int) -> None:
        await self._connection.evaluate("configure", "", self._wake_prefix, kind, *arguments)

    async def _read_replicas(self) -> None:
        """Once a heartbeat, where somebody wants to know of them.

        Behind a closed gate the books do not have all that runs yet.
        """
        ledger, now = self._ledger, self._now()
        wanted = ledger.sharing.seconds or ledger.notes_fill
        if not wanted or not self._gate_open or now < self._read_at:
            return
        self._read_at = now + self._config().heartbeat_ms / 1000
        read = ledger.sharing.read if ledger.sharing.seconds else read_replicas
        ledger.note_fill(fill(await read(self._connection)))

    async def _compare(self) -> None:
        listed: dict[str, str] = {}
        after = ""
        while True:
            page = decode_text(await self._connection.evaluate("page", self._owner, after, PAGE_SIZE))
            listed.update(zip(page[::3], page[1::3], strict=True))
            if len(page) < 3 * PAGE_SIZE:
                break
            after = page[-3]
        self._differs = False
        self._listed = len(listed)
        self._ledger.compare(listed)

    # -- up and down ---------------------------------------------------------------------------------------------

    def _note_up(self, session_kept: bool) -> None:
        if self._away_since is not None:
            self._away_since = None
            self._ledger.sharing.end(session_kept)
            self._observer(StoreUp(True))
            log.info("the store of fleet %s answers", self._ledger.fleet)

    def _note_away(self, why: str, with_traceback: bool = False) -> None:
        """A connection that breaks may be this process's own misfortune; silence and a second failure are an outage."""
        now = self._now()
        known = self.slow or self._away_since is not None
        if self._away_since is None:
            self._away_since = now
            self._observer(StoreUp(False))
        if known:
            self._ledger.sharing.begin()
        news = with_traceback and why != self._logged
        if news or now - self._logged_at >= LOG_SECONDS:
            self._logged, self._logged_at = why, now
            log.error("the store of fleet %s is away: %s", self._ledger.fleet, why, exc_info=with_traceback)
