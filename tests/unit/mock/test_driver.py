"""The driver under a clock that jumps to whatever happens next: paces, states, limits and ranks."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from gateway.mock.driver import Busy, Driver, EngineDead, Plan, Stream
from gateway.mock.engine import EngineConfig, Sizes
from gateway.mock.pool import content

CONFIG = EngineConfig(
    blocks=101, block_size=4, max_num_seqs=4, step_base_ms=10, step_prefill_us=0, step_running_us=0
)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time passes only while everybody sleeps; when nobody will wake up it says so."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selectors.SelectSelector())
        wait = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> list[Any]:
            assert timeout is not None, "everybody waits and nothing will happen"
            self.now += max(0.0, timeout)
            return list(wait(0))

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def play(
    story: Callable[[Driver], Coroutine[Any, Any, None]], config: EngineConfig = CONFIG, speed: float = 1.0
) -> None:
    """Run a story with a driver of its own."""

    async def whole() -> None:
        driver = Driver(config, speed)
        try:
            await story(driver)
        finally:
            await driver.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(whole())


def plan(prompt: int, output: int, choices: int = 1, **options: Any) -> Plan:
    return Plan((Sizes(prompt, output),) * choices, ("length",) * choices, lambda: None, **options)


def known(seed: str, prompt: int, output: int) -> Plan:
    sizes = Sizes(prompt, output, content([f"{seed}{n}" for n in range(prompt)], CONFIG.block_size))
    return Plan((sizes,), ("length",), lambda: None)


def now() -> float:
    return asyncio.get_running_loop().time()


async def tokens_of(stream: Stream) -> list[tuple[int, int]]:
    """(index, number) of every token until the call is finished or stopped."""
    tokens = []
    ended = 0
    while ended < len(stream.plan.sequences) and (token := await stream.next()) is not None:
        tokens.append((token.index, token.number))
        ended += token.last
    return tokens


async def raises(awaitable: Awaitable[object], error: type[Exception]) -> None:
    with pytest.raises(error):
        await awaitable


def test_tokens_come_at_the_pace_of_the_steps() -> None:
    async def story(driver: Driver) -> None:
        await asyncio.sleep(1)
        stream = driver.submit(plan(4, 3))
        times = []
        for _ in range(3):
            await stream.next()
            times.append(now())
        assert times == pytest.approx([1.01, 1.02, 1.03])
        assert (stream.arrived, stream.admitted_at) == (1.0, 1.0)
        assert stream.first_token_at == pytest.approx(1.01)
        assert driver.engine.blocks_used == 0

    play(story)


@pytest.mark.parametrize(("factor", "speed", "seconds"), [(1.0, 2.0, 0.015), (4.0, 2.0, 0.06)])
def test_speed_divides_and_slowness_multiplies_step_times(
    factor: float, speed: float, seconds: float
) -> None:
    async def story(driver: Driver) -> None:
        driver.slow(factor)
        await tokens_of(driver.submit(plan(4, 3)))
        assert now() == pytest.approx(seconds)

    play(story, speed=speed)


def test_a_late_wake_up_shortens_the_next_step() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(4, 3))
        await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        loop.now += 0.012  # the processor was busy
        times = []
        for _ in range(3):
            await stream.next()
            times.append(now())
        assert times == pytest.approx([0.017, 0.02, 0.03])

    play(story)


def test_step_times_count_prefill_and_sequences() -> None:
    async def story(driver: Driver) -> None:
        await tokens_of(driver.submit(plan(100, 1, choices=2)))
        assert now() == pytest.approx(0.010 + 200 * 0.0001 + 2 * 0.001)

    play(story, replace(CONFIG, step_prefill_us=100, step_running_us=1000))


def test_senseless_speeds_are_refused() -> None:
    with pytest.raises(ValueError, match="speed"):
        Driver(CONFIG, 0)

    async def story(driver: Driver) -> None:
        with pytest.raises(ValueError, match="factor"):
            driver.slow(0)

    play(story)


def test_a_reader_that_is_behind_takes_all_at_hand() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(4, 5))
        await asyncio.sleep(0.035)
        assert [token.number for token in stream.take()] == [1, 2, 3]
        assert stream.take() == []
        assert await tokens_of(stream) == [(0, 4), (0, 5)]

    play(story)


def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(4, 2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.005)
        assert await tokens_of(stream) == [(0, 1), (0, 2)]

    play(story)


def test_withdrawing_frees_at_once() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(40, 50))
        await stream.next()
        assert driver.withdraw(stream)
        assert not driver.withdraw(stream)
        assert driver.engine.blocks_used == 0
        finished = driver.submit(plan(4, 1))
        await tokens_of(finished)
        assert not driver.withdraw(finished)
        assert driver.metrics.finished["abort"] == 0

    play(story)


def test_a_held_call_samples_when_its_time_has_passed() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(8, 2, hold_seconds=1.0))
        await asyncio.sleep(0.5)
        assert driver.engine.blocks_used == 2
        await tokens_of(stream)
        assert now() == pytest.approx(1.02)

    play(story)


def test_stop_ends_calls_with_what_they_have_and_new_ones_get_nothing() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(4, 9))
        await asyncio.sleep(0.025)
        driver.stop()
        assert await tokens_of(stream) == [(0, 1), (0, 2)]
        assert await driver.submit(plan(4, 1)).next() is None
        assert driver.engine.blocks_used == 0

    play(story)


def test_drain_lets_running_and_waiting_calls_finish_and_new_ones_get_nothing() -> None:
    async def story(driver: Driver) -> None:
        await driver.drained()
        streams = [driver.submit(plan(4, 3)) for _ in range(6)]
        await asyncio.sleep(0)
        assert len(driver.engine.waiting) == 2
        driver.drain()
        assert await driver.submit(plan(4, 1)).next() is None
        await driver.drained()
        assert [len(await tokens_of(stream)) for stream in streams] == [3] * 6
        assert now() == pytest.approx(0.06)

    play(story)


def test_a_crash_fails_every_reader_and_every_new_call() -> None:
    async def story(driver: Driver) -> None:
        reads, unread = driver.submit(plan(4, 9)), driver.submit(plan(4, 9))
        reader = asyncio.create_task(tokens_of(reads))
        await asyncio.sleep(0.025)
        driver.crash()
        await raises(reader, EngineDead)
        await raises(unread.next(), EngineDead)
        assert unread.take() == []
        with pytest.raises(EngineDead):
            driver.submit(plan(4, 1))
        assert driver.dead
        await driver.drained()

    play(story)


def test_an_engine_that_fails_has_crashed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(plan(4, 9))
        await stream.next()
        monkeypatch.setattr(driver.engine, "schedule", lambda: 1 / 0)
        await raises(tokens_of(stream), EngineDead)

    play(story)
    assert "mock engine failed" in caplog.text


def test_pausing_by_abort_ends_everything_and_empties_the_cache() -> None:
    async def story(driver: Driver) -> None:
        await tokens_of(driver.submit(known("a", 9, 1)))
        streams = [driver.submit(plan(4, 9)) for _ in range(5)]
        await asyncio.sleep(0.025)
        driver.pause("abort")
        assert [len(await tokens_of(stream)) for stream in streams] == [2] * 4 + [0]
        assert driver.metrics.finished["abort"] == 5
        driver.resume()
        again = driver.submit(known("a", 9, 1))
        await tokens_of(again)
        assert again.cached_tokens == 0

    play(story)


def test_new_calls_of_a_paused_engine_hang_uncounted_until_it_resumes() -> None:
    async def story(driver: Driver) -> None:
        driver.pause("keep")
        assert driver.paused
        stays, leaves = driver.submit(plan(4, 1)), driver.submit(plan(4, 1))
        await raises(asyncio.wait_for(stays.next(), 60), TimeoutError)
        assert (driver.engine.waiting, driver.engine.running) == ([], [])
        assert driver.withdraw(leaves)
        driver.resume()
        assert not driver.paused
        assert len(await tokens_of(stays)) == 1
        assert driver.engine.prompt_tokens == 4

    play(story)


def test_pausing_by_wait_finishes_what_runs_and_keeps_what_waits() -> None:
    async def story(driver: Driver) -> None:
        streams = [driver.submit(plan(4, 3)) for _ in range(5)]
        await asyncio.sleep(0.015)
        driver.pause("wait")
        assert [len(await tokens_of(stream)) for stream in streams[:4]] == [3] * 4
        await asyncio.sleep(60)
        assert len(driver.engine.waiting) == 1
        driver.resume()
        assert len(await tokens_of(streams[4])) == 3

    play(story)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_pausing_by_keep_stops_in_the_middle(clear_cache: bool) -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(known("a", 9, 6))
        await asyncio.sleep(0.025)
        driver.pause("keep", clear_cache=clear_cache)
        await asyncio.sleep(60)
        assert len(stream.take()) == 3  # of the step that ran, too
        assert driver.engine.blocks_used == (0 if clear_cache else 3)
        driver.resume()
        assert await tokens_of(stream) == [(0, 4), (0, 5), (0, 6)]
        assert driver.engine.preemptions == clear_cache
        assert driver.engine.recomputed_tokens == (11 if clear_cache else 0)

    play(story)


def test_an_unknown_way_to_pause_is_refused() -> None:
    async def story(driver: Driver) -> None:
        with pytest.raises(ValueError, match="Invalid pause mode: hard"):
            driver.pause("hard")
        assert not driver.paused

    play(story)


def awake(driver: Driver) -> dict[str, bool]:
    """State by its name in the metrics."""
    lines = driver.metrics.render().decode().splitlines()
    states = [line for line in lines if line.startswith("vllm:engine_sleep_state{")]
    return {line.split('sleep_state="')[1].split('"')[0]: line.endswith(" 1.0") for line in states}


@pytest.mark.parametrize(("level", "state"), [(0, None), (1, "weights_offloaded"), (2, "discard_all")])
def test_a_sleeping_engine_does_nothing_until_it_wakes_up(level: int, state: str | None) -> None:
    async def story(driver: Driver) -> None:
        await tokens_of(driver.submit(known("a", 9, 1)))
        driver.sleep(level)
        assert (driver.sleeping, driver.sleeping_level) == (True, level)
        assert [name for name, on in awake(driver).items() if on] == ([state] if state else [])
        stream = driver.submit(known("a", 9, 1))
        if level:
            driver.resume()  # its weights are not there
        await raises(asyncio.wait_for(stream.next(), 60), TimeoutError)
        driver.wake_up()
        assert (driver.sleeping, driver.sleeping_level) == (False, 0)
        assert [name for name, on in awake(driver).items() if on] == ["awake"]
        await tokens_of(stream)
        assert stream.cached_tokens == (0 if level else 8)

    play(story)


def test_the_prefix_cache_is_emptied_only_when_nothing_is_held() -> None:
    async def story(driver: Driver) -> None:
        stream = driver.submit(known("a", 9, 2))
        await stream.next()
        assert not driver.reset_prefix_cache()
        await stream.next()
        assert driver.reset_prefix_cache()

    play(story)


def test_a_cache_that_is_emptied_under_running_calls_makes_them_compute_again_and_share_again() -> None:
    async def story(driver: Driver) -> None:
        first, second = (driver.submit(known("a", 13, 9)) for _ in range(2))
        for stream in (first, second):
            await stream.next()
        assert driver.reset_prefix_cache(reset_running_requests=True)
        assert driver.engine.blocks_used == 0
        assert [len(await tokens_of(stream)) for stream in (first, second)] == [8, 8]
        assert driver.engine.preemptions == 2
        computed_again = 13 + 1  # the second found all of its prompt but the last token
        assert driver.engine.recomputed_tokens == computed_again
        assert first.tracks[0].preemptions == second.tracks[0].preemptions == 1

    play(story)


def test_a_call_tells_how_much_of_its_prompts_was_cached() -> None:
    async def story(driver: Driver) -> None:
        await tokens_of(driver.submit(known("a", 13, 1)))
        (sizes,) = known("a", 13, 1).sequences
        stream = driver.submit(Plan((sizes, sizes), ("length",) * 2, lambda: None))
        await tokens_of(stream)
        assert stream.cached_tokens == 24

    play(story)


def test_the_limit_on_requests_counts_every_choice() -> None:
    async def story(driver: Driver) -> None:
        first = driver.submit(plan(4, 5, choices=4))
        driver.submit(plan(4, 1, choices=2))
        with pytest.raises(Busy) as refused:
            driver.submit(plan(4, 1))
        assert refused.value.reason == "requests"
        driver.withdraw(first)
        with pytest.raises(Busy):
            driver.submit(plan(4, 1, choices=5))
        driver.submit(plan(4, 1, choices=4))

    play(story, replace(CONFIG, max_num_queued_reqs=6))


def test_the_limit_on_tokens_counts_prompts_without_a_first_token() -> None:
    async def story(driver: Driver) -> None:
        first = driver.submit(plan(39, 5))
        driver.submit(plan(1, 5))
        with pytest.raises(Busy) as refused:
            driver.submit(plan(1, 1))
        assert refused.value.reason == "tokens"
        await first.next()
        driver.submit(plan(1, 1))

    play(story, replace(CONFIG, max_num_queued_tokens=40))


RANKS = replace(CONFIG, data_parallel_size=2, max_num_seqs=256)


def running(driver: Driver) -> list[int]:
    return [len(engine.running) + len(engine.waiting) for engine in driver.engines]


def test_calls_and_choices_are_spread_over_the_ranks() -> None:
    async def story(driver: Driver) -> None:
        assert driver.ranks == 2
        for _ in range(10):
            driver.submit(plan(4, 50))
        assert running(driver) == [5, 5]
        many = driver.submit(plan(4, 2, choices=7))
        assert sorted(running(driver)) == [8, 9]
        assert sorted(await tokens_of(many)) == [(index, number) for index in range(7) for number in (1, 2)]

    play(story, RANKS)


def test_choices_fill_up_the_emptier_rank_first() -> None:
    async def story(driver: Driver) -> None:
        driver.submit(plan(4, 50, choices=3), rank=1)
        driver.submit(plan(4, 50, choices=5))
        assert running(driver) == [4, 4]

    play(story, RANKS)


def test_idle_ranks_take_turns() -> None:
    async def story(driver: Driver) -> None:
        for _ in range(4):
            await tokens_of(driver.submit(plan(4, 1)))
        assert [engine.prompt_tokens for engine in driver.engines] == [8, 8]

    play(story, RANKS)


def test_a_call_can_be_pinned_to_a_rank() -> None:
    async def story(driver: Driver) -> None:
        for _ in range(3):
            driver.submit(plan(4, 50, choices=2), rank=1)
        assert running(driver) == [0, 6]
        driver.submit(plan(4, 50))
        assert running(driver) == [1, 6]

    play(story, RANKS)


def test_a_full_rank_with_a_queue_is_avoided() -> None:
    """What waits weighs more, the fuller the pool is."""

    async def story(driver: Driver) -> None:
        for _ in range(2):
            driver.submit(plan(240, 50), rank=0)
        for _ in range(5):
            driver.submit(plan(4, 50), rank=1)
        await asyncio.sleep(0.05)
        assert running(driver) == [2, 5]
        assert len(driver.engines[0].waiting) == 1
        driver.submit(plan(4, 50))
        assert running(driver) == [3, 5]
        driver.submit(plan(4, 50), rank=0)
        driver.submit(plan(4, 50))
        assert running(driver) == [4, 6]

    play(story, RANKS)


def test_every_rank_has_its_own_clock() -> None:
    async def story(driver: Driver) -> None:
        first = driver.submit(plan(4, 1), rank=0)
        await asyncio.sleep(0.004)
        second = driver.submit(plan(4, 1), rank=1)
        await tokens_of(first)
        assert now() == pytest.approx(0.010)
        await tokens_of(second)
        assert now() == pytest.approx(0.014)

    play(story, RANKS)


def test_the_metrics_know_the_times() -> None:
    async def story(driver: Driver) -> None:
        streams = [driver.submit(plan(4, 3)) for _ in range(5)]
        for stream in streams:
            await tokens_of(stream)
        page = driver.metrics.render().decode()

        def value(name: str) -> float:
            line = next(line for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))
            return float(line.rpartition(" ")[2])

        assert value("time_to_first_token_seconds_sum") == pytest.approx(4 * 0.01 + 0.04)
        assert value("inter_token_latency_seconds_sum") == pytest.approx(5 * 2 * 0.01)
        assert value("inter_token_latency_seconds_count") == 10
        assert value("request_queue_time_seconds_sum") == pytest.approx(0.03)
        assert value("request_prefill_time_seconds_sum") == pytest.approx(5 * 0.01)
        assert value("request_decode_time_seconds_sum") == pytest.approx(5 * 0.02)
        assert value("iteration_tokens_total_sum") == 5 * (4 + 3)
        assert value("iteration_tokens_total_count") == 6
        assert driver.metrics.finished["length"] == 5

    play(story)


def test_a_preempted_call_keeps_the_time_of_its_first_admission() -> None:
    async def story(driver: Driver) -> None:
        told: list[float] = []
        for seed in ("a", "b"):
            (sizes,) = known(seed, 12, 8).sequences
            driver.submit(Plan((sizes,), ("length",), lambda: told.append(now())))
        await driver.drained()
        assert driver.engine.preemptions > 0
        assert told == [0.0, 0.0]
        lines = driver.metrics.render().decode().splitlines()
        for series, value in (("queue_time_seconds_sum", 0.0), ("num_preemptions_sum", 1.0)):
            assert f'vllm:request_{series}{{engine="0",model_name="demo"}} {value}' in lines

    play(story, replace(CONFIG, blocks=9))


def test_admission_is_told_once() -> None:
    async def story(driver: Driver) -> None:
        told: list[float] = []
        stream = driver.submit(Plan((Sizes(4, 2),) * 6, ("length",) * 6, lambda: told.append(now())))
        await tokens_of(stream)
        assert told == [0.0]

    play(story)
