"""The pure engine step by step, and its books against themselves; `test_truth` has the measured loads."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock.engine import Engine, EngineConfig, Request, Sizes, Step
from gateway.mock.pool import Content, content
from gateway.mock.tokenizer import word

MEASURED = EngineConfig(blocks=256, block_size=32, max_model_len=4096)
"""255 usable blocks of 32."""


def load(config: EngineConfig, number: int, prompt: int, output: int) -> Engine:
    engine = Engine(config)
    for i in range(number):
        engine.add(Request(str(i), (Sizes(prompt, output),)))
    return engine


def drain(engine: Engine) -> int:
    """Step until nothing moves; the most blocks ever used."""
    peak = 0
    while not (step := engine.schedule()).idle:
        peak = max(peak, engine.blocks_used)
        engine.complete(step)
    return peak


def test_the_largest_sequence_that_fits_runs_alone() -> None:
    engine = load(replace(MEASURED, max_model_len=16384), 1, 33, 255 * 32 - 32)
    assert drain(engine) == 255
    assert engine.preemptions == 0
    assert not engine.waiting


@pytest.mark.parametrize(("prompt", "output"), [(256 * 32, 1), (33, 255 * 32 - 31)])
def test_a_sequence_over_the_pool_blocks_everything_behind_it(prompt: int, output: int) -> None:
    engine = Engine(replace(MEASURED, max_model_len=16384))
    engine.add(Request("whale", (Sizes(prompt, output),)))
    for _ in range(255 * 32):
        engine.step()
    engine.add(Request("minnow", (Sizes(1, 1),)))
    drain(engine)
    assert [sequence.request_id for sequence in engine.waiting] == ["whale", "minnow"]
    assert (engine.running, engine.blocks_used) == ([], 0)
    engine.abort("whale")
    drain(engine)
    assert not engine.waiting


def test_a_step_takes_base_prefill_and_running_time() -> None:
    config = EngineConfig(step_base_ms=10, step_prefill_us=100, step_running_us=500)
    engine = load(config, 2, 30, 3)
    assert engine.step().duration_ms == pytest.approx(10 + 60 * 0.1 + 2 * 0.5)
    assert engine.step().duration_ms == pytest.approx(10 + 2 * 0.5)


def test_a_step_takes_time_for_the_kv_that_it_reads() -> None:
    engine = load(
        EngineConfig(step_base_ms=10, step_prefill_us=0, step_running_us=0, step_kv_us=100), 2, 30, 3
    )
    assert engine.step().duration_ms == pytest.approx(10 + 60 * 0.1)
    assert engine.step().duration_ms == pytest.approx(10 + 62 * 0.1)


def test_prefill_is_cut_into_chunks_and_decode_goes_first() -> None:
    engine = load(EngineConfig(max_num_batched_tokens=100), 1, 10, 50)
    engine.step()
    engine.add(Request("long", (Sizes(250, 1),)))
    chunks = [[count for _, count in engine.step().work] for _ in range(3)]
    assert chunks == [[1, 99], [1, 99], [1, 52]]


def test_the_preempted_sequence_is_the_youngest_and_comes_back_first() -> None:
    engine = Engine(EngineConfig(blocks=9, block_size=4))
    for name in ("old", "young", "waiting"):
        engine.add(Request(name, (Sizes(12, 8),)))
    step = engine.step()
    assert [sequence.request_id for sequence in step.admitted] == ["old", "young"]
    while not step.preempted:
        step = engine.step()
    assert [sequence.request_id for sequence in step.preempted] == ["young"]
    assert [sequence.request_id for sequence in engine.waiting] == ["young", "waiting"]
    known = engine.waiting[0].known
    while not step.admitted:
        step = engine.step()
    assert step.work[0] == (step.admitted[0], known)  # all of it is computed again
    drain(engine)
    assert engine.generation_tokens == 3 * 8


def test_a_waiting_prompt_needs_room_for_all_of_it_not_only_its_first_chunk() -> None:
    engine = Engine(EngineConfig(blocks=11, block_size=10, max_num_batched_tokens=20))
    engine.add(Request("holder", (Sizes(20, 1000),), held=True))
    engine.step()
    engine.add(Request("long", (Sizes(90, 1),)))
    assert engine.step().admitted == []
    engine.abort("holder")
    assert len(engine.step().admitted) == 1


def test_max_num_seqs_bounds_running() -> None:
    engine = load(EngineConfig(max_num_seqs=3), 5, 4, 10)
    engine.step()
    assert (len(engine.running), len(engine.waiting)) == (3, 2)


def test_abort_frees_at_once_even_between_schedule_and_complete() -> None:
    engine = load(MEASURED, 2, 100, 10)
    step = engine.schedule()
    assert engine.blocks_used == 8
    assert engine.abort("0")
    assert engine.blocks_used == 4
    engine.complete(step)
    assert [token.request_id for token in step.tokens] == ["1"]
    assert not engine.abort("0")


def test_a_held_request_keeps_its_prompt_blocks_and_samples_nothing_until_released() -> None:
    engine = Engine(MEASURED)
    engine.add(Request("held", (Sizes(65, 3),), held=True))
    assert computed(engine.step()) == {"held": 64}
    assert engine.blocks_used == 3
    assert engine.step().idle
    engine.release("held")
    drain(engine)
    assert engine.generation_tokens == 3


def test_sequences_of_one_request_are_numbered_and_end_by_themselves() -> None:
    engine = Engine(MEASURED)
    engine.add(Request("a", (Sizes(4, 1), Sizes(8, 2))))
    tokens = [(t.index, t.number, t.last) for _ in range(2) for t in engine.step().tokens]
    assert tokens == [(0, 1, True), (1, 1, False), (1, 2, True)]
    engine.add(Request("a", (Sizes(1, 1),)))  # the id is free again


def test_an_id_in_use_and_a_pool_without_blocks_are_refused() -> None:
    engine = load(MEASURED, 1, 4, 4)
    with pytest.raises(ValueError, match="already"):
        engine.add(Request("0", (Sizes(1, 1),)))
    with pytest.raises(ValueError, match="blocks"):
        EngineConfig(blocks=1)
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineConfig(max_num_seqs=0)
    with pytest.raises(ValueError, match="watermark"):
        EngineConfig(watermark=-0.1)
    with pytest.raises(ValueError, match="scheduling_policy"):
        EngineConfig(scheduling_policy="lifo")


def prompt_of(tokens: int, seed: int = 0, block_size: int = 4) -> Content:
    return content([f"{seed}.{number // 8}" for number in range(tokens)], block_size)


def talk(tokens: int, output: int, seed: int = 0, block_size: int = 4) -> Sizes:
    return Sizes(tokens, output, prompt_of(tokens, seed, block_size))


CACHED = EngineConfig(blocks=101, block_size=4)


def computed(step: Step) -> dict[str, int]:
    return {sequence.request_id: count for sequence, count in step.work}


@pytest.mark.parametrize(("tokens", "found"), [(12, 8), (13, 12), (3, 0), (4, 0), (5, 4)])
def test_a_prompt_is_found_again_but_for_its_last_token(tokens: int, found: int) -> None:
    engine = Engine(CACHED)
    engine.add(Request("first", (talk(tokens, 1),)))
    drain(engine)
    assert engine.blocks_used == 0
    engine.add(Request("again", (talk(tokens, 2),)))
    assert computed(engine.step()) == {"again": tokens - found}
    assert (engine.prefix_queries, engine.prefix_hits) == (2 * tokens, found)
    assert (engine.prompt_tokens, engine.prompt_tokens_cached) == (2 * tokens, found)


def test_a_conversation_that_goes_on_finds_its_prompt_and_the_reply() -> None:
    engine = Engine(CACHED)
    before = [f"p{number}" for number in range(10)]
    reply = [word(number) for number in range(1, 12)]
    engine.add(Request("first", (Sizes(10, len(reply), content(before, 4)),)))
    drain(engine)
    after = [*before, *reply, *(f"q{number}" for number in range(9))]
    engine.add(Request("goes on", (Sizes(30, 1, content(after, 4)),)))
    # 21 tokens are the same; the KV of the last one was never stored
    assert computed(engine.step()) == {"goes on": 30 - 20}


def test_holders_of_one_prefix_share_its_blocks_from_the_step_that_fills_them_on() -> None:
    engine = Engine(CACHED)
    for name in ("a", "b"):
        engine.add(Request(name, (talk(13, 5),)))
    step = engine.schedule()
    assert computed(step) == {"a": 13, "b": 1}
    assert engine.blocks_used == 3 + 1 + 1
    engine.abort("a")
    assert engine.blocks_used == 3 + 1
    engine.complete(step)
    engine.abort("b")
    assert engine.blocks_used == 0


def test_found_blocks_that_nobody_holds_need_room_as_new_ones_do() -> None:
    engine = Engine(EngineConfig(blocks=8, block_size=4))
    engine.add(Request("first", (talk(16, 1),)))
    drain(engine)
    engine.add(Request("holder", (talk(16, 9, seed=1),), held=True))
    engine.step()
    engine.add(Request("again", (talk(16, 1),)))
    assert engine.step().admitted == []  # 3 blocks are free, and its 3 found ones are among them
    engine.abort("holder")
    assert len(engine.step().admitted) == 1


def test_what_was_left_longest_ago_is_lost_first() -> None:
    engine = Engine(EngineConfig(blocks=7, block_size=4))
    for seed in (1, 2):
        engine.add(Request(str(seed), (talk(12, 1, seed=seed),)))
        drain(engine)
    engine.add(Request("3", (talk(8, 1, seed=3),)))
    drain(engine)
    found = {seed: len(engine.pool.find(prompt_of(12, seed).hashes)) for seed in (1, 2, 3)}
    assert found == {1: 1, 2: 3, 3: 2}


def test_an_unknown_prompt_is_never_found() -> None:
    engine = Engine(CACHED)
    for name in ("a", "b"):
        engine.add(Request(name, (Sizes(13, 9),)))
    drain(engine)
    assert (engine.prefix_queries, engine.prefix_hits) == (26, 0)
    with pytest.raises(ValueError, match="13 tokens, not 12"):
        engine.add(Request("wrong", (Sizes(12, 1, prompt_of(13)),)))


def test_the_cache_can_be_switched_off_and_emptied() -> None:
    off, on = Engine(replace(CACHED, enable_prefix_caching=False)), Engine(CACHED)
    for engine in (off, on):
        engine.add(Request("a", (talk(13, 1),)))
        drain(engine)
    assert on.reset_prefix_cache()
    for engine in (off, on):
        engine.add(Request("b", (talk(13, 5),)))
        assert computed(engine.step()) == {"b": 13}
    assert not on.reset_prefix_cache()
    assert (off.prefix_queries, on.prefix_queries) == (0, 26)


def test_a_preempted_sequence_computes_again_what_is_gone_from_the_cache() -> None:
    engine = Engine(EngineConfig(blocks=9, block_size=4))
    for number, name in enumerate(("old", "young")):
        engine.add(Request(name, (talk(12, 8, seed=number),)))
    step = engine.step()
    while not step.preempted:
        step = engine.step()
    lost = engine.waiting[0].computed_before
    while not step.admitted:
        step = engine.step()
    found = step.admitted[0].computed - computed(step)["young"]
    assert engine.recomputed_tokens == lost - found
    assert 0 < found < lost
    assert engine.prefix_hits == 0  # a second look-up is not counted, as in vLLM


def test_preempting_all_sends_them_back_in_order() -> None:
    engine = load(MEASURED, 3, 10, 5)
    engine.step()
    engine.preempt_all()
    assert (engine.blocks_used, engine.preemptions) == (0, 3)
    assert [sequence.request_id for sequence in engine.waiting] == ["0", "1", "2"]
    drain(engine)
    assert engine.generation_tokens == 15


def test_without_admitting_the_queue_stands_still() -> None:
    engine = load(MEASURED, 2, 10, 3)
    engine.step()
    engine.admitting = False
    engine.add(Request("late", (Sizes(10, 1),)))
    drain(engine)
    assert [sequence.request_id for sequence in engine.waiting] == ["late"]
    engine.admitting = True
    drain(engine)
    assert not engine.waiting


PRIORITY = EngineConfig(blocks=9, block_size=4, scheduling_policy="priority")


def test_an_urgent_arrival_jumps_the_queue_but_takes_nothing_from_who_runs() -> None:
    engine = Engine(PRIORITY)
    engine.add(Request("runs", (Sizes(28, 4),), priority=10))
    engine.step()
    for name, priority in (("low", 10), ("high", -10), ("high later", -10)):
        engine.add(Request(name, (Sizes(8, 1),), priority=priority))
    step = engine.step()
    assert (step.admitted, step.preempted) == ([], [])
    assert [sequence.request_id for sequence in engine.waiting] == ["high", "high later", "low"]


def test_the_least_urgent_is_preempted_also_when_it_was_served_before() -> None:
    """It runs for longer, so it was served first in the step and must give that back; nobody is admitted for it."""
    engine = Engine(replace(PRIORITY, max_num_seqs=2))
    engine.add(Request("low", (Sizes(13, 9),), priority=5))
    engine.step()
    engine.add(Request("high", (Sizes(16, 16),), priority=0))
    engine.add(Request("next", (Sizes(4, 1),), priority=1))
    engine.step()
    assert [sequence.request_id for sequence in engine.running] == ["low", "high"]
    step = engine.step()
    assert [sequence.request_id for sequence in step.preempted] == ["low"]
    assert computed(step) == {"high": 1}
    assert (step.computed_tokens, step.prefill_tokens, step.admitted) == (1, 0, [])
    assert [sequence.request_id for sequence in engine.step().admitted] == ["next"]
    drain(engine)
    assert engine.generation_tokens == 9 + 16 + 1


def test_who_comes_after_is_served_too_when_room_was_made() -> None:
    engine = Engine(PRIORITY)
    engine.add(Request("low", (Sizes(9, 9),), priority=5))
    engine.step()
    engine.add(Request("high", (Sizes(8, 9),), priority=0))
    engine.add(Request("other", (Sizes(11, 9),), priority=0))
    engine.step()
    step = engine.step()
    assert [sequence.request_id for sequence in step.preempted] == ["low"]
    assert computed(step) == {"high": 1, "other": 1}


def test_priorities_mean_nothing_first_come_first_served() -> None:
    engine = Engine(EngineConfig(max_num_seqs=1))
    for name, priority in (("a", 5), ("b", 0), ("c", -5)):
        engine.add(Request(name, (Sizes(4, 1),), priority=priority))
    order = [token.request_id for _ in range(3) for token in engine.step().tokens]
    assert order == ["a", "b", "c"]


def test_the_watermark_stays_free_beside_running_sequences_only() -> None:
    config = EngineConfig(blocks=11, block_size=4, watermark=0.25)
    assert config.watermark_blocks == 2
    engine = Engine(config)
    engine.add(Request("alone", (Sizes(40, 1),)))
    assert len(engine.step().admitted) == 1
    engine.add(Request("first", (Sizes(4, 9),)))
    engine.add(Request("too much", (Sizes(29, 1),)))  # 8 of 9 free blocks
    assert [sequence.request_id for sequence in engine.step().admitted] == ["first"]
    engine.abort("too much")
    engine.add(Request("fits", (Sizes(24, 1),)))
    assert len(engine.step().admitted) == 1


def test_long_prompts_are_cut_smaller_beside_others() -> None:
    engine = Engine(EngineConfig(long_prefill_token_threshold=10))
    engine.add(Request("long", (Sizes(100, 1),), held=True))
    assert computed(engine.step()) == {"long": 99}
    for name in ("a", "b"):
        engine.add(Request(name, (Sizes(35, 1),)))
    chunks = [computed(engine.step()) for _ in range(4)]
    assert chunks == [{"a": 10, "b": 10}] * 3 + [{"a": 5, "b": 5}]


def test_who_wants_log_probabilities_of_its_prompt_reads_nothing_but_is_read() -> None:
    engine = Engine(CACHED)
    telling = replace(talk(13, 9), reads_cache=False)
    for name, sizes in (("a", talk(13, 9)), ("telling", telling), ("b", talk(13, 9))):
        engine.add(Request(name, (sizes,)))
    assert computed(engine.step()) == {"a": 13, "telling": 13, "b": 1}
    assert (engine.prefix_queries, engine.prefix_hits) == (26, 12)
    assert engine.blocks_used == 3 + 1 + 4 + 1
    engine.abort("a")
    engine.abort("b")
    engine.reset_prefix_cache()
    engine.add(Request("last", (talk(13, 9),)))
    assert computed(engine.step()) == {"telling": 1, "last": 1}


def test_calls_in_the_middle_of_one_prompt_keep_a_copy_each_and_the_first_one_is_found() -> None:
    """Also after its holder has left: then there is one more copy than somebody counts who counts one for all."""
    engine = Engine(replace(CACHED, long_prefill_token_threshold=4))
    for name in ("a", "b"):
        engine.add(Request(name, (talk(17, 9),)))
    for _ in range(5):
        engine.step()
    held = {sequence.request_id: sequence.blocks for sequence in engine.running}
    assert held["a"][0] is held["b"][0]
    assert all(one is not other for one, other in zip(held["a"][1:4], held["b"][1:4], strict=True))
    engine.abort("b")  # it was a chunk ahead, having found the first one
    engine.add(Request("c", (talk(17, 9),)))
    engine.step()
    assert engine.running[-1].blocks[1] is held["b"][1]


@given(
    st.integers(12, 40),
    st.sampled_from([3, 7, 100]),
    st.lists(st.one_of(st.integers(1, 12), st.integers(-6, 0)), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_calls_that_begin_alike_hold_one_copy_of_it(blocks: int, budget: int, ops: list[int]) -> None:
    """Whenever they come and go, and whoever is preempted: what the books of shared prefixes rest on.

    A positive number adds a call that has so many tokens of its own behind 13 that all share, a negative one lets one
    of those there leave, 0 steps.
    """
    engine = Engine(EngineConfig(blocks=blocks, block_size=4, max_num_batched_tokens=budget))
    common = [f"all.{number}" for number in range(13)]
    for number, op in enumerate(ops):
        if op > 0:
            own = [f"{number}.{place}" for place in range(op)]
            prompt = content([*common, *own], 4)
            engine.add(Request(str(number), (Sizes(13 + op, 5, prompt),)))
        elif op < 0:
            here = sorted(engine.request_ids())
            if here:
                engine.abort(here[op % len(here)])
        engine.step()
        for place in range(3):
            held = [sequence.blocks[place] for sequence in engine.running if len(sequence.blocks) > place]
            assert len(set(held)) <= 1


def test_a_part_of_a_call_keeps_its_numbers() -> None:
    engine = Engine(MEASURED)
    engine.add(Request("a", (Sizes(4, 1), Sizes(4, 1)), indexes=(1, 3)))
    assert [token.index for token in engine.step().tokens] == [1, 3]


def check_books(engine: Engine) -> None:
    config = engine.config
    holders = Counter(block for sequence in engine.running for block in sequence.blocks)
    assert engine.blocks_used == len(holders)
    assert all(block.holders == count for block, count in holders.items())
    assert all(block.hash for block, count in holders.items() if count > 1)
    assert engine.pool.used + engine.pool.free == config.usable_blocks
    assert 0 <= engine.blocks_used <= config.usable_blocks
    assert len(engine.running) <= config.max_num_seqs
    assert all(not sequence.blocks and not sequence.running for sequence in engine.waiting)
    assert [sequence.rank for sequence in engine.waiting] == sorted(s.rank for s in engine.waiting)
    for sequence in engine.running:
        sizes = sequence.sizes
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        assert len(sequence.blocks) <= config.blocks_for(sizes.prompt_tokens + sizes.output_tokens - 1)
        assert sequence.computed <= sequence.known


CONFIGS = st.builds(
    EngineConfig,
    blocks=st.integers(2, 40),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.sampled_from([1, 3, 256]),
    max_num_batched_tokens=st.sampled_from([1, 7, 8192]),
    enable_prefix_caching=st.booleans(),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    watermark=st.sampled_from([0.0, 0.2]),
    long_prefill_token_threshold=st.sampled_from([0, 3]),
)
SIZES = st.builds(Sizes, prompt_tokens=st.integers(1, 200), output_tokens=st.integers(1, 60))


def with_content(sizes: Sizes, config: EngineConfig, number: int) -> Sizes:
    """Prompts of three families, each the beginning of a longer one."""
    return replace(sizes, prompt=prompt_of(sizes.prompt_tokens, number % 3, config.block_size))


OPS = st.one_of(
    st.tuples(st.just("add"), st.lists(SIZES, min_size=1, max_size=3), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 20), st.booleans()),
)


def play(
    engine: Engine, ops: list[tuple[str, list[Sizes] | int, bool]], tokens: Counter[tuple[str, int]]
) -> None:
    """Run generated commands, also between schedule and complete, and check the books after each."""
    step: Step | None = None
    for number, (op, value, flag) in enumerate(ops):
        if op == "add" and isinstance(value, list):
            sizes = tuple(with_content(size, engine.config, number) for size in value)
            engine.add(Request(str(number), sizes, held=flag, priority=number % 2))
        live = list(engine.request_ids())
        if op == "abort" and live:
            engine.abort(live[value % len(live)])
        if op == "release" and live:
            engine.release(live[value % len(live)])
        for _ in range(value if op == "step" else 0):
            step = step or engine.schedule()
            check_books(engine)
            assert step.computed_tokens <= engine.config.max_num_batched_tokens
            if flag:
                break  # left open: what follows happens while the step runs
            engine.complete(step)
            for token in step.tokens:
                tokens[token.request_id, token.index] += 1
                assert token.number == tokens[token.request_id, token.index]
            step = None
            check_books(engine)
        check_books(engine)


@given(CONFIGS, st.lists(OPS, max_size=30))
@settings(max_examples=60, deadline=None)
def test_books_hold_whatever_happens(
    config: EngineConfig, ops: list[tuple[str, list[Sizes] | int, bool]]
) -> None:
    engine = Engine(config)
    tokens: Counter[tuple[str, int]] = Counter()
    play(engine, ops, tokens)
    for request_id in engine.request_ids():
        engine.abort(request_id)
    assert (engine.blocks_used, engine.running, list(engine.waiting)) == (0, [], [])
    assert engine.generation_tokens == tokens.total()


@given(CONFIGS, st.lists(SIZES, min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_what_fits_alone_always_finishes_with_all_its_tokens(
    config: EngineConfig, sizes: list[Sizes]
) -> None:
    engine = Engine(config)
    fitting = [
        s for s in sizes if config.blocks_for(s.prompt_tokens + s.output_tokens - 1) <= config.usable_blocks
    ]
    for number, size in enumerate(fitting):
        engine.add(Request(str(number), (with_content(size, config, number),), priority=number % 2))
    drain(engine)
    assert not engine.running
    assert not engine.waiting
    assert engine.generation_tokens == sum(size.output_tokens for size in fitting)


@pytest.mark.parametrize(
    ("field", "value"), [("watermark", 1.0), ("step_base_ms", -1.0), ("blocks", 1), ("max_num_seqs", 0)]
)
def test_sizes_that_cannot_be_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(EngineConfig(), **{field: value})
