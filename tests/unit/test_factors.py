"""What is learned of estimates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.content import Part
from gateway.core.factors import (
    BINS,
    KINDS_MAX,
    OBSERVED_MAX,
    OBSERVED_MIN,
    RARELY,
    SHORTFALL,
    STEP,
    Factors,
    bin_of,
    factor_of,
    is_fine,
    upper,
)

RATIOS = st.floats(0.3, 4.0)
COUNTS = st.dictionaries(st.integers(-BINS, BINS), st.integers(1, 500), min_size=1, max_size=20)


def part(tokens: int = 1000, script: str = "words", density: int = -11) -> Part:
    return Part(f"{script}{density}/1", f"{script}/1", tokens)


def seen(*ratios: float, kind: Part | None = None) -> Factors:
    factors = Factors()
    for ratio in ratios:
        factors.observe([kind or part()], round(1000 * ratio))
    return factors


def test_an_unknown_kind_is_left_as_it_is() -> None:
    assert Factors().estimate([part(123)]) == 123


@given(COUNTS)
def test_a_factor_leaves_few_short_and_by_little(counts: dict[int, int]) -> None:
    factor, total = factor_of(counts), sum(counts.values())
    short = [(bin_, count) for bin_, count in counts.items() if upper(bin_) > factor * (1 + 1e-9)]
    assert sum(count for _, count in short) <= total // RARELY
    assert sum(count * (1 - factor / upper(bin_)) for bin_, count in short) <= SHORTFALL * total + 1e-9


@given(COUNTS)
def test_no_lower_factor_would_do(counts: dict[int, int]) -> None:
    factor, total = factor_of(counts), sum(counts.values())
    lower = [bin_ for bin_ in counts if upper(bin_) < factor * (1 - 1e-9)]
    if not lower:
        return
    short = [(bin_, count) for bin_, count in counts.items() if bin_ > max(lower)]
    few = sum(count for _, count in short) <= total // RARELY
    little = sum(count * (1 - upper(max(lower)) / upper(bin_)) for bin_, count in short) <= SHORTFALL * total
    assert not (few and little)


@given(RATIOS)
def test_a_bin_ends_just_above_its_ratios(ratio: float) -> None:
    assert ratio * (1 - 1e-6) <= upper(bin_of(ratio)) <= ratio * math.exp(STEP) * (1 + 1e-6)


@pytest.mark.parametrize("ratio", [0.0, 1e-9, 1e9])
def test_what_is_beyond_all_bins_is_in_the_last_one(ratio: float) -> None:
    assert abs(bin_of(ratio)) == BINS


@given(st.lists(RATIOS, min_size=OBSERVED_MIN, max_size=60))
def test_what_was_learned_would_have_been_enough(ratios: list[float]) -> None:
    """As many as may be short in so few are none."""
    factors = seen(*ratios)
    if len(ratios) < RARELY:
        assert factors.estimate([part()]) >= math.floor(1000 * max(ratios)) * (1 - SHORTFALL)


def test_little_that_was_seen_only_raises() -> None:
    assert seen(*[0.5] * (OBSERVED_MIN - 1)).estimate([part()]) == 1000
    assert seen(0.5).estimate([part()]) == 1000
    assert seen(3.0).estimate([part()]) in range(3000, 3031)
    assert seen(*[0.5] * OBSERVED_MIN).estimate([part()]) in range(500, 506)


def test_a_new_density_goes_by_its_script() -> None:
    factors = seen(*[0.5] * OBSERVED_MIN)
    assert factors.estimate([part(density=-9)]) in range(500, 506)
    factors.observe([part(density=-9)], 2000)
    assert factors.estimate([part(density=-9)]) in range(2000, 2021)
    assert factors.estimate([part(script="han")]) == 1000


def test_a_mixture_goes_by_the_means_of_its_kinds() -> None:
    factors = Factors()
    for _ in range(OBSERVED_MIN):
        factors.observe([part()], 1000)
        factors.observe([part(script="han")], 400)
    mixture = [part(500), part(500, script="han")]
    assert factors.estimate(mixture) in range(700, 712)
    for _ in range(OBSERVED_MIN):
        factors.observe(mixture, 1400)
    assert factors.estimate(mixture) in range(1400, 1430)
    assert factors.estimate([part()]) in range(1000, 1011), "a mixture says nothing of its kinds alone"


def test_what_is_nearly_all_of_one_kind_goes_by_it() -> None:
    factors = seen(*[0.5] * OBSERVED_MIN)
    assert factors.estimate([part(950), part(50, script="han")]) in range(500, 506)


@given(
    st.lists(st.tuples(st.sampled_from(["han", "words", "kana"]), RATIOS), max_size=60), st.integers(0, 60)
)
def test_two_that_share_know_what_one_would(calls: list[tuple[str, float]], cut: int) -> None:
    one, first, second = Factors(), Factors(), Factors()
    for index, (script, ratio) in enumerate(calls):
        for factors in (one, first if index < cut else second):
            factors.observe([part(script=script)], round(1000 * ratio))
    store: dict[tuple[str, int], int] = {}
    for factors in (first, second, first):
        for at, count in factors.take_news().items():
            store[at] = store.get(at, 0) + count
        factors.learn([(kind, bin_, count) for (kind, bin_), count in store.items()])
    assert sorted(first.rows()) == sorted(second.rows()) == sorted(one.rows())


def test_news_are_taken_once_or_given_back() -> None:
    factors = seen(1.0, 1.0)
    news = factors.take_news()
    assert sum(news.values()) == 4
    assert not factors.take_news()
    factors.observe([part()], 1000)
    factors.give_back(news)
    factors.learn([])
    assert sum(count for _, _, count in factors.rows()) == 6


def test_old_outliers_are_forgotten() -> None:
    factors = seen(4.0, *[1.0] * OBSERVED_MAX)
    assert factors.total <= 2 * OBSERVED_MAX
    assert dict.fromkeys(bin_ for _, bin_, _ in factors.rows()) == {0: None}


def test_memory_is_bounded() -> None:
    factors = Factors()
    for density in range(3 * KINDS_MAX):
        for script in ("words", "han"):
            factors.observe([part(script=script, density=-density)], 700)
    coarse = [kind for kind in factors._kinds if not is_fine(kind)]
    assert sorted(coarse) == ["han/1", "words/1"]
    assert len(factors) <= KINDS_MAX + len(coarse)
    assert factors.estimate([part(density=-3 * KINDS_MAX)]) in range(700, 708), (
        "the coarse ones go on learning"
    )


def test_a_factor_is_derived_again_for_a_call_that_it_falls_short_of_or_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs more than the rest of an estimate."""
    derived: list[int] = []

    def noted(counts: dict[int, int]) -> float:
        derived.append(sum(counts.values()))
        return factor_of(counts)

    monkeypatch.setattr("gateway.core.factors.factor_of", noted)
    known = Factors()
    known.learn([(part().exact, 0, 640), (part().coarse, 0, 3200)])
    for _ in range(22):
        known.estimate([part()])
        known.observe([part()], 990)
    assert derived == [640, 3200, 640 + 21]
    known.observe([part()], 3000)
    known.estimate([part()])
    assert derived[3:] == [640 + 23, 3200 + 23]
