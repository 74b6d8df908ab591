"""Admission by this process alone while the store is away (`store.on_outage: share`); `core/share.py` decides."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.core.books import FleetConfig, Replica
from gateway.core.events import AdmittedByShare, Observer
from gateway.core.order import LOOKAHEAD
from gateway.core.share import Denied, Holding, Portion, Share, Wanted, portions
from gateway.ledger.connection import Connection
from gateway.ledger.records import decode_record
from gateway.ledger.reservation import Ask, Phase
from gateway.ledger.scripts import KEY_NAMES

if TYPE_CHECKING:
    from gateway.ledger.valkey import ValkeyLedger

log = logging.getLogger(__name__)

PAGE_SIZE = 1000
WAITING = frozenset({Phase.ASKED, Phase.QUEUED, Phase.MOVING})
LIVING = WAITING | {Phase.RESERVED}


class Sharing:
    """One fleet's portions, and while the store is away the books of what this process admits within them.

    Calls that waited for the store when it went away are served first and again whenever something is given back, in
    the order in which they began to wait, at most `LOOKAHEAD` that do not fit being passed over.  A new call that does
    not fit is refused: nobody begins to wait for a share.
    """

    def __init__(
        self,
        ledger: "ValkeyLedger",
        asks: Mapping[str, Ask],
        config: Callable[[], FleetConfig],
        seconds: float,
        observer: Observer,
    ) -> None:
        """`asks`: all calls of this process, as they come and go.  `seconds`: longest time of one outage; 0 = never."""
        self.seconds = seconds
        self._ledger = ledger
        self._asks = asks
        self._config = config
        self._observer = observer
        self.portions: dict[str, Portion] = {}
        """Of each replica, as of the last reading of the books."""
        self._share: Share | None = None
        self._line: deque[Ask] = deque()
        self._lanes: dict[str, tuple[str, ...]] = {}

    @property
    def begun(self) -> bool:
        """The store is away, and this process has portions of its own."""
        return self._share is not None

    @property
    def active(self) -> bool:
        if self._share is None:
            return False
        away = self._ledger.away_seconds
        return away is not None and away < self.seconds

    def stop(self) -> None:
        """This process is ending."""
        self.seconds = 0.0

    async def read(self, connection: Connection) -> Sequence[Replica]:
        """Note this process's portions of the replicas; returns those.  Raises StoreAway.

        No batch may be on its way, and the gate has to be open.
        """
        owners = await read_hash(connection, "owners")
        replicas = await read_replicas(connection)
        if owners:
            self.portions = portions(replicas, len(owners), self._running().values())
        return replicas

    def begin(self) -> None:
        """It is known that the store is away.  Without a reading there is nothing to share."""
        if self.begun or not self.seconds or not self.portions:
            return
        running = self._running()
        self._share = Share(self.portions, running)
        self._lanes = dict(self._config().lanes)
        for id_ in running:
            self._asks[id_].by_force = True
        waiting = [ask for ask in self._asks.values() if _waits(ask)]
        self._line = deque(sorted(waiting, key=lambda ask: ask.started_at))
        log.warning("fleet %s: admitting within this gateway's share", self._ledger.fleet)
        self._serve_line()

    def end(self, session_kept: bool) -> None:
        """The store answers.  Where it kept our session it has our calls: only what was admitted here needs force."""
        self._share = None
        self._line.clear()
        if not session_kept:
            return
        for ask in self._asks.values():
            ask.by_force = ask.by_force and self._ledger.channel.declares(ask.id)

    def admit(self, ask: Ask) -> bool:
        """Answer a new call; False where the store has to be asked."""
        if not self.active:
            return False
        first = self._namesake(ask)
        if first:
            ask.refuse(self._ledger.once_refusal(ask.admission, first.admission))
            return True
        denied = self._place(ask)
        if denied:
            ask.refuse(self._ledger.share_refusal(denied, ask.admission))
        return True

    def _namesake(self, ask: Ask) -> Ask | None:
        """The call of this process that is admitted under the same `Idempotency-Key`."""
        once = ask.admission.once
        if not once:
            return None
        return next((a for a in self._asks.values() if a.admission.once == once and a.phase in LIVING), None)

    def move(self, ask: Ask) -> None:
        """Its replica failed: another place, or it waits for one as long as calls wait for the store."""
        if self._share is None:
            return
        self.give_back(ask.id)
        if self.active and _waits(ask) and self._place(ask):
            self._line.append(ask)

    def first_token(self, id_: str) -> None:
        if self._share is None:
            return
        self._share.first_token(id_)
        self._serve_line()

    def give_back(self, id_: str) -> None:
        if self._share is None:
            return
        self._share.give_back(id_)
        self._serve_line()

    def _serve_line(self) -> None:
        if not self.active:
            return
        passed: list[Ask] = []
        while self._line and len(passed) < LOOKAHEAD:
            ask = self._line.popleft()
            if _waits(ask) and self._place(ask):
                passed.append(ask)
        self._line.extendleft(reversed(passed))

    def _place(self, ask: Ask) -> Denied | None:
        assert self._share is not None
        a = ask.admission
        pools = self._lanes.get(a.lane, ())
        wanted = Wanted(
            a.key,
            a.blocks,
            a.sequences,
            ask.prefill,
            a.blocks_max,
            a.requests_max,
            pools,
            ask.exclude,
            a.pool_share,
            a.promised,
        )
        replica = self._share.choose(wanted, self._ledger.observed)
        if isinstance(replica, Denied):
            return replica
        ask.run_on(replica)
        self._share.take(ask.id, _holding(ask))
        self._observer(AdmittedByShare(self._ledger.fleet))
        return None

    def _running(self) -> dict[str, Holding]:
        return {ask.id: _holding(ask) for ask in self._asks.values() if ask.phase is Phase.RESERVED}


def _waits(ask: Ask) -> bool:
    return ask.phase in WAITING and not ask.abandoned and ask.unanswered


def _holding(ask: Ask) -> Holding:
    a = ask.admission
    return Holding(a.key, ask.replica, a.blocks, a.sequences, ask.prefill, ask.shared)


async def read_replicas(connection: Connection) -> list[Replica]:
    """As the store has them.  Raises StoreAway."""
    rows = await read_hash(connection, "replicas")
    return [_replica(name, packed) for name, packed in rows.items()]


async def read_hash(connection: Connection, name: str) -> dict[bytes, Any]:
    """One key's whole content.  Raises StoreAway."""
    found: dict[bytes, Any] = {}
    cursor: bytes = b"0"
    while True:
        reply = await connection.evaluate("snapshot", KEY_NAMES.index(name) + 1, cursor, PAGE_SIZE)
        items = reply[3:]
        found.update(zip(items[::2], items[1::2], strict=True))
        cursor = reply[0]
        if cursor == b"0":
            return found


def _replica(name: bytes, packed: bytes) -> Replica:
    return msgspec.convert({**decode_record("replica", packed), "name": name.decode()}, Replica)
