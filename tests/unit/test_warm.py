"""Where a beginning is likely to be cached, where a call may go for it, and whether what is expected is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import warm
from gateway.core.sse import Usage
from gateway.core.warm import (
    EXCLUDED_MAX,
    JUDGED_CALLS,
    MISCOUNTED_KEYS_MAX,
    REPLICAS_MAX,
    WARM_SECONDS,
    Counts,
    Found,
    Reach,
    SharedCaches,
    Trust,
    WarmPlaces,
    cold_replicas,
    warmest,
)

A, B, C = b"a", b"b", b"c"


def test_the_longest_beginning_that_was_seen_decides() -> None:
    places = WarmPlaces()
    places.note([A], "x", 0.0)
    places.note([A, B], "y", 1.0)
    assert places.depths([A, B, C], 2.0) == {"y": 2, "x": 1}
    assert warmest(places.depths([A, B, C], 2.0)) == ("y",)
    assert places.depths([A, C], 2.0) == {"y": 1, "x": 1}
    assert warmest(places.depths([A, C], 2.0)) == ("y", "x")
    assert places.depths([C], 2.0) == {}
    assert warmest(places.depths([], 2.0)) == ()


def test_a_replica_is_named_once_and_the_last_one_first() -> None:
    places = WarmPlaces()
    for at, replica in enumerate("xyxzx"):
        places.note([A], replica, float(at))
    assert warmest(places.depths([A], 5.0)) == ("x", "z", "y")


def test_after_minutes_a_replica_is_as_good_as_any_other() -> None:
    places = WarmPlaces()
    places.note([A, B], "x", 0.0)
    places.note([A], "y", 10.0)
    assert places.depths([A, B], WARM_SECONDS - 1) == {"x": 2, "y": 1}
    assert places.depths([A, B], WARM_SECONDS + 1) == {"y": 1}
    assert places.depths([A, B], WARM_SECONDS + 11) == {}


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.sampled_from("uvwxyz")), max_size=200))
def test_what_is_remembered_is_bounded(visits: list[tuple[bytes, str]]) -> None:
    places = WarmPlaces(generation_max=5)
    for at, (key, replica) in enumerate(visits):
        places.note([key], replica, float(at))
        assert next(iter(places.depths([key], float(at)))) == replica
        assert len(places) <= 10
        assert len(places.depths([key], float(at))) <= REPLICAS_MAX


def test_what_is_asked_for_stays() -> None:
    places = WarmPlaces(generation_max=5)
    for at in range(100):
        places.note([b"%d" % at, A], "x", float(at))
    assert places.depths([A], 99.0) == {"x": 1}
    assert places.depths([b"1"], 99.0) == {}


# Pools ----------------------------------------------------------------------------------------------------------


SHORT, LONG = Reach(100, ("a", "b")), Reach(None, ("c",))


def test_what_is_left_of_a_prompt_is_what_a_pool_is_bounded_by() -> None:
    assert cold_replicas(SHORT, [LONG], 300, {"a": 200}) == ("b",)
    assert cold_replicas(SHORT, [LONG], 300, {"a": 199}) is None
    assert cold_replicas(SHORT, [LONG], 300, {"a": 200, "b": 250}) == ()
    assert cold_replicas(SHORT, [LONG], 300, {"c": 300}) is None


def test_a_call_never_has_to_wait_for_one_warm_replica() -> None:
    assert cold_replicas(SHORT, [], 300, {"a": 200}) is None
    assert cold_replicas(SHORT, [], 300, {"a": 200, "b": 200}) == ()
    assert cold_replicas(SHORT, [Reach(150, ("c",))], 300, {"a": 200}) is None
    assert cold_replicas(SHORT, [Reach(150, ("c",))], 300, {"a": 200, "c": 150}) == ("b",)
    assert cold_replicas(SHORT, [Reach(None, ())], 300, {"a": 200}) is None


def test_no_call_names_more_replicas_than_the_store_can_look_at() -> None:
    most = Reach(100, tuple(f"r{i}" for i in range(EXCLUDED_MAX + 1)))
    assert len(cold_replicas(most, [LONG], 300, {"r0": 200}) or ()) == EXCLUDED_MAX
    more = Reach(100, (*most.replicas, "s"))
    assert cold_replicas(more, [LONG], 300, {"r0": 200}) is None


# Trust ----------------------------------------------------------------------------------------------------------


def judged(trust: Trust, part: float, calls: int = JUDGED_CALLS, replica: str = "x") -> list[bool]:
    return [trust.note(replica, 1_000, round(1_000 * part)) for _ in range(calls)]


def test_a_cache_that_holds_less_than_half_is_found_out_by_enough_calls() -> None:
    assert judged(Trust(), 0.49) == [False] * (JUDGED_CALLS - 1) + [True]
    assert not any(judged(Trust(), 0.5))
    assert not any(judged(Trust(), 0.0, JUDGED_CALLS - 1))


def test_good_calls_before_do_not_cover_it_for_long() -> None:
    trust = Trust()
    assert not any(judged(trust, 1.0, 1_000))
    assert any(judged(trust, 0.0, 2 * JUDGED_CALLS))


def test_who_finds_more_makes_up_for_nobody() -> None:
    trust = Trust()
    found = [trust.note("x", 100, 10_000 if turn % 4 == 0 else 0) for turn in range(JUDGED_CALLS)]
    assert found[-1]


def test_replicas_are_judged_each_for_itself() -> None:
    trust = Trust()
    assert not any(judged(trust, 0.0, JUDGED_CALLS - 1))
    assert not trust.note("y", 1_000, 0)
    assert trust.note("x", 1_000, 0)


# Of counts ------------------------------------------------------------------------------------------------------


def test_who_is_miscounted_shares_nothing_and_leaves_others_alone() -> None:
    counts = Counts()
    for turn in range(2 * JUDGED_CALLS):
        assert counts.note("chat", "odd", is_right=False) == (turn == JUDGED_CALLS - 1)
        assert not counts.note("chat", "plain", is_right=True)
        assert not counts.note("text", "odd", is_right=True)
    assert counts.are_wrong("chat", "odd")
    assert not any(counts.are_wrong(*place) for place in (("chat", "plain"), ("text", "odd"), ("chat", "")))


def test_where_several_keys_are_miscounted_all_are() -> None:
    """It is what the settings say of the model, then."""
    counts = Counts()
    for at in range(MISCOUNTED_KEYS_MAX):
        assert not counts.are_wrong("chat")
        assert any(counts.note("chat", f"key-{at}", is_right=False) for _ in range(JUDGED_CALLS))
    assert (counts.are_wrong("chat"), counts.are_wrong("chat", "plain"), counts.are_wrong("text")) == (
        True,
        True,
        False,
    )


def test_so_many_are_judged_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "JUDGED_MAX", 5)
    counts = Counts()
    for turn in range(50):
        counts.note("chat", f"key-{turn}", is_right=False)
        assert len(counts._trust._sums) <= 5
    assert [counts.note("chat", "last", is_right=False) for _ in range(JUDGED_CALLS)][-1]


# Of caches ------------------------------------------------------------------------------------------------------


def usage(found: int | None) -> Usage:
    return Usage(2_000, 10, found)


def test_an_engine_that_tells_nothing_where_it_found_nothing_has_found_nothing() -> None:
    """As older releases do; but not one that never told."""
    silent, older = SharedCaches(), SharedCaches()
    assert [silent.note("x", 7, 1_000, usage(None)) for _ in range(2 * JUDGED_CALLS)] == [
        None
    ] * 2 * JUDGED_CALLS
    assert older.note("x", 7, 0, usage(16)) is None
    found = [older.note("x", 7, 1_000, usage(None)) for _ in range(JUDGED_CALLS)]
    assert found == [*[Found(0, doubted=False)] * (JUDGED_CALLS - 1), Found(0, doubted=True)]


def test_an_answer_without_usage_says_nothing() -> None:
    caches = SharedCaches()
    assert caches.note("x", 7, 1_000, usage(1_200)) == Found(1_000, doubted=False)
    assert [caches.note("x", 7, 1_000, None) for _ in range(JUDGED_CALLS)] == [None] * JUDGED_CALLS


def test_another_process_of_an_engine_is_judged_anew() -> None:
    caches = SharedCaches()
    for cache in range(1, 4):
        assert caches.note("x", cache, 1_000, usage(None)) is None
        found = [caches.note("x", cache, 1_000, usage(0)) for _ in range(JUDGED_CALLS - 1)]
        assert found == [Found(0, doubted=False)] * (JUDGED_CALLS - 1)


def test_a_cache_is_suspected_where_calls_have_shared_since() -> None:
    caches = SharedCaches()
    assert caches.suspect("x") == 0
    caches.note("x", 7, 0, usage(16))
    assert caches.suspect("x") == 0
    for cache in (7, 8):
        caches.note("x", cache, 1_000, None)
        assert [caches.suspect("x"), caches.suspect("x")] == [cache, 0]


def test_of_replicas_that_are_gone_nothing_is_kept() -> None:
    caches = SharedCaches()
    for turn in range(50):
        caches.note(f"pod-{turn}", 7, 1_000, usage(0))
        caches.keep_only([f"pod-{turn}", "other"])
    assert list(caches._known) == list(caches._trust._sums) == ["pod-49"]
