"""Gateway processes that are killed, told to end, or stopped."""

import asyncio
import signal

from tests.faults.callers import COMPLETE, LOST, error_event, refused
from tests.faults.catalogue import Part
from tests.faults.scene import LEASE_SECONDS, Needs, Scene
from tests.processes import GatewayProcess

PART = Part("A gateway")
GRACE_SECONDS = 0.5
STOPPED_SECONDS = LEASE_SECONDS + 0.7
"""Past the lease and what the others need to notice that."""


@PART.fault("one of two is killed (`kill -9`)", short=True)
async def killed(scene: Scene) -> None:
    first, second = scene.gateways
    scene.strike()
    first.process.kill()
    scene.lose(first)
    await scene.over()
    scene.expect_at(first, LOST, LOST)
    scene.expect_at(second, COMPLETE, COMPLETE)


@PART.fault(
    "one of two is told to end (`SIGTERM`), its streams last longer than the grace period",
    Needs(settings={"server": {"grace_seconds": GRACE_SECONDS}}),
)
async def told_to_end(scene: Scene) -> None:
    first, second = scene.gateways
    scene.strike()
    first.process.send_signal(signal.SIGTERM)
    scene.lose(first)
    assert await asyncio.to_thread(first.process.wait, GRACE_SECONDS + 3) == 0
    await scene.over()
    scene.expect_at(first, error_event("draining"), refused(503, "draining"))
    scene.expect_at(second, COMPLETE, COMPLETE)


async def stop_past_its_lease(scene: Scene, gateway: GatewayProcess) -> None:
    scene.strike()
    gateway.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_SECONDS)
    gateway.process.send_signal(signal.SIGCONT)
    scene.mended()
    await scene.over()
    assert gateway.metric("kvgate_leases_expired_total") == 1


@PART.fault(
    "one of two is stopped past its lease (`SIGSTOP`) and goes on; there is room", Needs(400, room=True)
)
async def stopped_with_room(scene: Scene) -> None:
    await stop_past_its_lease(scene, scene.gateways[0])
    scene.expect({"streams": COMPLETE})


@PART.fault("the same, and calls that waited took some of its places", Needs(400, 300), short=True)
async def stopped_with_others_waiting(scene: Scene) -> None:
    first, second = scene.gateways
    await stop_past_its_lease(scene, first)
    scene.expect_places_lost(first, second)


@PART.fault(
    "the same with `on_lease_lost: keep`",
    Needs(400, 300, settings={"store": {"on_lease_lost": "keep"}}, may_exceed=True),
)
async def stopped_and_kept(scene: Scene) -> None:
    await stop_past_its_lease(scene, scene.gateways[0])
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE})
