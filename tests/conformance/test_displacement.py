"""Who makes room in a full queue, on both implementations and with a given clock."""

from itertools import count

import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER = "o0"
BLOCKS, SMALL, OVERTAKE = 100, 10, 50
PAUSE_MS = 500


class Queue:
    """Of one replica; it holds four calls, of which two may be of one key."""

    def __init__(self, client: "redis.Redis[bytes]") -> None:
        replica = ReplicaConfig("r0", "p", BLOCKS, BLOCKS, 50, 1000)
        self.twin = Twin(
            client, FleetConfig(6000, 1000, OVERTAKE, (("a", ("p",)),), (("normal", 0),), (replica,))
        )
        self._now_ms, self._batches, self._ids = 1_000_000, count(1), count(1)
        self.twin.hello(self._now_ms, OWNER)
        for _ in range(5):
            self.step(["Y"])

    def step(self, *ops: Op) -> list[Op]:
        self._now_ms += PAUSE_MS
        results: list[Op] = self.twin.step(self._now_ms, OWNER, next(self._batches), ops)[5]
        return results

    def admit(self, key: str, blocks: int) -> Op:
        id_ = f"{next(self._ids):010x}"
        return [
            "A",
            id_,
            key,
            "normal",
            "a",
            blocks,
            1,
            0,
            blocks,
            60_000,
            1,
            -1,
            -1,
            -1,
            4,
            2,
            [],
            [],
            [],
            "",
            "",
            0,
            *IN_FULL,
        ]

    def state(self, call: Op) -> str:
        return self.twin.books.calls[call[1]].state

    @property
    def held_for(self) -> str:
        return self.twin.books.replicas["r0"].held_for


def test_a_call_for_which_a_replica_is_emptied_makes_room_for_nobody(
    store_client: "redis.Redis[bytes]",
) -> None:
    """It was passed by as much as is allowed; from then on the replica takes nobody else."""
    queue = Queue(store_client)
    running = [queue.admit(f"running-{i}", SMALL) for i in range(9)]
    queue.step(*running)
    large = queue.admit("large", BLOCKS - 40)
    queue.step(large)
    for passing in range(2 * OVERTAKE // SMALL):
        if queue.held_for:
            break
        running.append(queue.admit(f"passing-{passing}", SMALL))
        queue.step(running[-1])
        queue.step(["S", running.pop(0)[1], -1, -1, [], ""])
    assert queue.held_for == large[1]
    answers = [queue.step(queue.admit(f"late-{i}", SMALL))[0] for i in range(4)]
    assert [answer[0] for answer in answers] == ["ticket", "ticket", "ticket", "refused"]
    assert queue.state(large) == "queued"
    for call in running:
        queue.step(["S", call[1], -1, -1, [], ""])
    assert queue.state(large) == "unclaimed"


def test_a_displaced_call_is_gone_once_its_owner_has_settled_it(store_client: "redis.Redis[bytes]") -> None:
    """Until then its owner is told of it with each batch."""
    queue = Queue(store_client)
    queue.step(queue.admit("running", BLOCKS))
    crowd = [queue.admit("crowd", 30) for _ in range(2)]
    queue.step(*crowd, *(queue.admit(f"other-{i}", 20) for i in range(2)))
    assert queue.step(queue.admit("late", SMALL))[0][0] == "ticket"
    assert [queue.state(call) for call in crowd] == ["queued", "displaced"]
    settle = ["S", crowd[1][1], -1, -1, [], ""]
    assert queue.step(settle, settle) == [["withdrawn"], ["gone"]]
    assert crowd[1][1] not in queue.twin.books.calls
