"""Books that differ from what a gateway runs, as a lost message would leave them: the digest has to find it."""

from typing import Any

import msgspec

from gateway.ledger.records import decode_step
from gateway.ledger.scripts import fleet_keys, key_prefix, library
from tests.faults.callers import COMPLETE
from tests.faults.catalogue import Part
from tests.faults.scene import FLEET, HEARTBEAT_SECONDS, Needs, Scene
from tests.wire import soon

PART = Part("The books")
HEALED_SECONDS = 2 * HEARTBEAT_SECONDS + 4.0
"""Two heartbeats, and what two processes need to speak on a machine that stands still now and then."""
FOREIGN_ID = "00000000aa"


def plant(scene: Scene, owner: str, *ops: list[Any]) -> list[Any]:
    """A batch of that owner that its process knows nothing of."""
    batch = scene.books().sessions[owner].batch + 1
    keys, wakes = fleet_keys(FLEET), key_prefix(FLEET) + "wake:"
    packed = [msgspec.msgpack.encode(op) for op in ops]
    step = library().function("step")
    reply = scene.store.execute_command("FCALL", step, len(keys), *keys, "", owner, batch, wakes, *packed)
    results: list[Any] = decode_step(reply)[5]
    return results


async def healed(scene: Scene, **kinds: int) -> None:
    """So many differences were found and mended, and nothing else was touched."""
    await soon(lambda: healings(scene) == sum(kinds.values()), "the difference is counted", HEALED_SECONDS)
    await scene.over()
    assert scene.crowd.endings() == {"streams": {COMPLETE: scene.size.streams * len(scene.gateways)}}
    assert healings(scene) == sum(kinds.values()), "once"


def healings(scene: Scene) -> float:
    return sum(gateway.metric("kvgate_healed_total") for gateway in scene.gateways)


@PART.fault("an admission that its gateway never heard of: the store holds a call too many", Needs(room=True))
async def call_too_many(scene: Scene) -> None:
    """A settle that was lost leaves the same."""
    call = next(iter(scene.books().calls.values()))
    admit = [
        "A", FOREIGN_ID, call.key, call.class_, call.lane, call.blocks, 1, 0, call.cost, 1000, 1, -1, -1, -1, 9, 9,
        [], [], [], "", "", 0, -1, 0, "", 0, [],
    ]  # fmt: skip
    scene.strike()
    ((answer, _),) = plant(scene, call.owner, admit)
    assert answer == "grant"
    await healed(scene, settled=1)


@PART.fault(
    "an admission that the store forgot: a call that runs is missing there", Needs(room=True), short=True
)
async def call_missing(scene: Scene) -> None:
    call = next(iter(scene.books().calls.values()))
    scene.strike()
    assert plant(scene, call.owner, ["S", call.id, -1, -1, [], ""]) == [["settled"]]
    await healed(scene, redeclared=1)
