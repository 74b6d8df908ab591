"""The metrics page against pages of a real vLLM 0.32.0, and its figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.mock.engine import Engine, EngineConfig, Request, Sizes
from gateway.mock.metrics import Metrics
from gateway.mock.observed import FINISH_REASONS, RankMetrics
from gateway.mock.page import Histogram, Page, number
from gateway.mock.pool import content
from gateway.mock.stream import Plan, Stream

RECORDED = Path(__file__).parents[2] / "fixtures" / "vllm"
TINY = EngineConfig(model="tiny", blocks=256, block_size=32, max_model_len=4096)


def page_of(config: EngineConfig) -> str:
    ranks = [RankMetrics(Engine(config)) for _ in range(config.data_parallel_size)]
    return Metrics(ranks, 5.0).render().decode()


def shape(text: str) -> list[str]:
    """Headings, and series without their values, of the families that the mock has."""
    lines = [line for line in text.splitlines() if "vllm:" in line and "vllm:estimated_" not in line]
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]


def test_names_texts_labels_buckets_and_order_are_those_of_vllm() -> None:
    recorded = (RECORDED / "metrics_idle.txt").read_text()
    assert shape(page_of(TINY)) == shape(recorded)


def test_two_ranks_have_the_series_of_vllm() -> None:
    """Its page of two ranks is put together from several processes: other order, no time of creation."""
    recorded = (RECORDED / "metrics_dp2_load.txt").read_text()
    ours = page_of(replace(TINY, data_parallel_size=2))
    assert {line for line in shape(ours) if "_created" not in line} == set(shape(recorded))


def value(page: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.M)
    assert found is not None, series
    return float(found[1])


def test_an_engine_at_work_is_on_the_page() -> None:
    engine = Engine(EngineConfig(model='a"b', blocks=256, block_size=32))
    rank = RankMetrics(engine)
    prompt = content([str(n) for n in range(70)], 32)
    for name in ("1", "2"):
        engine.add(Request(name, (Sizes(70, 3, prompt),)))
    engine.step()
    rank.observe("time_to_first_token_seconds", 0.02)
    page = Metrics([rank], 5.0).render().decode()
    labels = r'{engine="0",model_name="a\"b"}'
    for name, expected in (
        ("num_requests_running", 2),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 4 / 255),
        ("prompt_tokens_total", 140),
        ("prompt_tokens_cached_total", 64),
        ("prefix_cache_queries_total", 140),
        ("prefix_cache_hits_total", 64),
        ("generation_tokens_total", 2),
    ):
        assert value(page, f"vllm:{name}{labels}") == expected
    by_source = r'vllm:prompt_tokens_by_source_total{engine="0",model_name="a\"b",source="%s"}'
    assert (value(page, by_source % "local_compute"), value(page, by_source % "local_cache_hit")) == (76, 64)
    bucket = r'vllm:time_to_first_token_seconds_bucket{engine="0",le="%s",model_name="a\"b"}'
    assert [value(page, bucket % bound) for bound in ("0.01", "0.02", "+Inf")] == [0, 1, 1]


def test_prefix_caching_is_shown_as_it_is_set() -> None:
    assert 'enable_prefix_caching="True"' in page_of(TINY)
    assert 'enable_prefix_caching="False"' in page_of(EngineConfig(enable_prefix_caching=False))


def test_what_the_server_counts() -> None:
    metrics = Metrics([RankMetrics(Engine(TINY))], 5.0)
    metrics.rejected("requests")
    metrics.rejected("tokens")
    metrics.rejected("tokens")
    metrics.abort_while_draining()
    metrics.awake, metrics.sleeping_level = False, 2
    page = metrics.render().decode()
    rejections = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_%s"}'
    assert [value(page, rejections % what) for what in ("reqs", "tokens")] == [1, 2]
    state = 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="%s"}'
    assert [value(page, state % s) for s in ("awake", "weights_offloaded", "discard_all")] == [0, 0, 1]
    assert metrics.finished == dict.fromkeys(FINISH_REASONS, 0) | {"abort": 1}
    with pytest.raises(KeyError):
        metrics.rejected("mood")


def test_the_times_of_a_sequence() -> None:
    """Queued, prefilled, decoded: the parts sum up to the whole."""
    rank = RankMetrics(Engine(TINY))
    stream = Stream("1", Plan((Sizes(70, 3),) * 2, ("stop", "length"), lambda: None, choices=2), arrived=10.0)
    for index, (admitted, first, last) in ((1, (10.5, 11.0, 14.0)), (0, (10.5, 11.0, 13.0))):
        track = stream.tracks[index]
        track.admitted_at, track.first_at, track.cached_tokens = admitted, first, 32 * index
        track.tokens, track.preemptions = 3 + index, index
        rank.see_finished(stream, index, last)
    sums = {name: histogram.total for name, histogram in rank.histograms.items() if histogram.total}
    assert sums == {
        "e2e_request_latency_seconds": 7.0,
        "request_queue_time_seconds": 1.0,
        "request_inference_time_seconds": 6.0,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 5.0,
        "request_time_per_output_token_seconds": 2.0,
        "request_num_preemptions": 1,
        "request_prompt_tokens": 140,
        "request_prefill_kv_computed_tokens": 108,
        "request_generation_tokens": 7,
        "request_params_max_tokens": 6,
        "request_max_num_generation_tokens": 4,  # of the two choices together
        "request_params_n": 2,
    }
    assert (rank.finished["stop"], rank.finished["length"]) == (1, 1)


def test_histograms_count_a_value_at_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0, 3)
    histogram.observe(2.5)
    assert (histogram.counts, histogram.total) == ([3, 0, 1], 5.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (3840, "3840.0"),
        (999999, "999999.0"),
        (1000000, "1e+06"),
        (1795958010.25, "1.79595801025e+09"),
        (8.7e-05, "8.7e-05"),
        (1e22, "1e+22"),
    ],
)
def test_numbers_are_written_as_in_go(value: float, text: str) -> None:
    assert number(value) == text


def test_label_values_are_escaped() -> None:
    page = Page(0.0)
    page.gauge("x", "text", [({"a": 'q"b\\n\n'}, 1)])
    assert page.text().decode().splitlines()[-1] == 'x{a="q\\"b\\\\n\\n"} 1.0'


def test_recomputed_tokens_are_counted() -> None:
    engine = Engine(EngineConfig(blocks=9, block_size=32, enable_prefix_caching=False))
    rank = RankMetrics(engine)
    for name in ("1", "2"):
        engine.add(Request(name, (Sizes(128, 64),)))
    while engine.running or engine.waiting:
        engine.step()
    page = Metrics([rank], 5.0).render().decode()
    assert engine.preemptions == 1
    assert value(page, 'mock:recomputed_tokens_total{engine="0",model_name="demo"}') >= 128
