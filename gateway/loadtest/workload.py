"""From a scenario to its calls: pure, and the same for a seed however many processes send them."""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.loadtest.scenario import Distribution, Mix, Phase, Scenario, ScenarioError, Tokens, TraceLine

CALLS_MAX = 2_000_000
"""Of one scenario: its plan and its records are held in memory."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call before it is sent."""

    number: int
    arrival_seconds: float
    """Since the start of the run."""
    key: str
    mix: int
    """Which of the scenario's `calls`."""
    prompt_tokens: int
    output_tokens: int
    answer_tokens: int | None
    leave_after_tokens: int | None
    slow: bool


def plan(scenario: Scenario, trace: Sequence[TraceLine] = ()) -> list[PlannedCall]:
    """All calls in order of arrival.  Raises ScenarioError for more than `CALLS_MAX`.

    Arrivals and sizes have a source of chance each, so that a changed rate leaves the sizes as they were.
    """
    expected: float = len(trace)
    if not trace:
        expected = sum(phase.seconds * rate(scenario, phase) for phase in scenario.phases)
    if expected > CALLS_MAX:
        raise ScenarioError(f"{scenario.name}: {expected:.0f} calls; {CALLS_MAX} are the most")
    chance = random.Random(f"{scenario.seed}/calls")
    deal = _Deal(scenario, chance)
    if trace:
        return [deal.recorded(number, line) for number, line in enumerate(trace)]
    return [deal.drawn(number, at) for number, at in enumerate(_arrivals(scenario))]


def share_of(calls: Sequence[PlannedCall], process: int, processes: int) -> Sequence[PlannedCall]:
    """What one of several processes sends."""
    return calls[process::processes]


def rate(scenario: Scenario, phase: Phase) -> float:
    """Calls per second."""
    if phase.calls_per_second is not None:
        return phase.calls_per_second
    return (phase.sessions or 0) / scenario.session.period_seconds


def arrivals_end_seconds(scenario: Scenario, calls: Sequence[PlannedCall]) -> float:
    """When nothing more arrives."""
    planned = sum(phase.seconds for phase in scenario.phases)
    return max(planned, calls[-1].arrival_seconds if calls else 0.0)


def draw(tokens: Tokens, chance: random.Random) -> int:
    """One number from a distribution."""
    if isinstance(tokens, int):
        return tokens
    return _draw(tokens, chance)


def most(tokens: Tokens | None) -> int:
    if tokens is None:
        return 0
    return tokens if isinstance(tokens, int) else tokens.most


def _draw(distribution: Distribution, chance: random.Random) -> int:
    if distribution.uniform:
        return chance.randint(*distribution.uniform)
    if distribution.choice:
        return chance.choice(distribution.choice)
    if distribution.log_uniform:
        low, high = distribution.log_uniform
        return min(int(math.exp(chance.uniform(math.log(low), math.log(high + 1)))), high)
    assert distribution.fixed is not None
    return distribution.fixed


def _arrivals(scenario: Scenario) -> Iterator[float]:
    chance = random.Random(f"{scenario.seed}/arrivals")
    begin = 0.0
    for phase in scenario.phases:
        per_second = rate(scenario, phase)
        if per_second > 0:
            of_phase = _poisson if scenario.session.arrivals == "poisson" else _even
            yield from (begin + at for at in of_phase(per_second, phase.seconds, chance))
        begin += phase.seconds


def _poisson(per_second: float, seconds: float, chance: random.Random) -> Iterator[float]:
    at = chance.expovariate(per_second)
    while at < seconds:
        yield at
        at += chance.expovariate(per_second)


def _even(per_second: float, seconds: float, _chance: random.Random) -> Iterator[float]:
    for number in range(round(seconds * per_second)):
        yield (number + 0.5) / per_second


class _Deal:
    """Deals out keys, kinds and sizes."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self._chance = chance
        self._mixes = scenario.calls
        keys = scenario.weighted_keys
        self._keys = [key.name for key in keys]
        self._key_weights = list(accumulate(key.weight for key in keys))
        self._mix_weights = list(accumulate(mix.weight for mix in scenario.calls))

    def drawn(self, number: int, arrival_seconds: float) -> PlannedCall:
        mix = self._pick(self._mix_weights)
        kind = self._mixes[mix]
        assert kind.prompt_tokens is not None
        assert kind.output_tokens is not None
        prompt = draw(kind.prompt_tokens, self._chance)
        output = draw(kind.output_tokens, self._chance)
        return self._planned(number, arrival_seconds, self._key(), mix, prompt, output)

    def recorded(self, number: int, line: TraceLine) -> PlannedCall:
        key = line.key or self._key()
        return self._planned(number, line.arrival, key, 0, line.prompt_tokens, line.output_tokens)

    def _planned(self, number: int, at: float, key: str, mix: int, prompt: int, output: int) -> PlannedCall:
        kind = self._mixes[mix]
        answer = None if kind.answer_tokens is None else min(draw(kind.answer_tokens, self._chance), output)
        leave = self._leave_after(kind)
        slow = kind.slow is not None and self._chance.random() < kind.slow.fraction
        return PlannedCall(number, at, key, mix, prompt, output, answer, leave, slow)

    def _leave_after(self, kind: Mix) -> int | None:
        if kind.leave is None or self._chance.random() >= kind.leave.fraction:
            return None
        return draw(kind.leave.after_tokens, self._chance)

    def _key(self) -> str:
        return self._keys[self._pick(self._key_weights)]

    def _pick(self, cumulative: list[float]) -> int:
        at = bisect_right(cumulative, self._chance.random() * cumulative[-1])
        return min(at, len(cumulative) - 1)
