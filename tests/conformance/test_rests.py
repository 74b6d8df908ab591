"""Replicas that answer and get no new calls, and fleets that take none (`kvgate drain`, `kvgate gate`): on both
implementations and with a given clock."""

from itertools import count

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.order import FIRST_APPOINTMENT_MS, OPERATOR, SHUT_RETRY_MS
from tests.conformance.twin import IN_FULL, Op, Twin

LIMIT = 20
LEASE_MS = 6000
HEARTBEAT_MS = 1000
DRAINED, ASLEEP = "drained", "asleep"


class Fleet:
    """One pool of the replicas r0 and r1, two owners, and an open gate."""

    def __init__(self, client: "redis.Redis[bytes]") -> None:
        replicas = tuple(ReplicaConfig(name, "p", LIMIT, LIMIT, 500, 1000) for name in ("r0", "r1"))
        lanes, classes = (("a", ("p",)),), (("normal", 0),)
        self.config = FleetConfig(LEASE_MS, HEARTBEAT_MS, LIMIT, lanes, classes, replicas)
        self.twin = Twin(client, self.config)
        self.now_ms, self._ids = 1_000_000, count(1)
        self._batches = {"o0": count(1), "o1": count(1)}
        for owner in self._batches:
            self.twin.hello(self.now_ms, owner)
        self.pass_heartbeats(5, "o0", "o1")

    def pass_heartbeats(self, heartbeats: int, *owners: str) -> None:
        for _ in range(heartbeats):
            self.now_ms += HEARTBEAT_MS
            for owner in owners:
                self.step(["Y"], owner=owner)

    def step(self, *ops: Op, owner: str = "o0") -> list[Op]:
        reply = self.twin.step(self.now_ms, owner, next(self._batches[owner]), ops)
        results: list[Op] = reply[5]
        return results

    def ask(self, blocks: int, queue_max: int = 100, key: str = "k") -> str:
        """The call's id, and what became of it in `answer`."""
        id_ = f"{next(self._ids):010x}"
        policy, places = [1, -1, -1, -1, queue_max, queue_max], [[], [], [], "", "", 0, *IN_FULL]
        (self.answer,) = self.step(["A", id_, key, "normal", "a", blocks, 1, 0, 1, 600_000, *policy, *places])
        return id_

    def settle(self, id_: str) -> None:
        self.step(["S", id_, -1, -1, [], ""])

    def rest(self, replica: str, why: str, teller: str = OPERATOR) -> None:
        self.twin.rest(self.now_ms, teller, replica, why)

    def observe(self, replica: str, up: bool) -> None:
        self.twin.observe(self.now_ms, replica, up)

    def state(self, replica: str) -> str:
        return self.twin.books.replicas[replica].state

    def place(self, id_: str) -> tuple[str, str]:
        call = self.twin.books.calls[id_]
        return call.state, call.replica


@pytest.fixture
def fleet(store_client: "redis.Redis[bytes]") -> Fleet:
    return Fleet(store_client)


def test_what_runs_there_goes_on_and_what_comes_goes_elsewhere(fleet: Fleet) -> None:
    running = fleet.ask(5)
    assert fleet.answer == ["grant", "r0"]
    fleet.rest("r0", DRAINED)
    for _ in range(4):
        fleet.ask(5)
        assert fleet.answer == ["grant", "r1"]
    waiting = fleet.ask(5)
    assert (fleet.answer[0], fleet.place(running)) == ("ticket", ("reserved", "r0"))
    fleet.settle(running)
    assert fleet.place(waiting) == ("queued", ""), "the room that it left is not given out"
    fleet.rest("r0", "")
    assert fleet.place(waiting) == ("unclaimed", "r0")


def test_who_waits_for_the_only_one_is_granted_when_it_is_back(fleet: Fleet) -> None:
    """Nobody is told that there is no backend: it will be back."""
    fleet.observe("r1", up=False)
    fleet.rest("r0", DRAINED)
    waiting = fleet.ask(5)
    assert fleet.answer[0] == "ticket"
    fleet.ask(LIMIT + 1)
    assert fleet.answer[1] == "context_length_exceeded"
    fleet.rest("r0", "")
    assert fleet.place(waiting) == ("unclaimed", "r0")


def test_with_the_queue_off_nobody_waits_for_the_only_one(fleet: Fleet) -> None:
    fleet.observe("r1", up=False)
    fleet.rest("r0", DRAINED)
    fleet.ask(5, queue_max=0)
    assert fleet.answer == ["refused", "no_backend", "draining", 0, 0, FIRST_APPOINTMENT_MS]
    fleet.observe("r0", up=False)
    fleet.ask(5, queue_max=0)
    assert fleet.answer == ["refused", "no_backend", "", 0, 0, FIRST_APPOINTMENT_MS]


def held_for(fleet: Fleet) -> tuple[str, str]:
    replicas = fleet.twin.books.replicas
    return replicas["r0"].held_for, replicas["r1"].held_for


def passed_too_often(fleet: Fleet) -> tuple[str, str]:
    """A call that runs on half of r1, and one for which r0 is held."""
    fleet.ask(LIMIT)
    half = fleet.ask(LIMIT // 2)
    head = fleet.ask(LIMIT)
    for number in range(2):
        fleet.settle(fleet.ask(LIMIT // 2, key=f"passes{number}"))
    assert held_for(fleet) == (head, "")
    return half, head


def test_a_replica_that_is_held_for_a_call_is_let_go(fleet: Fleet) -> None:
    """The call that it was held for looks elsewhere."""
    half, head = passed_too_often(fleet)
    fleet.rest("r0", DRAINED)
    assert held_for(fleet) == ("", head)
    fleet.settle(half)
    assert fleet.place(head) == ("unclaimed", "r1")


def test_a_hold_is_let_go_while_nobody_may_start(fleet: Fleet) -> None:
    passed_too_often(fleet)
    fleet.twin.restart_store()
    fleet.rest("r0", DRAINED)
    assert held_for(fleet) == ("", "")


def test_a_drain_outlasts_the_replicas_restart_and_the_owners(fleet: Fleet) -> None:
    fleet.rest("r0", DRAINED)
    fleet.observe("r0", up=False)
    assert fleet.state("r0") == "down"
    fleet.observe("r0", up=True)
    assert fleet.state("r0") == "draining"
    fleet.pass_heartbeats(10, "o0")
    assert sorted(fleet.twin.books.sessions) == ["o0"]
    assert fleet.state("r0") == "draining"
    fleet.twin.restart_store()
    fleet.twin.step(fleet.now_ms, "o0", 100, [])
    assert fleet.state("r0") == "draining"
    fleet.twin.configure(fleet.now_ms, fleet.config)
    assert fleet.state("r0") == "draining"


def test_an_owners_word_ends_with_its_lease_and_the_operators_stays(fleet: Fleet) -> None:
    for replica in ("r0", "r1"):
        fleet.rest(replica, ASLEEP, teller="o1")
    fleet.rest("r1", DRAINED)
    fleet.rest("r1", ASLEEP, teller="o0")
    waiting = fleet.ask(5)
    assert fleet.answer[0] == "ticket"
    fleet.pass_heartbeats(10, "o0")
    assert fleet.place(waiting) == ("unclaimed", "r0")
    assert fleet.twin.books.rests == {("r1", OPERATOR): DRAINED, ("r1", "o0"): ASLEEP}
    fleet.rest("r1", "", teller="o0")
    assert fleet.state("r1") == "draining"
    fleet.rest("r1", "")
    assert fleet.state("r1") == "up"


def test_who_is_not_known_says_nothing(fleet: Fleet) -> None:
    fleet.rest("r0", ASLEEP, teller="o9")
    fleet.rest("r9", DRAINED)
    fleet.rest("r9", "")
    assert not fleet.twin.books.rests
    assert fleet.state("r0") == "up"


def test_each_heartbeat_tells_which_replicas_drain(fleet: Fleet) -> None:
    assert fleet.step(["H", 0, 0, []]) == [["same"]]
    fleet.rest("r1", DRAINED)
    fleet.rest("r0", ASLEEP, teller="o1")
    assert fleet.step(["H", 0, 0, []]) == [["same", "r0", "r1"]]
    fleet.observe("r1", up=False)
    assert fleet.step(["H", 1, 1, []]) == [["differs", "r0"]]


def test_a_fleet_that_is_shut_takes_nobody_new(fleet: Fleet) -> None:
    """Who waits or runs goes on, and who moves finds a place."""
    running = [fleet.ask(LIMIT), fleet.ask(LIMIT)]
    waiting = fleet.ask(5)
    fleet.twin.set_shut(fleet.now_ms, True)
    fleet.ask(1)
    assert fleet.answer == ["refused", "gate_closed", "", 0, 0, SHUT_RETRY_MS]
    ask = ["Q", 1, 1, "k", "normal", "a", 1, 1, 600_000, 1, -1, -1, -1, 100, 100, 0, 0, 0, *IN_FULL]
    assert fleet.step(ask) == [["refused", "gate_closed", "", 0, 0, SHUT_RETRY_MS]]
    fleet.settle(running[0])
    assert fleet.place(waiting) == ("unclaimed", "r0")
    fleet.step(["M", waiting, ["r0"]])
    fleet.settle(running[1])
    assert fleet.place(waiting) == ("unclaimed", "r1")
    fleet.twin.restart_store()
    fleet.twin.configure(fleet.now_ms, fleet.config)
    fleet.twin.set_shut(fleet.now_ms, False)
    fleet.twin.step(fleet.now_ms, "o0", 100, [])
    assert not fleet.twin.books.shut
