"""The pure engine against what a real vLLM 0.32.0 did with the same loads, and its books against themselves."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock.engine import Engine, EngineConfig, Request, Sizes, Step

MEASURED = EngineConfig(blocks=256, block_size=32, max_model_len=4096)
"""The pool of the measured engine: 255 usable blocks of 32."""


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


def test_storm_preempts_as_measured() -> None:
    engine = load(MEASURED, 40, 256, 512)
    assert drain(engine) == 255
    assert 30 <= engine.preemptions <= 50  # a real engine: 39
    assert (engine.generation_tokens, engine.prompt_tokens, engine.blocks_used) == (40 * 512, 40 * 256, 0)


@pytest.mark.parametrize(
    ("number", "prompt", "output", "preempts"),
    [
        (15, 32, 512, False),  # 15 x 17 = 255 blocks
        (15, 33, 512, False),  # the last token's KV is never stored: 544 tokens, still 17 blocks
        (15, 34, 512, True),
        (16, 33, 480, True),  # 16 x 16 = 256 blocks, one of them is the null block
        (15, 33, 480, False),
    ],
)
def test_the_pool_is_used_to_the_last_block_and_not_beyond(
    number: int, prompt: int, output: int, preempts: bool
) -> None:
    engine = load(MEASURED, number, prompt, output)
    peak = drain(engine)
    assert (engine.preemptions > 0) == preempts
    assert peak <= 255
    assert engine.generation_tokens == number * output


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
    engine.add(Request("held", (Sizes(64, 3),), held=True))
    engine.step()
    assert engine.blocks_used == 2
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


def check_books(engine: Engine) -> None:
    config = engine.config
    assert engine.blocks_used == sum(sequence.blocks for sequence in engine.running)
    assert 0 <= engine.blocks_used <= config.usable_blocks
    assert len(engine.running) <= config.max_num_seqs
    assert all(sequence.blocks == 0 and not sequence.running for sequence in engine.waiting)
    for sequence in engine.running:
        sizes = sequence.sizes
        assert sequence.blocks <= config.blocks_for(sizes.prompt_tokens + sizes.output_tokens - 1)
        assert sequence.computed <= sequence.known


CONFIGS = st.builds(
    EngineConfig,
    blocks=st.integers(2, 40),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.sampled_from([1, 3, 256]),
    max_num_batched_tokens=st.sampled_from([1, 7, 8192]),
)
SIZES = st.builds(Sizes, prompt_tokens=st.integers(1, 200), output_tokens=st.integers(1, 60))
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
            engine.add(Request(str(number), tuple(value), held=flag))
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
        engine.add(Request(str(number), (size,)))
    drain(engine)
    assert not engine.running
    assert not engine.waiting
    assert engine.generation_tokens == sum(size.output_tokens for size in fitting)
