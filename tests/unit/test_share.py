"""What one process admits on its own: equal parts of what is free, and nothing beyond them."""

import random

import pytest

from gateway.core.books import Replica
from gateway.core.outcomes import Code
from gateway.core.share import Denied, Holding, Portion, Share, Wanted, portions

PLENTY = 10_000


def replica(name: str = "r0", limit: int = 100, used: int = 0, **changes: object) -> Replica:
    values = {
        "pool": "p", "limit": limit, "usable": limit, "sequences_max": PLENTY, "prefill_max": PLENTY, "used": used,
        "full": used,
    } | changes  # fmt: skip
    return Replica(name, **values)  # type: ignore[arg-type]


def holding(blocks: int = 10, replica: str = "r0", key: str = "k", prefill: int = 0) -> Holding:
    return Holding(key, replica, blocks, 1, prefill)


def wanted(blocks: int = 10, **changes: object) -> Wanted:
    values: dict[str, object] = {
        "key": "k", "blocks": blocks, "sequences": 1, "prefill": 0, "blocks_max": -1, "requests_max": -1,
        "pools": ("p",),
    }  # fmt: skip
    return Wanted(**(values | changes))  # type: ignore[arg-type]


def portion(blocks: int = 100, **changes: object) -> Portion:
    values: dict[str, object] = {
        "pool": "p", "up": True, "usable": PLENTY, "blocks": blocks, "sequences": PLENTY, "prefill": PLENTY,
    }  # fmt: skip
    return Portion(**(values | changes))  # type: ignore[arg-type]


def chosen(share: Share, want: Wanted, id_: str = "new", **seen: bool) -> str | Denied:
    """Choose, and take the place."""
    found = share.choose(want, seen)
    if isinstance(found, str):
        share.take(id_, Holding(want.key, found, want.blocks, want.sequences, want.prefill))
    return found


# -- portions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "used", "held", "owners", "blocks"),
    [
        (100, 0, 0, 1, 100),
        (100, 0, 0, 3, 33),
        (100, 40, 40, 3, 60),
        (100, 40, 10, 4, 25),
        (100, 100, 30, 2, 30),
        (100, 101, 30, 2, 30),
        (100, 98, 0, 3, 0),
    ],
)
def test_a_portion_is_what_is_held_and_a_part_of_what_is_free(limit, used, held, owners, blocks):
    running = [holding(held)] if held else []
    found = portions([replica(limit=limit, used=used)], owners, [*running, holding(7, "elsewhere")])
    assert found["r0"].blocks == blocks


@pytest.mark.parametrize(
    ("full", "held", "blocks"), [(80, 20, 20 + 10), (100, 20, 20), (200, 20, 10), (201, 20, 9), (200, 0, 0)]
)
def test_where_calls_are_charged_by_their_paths_whole_demands_are_shared(full, held, blocks):
    """What they hold now, 40, leaves more free than they may need."""
    running = [holding(held)] if held else []
    seen = replica(used=40, full=full, elastic=3, mode="elastic")
    assert portions([seen], 2, running)["r0"].blocks == blocks


def test_a_promised_call_is_on_no_elastic_replica():
    mine = portions([replica("a", mode="elastic"), replica("b", 50, mode="shared")], 1, [])
    assert chosen(Share(mine, {}), wanted(promised=True)) == "b"
    assert chosen(Share(mine, {}), wanted()) == "a"
    assert Share(mine, {}).choose(wanted(60, promised=True), {}) == Denied(Code.NO_BACKEND, "", 0, 0)


def test_sequences_and_prefill_are_parts_too():
    busy = replica(sequences_max=10, sequences=4, prefill_max=1000, prefill=400, used=20)
    found = portions([busy], 4, [holding(prefill=300), holding()])["r0"]
    assert (found.sequences, found.prefill) == (2 + 1, 300 + 150)


def test_a_replica_that_was_removed_has_no_portion_and_one_that_is_down_says_so():
    found = portions([replica("gone", state="removed"), replica("down", state="down"), replica()], 1, [])
    assert {name: portion.up for name, portion in found.items()} == {"down": False, "r0": True}


@pytest.mark.parametrize("seed", range(40))
def test_the_portions_of_one_reading_sum_to_at_most_the_limit(seed):
    """Whatever processes hold and then admit within their portions; a lowered limit is not exceeded further."""
    rng = random.Random(seed)
    owners, limit = rng.choice([1, 2, 3, 7]), rng.choice([1, 2, 50, 1000])
    running = [[holding(rng.randint(1, 9)) for _ in range(rng.randint(0, 6))] for _ in range(owners)]
    used = sum(each.blocks for calls in running for each in calls)
    seen = replica(limit=limit, used=used)
    total = 0
    for calls in running:
        share = Share(portions([seen], owners, calls), {str(i): call for i, call in enumerate(calls)})
        total += sum(call.blocks for call in calls)
        for i in range(200):
            size = rng.choice([1, 2, limit // owners or 1, limit])
            total += size if chosen(share, wanted(size), f"new{i}") == "r0" else 0
    assert total <= max(limit, used)


# -- placement ---------------------------------------------------------------------------------------------------


def test_the_first_pool_with_room_and_there_the_roomiest_replica():
    mine = {
        "a": portion(30), "b": portion(50), "c": portion(50), "other": portion(90, pool="q"),
    }  # fmt: skip
    share = Share(mine, {})
    want = wanted(20, pools=("p", "q"))
    assert [chosen(share, want, str(i)) for i in range(7)] == [*"bcabc", "other", "other"]
    assert chosen(share, wanted(20, pools=("q", "p")), "x") == "other"
    assert chosen(share, want) == "other"
    assert chosen(share, want) == Denied(Code.STORE_UNAVAILABLE, "share", 20, 10)


@pytest.mark.parametrize(
    ("want", "seen", "found"),
    [
        (wanted(50), {}, "r0"),
        (wanted(51), {}, Denied(Code.STORE_UNAVAILABLE, "share", 51, 50)),
        (wanted(50, exclude=("r0",)), {}, Denied(Code.NO_BACKEND, "", 0, 0)),
        (wanted(50, pools=("q",)), {}, Denied(Code.NO_BACKEND, "", 0, 0)),
        (wanted(50), {"r0": False}, Denied(Code.NO_BACKEND, "", 0, 0)),
        (wanted(61), {}, Denied(Code.NO_BACKEND, "", 0, 0)),
        (wanted(1, pools=("r",)), {}, Denied(Code.NO_BACKEND, "", 0, 0)),
        (wanted(1, pools=("r",)), {"down": True}, "down"),
        (wanted(10, sequences=3), {}, "r0"),
        (wanted(10, sequences=4), {}, Denied(Code.STORE_UNAVAILABLE, "share", 10, 50)),
    ],
)
def test_where_a_call_may_run(want, seen, found):
    mine = {"r0": portion(50, usable=60, sequences=3), "down": portion(50, up=False, pool="r")}
    assert Share(mine, {}).choose(want, seen) == found


def test_more_than_the_portion_is_held_and_nothing_is_admitted_until_that_is_gone():
    """Admitted by the store after the reading."""
    share = Share({"r0": portion(50)}, {"old": holding(45), "late": holding(30)})
    assert share.choose(wanted(1), {}) == Denied(Code.STORE_UNAVAILABLE, "share", 1, 0)
    share.give_back("late")
    assert chosen(share, wanted(5)) == "r0"
    assert share.choose(wanted(1), {}) == Denied(Code.STORE_UNAVAILABLE, "share", 1, 0)


def test_what_is_given_back_is_used_again_once():
    share = Share({"r0": portion(30)}, {"old": holding(30)})
    share.give_back("nobody")
    share.give_back("old")
    share.give_back("old")
    assert chosen(share, wanted(30)) == "r0"
    assert isinstance(share.choose(wanted(1), {}), Denied)


def test_what_runs_on_a_replica_without_a_portion_counts_for_its_key():
    share = Share({"r0": portion(30)}, {"old": holding(9, "unknown")})
    assert share.choose(wanted(1, blocks_max=9), {}) == Denied(Code.QUOTA_EXCEEDED, "blocks_max", 10, 9)
    share.first_token("old")
    share.give_back("old")
    assert share.choose(wanted(1, blocks_max=9), {}) == "r0"


# -- prefill and caps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "prefill", "fits"),
    [(0, 100, True), (0, 5000, True), (60, 40, True), (60, 41, False), (150, 0, True), (150, 1, False)],
)
def test_the_prefill_budget_bounds_all_but_a_prompt_alone(held, prefill, fits):
    share = Share({"r0": portion(prefill=100)}, {"old": holding(1, prefill=held)})
    assert (share.choose(wanted(1, prefill=prefill), {}) == "r0") is fits


def test_the_first_token_gives_the_prefill_budget_back_and_keeps_the_blocks():
    share = Share({"r0": portion(20, prefill=100)}, {"old": holding(15, prefill=100)})
    assert isinstance(share.choose(wanted(5, prefill=100), {}), Denied)
    share.first_token("old")
    share.first_token("nobody")
    assert share.choose(wanted(6, prefill=100), {}) == Denied(Code.STORE_UNAVAILABLE, "share", 6, 5)
    assert chosen(share, wanted(5, prefill=100)) == "r0"


@pytest.mark.parametrize(
    ("caps", "found"),
    [
        ({"blocks_max": 30, "requests_max": 3}, "r0"),
        ({"blocks_max": 29}, Denied(Code.QUOTA_EXCEEDED, "blocks_max", 30, 29)),
        ({"requests_max": 2}, Denied(Code.QUOTA_EXCEEDED, "requests_max", 3, 2)),
        ({"key": "other", "blocks_max": 10, "requests_max": 1}, "r0"),
        ({"pool_share": 300_000}, "r0"),
        ({"pool_share": 299_999}, Denied(Code.QUOTA_EXCEEDED, "pool_share", 30, 29)),
        ({"key": "other", "pool_share": 100_000}, "r0"),
        ({"pool_share": 299_999, "pools": ()}, Denied(Code.NO_BACKEND, "", 0, 0)),
    ],
)
def test_a_keys_caps_are_judged_against_what_this_process_holds_of_it(caps, found):
    share = Share({"r0": portion()}, {"1": holding(10), "2": holding(10)})
    assert share.choose(wanted(10, **caps), {}) == found


def test_at_its_part_of_a_pool_a_call_goes_to_the_next():
    """A part of what this process may hold there; a replica that is down adds nothing to it."""
    mine = {"r0": portion(), "r1": portion(up=False), "s0": portion(pool="q")}
    share = Share(mine, {"1": holding(20), "2": holding(20, key="other")})
    assert share.choose(wanted(10, pools=("p", "q"), pool_share=300_000), {}) == "r0"
    assert share.choose(wanted(11, pools=("p", "q"), pool_share=300_000), {}) == "s0"
    assert share.choose(wanted(31, pools=("p", "q"), pool_share=300_000), {}) == Denied(
        Code.QUOTA_EXCEEDED, "pool_share", 51, 30
    )


def test_what_is_shared_with_others_counts_for_the_key_alone():
    """It stays when the call ends, so nobody may have it."""
    mine = Holding("k", "r0", 40, 1, 0, shared=30)
    (part,) = portions([replica(used=70)], 1, [mine]).values()
    assert part.blocks == 40
    share = Share({"r0": part}, {"a": mine})
    assert isinstance(chosen(share, wanted(31)), Denied)
    assert isinstance(chosen(share, wanted(1, blocks_max=40)), Denied)
    share.give_back("a")
    assert chosen(share, wanted(40), "b") == "r0"
    assert isinstance(chosen(share, wanted(1)), Denied)
