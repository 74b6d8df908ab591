"""Soft holds and warm calls, on both implementations: each rule by itself, with its figures."""

import itertools
from typing import Any

import pytest

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.elastic import ELASTIC, GUARANTEED, flat, pack
from gateway.core.holds import WARM
from gateway.core.order import HOLD_MS, HOLDS_ENDED, HOLDS_MAX, YIELD_MS
from gateway.ledger.records import decode_record
from tests.conformance.twin import IN_FULL, Op, Twin, pack_op

Client = "redis.Redis[bytes]"
OWNER, READER = "o0", "g0"
LIMIT, CACHE = 100, 7
FIRST, SECOND, THIRD = "a" * 16, "b" * 16, "c" * 16
HEARTBEAT_MS = 1_000
SEGMENT = ["a" * 32, 20]


class Talks:
    """A replica or two of LIMIT blocks with a cache each, where small answers have ended, and an owner."""

    def __init__(
        self, client: Client, replicas: int = 1, mode: str = GUARANTEED, overtake_blocks: int = 10**6
    ) -> None:
        found = tuple(ReplicaConfig(f"r{i}", "p", LIMIT, LIMIT, 200, 10_000, mode) for i in range(replicas))
        classes = (("high", 0), ("normal", 0))
        self.fleet = FleetConfig(6000, HEARTBEAT_MS, overtake_blocks, (("a", ("p",)),), classes, found)
        self.twin = Twin(client, self.fleet)
        self.now_ms, self._batch = 1_000_000, 0
        self._ids, self._numbers = itertools.count(1), itertools.count(1)
        self.twin.hello(self.now_ms, OWNER)
        for replica in found:
            self.learn(CACHE, replica.name)
        self.pass_ms(3 * HEARTBEAT_MS)
        for i in range(replicas):  # so that their averages are small for some time
            self.end(self.run(1, only=f"r{i}"), "", 1)

    def pass_ms(self, milliseconds: int) -> None:
        """While the owner does nothing but say that it is there."""
        for _ in range(milliseconds // HEARTBEAT_MS):
            self.now_ms += HEARTBEAT_MS
            self.step(["Y"])

    def learn(self, cache: int, replica: str = "r0") -> None:
        self.twin.seat(self.now_ms, READER, replica)
        self.twin.learn(self.now_ms, READER, replica, next(self._numbers), [-1, -1, -1], "", cache)

    def step(self, *ops: Op) -> list[Any]:
        return list(self.send(*ops)[5])

    def send(self, *ops: Op) -> list[Any]:
        self._batch += 1
        return list(self.twin.step(self.now_ms, OWNER, self._batch, ops))

    def turn(
        self,
        blocks: int,
        past: str = "",
        *,
        only: str = "",
        queue_max: int = 9,
        class_: str = "normal",
        key: str = "k",
        demand: list[Any] | None = None,
    ) -> Op:
        """An admit that goes on with a conversation, or with none."""
        exclude = [r.name for r in self.fleet.replicas if only and r.name != only]
        return ["A", f"{next(self._ids):010x}", key, class_, "a", blocks, 1, 0, blocks, 600_000, 1, -1, -1, -1,
                queue_max, queue_max, [], exclude, [], "", "", 0, *(demand or IN_FULL), past]  # fmt: skip

    def run(self, blocks: int, past: str = "", **more: Any) -> str:
        """A call that has a place."""
        op = self.turn(blocks, past, **more)
        (answer,) = self.step(op)
        assert answer[0] == "grant", answer
        return str(op[1])

    def end(self, id_: str, name: str, used: int) -> None:
        """Its answer; with a name it is likely to be gone on with."""
        assert self.step(["S", id_, used, -1, [], "", name]) == [["settled"]]

    def answer(self, name: str, blocks: int, **more: Any) -> None:
        self.end(self.run(blocks, **more), name, blocks)

    def answer_before_others(self, name: str, blocks: int) -> None:
        """Of a higher class than that of those who wait."""
        op = self.turn(blocks, class_="high")
        self.step(op)
        self.step(["K", op[1]])
        self.end(op[1], name, blocks)

    def soft(self, replica: str = "r0") -> tuple[int, int]:
        """Blocks and number of its holds."""
        row = self.twin.books.replicas[replica]
        return row.soft, row.holds

    def state(self, op: Op) -> str:
        return self.twin.books.calls[op[1]].state

    def replica(self, op: Op) -> str:
        return self.twin.books.calls[op[1]].replica


def test_what_is_held_softly_counts_against_others(store_client: Client) -> None:
    talks = Talks(store_client)
    talks.run(5)
    talks.answer(FIRST, 30)
    assert talks.soft() == (30, 1)
    assert talks.twin.books.replicas["r0"].used == 5, "it is reserved for nobody"
    talks.run(65, queue_max=0)
    refused = talks.step(talks.turn(1, queue_max=0))[0]
    assert refused[:5] == ["refused", "capacity_exceeded", "limit", 1, 0]


def test_and_not_against_who_goes_on(store_client: Client) -> None:
    talks = Talks(store_client)
    talks.run(5)
    talks.answer(FIRST, 30)
    talks.answer(SECOND, 20)
    assert talks.soft() == (50, 2)
    talks.run(95, FIRST, queue_max=0)
    assert talks.soft() == (20, 1), "its own hold has ended"


def test_half_of_a_replica_is_held_at_most(store_client: Client) -> None:
    talks = Talks(store_client)
    talks.run(5)
    running = [talks.run(25) for _ in range(3)]
    for id_, name in zip(running, (FIRST, SECOND, THIRD), strict=True):
        talks.end(id_, name, 25)
    assert talks.soft() == (75, 3)
    assert talks.step(talks.turn(46, queue_max=0))[0][0] == "refused"
    talks.run(45, queue_max=0)


def test_an_idle_replica_takes_any_call(store_client: Client) -> None:
    """Else one that needs more than half of it would wait for nothing."""
    talks = Talks(store_client)
    talks.answer(FIRST, 50)
    talks.run(LIMIT, queue_max=0)


def test_the_bound_of_paths_leaves_room_for_holds(store_client: Client) -> None:
    talks = Talks(store_client, mode=ELASTIC)
    path = [1, 4, pack(flat(45)), 0, []]
    talks.run(60, demand=path)
    op = talks.turn(60, queue_max=0, demand=path)
    talks.end(talks.run(1), FIRST, 50)
    assert talks.soft()[0] == 1, "what it used is at most what it was admitted with"
    talks.answer(SECOND, 30)
    assert talks.step(op)[0][0] == "refused"
    warm = talks.turn(60, SECOND, queue_max=0, demand=path)
    assert talks.step(warm)[0][0] == "grant"


def test_a_hold_ends_and_who_waits_starts(store_client: Client) -> None:
    """Without anybody doing anything but heartbeats."""
    talks = Talks(store_client)
    talks.run(5)
    talks.answer(FIRST, 30)
    waits = talks.turn(70)
    assert talks.step(waits)[0][0] == "ticket"
    talks.pass_ms(HOLD_MS - HEARTBEAT_MS)
    assert (talks.state(waits), talks.soft()) == ("queued", (30, 1))
    talks.pass_ms(HEARTBEAT_MS)
    assert (talks.state(waits), talks.soft()) == ("unclaimed", (0, 0))


def test_the_next_answer_of_a_conversation_is_held_in_the_place_of_the_last(store_client: Client) -> None:
    talks = Talks(store_client)
    ids = [talks.run(10), talks.run(20)]
    talks.end(ids[0], FIRST, 10)
    talks.pass_ms(5_000)
    talks.end(ids[1], FIRST, 20)
    assert talks.soft() == (20, 1)
    talks.pass_ms(HOLD_MS - HEARTBEAT_MS)
    assert talks.soft() == (20, 1)
    talks.pass_ms(HEARTBEAT_MS)
    assert talks.soft() == (0, 0)


def test_who_came_before_the_answer_was_given_back_ends_its_hold_as_well(store_client: Client) -> None:
    talks = Talks(store_client)
    answered, blocker = talks.run(20), talks.run(80)
    op = talks.turn(90, FIRST)
    assert talks.step(op)[0][0] == "ticket"
    talks.end(answered, FIRST, 20)
    assert talks.soft() == (20, 1)
    assert talks.twin.books.calls[op[1]].yields_until != WARM, "it was not there when the call came"
    talks.step(["S", blocker, -1, -1, [], ""])
    assert (talks.state(op), talks.soft()) == ("unclaimed", (0, 0))


def test_warm_calls_go_before_others_of_their_class(store_client: Client) -> None:
    """Also where another key's turn is."""
    talks = Talks(store_client)
    talks.answer(FIRST, 10)
    blocker = talks.run(90)
    others = [talks.turn(50), talks.turn(40, key="other")]
    warm = talks.turn(60, FIRST)
    high = talks.turn(30, class_="high")
    assert {answer[0] for answer in talks.step(*others, warm, high)} == {"ticket"}
    talks.step(["S", blocker, -1, -1, [], ""])
    assert [talks.state(op) for op in (*others, warm, high)] == [
        "queued",
        "queued",
        "unclaimed",
        "unclaimed",
    ]


def test_a_warm_call_passes_no_higher_class(store_client: Client) -> None:
    talks = Talks(store_client)
    talks.answer(FIRST, 10)
    blocker = talks.run(90)
    warm, high = talks.turn(60, FIRST), talks.turn(60, class_="high")
    talks.step(warm, high)
    talks.step(["S", blocker, -1, -1, [], ""])
    assert (talks.state(warm), talks.state(high)) == ("queued", "unclaimed")


@pytest.mark.parametrize(("waited_ms", "first"), [(YIELD_MS - HEARTBEAT_MS, 1), (YIELD_MS, 0)])
def test_who_has_waited_long_goes_before_warm_calls(store_client: Client, waited_ms: int, first: int) -> None:
    talks = Talks(store_client)
    blocker = talks.run(LIMIT - 10)
    other = talks.turn(60)
    talks.step(other)
    talks.pass_ms(waited_ms - HEARTBEAT_MS)
    talks.answer_before_others(FIRST, 10)
    talks.pass_ms(HEARTBEAT_MS)
    warm = talks.turn(60, FIRST)
    talks.step(warm)
    talks.step(["S", blocker, -1, -1, [], ""])
    assert [talks.state(op) for op in (other, warm)].index("unclaimed") == first


def test_a_warm_call_stays_warm_while_it_waits(store_client: Client) -> None:
    talks = Talks(store_client)
    talks.answer(FIRST, 10)
    blocker = talks.run(90)
    other, warm = talks.turn(60), talks.turn(60, FIRST)
    talks.step(other, warm)
    talks.pass_ms(2 * HOLD_MS)
    assert talks.soft() == (0, 0)
    talks.step(["S", blocker, -1, -1, [], ""])
    assert (talks.state(other), talks.state(warm)) == ("queued", "unclaimed")


@pytest.mark.parametrize(("waited_ms", "held_for"), [(0, False), (YIELD_MS, True)])
def test_being_passed_by_warm_calls_empties_no_replica_for_some_time(
    store_client: Client, waited_ms: int, held_for: bool
) -> None:
    talks = Talks(store_client, overtake_blocks=15)
    talks.run(50)
    head = talks.turn(80)
    talks.step(head)
    talks.pass_ms(waited_ms)
    talks.answer_before_others(FIRST, 5)
    warm = talks.turn(12, FIRST)
    talks.step(warm)
    assert talks.state(warm) == "unclaimed"
    assert talks.twin.books.calls[head[1]].passed == (17 if held_for else 5)
    assert (talks.twin.books.replicas["r0"].held_for == head[1]) is held_for


def test_a_warm_call_is_placed_where_its_history_is(store_client: Client) -> None:
    """However much fuller that is, as long as it fits there."""
    talks = Talks(store_client, replicas=2)
    talks.run(50, only="r1")
    talks.answer(FIRST, 20, only="r1")
    op = talks.turn(30, FIRST)
    assert talks.step(op) == [["grant", ["r1", 0, 0, 1]]]
    talks.answer(SECOND, 20, only="r1")
    assert talks.step(talks.turn(30, SECOND)) == [["grant", ["r0", 0, 0, 1]]]
    assert talks.soft("r1") == (0, 0)


def test_elsewhere_it_counts_no_holds_either(store_client: Client) -> None:
    talks = Talks(store_client, replicas=2)
    talks.run(5, only="r0")
    talks.answer(FIRST, 50, only="r0")
    talks.answer(SECOND, 10, only="r1")
    talks.run(90, only="r1")
    assert talks.step(talks.turn(60, SECOND)) == [["grant", ["r0", 0, 0, 1]]]


def test_who_found_no_place_is_looked_at_again_when_a_hold_ends_in_the_same_script(
    store_client: Client,
) -> None:
    talks = Talks(store_client)
    talks.run(5)
    talks.answer(FIRST, 50)
    cold, warm = talks.turn(50), talks.turn(1, FIRST)
    talks.step(cold, warm)
    assert (talks.state(cold), talks.state(warm)) == ("unclaimed", "unclaimed")


def test_where_histories_are_large_none_is_held(store_client: Client) -> None:
    talks = Talks(store_client)
    before = talks.twin.books.replicas["r0"].history
    while talks.twin.books.replicas["r0"].history * 10 <= LIMIT * 64:
        talks.answer("", 50)
    assert talks.twin.books.replicas["r0"].history > before
    talks.answer(FIRST, 11)
    assert talks.soft() == (0, 0)


def test_what_others_have_in_nodes_is_no_part_of_a_hold(store_client: Client) -> None:
    """They keep it in the cache anyway; what goes with the call is part of it."""
    talks = Talks(store_client)
    shares = [*IN_FULL[:4], [16, [SEGMENT]]]
    ids = [talks.run(30, demand=shares) for _ in range(2)]
    for id_ in ids:
        talks.step(["F", id_])
    talks.end(ids[0], FIRST, 30)
    assert talks.soft() == (10, 1)
    talks.end(ids[1], SECOND, 30)
    assert talks.soft() == (10 + 30, 2)


@pytest.mark.parametrize("used", [-1, 10])
def test_a_hold_needs_a_name_and_what_was_used(store_client: Client, used: int) -> None:
    talks = Talks(store_client)
    talks.end(talks.run(10), FIRST if used < 0 else "", used)
    assert talks.soft() == (0, 0)


def test_what_never_ran_leaves_none(store_client: Client) -> None:
    talks = Talks(store_client)
    blocker = talks.run(LIMIT)
    waits, granted = talks.turn(10), talks.turn(20)
    talks.step(waits, granted)
    assert talks.step(["S", waits[1], 10, -1, [], "", FIRST]) == [["withdrawn"]]
    talks.step(["S", blocker, -1, -1, [], ""])
    assert talks.step(["S", granted[1], 10, -1, [], "", FIRST]) == [["released"]]
    assert talks.soft() == (0, 0)


@pytest.mark.parametrize("event", ["down", "drains", "another cache", "it lies", "gone"])
def test_holds_go_with_what_they_are_of(store_client: Client, event: str) -> None:
    """And none of them comes back."""
    talks = Talks(store_client, replicas=2)
    talks.answer(FIRST, 20, only="r1")
    talks.answer(SECOND, 10, only="r1")
    talks.answer(THIRD, 10, only="r0")
    if event == "down":
        talks.twin.observe(talks.now_ms, "r1", False)
        talks.twin.observe(talks.now_ms, "r1", True)
    elif event == "drains":
        talks.twin.rest(talks.now_ms, "operator", "r1", "drained")
        talks.twin.rest(talks.now_ms, "operator", "r1", "")
    elif event == "another cache":
        talks.learn(CACHE + 1, "r1")
    elif event == "it lies":
        talks.twin.distrust(talks.now_ms, "r1", CACHE)
    else:
        fleet = talks.fleet
        one = FleetConfig(*(getattr(fleet, name) for name in fleet.__slots__[:-1]), fleet.replicas[:1])
        talks.twin.configure(talks.now_ms, one)
        talks.twin.configure(talks.now_ms, fleet)
    assert (talks.soft("r0"), talks.soft("r1")) == ((10, 1), (0, 0))
    op = talks.turn(5, FIRST)
    talks.step(op)
    assert talks.twin.books.calls[op[1]].yields_until != WARM


@pytest.mark.parametrize("when", ["it drains", "it has no cache"])
def test_nothing_is_held_where_nobody_would_come_back_to_it(store_client: Client, when: str) -> None:
    talks = Talks(store_client)
    id_ = talks.run(10)
    if when == "it drains":
        talks.twin.rest(talks.now_ms, "operator", "r0", "drained")
    else:
        talks.learn(0)
    talks.end(id_, FIRST, 10)
    assert talks.soft() == (0, 0)


def test_who_ran_is_declared_again_beside_holds(store_client: Client) -> None:
    """The engine has its blocks already."""
    talks = Talks(store_client)
    talks.run(5)
    talks.answer(FIRST, 50)
    declared = ["R", "00000000aa", "r0", "k", "normal", "a", 95, 1, 0, 95, 1, -1, -1, -1, 0, "", "", *IN_FULL]
    assert talks.step(declared) == [["declared"]]


def test_a_wait_is_told_with_what_is_held_and_a_warm_one_without(store_client: Client) -> None:
    """By the drain, which is known once somebody has waited for its window."""
    talks = Talks(store_client)
    talks.run(50)
    waits = talks.turn(51)
    talks.step(waits)
    for _ in range(12):
        talks.pass_ms(HEARTBEAT_MS)
        talks.answer_before_others(FIRST, 10)
    (cold,), (warm,) = talks.step(talks.turn(60)), talks.step(talks.turn(60, FIRST))
    assert (cold[0], warm[0]) == ("ticket", "ticket")
    assert 0 < warm[2] < cold[2]


def test_a_script_ends_so_many_holds_at_most(store_client: Client) -> None:
    """And says that there is more to do."""
    talks = Talks(store_client)
    names = [f"{at:016x}" for at in range(HOLDS_ENDED + 5)]
    ids = [talks.run(1) for _ in names]
    talks.step(*(["S", id_, 1, -1, [], "", name] for id_, name in zip(ids, names, strict=True)))
    assert talks.soft() == (HOLDS_ENDED + 5, HOLDS_ENDED + 5)
    talks.pass_ms(HOLD_MS - HEARTBEAT_MS)
    talks.now_ms += HEARTBEAT_MS
    assert talks.send()[4] == 1
    assert talks.soft() == (5, 5)
    assert talks.send()[4] == 0
    assert talks.soft() == (0, 0)


def test_of_too_many_holds_the_oldest_goes(store_client: Client) -> None:
    """On the Lua alone: the specification would look at each of them for each."""
    talks = Talks(store_client)
    twin, batch = talks.twin, 1_000
    for at in range(HOLDS_MAX + 1):
        if at == 1:
            talks.now_ms += 1  # so that the first is the oldest
        admit = talks.turn(1)
        batch += 1
        ops = [admit, ["S", admit[1], 1, -1, [], "", f"{at:016x}"]]
        twin.evaluate("step", talks.now_ms, OWNER, batch, "wake:", *map(pack_op, ops))
    row = decode_record("replica", twin.client.hget(twin.keys[1], "r0"))
    assert (row["soft"], row["holds"]) == (HOLDS_MAX, HOLDS_MAX)
    assert twin.client.hlen(twin.keys[19]) == twin.client.zcard(twin.keys[20]) == HOLDS_MAX
    assert not twin.client.hexists(twin.keys[19], f"{0:016x}")
