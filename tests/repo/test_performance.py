"""Bars and tables of `make bench`, and `docs/performance.md`, whose tables are made from `docs/performance.json`."""

import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.repo.files import ROOT

DOCUMENT = ROOT / "docs/performance.md"
STORED: dict[str, Any] = json.loads((ROOT / "docs/performance.json").read_text())


def imported(path: str) -> ModuleType:
    """A module of the benchmarks, which are scripts and no package."""
    name = path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


bars = imported("benchmarks/yardstick/bars.py")
bodies = imported("benchmarks/yardstick/bodies.py")

Run = dict[str, dict[str, float]]


def a_run() -> Run:
    """One in which every bar is held and every aim reached."""
    common = {"a_calm_p50_ms": 0.2, "t_first_p50_ms": 0.2, "d_gap_p99_ms": 101.0, "g_gap_p99_ms": 101.0}
    refused = {f"e_{kind}_{name}": value for kind in ("small", "large") for name, value in _REFUSED.items()}
    leaving = {f"f_{way}_seen": 100.0 for way in bars.WAYS} | {f"f_{way}_p99_ms": 0.5 for way in bars.WAYS}
    return {
        "direct": common,
        "nginx": {
            "a_calm_p50_ms": 0.3,
            "b_known_calls_s": 6_000,
            "d_gap_p99_ms": 102.0,
            "g_gap_p99_ms": 102.0,
        },
        "envoy": {"a_calm_p50_ms": 0.5, "D_gap_p99_ms": 150.0, "e_small_p99_ms": 1.0, "e_large_p99_ms": 2.0},
        "vllm-router": {
            "a_calls_s": 20_000,
            "d_event_us": 20,
            "g_event_us": 20,
            "D_gap_p99_ms": 109.0,
            "t_first_p50_ms": 0.4,
        },
        "naive": {"a_calls_s": 600},
        "tiktoken": {"b_new_us": 30_000},
        "kvgate": {
            "a_calls_s": 20_000,
            "a_calm_p50_ms": 0.4,
            "b_known_calls_s": 3_000,
            "b_new_us": 30_000,
            **streams("d"),
            **streams("g"),
            "D_gap_p99_ms": 108.0,
            "e_alone_gap_p99_ms": 101.0,
            "s_store_us": 31,
            "t_first_p50_ms": 0.35,
            **refused,
            **leaving,
        },
    }


def streams(test: str) -> dict[str, float]:
    found = {"events_share": 1.0, "errors": 0, "gap_p99_ms": 101.5, "transit_p99_ms": 0.6}
    return {f"{test}_{name}": value for name, value in {**found, "event_us": 20, "stream_kb": 30}.items()}


_REFUSED = {"p99_ms": 0.9, "gap_p99_ms": 101.5, "refused_share": 1.0}


def verdict(run: Run, what: str) -> Any:
    (found,) = [each for each in bars.verdicts(run) if each.bar.what == what]
    return found


def test_the_document_has_the_tables_of_the_stored_figures() -> None:
    text = DOCUMENT.read_text()

    assert text == bars.with_tables(text, bars.Results(**STORED))


def test_the_stored_figures_have_every_bar() -> None:
    missing = [
        each.bar.what
        for run in STORED["runs"]
        for each in bars.verdicts(run)
        if each.found is None or each.must is None
    ]

    assert missing == []


def test_the_prose_has_no_figures_of_its_own() -> None:
    """They would stay when the tables change.  Sizes of a test are no figures."""
    head, _, rest = DOCUMENT.read_text().partition(bars.BEGIN)
    prose = head + rest.partition(bars.END)[2]

    assert re.findall(r"\d[\d,.]* (?:ms|us|calls/s|%)|\d[\d.]* ?x\b", prose) == []


def test_a_run_that_reaches_every_aim() -> None:
    found = bars.verdicts(a_run())

    assert [each.bar.what for each in found if not each.holds] == []
    assert [each.bar.what for each in found if each.reaches_aim is False] == []


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("a_calls_s", 7_199, "calls/s, 64 connections, of naive's"),
        ("a_calls_s", 7_999, "... of vllm-router's"),
        ("a_calm_p50_ms", 0.51, "p50 added at 200 calls/s, of what nginx adds"),
        ("b_known_calls_s", 1_499, "calls/s, 256 KB known, of nginx's"),
        ("b_new_us", 39_001, "CPU of a call, 256 KB new, of tiktoken's"),
        ("d_events_share", 0.99, "events that arrived"),
        ("d_errors", 1, "streams with errors"),
        ("d_gap_p99_ms", 103.1, "gap p99, ms above direct"),
        ("d_transit_p99_ms", 3.1, "transit p99, ms"),
        ("d_event_us", 23.1, "CPU of an event, of vllm-router's"),
        ("d_stream_kb", 61, "memory of a stream, KB"),
        ("D_gap_p99_ms", 150.1, "gap p99, ms"),
        ("g_events_share", 0.99, "events that arrived, growing"),
        ("g_event_us", 23.1, "CPU of an event, of vllm-router's, growing"),
        ("e_small_p99_ms", 2.1, "refusal p99, small, ms"),
        ("e_large_p99_ms", 5.1, "refusal p99, 256 KB, ms"),
        ("e_large_refused_share", 0.99, "refused of those that had to be"),
        ("e_small_gap_p99_ms", 102.1, "streams' gap p99, ms more than alone"),
        ("e_large_gap_p99_ms", 102.1, "streams' gap p99, ms more than alone"),
        ("f_prefill_seen", 99, "leavers that the engine sees, the worst way"),
        ("f_whole_p99_ms", 5.1, "p99 until it does, ms"),
        ("s_store_us", 45.1, "store CPU of a call, us"),
        ("t_first_p50_ms", 0.71, "first token added, p50, ms"),
    ],
)
def test_just_past_a_bar(name: str, value: float, what: str) -> None:
    run = a_run()
    assert name in run["kvgate"]
    run["kvgate"][name] = value

    assert verdict(run, what).holds is False


def test_an_aim_may_be_another_peers_figure_of_the_same_run() -> None:
    run = a_run()
    run["vllm-router"]["D_gap_p99_ms"] = 107.0

    assert verdict(run, "gap p99, ms").holds is True
    assert verdict(run, "gap p99, ms").reaches_aim is False


def test_what_was_not_measured_is_neither_held_nor_missed() -> None:
    run = a_run()
    del run["vllm-router"], run["naive"], run["tiktoken"]
    rows = {row[1]: row for row in bars.bar_rows([run])}

    assert verdict(run, "... of vllm-router's").holds is None
    assert rows["... of vllm-router's"][4:] == ["-", "-", "-"]
    assert rows["store CPU of a call, us"][4:] == ["31", "ok", "ok"]


def test_a_bar_has_to_hold_in_every_run() -> None:
    bad = a_run()
    bad["kvgate"]["s_store_us"] = 50
    rows = {row[1]: row for row in bars.bar_rows([a_run(), bad, a_run()], before=[bad])}

    assert rows[""][4:] == ["run 1", "run 2", "run 3", "held", "reached", "stored"]
    assert rows["store CPU of a call, us"][2:] == ["<= 45", "<= 31", "31", "50", "31", "NO", "NO", "50"]


def test_figures_are_medians_with_their_ratio_to_ours() -> None:
    runs = [a_run() for _ in range(3)]
    for run, calls in zip(runs, (10_000, 40_000, 90_000), strict=True):
        run["vllm-router"]["a_calls_s"] = calls
    rows = {row[0]: row for row in bars.peer_rows(runs)}

    assert rows[""][1:] == ["direct", "nginx", "envoy", "vllm-router", "naive", "kvgate"]
    assert rows["a: calls/s, 64 connections"][1:] == ["-", "-", "-", "40,000 (2.00)", "600 (0.03)", "20,000"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0625, "0.062"),
        (1.25, "1.25"),
        (12.34, "12.3"),
        (101.44, "101.4"),
        (28335.2, "28,335"),
    ],
)
def test_how_a_figure_is_written(value: float | None, text: str) -> None:
    assert bars.shown(value) == text


def test_tables_of_runs_stand_between_the_markers() -> None:
    results = bars.Results({"cores": "2"}, {"nginx": "1.22.1", "direct": ""}, [a_run()])
    empty = f"before\n{bars.BEGIN}{bars.END}after\n"
    written = bars.with_tables(empty, results)

    assert written.startswith(f"before\n{bars.BEGIN}\n1 run; cores 2; nginx 1.22.1.\n")
    assert written.endswith(f"\n{bars.END}after\n")
    assert bars.with_tables(written, results) == written


def test_a_document_without_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="markers"):
        bars.with_tables("# Performance\n", bars.Results({}, {}, []))


def test_every_test_has_a_bar_and_every_bar_a_test() -> None:
    assert {bar.test for bar in bars.BARS} == set(bars.TESTS)


def test_prompts_are_as_long_as_they_say_and_new_where_they_say() -> None:
    known, new = bodies.known_history(), bodies.new_history()

    assert len(known) == len(new) == bodies.TURNS
    assert [bodies.MARKER in turn for turn in known] == [False] * (bodies.TURNS - 1) + [True]
    assert all(bodies.MARKER in turn for turn in new)
    for turns in (known, new):
        assert 0.95 < sum(map(len, turns)) / bodies.LARGE_BYTES < 1
