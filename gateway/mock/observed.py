"""What happened to the sequences of one rank, for `/metrics`; the bounds are those of vLLM 0.32."""

from collections.abc import Sequence

from gateway.mock.engine import Engine
from gateway.mock.page import Histogram
from gateway.mock.stream import Stream

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
_CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
HISTOGRAMS = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
}
"""In the order of the page, with vLLM's texts."""


class RankMetrics:
    """Counters and histograms of one rank that its engine does not keep."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        tokens = _tokens_bounds(engine.config.max_model_len)
        self.histograms = {name: Histogram(_bounds(name, tokens)) for name in HISTOGRAMS}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def see_finished(self, stream: Stream, index: int, now: float) -> None:
        """A sequence gave its last token now; its track is complete."""
        track, sizes = stream.tracks[index], stream.plan.sequences[index]
        arrived, first = stream.arrived, _known(track.first_at)
        admitted = _known(track.admitted_at)
        self.finished[stream.plan.reasons[index]] += 1
        self.observe("e2e_request_latency_seconds", now - arrived)
        self.observe("request_queue_time_seconds", admitted - arrived)
        self.observe("request_inference_time_seconds", now - admitted)
        self.observe("request_prefill_time_seconds", first - admitted)
        self.observe("request_decode_time_seconds", now - first)
        per_token = (now - first) / (track.tokens - 1) if track.tokens > 1 else 0.0
        self.observe("request_time_per_output_token_seconds", per_token)
        self.observe("request_num_preemptions", track.preemptions)
        self.observe("request_prompt_tokens", sizes.prompt_tokens)
        self.observe("request_prefill_kv_computed_tokens", sizes.prompt_tokens - track.cached_tokens)
        self.observe("request_generation_tokens", track.tokens if sizes.output_tokens else 0)
        if sizes.output_tokens:
            limits = stream.plan.limits
            self.observe("request_params_max_tokens", limits[index] if limits else sizes.output_tokens)
        self._see_prompt_finished(stream, index)

    def _see_prompt_finished(self, stream: Stream, index: int) -> None:
        """What is counted once for all choices of a prompt, when the last of them ends."""
        choices = stream.plan.choices
        start = index - index % choices
        tokens = [track.tokens for track in stream.tracks[start : start + choices]]
        if all(tokens):
            samples = stream.plan.sequences[index].output_tokens > 0
            self.observe("request_max_num_generation_tokens", max(tokens) if samples else 0)
            self.observe("request_params_n", choices)


def _known(time: float | None) -> float:
    assert time is not None
    return time


def _bounds(name: str, tokens: Sequence[float]) -> Sequence[float]:
    return {
        "iteration_tokens_total": _STEP_BOUNDS,
        "request_params_n": _CHOICES_BOUNDS,
        "time_to_first_token_seconds": _FIRST_TOKEN_BOUNDS,
        "inter_token_latency_seconds": _INTER_TOKEN_BOUNDS,
        "request_time_per_output_token_seconds": _INTER_TOKEN_BOUNDS,
        "request_num_preemptions": _PREEMPTIONS_BOUNDS,
    }.get(name, _REQUEST_BOUNDS if name.endswith("_seconds") else tokens)


def _tokens_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... as far as the context goes."""
    steps = (mantissa * 10**power for power in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= max_model_len)
