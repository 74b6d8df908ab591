"""What an engine is asked to do and what it gives: requests, their sequences, steps and tokens."""

from dataclasses import dataclass, field

from gateway.mock.pool import EMPTY, Block, Content, chained
from gateway.mock.tokenizer import word


@dataclass(frozen=True, slots=True)
class Sizes:
    """One sequence as asked for: prompt tokens, at least 1, and the output tokens it will produce.

    Of a model that pools it is none: the sequence ends when its prompt is computed.
    """

    prompt_tokens: int
    output_tokens: int
    prompt: Content = EMPTY
    """For prefix caching; a prompt that is not given shares nothing."""
    reads_cache: bool = True
    """False: all of its prompt is computed, though its blocks are cached for others."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call: a sequence per choice of each prompt.

    A held request computes its prompt and keeps the blocks, but samples nothing until `Engine.release`.
    """

    id: str
    sequences: tuple[Sizes, ...]
    held: bool = False
    priority: int = 0
    """Lower goes first, under the priority policy."""
    indexes: tuple[int, ...] = ()
    """The number of each sequence within its call, where another engine has the rest; empty: 0, 1, ..."""


@dataclass(slots=True)
class Token:
    """One sampled token: `number` counts from 1 within its sequence, `last` ends the sequence.  Where nothing is
    sampled it stands for the end.
    """

    request_id: str
    index: int
    number: int
    last: bool


@dataclass(eq=False, slots=True)
class Sequence:
    request_id: str
    index: int
    sizes: Sizes
    held: bool
    rank: tuple[int, int]
    """Priority and arrival: the lower is admitted first and preempted last."""
    findable: bool
    """Its blocks go into the prefix cache."""
    known: int = 0
    """Tokens that exist: the prompt and what was sampled; preemption keeps them."""
    outputs: int = 0
    computed: int = 0
    """Tokens whose KV is stored."""
    blocks: list[Block] = field(default_factory=list)
    blocks_cached: int = 0
    """Of its blocks, from the first, those that are in the prefix cache."""
    hashes: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Found in the prefix cache when it was first admitted."""
    computed_before: int = 0
    """Tokens that were stored when it was last preempted."""
    preemptions: int = 0
    running: bool = False

    def __post_init__(self) -> None:
        self.known = self.sizes.prompt_tokens
        self.hashes = list(self.sizes.prompt.hashes) if self.findable else []

    @property
    def decoding(self) -> bool:
        return self.outputs > 0 and self.known - self.computed == 1

    def hash_blocks(self, count: int, block_size: int) -> list[int]:
        """The hashes of its first `count` blocks, which are full of known tokens."""
        while len(self.hashes) < count:
            self._hash_next(block_size)
        return self.hashes[:count]

    def _hash_next(self, block_size: int) -> None:
        prompt = self.sizes.prompt
        start = len(self.hashes) * block_size
        tail = prompt.tail if start < self.sizes.prompt_tokens else ()
        first = start + len(tail) - self.sizes.prompt_tokens + 1
        words = map(word, range(first, first + block_size - len(tail)))
        end = self.hashes[-1] if self.hashes else prompt.root
        self.hashes.append(chained(end, [*tail, *words]))


@dataclass(slots=True)
class Step:
    """What one step does: filled by `schedule`, its `tokens` by `complete`."""

    chunk_max: int
    """Tokens of one sequence at most."""
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
