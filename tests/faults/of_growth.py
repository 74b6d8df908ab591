"""The same faults while calls grow: what they hold, and the paths by which they are charged, change all the time.

Books in which a sum is not that of its calls break a rule, whoever lost or forgot what (`Scene.look`).
"""

import asyncio
from functools import wraps

from gateway.core.elastic import GROWTH_TOKENS_MIN
from gateway.core.modes import Mode
from tests.faults import of_books, of_engines, of_gateways, of_stores
from tests.faults.callers import COMPLETE
from tests.faults.catalogue import Part, Play
from tests.faults.scene import PROMPT_TOKENS, Needs, Scene
from tests.wire import blocks_of, soon

PART = Part("Calls that grow")
TOKENS = 450
"""Of each stream: some of its growth is over when the fault strikes, some comes while it lasts, some afterwards."""
LEARNED = (100, 200, 300, 600)
AT_FIRST = blocks_of(PROMPT_TOKENS, GROWTH_TOKENS_MIN)
"""What a call holds until it grows."""
SHORT_ONES = (30, 40)
"""Much less than the streams write."""


def needs(**more: object) -> Needs:
    return Needs(**{"stream_tokens": TOKENS, "waiting_tokens": 300, "mode": Mode.ELASTIC, **more})  # type: ignore[arg-type]


def while_growing(play: Play) -> Play:
    @wraps(play)
    async def played(scene: Scene) -> None:
        await soon(lambda: is_growing(scene), "calls have grown, and are not at their end")
        await play(scene)

    return played


def is_growing(scene: Scene) -> bool:
    return any(call.elastic and AT_FIRST < call.held < call.blocks for call in scene.books().calls.values())


@PART.fault("one of two gateways is killed (`kill -9`)", needs(), short=True)
@while_growing
async def gateway_killed(scene: Scene) -> None:
    await of_gateways.killed(scene)


@PART.fault(
    "one of two gateways is stopped past its lease (`SIGSTOP`) and goes on; there is room",
    needs(room=True, learned=LEARNED),
)
@while_growing
async def gateway_stopped(scene: Scene) -> None:
    await of_gateways.stopped_with_room(scene)


@PART.fault("the store is killed and starts again empty", needs(), short=True)
@while_growing
async def store_restarted_empty(scene: Scene) -> None:
    await of_stores.restarted_empty(scene)


@PART.fault(
    "the store is killed and starts again with older data (RDB): growth since is missing, too",
    needs(may_exceed=True),
)
@while_growing
async def store_restarted_with_older_data(scene: Scene) -> None:
    await of_stores.restarted_with_older_data(scene)


@PART.fault(
    "the store is out of one gateway's reach for longer than a lease; there is room",
    needs(room=True, proxied=True, learned=LEARNED),
)
@while_growing
async def store_cut_off(scene: Scene) -> None:
    await of_stores.cut_off_with_room(scene)


@PART.fault("the store answers 200 ms late", needs(proxied=True))
@while_growing
async def store_late(scene: Scene) -> None:
    await of_stores.replies_late(scene, 200)


@PART.fault("a replica is killed (`kill -9`)", needs(room=True, learned=LEARNED))
@while_growing
async def engine_killed(scene: Scene) -> None:
    await of_engines.killed(scene)


@PART.fault(
    "an admission that the store forgot: a call that has grown is missing there",
    needs(room=True, learned=LEARNED),
    short=True,
)
@while_growing
async def call_missing(scene: Scene) -> None:
    await of_books.call_missing(scene)


@PART.fault(
    "calls write ten times as much as was learned, and more of them run than there is room for",
    needs(room=True, learned=SHORT_ONES, may_exceed=True),
    short=True,
)
async def surprised(scene: Scene) -> None:
    """What they hold is written down above what there is: nothing more comes, engines preempt, all are served."""
    before = scene.size.streams * len(scene.gateways)
    for gateway in scene.gateways:
        for _ in range(2 * scene.size.streams):
            scene.call(gateway)
    await scene.crowd.begun(3 * before)
    scene.strike()
    await soon(lambda: overdrafts(scene) > 0, "more is held than there is")
    late = scene.call_each("asked meanwhile")
    await asyncio.gather(*(caller.ended() for caller in scene.crowd.callers if caller not in late))
    scene.mended()
    await scene.over()
    scene.expect({"streams": COMPLETE, "asked meanwhile": COMPLETE})


def overdrafts(scene: Scene) -> float:
    return sum(gateway.metric("kvgate_overdrafts_total") for gateway in scene.gateways)
