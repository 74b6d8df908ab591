"""What a mock server is started with beside its engine; every name is that of vLLM's own option."""

from dataclasses import dataclass

RUNNERS = ("generate", "pooling")
CONVERSIONS = ("embed", "classify")


@dataclass(frozen=True, slots=True)
class Options:
    aliases: tuple[str, ...] = ()
    """Served names beside the first one, which is the engine's model."""
    root: str | None = None
    """What `/v1/models` tells as the path of the weights; None: the model's name."""
    api_key: str | None = None
    """Asked for under /v1, /v2 and /inference only."""
    runner: str = "generate"
    """"pooling": the model embeds and scores, and generates nothing."""
    convert: str = "embed"
    """"classify": a model that pools scores queries and documents together, and embeds nothing."""
    listens: bool = False
    """Mock-only: the model understands speech, so that the server has the routes of audio."""
    responses_store: bool = False
    """vLLM's VLLM_ENABLE_RESPONSES_API_STORE=1: responses can be asked for again."""
    dev_mode: bool = False
    """vLLM's VLLM_SERVER_DEV_MODE=1: the routes to pause, to sleep and to forget the prefix cache."""
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    enable_server_load_tracking: bool = False
    sse_keep_alive_interval_seconds: float = 0.0
    """A stream that was silent for so long gets a comment line; 0: none."""
    stream_interval: int = 1
    """Tokens of a chunk, but for the first and the last one."""
    output_tokens: int | None = None
    """Mock-only: tokens after which a call ends that neither scripts a length nor ignores the end of text."""
    late_busy: bool = False
    """Mock-only: streams meet the engine's queue limits after their headers, as racing arrivals do in vLLM."""

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, got {self.runner!r}")
        if self.convert not in CONVERSIONS:
            raise ValueError(f"convert must be one of {', '.join(CONVERSIONS)}, got {self.convert!r}")
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, got {self.stream_interval}")
        if not self.sse_keep_alive_interval_seconds >= 0:
            raise ValueError(
                f"sse_keep_alive_interval must be at least 0, got {self.sse_keep_alive_interval_seconds}"
            )
        if self.output_tokens is not None and self.output_tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.output_tokens}")
