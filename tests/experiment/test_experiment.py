"""The experiment in its short form: its bounds, its books against the real ones, its document."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import redis

from benchmarks.experiment import cells, traces
from benchmarks.experiment.bounds import THROUGHPUT, Bound, bounds
from benchmarks.experiment.gates import Books, Elastic, Guaranteed
from benchmarks.experiment.ledgers import compared
from benchmarks.experiment.report import DOCUMENTS, all_bounds, filled
from benchmarks.experiment.sharing import SharingBooks
from benchmarks.experiment.traces import TRACES
from benchmarks.experiment.world import TTFT_SECONDS, World
from gateway.core import elastic
from gateway.ledger.embedded import EmbeddedStore
from gateway.mock.engine import Engine, Request, Sizes
from tests.repo.files import ROOT

SHORT = cells.Case("generous", 2_000, 57, 2_500, others=800, arriving=0, shift=0)


@pytest.fixture(scope="module")
def store_client() -> Iterator["redis.Redis[bytes]"]:
    """A client of a real Valkey of this module's own."""
    store = EmbeddedStore()
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    yield client
    client.close()
    store.stop()


def test_the_bounds_hold_in_the_short_form() -> None:
    results: cells.Results = {}
    cells.Player(results, lambda _, __: None).case(SHORT)
    found = list(bounds(results, SHORT, slack=0.1))
    assert len(found) == 4
    assert all(bound.holds for bound in found), found
    assert results["generous 2000 closed watermark .05"]["preemptions"] > 20
    assert results["generous 2000 closed guaranteed"]["block_use"] < 0.2


@pytest.mark.parametrize("trace", ["generous", "chat"])
def test_the_real_books_grant_the_same_calls_at_the_same_moments(
    store_client: "redis.Redis[bytes]", trace: str
) -> None:
    found = compared(store_client, cells.Case(trace, 2_000, 0, 0), 100, 400)
    assert found["grants"] >= 400
    assert found["differ"] == 0


@pytest.mark.parametrize("trace", sorted(TRACES))
def test_every_call_fits_the_smallest_replica_that_its_trace_is_played_on(trace: str) -> None:
    smallest = min(blocks for name, blocks in THROUGHPUT if name == trace)
    calls = traces.calls(TRACES[trace], 1)
    for call in (next(calls) for _ in range(20_000)):
        assert 1 <= call.output_tokens <= call.limit
        assert call.blocks <= smallest


def test_a_session_sends_again_what_was_said_and_the_engine_still_has_it() -> None:
    """Its prompts grow and fit the smallest replica, and but for what is new they are found in the prefix cache, the
    answers too."""
    smallest = min(case.blocks for case in cells.CASES if case.trace == cells.AGENTS)
    sessions = traces.sessions(3)
    for session in (next(sessions) for _ in range(20)):
        engine, before = Engine(replace(cells.ENGINE, blocks=smallest + 1)), 0
        for call in session:
            assert call.prompt_tokens > before
            assert call.blocks <= smallest
            hits = engine.prefix_hits
            sizes = Sizes(call.prompt_tokens, call.output_tokens, call.content)
            engine.add(Request(str(call.number), (sizes,)))
            while not engine.step().idle:
                pass
            assert before - traces.BLOCK_SIZE <= engine.prefix_hits - hits <= call.prompt_tokens
            before = call.prompt_tokens + call.output_tokens - 1


def test_who_thinks_goes_on_later() -> None:
    """One client: between an answer and the next turn nothing runs."""
    config = replace(cells.ENGINE, blocks=2_201)
    found = World(config, None, shared_prompts=True).session_loop(traces.sessions(1), 1, 30)
    busy = sum(found.ttfts)
    assert found.calls == 30
    assert found.seconds > 29 * traces.THINK_SECONDS + busy
    assert found.running < 1


def test_a_refused_turn_ends_its_session_and_what_was_before_is_not_measured() -> None:
    """Far more sessions than a small replica has room for."""
    config = replace(cells.ENGINE, blocks=2_201)
    books = SharingBooks(2_200, warm_first=True)
    world = World(config, Guaranteed(books), shared_prompts=True)
    found = world.open_sessions(traces.sessions(1), traces.steady(1, 0.3), 120, 120, patience=True)
    refused = [held.call for held in books.dropped]
    assert len({call.session for call in refused if isinstance(call, traces.Turn)}) == len(refused)
    assert 119 < found.seconds < 121
    assert 0 < found.dropped < len(refused)
    assert 0 < found.broken_off < found.later_turns
    assert found.calls == len(found.ttfts) > 0
    assert max(found.ttfts) < TTFT_SECONDS + 3


def test_sessions_are_judged_by_throughput_good_answers_and_refused_turns() -> None:
    case = next(case for case in cells.CASES if case.sessions)
    best = {"clients": 50, "asked": 1, "tokens_per_second": 100.0, "good": 400, "seconds": 100.0}
    run = {
        "tokens_per_second": 96.0,
        "good": 190,
        "seconds": 50.0,
        "calls": 200,
        "later": 200,
        "preemptions": 0,
    }
    results: dict[str, Any] = {
        f"{case.name} sweep 50": best,
        f"{case.name} sessions 1.1 elastic + soft hold": {**run, "broken": 3},
        f"{case.name} sessions 1.5 elastic + soft hold": {**run, "broken": 3, "good": 189, "preemptions": 1},
    }
    assert [bound.holds for bound in bounds(results, case)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        True,
        False,
    ]


def test_traces_are_what_they_say() -> None:
    chat = [call for call, _ in zip(traces.calls(traces.chat, 2), range(20_000), strict=False)]
    outputs = sorted(call.output_tokens for call in chat)
    assert outputs[10_000] == pytest.approx(317, rel=0.05)
    assert outputs[19_800] > 4_000  # p99 is 7,551 without limits
    moments = traces.bursts(1, 50, 100)
    assert next(moments) == next(moments)


@pytest.mark.parametrize("gate", ["ungated", "guaranteed", "elastic"])
def test_all_is_given_back_when_the_calls_are_over(gate: str) -> None:
    """In the engine, and in the books: blocks, sequences, prefill, paths."""
    case = cells.Case("chat", 2_000, 0, 0, arriving=300)
    world = cells.world_of(case, gate)
    found = world.open_loop(traces.calls(traces.chat, 1), traces.steady(1, 2.0), 300, gate != "ungated")
    assert found.calls + found.dropped == 300
    assert found.preemptions == 0 or gate != "guaranteed"
    books = world.books
    if books is not None:
        assert (books.used, books.full, books.assured, books.sequences, books.prefill) == (0, 0, 0, 0, 0)
        assert books.sums == [0] * elastic.POINTS
    assert world.seconds[-1][1] >= 0


def test_nothing_learned_is_as_if_guaranteed() -> None:
    """Calls that all go to a limit between two horizons, and never teach anything else, arrive at once."""
    config = replace(cells.ENGINE, blocks=2_001)
    found = []
    for gate in (Guaranteed(Books(2_000)), Elastic(Books(2_000), 2_048)):
        source = (traces.Call(number, 300, 3_000, 3_000) for number in count())
        found.append(World(config, gate).closed_loop(source, 60, 60))
    assert found[1].preemptions == 0
    assert found[1].overdrafts == 0
    assert found[1].running == pytest.approx(found[0].running, rel=0.2)


def test_a_figure_out_of_bounds_is_said_to_be() -> None:
    assert not Bound("", 0.96, least=0.97).holds
    assert Bound("", 0.97, least=0.97).holds
    assert not Bound("", 1, most=0).holds
    elastic_run = {"tokens_per_second": 89.0, "preemptions": 1, "calls": 9_000, "first_preemptions": 1}
    results: dict[str, Any] = {
        "generous 2000 sweep 50": {"clients": 50, "tokens_per_second": 100.0},
        "generous 2000 closed elastic": elastic_run,
    }
    assert [bound.holds for bound in bounds(results, SHORT)] == [False, False, False]


def test_a_run_is_compared_with_the_best_ungated_concurrency_on_the_same_calls() -> None:
    """Of the sweep where those were not played."""
    results: dict[str, Any] = {
        "generous 2000 sweep 50": {"clients": 50, "asked": 800, "tokens_per_second": 100.0},
        "generous 2000 sweep 60": {"clients": 60, "asked": 800, "tokens_per_second": 90.0},
        "generous 2000 best 50": {"clients": 50, "asked": 2_500, "tokens_per_second": 80.0},
    }
    short, long = ({"asked": asked, "tokens_per_second": 72.0} for asked in (800, 2_500))
    assert cells.part_of_best(results, SHORT, short) == pytest.approx(0.72)
    assert cells.part_of_best(results, SHORT, long) == pytest.approx(0.9)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_documents_are_made_of_their_figures(name: str) -> None:
    """`make experiment ARGS=--doc` writes them."""
    text = (ROOT / "docs" / name).read_text()
    results = json.loads((ROOT / "docs/utilisation.json").read_text())
    assert filled(text, results) == text


def test_every_bound_is_in_the_document() -> None:
    text = (ROOT / "docs/utilisation.md").read_text()
    results = json.loads((ROOT / "docs/utilisation.json").read_text())
    assert all(bound.what in text for bound in all_bounds(results))
