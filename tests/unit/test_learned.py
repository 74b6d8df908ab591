"""What a process knows of lengths, and the figures that are made of it."""

from gateway.core.learned import KINDS_MAX, LearnedLengths, quantile
from gateway.core.lengths import Lengths, Watched


def seen(*written: int) -> Lengths:
    lengths = Lengths()
    for tokens in written:
        news: dict[int, tuple[int, int]] = {}
        Watched().end(tokens, True, news)
        lengths.add(news)
    return lengths


def test_quantiles_are_those_of_what_was_seen() -> None:
    lengths = seen(*range(1, 2001, 2))
    assert 850 <= (quantile(lengths, 0.5) or 0) <= 1150
    assert 1550 <= (quantile(lengths, 0.9) or 0) <= 1950
    assert (
        lengths.survival(quantile(lengths, 0.5) or 0)
        <= 0.5
        < lengths.survival((quantile(lengths, 0.5) or 0) - 1)
    )


def test_of_little_nothing_is_said() -> None:
    assert quantile(Lengths(), 0.5) is None
    assert quantile(seen(100), 0.5) is None
    assert quantile(seen(*[100] * 10), 0.5) is not None
    assert quantile(seen(*[100] * 10), 0.9) is None


def test_kinds_beyond_the_bound_are_known_by_their_class() -> None:
    lengths = LearnedLengths()
    kinds = {
        lengths.of(lengths.kind("low", f"m-{n}")) and lengths.kind("low", f"m-{n}")
        for n in range(KINDS_MAX + 9)
    }
    assert len(kinds) == KINDS_MAX + 1
    assert "low:" in kinds
    assert lengths.kind("low", "m-0") == "low:m-0"


def test_a_model_may_have_any_name() -> None:
    lengths = LearnedLengths()
    lengths.observe(lengths.kind("normal", "a:b/c"), {0: (2, 2)})
    assert [(class_, model) for class_, model, _ in lengths] == [("normal", "a:b/c")]


def test_what_is_given_out_is_what_is_learned_later() -> None:
    lengths = LearnedLengths()
    known = lengths.of("normal:m")
    assert known.survival(100) == 1
    lengths.learn({"normal:m": [(0, 2000, 1000)]})
    assert known is lengths.of("normal:m")
    assert known.survival(100) < 0.6
    lengths.observe("normal:m", {1: (2, 0)})
    lengths.learn({"normal:m": [(0, 2000, 1000)]})
    assert known.entries[:2] == [2000, 2]
