"""The limits that a key has over all fleets together (`limits.all_fleets`).

They are kept by one more ledger of the same kind, in books of their own: one lane with one replica, which has room for
any number of calls, so that nothing but a key's limits stands in a call's way.  A call takes a block there before it
asks its fleet, and gives it back when its fleet refuses it, or with its place there: see `Joint`.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.call import Call
from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.outcomes import Refusal
from gateway.core.quota import ALL_FLEETS, ALL_FLEETS_LIMITS, AllFleets, Units
from gateway.core.request import INTEGER_MAX
from gateway.ledger.api import Admission, Grant, Ledger, Lost, Reservation

LANE = ALL_FLEETS
"""Its pool and its replica are called so, too."""


def books_config(lease_ms: int, heartbeat_ms: int, classes: Sequence[tuple[str, int]]) -> FleetConfig:
    """The books' settings; `classes` as those of a fleet."""
    endless = ReplicaConfig(LANE, LANE, INTEGER_MAX, INTEGER_MAX, INTEGER_MAX, INTEGER_MAX)
    return FleetConfig(
        lease_ms=lease_ms,
        heartbeat_ms=heartbeat_ms,
        overtake_blocks=INTEGER_MAX,
        lanes=((LANE, (LANE,)),),
        classes=tuple(classes),
        replicas=(endless,),
    )


def admission(call: Call, limits: AllFleets) -> Admission:
    """A place within the limits: it weighs the same for every call."""
    terms = call.terms
    return Admission(
        key=terms.key,
        class_=terms.class_,
        lane=LANE,
        blocks=1,
        sequences=1,
        prefill=0,
        cost=1,
        wait_ms=terms.wait_ms,
        weight=terms.weight,
        blocks_max=-1,
        requests_max=-1 if limits.requests_max is None else limits.requests_max,
        queue_max=terms.queue_max,
        queue_key_max=terms.queue_key_max,
        identity=call.identity,
        once=call.once,
        standing=call.standing,
        charges=call.all_fleets_charges,
        body_bytes=len(call.request.body),
        section=ALL_FLEETS_LIMITS,
    )


class Joint:
    """Two reservations that are one to their owner: within the limits over all fleets, and inside it in a fleet.

    Implements `Reservation`.  The fleet is asked once the limits have a place, with the time to wait that is left.
    """

    def __init__(self, limits: Reservation, ledger: Ledger, wanted: Admission, lost: Lost) -> None:
        """`limits`: not asked yet; `ledger`: of the fleet, `wanted` there."""
        self.id = limits.id
        self._limits = limits
        self._ledger = ledger
        self._wanted = wanted
        self._lost = lost
        self._within: Grant | None = None
        self._inside: Reservation | None = None

    async def granted(self) -> Grant | Refusal:
        within = await self._limits.granted()
        if isinstance(within, Refusal):
            return within
        self._within = within
        self._inside = self._ledger.open(replace(self._wanted, waited_ms=within.queue_ms), self._lost)
        return self._joined(within, await self._inside.granted())

    async def moved(self, exclude: str) -> Grant | Refusal:
        assert self._within is not None
        assert self._inside is not None
        return self._joined(self._within, await self._inside.moved(exclude))

    def first_token(self) -> None:
        if self._inside is not None:
            self._inside.first_token()

    def grow(self, held: int, base: int, path: bytes, net: int = 0) -> None:
        if self._inside is not None:
            self._inside.grow(held, base, path, net)

    def settle(
        self, used_blocks: int | None, cost: int | None, used: Units | None = None, name: str = ""
    ) -> None:
        if self._inside is not None:
            self._inside.settle(used_blocks, cost, used, name)
        self._limits.settle(None, None, used)

    def _joined(self, within: Grant, inside: Grant | Refusal) -> Grant | Refusal:
        if isinstance(inside, Refusal):
            return replace(inside, waited=inside.waited or within.queued)
        limited_ms = within.queue_ms if within.queued else 0
        return replace(inside, limited_ms=limited_ms, left=(*within.left, *inside.left))


def keep_running() -> None:
    """A call that lost its place within the limits goes on: it takes no room from anybody."""
