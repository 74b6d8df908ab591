"""What a replica may take, learned from its engine: the closed loop.

Three signals move three budgets, each seen at one reading of the engine's metrics beside what the ledger believes:

- KV use above what the ledger holds there comes from strangers, calls that did not pass the gateway (or from wrong
  arithmetic): the most of it in 30 s is subtracted from the limit.
- Preemptions cut the limit to 95 % of the blocks held now, for a cut bites only as calls end: not again before the
  last one has settled, and never below half of what is configured.
- Requests that wait inside the engine while KV is free say nothing of blocks.  They lower the prefill budget by a
  tenth each time, or the sequences where nothing is in prefill.

What was lowered grows back slowly, after a quiet minute and only while it binds.  A cold engine begins with a part of
its blocks: its prefix cache is empty, and as the emptiest replica it would get every call that waits.

Sizes are blocks, sequences and tokens; times are milliseconds of the ledger's clock, so that one gateway goes on where
another left.
"""

from hashlib import blake2b
from typing import Protocol

import msgspec

STRANGERS_MS = 30_000
"""For which the most blocks of strangers are subtracted."""
SETTLING_MS = 10_000
"""After a budget was lowered, before it may be lowered again."""
QUIET_MS = 60_000
"""Without the signal that lowered a budget, before it grows."""
CUT_PERCENT = 95
"""Of the blocks held, the limit after preemptions."""
FLOOR_PERCENT = 50
"""Of the configured limit: preemptions never cut below."""
LOWERED_PERCENT = 90
SEQUENCES_FLOOR = 32
"""A stalled engine says nothing of how many sequences it takes."""
BINDS_PERCENT = 90
"""Of a budget in use: then it binds."""
FREE_PERCENT = 90
"""KV use up to which blocks count as free: a waiting prompt would fit."""
GROWTH_PARTS = 1000
"""A budget grows by one such part of what is configured at each reading."""
COLD_SHARE = 100
"""Thousandths of its blocks that a cold engine begins with."""
COLD_AGE_SECONDS = 120.0
"""Since the start of its process, while an engine is cold."""
PREFILL_FLOOR = 4096
"""Prompt tokens: two steps of an engine as vLLM comes (`max_num_batched_tokens` 2,048), so that it never runs dry."""

CACHE_BYTES = 6
"""Of the number of a cache: Lua's integers have 53 bits."""


class Budgets(msgspec.Struct, frozen=True):
    """Of one replica: what is configured, allowed or held."""

    blocks: int
    sequences: int
    prefill: int

    def most(self, other: "Budgets") -> "Budgets":
        return Budgets(
            max(self.blocks, other.blocks),
            max(self.sequences, other.sequences),
            max(self.prefill, other.prefill),
        )


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's metrics say; None = not exported, which is never 0."""

    num_gpu_blocks: int | None = None
    kv_use: float | None = None
    """Part of the blocks that sequences hold, 0 to 1."""
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    """For capacity, where the engine tells why requests wait."""
    swapped: int | None = None
    """Requests whose blocks are in the host's memory; releases since 0.9 cannot swap and do not export it."""
    swap_use: float | None = None
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache, and those found there."""
    prefix_hits: int | None = None
    tokens: int | None = None
    """Prompts and answers, since the process began."""
    started_at: float | None = None
    """Of the process, seconds since the epoch."""
    prefix_caching: bool | None = None

    @property
    def kv_blocks(self) -> int | None:
        """Blocks that sequences hold: the use is of all blocks but the null block."""
        if self.kv_use is None or self.num_gpu_blocks is None:
            return None
        return round(self.kv_use * (self.num_gpu_blocks - 1))

    @property
    def swaps(self) -> bool | None:
        """Whether blocks are in the host's memory; None where that cannot be seen."""
        figures = [figure for figure in (self.swapped, self.swap_use) if figure is not None]
        return any(figures) if figures else None


class Learned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one incarnation of an engine: it starts anew with each process."""

    engine: Reading
    """The last one."""
    incarnation: int = 1
    blocks: int | None = None
    """Lowered budgets; None = as configured."""
    sequences: int | None = None
    prefill: int | None = None
    excess: int = 0
    """Blocks in use above what the ledger held, at the last reading."""
    strangers: tuple[tuple[int, int], ...] = ()
    """When so many blocks of strangers were seen; falling, so that the first is the most."""
    waited: bool = False
    """Requests waited while KV was free, at the last reading."""
    running_most: int = 0
    """Most sequences that ever ran while others waited and KV was free: as many the engine can take."""
    cold_since: int | None = None
    """While it is given more blocks with each reading."""
    share: int = 1000
    """Thousandths of its blocks that may be handed out."""
    cut_at: int | None = None
    lowered_at: int | None = None
    preempted_at: int | None = None
    waited_at: int | None = None

    @property
    def cache(self) -> int:
        """A number of its prefix cache, which another process of the engine does not have; 0 = nothing may be shared
        there, as far as is known."""
        if not self.engine.prefix_caching:
            return 0
        process = self.incarnation if self.engine.started_at is None else self.engine.started_at
        text = f"{process}:{self.engine.num_gpu_blocks}"
        return int.from_bytes(blake2b(text.encode(), digest_size=CACHE_BYTES).digest()) or 1

    @property
    def strangers_blocks(self) -> int:
        return self.strangers[0][1] if self.strangers else 0

    def budgets(self, configured: Budgets) -> Budgets:
        """What may be handed out; never more than is configured."""
        blocks = _smaller(self.blocks, configured.blocks) - self.strangers_blocks
        return Budgets(
            max(min(blocks, configured.blocks * self.share // 1000), 0),
            _smaller(self.sequences, configured.sequences),
            _smaller(self.prefill, configured.prefill),
        )


class Rules(msgspec.Struct, frozen=True):
    """What of the configuration the loop goes by."""

    sequences_min: int = 1
    """That one call may have; it must still fit."""
    slow_start_ms: int = 0
    """Until a cold engine has all its blocks; 0 = at once."""


class Seat(msgspec.Struct, frozen=True):
    """A replica as the ledger has it, for the gateway that reads its engine's metrics."""

    mine: bool
    """Whether this gateway is the one."""
    lease_ms: int
    """That the seat of whoever has it still lasts."""
    clock: int
    number: int
    """Of the last reading that was written."""
    held: Budgets
    configured: Budgets
    learned: Learned | None
    """As of that reading; None = nothing, or nothing that this version reads."""


class CapacityBooks(Protocol):
    """The seats of one fleet's replicas in the ledger."""

    async def seat(self, replica: str) -> Seat | None:
        """Take the seat where it is free, keep it where it is ours.  None = the store or the replica is away."""
        ...

    async def learn(self, replica: str, number: int, learned: Learned, configured: Budgets) -> bool:
        """Write what was learned; False = another gateway, or a later reading, was first."""
        ...


def learn(
    before: Learned | None,
    clock: int,
    configured: Budgets,
    held: Budgets,
    reading: Reading,
    rules: Rules,
    cold: bool = False,
) -> Learned:
    """What is known after one more reading.

    `held`: at most, around the moment of it.  `cold`: should the process be a new one, it is to start slowly.
    """
    if before is None or is_another(before.engine, reading):
        incarnation = before.incarnation + 1 if before else 1
        return _warm(
            Learned(engine=reading, incarnation=incarnation, cold_since=clock if cold else None), clock, rules
        )
    now = _warm(before, clock, rules)
    now = _see_strangers(now, clock, held, reading)
    now = _see_preemptions(now, clock, configured, held, reading)
    floor = max(rules.sequences_min, SEQUENCES_FLOOR)
    now = _see_waiting(now, clock, now.budgets(configured), held, reading, floor)
    now = _grow(now, clock, configured, held)
    return msgspec.structs.replace(now, engine=_remembering(before.engine, reading))


def is_young(reading: Reading, wall_seconds: float) -> bool:
    """Whether the process has just begun; False where it does not tell."""
    return reading.started_at is not None and wall_seconds - reading.started_at < COLD_AGE_SECONDS


def _warm(now: Learned, clock: int, rules: Rules) -> Learned:
    """Its share rises evenly with time."""
    if now.cold_since is None:
        return now
    passed = clock - now.cold_since
    if passed >= rules.slow_start_ms:
        return msgspec.structs.replace(now, cold_since=None, share=1000)
    share = COLD_SHARE + (1000 - COLD_SHARE) * passed // rules.slow_start_ms
    return msgspec.structs.replace(now, share=share)


def is_another(before: Reading, after: Reading) -> bool:
    """Whether another process answers: its blocks or its start differ, or its counters went back."""
    pairs = ((before.num_gpu_blocks, after.num_gpu_blocks), (before.started_at, after.started_at))
    if any(a != b for a, b in pairs if a is not None and b is not None):
        return True
    if before.started_at is not None and after.started_at is not None:
        return False
    return went_back(before, after)


def went_back(before: Reading, after: Reading) -> bool:
    counters = ((before.tokens, after.tokens), (before.preemptions, after.preemptions))
    return any(b < a for a, b in counters if a is not None and b is not None)


def _remembering(before: Reading, after: Reading) -> Reading:
    """What tells processes apart is kept over a page that lacks it."""
    kept = {
        name: getattr(before, name)
        for name in ("num_gpu_blocks", "started_at", "tokens", "preemptions", "prefix_caching")
        if getattr(after, name) is None
    }
    return msgspec.structs.replace(after, **kept)


def _see_strangers(now: Learned, clock: int, held: Budgets, reading: Reading) -> Learned:
    """Only what two readings in a row show counts: a call that was just cancelled is in the engine for a step more."""
    in_use = reading.kv_blocks
    excess = 0 if in_use is None else max(in_use - held.blocks, 0)
    seen = min(excess, now.excess)
    kept = tuple((at, blocks) for at, blocks in now.strangers if clock - at < STRANGERS_MS and blocks > seen)
    strangers = (*kept, (clock, seen)) if seen else kept
    return msgspec.structs.replace(now, excess=excess, strangers=strangers)


def _see_preemptions(
    now: Learned, clock: int, configured: Budgets, held: Budgets, reading: Reading
) -> Learned:
    known = now.engine.preemptions
    if reading.preemptions is None or known is None or reading.preemptions <= known:
        return now
    now = msgspec.structs.replace(now, preempted_at=clock)
    limit = now.budgets(configured).blocks
    if held.blocks > limit or not _settled(now.cut_at, clock):
        return now
    floor = configured.blocks * FLOOR_PERCENT // 100
    cut = max(held.blocks * CUT_PERCENT // 100 + now.strangers_blocks, floor)
    blocks = min(cut, _smaller(now.blocks, configured.blocks))
    return msgspec.structs.replace(now, blocks=blocks, cut_at=clock)


def _see_waiting(
    now: Learned, clock: int, allowed: Budgets, held: Budgets, reading: Reading, sequences_floor: int
) -> Learned:
    """Two readings in a row: every request waits for the step that is being computed."""
    waits = bool(reading.waiting) and reading.kv_use is not None and reading.kv_use * 100 <= FREE_PERCENT
    lasting = waits and now.waited
    now = msgspec.structs.replace(now, waited=waits)
    if not lasting:
        return now
    running_most = max(now.running_most, reading.running or 0)
    now = msgspec.structs.replace(now, waited_at=clock, running_most=running_most)
    if not _settled(now.lowered_at, clock):
        return now
    if held.prefill:
        return _lower_prefill(now, clock, allowed, held)
    return _lower_sequences(now, clock, allowed, held, max(sequences_floor, running_most))


def _lower_prefill(now: Learned, clock: int, allowed: Budgets, held: Budgets) -> Learned:
    """Not while what is held has not come down to the last cut; nor for one prompt that is larger than the budget."""
    lower = max(allowed.prefill * LOWERED_PERCENT // 100, PREFILL_FLOOR)
    if held.prefill > allowed.prefill or lower >= allowed.prefill:
        return now
    return msgspec.structs.replace(now, prefill=lower, lowered_at=clock)


def _lower_sequences(now: Learned, clock: int, allowed: Budgets, held: Budgets, floor: int) -> Learned:
    """From what is held, for a budget far above it would take minutes; to what the engine was seen to run at least."""
    lower = max(held.sequences * LOWERED_PERCENT // 100, floor)
    if held.sequences > allowed.sequences or lower >= allowed.sequences:
        return now
    return msgspec.structs.replace(now, sequences=lower, lowered_at=clock)


def _grow(now: Learned, clock: int, configured: Budgets, held: Budgets) -> Learned:
    allowed = now.budgets(configured)
    grown: dict[str, int | None] = {}
    if _quiet(now.preempted_at, clock):
        grown["blocks"] = _grown(now.blocks, allowed.blocks, held.blocks, configured.blocks)
    if _quiet(now.waited_at, clock):
        grown["sequences"] = _grown(now.sequences, allowed.sequences, held.sequences, configured.sequences)
        grown["prefill"] = _grown(now.prefill, allowed.prefill, held.prefill, configured.prefill)
    return msgspec.structs.replace(now, **grown)


def _grown(learned: int | None, allowed: int, held: int, configured: int) -> int | None:
    if learned is None or learned >= configured:
        return None
    if held * 100 < allowed * BINDS_PERCENT:
        return learned
    grown = learned + max(configured // GROWTH_PARTS, 1)
    return grown if grown < configured else None


def _settled(lowered_at: int | None, clock: int) -> bool:
    return lowered_at is None or clock - lowered_at >= SETTLING_MS


def _quiet(seen_at: int | None, clock: int) -> bool:
    return seen_at is None or clock - seen_at >= QUIET_MS


def _smaller(learned: int | None, configured: int) -> int:
    return configured if learned is None else min(learned, configured)
