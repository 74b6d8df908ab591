"""What operators do to fleets while gateways run: close and open them, take replicas out of placement and let them in.

What they say is kept in the store, so it holds for all gateways at once, and for those that start later.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.call import Fleet
from gateway.core.outcomes import Code, Refusal

log = logging.getLogger("kvgate.fleets")

NAME_CHARS_SHOWN = 80

Answer = dict[str, Any]


class FleetDesk:
    """Implements the admin API's `FleetDesk`."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = {fleet.name: fleet for fleet in fleets}

    async def drain(self, fields: Mapping[str, Any]) -> Answer | Refusal:
        """The replica gets no new calls; what runs there finishes."""
        return await self._set(fields, True)

    async def undrain(self, fields: Mapping[str, Any]) -> Answer | Refusal:
        return await self._set(fields, False)

    async def gate(self, fields: Mapping[str, Any]) -> Answer | Refusal:
        """`closed`: the fleet takes no new calls; who waits or runs goes on."""
        if unknown := set(fields) - {"fleet", "closed"}:
            return _invalid(min(unknown), "unknown field, there are `fleet` and `closed`")
        name, closed = fields.get("fleet"), fields.get("closed")
        if not isinstance(closed, bool):
            return _invalid("closed", f"is true or false, got {_shown(closed)}")
        if name not in self._fleets:
            return self._no_fleet(name)
        refusal = await self._fleets[name].ledger.shut(closed)
        if refusal:
            return refusal
        log.info("fleet %s was %s", name, "closed" if closed else "opened")
        return {"fleet": name, "closed": closed}

    async def _set(self, fields: Mapping[str, Any], drains: bool) -> Answer | Refusal:
        if unknown := set(fields) - {"replica", "fleet"}:
            return _invalid(min(unknown), "unknown field, there are `replica` and `fleet`")
        name = fields.get("replica")
        if not isinstance(name, str) or not name:
            return _invalid("replica", f"the name of a replica is needed, got {_shown(name)}")
        fleet = self._fleet_of(name, fields.get("fleet"))
        if isinstance(fleet, Refusal):
            return fleet
        refusal = await fleet.ledger.drain(name, drains)
        if refusal:
            return refusal
        log.info("replica %s of fleet %s %s", name, fleet.name, "drains" if drains else "drains no more")
        return {"fleet": fleet.name, "replica": name, "drained": drains}

    def _fleet_of(self, replica: str, fleet: Any) -> Fleet | Refusal:
        """Names of replicas are unique in their fleet only."""
        if fleet is not None and fleet not in self._fleets:
            return self._no_fleet(fleet)
        asked = self._fleets.values() if fleet is None else [self._fleets[fleet]]
        found = [each for each in asked if each.engines.knows(replica)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found)
            return _invalid("fleet", f"several fleets have a replica {_shown(replica)}, name one of {names}")
        return Refusal(
            Code.NOT_FOUND, f"no fleet has a replica {_shown(replica)}; `kvgate status` lists them", "replica"
        )

    def _no_fleet(self, name: Any) -> Refusal:
        return _invalid("fleet", f"there is no fleet {_shown(name)}, known are {', '.join(self._fleets)}")


def _shown(value: Any) -> str:
    return repr(value)[:NAME_CHARS_SHOWN]


def _invalid(field: str, problem: str) -> Refusal:
    return Refusal(Code.INVALID_VALUE, f"{field}: {problem}", field)
