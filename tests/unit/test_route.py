"""Lanes, demands and refusals."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.estimate import Demand
from gateway.core.outcomes import Code, Refusal
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.core.route import FleetShape, KeyLimits, PoolShape, candidate_lanes, hopeless, outlooks, route

SHORT = PoolShape("short", 4096, max_model_len=8192, block_size=16, usable_max=2000, sequences_max=256)
LONG = PoolShape("long", None, max_model_len=32768, block_size=16, usable_max=4000, sequences_max=64)
FLEET = FleetShape(
    name="demo",
    model="demo",
    names=frozenset({"demo"}),
    default_output_tokens=1024,
    max_output_tokens=None,
    token_factor=1.0,
    speculative_tokens=0,
    share_prompt_of_n=False,
    pools=(SHORT, LONG),
)
FREE = KeyLimits()


def request(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> GenerationRequest:
    content = (
        {"messages": [{"role": "user", "content": "hi"}]} if endpoint is Endpoint.CHAT else {"prompt": "hi"}
    )
    parsed = parse(endpoint, json.dumps(content | fields).encode(), 512)
    assert isinstance(parsed, GenerationRequest), parsed
    return parsed


def demand(*tokens: int, fleet: FleetShape = FLEET, limits: KeyLimits = FREE, **fields: Any) -> Demand:
    answer = route(fleet, request(**fields), tokens, limits)
    assert isinstance(answer, Demand), answer
    return answer


def refusal(*tokens: int, fleet: FleetShape = FLEET, limits: KeyLimits = FREE, **fields: Any) -> Refusal:
    answer = route(fleet, request(**fields), tokens, limits)
    assert isinstance(answer, Refusal), answer
    return answer


# Output limits


def test_a_chat_without_a_limit_gets_the_fleets_default() -> None:
    assert demand(1000).output_tokens == 1024
    assert demand(1000, max_tokens=None).output_tokens == 1024
    assert demand(1000).blocks == (1000 + 1024 - 1 + 15) // 16


def test_a_completion_without_a_limit_gets_what_the_engine_gives() -> None:
    assert demand(1000, endpoint=Endpoint.COMPLETIONS).output_tokens == 16


def test_the_larger_of_two_fields_is_reserved_where_it_is_the_one_that_counts() -> None:
    assert demand(100, max_tokens=1, max_completion_tokens=8000).blocks == 507


def test_a_limit_over_the_room_left_is_clamped_to_it() -> None:
    answer = demand(31_900, max_tokens=1000)
    assert (answer.lane, answer.output_tokens, answer.blocks) == ("long", 868, 2048)


def test_a_limit_over_every_context_is_refused_as_the_engine_does() -> None:
    answer = refusal(100, max_tokens=32769)
    assert (answer.code, answer.param) == (Code.INVALID_VALUE, "max_tokens")
    assert "max_tokens=32769 cannot be greater than max_model_len=32768" in answer.message
    assert refusal(100, max_completion_tokens=32769).param == "max_completion_tokens"
    assert demand(100, max_tokens=32768).output_tokens == 32668


@pytest.mark.parametrize(
    ("fleet", "limits", "owner"),
    [
        (replace(FLEET, max_output_tokens=500), FREE, "the model"),
        (FLEET, KeyLimits(max_output_tokens=500), "the key"),
        (replace(FLEET, max_output_tokens=500), KeyLimits(max_output_tokens=9000), "the model"),
    ],
)
def test_the_operators_limit_refuses_what_asks_for_more_and_caps_the_default(
    fleet: FleetShape, limits: KeyLimits, owner: str
) -> None:
    answer = refusal(100, fleet=fleet, limits=limits, max_tokens=501)
    assert (answer.code, answer.param) == (Code.OUTPUT_LIMIT_EXCEEDED, "max_tokens")
    assert all(word in answer.message for word in ("501", "500", "max_output_tokens", owner))
    assert demand(100, fleet=fleet, limits=limits, max_tokens=500).output_tokens == 500
    assert demand(100, fleet=fleet, limits=limits).output_tokens == 500


def test_min_tokens_over_the_limit_that_holds() -> None:
    assert refusal(100, min_tokens=1025).param == "min_tokens"
    assert demand(100, min_tokens=1024).output_tokens == 1024
    assert refusal(32_000, min_tokens=800, max_tokens=900).param == "min_tokens"


# Lanes


@pytest.mark.parametrize(
    ("tokens", "output", "lane", "limit"),
    [
        (1, 16, "short", 16),
        (4096, 16, "short", 16),
        (4097, 16, "long", 16),
        (4096, 4096, "short", 4096),
        (4096, 4097, "long", 4097),  # over the context of `short`
        (100, 30_000, "long", 30_000),
        (32_767, 1, "long", 1),
        (32_767, 50, "long", 1),
    ],
)
def test_a_lane_is_that_of_the_first_pool_that_can_hold_the_call(
    tokens: int, output: int, lane: str, limit: int
) -> None:
    answer = demand(tokens, max_tokens=output)
    assert (answer.lane, answer.output_tokens) == (lane, limit)


def test_a_call_over_the_blocks_or_sequences_of_one_pool_goes_to_the_next() -> None:
    tiny = replace(SHORT, usable_max=100)
    assert demand(1600, fleet=replace(FLEET, pools=(tiny, LONG)), max_tokens=1).lane == "short"
    assert demand(1600, fleet=replace(FLEET, pools=(tiny, LONG)), max_tokens=2).lane == "long"
    narrow = replace(SHORT, sequences_max=2)
    assert demand(10, fleet=replace(FLEET, pools=(narrow, LONG)), n=3).lane == "long"


def test_the_shortest_context_of_a_lane_holds_for_all_its_calls() -> None:
    lanes = {"short": ("short", "long"), "long": ("long", "short")}
    fleet = replace(FLEET, lanes=lanes, pools=(SHORT, replace(LONG, block_size=8)))
    answer = demand(5000, fleet=fleet, max_tokens=4000)
    assert (answer.lane, answer.output_tokens, answer.blocks) == ("long", 3192, 1024)


def test_lists_are_judged_by_their_longest_prompt_and_charged_by_all() -> None:
    answer = demand(5000, 10, endpoint=Endpoint.COMPLETIONS, prompt=["a", "b"], max_tokens=17, n=2)
    assert (answer.lane, answer.sequences) == ("long", 4)
    assert (answer.prompt_tokens, answer.longest_prompt_tokens) == (5010, 5000)
    assert answer.blocks == answer.unshared_blocks == 2 * (314 + 2)
    assert answer.prefill == 5010


def test_a_shared_prompt_is_reserved_once_but_counts_in_full() -> None:
    answer = demand(1600, fleet=replace(FLEET, share_prompt_of_n=True), n=8, max_tokens=160)
    assert (answer.blocks, answer.unshared_blocks) == (99 + 8 * 11, 880)
    assert answer.cost == 880 * 5


@pytest.mark.parametrize(("cut", "tokens"), [(0, 5000), (100, 100), (6000, 5000), (-1, 5000)])
def test_a_prompt_is_no_longer_than_the_engine_leaves_it(cut: int, tokens: int) -> None:
    assert demand(5000, truncate_prompt_tokens=cut).longest_prompt_tokens == tokens


def test_a_prompt_that_the_engine_cuts_to_its_context_fits() -> None:
    answer = demand(99_999, truncate_prompt_tokens=-1, max_tokens=768)
    assert (answer.longest_prompt_tokens, answer.output_tokens) == (32_000, 768)


@pytest.mark.parametrize(
    "fleet",
    [
        replace(FLEET, lanes={"short": ("short", "long")}),
        replace(FLEET, pools=(replace(SHORT, context_max=32768), LONG)),
    ],
    ids=["pools of a lane", "replicas of a pool"],
)
def test_a_cut_to_the_context_is_none_where_engines_of_a_lane_differ_in_it(fleet: FleetShape) -> None:
    answer = demand(20_000, fleet=fleet, truncate_prompt_tokens=-1, max_tokens=4097)
    assert (answer.lane, answer.longest_prompt_tokens) == ("long", 20_000)


def test_a_prompt_is_not_cut_by_an_output_limit_that_is_clamped_for_a_smaller_engine() -> None:
    fleet = replace(FLEET, pools=(replace(SHORT, context_max=8292),))
    answer = demand(4000, fleet=fleet, truncate_prompt_tokens=-1, max_tokens=8000)
    assert (answer.longest_prompt_tokens, answer.output_tokens) == (4000, 4192)


# Refusals


def test_a_prompt_over_every_context() -> None:
    answer = refusal(32_768, max_tokens=1)
    assert (answer.code, answer.param, answer.should_retry) == (
        Code.CONTEXT_LENGTH_EXCEEDED,
        "messages",
        False,
    )
    assert "32768" in answer.message
    assert "32767" in answer.message
    bounded = replace(FLEET, pools=(SHORT,))
    assert "4096" in refusal(4097, fleet=bounded, max_tokens=1).message


def test_a_demand_over_the_blocks_of_every_engine() -> None:
    pools = (replace(LONG, max_model_len=262_144, usable_max=4000),)
    fleet = replace(FLEET, pools=pools)
    assert demand(64_000, fleet=fleet, max_tokens=1).blocks == 4000
    answer = refusal(64_000, fleet=fleet, max_tokens=2)
    assert (answer.code, answer.should_retry, answer.retry_ms) == (Code.CONTEXT_LENGTH_EXCEEDED, False, None)
    assert "4001 KV blocks (1 sequence with a prompt of" in answer.message
    assert "4000" in answer.message
    assert "(2 sequences, each with a prompt of" in refusal(64_000, fleet=fleet, n=2, max_tokens=2).message


def test_more_sequences_than_any_engine_runs() -> None:
    answer = refusal(1, n=257, max_tokens=1)
    assert (answer.code, answer.param, answer.should_retry) == (Code.TOO_MANY_SEQUENCES, "n", False)


def test_a_key_has_its_longest_context_and_its_cap_on_blocks() -> None:
    limits = KeyLimits(context_tokens_max=2000, blocks_max=64)
    assert demand(1000, limits=limits, max_tokens=25).blocks == 64
    cap = refusal(1000, limits=limits, max_tokens=26)
    assert (cap.code, cap.should_retry) == (Code.KEY_CAP_EXCEEDED, False)
    assert "65" in cap.message
    assert "64" in cap.message
    context = refusal(2001, limits=limits)
    assert context.code is Code.CONTEXT_NOT_CLEARED
    assert "2001" in context.message
    assert "2000" in context.message


def test_a_keys_cap_counts_a_shared_prompt_in_full() -> None:
    fleet = replace(FLEET, share_prompt_of_n=True)
    assert (
        refusal(1600, fleet=fleet, limits=KeyLimits(blocks_max=879), n=8, max_tokens=160).code
        is Code.KEY_CAP_EXCEEDED
    )


def test_a_fleet_whose_engines_have_not_told_their_capacity() -> None:
    answer = refusal(1, fleet=replace(FLEET, pools=()))
    assert answer.code is Code.NO_BACKEND
    assert answer.retry_ms


UNTOLD = replace(FLEET, complete=False)


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (32_768, {"max_tokens": 1}),
        (1, {"n": 257, "max_tokens": 1}),
        (8000, {"n": 50, "max_tokens": 10}),
        (100, {"max_tokens": 32_769}),
        (32_000, {"min_tokens": 800, "max_tokens": 900}),
    ],
)
def test_what_an_engine_that_has_not_told_its_capacity_may_hold_is_not_refused_for_good(
    tokens: int, fields: dict[str, Any]
) -> None:
    assert refusal(tokens, **fields).code is not Code.NO_BACKEND
    for answer in (
        refusal(tokens, fleet=UNTOLD, **fields),
        hopeless(UNTOLD, request(**fields), tokens, FREE),
    ):
        assert answer is not None
        assert (answer.code, answer.should_retry) == (Code.NO_BACKEND, None)
        assert answer.retry_ms


def test_no_engine_changes_what_the_operator_or_the_client_forbids() -> None:
    fleet = replace(UNTOLD, max_output_tokens=500)
    assert refusal(100, fleet=fleet, max_tokens=40_000).code is Code.OUTPUT_LIMIT_EXCEEDED
    assert refusal(100, fleet=UNTOLD, min_tokens=1025).param == "min_tokens"
    limits = KeyLimits(context_tokens_max=2000, blocks_max=64)
    assert refusal(40_000, fleet=UNTOLD, limits=limits).code is Code.CONTEXT_NOT_CLEARED
    assert refusal(1000, fleet=UNTOLD, limits=limits).code is Code.KEY_CAP_EXCEEDED


# Bounds

POOLS = st.lists(
    st.builds(
        PoolShape,
        st.just(""),
        st.none(),
        st.integers(2, 400),
        st.sampled_from([1, 16, 32]),
        st.integers(1, 60),
        st.sampled_from([1, 2, 8]),
    ),
    min_size=1,
    max_size=3,
)


TURNS = {"model": "demo", "input": "x", "max_output_tokens": 10}
OWN_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def turns(tools: Any, **fleet: Any) -> Demand:
    answer = route(
        replace(FLEET, **fleet), request(Endpoint.RESPONSES, **TURNS, tools=tools), [100], KeyLimits()
    )
    assert isinstance(answer, Demand), answer
    return answer


def test_an_engine_that_runs_tools_may_come_to_its_contexts_end() -> None:
    """Each turn has all before it as its prompt, and the whole output limit anew."""
    pool = FLEET.pools[0]
    one_turn, limit = turns(None).blocks, turns(None).output_tokens
    for tools in ([OWN_TOOL], [{"type": "function", "name": "f"}, OWN_TOOL], [{"type": "mcp"}], [{}], [1]):
        if tools != [1]:
            assert turns(tools).blocks == one_turn, "these engines run none"
        found = turns(tools, engine_tools=True)
        assert found.blocks == min(-(-(pool.max_model_len - 1) // pool.block_size), pool.usable_max)
        assert (found.output_tokens, found.prompt_tokens) == (limit, 100), (
            "what is written stays the client's"
        )
    for tools in (None, [], [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]):
        assert turns(tools, engine_tools=True).blocks == one_turn


def test_a_call_is_not_refused_for_turns_that_it_may_never_take() -> None:
    pool = replace(FLEET.pools[0], usable_max=10)
    assert turns([OWN_TOOL], engine_tools=True, pools=(pool,), lanes={}).blocks == 10


def test_turns_may_come_to_the_end_of_the_longest_context() -> None:
    pool = replace(FLEET.pools[0], max_model_len=1000, context_max=2000, block_size=10, usable_max=500)
    assert turns([OWN_TOOL], engine_tools=True, pools=(pool,), lanes={}).blocks == 200


@st.composite
def fleets(draw: st.DrawFn) -> FleetShape:
    pools = draw(POOLS)
    bounds = sorted(draw(st.lists(st.integers(1, 300), min_size=len(pools) - 1, max_size=len(pools) - 1)))
    named = [
        replace(p, name=f"p{i}", max_prompt_tokens=b)
        for i, (p, b) in enumerate(zip(pools, [*bounds, None], strict=True))
    ]
    named = [
        replace(p, context_max=p.max_model_len + draw(st.sampled_from([1, 50]))) if draw(st.booleans()) else p
        for p in named
    ]
    pairs = {p.name: (p.name, draw(st.sampled_from(named)).name) for p in named if draw(st.booleans())}
    share = draw(st.booleans())
    return replace(FLEET, pools=tuple(named), lanes=pairs, share_prompt_of_n=share, default_output_tokens=20)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 300),
        "n": st.integers(1, 4),
        "truncate_prompt_tokens": st.sampled_from([-1, 0, 5, 50]),
    },
)


@given(
    fleets(),
    FIELDS,
    st.lists(st.integers(1, 420), min_size=1, max_size=2),
    st.integers(0, 400),
    st.integers(0, 400),
    st.builds(KeyLimits, st.none() | st.just(100), st.none(), st.none() | st.just(20)),
)
def test_bounds_never_contradict_the_count(
    fleet: FleetShape, fields: dict[str, Any], tokens: list[int], less: int, more: int, limits: KeyLimits
) -> None:
    call = request(Endpoint.COMPLETIONS, prompt=["x"] * len(tokens), **fields)
    low, high = max(1, max(tokens) - less), max(tokens) + more
    answer = route(fleet, call, tokens, limits)
    if hopeless(fleet, call, low, limits) is not None:
        assert isinstance(answer, Refusal)
    if isinstance(answer, Demand):
        assert answer.lane in candidate_lanes(fleet, call, low, high, limits)


@given(fleets(), FIELDS, st.integers(1, 420), st.integers(0, 420), st.integers(0, 2000))
def test_what_is_certain_before_the_count_holds_after_it(
    fleet: FleetShape, fields: dict[str, Any], tokens: int, less: int, more: int
) -> None:
    """Wherever it goes and whatever it needs, if it can run at all, and the likely lane is the last one."""
    call = request(**fields)
    answer = route(fleet, call, [tokens], FREE)
    found = outlooks(fleet, call, max(1, tokens - less), tokens + more, FREE)
    if not found or isinstance(answer, Refusal):
        return
    assert answer.blocks >= {outlook.likely.lane: outlook.blocks_min for outlook in found}[answer.lane]


def test_the_likely_lane_is_asked_last() -> None:
    """40,000 bytes are 10,000 tokens, which only one pool takes; or a few, which both do."""
    found = outlooks(FLEET, request(max_tokens=16), 400, 40_000, FREE)
    assert [outlook.likely.lane for outlook in found] == ["short", "long"]
    assert [outlook.blocks_min for outlook in found] == [26, 26]
    assert found[-1].likely.blocks == (10_000 + 16) // 16
    found = outlooks(FLEET, request(max_tokens=16), 400, 8_000, FREE)
    assert [outlook.likely.lane for outlook in found] == ["long", "short"]


def test_a_prompt_that_is_likely_too_long_is_taken_for_the_longest_that_fits() -> None:
    fleet = replace(FLEET, pools=(replace(SHORT, max_prompt_tokens=None, usable_max=500),))
    (found,) = outlooks(fleet, request(max_tokens=16), 400, 40_000, FREE)
    assert (found.blocks_min, found.likely.blocks) == (26, 500)


def test_nothing_is_certain_of_several_prompts() -> None:
    call = request(Endpoint.COMPLETIONS, prompt=["x", "y"], max_tokens=16)
    assert outlooks(FLEET, call, 400, 8_000, FREE) == ()


@given(fleets(), FIELDS, st.integers(1, 420))
def test_a_demand_always_fits_where_it_is_sent(
    fleet: FleetShape, fields: dict[str, Any], tokens: int
) -> None:
    answer = route(fleet, request(**fields), [tokens], FREE)
    if isinstance(answer, Refusal):
        return
    pool = next(p for p in fleet.pools if p.name == answer.lane)
    assert answer.blocks <= pool.usable_max
    assert answer.sequences <= pool.sequences_max
    names = fleet.lanes.get(pool.name, (pool.name,))
    context = min(p.max_model_len for p in fleet.pools if p.name in names)
    assert answer.longest_prompt_tokens + answer.output_tokens <= context
    assert answer.output_tokens >= 1
    assert answer.cost >= 1


@given(fleets(), FIELDS, st.integers(1, 420))
def test_no_engine_of_the_lane_keeps_more_of_a_prompt_than_was_charged(
    fleet: FleetShape, fields: dict[str, Any], tokens: int
) -> None:
    answer = route(fleet, request(**fields | {"truncate_prompt_tokens": -1}), [tokens], FREE)
    if isinstance(answer, Refusal):
        return
    names = fleet.lanes.get(answer.lane, (answer.lane,))
    for pool in fleet.pools:
        if pool.name in names:
            kept = min(tokens, (pool.context_max or pool.max_model_len) - answer.output_tokens)
            assert kept <= answer.longest_prompt_tokens


def test_hopeless_calls_need_no_count() -> None:
    answer = hopeless(FLEET, request(), 40_000, FREE)
    assert answer is not None
    assert answer.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert answer.should_retry is False
    assert hopeless(FLEET, request(), 30_000, FREE) is None
    many = request(n=50, max_tokens=10)
    answer = hopeless(FLEET, many, 8000, FREE)
    assert answer is not None
    assert "25050 KV blocks" in answer.message


@pytest.mark.parametrize(
    ("low", "high", "lanes"),
    [
        (1, 4000, ("short",)),
        (1, 4097, ("short", "long")),
        (5000, 6000, ("long",)),
        (4000, 40_000, ("short", "long")),
    ],
)
def test_candidate_lanes(low: int, high: int, lanes: tuple[str, ...]) -> None:
    assert candidate_lanes(FLEET, request(max_tokens=16), low, high, FREE) == lanes


def test_nothing_is_hopeless_or_settled_where_a_longer_prompt_needs_fewer_shared_blocks() -> None:
    pools = (replace(SHORT, usable_max=10), LONG)
    fleet = replace(FLEET, share_prompt_of_n=True, pools=pools)
    fields: dict[str, Any] = {"n": 8, "max_tokens": 16}
    assert (demand(16, fleet=fleet, **fields).lane, demand(17, fleet=fleet, **fields).lane) == (
        "long",
        "short",
    )
    call = request(**fields)
    assert candidate_lanes(fleet, call, 16, 17, FREE) == ("short", "long")
    assert hopeless(replace(fleet, pools=pools[:1]), call, 16, FREE) is None


def test_a_keys_cap_is_not_judged_on_bounds() -> None:
    fleet = replace(FLEET, pools=(replace(SHORT, max_prompt_tokens=10, block_size=1), LONG))
    limits = KeyLimits(blocks_max=5)
    assert refusal(10, fleet=fleet, limits=limits, max_tokens=1).code is Code.KEY_CAP_EXCEEDED
    assert demand(11, fleet=fleet, limits=limits, max_tokens=1).blocks == 1
    assert hopeless(fleet, request(max_tokens=1), 10, limits) is None


# What is warm


WARM_SHORT = replace(SHORT, prefix_caching=True, replicas=("a", "b"))
WARM_LONG = replace(LONG, prefix_caching=True, replicas=("c",))
WARM = replace(FLEET, pools=(WARM_SHORT, WARM_LONG), share_prefixes=True)
OVERFLOWING = replace(WARM, lanes={"short": ("short", "long"), "long": ("long",)})


def warm_demand(
    tokens: int, cached: dict[str, int], fleet: FleetShape = OVERFLOWING, **fields: Any
) -> Demand:
    answer = route(fleet, request(**{"max_tokens": 16, **fields}), [tokens], FREE, cached)
    assert isinstance(answer, Demand), answer
    return answer


def sent(
    tokens: int, cached: dict[str, int], fleet: FleetShape = OVERFLOWING, **fields: Any
) -> tuple[Any, ...]:
    answer = warm_demand(tokens, cached, fleet, **fields)
    return answer.lane, answer.exclude


def test_a_long_prompt_goes_to_the_pool_where_little_of_it_is_left_to_compute() -> None:
    assert sent(6000, {}) == ("long", ())
    assert sent(6000, {"a": 1904}) == ("short", ("b",))
    assert sent(6000, {"a": 1903}) == ("long", ())
    assert sent(6000, {"a": 1904, "b": 6000}) == ("short", ())
    assert sent(6000, {"c": 5999}) == ("long", ())
    assert sent(4096, {"c": 4000}) == ("short", ()), "a prompt that is short enough is none of its business"


def test_the_context_of_a_pool_is_a_matter_of_the_whole_call() -> None:
    assert sent(8191, {"a": 8000}, max_tokens=1) == ("short", ("b",))
    assert sent(8192, {"a": 8000}, max_tokens=1) == ("long", ())
    assert sent(8000, {"a": 8000}, max_tokens=193) == ("long", ()), "it would be given less output"
    assert warm_demand(8000, {"a": 8000}, max_tokens=192).blocks == 512


def test_without_overflow_all_replicas_of_the_pool_have_to_have_it() -> None:
    assert sent(6000, {"a": 5000}, WARM) == ("long", ())
    assert sent(6000, {"a": 5000, "b": 5000}, WARM) == ("short", ())


def test_any_pool_that_can_hold_it_may_be_the_warm_one() -> None:
    middle = replace(WARM_SHORT, name="middle", max_prompt_tokens=5000, max_model_len=16_384, replicas=("m",))
    fleet = replace(WARM, pools=(WARM_SHORT, middle, WARM_LONG))
    assert sent(10_000, {"m": 5000}, fleet) == ("middle", ())
    assert sent(10_000, {"m": 4999}, fleet) == ("long", ())
    assert sent(8_000, {"a": 4000, "b": 4000, "m": 8000}, fleet) == ("short", ())


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"share_prefixes": False}, {}),
        ({"speculative_tokens": 1}, {}),
        ({"pools": (replace(WARM_SHORT, prefix_caching=False), WARM_LONG)}, {}),
        ({"pools": (replace(WARM_SHORT, block_size=32), WARM_LONG)}, {}),
        ({"lanes": {"short": ("long",), "long": ("long",)}}, {}),
        ({}, {"n": 2}),
        ({}, {"truncate_prompt_tokens": 8000}),
    ],
)
def test_where_nothing_is_kept_only_the_length_counts(
    changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert sent(6000, {"a": 5000, "b": 5000}, replace(OVERFLOWING, **changes), **fields) == ("long", ())


def test_what_no_pool_takes_by_its_length_is_refused_however_warm_it_is() -> None:
    pools = (WARM_SHORT, replace(WARM_LONG, max_prompt_tokens=5000))
    answer = route(replace(WARM, pools=pools), request(), [6000], FREE, {"a": 6000, "b": 6000})
    assert isinstance(answer, Refusal)
    assert answer.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_before_it_is_counted_a_call_may_go_wherever_it_may_be_warm() -> None:
    call = request(max_tokens=16)
    assert candidate_lanes(OVERFLOWING, call, 6000, 6000, FREE) == ("short", "long")
    assert candidate_lanes(OVERFLOWING, call, 8192, 8192, FREE) == ("long",)
    assert candidate_lanes(OVERFLOWING, request(max_tokens=16, n=2), 6000, 6000, FREE) == ("long",)
    found = outlooks(OVERFLOWING, call, 6000, 6000 * 4, FREE)
    assert [outlook.likely.lane for outlook in found] == ["short", "long"]


@st.composite
def warm_fleets(draw: st.DrawFn) -> FleetShape:
    """Pools that are alike but for their bounds and contexts; a lane leads on to none, one or all of the next."""
    count = draw(st.integers(2, 4))
    bounds = sorted(draw(st.lists(st.integers(1, 200), min_size=count - 1, max_size=count - 1)))
    pools = tuple(
        PoolShape(
            f"p{i}",
            bound,
            max_model_len=draw(st.sampled_from([150, 300, 450])),
            block_size=4,
            usable_max=draw(st.sampled_from([40, 200, 200])),
            sequences_max=8,
            prefix_caching=draw(st.sampled_from([True, True, True, False])),
            replicas=tuple(f"p{i}r{r}" for r in range(draw(st.integers(1, 3)))),
        )
        for i, bound in enumerate([*bounds, None])
    )
    names = [pool.name for pool in pools]
    lanes = {name: tuple(names[i : i + draw(st.sampled_from([1, 2, count]))]) for i, name in enumerate(names)}
    return replace(FLEET, pools=pools, lanes=lanes, share_prefixes=True, default_output_tokens=20)


WARM_FIELDS = st.fixed_dictionaries({}, optional={"max_tokens": st.integers(1, 60)})


@settings(max_examples=500)
@given(warm_fleets(), WARM_FIELDS, st.integers(1, 420), st.integers(0, 400), st.integers(0, 400), st.data())
def test_no_replica_has_more_to_compute_than_its_pool_allows(
    fleet: FleetShape, fields: dict[str, Any], tokens: int, less: int, more: int, data: st.DataObject
) -> None:
    call = request(**fields)
    names = [name for pool in fleet.pools for name in pool.replicas]
    parts = st.sampled_from([0, tokens // 2, tokens - 1, tokens - 1])
    cached = data.draw(st.fixed_dictionaries(dict.fromkeys(names, parts)))
    cold, warm = route(fleet, call, [tokens], FREE), route(fleet, call, [tokens], FREE, cached)
    if isinstance(cold, Refusal) or isinstance(warm, Refusal):
        assert cold == warm
        return
    low, high = max(1, tokens - less), tokens + more
    assert warm.lane in candidate_lanes(fleet, call, low, high, FREE)
    found = {outlook.likely.lane: outlook.blocks_min for outlook in outlooks(fleet, call, low, high, FREE)}
    assert warm.blocks >= found.get(warm.lane, 0)
    assert not found or warm.lane in found
    if warm == cold:
        return
    lanes = [pool.name for pool in fleet.pools]
    assert lanes.index(warm.lane) < lanes.index(cold.lane)
    assert warm.output_tokens >= cold.output_tokens
    pools = [pool for pool in fleet.pools if pool.name in fleet.lanes.get(warm.lane, (warm.lane,))]
    assert tokens + warm.output_tokens <= min(pool.max_model_len for pool in pools)
    for pool in pools:
        for name in {*pool.replicas} - {*warm.exclude}:
            left = tokens - (cached.get(name, 0) if pool.prefix_caching else 0)
            assert pool.max_prompt_tokens is None or left <= pool.max_prompt_tokens
    assert any(not {*pool.replicas} & {*warm.exclude} for pool in pools)
    own = next(pool for pool in pools if pool.name == warm.lane)
    assert {*own.replicas} - {*warm.exclude}
