"""Where prompts are cut, and what names the pieces."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prefixes import (
    FIRST_BLOCKS,
    GRID,
    POINT_BYTES,
    TEXT_BYTES,
    Salt,
    SeenPoints,
    keys_of,
    points,
    segments,
    shareable_blocks,
    text_points,
    tokens_min,
)
from gateway.core.segments import SEGMENTS_MAX, Segment

SIZE = 16
SALT = Salt("f", "", "", SIZE).digest()
ALPHABET = st.integers(0, 3)


def ids(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=tokens)


def beginning(tokens: Sequence[int], salt: bytes = SALT, size: int = SIZE) -> list[bytes]:
    return keys_of(salt, points(tokens, size))


def cut(seen: SeenPoints, tokens: Sequence[int]) -> tuple[Segment, ...]:
    found = beginning(tokens)
    return segments(found, seen.cut(found))


def ends(pieces: Sequence[Segment]) -> list[int]:
    return list(accumulate(piece.blocks for piece in pieces))


def shared(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """Blocks that a call with `other` shares with a holder of `one`."""
    blocks = 0
    for piece in other:
        if piece not in one:
            break
        blocks += piece.blocks
    return blocks


def test_the_grid_has_four_points_an_octave() -> None:
    assert GRID[:13] == (8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    assert all(before < after <= before * 5 / 4 for before, after in pairwise(GRID))


@pytest.mark.parametrize(("tokens", "found"), [(128, 0), (129, 1), (160, 1), (161, 2), (16 * 64 + 1, 13)])
def test_a_prompts_last_token_is_never_shared(tokens: int, found: int) -> None:
    assert len(points(ids(tokens), SIZE)) == found * POINT_BYTES
    assert (tokens >= tokens_min(SIZE)) == (found > 0)
    assert shareable_blocks(tokens, SIZE) == (tokens - 1) // 16


def test_a_prompt_without_a_token_has_no_block_to_share() -> None:
    assert shareable_blocks(0, SIZE) == 0
    assert points([], SIZE) == b""


@given(st.lists(ALPHABET, max_size=80), st.dictionaries(st.integers(0, 79), ALPHABET), st.integers(1, 4))
def test_points_are_equal_exactly_where_all_before_them_is(
    a: list[int], changes: dict[int, int], size: int
) -> None:
    b = [changes.get(at, token) for at, token in enumerate(a)]
    keys = beginning(a, size=size)
    for at, (one, other) in enumerate(zip(keys, beginning(b, size=size), strict=True)):
        end = GRID[at] * size
        assert (one == other) == (a[:end] == b[:end])
    assert len(set(keys)) == len(keys)


@given(st.integers(0, 10_000), st.integers(1, 2**53 - 1), st.sampled_from((1, 16, 32)))
def test_one_other_token_changes_all_that_comes_behind_it_and_nothing_before(
    at: int, other: int, size: int
) -> None:
    """Of what comes behind it also what is the same: an engine has another block for that."""
    one = [0] * 10_001
    changed = [*one[:at], other, *one[at + 1 :]]
    pairs = list(zip(beginning(one, size=size), beginning(changed, size=size), strict=True))
    same = sum(cut * size <= at for cut in GRID[: len(pairs)])
    assert all(before == after for before, after in pairs[:same])
    names = [{piece.id for piece in segments(keys, range(len(keys)))} for keys in zip(*pairs, strict=True)]
    assert len(names[0] & names[1]) == same
    assert len(names[0] | names[1]) == 2 * len(pairs) - same


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_what_is_no_id_has_no_points(wrong: int) -> None:
    with pytest.raises(OverflowError):
        points([wrong] * 200, SIZE)


def test_whatever_decides_what_an_engine_keeps_is_in_the_salt() -> None:
    salts = [
        Salt("f", "", "", 16),
        Salt("g", "", "", 16),
        Salt("f", "adapter", "", 16),
        Salt("f", "", "adapter", 16),
        Salt("f", "", "", 32),
        Salt("f", "a", "b", 16),
        Salt("f", "ab", "", 16),
        Salt("fa", "b", "", 16),
        Salt("f", "", "", 16, b"adapter"),
        Salt("f", "", "\ud800", 16),
    ]
    assert len({salt.digest() for salt in salts}) == len(salts)
    tokens = ids(300)
    found = [segments(beginning(tokens, salt.digest()), (0, 2)) for salt in salts]
    assert len({piece.id for pieces in found for piece in pieces}) == 2 * len(salts)


def test_a_piece_is_named_by_its_end_and_its_begin() -> None:
    found = beginning(ids(300))
    (first, second), (whole,), (other,) = (segments(found, cuts) for cuts in ((0, 4), (4,), (0,)))
    assert (first.blocks, second.blocks, whole.blocks) == (8, 8, 16)
    assert first == other
    assert second.id != whole.id
    assert all(len(bytes.fromhex(piece.id)) == POINT_BYTES for piece in (first, second, whole))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200), st.integers(1, 200)), max_size=30))
def test_a_call_is_cut_into_few_pieces_of_what_it_may_share(prompts: list[tuple[int, int, int]]) -> None:
    seen = SeenPoints()
    for seed, common, rest in prompts:
        tokens = [*ids(400, seed)[: 2 * common], *ids(rest, rest)]
        found = beginning(tokens, size=1)
        cuts = seen.cut(found)
        assert len(cuts) <= SEGMENTS_MAX
        assert list(cuts) == sorted(set(cuts))
        pieces = segments(found, cuts)
        assert all(piece.blocks > 0 for piece in pieces)
        assert sum(piece.blocks for piece in pieces) <= shareable_blocks(len(tokens), 1)
        assert bool(cuts) == (len(tokens) >= tokens_min(1))


@pytest.mark.parametrize("common_blocks", [8, 20, 37, 64, 100, 300])
@pytest.mark.parametrize("rest_blocks", [1, 12, 100])
def test_the_second_of_two_shares_half_and_the_third_nearly_all(common_blocks: int, rest_blocks: int) -> None:
    """Whatever comes after that, and however much it is."""
    common, seen = ids(common_blocks * SIZE), SeenPoints()
    first, second, third, fourth, fifth = (
        cut(seen, [*common, *ids(rest_blocks * SIZE + 3 * n, n)]) for n in range(1, 6)
    )
    half, most = common_blocks // 2, common_blocks * 4 // 5
    assert half < shared(first, second) <= common_blocks or common_blocks < 2 * FIRST_BLOCKS
    for one, other in ((second, third), (third, fourth), (fourth, fifth)):
        assert most < shared(one, other) <= common_blocks


def test_where_prompts_branch_they_are_cut() -> None:
    """A system prompt that all have, and documents that some have."""
    system, documents, seen = ids(40 * SIZE), [ids(600 * SIZE, n) for n in (1, 2, 3)], SeenPoints()
    last: dict[int, tuple[Segment, ...]] = {}
    for turn in range(60):
        n = turn % 3
        last[n] = cut(seen, [*system, *documents[n], *ids(30 * SIZE, 100 + turn)])
    assert [ends(pieces)[0] for pieces in last.values()] == [40, 40, 40]
    assert shared(last[0], last[1]) == 40
    again = cut(seen, [*system, *documents[1], *ids(30 * SIZE, 99)])
    assert shared(last[1], again) == 640


def test_many_that_have_only_a_little_in_common_are_still_cut_deep() -> None:
    """However often they branch before, the last cut that others share is the deepest point that they have seen."""
    seen = SeenPoints()
    for turn in range(200):
        cut(
            seen,
            [*ids(10 * SIZE), *ids(2 * SIZE, turn % 50), *ids(4 * SIZE, turn % 100), *ids(100 * SIZE, turn)],
        )
    tokens = [*ids(10 * SIZE), *ids(2 * SIZE, 1), *ids(4 * SIZE, 1), *ids(1000 * SIZE, 7)]
    first = cut(seen, [*tokens, *ids(SIZE, 8)])
    second = cut(seen, [*tokens, *ids(SIZE, 9)])
    assert len(second) <= SEGMENTS_MAX
    assert ends(second)[-1] == ends(first)[-1] == 896


def test_a_prompt_that_comes_again_shares_all_but_its_last_part() -> None:
    tokens, seen = ids(64 * SIZE + 1), SeenPoints()
    first, second = cut(seen, tokens), cut(seen, tokens)
    assert first == second
    assert ends(first)[-1] == 64


def test_what_was_not_asked_for_is_forgotten() -> None:
    seen = SeenPoints(generation_max=50)
    kept = ids(200 * SIZE)
    for turn in range(100):
        cut(seen, ids(200 * SIZE, 1 + turn))
        cut(seen, kept)
        assert len(seen) <= 100
    assert len(seen._known(beginning(kept))) == len(beginning(kept))
    assert seen._known(beginning(ids(200 * SIZE, 1))) == []


# Texts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab\u00e9\ud800", max_size=300), max_size=8), st.integers(0, 8), st.integers(1, 700))
def test_texts_that_begin_alike_have_the_same_first_points(texts: list[str], at: int, more: int) -> None:
    one, other = text_points([*texts[:at], "x" * more]), text_points([*texts[:at], "x" * more, *texts[at:]])
    assert other.startswith(one)
    size = sum(len(text.encode(errors="surrogatepass")) for text in (*texts[:at], "x" * more))
    assert size // TEXT_BYTES < FIRST_BLOCKS or one


def test_where_a_text_ends_matters() -> None:
    assert text_points(["a" * 300, "a" * 300]) != text_points(["a" * 600])
    assert text_points(["a" * 600, "b"]) == text_points(["a" * 600])[:POINT_BYTES]


def test_what_stands_in_a_body_as_it_is_has_points_too() -> None:
    raw = msgspec.Raw(b'"' + b"a" * 600 + b'"')
    assert text_points([raw]) == text_points([raw, raw])[:POINT_BYTES]
    assert len(text_points([raw] * 2000)) == len(text_points([raw] * 1000)) > 0
