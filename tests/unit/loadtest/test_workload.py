"""From a scenario to calls: the same for a seed, whoever sends them."""

from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.loadtest import workload
from gateway.loadtest.scenario import ScenarioError, TraceLine, parse
from gateway.loadtest.workload import arrivals_end_seconds, plan, share_of

TEXT = """
name: mixed
seed: {seed}
keys: [{{name: a, weight: 3}}, b]
phases: [{{seconds: 20, sessions: 40}}, {{seconds: 10, calls_per_second: 30}}, {{seconds: 5, sessions: 0}}]
session: {{period_seconds: 4, arrivals: {arrivals}}}
calls:
  - weight: 2
    prompt_tokens: {{log_uniform: [16, 4096]}}
    output_tokens: {{uniform: [40, 120]}}
    answer_tokens: {{choice: [10, 100]}}
    leave: {{fraction: 0.25, after_tokens: 3}}
  - prompt_tokens: 99
    output_tokens: {{fixed: 8}}
    slow: {{fraction: 0.5, read_seconds: 1}}
"""


def scenario(seed: int = 7, arrivals: str = "poisson") -> workload.Scenario:
    return parse(TEXT.format(seed=seed, arrivals=arrivals))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**40), processes=st.integers(1, 9))
def test_a_seed_gives_the_same_calls_to_any_number_of_processes(seed: int, processes: int) -> None:
    whole, again = plan(scenario(seed)), plan(scenario(seed))
    shares = [share_of(again, process, processes) for process in range(processes)]

    assert sorted((call for share in shares for call in share), key=lambda call: call.number) == whole


def test_another_seed_gives_other_calls() -> None:
    assert plan(scenario(1)) != plan(scenario(2))


def test_calls_come_in_order_at_the_rate_of_their_phase() -> None:
    calls = plan(scenario())
    arrivals = [call.arrival_seconds for call in calls]
    first = sum(at < 20 for at in arrivals)

    assert arrivals == sorted(arrivals)
    assert 160 <= first <= 240  # 10 a second, three standard deviations
    assert 250 <= len(arrivals) - first <= 350
    assert max(arrivals) < 30
    assert arrivals_end_seconds(scenario(), calls) == 35


def test_even_arrivals_keep_one_distance() -> None:
    arrivals = [call.arrival_seconds for call in plan(scenario(arrivals="even"))][:200]

    assert all(after - before == pytest.approx(0.1) for before, after in pairwise(arrivals))


def test_a_changed_rate_leaves_the_sizes_as_they_were() -> None:
    text = TEXT.format(seed=7, arrivals="even")
    slower = parse(text.replace("sessions: 40", "sessions: 20"))

    few, many = plan(slower), plan(parse(text))

    assert [call.prompt_tokens for call in few] == [call.prompt_tokens for call in many[: len(few)]]


def test_sizes_and_shares_are_those_of_the_scenario() -> None:
    calls = plan(scenario())
    kinds = [[call for call in calls if call.mix == mix] for mix in (0, 1)]

    assert len(kinds[0]) / len(calls) == pytest.approx(2 / 3, abs=0.1)
    assert all(16 <= call.prompt_tokens <= 4096 and 40 <= call.output_tokens <= 120 for call in kinds[0])
    assert all(call.answer_tokens == min(call.answer_tokens or 0, call.output_tokens) for call in kinds[0])
    assert {(call.prompt_tokens, call.output_tokens, call.answer_tokens) for call in kinds[1]} == {
        (99, 8, None)
    }
    assert mean(call.leave_after_tokens == 3 for call in kinds[0]) == pytest.approx(0.25, abs=0.1)
    assert mean(call.slow for call in kinds[1]) == pytest.approx(0.5, abs=0.12)
    assert not any(call.slow for call in kinds[0])
    assert Counter(call.key for call in calls)["a"] / len(calls) == pytest.approx(0.75, abs=0.06)


def test_log_uniform_lengths_double_as_often_high_as_low() -> None:
    lengths = [call.prompt_tokens for call in plan(scenario()) if call.mix == 0]

    assert mean(length < 256 for length in lengths) == pytest.approx(0.5, abs=0.1)


def test_a_trace_is_replayed_as_it_is() -> None:
    replay = parse("name: replay\nkeys: [a, b]\ntrace: x\ncalls: [{stream: false}]\n")
    lines = [
        TraceLine(arrival=0.5, prompt_tokens=10, output_tokens=20, key="b"),
        TraceLine(arrival=2, prompt_tokens=11, output_tokens=21),
    ]

    calls = plan(replay, lines)

    assert [(c.arrival_seconds, c.prompt_tokens, c.output_tokens) for c in calls] == [
        (0.5, 10, 20),
        (2, 11, 21),
    ]
    assert calls[0].key == "b"
    assert calls[1].key in ("a", "b")
    assert arrivals_end_seconds(replay, calls) == 2


def test_a_scenario_has_a_bound() -> None:
    flood = parse(
        "name: flood\nphases: [{seconds: 86400, calls_per_second: 86400}]\n"
        "calls: [{prompt_tokens: 1, output_tokens: 1}]"
    )

    with pytest.raises(ScenarioError, match=str(workload.CALLS_MAX)):
        plan(flood)
