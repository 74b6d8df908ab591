"""A fleet's configuration and what was discovered of its replicas, as routing and the ledger need them."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.elastic import base_of
from gateway.core.media import USUAL, MediaRule
from gateway.core.modes import Mode
from gateway.core.request import INTEGER_MAX
from gateway.core.route import FleetShape, PoolShape
from gateway.upstream.api import Access, Trouble
from gateway.upstream.fleet import FleetWatch, ReplicaShape, ReplicaState

log = logging.getLogger(__name__)

GONE_MAX = 1024
"""Replicas that are remembered after they were taken out."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What the operator configured for one fleet."""

    name: str
    model: str
    names: frozenset[str]
    default_output_tokens: int
    max_output_tokens: int | None
    token_factor: float
    exact_above: float
    learns: bool
    """Estimates are corrected by what engines report."""
    speculative_tokens: int
    share_prompt_of_n: bool
    safe_fraction: float
    overtake_blocks: int | None
    """None = the limit of the largest replica."""
    pools: tuple[tuple[str, int | None], ...]
    """Name and longest prompt, by rising length."""
    lanes: Mapping[str, tuple[str, ...]]
    classes: tuple[tuple[str, int], ...]
    """Name and guaranteed share in thousandths, highest first."""
    lease_ms: int
    heartbeat_ms: int
    share_prefixes: bool = False
    soft_hold: bool = False
    media: MediaRule = USUAL
    encoder_tokens: int = 0
    engine_tools: bool = False
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """By pool; one that is not there is guaranteed."""


class WatchedEngines:
    """Implements `Engines` on a `FleetWatch`; what it derives is kept until a replica changes."""

    def __init__(self, plan: FleetPlan, watch: FleetWatch) -> None:
        self._plan = plan
        self._watch = watch
        self._shape: FleetShape | None = None
        self._pools = {state.spec.name: state.spec.pool for state in watch.states()}
        self._pools_before: dict[str, str] = {}
        """Of replicas that were taken out: their streams go on."""
        self._specs = {state.spec.name: state.spec for state in watch.states()}
        self._unshared = False
        """An engine has held more than was reckoned with shared prompts."""
        self._asked_last = ""
        """For what needs no blocks."""

    def changed(self) -> None:
        self._shape = None

    def update(self, plan: FleetPlan) -> None:
        """Another configuration; the watch has it already."""
        self._plan = plan
        self._unshared = self._unshared and plan.share_prompt_of_n
        self._pools_before = _last(GONE_MAX, self._pools_before | self._pools)
        self._pools = {state.spec.name: state.spec.pool for state in self._watch.states()}
        self._specs = {state.spec.name: state.spec for state in self._watch.states()}
        self._shape = None

    def holds_more(self, replica: str) -> None:
        """An engine holds more blocks than the ledger.  Prompts are shared no longer, until the setting is off: what
        an engine makes of `n` sequences with a long prompt depends on options that it does not state."""
        if self._unshared or not self._plan.share_prompt_of_n:
            return
        log.warning(
            "replica %s holds more blocks than the ledger: share_prompt_of_n of fleet %s does not count any more",
            replica,
            self._plan.name,
        )
        self._unshared = True
        self._shape = None

    def shape(self) -> FleetShape:
        if self._shape is None:
            self._shape = self._derive()
        return self._shape

    def knows(self, replica: str) -> bool:
        return replica in self._specs

    def names(self) -> Collection[str]:
        return self._specs.keys()

    def url(self, replica: str) -> str:
        return self._specs[replica].url

    def rank(self, replica: str) -> int | None:
        return self._specs[replica].rank

    def access(self, replica: str) -> Access:
        return self._specs[replica].access

    def pool(self, replica: str) -> str:
        return self._pools.get(replica) or self._pools_before.get(replica, "")

    def any_up(self, tried: Sequence[str], only: str = "") -> str | None:
        names = [state.spec.name for state in self._watch.states()]
        turn = names.index(self._asked_last) + 1 if self._asked_last in names else 0
        in_turn = [only] if only else names[turn:] + names[:turn]
        able = [name for name in in_turn if name not in tried and self._watch.is_up(name)]
        awake = [name for name in able if not self._watch.why_it_rests(name)]
        self._asked_last = next(iter(awake or able), self._asked_last)
        return self._asked_last if able else None

    def another_can_hold(self, lane: str, tried: Sequence[str], blocks: int, sequences: int) -> bool:
        pools = self._plan.lanes[lane]
        return any(
            self._watch.is_up(state.spec.name) and _can_hold(state.shape, blocks, sequences)
            for state in self._watch.states()
            if state.spec.pool in pools and state.spec.name not in tried
        )

    def report_failure(self, replica: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        self._watch.report_failure(replica, trouble, rest_seconds)

    def report_success(self, replica: str) -> None:
        self._watch.report_success(replica)

    def books_config(self) -> FleetConfig:
        """What the ledger is told; a replica that does not answer keeps what the store has of it."""
        replicas = tuple(
            _replica_config(state, self._plan.safe_fraction, self._mode(state.spec.pool))
            for state in self._watch.states()
        )
        plan = self._plan
        overtake = plan.overtake_blocks
        return FleetConfig(
            lease_ms=plan.lease_ms,
            heartbeat_ms=plan.heartbeat_ms,
            overtake_blocks=_largest_limit(replicas) if overtake is None else overtake,
            lanes=tuple(plan.lanes.items()),
            classes=plan.classes,
            replicas=replicas,
        )

    def _elastic_base(self) -> int:
        """For the smallest of the replicas that hold calls elastically; 0 while none is known."""
        limits = [
            blocks_limit(state.shape.num_gpu_blocks, self._plan.safe_fraction)
            for state in self._watch.states()
            if state.shape and self._mode(state.spec.pool) is not Mode.GUARANTEED
        ]
        return base_of(min(limits)) if limits else 0

    def _mode(self, pool: str) -> Mode:
        return self._plan.modes.get(pool, Mode.GUARANTEED)

    def _derive(self) -> FleetShape:
        known: dict[str, list[ReplicaShape]] = {}
        names: dict[str, tuple[str, ...]] = {}
        states = self._watch.states()
        for state in states:
            names[state.spec.pool] = (*names.get(state.spec.pool, ()), state.spec.name)
            if state.shape:
                known.setdefault(state.spec.pool, []).append(state.shape)
        plan = self._plan
        return FleetShape(
            name=plan.name,
            model=plan.model,
            names=plan.names,
            default_output_tokens=plan.default_output_tokens,
            max_output_tokens=plan.max_output_tokens,
            token_factor=plan.token_factor,
            exact_above=plan.exact_above,
            learns=plan.learns,
            speculative_tokens=plan.speculative_tokens,
            media=plan.media,
            encoder_tokens=plan.encoder_tokens,
            engine_tools=plan.engine_tools,
            share_prompt_of_n=plan.share_prompt_of_n and not self._unshared,
            share_prefixes=plan.share_prefixes,
            soft_hold=plan.soft_hold,
            bases=_bases([shape for shapes in known.values() for shape in shapes]),
            pools=tuple(
                _pool_shape(name, most, known[name], names[name])
                for name, most in plan.pools
                if name in known
            ),
            lanes=plan.lanes,
            modes=plan.modes,
            elastic_base=self._elastic_base(),
            complete=all(state.shape for state in states),
        )


def _bases(replicas: Sequence[ReplicaShape]) -> frozenset[str]:
    """What every replica means the model itself by."""
    return frozenset.intersection(*(replica.bases for replica in replicas)) if replicas else frozenset()


def _last(count: int, entries: Mapping[str, str]) -> dict[str, str]:
    return dict(list(entries.items())[-count:])


def _largest_limit(replicas: Sequence[ReplicaConfig]) -> int:
    """Without any known replica nobody can be overtaken: no hold is due."""
    return max((replica.limit for replica in replicas if replica.limit > 0), default=INTEGER_MAX)


def blocks_limit(num_gpu_blocks: int, safe_fraction: float) -> int:
    """Blocks to hand out: `floor((num_gpu_blocks - 1) x safe_fraction)`; one block is the engine's null block."""
    return math.floor((num_gpu_blocks - 1) * Fraction(str(safe_fraction)))


def _can_hold(shape: ReplicaShape | None, blocks: int, sequences: int) -> bool:
    return shape is not None and blocks < shape.num_gpu_blocks and sequences <= shape.max_num_seqs


def _replica_config(state: ReplicaState, safe_fraction: float, mode: Mode) -> ReplicaConfig:
    shape = state.shape
    if shape is None or not state.up:
        return ReplicaConfig(state.spec.name, state.spec.pool, mode=mode.value)
    limit = blocks_limit(shape.num_gpu_blocks, safe_fraction)
    usable = shape.num_gpu_blocks - 1
    return ReplicaConfig(
        shape.name, shape.pool, limit, usable, shape.max_num_seqs, shape.prefill_tokens, mode.value
    )


def _pool_shape(
    name: str, max_prompt_tokens: int | None, replicas: list[ReplicaShape], names: tuple[str, ...]
) -> PoolShape:
    """What every replica of the pool can do, but for blocks: the largest one decides what can ever fit."""
    return PoolShape(
        name=name,
        max_prompt_tokens=max_prompt_tokens,
        max_model_len=min(r.max_model_len for r in replicas),
        block_size=min(r.block_size for r in replicas),
        usable_max=max(r.num_gpu_blocks - 1 for r in replicas),
        sequences_max=max(r.max_num_seqs for r in replicas),
        context_max=max(r.max_model_len for r in replicas),
        prefix_caching=any(r.prefix_caching for r in replicas),
        replicas=names,
    )
