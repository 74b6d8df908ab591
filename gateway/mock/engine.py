"""The pure half of the mock: KV blocks and V1 scheduling, one step at a time, without clock or I/O.

What it keeps of a vLLM V1 engine (`vllm/v1/core/sched/scheduler.py`, `kv_cache_manager.py` of 0.32.0):

- block 0 is the null block, so `blocks - 1` are usable;
- running sequences are served first, each gets blocks for the tokens that the step computes;
- when blocks run out the running sequence that is last by rank is preempted: its blocks are freed, it goes back to the
  queue, first come first served that is its head, and computes again what the prefix cache has not kept; nothing is
  admitted in that step;
- rank is arrival, or under the priority policy (priority, arrival): a more urgent arrival jumps the queue, but takes
  nothing from a running sequence;
- a waiting sequence is admitted when all its known tokens would fit in free blocks, a place under `max_num_seqs`
  is free and the step has token budget left; beside running sequences the watermark must stay free too;
- what the prefix cache has of a sequence is not computed again, except for its last token, and except for who wants
  log probabilities of the prompt; cached blocks that nobody holds count as free until then;
- blocks enter the prefix cache when the step that fills them is scheduled, so that sequences admitted in one step
  share; running sequences look nothing up;
- prefill is chunked by the step's token budget, and by `long_prefill_token_threshold` while there is more than one
  sequence;
- `max_tokens` is never reserved, and the last sampled token's KV is never stored.

A sequence that cannot fit stays at the head of the queue and blocks everything behind it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from gateway.mock.config import POLICIES, EngineConfig
from gateway.mock.pool import EMPTY, Block, BlockPool
from gateway.mock.work import Request, Sequence, Sizes, Step, Token

__all__ = ["POLICIES", "Engine", "EngineConfig", "Request", "Sequence", "Sizes", "Step", "Token"]


class Engine:
    """One engine.  `schedule` takes the blocks of a step and `complete` samples its tokens, so that between the two,
    while the step "runs", the pool looks as a real one does; `step` is both at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.usable_blocks)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        """By rank."""
        self.admitting = True
        """False: what waits goes on waiting, what runs goes on running."""
        self.steps = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens that were stored, lost by preemption and not found in the prefix cache."""
        self.prefix_queries = 0
        """Tokens looked up in the prefix cache at first admissions, and those of them found."""
        self.prefix_hits = 0
        self.prompt_tokens = 0
        """Prompt tokens of sequences that gave their first token, as vLLM counts them, and those of them cached."""
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self._arrivals = 0
        self._live: dict[str, list[Sequence]] = {}

    @property
    def blocks_used(self) -> int:
        return self.pool.used

    @property
    def blocks_free(self) -> int:
        return self.pool.free

    @property
    def kv_usage(self) -> float:
        return self.pool.used / self.pool.size

    def add(self, request: Request) -> None:
        """Queue every sequence of the request.  Raises ValueError when its id is in use or a prompt has another size
        than its content."""
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in the engine")
        indexes = request.indexes or range(len(request.sequences))
        sequences = [
            self._sequence(request, index, sizes)
            for index, sizes in zip(indexes, request.sequences, strict=True)
        ]
        self._live[request.id] = sequences
        for sequence in sequences:
            self._queue(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop all sequences of a request and free their blocks at once; False when the request is not here."""
        sequences = self._live.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.running:
                self._leave(sequence)
            else:
                del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        return True

    def release(self, request_id: str) -> None:
        """Let a held request sample; unknown ids are ignored."""
        for sequence in self._live.get(request_id, ()):
            sequence.held = False

    def has(self, request_id: str) -> bool:
        """True while a sequence of the request is here."""
        return request_id in self._live

    def request_ids(self) -> Iterator[str]:
        return iter(tuple(self._live))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while blocks are held."""
        return self.pool.reset()

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue; of a step that is open they sample nothing."""
        while self.running:
            self._preempt(self.running[-1])

    def step(self) -> Step:
        """Schedule and complete in one go."""
        step = self.schedule()
        self.complete(step)
        return step

    def schedule(self) -> Step:
        """Choose the work of the next step and take its blocks."""
        step = Step(self._chunk_max())
        self._schedule_running(step)
        if self.admitting and not step.preempted:
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

    def _sequence(self, request: Request, index: int, sizes: Sizes) -> Sequence:
        prompt, config = sizes.prompt, self.config
        given = len(prompt.hashes) * config.block_size + len(prompt.tail)
        if prompt != EMPTY and given != sizes.prompt_tokens:
            raise ValueError(f"the prompt has {given} tokens, not {sizes.prompt_tokens}")
        self._arrivals += 1
        priority = request.priority if config.scheduling_policy == "priority" else 0
        findable = config.enable_prefix_caching and given > 0
        return Sequence(request.id, index, sizes, request.held, (priority, self._arrivals), findable)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def _chunk_max(self) -> int:
        config = self.config
        if config.long_prefill_token_threshold and len(self.running) + len(self.waiting) > 1:
            return config.long_prefill_token_threshold
        return config.max_num_batched_tokens

    def _schedule_running(self, step: Step) -> None:
        position = 0
        while position < len(self.running) and step.computed_tokens < self.config.max_num_batched_tokens:
            sequence = self.running[position]
            count = self._chunk(sequence, step)
            if count > 0:
                missing = self._blocks_missing(sequence, count)
                if missing > self.pool.free:
                    if not self._make_room(sequence, missing, step):
                        return
                    position = self.running.index(sequence)
                self._take(sequence, count, missing, step)
            position += 1

    def _schedule_waiting(self, step: Step) -> None:
        config = self.config
        while self.waiting and len(self.running) < config.max_num_seqs:
            if step.computed_tokens >= config.max_num_batched_tokens:
                return
            sequence = self.waiting[0]
            found = self._find(sequence)
            if not self._fits(sequence, found):
                return
            del self.waiting[0]
            self._admit(sequence, found, step)

    def _find(self, sequence: Sequence) -> list[Block]:
        """What the prefix cache has of it; its last token is always computed, so that it can sample."""
        if not (sequence.findable and sequence.sizes.reads_cache):
            return []
        size = self.config.block_size
        return self.pool.find(sequence.hash_blocks((sequence.known - 1) // size, size))

    def _fits(self, sequence: Sequence, found: list[Block]) -> bool:
        needed = self.config.blocks_for(sequence.known) - len(found) + self.pool.free_among(found)
        spare = self.config.watermark_blocks if self.running else 0
        return needed + spare <= self.pool.free

    def _admit(self, sequence: Sequence, found: list[Block], step: Step) -> None:
        self.pool.share(found)
        sequence.blocks = found
        sequence.blocks_cached = len(found)
        sequence.computed = len(found) * self.config.block_size
        if sequence.preemptions:
            self.recomputed_tokens += max(0, sequence.computed_before - sequence.computed)
        else:
            self._count_lookup(sequence)
        sequence.running = True
        self.running.append(sequence)
        step.admitted.append(sequence)
        count = self._chunk(sequence, step)
        self._take(sequence, count, self._blocks_missing(sequence, count), step)

    def _count_lookup(self, sequence: Sequence) -> None:
        sequence.cached_tokens = sequence.computed
        if self.config.enable_prefix_caching and sequence.sizes.reads_cache:
            self.prefix_queries += sequence.known
            self.prefix_hits += sequence.computed

    def _chunk(self, sequence: Sequence, step: Step) -> int:
        """Tokens to compute, of which the step has room for one at least; a held sequence leaves its last one out and
        so never samples."""
        pending = sequence.known - sequence.computed - sequence.held
        if pending <= 1:
            return pending
        return min(pending, step.chunk_max, self.config.max_num_batched_tokens - step.computed_tokens)

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        return self.config.blocks_for(sequence.computed + count + sequence.held) - len(sequence.blocks)

    def _make_room(self, sequence: Sequence, missing: int, step: Step) -> bool:
        """Preempt the last by rank until so many blocks are free; False when the sequence had to go itself."""
        while missing > self.pool.free:
            victim = max(self.running, key=_rank)
            self._take_back(victim, step)
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, count: int, missing: int, step: Step) -> None:
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        if sequence.findable:
            self._cache_full_blocks(sequence, (sequence.computed + count) // self.config.block_size)
        if count == 0:
            return
        step.work.append((sequence, count))
        step.computed_tokens += count
        if count > 1 or not sequence.decoding:
            step.prefill_tokens += count

    def _take_back(self, victim: Sequence, step: Step) -> None:
        """Undo the victim's part of the step, which it has where a less urgent one was served before."""
        for number, (sequence, count) in enumerate(step.work):
            if sequence is victim:
                del step.work[number]
                step.computed_tokens -= count
                if not sequence.decoding:
                    step.prefill_tokens -= count
                return

    def _cache_full_blocks(self, sequence: Sequence, full: int) -> None:
        if full <= sequence.blocks_cached:
            return
        hashes = sequence.hash_blocks(full, self.config.block_size)
        for number in range(sequence.blocks_cached, full):
            self.pool.cache(sequence.blocks[number], hashes[number])
        sequence.blocks_cached = full

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed_before = sequence.computed
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.blocks_cached = 0

    def _sample(self, sequence: Sequence) -> Token:
        sequence.outputs += 1
        sequence.known += 1
        self.generation_tokens += sequence.sizes.output_tokens > 0
        if sequence.outputs == 1:
            self._count_prompt(sequence)
        last = sequence.outputs >= sequence.sizes.output_tokens
        if last:
            self._finish(sequence)
        return Token(sequence.request_id, sequence.index, sequence.outputs, last)

    def _count_prompt(self, sequence: Sequence) -> None:
        self.prompt_tokens += sequence.sizes.prompt_tokens
        self.prompt_tokens_cached += sequence.cached_tokens

    def _finish(self, sequence: Sequence) -> None:
        self._leave(sequence)
        siblings = self._live[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request_id]

    def _duration_ms(self, step: Step) -> float:
        config = self.config
        microseconds = config.step_prefill_us * step.prefill_tokens + config.step_running_us * len(step.work)
        if config.step_kv_us:
            stored = sum(sequence.computed + count for sequence, count in step.work)
            microseconds += config.step_kv_us * stored
        return config.step_base_ms + microseconds / 1000


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
