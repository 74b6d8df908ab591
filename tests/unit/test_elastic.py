"""The elastic rule: paths are bounds, bounds hold, and what was added can be taken away."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import elastic
from gateway.core.elastic import (
    ALONE,
    CERTAIN,
    EPS,
    FAR_EPS,
    GROWTH_PART,
    GROWTH_TOKENS_MIN,
    HORIZONS,
    NARROWED_MAX,
    NEAR,
    POINTS,
    SCALE,
    TILTS,
    base_of,
    blocks_at,
    bound_holds,
    flat,
    margins,
    narrowed,
    next_growth,
    pack,
    path_of,
    unpack,
)

BLOCK_SIZE = 16


@st.composite
def survivals(draw: st.DrawFn) -> Callable[[int], float]:
    """Of any shape: certain up to somewhere, then falling fast or slowly, perhaps to nothing."""
    certain, mean = draw(st.integers(0, 5000)), draw(st.floats(1, 20_000))
    end = draw(st.integers(1, 40_000))
    return lambda written: (
        1.0 if written <= certain else math.exp((certain - written) / mean) * (written < end)
    )


PROMPTS = st.integers(1, 100_000)
OUTPUTS = st.integers(1, 40_000)
BASES = st.sampled_from([base_of(1 << power) for power in range(20)])
SHARES = st.one_of(st.floats(0, 1), st.floats(1e-320, 1e-3), st.floats(0.999, 1))


def at(path: elastic.Path, horizon: int) -> tuple[int, ...]:
    number = HORIZONS.index(horizon) * len(TILTS)
    return path[number : number + len(TILTS)]


# -- growth -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40_000), OUTPUTS)
def test_a_call_grows_by_a_part_of_what_it_has_and_never_over_its_limit(written: int, limit: int) -> None:
    grown = next_growth(min(written, limit), limit)
    assert grown <= limit
    step = max(GROWTH_TOKENS_MIN, min(written, limit) // GROWTH_PART)
    assert grown == limit or grown == min(written, limit) + step


def test_a_long_call_grows_few_times() -> None:
    written, steps = 0, 0
    while written < 16_384:
        written, steps = next_growth(written, 16_384), steps + 1
    assert steps == 38  # to 512 by 64 each, then by an eighth


@pytest.mark.parametrize(
    ("prompt", "written", "ahead", "blocks"),
    [(1, 0, 0, 1), (16, 1, 0, 1), (16, 2, 0, 2), (33, 8127, 0, 510), (33, 8129, 0, 511), (16, 1, 5, 2)],
)
def test_the_last_token_is_not_stored(prompt: int, written: int, ahead: int, blocks: int) -> None:
    assert blocks_at(prompt, written, BLOCK_SIZE, ahead) == blocks


# -- one path ---------------------------------------------------------------------------------------------------------


@given(PROMPTS, OUTPUTS, st.integers(0, 40_000), survivals(), BASES, st.integers(0, 8))
def test_a_path_is_never_above_the_whole_demand(
    prompt: int, limit: int, written: int, survival: Callable[[int], float], base: int, ahead: int
) -> None:
    path = path_of(prompt, limit, min(written, limit), survival, BLOCK_SIZE, base, ahead)
    demand = blocks_at(prompt, limit, BLOCK_SIZE, ahead) * SCALE
    assert len(path) == POINTS
    assert all(0 <= point <= demand for point in path)


@given(PROMPTS, OUTPUTS, st.integers(0, 40_000), BASES, st.floats(CERTAIN, 1))
def test_who_knows_nothing_or_that_all_go_to_their_limit_counts_the_whole_demand_throughout(
    prompt: int, limit: int, written: int, base: int, going: float
) -> None:
    """At any age: as if guaranteed, so that all demands fit together."""
    path = path_of(prompt, limit, min(written, limit), lambda _: going, BLOCK_SIZE, base)
    assert path == flat(blocks_at(prompt, limit, BLOCK_SIZE, 0))


@given(PROMPTS, OUTPUTS, st.integers(0, 40_000), survivals(), BASES)
def test_a_path_covers_what_is_expected_at_every_horizon_and_before_the_limit(
    prompt: int, limit: int, written: int, survival: Callable[[int], float], base: int
) -> None:
    written = min(written, limit)
    path, grown = path_of(prompt, limit, written, survival, BLOCK_SIZE, base), next_growth(written, limit)
    age = (written + grown) // 2
    alive = max(survival(age), 1e-300)
    for time in (*HORIZONS, limit - written - 1):
        reached = bisect_right(HORIZONS, time)
        if written + time < limit and reached:
            blocks = blocks_at(prompt, min(grown + time, limit), BLOCK_SIZE, 0)
            expected = blocks * min(survival(min(age + time, limit - 1)) / alive, 1.0) * SCALE
            assert min(at(path, HORIZONS[reached - 1])) >= expected * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize("going", [0.3, 0.5, 0.89])
def test_where_many_calls_go_to_a_limit_between_two_horizons_they_count_with_all_of_it(going: float) -> None:
    path = path_of(320, 4095, 0, lambda written: 1.0 if written < 2000 else going, BLOCK_SIZE, 4096)
    assert min(at(path, 3072)) >= blocks_at(320, 4095, BLOCK_SIZE, 0) * going * SCALE
    assert set(at(path, 4096)) == {0}


def figures(horizon: int, mean: float) -> tuple[int, ...]:
    """Of a call with a prompt of 800 tokens that has written nothing, at one moment."""
    share = math.exp(-(32 + horizon) / mean) / math.exp(-32 / mean)
    blocks = blocks_at(800, 64 + horizon, BLOCK_SIZE, 0)
    return tuple(elastic._point(blocks, share, tilt / 2048) for tilt in TILTS)


@pytest.mark.parametrize("mean", [100, 800, 20_000])
def test_near_horizons_stand_for_themselves_and_others_for_the_time_until_the_next(mean: float) -> None:
    """A rare call that comes to hold half of a small replica between two of them would be at neither."""
    path = path_of(800, 16_384, 0, lambda written: math.exp(-written / mean), BLOCK_SIZE, 2048)
    for number, horizon in enumerate(HORIZONS[:-1]):
        ends = figures(horizon, mean), figures(HORIZONS[number + 1], mean)
        assert at(path, horizon) == (ends[0] if number < ALONE else tuple(map(max, *ends)))


def test_a_path_has_the_age_half_way_to_the_next_growth() -> None:
    """Of calls of 300 to 700 tokens: else it would be taken to stay at 400 until it tells more."""
    written, grown = 400, 464

    def survival(age: int) -> float:
        return min(max((700 - age) / 400, 0.0), 1.0)

    path = path_of(300, 4096, written, survival, BLOCK_SIZE, 2048)
    share = survival(432 + 128) / survival(432)
    blocks = blocks_at(300, grown + 128, BLOCK_SIZE, 0)
    assert at(path, 128) == tuple(elastic._point(blocks, share, tilt / 2048) for tilt in TILTS)


@given(PROMPTS, OUTPUTS, st.integers(0, 40_000), survivals(), BASES)
def test_a_path_is_nothing_beyond_the_limit(
    prompt: int, limit: int, written: int, survival: Callable[[int], float], base: int
) -> None:
    written = min(written, limit)
    path = path_of(prompt, limit, written, survival, BLOCK_SIZE, base)
    gone = {0} if survival(limit - 1) < CERTAIN else {path[0]}
    for horizon in HORIZONS:
        assert written + horizon < limit or set(at(path, horizon)) == gone


@pytest.mark.parametrize("horizon", HORIZONS)
def test_who_reaches_the_limit_at_a_horizon_is_gone_by_then(horizon: int) -> None:
    for limit, there in ((horizon + 100, False), (horizon + 101, True)):
        path = path_of(50, limit, 100, lambda _: 0.5, BLOCK_SIZE, 1024)
        assert any(at(path, horizon)) == there


@given(
    SHARES,
    SHARES,
    st.integers(1, 10_000),
    st.sampled_from([t / b for t in TILTS for b in (1, 64, 8192, 1 << 20)]),
)
def test_a_likelier_call_counts_for_more(one: float, other: float, blocks: int, theta: float) -> None:
    low, high = sorted((one, other))
    assert elastic._point(blocks, low, theta) <= elastic._point(blocks, high, theta)


@given(
    SHARES, st.integers(1, 10_000), st.sampled_from([t / b for t in TILTS for b in (1, 64, 8192, 1 << 20)])
)
def test_a_point_is_between_what_is_expected_and_all_of_it(share: float, blocks: int, theta: float) -> None:
    point = elastic._point(blocks, share, theta)
    assert blocks * SCALE * share * (1 - 1e-9) - 1e-9 <= point <= blocks * SCALE


@given(st.floats(-60, 0), st.floats(0.1, 60))
def test_a_point_is_the_effective_bandwidth_rounded_up(log_share: float, exponent: float) -> None:
    """Also where one of its two terms is far above the other: a rare call that is large beside theta."""
    blocks = 1000
    theta = exponent / blocks
    point = elastic._point(blocks, math.exp(log_share), theta) / SCALE
    mean = 1 - math.exp(log_share) + math.exp(log_share + exponent)
    exact = math.log(mean) / theta if exponent > 1e-2 else 0.0
    assert exact * (1 - 1e-9) - 1e-6 <= point <= exact + 1.01 / SCALE + 1e-6


def test_a_dead_share_and_a_dead_survival_do_not_break_it() -> None:
    assert elastic._point(10, 0.0, 0.1) == 0
    path = path_of(100, 20_000, 5000, lambda written: float(written == 0), BLOCK_SIZE, 1024)
    assert path == (0,) * POINTS


# -- many paths -------------------------------------------------------------------------------------------------------


def tail(calls: list[tuple[int, float]], limit: int) -> float:
    """The exact chance that calls that hold so many blocks, each with its chance, hold more than `limit` in all."""
    chances = {0: 1.0}
    for blocks, share in calls:
        after: dict[int, float] = {}
        for held, chance in chances.items():
            after[held] = after.get(held, 0.0) + chance * (1 - share)
            grown = min(held + blocks, limit + 1)
            after[grown] = after.get(grown, 0.0) + chance * share
        chances = after
    return sum(chance for held, chance in chances.items() if held > limit)


def some_calls(chance: random.Random) -> list[tuple[int, float]]:
    """Many small ones, some that fill a large part of the replica, of all likelihoods."""
    likely = chance.choice([0.02, 0.2, 0.5, 0.95])
    most = chance.choice([3, 30, 300])
    return [
        (chance.randint(1, most), min(1.0, likely * chance.uniform(0.2, 1.8)))
        for _ in range(chance.randint(1, 60))
    ]


def sums_of(calls: list[tuple[int, float]], base: int) -> list[int]:
    """As if at every horizon."""
    points = [sum(elastic._point(blocks, share, tilt / base) for blocks, share in calls) for tilt in TILTS]
    return points * len(HORIZONS)


@pytest.mark.parametrize("seed", range(60))
def test_where_the_bound_holds_the_blocks_run_out_rarely(seed: int) -> None:
    """Exactly, by convolution, at the smallest limit at which the rule takes the last call."""
    chance = random.Random(seed)
    calls, assured = some_calls(chance), chance.choice([0, 0, 17])
    largest = sum(blocks for blocks, _ in calls) + assured
    nothing, limit = (0,) * POINTS, assured + 1
    sums = sums_of(calls, base := base_of(largest))
    while not bound_holds(sums, nothing, assured, limit, base):
        limit += 1
    if limit <= largest:  # else it cannot happen at all
        assert tail(calls, limit - assured) <= EPS


def test_what_many_calls_need_is_far_below_the_sum_of_their_demands() -> None:
    """The rule is of use: 500 calls that are half gone by then need little more than half of their blocks."""
    calls, base = [(10, 0.5)] * 500, base_of(3000)
    nothing = (0,) * POINTS
    assert bound_holds(sums_of(calls, base), nothing, 0, 3000, base)
    assert not bound_holds(sums_of(calls, base), nothing, 0, 2500, base)


@pytest.mark.parametrize("over", range(POINTS // len(TILTS)))
def test_one_horizon_without_room_refuses_and_one_tilt_is_enough(over: int) -> None:
    base, limit = 1024, 1000
    near, far = ([limit * SCALE - beside for beside in margins(base, eps)] for eps in (EPS, FAR_EPS))
    full = near * NEAR + far * (len(HORIZONS) - NEAR)
    nothing = (0,) * POINTS
    assert bound_holds(full, nothing, 0, limit, base)
    first = over * len(TILTS)
    too_much = [point + (first <= number < first + len(TILTS)) for number, point in enumerate(full)]
    assert not bound_holds(too_much, nothing, 0, limit, base)
    one_tilt = [10**9] * POINTS
    one_tilt[over % len(TILTS) :: len(TILTS)] = full[over % len(TILTS) :: len(TILTS)]
    assert bound_holds(one_tilt, nothing, 0, limit, base)


@given(st.integers(0, 900), st.integers(0, 900), st.integers(1, 2000))
def test_calls_in_full_count_at_every_horizon(assured: int, blocks: int, limit: int) -> None:
    """As `assured`, as a flat path there, or as the flat path of who asks."""
    nothing, base = (0,) * POINTS, 1024
    answers = {
        bound_holds(nothing, flat(blocks), assured, limit, base),
        bound_holds(flat(blocks), nothing, assured, limit, base),
        bound_holds(nothing, nothing, assured + blocks, limit, base),
        bound_holds(flat(assured), flat(blocks), 0, limit, base),
    }
    assert len(answers) == 1


@given(st.data(), survivals(), BASES)
def test_what_was_added_is_taken_away_to_the_last_unit(
    data: st.DataObject, survival: Callable[[int], float], base: int
) -> None:
    """In any order, and after any growth: sums are of integers."""
    calls = data.draw(st.lists(st.tuples(PROMPTS, OUTPUTS, st.integers(0, 40_000)), max_size=8))
    paths = [path_of(p, m, min(t, m), survival, BLOCK_SIZE, base) for p, m, t in calls]
    sums = [0] * POINTS
    for path in paths:
        sums = [total + point for total, point in zip(sums, path, strict=True)]
    for path in data.draw(st.permutations(paths)):
        sums = [total - point for total, point in zip(sums, unpack(pack(path)), strict=True)]
    assert sums == [0] * POINTS


# -- what is shared ---------------------------------------------------------------------------------------------------


def beside(
    prompt: int, limit: int, written: int, path: elastic.Path, shared: int, net: int = 0
) -> elastic.Path:
    held = blocks_at(prompt, next_growth(written, limit), BLOCK_SIZE, 0)
    return narrowed(path, net, shared, held, blocks_at(prompt, limit, BLOCK_SIZE, 0), BLOCK_SIZE)


@given(st.data(), PROMPTS, OUTPUTS, st.integers(0, 40_000), survivals(), BASES)
def test_what_is_left_beside_shared_blocks_covers_the_path_of_the_rest(
    data: st.DataObject,
    prompt: int,
    limit: int,
    written: int,
    survival: Callable[[int], float],
    base: int,
) -> None:
    """Whatever its path was made without; 1 is of rounding."""
    written = min(written, limit - 1)
    shared, net = (data.draw(st.integers(0, (prompt - 1) // BLOCK_SIZE)) for _ in range(2))
    paths = [
        path_of(prompt - blocks * BLOCK_SIZE, limit, written, survival, BLOCK_SIZE, base)
        for blocks in (0, net, shared)
    ]
    left = beside(prompt, limit, written, paths[1], shared, net)
    for point, all_of_it, told, needed in zip(left, *paths, strict=True):
        assert needed - 1 <= point <= max(all_of_it, told) + max(net - shared, 0) * SCALE
    if shared == net:
        assert left == paths[2]


@given(st.integers(1, NARROWED_MAX), st.data())
def test_who_certainly_runs_on_counts_with_exactly_the_rest(blocks: int, data: st.DataObject) -> None:
    shared, net = (data.draw(st.integers(0, blocks - 1)) for _ in range(2))
    held = data.draw(st.integers(1, blocks))
    assert narrowed(flat(blocks - net), net, shared, held, blocks, BLOCK_SIZE) == flat(blocks - shared)


def test_a_call_that_is_too_large_for_exact_products_keeps_its_path() -> None:
    for blocks in (NARROWED_MAX, NARROWED_MAX + 1):
        path = (2 * SCALE,) * POINTS
        kept = narrowed(path, 0, blocks // 2, blocks, blocks, BLOCK_SIZE) == path
        assert kept == (blocks > NARROWED_MAX)


# -- as the store has it ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), min_size=POINTS, max_size=POINTS))
def test_packed_is_read_as_it_was_written(points: list[int]) -> None:
    packed = pack(tuple(points))
    assert len(packed) == 4 * POINTS
    assert unpack(packed) == tuple(points)
    assert int.from_bytes(packed[:4], "big") == points[0]


@given(st.integers(0, 10**7))
def test_the_size_that_thetas_are_made_for_is_a_power_of_two_close_by(blocks: int) -> None:
    base = base_of(blocks)
    assert base.bit_count() == 1
    assert blocks <= 1 or 0.7 < base / blocks < 1.42
