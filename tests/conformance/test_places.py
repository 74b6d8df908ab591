"""Places that calls have left, and calls under an `Idempotency-Key`, on both implementations and with a given clock."""

from itertools import count
from typing import Any

import msgspec
import pytest
import redis

from gateway.core.books import FleetConfig, Place, ReplicaConfig
from gateway.core.order import DRAIN_WINDOW_MS, PLACE_MS, PLACES, PLACES_OF_FLOW
from tests.conformance.twin import IN_FULL, Op, Twin

LEASE_MS, HEARTBEAT_MS = 6000, 1000
BLOCKS = 100
ONE, OTHER = "0123456789abcdef", "fedcba9876543210"
ONCE = "a" * 16
QUEUE_MAX = 40


class Fleet:
    """One replica, two gateways, and a clock that the test moves."""

    def __init__(self, client: "redis.Redis[bytes]", overtake_blocks: int = 100 * BLOCKS) -> None:
        replica = ReplicaConfig("r0", "p", BLOCKS, BLOCKS, 500, 1000)
        lanes, classes = (("a", ("p",)), ("b", ("p",))), (("high", 0), ("normal", 0))
        config = FleetConfig(LEASE_MS, HEARTBEAT_MS, overtake_blocks, lanes, classes, (replica,))
        self.twin = Twin(client, config)
        self.now_ms = 1_000_000
        self._batches = {"o0": count(1), "o1": count(1)}
        self._ids = count(1)
        for owner in self._batches:
            self.twin.hello(self.now_ms, owner)
        self.beat(2 * HEARTBEAT_MS)

    def step(self, *ops: Op, owner: str = "o0") -> list[Op]:
        reply = self.twin.step(self.now_ms, owner, next(self._batches[owner]), ops)
        results: list[Op] = reply[5]
        return results

    def beat(self, ms: int) -> None:
        """So long nothing but heartbeats."""
        while ms > 0:
            self.now_ms += min(ms, HEARTBEAT_MS)
            ms -= HEARTBEAT_MS
            for owner in self._batches:
                self.step(["Y"], owner=owner)

    def admit(self, key: str = "k", blocks: int = BLOCKS, fingerprint: str = "", **changes: Any) -> Op:
        a = {"class": "normal", "lane": "a", "wait_ms": 3_600_000, "queue_max": QUEUE_MAX, "key_max": QUEUE_MAX,
             "blocks_max": -1, "requests_max": -1, "once": "", "place_only": 0} | changes  # fmt: skip
        id_ = f"{next(self._ids):010x}"
        return ["A", id_, key, a["class"], a["lane"], blocks, 1, 0, blocks, a["wait_ms"], 1,
                a["blocks_max"], a["requests_max"], -1, a["queue_max"], a["key_max"], [], [], [], fingerprint,
                a["once"], a["place_only"], *IN_FULL]  # fmt: skip

    def ask(self, key: str = "k", fingerprint: str = "", owner: str = "o0", **changes: Any) -> tuple[str, Op]:
        """The new call's id, and what it was told."""
        op = self.admit(key, fingerprint=fingerprint, **changes)
        return op[1], self.step(op, owner=owner)[0]

    def leave(self, id_: str, fingerprint: str = ONE) -> None:
        assert self.step(["S", id_, -1, -1, [], fingerprint]) == [["withdrawn"]]

    def end(self, id_: str, owner: str = "o0") -> list[str]:
        """A running call ends as it was expected to; who starts because of it."""
        before = self.started
        self.step(["K", id_], owner=owner)
        self.step(["S", id_, -1, -1, [], ""], owner=owner)
        return [other for other in self.started if other not in before]

    @property
    def started(self) -> list[str]:
        return [id_ for id_, call in self.twin.books.calls.items() if call.state != "queued"]

    def served(self) -> list[str]:
        """The calls that start from now on, one after the other."""
        order: list[str] = []
        while running := self.started:
            order += self.end(running[0], self.twin.books.calls[running[0]].owner)
        return order


@pytest.fixture
def fleet(store_client: "redis.Redis[bytes]") -> Fleet:
    return Fleet(store_client)


def test_the_next_identical_call_takes_the_place_at_any_gateway(fleet: Fleet) -> None:
    fleet.ask()
    first, _ = fleet.ask()
    second, _ = fleet.ask()
    fleet.leave(first)
    unlike, _ = fleet.ask(fingerprint=OTHER)
    again, told = fleet.ask(fingerprint=ONE, owner="o1")
    assert told[:3] == ["ticket", 3, -1]
    assert fleet.served() == [again, second, unlike]


def test_the_place_is_taken_once(fleet: Fleet) -> None:
    fleet.ask()
    first, _ = fleet.ask()
    second, _ = fleet.ask()
    fleet.leave(first)
    again, _ = fleet.ask(fingerprint=ONE)
    late, _ = fleet.ask(fingerprint=ONE)
    assert fleet.served() == [again, second, late]


def test_sixteen_identical_calls_are_sixteen_tickets_and_leave_sixteen_places(fleet: Fleet) -> None:
    """The first place is taken first, whoever left first."""
    fleet.ask()
    calls = [fleet.ask(fingerprint=ONE)[0] for _ in range(16)]
    behind, _ = fleet.ask()
    assert [fleet.twin.books.calls[id_].state for id_ in calls] == ["queued"] * 16
    for id_ in [*calls[8:], *calls[:8]]:
        fleet.leave(id_)
    back = [fleet.ask(fingerprint=ONE)[0] for _ in range(17)]
    assert fleet.served() == [*back[:16], behind, back[16]]


@pytest.mark.parametrize("changes", [{"key": "k2"}, {"class": "high"}, {"lane": "b"}], ids=str)
def test_a_place_is_for_the_same_key_class_and_lane(fleet: Fleet, changes: dict[str, str]) -> None:
    fleet.ask()
    left, _ = fleet.ask()
    fleet.leave(left)
    fleet.ask(fingerprint=ONE, **changes)
    assert len(fleet.twin.books.places) == 1


def test_the_body_matters_only_where_its_key_has_left_places_and_would_wait(fleet: Fleet) -> None:
    running, told = fleet.ask()
    assert told == ["grant", "r0"]
    left, told = fleet.ask()
    assert told[0] == "ticket"
    fleet.leave(left)
    assert fleet.ask("k2")[1][0] == "ticket"
    arrivals = fleet.twin.books.arrivals
    asked, told = fleet.ask()
    assert told == ["fingerprint"]
    assert asked not in fleet.twin.books.calls, "nothing happened"
    assert fleet.twin.books.arrivals == arrivals
    assert fleet.ask(queue_max=0)[1][0] == "refused", "with the queue off nobody waits"
    fleet.served()
    assert running not in fleet.twin.books.calls
    assert fleet.ask()[1] == ["grant", "r0"]


def be_passed(fleet: Fleet) -> None:
    """A call has left a flow that is empty since, and others were served."""
    running, _ = fleet.ask("other")
    left, _ = fleet.ask("k")
    others = [fleet.ask("other")[0] for _ in range(4)]
    rivals = [fleet.ask("rival")[0] for _ in range(4)]
    fleet.leave(left)
    fleet.end(running)
    fleet.end(fleet.started[0])
    waiting = [
        id_ for id_ in [*others, *rivals] if fleet.twin.books.calls.get(id_) and id_ not in fleet.started
    ]
    assert len(waiting) == 6


def test_a_flow_that_became_empty_goes_on_where_it_was(fleet: Fleet) -> None:
    """A new start would be behind those that wait."""
    be_passed(fleet)
    again, _ = fleet.ask("k", fingerprint=ONE)
    assert fleet.served()[0] == again


def test_a_newcomer_to_such_a_flow_starts_anew(fleet: Fleet) -> None:
    """What the other call missed is not its own."""
    be_passed(fleet)
    newcomer, _ = fleet.ask("k", fingerprint=OTHER)
    assert fleet.twin.books.calls[newcomer].state == "queued"
    assert fleet.twin.books.tags["a", "normal", "k"] > 0


def test_places_do_not_start_anew_one_after_the_other(fleet: Fleet) -> None:
    """What their flow has missed is made good once: each pays although nobody of it waits when the next one comes."""
    running, _ = fleet.ask("rival")
    left = [fleet.ask("k")[0] for _ in range(5)]
    rivals = [fleet.ask("rival")[0] for _ in range(9)]
    for id_ in left:
        fleet.leave(id_)
    for _ in range(3):
        (running,) = fleet.end(running)
    order = []
    for _ in left:
        fleet.ask("k", fingerprint=ONE)
        order += fleet.end(fleet.started[0])
    assert ["rival" if id_ in rivals else "k" for id_ in order] == ["k", "k", "k", "rival", "k"]


def test_who_returns_has_paid_for_what_its_key_got_at_once(fleet: Fleet) -> None:
    """The key's other call found room while nobody waited: that was the key's turn."""
    fleet.ask("other", blocks=BLOCKS // 10)
    running, _ = fleet.ask("another", blocks=BLOCKS // 2)
    left, _ = fleet.ask("k", blocks=BLOCKS // 2)
    fleet.leave(left)
    fleet.end(running)
    own, told = fleet.ask("k", blocks=BLOCKS // 2, fingerprint=OTHER)
    assert told[0] == "grant"
    rival, _ = fleet.ask("rival", blocks=BLOCKS // 2)
    again, _ = fleet.ask("k", blocks=BLOCKS // 2, fingerprint=ONE)
    assert fleet.end(own) == [rival]
    assert fleet.end(rival) == [again]


def test_nobody_is_refused_a_place_for_the_wait_that_is_foretold(fleet: Fleet) -> None:
    running, _ = fleet.ask("rival")
    left, _ = fleet.ask("k", wait_ms=30 * DRAIN_WINDOW_MS)
    for _ in range(14):
        fleet.ask("rival")
    for _ in range(3):
        fleet.beat(DRAIN_WINDOW_MS // 2)
        (running,) = fleet.end(running)
        if running == left:
            left, _ = fleet.ask("k")
    fleet.leave(left)
    newcomer = fleet.ask("k", fingerprint=OTHER, wait_ms=1000)[1]
    assert newcomer[:2] == ["refused", "predicted_wait"]
    assert fleet.ask("k", fingerprint=ONE, wait_ms=1000)[1][0] == "ticket"


@pytest.mark.parametrize(
    ("changes", "knob"), [({"queue_max": 3}, "depth_max"), ({"key_max": 1}, "key_share")], ids=str
)
def test_depth_and_the_keys_part_hold_for_who_returns(
    fleet: Fleet, changes: dict[str, int], knob: str
) -> None:
    fleet.ask("rival")
    for key in ("k", "rival", "rival"):
        fleet.ask(key)
    left, _ = fleet.ask("k")
    fleet.leave(left)
    told = fleet.ask("k", fingerprint=ONE, **changes)[1]
    assert told[:3] == ["refused", "queue_full", knob]
    assert len(fleet.twin.books.places) == 1


def test_a_retry_too_many_waits_only_in_its_own_place(fleet: Fleet) -> None:
    assert fleet.ask(place_only=1)[1] == ["grant", "r0"], "there is room"
    assert fleet.ask(place_only=1)[1][:3] == ["refused", "queue_full", "place_only"]
    left, _ = fleet.ask()
    fleet.leave(left)
    assert fleet.ask(place_only=1)[1] == ["fingerprint"]
    assert fleet.ask(fingerprint=OTHER, place_only=1)[1][:3] == ["refused", "queue_full", "place_only"]
    assert fleet.ask(fingerprint=ONE, place_only=1)[1][0] == "ticket"


@pytest.mark.parametrize(("away_ms", "kept"), [(PLACE_MS - 1, True), (PLACE_MS, False)])
def test_a_place_is_kept_for_ten_seconds(fleet: Fleet, away_ms: int, kept: bool) -> None:
    fleet.ask()
    left, _ = fleet.ask()
    fleet.ask()
    fleet.leave(left)
    fleet.beat(away_ms)
    assert (fleet.ask()[1] == ["fingerprint"]) is kept


def test_two_leases_after_the_last_client_no_place_is_left(
    store_client: "redis.Redis[bytes]", fleet: Fleet
) -> None:
    """More than one script forgets."""
    running, _ = fleet.ask()
    calls = [fleet.ask()[0] for _ in range(QUEUE_MAX)]
    for id_ in calls:
        fleet.leave(id_)
    fleet.end(running)
    assert len(fleet.twin.books.places) == QUEUE_MAX
    fleet.beat(2 * LEASE_MS)
    left = {key.decode().rpartition(":")[2] for key in store_client.scan_iter()}
    assert left == {"meta", "replicas", "keys", "owners", "sessions"}


def test_so_many_places_are_remembered_and_no_more(fleet: Fleet) -> None:
    """The one that would end first makes room."""
    scripts = fleet.twin
    places, ends = scripts.keys[16], scripts.keys[17]
    fleet.ask()
    left, _ = fleet.ask()
    members = {f"a:normal:someone:{ONE}:{number:012d}": number + 5_000_000 for number in range(PLACES)}
    scripts.client.zadd(places, dict.fromkeys(members, 0))
    scripts.client.zadd(ends, members)
    op = ["S", left, -1, -1, [], ONE]
    batch = (fleet.now_ms, "o0", next(fleet._batches["o0"]), "wake:")
    reply = scripts.evaluate("step", *batch, msgspec.msgpack.encode(op))
    assert reply[5] == [["withdrawn"]]
    assert scripts.client.zcard(places) == scripts.client.zcard(ends) == PLACES
    assert scripts.client.zscore(places, min(members)) is None
    assert scripts.client.zscore(ends, max(members)) is not None


def put_places(fleet: Fleet, count: int) -> None:
    """So many calls of k have left, in both implementations."""
    books, scripts = fleet.twin.books, fleet.twin
    end, numbers = books.clock + PLACE_MS, range(books.arrivals + 1, books.arrivals + count + 1)
    placed = [Place("a", "normal", "k", OTHER, number, end) for number in numbers]
    books.places += placed
    books.arrivals += count
    scripts.client.hset(scripts.keys[0], "arrivals", books.arrivals)
    scripts.client.zadd(scripts.keys[16], {place.member: 0 for place in placed})
    scripts.client.zadd(scripts.keys[17], {place.member: end for place in placed})


def test_a_flow_that_has_its_part_of_the_places_pushes_nobody_out(fleet: Fleet) -> None:
    """Leaving costs nothing, so that a client could do it all the time."""
    fleet.ask("rival")
    rival, first, second = (fleet.ask(key)[0] for key in ("rival", "k", "k"))
    put_places(fleet, PLACES_OF_FLOW - 1)
    fleet.leave(first)
    fleet.leave(second, "e" * 16)
    fleet.leave(rival)
    left = fleet.twin.books.places
    assert len(left) == PLACES_OF_FLOW + 1
    assert {(place.key, place.fingerprint) for place in left} == {("k", ONE), ("k", OTHER), ("rival", ONE)}
    fleet.ask("k", fingerprint=ONE)
    third, _ = fleet.ask("k", fingerprint="d" * 16)
    fleet.leave(third, "d" * 16)
    assert left[-1].fingerprint == "d" * 16, "there is room again"


def test_a_place_makes_good_the_absence_of_its_own_call_alone(fleet: Fleet) -> None:
    """Else a key that sends one call, leaves and comes back with many would have the turns of all that time."""
    running, _ = fleet.ask("rival")
    left, _ = fleet.ask("k")
    rivals = [fleet.ask("rival")[0] for _ in range(9)]
    fleet.leave(left)
    for _ in range(5):
        (running,) = fleet.end(running)
    again, _ = fleet.ask("k", fingerprint=ONE)
    new = [fleet.ask("k", fingerprint=f"{number:016x}")[0] for number in range(4)]
    order = fleet.served()
    assert order[0] == again
    turns = ["rival" if id_ in rivals else "k" for id_ in order[1:7]]
    assert turns == ["k", "k", "rival", "k", "rival", "k"], "as if nobody had left"
    assert [id_ for id_ in order if id_ in new] == new


def test_those_who_left_together_return_together(fleet: Fleet) -> None:
    """Each where it stood, however many of their key come behind them; what each takes it pays for."""
    running, _ = fleet.ask("rival")
    left = [fleet.ask("k")[0] for _ in range(3)]
    rivals = [fleet.ask("rival")[0] for _ in range(9)]
    for id_ in left:
        fleet.leave(id_)
    for _ in range(5):
        (running,) = fleet.end(running)
    back = [fleet.ask("k", fingerprint=ONE)[0]]
    new, _ = fleet.ask("k", fingerprint=OTHER)
    back += [fleet.ask("k", fingerprint=ONE)[0] for _ in range(2)]
    order = fleet.served()
    assert order[:3] == back
    assert new in order[3:5]
    assert set(order) - {*back, new} <= set(rivals)


def test_who_returns_before_a_call_that_its_keys_cap_keeps_waiting_may_start(fleet: Fleet) -> None:
    half, cap = BLOCKS // 2, {"blocks_max": BLOCKS // 2 + 1}
    fleet.ask("k", blocks=half, **cap)
    rival, _ = fleet.ask("rival", blocks=half)
    small, _ = fleet.ask("k", blocks=1, **cap)
    fleet.ask("k", blocks=half, **cap)
    fleet.leave(small)
    fleet.end(rival)
    assert fleet.twin.books.parked == {("a", "normal", "k")}
    again, _ = fleet.ask("k", fingerprint=ONE, blocks=1, **cap)
    assert again in fleet.started


# -- what is held for a large call -----------------------------------------------------------------------------------


def held_for(fleet: Fleet) -> str:
    return fleet.twin.books.replicas["r0"].held_for


def passed_by(fleet: Fleet, *running: str) -> None:
    """Two calls of half the replica each go before those that wait, after two such calls that run."""
    small = [fleet.ask("rival", blocks=BLOCKS // 2)[0] for _ in running]
    for id_ in running:
        fleet.end(id_)
    assert set(small) <= set(fleet.started)


def test_who_returns_is_not_kept_out_by_what_was_held_for_the_next(
    store_client: "redis.Redis[bytes]",
) -> None:
    """Else nothing at all would start on that replica until the next one's time is over."""
    fleet = Fleet(store_client, overtake_blocks=BLOCKS)
    running = [fleet.ask("rival", blocks=BLOCKS // 2)[0] for _ in range(2)]
    left, _ = fleet.ask("k")
    behind, _ = fleet.ask("k")
    fleet.leave(left)
    passed_by(fleet, *running)
    assert held_for(fleet) == behind
    again, _ = fleet.ask("k", fingerprint=ONE)
    assert held_for(fleet) == ""
    assert fleet.served() == [again, behind]


def test_who_moves_is_not_kept_out_by_what_was_held_for_the_next(store_client: "redis.Redis[bytes]") -> None:
    fleet = Fleet(store_client, overtake_blocks=BLOCKS // 2)
    moving, _ = fleet.ask("k", blocks=BLOCKS // 2)
    running, _ = fleet.ask("rival", blocks=BLOCKS // 2)
    behind, _ = fleet.ask("k")
    passed_by(fleet, running)
    assert held_for(fleet) == behind
    fleet.step(["M", moving, ["r0"]])
    assert held_for(fleet) == ""
    fleet.step(["S", moving, -1, -1, [], ""])
    assert fleet.served() == [behind]


def test_nothing_is_held_for_who_may_hold_no_more(store_client: "redis.Redis[bytes]") -> None:
    """Its key is at its cap: others go on meanwhile, and its turn is the next when that is over."""
    fleet = Fleet(store_client, overtake_blocks=BLOCKS // 2)
    own, _ = fleet.ask("k", blocks=BLOCKS // 2)
    running, _ = fleet.ask("rival", blocks=BLOCKS // 2)
    large, _ = fleet.ask("k")
    passed_by(fleet, running)
    assert held_for(fleet) == large
    fleet.ask("k", blocks=1, requests_max=1)
    assert held_for(fleet) == ""
    fleet.end(next(id_ for id_ in fleet.started if id_ != own))
    assert fleet.ask("rival", blocks=1)[1] == ["grant", "r0"]
    fleet.end(own)
    assert held_for(fleet) == large


# -- Idempotency-Key -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fingerprint", "code"), [(ONE, "duplicate_in_progress"), (OTHER, "idempotency_key_reused")]
)
def test_one_call_under_an_idempotency_key(fleet: Fleet, fingerprint: str, code: str) -> None:
    """While it runs, and while it waits; at any gateway."""
    refused = ["refused", code, "once", 0, 0, 0]
    running, told = fleet.ask(fingerprint=ONE, once=ONCE)
    assert told == ["grant", "r0"]
    assert fleet.ask(fingerprint=fingerprint, once=ONCE, owner="o1")[1] == refused
    fleet.end(running)
    busy, _ = fleet.ask()
    waiting, told = fleet.ask(fingerprint=ONE, once=ONCE)
    assert told[0] == "ticket"
    assert fleet.ask(fingerprint=fingerprint, once=ONCE, owner="o1")[1] == refused
    fleet.end(busy)
    fleet.end(waiting)
    assert fleet.ask(fingerprint=fingerprint, once=ONCE)[1] == ["grant", "r0"]


def test_two_calls_of_one_batch_are_one_too_many(fleet: Fleet) -> None:
    ops = [fleet.admit(blocks=1, fingerprint=ONE, once=ONCE) for _ in range(2)]
    assert [told[0] for told in fleet.step(*ops)] == ["grant", "refused"]


def test_who_leaves_the_queue_may_come_again_under_its_key_and_in_its_place(fleet: Fleet) -> None:
    fleet.ask()
    left, _ = fleet.ask(fingerprint=ONE, once=ONCE)
    behind, _ = fleet.ask()
    fleet.leave(left)
    again, _ = fleet.ask(fingerprint=ONE, once=ONCE)
    assert fleet.served() == [again, behind]


def test_it_ends_with_the_lease_of_a_lost_gateway(fleet: Fleet) -> None:
    fleet.ask(blocks=1, fingerprint=ONE, once=ONCE, owner="o1")
    del fleet._batches["o1"]
    fleet.beat(LEASE_MS - 1)
    assert fleet.ask(blocks=1, fingerprint=ONE, once=ONCE)[1][1] == "duplicate_in_progress"
    fleet.beat(HEARTBEAT_MS)
    assert fleet.ask(blocks=1, fingerprint=ONE, once=ONCE)[1] == ["grant", "r0"]


def redeclared(op: Op) -> Op:
    key, class_, lane, blocks = op[2:6]
    return ["R", op[1], "r0", key, class_, lane, blocks, 1, 0, blocks, 1, -1, -1, -1, 1, op[19], op[20],
            *IN_FULL]  # fmt: skip


def test_it_holds_for_a_call_that_is_declared_again(fleet: Fleet) -> None:
    """Its gateway was fenced, and the store knows nothing of it any more."""
    running = fleet.admit(blocks=1, fingerprint=ONE, once=ONCE)
    fleet.step(running)
    fleet.step(["S", running[1], -1, -1, [], ""])
    assert fleet.step(redeclared(running)) == [["declared"]]
    assert fleet.ask(fingerprint=ONE, once=ONCE)[1][1] == "duplicate_in_progress"
    fleet.end(running[1])
    assert fleet.ask(fingerprint=ONE, once=ONCE)[1] == ["grant", "r0"]


def test_who_is_declared_again_too_late_does_not_take_it_from_another(fleet: Fleet) -> None:
    late = fleet.admit(blocks=1, fingerprint=ONE, once=ONCE)
    other, told = fleet.ask(blocks=1, fingerprint=ONE, once=ONCE)
    assert told == ["grant", "r0"]
    assert fleet.step(redeclared(late)) == [["declared"]]
    fleet.end(late[1])
    assert fleet.ask(blocks=1, fingerprint=ONE, once=ONCE)[1][1] == "duplicate_in_progress"
    fleet.end(other)
    assert fleet.ask(blocks=1, fingerprint=ONE, once=ONCE)[1] == ["grant", "r0"]
