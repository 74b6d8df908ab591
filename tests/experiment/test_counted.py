"""The engine by counts and the mock's, beside each other, step by step."""

import random
from dataclasses import replace

import pytest

from benchmarks.experiment.counted import Counted, Served
from benchmarks.experiment.mocked import Mocked
from gateway.mock.config import EngineConfig

CONFIG = EngineConfig(
    blocks=60,
    block_size=4,
    max_num_seqs=30,
    max_num_batched_tokens=64,
    step_prefill_us=30,
    step_running_us=20,
    step_kv_us=7,
)
ALL_TOKENS = CONFIG.usable_blocks * CONFIG.block_size
"""What one call can store, at most."""


class Twin:
    """One load on both, which each tells of in the same marks."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self.told: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.counted = Counted(config, lambda served, outputs: self._hear(0, served, outputs))
        self.mocked = Mocked(config, lambda served, outputs: self._hear(1, served, outputs))
        self.served: tuple[list[Served], list[Served]] = ([], [])
        self._chance = random.Random(seed)
        self._number = 0

    def _hear(self, which: int, served: Served, outputs: int) -> int:
        self.told[which].append((served.call, outputs))
        return outputs + 1 + served.call * outputs % 9

    def add(self, prompt: int, output: int) -> None:
        self._number += 1
        for engine, served in zip((self.counted, self.mocked), self.served, strict=True):
            served.append(Served(self._number, prompt, output))
            engine.add(served[-1])

    def step(self) -> bool:
        """False when nothing moved."""
        durations = self.counted.schedule(), self.mocked.schedule()
        assert durations[0] == pytest.approx(durations[1])
        assert self.counted.used == self.mocked.used
        self.counted.complete()
        self.mocked.complete()
        assert sorted(self.told[0]) == sorted(self.told[1])
        self.told[0].clear()
        self.told[1].clear()
        for name in ("used", "preemptions", "recomputed_tokens", "generated_tokens", "waits"):
            assert getattr(self.counted, name) == getattr(self.mocked, name), name
        self._compare_calls()
        return durations[0] > 0

    def _compare_calls(self) -> None:
        """Who runs and waits, in order; what each has computed, and how often it was preempted."""
        engine = self.mocked.engine
        assert [served.call for served in self.counted.running] == [int(s.request_id) for s in engine.running]
        assert [served.call for served in self.counted.waiting] == [int(s.request_id) for s in engine.waiting]
        for served, sequence in zip(self.counted.running, engine.running, strict=True):
            assert self.counted.computed_of(served) == sequence.computed
        one, other = self.served
        assert [served.preemptions for served in one] == [served.preemptions for served in other]


@pytest.mark.parametrize("watermark", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(16))
def test_both_do_the_same_in_every_step(seed: int, watermark: float) -> None:
    """Calls of many sizes, from too few to far too many at once; most runs preempt.

    Few wait at a time: nothing else happens where hundreds do, and every step compares them all.
    """
    chance = random.Random(seed)
    sequences = chance.choice([3, 12, 30])
    twin = Twin(replace(CONFIG, watermark=watermark, max_num_seqs=sequences), seed)
    longest, crowd, often = (
        chance.choice([6, 40, 120]),
        chance.choice([1, 4, 20]),
        chance.choice([0.1, 0.5, 1]),
    )
    for _ in range(250):
        if twin.counted.waits < crowd and chance.random() < often:
            for _ in range(chance.randint(1, crowd)):
                output = chance.randint(1, longest)
                prompt = chance.randint(1, 90) if chance.random() < 0.9 else ALL_TOKENS - output
                twin.add(prompt, output)
        twin.step()
    while twin.step():
        pass
    assert twin.counted.used == 0
    assert not twin.counted.running
    assert not twin.counted.waiting


def test_the_runs_preempt_and_let_calls_wait() -> None:
    """Else the comparison would say little."""
    twin = Twin(CONFIG, 0)
    for _ in range(40):
        twin.add(12, 60)
    while twin.step():
        pass
    assert twin.counted.preemptions > 20
    assert twin.counted.recomputed_tokens > 200


def test_sequences_that_leave_no_budget_for_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="room"):
        Counted(replace(CONFIG, max_num_seqs=64), lambda _, outputs: outputs)
