"""Replicas that die, break streams off, or hang, while streams run on them and calls wait for their first byte."""

import asyncio
import re
import signal

from tests.faults.callers import COMPLETE, Caller, error_event
from tests.faults.catalogue import Part
from tests.faults.scene import Needs, Scene
from tests.wire import soon

PART = Part("A replica")
NO_BYTE_YET = "waiting for a first byte"
STRUCK, ELSEWHERE = "streams on it", "streams elsewhere"
LIMIT_SECONDS = 1.0
PATIENCE = {"upstream": {"headers_seconds": LIMIT_SECONDS, "idle_seconds": LIMIT_SECONDS}}


def name_those_on(scene: Scene, url: str) -> list[Caller]:
    """The streams on the replica that is about to fail; they and the others get groups of their own."""
    name = re.sub("[.:]", "-", url.removeprefix("http://"))
    for caller in scene.crowd.callers:
        caller.group = STRUCK if caller.replica == name else ELSEWHERE
    struck = [caller for caller in scene.crowd.callers if caller.group == STRUCK]
    assert 0 < len(struck) < len(scene.crowd.callers)
    return struck


async def ask_without_an_answer(scene: Scene) -> None:
    """Calls on both replicas whose first token is not there yet."""
    for _ in range(2):
        scene.call_each(NO_BYTE_YET, hold_seconds=0.5)
    count = 2 * len(scene.gateways) + scene.size.streams * len(scene.gateways)
    await soon(lambda: sum(mock.log()["started"] for mock in scene.mocks) == count, "they are computed")


@PART.fault("is killed (`kill -9`)", Needs(room=True), short=True)
async def killed(scene: Scene) -> None:
    """Where no byte was forwarded the call is served by the other replica."""
    struck = scene.mocks[0]
    name_those_on(scene, struck.url)
    await ask_without_an_answer(scene)
    scene.strike()
    struck.process.kill()
    await scene.over()
    scene.expect({STRUCK: error_event("upstream_error"), ELSEWHERE: COMPLETE, NO_BYTE_YET: COMPLETE})


@PART.fault("resets a stream in the middle")
async def resets(scene: Scene) -> None:
    await scripted(scene, "reset_after_events:30", "upstream_error")


@PART.fault("falls silent in the middle of a stream", Needs(settings=PATIENCE))
async def hangs_in_a_stream(scene: Scene) -> None:
    await scripted(scene, "hang:30", "upstream_timeout")


async def scripted(scene: Scene, fault: str, code: str) -> None:
    """Some of the streams that were waiting meet the fault, the others are served."""
    struck = [scene.call(gateway, "streams that meet it", fail=fault) for gateway in scene.gateways]
    scene.strike()
    await struck[0].ended()
    scene.mended()
    await scene.over()
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE, "streams that meet it": error_event(code)})


@PART.fault("answers some calls with nothing, not even headers", Needs(room=True, settings=PATIENCE))
async def hangs_before_headers(scene: Scene) -> None:
    struck = scene.mocks[0]
    struck.fail("hang", 2)
    calls = [call for _ in range(2) for call in scene.call_each(NO_BYTE_YET)]
    await soon(lambda: struck.log()["received"] >= scene.size.streams + 2, "the replica has its share")
    scene.strike()
    for call in calls:
        await call.ended()
    scene.mended()
    await scene.over()
    scene.expect({"streams": COMPLETE, NO_BYTE_YET: COMPLETE})


@PART.fault(
    "stands still (`SIGSTOP`), with all of its streams, and goes on",
    Needs(300, room=True, settings=PATIENCE),
    short=True,
)
async def stopped(scene: Scene) -> None:
    struck = scene.mocks[0]
    streams = name_those_on(scene, struck.url)
    scene.strike()
    struck.process.send_signal(signal.SIGSTOP)
    scene.call_each(NO_BYTE_YET)
    for stream in streams:
        await stream.ended()
    await asyncio.sleep(LIMIT_SECONDS / 2)
    struck.process.send_signal(signal.SIGCONT)
    scene.mended()
    await scene.over()
    scene.expect({STRUCK: error_event("upstream_timeout"), ELSEWHERE: COMPLETE, NO_BYTE_YET: COMPLETE})
