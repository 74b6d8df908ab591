"""What the text of an engine's `/metrics` says, read without trusting it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core.capacity import Reading

_CACHE_CONFIG = "vllm:cache_config_info"
_FINISHED = "vllm:request_success_total"
_SLEEP_STATE = "vllm:engine_sleep_state"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_NAMES = {
    "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "swapped": ("vllm:num_requests_swapped",),
    "swap_use": ("vllm:cpu_cache_usage_perc",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "started_at": ("process_start_time_seconds",),
}
"""Of each figure the present name, then those of older releases: a page with both is read by the first."""
_WANTED = frozenset(
    (
        _CACHE_CONFIG,
        _WAITING_BY_REASON,
        _FINISHED,
        _SLEEP_STATE,
        *(name for names in _NAMES.values() for name in names),
    )
)
_FLAGS = {"True": True, "False": False}
PLAIN_PART_MIN = 0.9
_FIGURE_MAX = 2.0**53

Lines = Sequence[tuple[Mapping[str, str], float | None]]
"""Labels and value of each; None where that is no finite number from 0 on."""
Samples = Mapping[str, Lines]
"""By name."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool of one engine; None = not stated, which is never 0."""

    num_gpu_blocks: int | None
    block_size: int | None
    cache_tokens: int | None = None
    """That its blocks hold; with several kinds of attention this is no product of the others."""
    prefix_caching: bool | None = None

    @property
    def shares_prefixes(self) -> bool | None:
        """Whether all calls that begin alike hold the same blocks; None = not stated.

        With a sliding window they give some of them up, and then the blocks hold more tokens than they have places, or
        with several kinds of attention fewer; a context that is no multiple of a block makes them a few fewer, too.
        """
        blocks, size, tokens = self.num_gpu_blocks, self.block_size, self.cache_tokens
        if not self.prefix_caching or blocks is None or size is None or tokens is None:
            return self.prefix_caching
        return PLAIN_PART_MIN <= tokens / (blocks * size) <= 1


@dataclass(frozen=True, slots=True)
class Vitals:
    """How an engine is; None = not stated."""

    awake: bool | None = None
    running: int | None = None
    """Sequences that are in execution."""
    aborted: int | None = None
    """Sequences that the engine has ended by itself since its start; who leaves is not counted."""


@dataclass(frozen=True, slots=True)
class EnginePage:
    configs: Mapping[str, CacheConfig]
    """The pool of each engine behind one URL, by its `engine` label (empty where a release has none).

    More than one means that the URL reaches several data-parallel ranks, each with blocks of its own.
    """
    reading: Reading
    """Of the engine that was asked for, or of all together."""
    vitals: Vitals = Vitals()
    """As `reading`."""


def read_page(text: str, rank: int | None = None) -> EnginePage:
    """`rank`: the data-parallel one that is meant where there are several; then the page has it alone, or none."""
    samples = _samples(text)
    configs = {
        labels.get("engine", ""): CacheConfig(
            _blocks(labels.get("num_gpu_blocks")),
            _count(labels.get("block_size")),
            _count(labels.get("kv_cache_size_tokens")),
            _FLAGS.get(labels.get("enable_prefix_caching", "")),
        )
        for labels, _ in samples.get(_CACHE_CONFIG, ())
    }
    if rank is not None:
        configs = {name: _own(config, len(configs)) for name, config in configs.items() if name == str(rank)}
        samples = {name: _of_engine(lines, str(rank)) for name, lines in samples.items()}
    return EnginePage(configs, _reading(samples, configs), _vitals(samples))


def _own(config: CacheConfig, ranks: int) -> CacheConfig:
    """The blocks of one rank: vLLM states the sum over all for each of them, but not of the tokens in them."""
    blocks, size = config.num_gpu_blocks, config.block_size
    if blocks is None or (size is not None and config.cache_tokens == blocks * size):
        return config
    return replace(config, num_gpu_blocks=blocks // ranks)


def _of_engine(lines: Lines, engine: str) -> Lines:
    """What has no such label is of the process."""
    return [(labels, value) for labels, value in lines if labels.get("engine", engine) == engine]


def _reading(samples: Samples, configs: Mapping[str, CacheConfig]) -> Reading:
    sums = {figure: _sum(samples, names) for figure, names in _NAMES.items()}
    tokens = [sums[name] for name in ("prompt_tokens", "generation_tokens")]
    config = next(iter(configs.values()), CacheConfig(None, None))
    return Reading(
        num_gpu_blocks=config.num_gpu_blocks,
        prefix_caching=config.shares_prefixes,
        kv_use=sums["kv_use"],
        preemptions=_whole(sums["preemptions"]),
        running=_whole(sums["running"]),
        waiting=_whole(_waiting(samples, sums["waiting"])),
        swapped=_whole(sums["swapped"]),
        swap_use=sums["swap_use"],
        prefix_queries=_whole(sums["prefix_queries"]),
        prefix_hits=_whole(sums["prefix_hits"]),
        tokens=None if None in tokens else int(sum(figure or 0 for figure in tokens)),
        started_at=sums["started_at"],
    )


def _waiting(samples: Samples, all_waiting: float | None) -> float | None:
    """Those that wait for capacity; others are held back by adapters or transfers, which no budget changes."""
    for labels, value in samples.get(_WAITING_BY_REASON, ()):
        if labels.get("reason") == "capacity" and value is not None:
            return value
    return all_waiting


def _samples(text: str) -> Samples:
    found: dict[str, list[tuple[Mapping[str, str], float | None]]] = {}
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if name not in _WANTED:
            continue
        labels, _, value = rest.rpartition("}")
        found.setdefault(name, []).append((dict(_LABEL.findall(labels or rest)), _figure(value)))
    return found


def _figure(text: str) -> float | None:
    try:
        figure = float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None
    return figure if math.isfinite(figure) and 0 <= figure <= _FIGURE_MAX else None


def _sum(samples: Samples, names: Sequence[str]) -> float | None:
    """Over the lines of the first name that has a figure; None where one of them has none."""
    for name in names:
        figures = [value for _, value in samples.get(name, ())]
        if figures and None not in figures:
            return sum(figure or 0.0 for figure in figures)
    return None


def _whole(figure: float | None) -> int | None:
    return None if figure is None else int(figure)


def _vitals(samples: Samples) -> Vitals:
    awake = _sum_of(samples.get(_SLEEP_STATE, ()), "sleep_state", "awake")
    return Vitals(
        None if awake is None else awake > 0,
        _whole(_sum(samples, _NAMES["running"])),
        _whole(_sum_of(samples.get(_FINISHED, ()), "finished_reason", "abort")),
    )


def _sum_of(lines: Lines, label: str, value: str) -> float | None:
    """As `_sum`, of those with that label."""
    return _sum({"": [line for line in lines if line[0].get(label) == value]}, ("",))


def _blocks(value: str | None) -> int | None:
    """One is the null block alone: what a model states that keeps no KV, such as BERT, has to be configured."""
    count = _count(value)
    return None if count == 1 else count


def _count(value: str | None) -> int | None:
    """A positive whole number; engines write "None" for what they have not decided yet."""
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 15:
        return None
    return int(value) or None
