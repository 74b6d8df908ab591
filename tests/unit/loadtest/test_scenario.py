"""Scenario files: strict, with errors that name the field."""

import json
from pathlib import Path

import pytest

from gateway.loadtest.scenario import ScenarioError, load, names, parse, parse_trace, to_json

GOOD = """
name: one
phases: [{seconds: 10, sessions: 5}]
calls: [{prompt_tokens: {uniform: [10, 20]}, output_tokens: 7}]
"""


def test_defaults_are_those_of_a_client() -> None:
    scenario = parse(GOOD)

    assert (scenario.client.retries, scenario.client.backoff_seconds) == (2, 0.5)
    assert scenario.client.honour_retry_after
    assert [key.name for key in scenario.weighted_keys] == ["default"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("clinet: {}", "clinet: unknown field"),
        ("client: {retrys: 3}", "client.retrys: unknown field"),
        ("client: {retries: -1}", "client.retries: Expected"),
        ("endpoint: embeddings", "endpoint: "),
        ("trace: some.jsonl", "exactly one of phases, trace"),
        ("keys: []", "keys: Expected"),
        ("keys: [a, a]", "keys: two have the same name"),
        ("keys: [{name: a, weigth: 2}]", "keys[0].weigth: unknown field"),
        ("drain_seconds: soon", "drain_seconds: Expected"),
        ("name: two", "twice"),
    ],
)
def test_what_is_wrong_is_named(change: str, named: str) -> None:
    with pytest.raises(ScenarioError) as error:
        parse(f"{GOOD}{change}\n", "file.yaml")

    assert named in str(error.value)
    assert str(error.value).startswith("file.yaml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ("[{prompt_tokens: 5}]", "calls[0]: prompt_tokens and output_tokens"),
        ("[{prompt_tokens: {uniform: [9, 3]}, output_tokens: 1}]", "uniform: 9 is above 3"),
        ("[{prompt_tokens: {fixed: 1, choice: [2]}, output_tokens: 1}]", "exactly one of fixed"),
        (
            "[{prompt_tokens: {normal: [1, 2]}, output_tokens: 1}]",
            "calls[0].prompt_tokens.normal: unknown field",
        ),
        ("[{prompt_tokens: 0, output_tokens: 1}]", "calls[0].prompt_tokens: Expected"),
    ],
)
def test_a_bad_kind_of_call_is_named(calls: str, named: str) -> None:
    with pytest.raises(ScenarioError, match=named.replace("[", r"\[").replace("$", r"\$")):
        parse(f"name: one\nphases: [{{seconds: 1, sessions: 1}}]\ncalls: {calls}\n")


@pytest.mark.parametrize("phase", ["{seconds: 1}", "{seconds: 1, sessions: 1, calls_per_second: 1}"])
def test_a_phase_has_one_rate(phase: str) -> None:
    with pytest.raises(ScenarioError, match="exactly one of sessions, calls_per_second"):
        parse(GOOD.replace("{seconds: 10, sessions: 5}", phase))


def test_a_document_reads_back() -> None:
    scenario = parse(GOOD)

    assert parse(json.dumps(to_json(scenario))) == scenario


@pytest.mark.parametrize("name", names())
def test_packaged_scenarios_are_good(name: str) -> None:
    scenario, _ = load(name)

    assert scenario.name == name
    assert scenario.description


def test_scaled_phases_keep_their_rates() -> None:
    whole, _ = load("steady")
    short, _ = load("steady", 0.1)

    assert [phase.seconds for phase in short.phases] == [phase.seconds * 0.1 for phase in whole.phases]
    assert [phase.sessions for phase in short.phases] == [phase.sessions for phase in whole.phases]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="steady"):
        load("no-such-scenario")


def test_a_trace_is_found_beside_its_scenario_and_cut_by_the_scale(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(
        '{"arrival": 8, "prompt_tokens": 4, "output_tokens": 5}\n\n'
        '{"arrival": 1.5, "prompt_tokens": 2, "output_tokens": 3, "key": "a"}\n'
    )
    (tmp_path / "replay.yaml").write_text("name: replay\nkeys: [a]\ntrace: calls.jsonl\n")

    _, trace = load(str(tmp_path / "replay.yaml"))
    _, half = load(str(tmp_path / "replay.yaml"), 0.5)

    assert [(line.arrival, line.key) for line in trace] == [(1.5, "a"), (8, None)]
    assert [line.arrival for line in half] == [1.5]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"arrival": 1, "prompt_tokens": 2}', "trace:1: output_tokens: missing"),
        ('{"arrival": 1, "prompt_tokens": 2, "output_tokens": 3, "user": "x"}', "user: unknown field"),
        ("\n[1]", "trace:2"),
        ("{", "trace:1"),
        ("\n", "0 lines"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(text: str, named: str) -> None:
    with pytest.raises(ScenarioError, match=named):
        parse_trace(text)


def test_a_key_of_a_trace_is_one_of_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text(
        '{"arrival": 1, "prompt_tokens": 2, "output_tokens": 3, "key": "b"}\n'
    )
    (tmp_path / "replay.yaml").write_text("name: replay\nkeys: [a]\ntrace: calls.jsonl\n")

    with pytest.raises(ScenarioError, match=r"calls.jsonl: key 'b'"):
        load(str(tmp_path / "replay.yaml"))
