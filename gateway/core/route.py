"""Which lane a call goes to and what it asks for there, or why it can never be served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nlargest

import msgspec

from gateway.core.blocks import BlockShape, demand_blocks, inputs_blocks
from gateway.core.estimate import Demand, call_cost, prefill_share
from gateway.core.media import USUAL, MediaRule
from gateway.core.modes import Mode
from gateway.core.outcomes import Code, Refusal
from gateway.core.request import Endpoint, GenerationRequest
from gateway.core.warm import Reach, cold_replicas

COMPLETIONS_OUTPUT_TOKENS = 16
"""What vLLM gives a completion that sets no `max_tokens`."""
LIKELY_TOKEN_BYTES = 4
"""Of English text; of code and most other languages fewer."""
NO_POOL_RETRY_MS = 1000
"""Capacity is discovered by scraping, about once a second."""
_NOT_TOLD = Refusal(
    Code.NO_BACKEND,
    "an engine that this request may fit has not told its capacity yet",
    retry_ms=NO_POOL_RETRY_MS,
)
"""In place of a refusal for the size of the engines, while that of some is unknown."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The replicas of a fleet for one range of prompt lengths."""

    name: str
    max_prompt_tokens: int | None
    """Longest prompt that is sent here; None for no bound but the context."""
    max_model_len: int
    """The shortest context of its replicas."""
    block_size: int
    usable_max: int
    """Usable blocks (`num_gpu_blocks - 1`) of its largest replica."""
    sequences_max: int
    """Sequences that one replica runs at once."""
    context_max: int | None = None
    """The longest context of its replicas; None where they agree."""
    prefix_caching: bool = False
    """One of its replicas keeps the beginnings of prompts, as it says."""
    replicas: tuple[str, ...] = ()
    """Names of all that it has."""


@dataclass(frozen=True, slots=True)
class LaneShape:
    """What a call that goes to the lane of a pool can count on in every pool of that lane."""

    pool: PoolShape
    blocks: BlockShape
    """The shortest context, and blocks counted by the smallest size."""
    prompt_tokens_max: int
    """The longest prompt that is sent here; the context must leave room for one token of output."""
    input_tokens_max: int
    """The longest one of a call that generates nothing."""
    context_tokens_max: int
    """The longest prompt that its context has room for."""
    usable_max: int
    sequences_max: int
    """Of the largest replica that the lane may use."""
    context_max: int | None
    """The context of its engines; None where they differ: what the largest leaves, the smallest has no room for."""
    context_longest: int


@dataclass(frozen=True)
class FleetShape:
    """What routing needs to know of a fleet."""

    name: str
    model: str
    names: frozenset[str]
    """Every model name that the fleet answers to."""
    default_output_tokens: int
    """Output limit of a chat call that sets none."""
    max_output_tokens: int | None
    token_factor: float
    speculative_tokens: int
    share_prompt_of_n: bool
    pools: tuple[PoolShape, ...]
    """By rising `max_prompt_tokens`, None last."""
    lanes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lane to the pools that its calls may use; a pool's lane has its name, and by default only that pool."""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """By pool; one that is not there is guaranteed."""
    elastic_base: int = 0
    """The size of replica that the paths of its calls are made for (`core/elastic.py`); 0 = they have none."""
    exact_above: float = 0.0
    """Where its engines' own count is at hand, it is asked for while so much of the fleet is reserved; 0 = always."""
    learns: bool = False
    """Estimates are corrected by what its engines have reported of others."""
    encoder_tokens: int = 0
    """Kept for each sequence beside its context."""
    media: MediaRule = USUAL
    """What images, sounds and videos count, and whence they may come."""
    share_prefixes: bool = False
    """Where engines keep beginnings of prompts, they are charged once for all calls that have them."""
    soft_hold: bool = False
    """What engines keep of a conversation is held for its next turn, where that is likely to come soon."""
    bases: frozenset[str] = frozenset()
    """Names of the model itself; by any other an engine may mean an adapter."""
    engine_tools: bool = False
    """Its engines run tools themselves, and go on with what those gave."""
    complete: bool = True
    """Every configured replica has told its capacity."""

    @cached_property
    def lane_shapes(self) -> tuple[LaneShape, ...]:
        """In the order of `pools`."""
        return tuple(self._lane_shape(pool) for pool in self.pools)

    @cached_property
    def context_max(self) -> int:
        """Above it no output limit makes sense."""
        return max(pool.max_model_len for pool in self.pools)

    @cached_property
    def prefix_block_size(self) -> int:
        """Tokens of a block of the beginnings that are shared; 0 = none are.

        Not where engines decode speculatively: with EAGLE each sequence has a copy of its own of the last block that it
        finds, and where that is depends on whatever else is in the cache.
        """
        if not self.share_prefixes or self.encoder_tokens or self.speculative_tokens:
            return 0
        caching = any(pool.prefix_caching for pool in self.pools)
        sizes = {pool.block_size for pool in self.pools}
        return sizes.pop() if caching and len(sizes) == 1 else 0

    @cached_property
    def keeps_histories(self) -> bool:
        """The next turn of a conversation may find in a cache what the last one has left."""
        return self.soft_hold and any(pool.prefix_caching for pool in self.pools)

    @property
    def routes_by_warmth(self) -> bool:
        """What a replica has of a prompt already may decide to which pool it goes."""
        return len(self.pools) > 1 and self.prefix_block_size > 0

    def adapter(self, model: str | None) -> str:
        """What an engine's prefixes are kept apart by; '' for the model itself."""
        return "" if model is None or model in self.bases else model

    def modes_of(self, lane: str) -> tuple[Mode, ...]:
        """Of the pools of a lane."""
        return tuple(map(self.mode_of, self.lanes.get(lane, (lane,))))

    def mode_of(self, pool: str) -> Mode:
        return self.modes.get(pool, Mode.GUARANTEED)

    def only(self, name: str) -> "FleetShape":
        """For a call that one replica of that pool has to take, however long its prompt."""
        pools = tuple(replace(pool, max_prompt_tokens=None) for pool in self.pools if pool.name == name)
        return replace(self, pools=pools, lanes={name: (name,)})

    def _lane_shape(self, pool: PoolShape) -> LaneShape:
        names = self.lanes.get(pool.name, (pool.name,))
        pools = [p for p in self.pools if p.name in names]
        shortest = min(p.max_model_len for p in pools)
        longest = max(p.context_max or p.max_model_len for p in pools)
        longest_input = min(shortest, pool.max_prompt_tokens or shortest)
        return LaneShape(
            pool=pool,
            blocks=BlockShape(
                shortest, min(p.block_size for p in pools), self.speculative_tokens, self.encoder_tokens
            ),
            prompt_tokens_max=min(shortest - 1, longest_input),
            input_tokens_max=longest_input,
            context_tokens_max=shortest - 1,
            usable_max=max(p.usable_max for p in pools),
            sequences_max=max(p.sequences_max for p in pools),
            context_max=None if longest > shortest else longest,
            context_longest=longest,
        )


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the operator allows one key."""

    context_tokens_max: int | None = None
    max_output_tokens: int | None = None
    blocks_max: int | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a call in one lane before its tokens are counted."""

    blocks_min: int
    tokens_min: int
    """Of its prompt."""
    likely: Demand

    @property
    def smallest(self) -> Demand:
        """The call at its least."""
        return msgspec.structs.replace(
            self.likely, longest_prompt_tokens=self.tokens_min, blocks=self.blocks_min
        )


class _Place(msgspec.Struct):
    """A call as it would run in a pool: prompts as the engine cuts them, output limit as it fits there."""

    lane: LaneShape
    prompts: tuple[int, ...]
    output_tokens: int
    clamped: bool
    blocks: int
    sequences: int
    """Those that run at once."""

    @property
    def pool(self) -> PoolShape:
        return self.lane.pool

    @property
    def runs_in_parts(self) -> bool:
        """It generates nothing: an engine that has no room for all of its prompts computes some after the others."""
        return self.output_tokens == 0

    @property
    def blocks_min(self) -> int:
        """Without so many it cannot run at all."""
        if self.runs_in_parts:
            return inputs_blocks([max(self.prompts)], self.lane.blocks.block_size)
        return self.blocks

    @property
    def fits(self) -> bool:
        """True when an idle replica of the pool has room for the call."""
        pool = self.lane.pool
        if self.runs_in_parts:
            return self.blocks_min <= pool.usable_max
        return self.blocks <= pool.usable_max and self.sequences <= pool.sequences_max


def route(
    fleet: FleetShape,
    request: GenerationRequest,
    prompt_tokens: Sequence[int],
    limits: KeyLimits,
    cached: Mapping[str, int] | None = None,
) -> Demand | Refusal:
    """The demand of a call whose prompts have these estimated token counts, in their order.

    The lane is that of the first pool whose bound takes the longest prompt and which can ever hold the call.
    A call that no pool holds with its whole output limit goes where most of that fits, and the limit is
    clamped.

    `cached`: by replica how many tokens of the only prompt it is likely to have.  With them the call may go to an
    earlier pool than its length allows, whose context holds all of it: the bound is then one of what is left.
    """
    output_tokens = _output_limit(fleet, request, limits)
    if isinstance(output_tokens, Refusal):
        return output_tokens
    if limits.context_tokens_max is not None:
        refusal = _context_not_cleared(request, prompt_tokens, limits.context_tokens_max)
        if refusal is not None:
            return refusal
    measured = _measured(fleet, request, prompt_tokens, output_tokens)
    place = _best(measured)
    if place is None:
        return _never_fits(fleet, request, prompt_tokens, measured) if fleet.complete else _NOT_TOLD
    if request.min_tokens > place.output_tokens:
        may_fit = place.clamped and not fleet.complete
        return _NOT_TOLD if may_fit else _too_little_output(request, place)
    place, exclude = _by_warmth(fleet, request, prompt_tokens, output_tokens, place, cached)
    demand = _demand(fleet, request, place, exclude)
    if limits.blocks_max is not None and demand.unshared_blocks > limits.blocks_max:
        needed = f"The call needs {demand.unshared_blocks} KV blocks"
        message = f"{needed}; `blocks_max` of its key is {limits.blocks_max}."
        return Refusal(Code.KEY_CAP_EXCEEDED, message, should_retry=False)
    return demand


def hopeless(fleet: FleetShape, request: GenerationRequest, low: int, limits: KeyLimits) -> Refusal | None:
    """The refusal that `route` is bound to give if the longest prompt has `low` tokens or more, if any.

    `low` comes from `token_bounds`, so this needs no count.  None also where a longer prompt may need fewer
    blocks: with a shared prompt, and for a key's cap on blocks, since pools may differ in block size.
    """
    if _shares(fleet, request):
        return None
    answer = route(fleet, request, _at_least(request, low), limits)
    if isinstance(answer, Demand) or answer.code is Code.KEY_CAP_EXCEEDED:
        return None
    return answer


def candidate_lanes(
    fleet: FleetShape, request: GenerationRequest, low: int, high: int, limits: KeyLimits
) -> tuple[str, ...]:
    """Every lane that `route` may choose for a call whose longest prompt has `low` to `high` tokens.

    As a prompt grows the call moves to later pools, until none holds it unclamped; then any that takes the
    prompt may be the roomiest.  A shared prompt's blocks do not always grow with it: there any pool may do.
    What is warm somewhere may go to any earlier pool whose context holds it.
    """
    output_tokens = _output_limit(fleet, request, limits)
    if isinstance(output_tokens, Refusal):
        return ()
    shortest = _reachable(fleet, request, _at_least(request, low), output_tokens)
    count = request.prompt_count
    exact = low == high and count == 1
    longest = _measured(fleet, request, [low if exact else high] * count, output_tokens)
    lanes = [place.pool.name for place in shortest]
    last = _first_unclamped(longest)
    if last is None or _shares(fleet, request):
        return tuple(lanes)
    first = _first_unclamped(shortest)
    assert first is not None
    return tuple(lanes[lanes.index(first) : lanes.index(last) + 1])


def outlooks(
    fleet: FleetShape, request: GenerationRequest, low: int, high: int, limits: KeyLimits
) -> tuple[Outlook, ...]:
    """The call in each of its `candidate_lanes`, last in the one where it is likely to go.

    () where nothing is certain before its tokens are counted: of several prompts, of one that sequences share, and
    where it may be refused for another reason.
    """
    output_tokens = _output_limit(fleet, request, limits)
    if request.prompt_count > 1 or _shares(fleet, request) or isinstance(output_tokens, Refusal):
        return ()
    lanes = candidate_lanes(fleet, request, low, high, limits)
    smallest = {place.pool.name: place for place in _reachable(fleet, request, (low,), output_tokens)}
    if not lanes:
        return ()
    likely = route(fleet, request, (max(low, high // LIKELY_TOKEN_BYTES),), limits)
    if isinstance(likely, Refusal):
        likely = _largest(fleet, request, smallest[lanes[-1]])
    ordered = sorted(lanes, key=lambda lane: lane == likely.lane)
    return tuple(
        Outlook(smallest[lane].blocks, low, msgspec.structs.replace(likely, lane=lane)) for lane in ordered
    )


def _largest(fleet: FleetShape, request: GenerationRequest, place: _Place) -> Demand:
    """Who sends it believes that it fits, if only just."""
    demand, blocks = _demand(fleet, request, place), place.pool.usable_max
    seconds = demand.cost // demand.unshared_blocks
    return msgspec.structs.replace(demand, blocks=blocks, unshared_blocks=blocks, cost=blocks * seconds)


def _output_limit(fleet: FleetShape, request: GenerationRequest, limits: KeyLimits) -> int | Refusal:
    if not fleet.pools:
        message = f"No engine of `{fleet.name}` has told its capacity yet."
        return Refusal(Code.NO_BACKEND, message, retry_ms=NO_POOL_RETRY_MS)
    if not request.endpoint.generates:
        return 0
    asked, field_ = request.output_limit, request.limit_field
    caps = (("the key", limits.max_output_tokens), ("the model", fleet.max_output_tokens))
    if asked is None:
        is_completion = request.endpoint is Endpoint.COMPLETIONS
        usual = COMPLETIONS_OUTPUT_TOKENS if is_completion else fleet.default_output_tokens
        return min([usual, *(cap for _, cap in caps if cap is not None)])
    context = fleet.context_max
    if asked > context and fleet.complete:
        over = f"{field_}={asked} cannot be greater than max_model_len={context}"
        return Refusal(Code.INVALID_VALUE, f"{over}. Please request fewer output tokens.", field_)
    for owner, cap in caps:
        if cap is not None and asked > cap:
            message = f"`{field_}` is {asked}; `max_output_tokens` of {owner} is {cap}."
            return Refusal(Code.OUTPUT_LIMIT_EXCEEDED, message, field_)
    return _NOT_TOLD if asked > context else asked


def _context_not_cleared(
    request: GenerationRequest, prompt_tokens: Sequence[int], cleared: int
) -> Refusal | None:
    longest = max(_as_cut(request, prompt_tokens, None))
    if longest <= cleared:
        return None
    message = (
        f"The prompt has at least {longest} tokens (estimated); `context_tokens_max` of its key is {cleared}."
    )
    return Refusal(Code.CONTEXT_NOT_CLEARED, message, request.prompt_field, should_retry=False)


def _measured(
    fleet: FleetShape,
    request: GenerationRequest,
    prompt_tokens: Sequence[int],
    output_tokens: int,
    warm: bool = False,
) -> list[_Place]:
    """The call in every pool that takes prompts of its length, in the order of the pools."""
    places: list[_Place] = []
    for lane in fleet.lane_shapes:
        place = _measure(fleet, lane, request, prompt_tokens, output_tokens, warm)
        if place is not None:
            places.append(place)
    return places


def _reachable(
    fleet: FleetShape, request: GenerationRequest, prompt_tokens: Sequence[int], output_tokens: int
) -> list[_Place]:
    """As `_measured`, also where the call may go for what is warm there."""
    warm = fleet.routes_by_warmth and request.may_share
    return _measured(fleet, request, prompt_tokens, output_tokens, warm)


def _by_warmth(
    fleet: FleetShape,
    request: GenerationRequest,
    prompt_tokens: Sequence[int],
    output_tokens: int,
    place: _Place,
    cached: Mapping[str, int] | None,
) -> tuple[_Place, tuple[str, ...]]:
    """The first place before that of its length where enough of it is warm, and the replicas there that have too little
    of it; else that place.  Nobody is given less output for it."""
    if not cached or not fleet.routes_by_warmth or not request.may_share:
        return place, ()
    keeping = {name for pool in fleet.pools if pool.prefix_caching for name in pool.replicas}
    warm = {name: tokens for name, tokens in cached.items() if name in keeping}
    by_name = {pool.name: Reach(pool.max_prompt_tokens, pool.replicas) for pool in fleet.pools}
    for lane in fleet.lane_shapes:
        if lane is place.lane:
            break
        own = lane.pool.name
        names = fleet.lanes.get(own, (own,))
        if own not in names:
            continue
        others = [by_name[name] for name in names if name != own and name in by_name]
        cold = cold_replicas(by_name[own], others, max(prompt_tokens), warm)
        other = _measure(fleet, lane, request, prompt_tokens, output_tokens, warm=True)
        if cold is not None and other and other.fits and other.output_tokens >= place.output_tokens:
            return other, cold
    return place, ()


def _measure(
    fleet: FleetShape,
    lane: LaneShape,
    request: GenerationRequest,
    prompt_tokens: Sequence[int],
    output_tokens: int,
    warm: bool = False,
) -> _Place | None:
    context = lane.context_max
    context_left = None if context is None else max(1, context - output_tokens)
    prompts = _as_cut(request, prompt_tokens, context_left)
    longest = max(prompts)
    if longest > (lane.context_tokens_max if warm else _prompt_tokens_max(lane, request)):
        return None
    if not request.endpoint.generates:
        return _measure_inputs(lane, prompts)
    fitting = min(output_tokens, lane.blocks.max_model_len - longest)
    blocks = demand_blocks(
        prompts, request.sequences_per_prompt, fitting, lane.blocks, fleet.share_prompt_of_n
    )
    if fleet.engine_tools and request.engine_tools:
        blocks = max(blocks, _whole_context(lane, longest))
    return _Place(lane, prompts, fitting, fitting < output_tokens, blocks, request.sequences)


def _whole_context(lane: LaneShape, prompt_tokens: int) -> int:
    """Blocks of a call that may come to its context's end in several turns, each with all before it as its prompt; no
    more than there are, so that it is refused for its size only where one turn is.
    """
    shape = replace(lane.blocks, max_model_len=lane.context_longest)
    longest = demand_blocks([prompt_tokens], 1, lane.context_longest, shape, share_prompt_of_n=False)
    return min(longest, lane.pool.usable_max)


def _measure_inputs(lane: LaneShape, prompts: tuple[int, ...]) -> _Place:
    """An engine takes inputs from its queue as sequences and blocks get free, and ends each as soon as it is computed:
    of many it holds no more at once than it runs, and no more than it has.
    """
    sequences = min(len(prompts), lane.sequences_max)
    at_once = prompts if sequences == len(prompts) else nlargest(sequences, prompts)
    blocks = min(inputs_blocks(at_once, lane.blocks.block_size), lane.usable_max)
    return _Place(lane, prompts, 0, False, blocks, sequences)


def _prompt_tokens_max(lane: LaneShape, request: GenerationRequest) -> int:
    return lane.prompt_tokens_max if request.endpoint.generates else lane.input_tokens_max


def _best(measured: Sequence[_Place]) -> _Place | None:
    """The first with the whole output limit, else the one where most of it fits; None where no engine holds it."""
    best: _Place | None = None
    for place in measured:
        if (best is None or place.output_tokens > best.output_tokens) and place.fits:
            best = place
    return best


def _as_cut(
    request: GenerationRequest, prompt_tokens: Sequence[int], context_left: int | None
) -> tuple[int, ...]:
    """The prompts as the engine cuts them for `truncate_prompt_tokens`; 0 is charged as no cut.

    -1 stands for `context_left`, what the engine's context leaves beside the output limit; there None is no cut.
    """
    cut = request.truncate_prompt_tokens
    most = context_left if cut is not None and cut < 0 else cut
    if not most:
        return tuple(prompt_tokens)
    return tuple(min(tokens, most) for tokens in prompt_tokens)


def _at_least(request: GenerationRequest, low: int) -> tuple[int, ...]:
    """The shortest prompts of a call whose longest has `low` tokens."""
    return (low, *(1 for _ in range(request.prompt_count - 1)))


def _shares(fleet: FleetShape, request: GenerationRequest) -> bool:
    return fleet.share_prompt_of_n and request.prompt_count == 1 and request.sequences_per_prompt > 1


def _first_unclamped(places: Sequence[_Place]) -> str | None:
    return next((p.pool.name for p in places if not p.clamped and p.fits), None)


def _demand(
    fleet: FleetShape, request: GenerationRequest, place: _Place, exclude: tuple[str, ...] = ()
) -> Demand:
    total, shape, unshared = sum(place.prompts), place.lane.blocks, place.blocks
    if _shares(fleet, request):
        sequences = request.sequences_per_prompt
        unshared = demand_blocks(
            place.prompts, sequences, place.output_tokens, shape, share_prompt_of_n=False
        )
    return Demand(
        lane=place.pool.name,
        sequences=place.sequences,
        prompt_tokens=total,
        longest_prompt_tokens=max(place.prompts),
        output_tokens=place.output_tokens,
        blocks=place.blocks,
        block_size=shape.block_size,
        unshared_blocks=unshared,
        prefill=prefill_share(total),
        cost=call_cost(unshared, total, place.output_tokens),
        exclude=exclude,
    )


def _too_little_output(request: GenerationRequest, place: _Place) -> Refusal:
    message = (
        f"`min_tokens` is {request.min_tokens}; the call may generate at most {place.output_tokens} tokens."
    )
    return Refusal(Code.INVALID_VALUE, message, "min_tokens")


def _never_fits(
    fleet: FleetShape, request: GenerationRequest, prompt_tokens: Sequence[int], measured: Sequence[_Place]
) -> Refusal:
    if not measured:
        most = max(_prompt_tokens_max(lane, request) for lane in fleet.lane_shapes)
        prompt = f"The prompt has at least {max(prompt_tokens)} tokens (estimated)"
        message = f"{prompt}; `{fleet.model}` takes at most {most}."
        return Refusal(Code.CONTEXT_LENGTH_EXCEEDED, message, request.prompt_field, should_retry=False)
    most = max(place.pool.sequences_max for place in measured)
    if request.endpoint.generates and request.sequences > most:
        message = f"The call has {request.sequences} sequences; an engine runs at most {most} at once."
        return Refusal(Code.TOO_MANY_SEQUENCES, message, "n", should_retry=False)
    roomiest = max(measured, key=lambda place: place.pool.usable_max)
    sequences = "1 sequence" if request.sequences == 1 else f"{request.sequences} sequences, each"
    message = (
        f"The call needs at least {roomiest.blocks_min} KV blocks ({sequences} with a prompt of "
        f"at least {min(roomiest.prompts)} tokens (estimated) and up to {roomiest.output_tokens} of output); "
        f"the largest engine has {roomiest.pool.usable_max}."
    )
    return Refusal(Code.CONTEXT_LENGTH_EXCEEDED, message, should_retry=False)
