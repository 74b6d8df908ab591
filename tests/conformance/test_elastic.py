"""Calls that are charged by their paths, on both implementations: what the state machine meets by chance only."""

import itertools
from typing import Any

import pytest

from gateway.core.books import Call, FleetConfig, Replica, ReplicaConfig
from gateway.core.elastic import (
    ELASTIC,
    EPS,
    FAR_EPS,
    GUARANTEED,
    NEAR,
    POINTS,
    SCALE,
    SHARED,
    SUM_MAX,
    TILTS,
    Path,
    flat,
    margins,
    pack,
)
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER, OTHER = "o0", "o1"
LIMIT = 100
BASE, OTHER_BASE = 128, 64
BESIDE = min(margins(BASE))
"""What the bound keeps free, in SCALE-ths of a block."""
Client = "redis.Redis[bytes]"


class Fleet:
    """Replicas of LIMIT blocks, and an owner."""

    def __init__(self, client: Client, *modes: str, overtake_blocks: int = 10**6) -> None:
        self.replicas = tuple(
            ReplicaConfig(f"r{i}", "p", LIMIT, LIMIT, 50, 1000, mode) for i, mode in enumerate(modes)
        )
        self._overtake_blocks = overtake_blocks
        self.twin = Twin(client, self._config())
        self.now_ms = 1_000_000
        self._batches: dict[str, int] = {}
        self._ids = itertools.count(1)
        self.join(OWNER)
        for _ in range(3):
            self.now_ms += 1000
            self.step(["Y"])

    def _config(self) -> FleetConfig:
        return FleetConfig(
            6000, 1000, self._overtake_blocks, (("a", ("p",)),), (("normal", 0),), self.replicas
        )

    def join(self, owner: str) -> None:
        self._batches[owner] = 0
        self.twin.hello(self.now_ms, owner)

    def configure(self, *modes: str) -> None:
        self.replicas = tuple(
            ReplicaConfig(r.name, r.pool, r.limit, r.usable, 50, 1000, mode)
            for r, mode in zip(self.replicas, modes, strict=True)
        )
        self.twin.configure(self.now_ms, self._config())

    def step(self, *ops: Op, owner: str = OWNER) -> list[Any]:
        self._batches[owner] += 1
        answer: list[Any] = self.twin.step(self.now_ms, owner, self._batches[owner], ops)[5]
        return answer

    def admit(
        self, blocks: int, *demand: Any, key: str = "k", queue_max: int = 9, exclude: tuple[str, ...] = ()
    ) -> Op:
        id_ = f"{next(self._ids):010x}"
        policy = [1, -1, -1, -1, queue_max, queue_max]
        return ["A", id_, key, "normal", "a", blocks, 1, 0, blocks, 600_000, *policy, [], list(exclude), [], "", "",
                0, *(demand or IN_FULL)]  # fmt: skip

    def run(self, blocks: int, *demand: Any, **options: Any) -> str:
        """A call that starts at once."""
        op = self.admit(blocks, *demand, **options)
        (answer,) = self.step(op)
        assert answer[0] == "grant"
        return str(op[1])

    def wait(self, blocks: int, *demand: Any, **options: Any) -> str:
        op = self.admit(blocks, *demand, **options)
        (answer,) = self.step(op)
        assert answer[0] == "ticket"
        return str(op[1])

    def call(self, id_: str) -> Call:
        return self.twin.books.calls[id_]

    def replica(self, name: str = "r0") -> Replica:
        return self.twin.books.replicas[name]


def later(*points: int, base: int = BASE, held: int = 1, promised: int = 0) -> list[Any]:
    """Demand of a call that holds one block now, and so much at every horizon, in SCALE-ths of a block by tilt."""
    path: Path = tuple(points) * (33 // len(points))
    return [held, base, pack(path), promised, []]


@pytest.mark.parametrize(("over", "answer"), [(0, "grant"), (1, "ticket")])
def test_the_bound_is_exact(store_client: Client, over: int, answer: str) -> None:
    """At the smallest part of a block, where the whole demands are far above the limit."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(90, *later(40 * SCALE))
    assert fleet.step(fleet.admit(90, *later(60 * SCALE - BESIDE + over)))[0][0] == answer


@pytest.mark.parametrize("horizon", range(POINTS // len(TILTS)))
@pytest.mark.parametrize(("over", "answer"), [(0, "grant"), (1, "ticket")])
def test_far_horizons_may_fall_short_more_often(
    store_client: Client, horizon: int, over: int, answer: str
) -> None:
    """Each alone, at the smallest part of a block."""
    fleet, tilts = Fleet(store_client, ELASTIC), len(TILTS)
    fleet.run(90, *later(40 * SCALE))
    point = 60 * SCALE - min(margins(BASE, EPS if horizon < NEAR else FAR_EPS)) + over
    path = [point if at // tilts == horizon else 0 for at in range(POINTS)]
    assert fleet.step(fleet.admit(90, *later(*path)))[0][0] == answer


def test_one_tilt_is_enough_at_each_horizon(store_client: Client) -> None:
    left, high = [LIMIT * SCALE - beside for beside in margins(BASE)], SUM_MAX // 4
    for tilt in range(3):
        fleet = Fleet(store_client, ELASTIC)
        fleet.run(90, *later(1, 1, 1))
        enough, too_much = ([high if k != tilt else left[k] + off for k in range(3)] for off in (-1, 0))
        assert fleet.step(fleet.admit(90, *later(*too_much), queue_max=0))[0][0] == "refused"
        assert fleet.step(fleet.admit(90, *later(*enough)))[0][0] == "grant"


def test_calls_in_full_are_beside_them_at_every_horizon(store_client: Client) -> None:
    fleet = Fleet(store_client, SHARED)
    fleet.run(30)
    fleet.run(90, *later(40 * SCALE))
    assert (fleet.replica().used, fleet.replica().full, fleet.replica().assured) == (31, 120, 30)
    assert fleet.step(fleet.admit(30 - BESIDE // SCALE, queue_max=0))[0][0] == "refused"
    assert fleet.step(fleet.admit(30 - BESIDE // SCALE - 1, queue_max=0))[0][0] == "grant"


def test_paths_for_another_size_are_charged_in_full_until_the_others_have_left(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    first = fleet.run(30, *later(SCALE))
    second = fleet.run(30, *later(SCALE, base=OTHER_BASE))
    assert (fleet.call(second).held, fleet.replica().base) == (30, BASE)
    grow = ["Z", second, 2, OTHER_BASE, pack(flat(3)), 0]
    assert fleet.step(grow) == [["ok"]]
    assert (fleet.call(second).held, fleet.call(second).asked) == (30, 2), "its growth changes nothing yet"
    fleet.step(["S", first, -1, -1, [], ""])
    assert (fleet.replica().elastic, fleet.replica().base, fleet.replica().sums) == (0, 0, b"")
    fleet.step(grow)
    assert (fleet.call(second).held, fleet.replica().base) == (2, OTHER_BASE)


def test_sums_that_are_larger_than_the_record(store_client: Client) -> None:
    """Nobody's demand is: who asks for that is charged in full."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(10, *later(SUM_MAX))
    second = fleet.run(10, *later(0))
    fleet.step(["Z", second, 1, BASE, pack((0,) * 32 + (1,)), 0])
    assert (fleet.call(second).elastic, fleet.call(second).held) == (0, 10)
    fleet.step(["Z", second, 1, BASE, pack((0,) * 33), 0])
    assert (fleet.call(second).elastic, fleet.call(second).held) == (1, 1)


def test_growth_stops_for_nobody(store_client: Client) -> None:
    """Not for who waits, nor for whom the replica is held, nor for the limit."""
    fleet = Fleet(store_client, ELASTIC, overtake_blocks=1)
    running = fleet.run(90, *later(SCALE), key="small")
    waiting = fleet.wait(LIMIT, key="large")
    small = fleet.wait(5, *later(SCALE), key="small")
    assert fleet.call(small).state == "unclaimed"
    assert fleet.replica().held_for == waiting
    assert fleet.step(["Z", running, 99, BASE, pack(flat(99)), 0]) == [["ok"]]
    assert fleet.step(["Z", running, 107, BASE, pack(flat(99)), 0]) == [["over", 8]]
    assert fleet.step(["Z", running, 103, BASE, pack(flat(99)), 0]) == [["ok"]], "who shrinks makes none"
    assert fleet.replica().used == 104


def test_a_path_that_has_become_lower_lets_a_waiter_in(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    running = fleet.run(90, *later(90 * SCALE))
    waiting = fleet.wait(50, *later(20 * SCALE))
    fleet.step(["Z", running, 2, BASE, pack(flat(70)), 0])
    assert fleet.call(waiting).state == "unclaimed"


def test_a_replica_that_becomes_guaranteed_charges_who_grows_in_full(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    running = fleet.run(60, *later(SCALE))
    fleet.configure(GUARANTEED)
    assert fleet.call(running).held == 1
    newcomer = fleet.run(30, *later(SCALE))
    assert (fleet.call(newcomer).elastic, fleet.call(newcomer).held) == (0, 30)
    fleet.step(["Z", running, 2, BASE, pack(flat(3)), 0])
    assert (fleet.replica().used, fleet.replica().elastic) == (90, 0)


def test_a_promised_call_runs_on_no_elastic_replica(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC, SHARED)
    promised = fleet.run(60, *later(SCALE, promised=1))
    assert (fleet.call(promised).replica, fleet.call(promised).held) == ("r1", 60)
    waiting = fleet.wait(60, *later(SCALE, promised=1))
    assert fleet.call(waiting).state == "queued", "although the other one is idle"
    fleet.configure(SHARED, SHARED)
    assert (fleet.call(waiting).state, fleet.call(waiting).replica) == ("unclaimed", "r0")
    fleet.configure(ELASTIC, ELASTIC)
    refused = ["refused", "no_backend", "promised", 0, 0, 1000]
    assert fleet.step(fleet.admit(1, -1, 0, b"", 1, [])) == [refused]


def test_a_call_keeps_its_path_when_it_moves(store_client: Client) -> None:
    """Also from a replica that charged it in full."""
    fleet = Fleet(store_client, GUARANTEED, ELASTIC)
    id_ = fleet.run(60, *later(SCALE))
    assert (fleet.call(id_).replica, fleet.call(id_).held) == ("r0", 60)
    fleet.step(["M", id_, ["r0"]])
    assert (fleet.call(id_).replica, fleet.call(id_).held, fleet.call(id_).elastic) == ("r1", 1, 1)
    assert fleet.replica("r0").used == 0


def test_what_a_lost_owner_held_is_taken_away_with_its_paths(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    fleet.join(OTHER)
    kept = fleet.run(60, *later(3 * SCALE))
    fleet.step(fleet.admit(60, *later(5 * SCALE)), owner=OTHER)
    assert fleet.replica().elastic == 2
    for _ in range(8):
        fleet.now_ms += 1000
        fleet.step(["Y"])
    assert (fleet.replica().elastic, fleet.replica().sums) == (1, fleet.call(kept).path)


def test_a_declaration_says_what_the_call_holds_now(store_client: Client) -> None:
    """Of a call that the store knows, and of one that it has forgotten; without force as its room allows."""
    fleet = Fleet(store_client, ELASTIC)
    known = fleet.run(60, *later(SCALE))

    def declared(id_: str, force: int, *demand: Any) -> Op:
        return ["R", id_, "r0", "k", "normal", "a", 60, 1, 0, 60, 1, -1, -1, -1, force, "", "", *demand]

    assert fleet.step(declared(known, 0, *later(40 * SCALE, held=7))) == [["same"]]
    assert fleet.replica().used == 7
    assert fleet.step(declared("00000000f1", 0, *later(60 * SCALE, held=2))) == [["no_room"]]
    assert fleet.step(declared("00000000f1", 1, *later(60 * SCALE, held=2))) == [["declared"]]
    assert (fleet.replica().used, fleet.replica().elastic) == (9, 2)


def test_the_wait_is_not_foreseen_by_ends_where_calls_have_paths(store_client: Client) -> None:
    """Once the drain is known that says it."""
    fleet = Fleet(store_client, ELASTIC)
    first, _ = fleet.run(90, *later(60 * SCALE)), fleet.run(90, *later(20 * SCALE))
    fleet.step(["H", 2, int(first, 16) + int(first, 16) + 1, [500, "r0", 90]])
    waiting = fleet.admit(90, *later(60 * SCALE))
    assert fleet.step(waiting) == [["ticket", 1, -1]]


def test_a_question_is_answered_by_the_path(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(90, *later(40 * SCALE, held=50))
    asked = ["Q", 60, 60, "k", "normal", "a", 1, 60, 600_000, 1, -1, -1, -1, 0, 0, 0, 0, 0]
    assert fleet.step([*asked, *later(10 * SCALE)]) == [["open"]]
    assert fleet.step([*asked, *IN_FULL])[0][:2] == ["refused", "capacity_exceeded"]


def test_what_comes_back_is_told_in_whole_demands(store_client: Client) -> None:
    """When all that run have ended, and how much is free for one more."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.step(["S", fleet.run(10), -1, -1, [], ""])
    fleet.run(90, *later(80 * SCALE))
    told = fleet.step(fleet.admit(90, queue_max=0))[0]
    assert told == ["refused", "capacity_exceeded", "limit", 90, 10, 2000]


def test_a_preferred_replica_is_judged_by_its_paths_too(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC, ELASTIC)
    fleet.run(90, *later(80 * SCALE))
    fleet.run(90, *later(20 * SCALE), exclude=("r0",))
    op = fleet.admit(90, *later(40 * SCALE))
    op[16] = ["r0"]
    assert fleet.step(op) == [["grant", "r1"]]
