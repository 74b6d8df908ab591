"""QF-03: one tenant's backlog delays neither another of its class nor, beyond its class's share, one of a lower class.

The case plays 60 s with 10 places; here every second of it lasts 0.4 s: a call runs 0.4 s, so the engine serves 25 a
second, A sends 125 a second, B and C one every 0.4 s, all for 24 s, and a call may wait 12 s.  Rates times service
time, and how many calls B and C send, are those of the case.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Wire, completion, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(120)]

SECOND = 0.4
"""Of the case, here."""
PLACES = 10
SERVICE_SECONDS = SECOND
PLAY_SECONDS, WAIT_SECONDS = 60 * SECOND, 30 * SECOND
LOW_SHARE = 0.1
CALL = (16, 145)
SEQUENCE = "x-session-id"
"""A header that engines get: which call of which tenant this is."""


@dataclass(frozen=True)
class Tenant:
    name: str
    class_: str
    per_second: float
    """Of the case."""


A = Tenant("a", "high", 50)
B = Tenant("b", "high", 1)
C = Tenant("c", "low", 1)


@dataclass(frozen=True)
class Told:
    """How one call went."""

    number: int
    """In the order of its tenant's calls."""
    status: int
    code: str
    began_at: float
    """Of the monotonic clock: when its answer began, or it was refused."""
    waited_seconds: float
    """In the queue."""
    ahead: int
    """Calls of the tenant that were sent before, and had neither begun nor been refused."""


@dataclass
class Traffic:
    """The calls of one tenant at their rate, each on a connection of its own, whatever became of those before."""

    gateway: GatewayProcess
    tenant: Tenant
    key: str
    told: list[Told] = field(default_factory=list)
    _sent: int = 0

    async def run(self) -> None:
        """Until every call that was sent has its answer."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (due := self._sent * SECOND / self.tenant.per_second) < PLAY_SECONDS:
                await asyncio.sleep(max(started + due - time.monotonic(), 0))
                group.create_task(self._call(self._sent, self._sent - len(self.told)))
                self._sent += 1

    async def _call(self, number: int, ahead: int) -> None:
        wire = await Wire.open(self.gateway.url)
        await wire.send(_numbered(post(self.key, _body()), f"{self.tenant.name}-{number}"))
        status, headers = await wire.head()
        began_at = time.monotonic()
        waited = int(headers.get("x-kvgate-queue-ms", "0")) / 1000
        self.told.append(Told(number, status, headers.get("x-kvgate-reason", ""), began_at, waited, ahead))
        if status == 200:
            assert (await wire.events())[-1] == b"data: [DONE]"
        wire.close()

    @property
    def served(self) -> list[Told]:
        return [told for told in self.told if told.status == 200]


def _body() -> dict[str, Any]:
    return completion(*CALL, stream=True, output_tokens=1, hold_seconds=SERVICE_SECONDS)


def _numbered(request: bytes, sequence: str) -> bytes:
    return request.replace(b"\r\n", f"\r\n{SEQUENCE}: {sequence}\r\n".encode(), 1)


def serve(world: World, tenants: Sequence[Tenant]) -> tuple[list[Traffic], Mock]:
    mock = world.mock("--max-num-seqs", str(PLACES), "--step-base-ms", "1")
    replica = {"url": mock.url, "max_num_seqs": PLACES}
    keys = [{"name": tenant.name, "class": tenant.class_} for tenant in tenants]
    classes = [{"name": "high"}, {"name": "low", "share": LOW_SHARE, "seconds_max": WAIT_SECONDS}]
    config, secrets = world.config(
        [{"name": "only", "replicas": [replica]}],
        *keys,
        classes=classes,
        queue={"seconds_max": WAIT_SECONDS},
        store=QUICK_STORE,
    )
    gateway = world.gateway(config, secrets[0])
    return [Traffic(gateway, tenant, key) for tenant, key in zip(tenants, secrets, strict=True)], mock


async def test_tenants_and_classes(new_world: World) -> None:
    traffic, mock = serve(new_world, (A, B, C))
    await asyncio.gather(*(one.run() for one in traffic))
    await soon(traffic[0].gateway.is_quiet, "nothing is left")
    a, b, c = traffic
    assert len(a.served) < len(a.told) / 2, "A asked for more than there is"
    expect_undelayed(b)
    expect_its_share(c, a, b)
    assert_first_in_first_out(mock, traffic)


def expect_undelayed(b: Traffic) -> None:
    assert {told.status for told in b.told} == {200}
    waits = [told.waited_seconds for told in b.told]
    assert statistics.quantiles(waits, n=20)[-1] <= 2 * SERVICE_SECONDS


def expect_its_share(c: Traffic, *higher: Traffic) -> None:
    """The calls ahead of one of C and itself each wait until the higher class was given 1 / share as many places."""
    assert {(told.status, told.code) for told in c.told} == {(200, "")}
    ended_at = max(told.began_at for told in c.served)
    before = sum(told.began_at <= ended_at for one in higher for told in one.served)
    rate = (before + len(c.served)) / PLAY_SECONDS
    for told in c.served:
        places = (told.ahead + 1) * (1 / LOW_SHARE + 1) + PLACES
        assert told.waited_seconds <= places / rate
    assert len(c.served) >= 0.9 * LOW_SHARE * before


def assert_first_in_first_out(mock: Mock, traffic: Sequence[Traffic]) -> None:
    """Within a tenant; calls that got their places in one step may overtake each other on the way to the engine."""
    arrived: dict[str, list[int]] = {one.tenant.name: [] for one in traffic}
    for request in mock.log()["requests"]:
        tenant, number = dict(request["headers"])[SEQUENCE].split("-")
        arrived[tenant].append(int(number))
    for one in traffic:
        numbers = arrived[one.tenant.name]
        assert sorted(numbers) == sorted(told.number for told in one.served)
        places = {number: place for place, number in enumerate(sorted(numbers))}
        assert all(abs(places[number] - place) < PLACES for place, number in enumerate(numbers))
