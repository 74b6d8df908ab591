"""The production ledger of one fleet: the list of this process's reservations, mirrored in the store by the channel."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.books import FleetConfig
from gateway.core.events import Healed, Observer
from gateway.core.order import DIGEST_MODULUS, FIRST_APPOINTMENT_MS, ID_BITS
from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Admission, Lost
from gateway.ledger.channel import Channel, Result
from gateway.ledger.connection import REPLY_SECONDS, Connection
from gateway.ledger.keeper import Keeper
from gateway.ledger.reservation import Ask, Phase
from gateway.ledger.scripts import key_prefix
from gateway.ledger.state import read_state

CACHE_SECONDS = 0.05
"""How long a refusal of the store may be repeated without asking it again."""
PROBE_SECONDS = 0.01
"""One call in this time goes through to the store all the same."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """What a process keeps waiting while the store is away."""

    seconds: float
    """0 = refuse at once (`store.on_outage: refuse`)."""
    calls_max: int
    bytes_max: int


@dataclass(slots=True)
class _Known:
    refusal: Refusal
    at: float
    probed_at: float


class ValkeyLedger:
    """Implements `Ledger`.  `run` is the one task that talks to the store."""

    def __init__(
        self,
        url: str,
        fleet: str,
        config: Callable[[], FleetConfig],
        hold: HoldLimits,
        observer: Observer,
        now: Callable[[], float] = time.monotonic,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        self.fleet = fleet
        self.now = now
        self.hold_seconds = hold.seconds or reply_seconds
        self.retry_hint_ms = FIRST_APPOINTMENT_MS
        self._url = url
        self._hold = hold
        self._observer = observer
        self._asks: dict[str, Ask] = {}
        self._claimed: set[str] = set()
        self._claimed_sum = 0
        self._known: dict[tuple[str, str], _Known] = {}
        prefix = key_prefix(fleet) + "wake:"
        self.channel = Channel(prefix)
        self._keeper = Keeper(self, Connection(url, fleet, observer, reply_seconds), url, prefix, config, observer)

    # -- the request path ----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._keeper.ready

    @property
    def inflight(self) -> int:
        """Calls of this process that ask, wait, run or are being given back."""
        return len(self._asks)

    def open(self, admission: Admission, lost: Lost) -> Ask:
        ask = Ask(self, f"{secrets.randbits(ID_BITS):010x}", admission, lost)
        self._asks[ask.id] = ask
        return ask

    def known_refusal(self, lanes: Sequence[str], class_: str) -> Refusal | None:
        now = self.now()
        found: list[_Known] = []
        for lane in lanes:
            known = self._known.get((lane, class_))
            if known is None or now - known.at > CACHE_SECONDS:
                return None
            found.append(known)
        if not found or now - found[0].probed_at >= PROBE_SECONDS:
            for known in found:
                known.probed_at = now
            return None
        return found[0].refusal

    def may_ask(self, ask: Ask) -> Refusal | None:
        """While the store is away, few calls wait for it, and none once it has been away too long."""
        away = self._keeper.away_seconds
        if away is None:
            return None
        waiting = [a for a in self._asks.values() if a.phase is Phase.ASKED]
        held_bytes = sum(a.admission.body_bytes for a in waiting) + ask.admission.body_bytes
        if away >= self._hold.seconds or len(waiting) >= self._hold.calls_max or held_bytes > self._hold.bytes_max:
            return self.away_refusal()
        return None

    async def state(self) -> dict[str, Any]:
        return await read_state(self._url, self.fleet)

    async def observe(self, replica: str, up: bool) -> None:
        self._keeper.observe(replica, up)

    def reconfigure(self) -> None:
        """The fleet's configuration changed: tell the store."""
        self._keeper.reconfigure()

    # -- running -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self._keeper.run()

    async def close(self, seconds: float) -> None:
        """Settle everything that this process holds until the store's list is empty, for at most `seconds`."""
        for ask in list(self._asks.values()):
            ask.settle(None, None)
        try:
            async with asyncio.timeout(seconds):
                await self._keeper.drain()
        except TimeoutError:
            return

    # -- what reservations report --------------------------------------------------------------------------------

    def wake(self) -> None:
        self._keeper.wake()

    def forget(self, ask: Ask) -> None:
        self._asks.pop(ask.id, None)

    def claimed(self, id_: str) -> None:
        if id_ not in self._claimed:
            self._claimed.add(id_)
            self._claimed_sum += int(id_, 16)

    def unclaimed(self, id_: str) -> None:
        if id_ in self._claimed:
            self._claimed.remove(id_)
            self._claimed_sum -= int(id_, 16)

    def settled_here(self, admission: Admission) -> None:
        """Something of this lane was given back: what the store said before no longer holds."""
        for key in [key for key in self._known if key[0] == admission.lane]:
            del self._known[key]

    def refusal_of(self, admission: Admission, result: Result) -> Refusal:
        """The store's refusal in words; queue refusals are remembered for a moment."""
        if result[0] != "refused" or result[1] == "id":
            self._observer(Healed(self.fleet, "error", 1))
            return Refusal(Code.INTERNAL_ERROR, "the ledger could not carry the request out")
        _, name, knob, measured, limit, retry_ms = result
        code = Code(name)
        refusal = Refusal(code, _words(code, knob, measured, limit, admission), retry_ms=retry_ms or None,
                          should_retry=None if retry_ms else False)  # fmt: skip
        if retry_ms:
            self.retry_hint_ms = retry_ms
        if code is Code.QUEUE_FULL:
            now = self.now()
            cached = Refusal(code, refusal.message, retry_ms=retry_ms, cached=True)
            self._known[admission.lane, admission.class_] = _Known(cached, now, now)
        return refusal

    def away_refusal(self) -> Refusal:
        return Refusal(Code.STORE_UNAVAILABLE, "the store of reservations does not answer", retry_ms=FIRST_APPOINTMENT_MS)

    def lost_refusal(self) -> Refusal:
        return Refusal(Code.LEASE_LOST, "the reservation was lost while moving to another replica",
                       retry_ms=FIRST_APPOINTMENT_MS)  # fmt: skip

    # -- what the keeper asks for --------------------------------------------------------------------------------

    def digest(self) -> list[Any]:
        return ["H", len(self._claimed), self._claimed_sum % DIGEST_MODULUS]

    def offer(self, id_: str, replica: str) -> None:
        """A grant from the outbox.  One that this process does not know is settled."""
        ask = self._asks.get(id_)
        if ask:
            ask.offered(replica)
        else:
            self._settle_unknown(id_)

    def restart(self, force: bool) -> None:
        """Under a new owner id: say again everything that is wanted or held."""
        self.channel.restart()
        self._claimed.clear()
        self._claimed_sum = 0
        for ask in list(self._asks.values()):
            ask.rebuild(force)

    def redeclare(self) -> None:
        """The store was restarted with its data: confirm what runs, and ask again for what waits."""
        for ask in list(self._asks.values()):
            if ask.phase is Phase.RESERVED:
                ask.redeclare(force=True)

    def compare(self, listed: dict[str, str]) -> None:
        """Mend the difference between the store's list of our calls (id -> state) and ours.  Nothing is in flight."""
        unknown = [id_ for id_ in listed if id_ not in self._asks]
        for id_ in unknown:
            self._settle_unknown(id_)
        missing = [a for a in self._asks.values() if a.phase is Phase.RESERVED and a.id not in listed]
        for ask in missing:
            self.unclaimed(ask.id)
            ask.redeclare(force=False)
        self._claimed = {id_ for id_, state in listed.items() if state == "reserved"}
        self._claimed_sum = sum(int(id_, 16) for id_ in self._claimed)
        for kind, found in (("settled", unknown), ("redeclared", missing)):
            if found:
                self._observer(Healed(self.fleet, kind, len(found)))

    def _settle_unknown(self, id_: str) -> None:
        self.channel.free(["S", id_, -1, -1], lambda _: self.unclaimed(id_))


def _words(code: Code, knob: str, measured: int, limit: int, admission: Admission) -> str:
    match code:
        case Code.CONTEXT_LENGTH_EXCEEDED:
            return f"the request needs {measured} KV blocks, the largest replica has {limit}: it can never run"
        case Code.KEY_CAP_EXCEEDED:
            return f"the request needs {measured} KV blocks, the key's limits.blocks_max is {limit}"
        case Code.QUOTA_EXCEEDED:
            return f"the key would hold {measured}, its limits.{knob} is {limit}"
        case Code.QUEUE_FULL:
            return f"{measured} requests wait in class {admission.class_}, queue.depth_max is {limit}"
        case Code.CAPACITY_EXCEEDED:
            return f"the request needs {measured} KV blocks, at most {limit} are free on one replica, and the queue is off"
        case Code.QUEUE_TIMEOUT:
            return f"the time to wait in the queue, {limit} ms, is over"
        case Code.NO_BACKEND:
            return "no replica that the request fits is up"
        case _:
            return "the store of reservations was restarted and is being filled again"
