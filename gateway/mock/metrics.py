"""`/metrics` as vLLM 0.32 writes it: names, texts, labels, buckets and order as recorded.

Left out is what says nothing about an engine: `python_*`, `process_*` but the start time, `http_*`, and
`vllm:estimated_*_per_gpu`.  There is no KV connector and no multi-modal cache: those series stay at rest.

With several ranks every series is there once per engine, but for what the API server counts.  As in vLLM the
`num_gpu_blocks` of each rank's `cache_config_info` is then the sum over all ranks; `kv_cache_size_tokens` is not.
"""

from collections.abc import Callable, Sequence

from gateway.mock.config import EngineConfig
from gateway.mock.engine import Engine
from gateway.mock.observed import FINISH_REASONS, HISTOGRAMS, RankMetrics
from gateway.mock.page import Labels, Page

REJECTION_REASONS = {"requests": "max_num_queued_reqs", "tokens": "max_num_queued_tokens"}
"""What `Driver.submit` gives as the reason, and its label."""
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")


class Metrics:
    """The page of all ranks, and what the API server counts."""

    def __init__(self, ranks: Sequence[RankMetrics], started_at: float) -> None:
        """`started_at` is the wall-clock time of the start, in seconds."""
        self._ranks = ranks
        self._started_at = started_at
        self._rejections = dict.fromkeys(REJECTION_REASONS.values(), 0)
        self.awake = True
        self.sleeping_level = 0

    @property
    def finished(self) -> dict[str, int]:
        """Sequences by finish reason, over all ranks."""
        return {reason: sum(rank.finished[reason] for rank in self._ranks) for reason in FINISH_REASONS}

    def rejected(self, reason: str) -> None:
        """Count a call that was refused as Busy, for its reason."""
        self._rejections[REJECTION_REASONS[reason]] += 1

    def abort_while_draining(self) -> None:
        """Count a call that the draining engine ended with finish_reason "abort"."""
        self.aborted(1)

    def aborted(self, sequences: int) -> None:
        """Count sequences that the engine itself ended; those that clients leave are not counted."""
        self._ranks[0].finished["abort"] += sequences

    def render(self) -> bytes:
        page = Page(self._started_at)
        text = "Start time of the process since unix epoch in seconds."
        page.gauge("process_start_time_seconds", text, [({}, self._started_at)])
        self._gauges(page)
        self._cache_counters(page)
        self._token_counters(page)
        self._request_counters(page)
        for name, text in HISTOGRAMS.items():
            series = [
                (labels, rank.histograms[name])
                for labels, rank in zip(self._engines(), self._ranks, strict=True)
            ]
            page.histogram(f"vllm:{name}", text, series)
        infos = [_cache_config(rank.engine.config) | {"engine": str(i)} for i, rank in enumerate(self._ranks)]
        text = "Information of the LLMEngine CacheConfig"
        page.gauge("vllm:cache_config_info", text, [(info, 1) for info in infos])
        text = "Tokens computed again after preemptions; vLLM has no such figure."
        page.counter("mock:recomputed_tokens", text, self._each(lambda engine: engine.recomputed_tokens))
        return page.text()

    def _engines(self) -> list[Labels]:
        model = self._ranks[0].engine.config.model
        return [{"engine": str(number), "model_name": model} for number in range(len(self._ranks))]

    def _each(self, value: Callable[[Engine], float], **labels: str) -> list[tuple[Labels, float]]:
        return [
            (common | labels, value(rank.engine))
            for common, rank in zip(self._engines(), self._ranks, strict=True)
        ]

    def _gauges(self, page: Page) -> None:
        text = "Number of requests in model execution batches."
        page.gauge("vllm:num_requests_running", text, self._each(lambda engine: len(engine.running)))
        waiting = self._each(lambda engine: len(engine.waiting))
        page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        by_reason = [(labels | {"reason": "capacity"}, value) for labels, value in waiting]
        by_reason += self._each(_nothing, reason="deferred")
        text = (
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity;"
            " 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status)."
            " Sum of all reasons equals vllm:num_requests_waiting."
        )
        page.gauge("vllm:num_requests_waiting_by_reason", text, by_reason)
        text = (
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake;"
            " weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
        )
        page.gauge("vllm:engine_sleep_state", text, self._sleep_states())
        text = "KV-cache usage. 1 means 100 percent usage."
        page.gauge("vllm:kv_cache_usage_perc", text, self._each(lambda engine: engine.kv_usage))

    def _sleep_states(self) -> list[tuple[Labels, float]]:
        states = {
            "awake": self.awake,
            "weights_offloaded": self.sleeping_level == 1,
            "discard_all": self.sleeping_level == 2,
        }
        return [
            (labels | {"sleep_state": state}, on)
            for state, on in states.items()
            for labels in self._engines()
        ]

    def _cache_counters(self, page: Page) -> None:
        text = "Prefix cache queries, in terms of number of queried tokens."
        page.counter("vllm:prefix_cache_queries", text, self._each(lambda engine: engine.prefix_queries))
        text = "Prefix cache hits, in terms of number of cached tokens."
        page.counter("vllm:prefix_cache_hits", text, self._each(lambda engine: engine.prefix_hits))
        for what, unit in (("queries", "queried"), ("hits", "cached")):
            text = f"External prefix cache {what} from KV connector cross-instance cache sharing,"
            text += f" in terms of number of {unit} tokens."
            page.counter(f"vllm:external_prefix_cache_{what}", text, self._each(_nothing))
        for what, unit in (("queries", "queried"), ("hits", "cached")):
            text = f"Multi-modal cache {what}, in terms of number of {unit} items."
            page.counter(f"vllm:mm_cache_{what}", text, self._each(_nothing))

    def _token_counters(self, page: Page) -> None:
        text = "Cumulative number of preemption from the engine."
        page.counter("vllm:num_preemptions", text, self._each(lambda engine: engine.preemptions))
        text = "Number of prefill tokens processed."
        page.counter("vllm:prompt_tokens", text, self._each(lambda engine: engine.prompt_tokens))
        sources = self._each(
            lambda engine: engine.prompt_tokens - engine.prompt_tokens_cached, source="local_compute"
        )
        sources += self._each(lambda engine: engine.prompt_tokens_cached, source="local_cache_hit")
        sources += self._each(_nothing, source="external_kv_transfer")
        page.counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", sources)
        text = "Number of cached prompt tokens (local + external)."
        page.counter(
            "vllm:prompt_tokens_cached", text, self._each(lambda engine: engine.prompt_tokens_cached)
        )
        tiers = self._each(lambda engine: engine.prefix_hits, source=_TIERS[0])
        for tier in _TIERS[1:]:
            tiers += self._each(_nothing, source=tier)
        text = (
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to"
            " DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at"
            " admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
        )
        page.counter("vllm:prompt_tokens_cached_by_source", text, tiers)
        text = "Number of generation tokens processed."
        page.counter("vllm:generation_tokens", text, self._each(lambda engine: engine.generation_tokens))

    def _request_counters(self, page: Page) -> None:
        finished = [
            (labels | {"finished_reason": reason}, float(rank.finished[reason]))
            for reason in FINISH_REASONS
            for labels, rank in zip(self._engines(), self._ranks, strict=True)
        ]
        page.counter("vllm:request_success", "Count of successfully processed requests.", finished)
        model = self._ranks[0].engine.config.model
        rejections = [
            ({"model_name": model, "reason": reason}, float(count))
            for reason, count in self._rejections.items()
        ]
        text = "Number of admission attempts rejected by a queue limit, by reason."
        page.counter("vllm:admission_rejections", text, rejections)


def _nothing(_: Engine) -> float:
    return 0.0


def _cache_config(config: EngineConfig) -> Labels:
    tokens = config.blocks * config.block_size
    values: dict[str, object] = {
        "_block_size_resolved": True,
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": config.block_size,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": 0.92,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": tokens / config.max_model_len,
        "kv_cache_memory_bytes": 1 << 30,
        "kv_cache_size_tokens": tokens,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": None,
        "num_gpu_blocks": config.blocks * config.data_parallel_size,
        "num_gpu_blocks_override": config.blocks,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "replayssm_buffer_len": 16,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": True,
        "use_kda_recoverssm": False,
        "use_replayssm": False,
        "user_specified_block_size": True,
    }
    return {name: str(value) for name, value in values.items()}
