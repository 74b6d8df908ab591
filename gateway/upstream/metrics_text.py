"""What the text of an engine's `/metrics` says, read without trusting it."""

import re
from dataclasses import dataclass

_CACHE_CONFIG = "vllm:cache_config_info{"
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
            _count(labels.get("num_gpu_blocks")), _count(labels.get("block_size"))
        )
    return configs


def _count(value: str | None) -> int | None:
    """A positive whole number; engines write "None" for what they have not decided yet."""
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 15:
        return None
    return int(value) or None
