"""What the text of an engine's `/metrics` says, read without trusting it."""

import re
from dataclasses import dataclass

_CACHE_CONFIG = "vllm:cache_config_info{"
_RUNNING = "vllm:num_requests_running{"
_FINISHED = "vllm:request_success_total{"
_SLEEP_STATE = "vllm:engine_sleep_state{"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool of one engine; None = not stated, which is never 0."""

    num_gpu_blocks: int | None
    block_size: int | None


def cache_configs(text: str) -> dict[str, CacheConfig]:
    """The pool of each engine behind one URL, by its `engine` label (empty where a release has none).

    More than one means that the URL reaches several data-parallel ranks, each with blocks of its own.
    """
    configs: dict[str, CacheConfig] = {}
    for line in text.split("\n"):
        if not line.startswith(_CACHE_CONFIG):
            continue
        labels = dict(_LABEL.findall(line))
        configs[labels.get("engine", "")] = CacheConfig(
            _blocks(labels.get("num_gpu_blocks")), _count(labels.get("block_size"))
        )
    return configs


@dataclass(frozen=True, slots=True)
class Vitals:
    """How an engine is; None = not stated."""

    awake: bool | None = None
    running: int | None = None
    """Sequences that are in execution."""
    aborted: int | None = None
    """Sequences that the engine has ended by itself since its start; who leaves is not counted."""


def vitals(text: str) -> Vitals:
    """Over all engines of the page."""
    awake = running = aborted = None
    for line in text.split("\n"):
        if line.startswith(_RUNNING):
            running = _sum(running, line)
        elif line.startswith(_FINISHED) and 'finished_reason="abort"' in line:
            aborted = _sum(aborted, line)
        elif line.startswith(_SLEEP_STATE) and 'sleep_state="awake"' in line:
            awake = _sum(awake, line)
    return Vitals(None if awake is None else awake > 0, running, aborted)


def _sum(known: int | None, line: str) -> int | None:
    """With the value of a sample; what is no number states nothing."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return known
    return (known or 0) + int(value) if 0 <= value < 2**53 else known


def _blocks(value: str | None) -> int | None:
    """One is the null block alone: what a model states that keeps no KV, such as BERT, has to be configured."""
    count = _count(value)
    return None if count == 1 else count


def _count(value: str | None) -> int | None:
    """A positive whole number; engines write "None" for what they have not decided yet."""
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 15:
        return None
    return int(value) or None
