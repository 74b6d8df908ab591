"""What is learned of how much calls write, while they write."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.lengths import (
    AGES,
    BUCKETS,
    ENTRIES_MAX,
    HALF,
    HAZARD_MAX,
    PRIOR,
    SURPRISE_LEFT,
    Lengths,
    Surprise,
    Watched,
    bucket_of,
    merge,
)

TOKENS = st.integers(0, 50_000)
COUNTS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=BUCKETS, max_size=BUCKETS)

News = dict[int, tuple[int, int]]


def known_of(counts: list[tuple[int, int]]) -> Lengths:
    lengths = Lengths()
    lengths.replace((bucket, entered, left) for bucket, (entered, left) in enumerate(counts))
    return lengths


def news_of(*written: int, of_itself: bool = True) -> News:
    """Of calls from their first token to their end."""
    news: News = {}
    for tokens in written:
        Watched().end(tokens, of_itself, news)
    return news


def learned(lengths: list[int], known: Lengths | None = None) -> Lengths:
    known = known or Lengths()
    known.add(news_of(*lengths))
    return known


# -- buckets ----------------------------------------------------------------------------------------------------------


def test_ages_begin_at_nothing_and_rise() -> None:
    assert AGES[0] == 0
    assert list(AGES) == sorted(set(AGES))


@given(TOKENS)
def test_a_bucket_begins_at_or_before_and_the_next_one_behind(written: int) -> None:
    bucket = bucket_of(written)
    assert AGES[bucket] <= written
    assert bucket == BUCKETS - 1 or written < AGES[bucket + 1]


# -- survival ---------------------------------------------------------------------------------------------------------


@given(TOKENS)
def test_cold_start_expects_every_call_to_write_all_that_it_may(written: int) -> None:
    assert Lengths().survival(written) == 1.0


@given(COUNTS, TOKENS, TOKENS)
def test_survival_begins_at_1_never_rises_and_never_reaches_0(
    counts: list[tuple[int, int]], one: int, other: int
) -> None:
    known = known_of(counts)
    low, high = sorted((one, other))
    assert known.survival(0) == 1.0
    assert 1.0 >= known.survival(low) >= known.survival(high) > 0


@given(COUNTS)
def test_a_hazard_is_a_part_below_its_greatest(counts: list[tuple[int, int]]) -> None:
    known = known_of(counts)
    assert all(0 <= known.hazard(bucket) <= HAZARD_MAX for bucket in range(BUCKETS))


def test_the_prior_holds_a_first_call_back() -> None:
    known = learned([10])
    assert known.hazard(0) == pytest.approx(1 / (1 + PRIOR))


@pytest.mark.parametrize("seed", range(3))
def test_many_calls_tell_their_law(seed: int) -> None:
    """Within what the prior and the width of a bucket cost."""
    chance = random.Random(seed)
    lengths = [max(1, round(chance.lognormvariate(math.log(317), 1.36))) for _ in range(20_000)]
    known = learned(lengths)
    for written in (64, 256, 512, 1024, 2048, 4096):
        true = sum(length >= written for length in lengths) / len(lengths)
        assert true * 0.98 <= known.survival(written) <= true * 1.05 + 0.001


def test_calls_that_still_write_are_not_taken_for_short_ones() -> None:
    """Half of the calls end at 50 tokens.  Once these have ended the others are known to be alive, and after their
    60th token nothing says that any of them will end."""
    known, news = Lengths(), dict[int, tuple[int, int]]()
    for _ in range(500):
        Watched().end(50, True, news)
        Watched().advance(60, news)
    known.add(news)
    assert known.survival(64) == pytest.approx(0.5, abs=0.01)
    assert known.survival(30_000) == pytest.approx(0.5, abs=0.01)


def test_calls_that_their_limit_stopped_count_as_half_and_as_no_end() -> None:
    known = Lengths()
    known.add(news_of(*[100] * 40, of_itself=False))
    bucket = bucket_of(100)
    assert known.entries[bucket] == 40 * HALF // 2
    assert known.exits == [0] * BUCKETS
    assert known.survival(10_000) == 1.0


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=20), st.randoms(use_true_random=False))
def test_steps_and_exchanges_on_the_way_change_nothing(
    calls: list[tuple[int, bool]], chance: random.Random
) -> None:
    at_once, in_steps, news = Lengths(), Lengths(), dict[int, tuple[int, int]]()
    for written, of_itself in calls:
        Watched().end(written, of_itself, news)
        watched = Watched()
        for stop in sorted(chance.randint(0, written) for _ in range(3)):
            step: News = {}
            watched.advance(stop, step)
            in_steps.add(step)
        step = {}
        watched.end(written, of_itself, step)
        in_steps.add(step)
    at_once.add(news)
    assert (at_once.entries, at_once.exits) == (in_steps.entries, in_steps.exits)


def test_news_change_what_was_computed_before() -> None:
    known = learned([10])
    before = known.survival(1000)
    learned([10] * 50, known)
    after = known.survival(1000)
    assert after < before
    known.replace([])
    assert known.survival(1000) == 1.0
    assert known.seen == 0


# -- what the store does ----------------------------------------------------------------------------------------------


def stream(known: Lengths, surprise: Surprise, lengths: list[int], together: int) -> list[int]:
    """Calls in order, so many in one exchange; at which of them there was a surprise."""
    return [
        begin
        for begin in range(0, len(lengths), together)
        if merge(known, surprise, news_of(*lengths[begin : begin + together]))
    ]


def test_a_bucket_that_was_seen_often_counts_half() -> None:
    known, surprise = Lengths(), Surprise()
    stream(known, surprise, [100] * (ENTRIES_MAX + 1), 1)
    assert known.entries[0] == (ENTRIES_MAX + 1) * HALF // 2
    assert known.hazard(bucket_of(100)) > 0.97
    assert known.entries[bucket_of(1000)] == 0


@pytest.mark.parametrize("together", [1, 20, 400])
@pytest.mark.parametrize("seed", range(2))
def test_what_does_not_change_surprises_nobody(seed: int, together: int) -> None:
    chance = random.Random(seed)
    lengths = [max(1, round(chance.lognormvariate(math.log(317), 1.36))) for _ in range(8_000)]
    assert stream(Lengths(), Surprise(), lengths, together) == []


def test_a_crowd_that_arrives_at_once_surprises_nobody() -> None:
    """Its calls pass every age together: those that did not end yet are no surprise until they have passed it."""
    chance = random.Random(5)
    known, surprise = Lengths(), Surprise()
    for _ in range(20):
        lengths = sorted(chance.randint(300, 700) for _ in range(200))
        watched = [(Watched(), length) for length in lengths]
        for written in range(0, 701, 25):
            news: News = {}
            for one, length in watched:
                if written < length:
                    one.advance(written, news)
                elif written - 25 < length:
                    one.end(length, True, news)
            assert not merge(known, surprise, news)


@pytest.mark.parametrize("together", [1, 20])
def test_longer_calls_are_a_surprise_once_and_then_little_is_known(together: int) -> None:
    chance = random.Random(1)
    known, surprise = Lengths(), Surprise()
    assert stream(known, surprise, [chance.randint(300, 700) for _ in range(3000)], together) == []
    assert known.survival(1024) < 0.01
    before = known.seen
    longer = [chance.randint(900, 2100) for _ in range(60)]
    surprises = stream(known, surprise, longer, together)
    assert surprises
    assert surprises[0] <= 40
    assert known.seen < before / SURPRISE_LEFT + len(longer)
    assert known.survival(768) > 0.1
    assert stream(known, surprise, [chance.randint(900, 2100) for _ in range(2000)], together) == []


def test_shorter_calls_are_none() -> None:
    chance = random.Random(2)
    known, surprise = Lengths(), Surprise()
    stream(known, surprise, [chance.randint(900, 2100) for _ in range(2000)], 1)
    assert stream(known, surprise, [chance.randint(300, 700) for _ in range(2000)], 1) == []


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1))
def test_calls_that_come_together_count_as_if_one_by_one(calls: int, share: float, hazard: float) -> None:
    ended = round(calls * share)
    together, single = Surprise(), Surprise()
    together.observe(calls, ended, hazard)
    for _ in range(calls):
        single.observe(1, ended / calls, hazard)
    assert together.missing == pytest.approx(single.missing, abs=1e-6)
    assert together.variance == pytest.approx(single.variance, abs=1e-6)
