"""`kvgate loadtest` against real engines and a real gateway, its figures checked against their own counts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.loadtest.command import ADMIN_TOKEN_VARIABLE, KEYS_VARIABLE
from gateway.loadtest.scenario import load
from gateway.loadtest.workload import plan
from tests.processes import ADMIN_TOKEN, Mock, World, wait_until

BLOCK_SIZE, BLOCKS = 16, 512
SMALL_ENGINE = ("--blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-model-len", "2048")

SCENARIO: dict[str, Any] = {
    "name": "check",
    "seed": 11,
    "client": {"timeout_seconds": 20, "retries": 0},
    "keys": ["a", "b"],
    "phases": [{"seconds": 3, "calls_per_second": 20}],
    "calls": [
        {
            "weight": 3,
            "prompt_tokens": {"log_uniform": [16, 400]},
            "output_tokens": {"uniform": [10, 60]},
            "leave": {"fraction": 0.2, "after_tokens": 3},
        },
        {"prompt_tokens": 40, "output_tokens": 30, "answer_tokens": 7, "stream": False},
    ],
    "drain_seconds": 20,
}


def loadtest(folder: Path, scenario: dict[str, Any], *options: str, **environ: str) -> dict[str, Any]:
    file = folder / "scenario.yaml"
    file.write_text(json.dumps(scenario))  # JSON is YAML
    report = folder / "report"
    command = [sys.executable, "-m", "gateway", "loadtest", "--scenario", str(file), "--report", str(report)]
    done = subprocess.run(
        [*command, *options],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(report / "report.html") in done.stdout
    found: dict[str, Any] = json.loads((report / "report.json").read_text())
    return found


def settled(mock: Mock) -> dict[str, Any]:
    """The engine's journal when nothing runs any more."""
    wait_until(lambda: not mock.metric("vllm:num_requests_running"), "the engine is idle")
    return mock.log()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_figures_are_those_of_the_engine(new_world: World, processes: str) -> None:
    mock = new_world.mock(*SMALL_ENGINE, "--speed", "10")
    report = loadtest(new_world.folder, SCENARIO, "--url", mock.url, "--processes", processes)
    figures, log = report["figures"], settled(mock)
    planned = plan(load(str(new_world.folder / "scenario.yaml"))[0])
    calls = figures["calls"]

    assert calls["offered"] == len(planned) == log["received"]
    assert calls["answered"] == log["finished"]
    assert calls["left"] == log["aborted"] == sum(call.leave_after_tokens is not None for call in planned)
    assert (calls["gave_up"], calls["unfinished"], log["refused"]) == (0, 0, 0)
    engine = figures["engines"]["each"][mock.url]
    assert engine["prompt_tokens"] == sum(call.prompt_tokens for call in planned)
    assert figures["tokens"]["completed"] == sum(
        call.answer_tokens or call.output_tokens for call in planned if call.leave_after_tokens is None
    )
    assert engine["generation_tokens"] == mock.metric("vllm:generation_tokens_total")
    assert (
        engine["generation_tokens"]
        >= figures["tokens"]["completed"] + figures["tokens"]["of_calls_that_left"]
    )
    assert engine["preemptions"] == mock.metric("vllm:num_preemptions_total")
    assert figures["generator"]["own_errors"] == 0


def test_a_storm_is_seen_as_one(new_world: World) -> None:
    """More than the engine holds: preempted and long silent, as its own metrics tell."""
    mock = new_world.mock(*SMALL_ENGINE, "--speed", "2")
    storm = SCENARIO | {
        "phases": [{"seconds": 2, "calls_per_second": 30}],
        "session": {"arrivals": "even"},
        "calls": [{"prompt_tokens": 200, "output_tokens": 400}],
    }
    figures = loadtest(new_world.folder, storm, "--target", mock.url)["figures"]

    assert figures["calls"]["answered"] == 60
    assert figures["engines"]["preemptions"] == mock.metric("vllm:num_preemptions_total") > 0
    assert figures["engines"]["each"][mock.url]["kv_use_share_max"] > 0.9
    stall = figures["worst_gap_ms"]["max"]
    assert stall > 5 * figures["gap_ms"]["p50"]
    assert figures["gap_corrected_ms"]["p99"] > figures["gap_ms"]["p99"]


def test_through_the_gateway(new_world: World) -> None:
    """Refused and queued calls, keys, the gateway's own measure, and nothing left over."""
    mock = new_world.mock(*SMALL_ENGINE, "--speed", "5")
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, secrets = new_world.config(pools, {}, {}, queue={"depth_max": 5})
    gateway = new_world.gateway(config, secrets[0])
    crowd = SCENARIO | {
        "phases": [{"seconds": 2, "calls_per_second": 60}],
        "calls": [{"prompt_tokens": 300, "output_tokens": 200}],
    }
    figures = loadtest(
        new_world.folder, crowd, "--url", gateway.url, "--engine", mock.url, "--admin", gateway.url,
        **{KEYS_VARIABLE: f"a={secrets[0]},b={secrets[1]}", ADMIN_TOKEN_VARIABLE: ADMIN_TOKEN},
    )["figures"]  # fmt: skip
    attempts, log = figures["attempts"], settled(mock)

    assert figures["calls"]["answered"] == attempts["admitted"] == log["finished"]
    assert attempts["queued"] > 0
    assert set(figures["refused"]) == {"429 queue_full"}
    assert figures["refused"]["429 queue_full"]["count"] == attempts["refused"]
    assert figures["kvgate"]["refusal_ms"]["queue_full"]["count"] == attempts["refused"]
    assert figures["kvgate"]["clean"]
    assert figures["kvgate"]["reserved_share_while_queued"]["demo/only"]["mean"] > 0.5
    assert figures["engines"]["preemptions"] == 0
    assert all(key["answered"] for key in figures["keys"].values())
