"""The pure half of the mock: KV blocks and V1 scheduling, one step at a time, without clock or I/O.

What it keeps of a vLLM V1 engine (`vllm/v1/core/sched/scheduler.py`, `block_pool.py`):

- block 0 is the null block, so `blocks - 1` are usable;
- running sequences are served first, each gets blocks for the tokens that the step computes;
- when blocks run out the last running sequence is preempted: its blocks are freed, it recomputes everything and
  waits at the head of the queue; nothing is admitted in that step;
- a waiting sequence is admitted when all its known tokens would fit in free blocks, a place under `max_num_seqs`
  is free and the step has token budget left; its prefill is chunked by that budget;
- `max_tokens` is never reserved, and the last sampled token's KV is never stored.

A sequence that cannot fit stays at the head of the queue and blocks everything behind it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine (names as vLLM's options) and its step time: base + prefill tokens + sequences."""

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

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.blocks < 2:
            raise ValueError(f"blocks must be at least 2 (one is the null block), got {self.blocks}")

    @property
    def usable_blocks(self) -> int:
        return self.blocks - 1

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` token slots."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Sizes:
    """One sequence as asked for: prompt tokens and the output tokens it will produce, both at least 1."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One call: a sequence per choice of each prompt.  A held request computes its prompt and keeps the blocks, but
    samples nothing until `Engine.release`."""

    id: str
    sequences: tuple[Sizes, ...]
    held: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    request_id: str
    index: int
    sizes: Sizes
    held: bool
    outputs: int = 0
    """Tokens sampled so far; preemption keeps them."""
    computed: int = 0
    """Tokens whose KV is stored."""
    blocks: int = 0
    preemptions: int = 0
    running: bool = False

    @property
    def known(self) -> int:
        """Tokens that exist: the prompt and what was sampled."""
        return self.sizes.prompt_tokens + self.outputs

    @property
    def pending(self) -> int:
        """Tokens still to compute; a held sequence leaves its last one out and so never samples."""
        return self.known - self.computed - int(self.held)

    @property
    def decoding(self) -> bool:
        return self.outputs > 0 and self.known - self.computed == 1


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: `number` counts from 1 within its sequence, `last` ends the sequence."""

    request_id: str
    index: int
    number: int
    last: bool


@dataclass(slots=True)
class Step:
    """What one step does: filled by `schedule`, its `tokens` by `complete`."""

    duration_ms: float = 0.0
    work: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    computed_tokens: int = 0
    prefill_tokens: int = 0

    @property
    def idle(self) -> bool:
        """True when nothing can move until a request is added, aborted or released."""
        return not (self.work or self.admitted or self.preempted)


class Engine:
    """One engine.  `schedule` takes the blocks of a step and `complete` samples its tokens, so that between the two,
    while the step "runs", the pool looks as a real one does; `step` is both at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.blocks_used = 0
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        """Prompt tokens of sequences that gave their first token, as vLLM counts them."""
        self.generation_tokens = 0
        self._live: dict[str, list[Sequence]] = {}

    @property
    def blocks_free(self) -> int:
        return self.config.usable_blocks - self.blocks_used

    @property
    def kv_usage(self) -> float:
        return self.blocks_used / self.config.usable_blocks

    def add(self, request: Request) -> None:
        """Queue every sequence of the request.  Raises ValueError when its id is in use."""
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in the engine")
        sequences = [Sequence(request.id, i, s, request.held) for i, s in enumerate(request.sequences)]
        self._live[request.id] = sequences
        self.waiting.extend(sequences)

    def abort(self, request_id: str) -> bool:
        """Drop all sequences of a request and free their blocks at once; False when the request is not here."""
        sequences = self._live.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.running:
                self._leave(sequence)
            else:
                self.waiting.remove(sequence)
        return True

    def release(self, request_id: str) -> None:
        """Let a held request sample; unknown ids are ignored."""
        for sequence in self._live.get(request_id, ()):
            sequence.held = False

    def request_ids(self) -> Iterator[str]:
        return iter(tuple(self._live))

    def step(self) -> Step:
        """Schedule and complete in one go."""
        step = self.schedule()
        self.complete(step)
        return step

    def schedule(self) -> Step:
        """Choose the work of the next step and take its blocks."""
        step = Step()
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if step.work:
            self.steps += 1
        step.duration_ms = self._duration_ms(step)
        return step

    def complete(self, step: Step) -> None:
        """Store the computed KV and sample; sequences aborted since `schedule` are passed over."""
        for sequence, count in step.work:
            if not sequence.running:
                continue
            sequence.computed += count
            if sequence.computed == sequence.known:
                step.tokens.append(self._sample(sequence))

    def _schedule_running(self, step: Step) -> None:
        position = 0
        while position < len(self.running) and step.computed_tokens < self.config.max_num_batched_tokens:
            sequence = self.running[position]
            count = self._chunk(sequence, step)
            if count > 0:
                if not self._make_room(sequence, count, step):
                    return
                self._take(sequence, count, step)
            position += 1

    def _schedule_waiting(self, step: Step) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            out_of_budget = step.computed_tokens >= self.config.max_num_batched_tokens
            if out_of_budget or self.config.blocks_for(sequence.known) > self.blocks_free:
                return
            self.waiting.popleft()
            sequence.running = True
            self.running.append(sequence)
            step.admitted.append(sequence)
            self._take(sequence, self._chunk(sequence, step), step)

    def _chunk(self, sequence: Sequence, step: Step) -> int:
        return min(sequence.pending, self.config.max_num_batched_tokens - step.computed_tokens)

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        return self.config.blocks_for(sequence.computed + count + int(sequence.held)) - sequence.blocks

    def _make_room(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Preempt from the back until the sequence's next tokens fit; False when it had to go itself."""
        while self._blocks_missing(sequence, count) > self.blocks_free:
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, count: int, step: Step) -> None:
        missing = self._blocks_missing(sequence, count)
        assert 0 <= missing <= self.blocks_free
        sequence.blocks += missing
        self.blocks_used += missing
        if count == 0:
            return
        step.work.append((sequence, count))
        step.computed_tokens += count
        if not sequence.decoding:
            step.prefill_tokens += count

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self.blocks_used -= sequence.blocks
        sequence.blocks = 0

    def _sample(self, sequence: Sequence) -> Token:
        sequence.outputs += 1
        self.generation_tokens += 1
        if sequence.outputs == 1:
            self.prompt_tokens += sequence.sizes.prompt_tokens
        last = sequence.outputs == sequence.sizes.output_tokens
        if last:
            self._finish(sequence)
        return Token(sequence.request_id, sequence.index, sequence.outputs, last)

    def _finish(self, sequence: Sequence) -> None:
        self._leave(sequence)
        siblings = self._live[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request_id]

    def _duration_ms(self, step: Step) -> float:
        config = self.config
        microseconds = config.step_prefill_us * step.prefill_tokens + config.step_running_us * len(step.work)
        return config.step_base_ms + microseconds / 1000
