"""`/metrics` as vLLM 0.32 writes it: names, label order and buckets as recorded, the families that are watched.

There is no prefix cache, no KV connector and no sleep: those series are there and stay at rest.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.mock.engine import Engine, EngineConfig, Step

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_BOUNDS = (1.0, *(float(1 << power) for power in range(3, 15)))


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counters that the engine itself does not keep, and the rendering of all."""

    def __init__(self, engine: Engine, started_at: float) -> None:
        self._engine = engine
        self._started_at = started_at
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token = Histogram(_FIRST_TOKEN_BOUNDS)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS)
        self.queue_time = Histogram(_REQUEST_BOUNDS)
        self.latency = Histogram(_REQUEST_BOUNDS)
        self.step_tokens = Histogram(_STEP_BOUNDS)

    def see_step(self, step: Step) -> None:
        if step.computed_tokens:
            self.step_tokens.observe(step.computed_tokens)

    def render(self) -> bytes:
        page = _Page({"engine": "0", "model_name": self._engine.config.model}, self._started_at)
        page.bare(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            self._started_at,
        )
        self._gauges(page)
        self._counters(page)
        page.histogram(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", self.step_tokens
        )
        page.histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            self.first_token,
        )
        page.histogram(
            "vllm:inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            self.inter_token,
        )
        page.histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.latency
        )
        text = "Histogram of time spent in WAITING phase for request."
        page.histogram("vllm:request_queue_time_seconds", text, self.queue_time)
        text = "Information of the LLMEngine CacheConfig"
        page.gauge("vllm:cache_config_info", text, [(_cache_config(self._engine.config), 1)], model=False)
        return page.text()

    def _gauges(self, page: "_Page") -> None:
        engine = self._engine
        waiting = len(engine.waiting)
        page.gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            [({}, len(engine.running))],
        )
        page.gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", [({}, waiting)]
        )
        by_reason = [({"reason": "capacity"}, waiting), ({"reason": "deferred"}, 0)]
        page.gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", by_reason)
        states = [
            ({"sleep_state": s}, int(s == "awake")) for s in ("awake", "weights_offloaded", "discard_all")
        ]
        page.gauge("vllm:engine_sleep_state", "Engine sleep state.", states)
        page.gauge(
            "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", [({}, engine.kv_usage)]
        )

    def _counters(self, page: "_Page") -> None:
        engine = self._engine
        text = "Prefix cache queries, in terms of number of queried tokens."
        page.counter("vllm:prefix_cache_queries", text, [({}, 0)])
        page.counter(
            "vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", [({}, 0)]
        )
        text = "Cumulative number of preemption from the engine."
        page.counter("vllm:num_preemptions", text, [({}, engine.preemptions)])
        page.counter(
            "vllm:prompt_tokens", "Number of prefill tokens processed.", [({}, engine.prompt_tokens)]
        )
        sources = [({"source": "local_compute"}, engine.prompt_tokens)]
        sources += [({"source": source}, 0) for source in ("local_cache_hit", "external_kv_transfer")]
        page.counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", sources)
        page.counter(
            "vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", [({}, 0)]
        )
        text = "Number of generation tokens processed."
        page.counter("vllm:generation_tokens", text, [({}, engine.generation_tokens)])
        finished = [({"finished_reason": reason}, number) for reason, number in self.finished.items()]
        page.counter("vllm:request_success", "Count of successfully processed requests.", finished)


class _Page:
    """Prometheus text format 0.0.4."""

    def __init__(self, common: dict[str, str], created: float) -> None:
        self._common = common
        self._created = created
        self._lines: list[str] = []

    def text(self) -> bytes:
        return "\n".join([*self._lines, ""]).encode()

    def bare(self, name: str, text: str, value: float) -> None:
        self._heading(name, text, "gauge")
        self._lines.append(f"{name} {value}")

    def gauge(
        self, name: str, text: str, series: Iterable[tuple[dict[str, Any], float]], *, model: bool = True
    ) -> None:
        common = self._common if model else {"engine": self._common["engine"]}
        self._heading(name, text, "gauge")
        self._lines += [f"{name}{_labels(common | labels)} {float(value)}" for labels, value in series]

    def counter(self, name: str, text: str, series: Sequence[tuple[dict[str, str], int]]) -> None:
        self._heading(f"{name}_total", text, "counter")
        self._lines += [
            f"{name}_total{_labels(self._common | labels)} {float(value)}" for labels, value in series
        ]
        self.gauge(f"{name}_created", text, [(labels, self._created) for labels, _ in series])

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._heading(name, text, "histogram")
        seen = 0
        for bound, number in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            seen += number
            self._lines.append(f"{name}_bucket{_labels(self._common | {'le': bound})} {float(seen)}")
        self._lines.append(f"{name}_count{_labels(self._common)} {float(seen)}")
        self._lines.append(f"{name}_sum{_labels(self._common)} {histogram.total}")
        self.gauge(f"{name}_created", text, [({}, self._created)])

    def _heading(self, name: str, text: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labels(labels: dict[str, Any]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(labels[name]))}"' for name in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _cache_config(config: EngineConfig) -> dict[str, Any]:
    tokens = config.blocks * config.block_size
    return {
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "effective_attention_block_size": config.block_size,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.92,
        "is_attention_free": False,
        "kv_cache_max_concurrency": tokens / config.max_model_len,
        "kv_cache_size_tokens": tokens,
        "num_cpu_blocks": None,
        "num_gpu_blocks": config.blocks,
        "num_gpu_blocks_override": config.blocks,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "user_specified_block_size": True,
    }
