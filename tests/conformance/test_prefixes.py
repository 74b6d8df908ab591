"""Prefixes that calls hold together, on both implementations: each rule by itself, with its figures."""

import itertools
from typing import Any

import pytest

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.elastic import (
    ELASTIC,
    GUARANTEED,
    HORIZONS,
    POINTS,
    SCALE,
    SHARED,
    TILTS,
    Path,
    flat,
    margins,
    pack,
    unpack,
)
from gateway.core.estimate import PREFILL_TOKENS_MIN
from gateway.core.nodes import Node
from tests.conformance.twin import IN_FULL, Op, Twin

Client = "redis.Redis[bytes]"
OWNER, OTHER, READER = "o0", "o1", "g0"
LIMIT, CACHE, BLOCK_SIZE = 100, 7, 16
A, B, C = ("a" * 32, 40), ("b" * 32, 20), ("c" * 32, 20)


class Fleet:
    """Replicas of LIMIT blocks with a cache each, and two owners."""

    def __init__(self, client: Client, *modes: str, prefill: int = 10_000) -> None:
        self.replicas = tuple(
            ReplicaConfig(f"r{i}", "p", LIMIT, LIMIT, 50, prefill, mode)
            for i, mode in enumerate(modes or (GUARANTEED,))
        )
        fleet = FleetConfig(6000, 1000, 10**6, (("a", ("p",)),), (("normal", 0),), self.replicas)
        self.twin = Twin(client, fleet)
        self.now_ms = 1_000_000
        self._batches = dict.fromkeys((OWNER, OTHER), 0)
        self._ids, self._numbers = itertools.count(1), itertools.count(1)
        for owner in self._batches:
            self.twin.hello(self.now_ms, owner)
        for replica in self.replicas:
            self.learn(replica.name, CACHE)
        self.pass_ms(3000)

    def pass_ms(self, milliseconds: int, *owners: str) -> None:
        """While these owners, or all, declare that they have declared everything."""
        for _ in range(-(-milliseconds // 1000)):
            self.now_ms += 1000
            for owner in owners or self._batches:
                self.step(["Y"], owner=owner)

    def learn(self, replica: str, cache: int) -> None:
        self.twin.seat(self.now_ms, READER, replica)
        self.twin.learn(self.now_ms, READER, replica, next(self._numbers), [-1, -1, -1], "", cache)

    def step(self, *ops: Op, owner: str = OWNER) -> list[Any]:
        self._batches[owner] += 1
        answer: list[Any] = self.twin.step(self.now_ms, owner, self._batches[owner], ops)[5]
        return answer

    def admit(
        self, blocks: int, *segments: Any, prefill: int = 0, queue_max: int = 9, **places: list[str]
    ) -> Op:
        id_ = f"{next(self._ids):010x}"
        prefix = [BLOCK_SIZE, [list(segment) for segment in segments]] if segments else []
        return ["A", id_, "k", "normal", "a", blocks, 1, prefill, blocks, 600_000, 1, -1, -1, -1, queue_max, queue_max,
                places.get("prefer", []), places.get("exclude", []), [], "", "", 0, *IN_FULL[:4], prefix]  # fmt: skip

    def run(
        self, blocks: int, *segments: Any, first_token: bool = True, owner: str = OWNER, **more: Any
    ) -> str:
        """A call that has a place, and mostly its first token."""
        op = self.admit(blocks, *segments, **more)
        (answer,) = self.step(op, owner=owner)
        assert answer[0] == "grant", answer
        if first_token:
            self.step(["F", op[1]], owner=owner)
        return str(op[1])

    def settle(self, *ids: str, owner: str = OWNER) -> None:
        self.step(*(["S", id_, -1, -1, [], ""] for id_ in ids), owner=owner)

    def used(self, replica: str = "r0") -> int:
        return self.twin.books.replicas[replica].used

    def nodes(self, replica: str = "r0") -> dict[tuple[str, int], tuple[int, int]]:
        """By segment and cache, of one replica."""
        each: dict[Any, Node] = self.twin.books.nodes.nodes
        return {
            (id_[0], cache): (n.holders, n.newcomers)
            for (id_, name, cache, _), n in each.items()
            if name == replica
        }


def test_a_second_call_is_charged_for_the_rest(store_client: Client) -> None:
    fleet = Fleet(store_client)
    fleet.run(70, A, B)
    assert fleet.used() == 70
    assert fleet.nodes() == {("a", CACHE): (1, 0), ("b", CACHE): (1, 0)}
    op = fleet.admit(70, A, B)
    assert fleet.step(op) == [["grant", ["r0", 2, CACHE]]]
    assert fleet.used() == 80
    assert fleet.nodes() == {("a", CACHE): (1, 1), ("b", CACHE): (1, 1)}
    assert fleet.step(["F", op[1]], ["F", op[1]]) == [["ok", 2], ["ok", 2]]
    assert fleet.nodes() == {("a", CACHE): (2, 0), ("b", CACHE): (2, 0)}


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_one_out_gives_the_prefix_back(store_client: Client, first: int) -> None:
    """Whoever made it."""
    fleet = Fleet(store_client)
    ids = [fleet.run(50, A), fleet.run(45, A)]
    assert fleet.used() == 40 + 10 + 5
    fleet.settle(ids[first])
    assert fleet.used() == 40 + (5, 10)[first]
    fleet.settle(ids[1 - first], ids[first])
    assert fleet.used() == 0
    assert fleet.nodes() == {}


def test_two_that_come_together_are_charged_in_full_until_they_are_computed(store_client: Client) -> None:
    """And who waits gets what the second one gives back."""
    fleet = Fleet(store_client)
    ids = [fleet.run(50, A, first_token=False) for _ in range(2)]
    assert fleet.used() == 100
    assert fleet.step(waiting := fleet.admit(40))[0][0] == "ticket"
    fleet.step(["F", ids[0]])
    assert fleet.used() == 100
    fleet.step(["F", ids[1]])
    assert fleet.used() == 40 + 10 + 10 + 40
    assert fleet.twin.books.calls[waiting[1]].state == "unclaimed"


def test_who_waits_starts_when_what_it_begins_with_is_computed(store_client: Client) -> None:
    fleet = Fleet(store_client)
    first = fleet.run(60, A, first_token=False)
    op = fleet.admit(60, A)
    assert fleet.step(op)[0][0] == "ticket"
    fleet.step(["F", first])
    assert fleet.step(["K", op[1]]) == [["grant", ["r0", 1, CACHE]]]
    assert fleet.used() == 80


def test_the_outbox_tells_what_is_shared(store_client: Client) -> None:
    fleet = Fleet(store_client)
    first = fleet.run(60, A, first_token=False)
    op = fleet.admit(60, A)
    fleet.step(op, owner=OTHER)
    fleet.step(["F", first])
    fleet._batches[OTHER] += 1
    assert fleet.twin.step(fleet.now_ms, OTHER, fleet._batches[OTHER], [])[6] == [op[1], ["r0", 1, CACHE]]


def test_newcomers_alone_make_nothing_worth_sharing(store_client: Client) -> None:
    """The holder has left: what it computed may be gone by the time that the next one looks."""
    fleet = Fleet(store_client)
    holder = fleet.run(41, A)
    newcomer = fleet.run(41, A, first_token=False)
    fleet.settle(holder)
    assert fleet.nodes() == {("a", CACHE): (0, 1)}
    assert fleet.used() == 41
    third = fleet.run(41, A, first_token=False)
    assert fleet.used() == 82
    fleet.step(["F", third])
    assert fleet.used() == 42, "now it holds what the newcomer does"
    fleet.settle(newcomer, third)
    assert fleet.used() == 0


def test_of_a_prefix_the_part_from_its_start_on_is_shared(store_client: Client) -> None:
    fleet = Fleet(store_client)
    fleet.run(45, A)
    op = fleet.admit(65, A, B)
    assert fleet.step(op) == [["grant", ["r0", 1, CACHE]]]
    assert fleet.used() == 45 + 25
    fleet.step(["F", op[1]])
    assert fleet.nodes() == {("a", CACHE): (2, 0), ("b", CACHE): (1, 0)}
    assert fleet.used() == 70
    other = fleet.admit(62, B, C)
    assert fleet.step(other)[0][0] == "ticket", "the books take a segment for what its id says, in order"


@pytest.mark.parametrize(
    ("prefill", "held"), [(640 + PREFILL_TOKENS_MIN, PREFILL_TOKENS_MIN), (639 + 512, 0)]
)
def test_what_is_computed_takes_nothing_of_the_prefill_budget(
    store_client: Client, prefill: int, held: int
) -> None:
    """A prompt of which less is left than counts takes nothing."""
    fleet = Fleet(store_client)
    fleet.run(45, A)
    busy = fleet.run(1, first_token=False, prefill=9_000)
    fleet.run(45, A, first_token=False, prefill=prefill)
    assert fleet.twin.books.replicas["r0"].prefill == 9_000 + held
    fleet.settle(busy)


def test_another_cache_is_shared_by_nobody(store_client: Client) -> None:
    """The engine was restarted: who is in the old node goes on as charged, and beside it comes a new one."""
    fleet = Fleet(store_client)
    old, waits = fleet.run(50, A), fleet.run(41, A, first_token=False)
    fleet.learn("r0", CACHE + 1)
    fleet.step(["F", waits])
    assert fleet.nodes() == {("a", CACHE): (2, 0)}
    assert fleet.used() == 51
    fresh = fleet.run(45, A)
    assert fleet.used() == 96
    assert fleet.nodes() == {("a", CACHE): (2, 0), ("a", CACHE + 1): (1, 0)}
    assert fleet.step(fleet.admit(44, A)) == [["grant", ["r0", 1, CACHE + 1]]]
    fleet.settle(old, waits)
    assert fleet.nodes() == {("a", CACHE + 1): (1, 1)}
    fleet.settle(fresh)


def test_who_came_before_the_reset_makes_no_node_of_the_new_cache(store_client: Client) -> None:
    fleet = Fleet(store_client)
    id_ = fleet.run(50, A, first_token=False)
    fleet.learn("r0", CACHE + 1)
    assert fleet.step(["F", id_]) == [["ok", 0]]
    assert fleet.nodes() == {}
    assert fleet.used() == 50


def test_a_cache_that_lies_is_none_until_another_one_comes(store_client: Client) -> None:
    fleet = Fleet(store_client)
    fleet.run(45, A)
    fleet.twin.distrust(fleet.now_ms, "r0", CACHE)
    fleet.learn("r0", CACHE)
    op = fleet.admit(45, A)
    assert fleet.step(op) == [["grant", ["r0", 0, 0]]]
    assert fleet.used() == 90
    fleet.step(["F", op[1]])
    assert fleet.used() == 90
    fleet.settle(op[1])
    fleet.learn("r0", CACHE + 1)
    fleet.run(45, A)
    assert fleet.step(fleet.admit(44, A)) == [["grant", ["r0", 1, CACHE + 1]]]


def test_a_late_word_about_an_old_cache_undoes_nothing(store_client: Client) -> None:
    """A call that came to the old process may end long after it."""
    fleet = Fleet(store_client)
    fleet.learn("r0", CACHE + 1)
    fleet.run(45, A)
    fleet.twin.distrust(fleet.now_ms, "r0", CACHE)
    newcomer = fleet.admit(45, A)
    assert fleet.step(newcomer) == [["grant", ["r0", 1, CACHE + 1]]]
    fleet.settle(newcomer[1])
    for cache in (CACHE + 1, CACHE):
        fleet.twin.distrust(fleet.now_ms, "r0", cache)
    fleet.learn("r0", CACHE + 1)
    assert fleet.step(fleet.admit(45, A)) == [["grant", ["r0", 0, 0]]]


def test_a_cache_is_distrusted_before_a_reader_has_told_of_it_again(store_client: Client) -> None:
    """A store that lost its data knows of none."""
    fleet = Fleet(store_client)
    fleet.learn("r0", 0)
    fleet.twin.distrust(fleet.now_ms, "r0", CACHE)
    fleet.learn("r0", CACHE)
    fleet.run(45, A)
    assert fleet.step(fleet.admit(45, A)) == [["grant", ["r0", 0, 0]]]


def test_without_a_cache_nothing_is_shared(store_client: Client) -> None:
    """As of engines whose metrics nobody reads."""
    fleet = Fleet(store_client)
    fleet.learn("r0", 0)
    fleet.run(45, A)
    fleet.run(45, A)
    assert fleet.used() == 90
    assert fleet.nodes() == {}


@pytest.mark.parametrize(("beside", "replica"), [(10, "r0"), (11, "r1")])
def test_a_call_goes_where_it_shares_unless_that_is_a_tenth_fuller(
    store_client: Client, beside: int, replica: str
) -> None:
    fleet = Fleet(store_client, GUARANTEED, GUARANTEED)
    fleet.run(45, A)
    fleet.run(45 - beside, exclude=["r0"])
    assert fleet.step(fleet.admit(45, A))[0][1][0] == replica


def test_more_that_is_shared_goes_before_a_preference(store_client: Client) -> None:
    fleet = Fleet(store_client, GUARANTEED, GUARANTEED, GUARANTEED)
    fleet.run(70, A, B, exclude=["r1", "r2"])
    fleet.run(70, A, exclude=["r0", "r2"])
    fleet.run(70, exclude=["r0", "r1"])
    assert fleet.step(fleet.admit(65, A, B, prefer=["r1", "r2"]))[0][1][:2] == ["r0", 2]
    assert fleet.step(fleet.admit(61, A, C, prefer=["r1"]))[0][1][:2] == ["r1", 1]
    assert fleet.step(fleet.admit(20, prefer=["r2"]))[0][1] == "r2"


def test_what_is_computed_without_what_is_before_it_is_not_shared(store_client: Client) -> None:
    """The second segment is held on one replica, the first on the other."""
    fleet = Fleet(store_client, GUARANTEED, GUARANTEED)
    fleet.run(45, A, exclude=["r1"])
    fleet.run(25, B, exclude=["r0"])
    assert fleet.step(fleet.admit(62, A, B, exclude=["r0"]))[0][1] == ["r1", 0, CACHE]
    assert fleet.used("r1") == 87


def test_what_is_shared_on_another_replica_makes_no_room_here(store_client: Client) -> None:
    fleet = Fleet(store_client, GUARANTEED, GUARANTEED)
    fleet.run(45, A, exclude=["r1"])
    fleet.run(55, exclude=["r1"])
    fleet.run(70, exclude=["r0"])
    assert fleet.step(fleet.admit(45, A))[0][0] == "ticket"


def test_what_left_in_the_same_batch_is_not_shared(store_client: Client) -> None:
    """What was looked up for one call does not hold for the next."""
    fleet = Fleet(store_client)
    holder = fleet.run(45, A)
    newcomer, too_large, late = fleet.admit(45, A), fleet.admit(100, A, queue_max=0), fleet.admit(50, A)
    answers = fleet.step(newcomer, too_large, ["S", holder, -1, -1, [], ""], late)
    assert answers[0] == ["grant", ["r0", 1, CACHE]]
    assert answers[1][0] == "refused"
    assert answers[3] == ["grant", ["r0", 0, CACHE]]


@pytest.mark.parametrize(("segments", "is_foreseen"), [((A,), False), ((), True)])
def test_a_wait_is_not_foreseen_where_calls_share(
    store_client: Client, segments: tuple[Any, ...], is_foreseen: bool
) -> None:
    """The end of a call does not say how much comes back."""
    fleet = Fleet(store_client)
    fleet.run(50, *segments)
    fleet.run(50)
    fleet.step(["H", 0, 0, [1000, "r0", 50]])
    name, _, wait_ms = fleet.step(fleet.admit(45))[0]
    assert (name, wait_ms == 1150) == ("ticket", is_foreseen)


def test_who_found_no_room_starts_in_the_same_batch_when_it_may_share(store_client: Client) -> None:
    """Neither what was looked up for it nor that it did not fit holds any longer."""
    fleet = Fleet(store_client)
    holder = fleet.run(50, A, first_token=False)
    waits = fleet.admit(60, A)
    answers = fleet.step(waits, ["F", holder])
    assert [answer[0] for answer in answers] == ["ticket", "ok"]
    assert fleet.twin.books.calls[waits[1]].state == "unclaimed"
    assert fleet.used() == 50 + 20


@pytest.mark.parametrize("leaves", ["move", "lease", "settle"])
def test_a_reference_goes_with_its_call(store_client: Client, leaves: str) -> None:
    """Also of one that had no first token."""
    fleet = Fleet(store_client)
    fleet.run(45, A)
    newcomer = fleet.run(45, A, first_token=False, owner=OTHER)
    holder = fleet.run(45, A, owner=OTHER)
    assert fleet.nodes() == {("a", CACHE): (2, 1)}
    if leaves == "move":
        fleet.step(*(["M", id_, ["r0"]] for id_ in (newcomer, holder)), owner=OTHER)
        fleet.settle(newcomer, holder, owner=OTHER)
    elif leaves == "lease":
        fleet.pass_ms(7000, OWNER)
    else:
        fleet.settle(newcomer, holder, owner=OTHER)
    assert fleet.nodes() == {("a", CACHE): (1, 0)}
    assert fleet.used() == 45


def test_who_moves_is_a_newcomer_of_nothing_where_nothing_is(store_client: Client) -> None:
    fleet = Fleet(store_client, GUARANTEED, GUARANTEED)
    fleet.run(45, A, exclude=["r1"])
    fleet.run(40, exclude=["r0"])
    id_ = fleet.run(45, A)
    assert fleet.used() == 50
    fleet.step(["M", id_, ["r0"]])
    assert fleet.step(["K", id_]) == [["grant", ["r1", 0, CACHE]]]
    assert (fleet.used(), fleet.used("r1")) == (45, 85)
    fleet.step(["F", id_])
    assert fleet.nodes("r1") == {("a", CACHE): (1, 0)}


def declaration(op: Op, replica: str, joined: int, computed: int, force: int = 1, cache: int = CACHE) -> Op:
    _, id_, key, class_, lane, blocks, sequences, prefill, cost = op[:9]
    prefix = [*op[-1], cache, joined, computed]
    return ["R", id_, replica, key, class_, lane, blocks, sequences, prefill, cost, 1, -1, -1, -1, force, "", "",
            *IN_FULL[:4], prefix]  # fmt: skip


def test_after_a_lost_store_the_nodes_come_back(store_client: Client) -> None:
    """With what they counted, whoever declares first; shared again when the reader says that it is the same cache."""
    fleet = Fleet(store_client)
    holder, newcomer = fleet.admit(50, A, (*B[:1], 5)), fleet.admit(50, A)
    fleet.learn("r0", 0)
    answers = fleet.step(declaration(newcomer, "r0", 1, 0), declaration(holder, "r0", 2, 1))
    assert answers == [["declared"]] * 2
    assert fleet.used() == 40 + 5 + 5 + 10
    assert fleet.nodes() == {("a", CACHE): (1, 1), ("b", CACHE): (1, 0)}
    assert fleet.step(third := fleet.admit(41, A), ["S", third[1], -1, -1, [], ""])[0][0] == "ticket"
    fleet.learn("r0", CACHE)
    assert fleet.step(fleet.admit(60, A)) == [["grant", ["r0", 1, CACHE]]]


def test_where_others_hold_its_prefix_a_lost_call_needs_room_for_the_rest(store_client: Client) -> None:
    fleet = Fleet(store_client)
    first = fleet.run(50, A)
    fleet.run(40)
    ops = [fleet.admit(blocks, A) for blocks in (51, 50)]
    answers = [fleet.step(declaration(op, "r0", 1, 1, force=0))[0] for op in ops]
    assert answers == [["no_room"], ["declared"]]
    fleet.settle(first)
    assert fleet.used() == 40 + 10 + 40


@pytest.mark.parametrize("prefill", [0, 4000])
def test_a_declaration_says_that_the_prompt_is_computed(store_client: Client, prefill: int) -> None:
    """A first token that would have overtaken it is part of it, whatever it says of the prefill budget."""
    fleet = Fleet(store_client)
    op = fleet.admit(50, A, prefill=4000)
    fleet.step(op)
    declared = declaration(op, "r0", 0, 1)
    declared[8] = prefill
    assert fleet.step(declared) == [["same"]]
    assert fleet.nodes() == {("a", CACHE): (1, 0)}
    assert fleet.twin.books.replicas["r0"].prefill == 0


def test_caps_and_the_order_count_whole_demands(store_client: Client) -> None:
    fleet = Fleet(store_client)
    fleet.run(50, A)
    fleet.run(50, A)
    assert fleet.twin.books.keys["k"].blocks == 100
    assert fleet.used() == 60


BASE = 128


def by_path(op: Op, held: int, points: Path) -> Op:
    """An admit, a question or a declaration of a call that holds so much at first, with what it shares."""
    op[-5:-1] = [held, BASE, pack(points), 0]
    return op


def grow(id_: str, held: int, points: Path, net: int = 0) -> Op:
    return ["Z", id_, held, BASE, pack(points), net]


def test_who_is_charged_by_its_path_is_charged_for_the_rest(store_client: Client) -> None:
    """Of what others hold, now and at every horizon."""
    fleet = Fleet(store_client, SHARED)
    fleet.run(50, A)
    op = by_path(fleet.admit(50, A), 45, flat(50))
    assert fleet.step(op) == [["grant", ["r0", 1, CACHE]]]
    replica = fleet.twin.books.replicas["r0"]
    assert (replica.used, replica.full, replica.assured) == (55, 60, 50)
    assert unpack(replica.sums) == flat(10)
    assert fleet.step(["F", op[1]]) == [["ok", 1]]
    assert fleet.nodes() == {("a", CACHE): (2, 0)}


def test_who_shares_grows_by_whole_figures(store_client: Client) -> None:
    """Before its first token is known or after, twice or once: the same."""
    ends = []
    for batches in ([["F"], ["Z"]], [["Z"], ["F"]], [["Z", "F", "Z"]], [["F"], ["Z"], ["F", "Z"]]):
        fleet = Fleet(store_client, ELASTIC)
        fleet.run(50, A)
        op = by_path(fleet.admit(90, A, B), 61, flat(70))
        fleet.step(op)
        said = {"F": ["F", op[1]], "Z": grow(op[1], 63, flat(90))}
        for batch in batches:
            fleet.step(*(said[letter] for letter in batch))
        ends.append(fleet.twin.books.replicas["r0"])
        assert fleet.used() == 50 + 23
        assert unpack(ends[-1].sums) == flat(50), "what nobody else has is its own, and in its path"
    assert all(end == ends[0] for end in ends)


def test_a_growth_says_how_much_its_path_is_without(store_client: Client) -> None:
    """And counts as it says, whenever it comes, as often as it comes; what it holds is told whole."""
    ends = []
    for batches in (["F"], ["Z"]), (["Z"], ["F"]), (["Z", "F", "Z"],), (["F", "Z"], ["Z"]):
        fleet = Fleet(store_client, ELASTIC)
        fleet.run(50, A)
        op = by_path(fleet.admit(90, A), 61, flat(90))
        fleet.step(op)
        points = tuple(range(1, POINTS + 1))
        said = {"F": ["F", op[1]], "Z": grow(op[1], 63, points, net=40)}
        for batch in batches:
            fleet.step(*(said[letter] for letter in batch))
        replica = fleet.twin.books.replicas["r0"]
        assert (replica.used, unpack(replica.sums)) == (50 + 23, points)
        ends.append(replica)
    assert all(end == ends[0] for end in ends)


def test_a_path_without_what_is_its_own_again_counts_that_too(store_client: Client) -> None:
    """After a lost store it is the first to be declared; what it shares then is counted with it."""
    fleet = Fleet(store_client, ELASTIC)
    op = by_path(fleet.admit(50, A), 45, (SCALE, *(0,) * (POINTS - 1)))
    declared = declaration(op, "r0", 1, 1)
    declared[-1] = [*declared[-1], 40]
    fleet.step(by_path(declared, 45, unpack(op[-3])))
    replica = fleet.twin.books.replicas["r0"]
    assert (replica.used, unpack(replica.sums)) == (45, (41 * SCALE, *(0,) * (POINTS - 1)))
    fleet.run(45, A)
    assert (replica.used, unpack(replica.sums)) == (40 + 5 + 5, unpack(op[-3]))


@pytest.mark.parametrize(
    ("number", "following", "tokens"),
    [(0, 1, 32), (0, 0, 128), (2, 1, 256), (2, 0, 512), (3, 1, 768), (9, 1, 12288)],
)
def test_a_point_is_narrowed_by_what_the_call_has_at_its_horizon(
    store_client: Client, number: int, following: int, tokens: int
) -> None:
    """Or at the next one, where it stands for that too: from the fourth on, or where it is the last."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(50, A)
    width = len(TILTS)
    path = [0] * POINTS
    path[number * width : (number + 2) * width] = [1000] * width + [following] * width
    op = by_path(fleet.admit(90, A), 50, tuple(path))
    assert fleet.step(op)[0][0] == "grant"
    most = min(90, 50 + -(-tokens // BLOCK_SIZE))
    found = unpack(fleet.twin.books.replicas["r0"].sums)[number * width]
    assert found == -(-1000 * (most - 40) // most)


def test_a_declared_call_that_is_known_says_what_its_path_is_without(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(50, A)
    op = by_path(fleet.admit(50, A), 45, flat(50))
    fleet.step(op)
    declared = declaration(op, "r0", 1, 1)
    declared[-1] = [*declared[-1], 40]
    assert fleet.step(by_path(declared, 46, flat(7))) == [["same"]]
    assert fleet.used() == 56
    assert unpack(fleet.twin.books.replicas["r0"].sums) == flat(7)


def test_a_growth_that_says_more_than_there_is_is_taken_for_all(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    op = by_path(fleet.admit(50, A), 45, flat(50))
    fleet.step(op)
    assert fleet.step(grow(op[1], 45, flat(10), net=49)) == [["ok"]]
    assert unpack(fleet.twin.books.replicas["r0"].sums) == flat(50)


def test_what_one_call_made_is_its_own_until_another_has_it(store_client: Client) -> None:
    """Where it is charged by its path: it counts no longer than the call.  Then it counts once, whoever leaves."""
    fleet = Fleet(store_client, ELASTIC)
    ids = []
    for used in (45, 90):
        op = by_path(fleet.admit(50, A), 45, flat(50))
        assert fleet.step(op) == [["grant", ["r0", 0, CACHE]]]
        ids.append(op[1])
        assert fleet.used() == used
        replica = fleet.twin.books.replicas["r0"]
    assert fleet.step(["F", ids[0]]) == [["ok", 1]]
    assert (fleet.used(), replica.shared, replica.assured) == (90, 0, 0)
    assert unpack(replica.sums) == flat(100)
    assert fleet.step(["F", ids[1]]) == [["ok", 1]]
    assert (fleet.used(), replica.shared, replica.assured, replica.full) == (50, 40, 40, 60)
    assert unpack(replica.sums) == flat(20)
    third = fleet.admit(50, A)
    assert fleet.step(third) == [["grant", ["r0", 1, CACHE]]]
    fleet.settle(ids[0], third[1])
    assert (fleet.used(), replica.shared) == (45, 40)
    fleet.settle(ids[1])
    assert (fleet.used(), replica.shared, replica.full, fleet.nodes()) == (0, 0, 0, {})


def test_what_is_one_call_s_own_ends_with_it(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    op = by_path(fleet.admit(50, A), 45, flat(50))
    fleet.step(op, ["F", op[1]])
    assert fleet.nodes() == {("a", CACHE): (1, 0)}
    fleet.settle(op[1])
    assert (fleet.used(), fleet.nodes()) == (0, {})


def test_who_is_charged_in_full_frees_what_another_made(store_client: Client) -> None:
    """It shares nothing when it comes, and with its first token the other one's charge falls, too."""
    fleet = Fleet(store_client, SHARED)
    op = by_path(fleet.admit(50, A), 45, flat(46))
    fleet.step(op, ["F", op[1]])
    other = fleet.admit(50, A)
    assert fleet.step(other) == [["grant", ["r0", 0, CACHE]]]
    assert fleet.used() == 95
    fleet.step(["F", other[1]])
    assert fleet.used() == 40 + 5 + 10
    assert fleet.twin.books.calls[op[1]].held == 5


@pytest.mark.parametrize("over", [0, 1])
def test_the_bound_is_exact_beside_what_is_shared(store_client: Client, over: int) -> None:
    """At the smallest part of a block; a point is narrowed by the part that is left of what it is a point of."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(45, A)
    fleet.run(44)
    held = 50
    most = held + HORIZONS[0] // BLOCK_SIZE
    left = (LIMIT - 45 - 44) * SCALE - min(margins(BASE)) + over
    point = left * most // (most - A[1])
    path = tuple(point if at < len(TILTS) else 1 for at in range(POINTS))
    answer = fleet.step(by_path(fleet.admit(LIMIT, A, queue_max=0), held, path))[0][0]
    assert answer == ("refused" if over else "grant")


def test_who_holds_less_than_it_shares_holds_nothing_beside(store_client: Client) -> None:
    """No gateway says so; the books stay whole."""
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(45, A)
    op = by_path(fleet.admit(50, A), 10, flat(10))
    assert fleet.step(op)[0][0] == "grant"
    assert fleet.used() == 45
    fleet.settle(op[1])
    assert fleet.used() == 45


def test_a_call_that_grows_moves_with_what_it_shares_there(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC, ELASTIC)
    fleet.run(50, A, exclude=["r1"])
    fleet.run(45, exclude=["r0"])
    op = by_path(fleet.admit(50, A), 42, flat(50))
    assert fleet.step(op) == [["grant", ["r0", 1, CACHE]]]
    fleet.step(["F", op[1]], grow(op[1], 44, flat(50)))
    assert fleet.used() == 54
    fleet.step(["M", op[1], ["r0"]])
    assert fleet.step(["K", op[1]]) == [["grant", ["r1", 0, CACHE]]]
    assert (fleet.used(), fleet.used("r1")) == (50, 89)
    assert unpack(fleet.twin.books.replicas["r1"].sums) == flat(50)


def test_after_a_lost_store_who_grows_shares_what_it_did(store_client: Client) -> None:
    """In whatever order they declare, with the figures of whole calls."""
    ends = []
    for order in (1, -1):
        fleet = Fleet(store_client, ELASTIC)
        ops = [by_path(fleet.admit(50, A), 45 + at, flat(50)) for at in range(3)]
        answers = [
            fleet.step(by_path(declaration(op, "r0", 1, 1), op[-5], flat(50)))[0] for op in ops[::order]
        ]
        assert answers == [["declared"]] * 3
        assert (fleet.used(), fleet.nodes()) == (40 + 5 + 6 + 7, {("a", CACHE): (3, 0)})
        ends.append(fleet.twin.books.replicas["r0"])
    assert ends[0] == ends[1]


def test_who_shares_is_charged_by_its_path_as_soon_as_it_has_one(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    fleet.run(50, A)
    id_ = fleet.run(50, A)
    assert fleet.used() == 60
    assert fleet.step(grow(id_, 41, flat(41))) == [["ok"]]
    assert fleet.used() == 51
    assert fleet.step(["Z", id_, -1, 0, b"", 0]) == [["ok"]]
    assert fleet.used() == 60
    fleet.settle(id_)
    assert fleet.used() == 50


def test_a_node_that_was_another_cache_s_is_nobody_s_own(store_client: Client) -> None:
    fleet = Fleet(store_client, ELASTIC)
    op = by_path(fleet.admit(50, A), 45, flat(50))
    fleet.step(op, ["F", op[1]])
    fleet.learn("r0", CACHE + 1)
    other = by_path(fleet.admit(50, A), 45, flat(50))
    fleet.step(other, ["F", other[1]])
    assert fleet.nodes() == {("a", CACHE): (1, 0), ("a", CACHE + 1): (1, 0)}
    assert fleet.used() == 90
    fleet.settle(op[1])
    assert fleet.used() == 45


@pytest.mark.parametrize(
    ("least", "may_share", "told"), [(90, 1, "open"), (91, 1, "refused"), (41, 0, "refused")]
)
def test_a_question_is_not_refused_where_sharing_may_make_room(
    store_client: Client, least: int, may_share: int, told: str
) -> None:
    """Of a prompt that is not known the most that is shared there counts."""
    fleet = Fleet(store_client)
    fleet.run(50, A)
    asked = ["Q", least, least, "k", "normal", "a", 1, 1, 0, 1, -1, -1, -1, 0, 0, 0, 0, 0, *IN_FULL[:4],
             [BLOCK_SIZE] if may_share else []]  # fmt: skip
    asked[2] = max(least, 51)
    answer = fleet.step(asked)[0][0]
    assert answer == (told if least > 50 or may_share else "open")
