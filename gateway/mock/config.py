"""The settings of one mock engine."""

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")
_AT_LEAST_ONE = (
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "data_parallel_size",
)
_AT_LEAST_ZERO = (
    "step_base_ms",
    "step_prefill_us",
    "step_running_us",
    "step_kv_us",
    "watermark",
    "long_prefill_token_threshold",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine (names as vLLM's options) and its step time: base, prefill tokens, sequences, stored KV."""

    model: str = "demo"
    blocks: int = 4096
    """Pool size as vLLM reports it in `num_gpu_blocks`, the null block included."""
    block_size: int = 16
    max_model_len: int = 65536
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    step_base_ms: float = 8.0
    step_prefill_us: float = 20.0
    """Per prefill token in the step."""
    step_running_us: float = 50.0
    """Per sequence in the step."""
    step_kv_us: float = 0.0
    """Per token whose KV the step's sequences have stored at its end: reading it takes time."""
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    """"fcfs" or "priority"."""
    watermark: float = 0.0
    """Share of the pool that must stay free when a sequence is admitted beside running ones."""
    long_prefill_token_threshold: int = 0
    """Prompt tokens of one sequence in one step at most while there are others; 0 = no limit."""
    max_num_queued_reqs: int = 0
    """Sequences waiting and running at most, over all ranks; 0 = no limit (in vLLM: not given)."""
    max_num_queued_tokens: int = 0
    """With so many prompt tokens in prefill, over all ranks, no call is accepted; 0 = no limit."""
    data_parallel_size: int = 1
    """Ranks, each with a pool and a scheduler of its own."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _AT_LEAST_ZERO:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.watermark >= 1:
            raise ValueError(f"watermark must be below 1, got {self.watermark}")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")
        if self.blocks < 2:
            raise ValueError(f"blocks must be at least 2 (one is the null block), got {self.blocks}")

    @property
    def usable_blocks(self) -> int:
        return self.blocks - 1

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.blocks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` token slots."""
        return -(-tokens // self.block_size)
