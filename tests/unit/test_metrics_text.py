"""What an engine's metrics say, in the words of every release."""

from pathlib import Path

import pytest

from gateway.core.capacity import Reading
from gateway.upstream.metrics_text import CacheConfig, read_page

RECORDED = Path(__file__).parents[1] / "fixtures/vllm"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_a_recorded_page_is_read() -> None:
    page = read_page(recorded("metrics_idle.txt"))
    assert page.configs == {"0": CacheConfig(256, 32, 8192, True)}
    assert page.reading == Reading(
        num_gpu_blocks=256,
        prefix_caching=True,
        kv_use=0.0,
        preemptions=0,
        running=0,
        waiting=0,
        prefix_queries=page.reading.prefix_queries,
        prefix_hits=page.reading.prefix_hits,
        tokens=page.reading.tokens,
        started_at=page.reading.started_at,
    )
    assert page.reading.started_at is not None
    assert page.reading.started_at > 1.7e9
    assert page.reading.tokens is not None
    assert page.reading.swaps is None, "0.32 cannot swap, and says nothing of it"


def test_two_ranks_are_two_engines() -> None:
    assert sorted(read_page(recorded("metrics_dp2_load.txt")).configs) == ["0", "1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_blocks(rank: int) -> None:
    """The engine states 512 for each of two; each had 256."""
    page = read_page(recorded("metrics_dp2_load.txt"), rank)
    (config,) = page.configs.values()
    assert (config.num_gpu_blocks, config.block_size) == (256, 32)
    assert page.reading.num_gpu_blocks == 256
    assert page.reading.running == 15
    assert page.reading.started_at is None, "vLLM states no start where it has several processes"


def test_a_rank_that_is_not_there_states_nothing() -> None:
    page = read_page(recorded("metrics_dp2_load.txt"), 2)
    assert page.configs == {}
    assert page.reading.kv_use is None


def test_a_rank_whose_blocks_are_stated_as_its_own_keeps_them() -> None:
    line = 'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1600"} 1\n'
    assert read_page(line % 0 + line % 1, 1).configs == {"1": CacheConfig(100, 16, 1600)}


def test_figures_are_of_the_rank_that_is_meant() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 5\n'
    assert read_page(text, 1).reading.running == 5
    assert read_page(text).reading.running == 8


OLD = """
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_swapped{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 5.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cpu_cache_usage_perc{model_name="m"} 0.0
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40.0
vllm:num_preemptions_total{model_name="m"} 7.0
vllm:prompt_tokens_total{model_name="m"} 1000.0
vllm:generation_tokens_total{model_name="m"} 1.2e+06
process_start_time_seconds 1.795957988e+09
"""
"""The names of releases up to 0.8."""


def test_old_names_are_understood() -> None:
    reading = read_page(OLD).reading
    assert reading == Reading(
        kv_use=0.25,
        preemptions=7,
        running=3,
        waiting=5,
        swapped=2,
        swap_use=0.0,
        prefix_queries=100,
        prefix_hits=40,
        tokens=1_201_000,
        started_at=1795957988.0,
    )
    assert reading.swaps is True


def test_a_page_with_both_names_is_read_by_the_new_one() -> None:
    reading = read_page(OLD + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n').reading
    assert reading.kv_use == 0.5


def test_who_waits_for_an_adapter_does_not_count() -> None:
    by_reason = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="%s"} %s\n'
    text = OLD + by_reason % ("capacity", "1.0") + by_reason % ("deferred", "4.0")
    assert read_page(text).reading.waiting == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>hello</html>",
        'vllm:kv_cache_usage_perc{engine="0"} NaN',
        'vllm:kv_cache_usage_perc{engine="0"} -1',
        'vllm:kv_cache_usage_perc{engine="0"} +Inf',
        'vllm:kv_cache_usage_perc{engine="0"} 1e400',
        'vllm:kv_cache_usage_perc{engine="0"}',
        'vllm:kv_cache_usage_perc{engine="0"} many',
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} NaN',
        "# vllm:kv_cache_usage_perc 0.5",
        'vllm:kv_cache_usage_perc_of_another{engine="0"} 0.5',
        "\ufffd" * 100,
    ],
)
def test_absent_or_senseless_is_unknown_never_zero(text: str) -> None:
    assert read_page(text).reading.kv_use is None


@pytest.mark.parametrize(
    ("line", "kv_use"),
    [
        ('vllm:kv_cache_usage_perc{model_name="a } b {",engine="0"} 0.5', 0.5),
        ("vllm:kv_cache_usage_perc 0.5", 0.5),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.5 1795957988000', 0.5),
    ],
)
def test_lines_that_prometheus_allows(line: str, kv_use: float) -> None:
    assert read_page(line).reading.kv_use == kv_use


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (CacheConfig(256, 32, 8192, True), True),
        (CacheConfig(256, 32, 8190, True), True),
        (CacheConfig(256, 32, None, True), True),
        (CacheConfig(None, 32, 8192, True), True),
        (CacheConfig(256, 32, 8192, False), False),
        (CacheConfig(256, 32, 8192, None), None),
        (CacheConfig(256, 32, 31_775, True), False),
        (CacheConfig(256, 32, 4096, True), False),
    ],
)
def test_what_gives_blocks_up_has_no_blocks_in_common(config: CacheConfig, shares: bool | None) -> None:
    """A sliding window of 512 tokens makes 31,775 of 8,192 (vLLM 0.32, measured)."""
    assert config.shares_prefixes is shares
    label = "" if config.prefix_caching is None else f',enable_prefix_caching="{config.prefix_caching}"'
    numbers = {
        "num_gpu_blocks": config.num_gpu_blocks,
        "block_size": config.block_size,
        "kv_cache_size_tokens": config.cache_tokens,
    }
    labels = ",".join(f'{name}="{number}"' for name, number in numbers.items())
    page = read_page("vllm:cache_config_info{" + labels + label + "} 1\n")
    assert page.reading.prefix_caching is shares
