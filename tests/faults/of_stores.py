"""A store that dies, forgets, stops, is full, slow, out of reach, or has another time."""

import asyncio
import signal
from functools import partial

from tests.faults.callers import COMPLETE, refused
from tests.faults.catalogue import Part
from tests.faults.scene import HEARTBEAT_SECONDS, LEASE_SECONDS, Needs, Scene

PART = Part("The store")
AWAY_SECONDS = 0.3
"""Between a death of the store and its next start; calls are held for longer (`store.hold_seconds`)."""
PAST_A_LEASE_SECONDS = LEASE_SECONDS + 0.7
PAST_THE_HOLD_SECONDS = 2.5
"""`store.hold_seconds` is 2 here, as by default."""
SLOW_SECONDS = 1.5
HOUR_MS = 3_600_000
MEANWHILE = "asked meanwhile"
NO_STORE = refused(503, "store_unavailable")
WITH_DATA = ("--appendonly", "yes", "--appendfsync", "always")
AN_ADMIT = b"\xa1A\xaa"
"""How an admit begins on the wire."""


def expect_no_difference(scene: Scene) -> None:
    """No client noticed anything, and no more was admitted than the engines have room for."""
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE, MEANWHILE: COMPLETE})
    assert scene.preemptions == 0


async def restart(scene: Scene) -> None:
    """The store dies, calls come, and it starts again."""
    scene.kill_store()
    scene.call_each(MEANWHILE)
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.to_thread(scene.here.store.start)
    scene.mended()


@PART.fault("is killed and starts again empty", short=True)
async def restarted_empty(scene: Scene) -> None:
    scene.strike()
    await restart(scene)
    await scene.over()
    expect_no_difference(scene)


@PART.fault("is killed and starts again with its data (AOF)", Needs(store_options=WITH_DATA), short=True)
async def restarted_with_data(scene: Scene) -> None:
    epoch = scene.books().epoch
    scene.strike()
    await restart(scene)
    await scene.whole()
    assert scene.books().epoch == epoch + 1
    await scene.crowd.ended()
    expect_no_difference(scene)


@PART.fault(
    "is killed and starts again with older data (RDB): what came and went since is missing",
    Needs(may_exceed=True),
)
async def restarted_with_older_data(scene: Scene) -> None:
    scene.store.save()
    left = scene.crowd.callers.pop(0)
    left.leave()
    await left.ended()
    scene.call_each(MEANWHILE)
    await scene.settled()
    scene.strike()
    scene.kill_store()
    await asyncio.to_thread(scene.here.store.start)
    scene.mended()
    await scene.over()
    expect_no_difference(scene)


@PART.fault("is stopped for longer than a lease (`SIGSTOP`) and goes on")
async def paused(scene: Scene) -> None:
    assert scene.here.store.process
    scene.strike()
    scene.here.store.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PAST_A_LEASE_SECONDS)
    scene.here.store.process.send_signal(signal.SIGCONT)
    scene.mended()
    await scene.over()
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE})
    for gateway in scene.gateways:
        assert gateway.metric("kvgate_leases_expired_total") == 0


@PART.fault(
    "is killed in the middle of a reply to an admission, and starts again empty",
    Needs(proxied=True),
    short=True,
)
async def killed_in_a_reply(scene: Scene) -> None:
    proxy = scene.proxies[0]
    proxy.swallow, proxy.swallow_after, proxy.on_swallow = AN_ADMIT, 20, scene.kill_store
    scene.strike()
    scene.call_each(MEANWHILE)
    while not proxy.swallowed:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(scene.here.store.start)
    scene.mended()
    await scene.over()
    expect_no_difference(scene)


@PART.fault("swallows everything for longer than a call is held", Needs(450, proxied=True), short=True)
async def black_hole(scene: Scene) -> None:
    scene.strike()
    for proxy in scene.proxies:
        proxy.black_hole = True
    meanwhile = scene.call_each(MEANWHILE)
    await asyncio.gather(asyncio.sleep(PAST_THE_HOLD_SECONDS), *(caller.ended() for caller in meanwhile))
    for proxy in scene.proxies:
        proxy.black_hole = False
    scene.mended()
    await scene.over()
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE, MEANWHILE: NO_STORE})


async def cut_off(scene: Scene) -> None:
    """The first gateway does not reach the store for longer than its lease."""
    scene.strike()
    scene.proxies[0].black_hole = True
    await asyncio.sleep(PAST_A_LEASE_SECONDS)
    scene.proxies[0].black_hole = False
    scene.mended()
    await scene.over()
    assert [gateway.metric("kvgate_leases_expired_total") for gateway in scene.gateways] == [1, 0]


@PART.fault(
    "is out of one gateway's reach for longer than a lease; there is room",
    Needs(400, room=True, proxied=True),
)
async def cut_off_with_room(scene: Scene) -> None:
    await cut_off(scene)
    scene.expect({"streams": COMPLETE})


@PART.fault("the same, and calls that waited took some of its places", Needs(400, 300, proxied=True))
async def cut_off_with_others_waiting(scene: Scene) -> None:
    await cut_off(scene)
    scene.expect_places_lost(*scene.gateways)


async def slow(scene: Scene, reply_ms: int) -> None:
    """Every reply is late by so much, for a time."""
    scene.strike()
    for proxy in scene.proxies:
        proxy.reply_seconds = reply_ms / 1000
    scene.call_each(MEANWHILE)
    await asyncio.sleep(max(SLOW_SECONDS, reply_ms / 1000 + 0.5))
    for proxy in scene.proxies:
        proxy.reply_seconds = 0
    scene.mended()
    await scene.over()


async def replies_late(scene: Scene, reply_ms: int) -> None:
    await slow(scene, reply_ms)
    expect_no_difference(scene)


for milliseconds in (50, 200, 500):
    PART.fault(f"answers {milliseconds} ms late", Needs(proxied=True))(
        partial(replies_late, reply_ms=milliseconds)
    )


@PART.fault("answers 2,000 ms late: later than is waited for", Needs(300, proxied=True))
async def replies_too_late(scene: Scene) -> None:
    await slow(scene, 2000)
    scene.expect({"streams": COMPLETE, "waiting": COMPLETE, MEANWHILE: NO_STORE})


@PART.fault("is at `maxmemory`")
async def full(scene: Scene) -> None:
    """To the end: what runs is given back, and what comes is admitted all the same."""
    scene.strike()
    scene.store.config_set("maxmemory", 1)
    scene.call_each(MEANWHILE)
    await scene.over()
    expect_no_difference(scene)


async def jump(scene: Scene, shift_ms: int) -> None:
    """The store's clock jumps, and jumps back while the streams still run."""
    scene.strike()
    for shift in (shift_ms, 0):
        for proxy in scene.proxies:
            proxy.clock_shift_ms = shift
        await asyncio.sleep(3 * HEARTBEAT_SECONDS)
        scene.call_each(MEANWHILE)
        scene.mended()
        await scene.whole()
    assert scene.crowd.streaming() == scene.in_flight["streams"], "both jumps met the streams"
    await scene.crowd.ended()
    expect_no_difference(scene)
    for gateway in scene.gateways:
        assert gateway.metric("kvgate_leases_expired_total") == 0


@PART.fault("its clock jumps an hour forward, and back again", Needs(450, proxied=True), short=True)
async def clock_forward(scene: Scene) -> None:
    await jump(scene, HOUR_MS)


@PART.fault("its clock jumps an hour back, and forward again", Needs(450, proxied=True))
async def clock_back(scene: Scene) -> None:
    await jump(scene, -HOUR_MS)
