"""From tokens to KV blocks: the only place that rounds up."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What an engine's block arithmetic depends on."""

    max_model_len: int
    block_size: int
    speculative_tokens: int = 0
    encoder_tokens: int = 0
    """What an encoder-decoder model keeps for its cross-attention, in blocks of their own."""


def sequence_blocks(
    prompt_tokens: int, output_tokens: int, max_model_len: int, block_size: int, speculative_tokens: int
) -> int:
    """Blocks that one sequence holds at most, under full attention.

    `ceil((p + min(m, max_model_len - p) - 1 + k) / block_size)`: the engine stops at its context, never
    writes the KV of the last sampled token, and looks `k` tokens ahead when it decodes speculatively.  Exact
    on vLLM 0.32: charging one token less lets the engine preempt.
    """
    tokens = min(prompt_tokens + output_tokens, max_model_len) - 1 + speculative_tokens
    return max(1, -(-tokens // block_size))


def demand_blocks(
    prompts: Sequence[int], per_prompt: int, output_tokens: int, shape: BlockShape, share_prompt_of_n: bool
) -> int:
    """Blocks of a call: `per_prompt` sequences for each of `prompts` (token counts), each charged in full.

    With `share_prompt_of_n` the sequences of one prompt hold its full blocks once: `s + n x (blocks - s)`
    with `s = (p - 1) // block_size`, as an engine computes a prompt's last token anew and so never shares its
    block.  Where it decodes speculatively that is one less: EAGLE and its descendants compute the last block anew that
    they find (`find_longest_cache_hit` of vLLM 0.32).  The blocks of several prompts are never shared.
    """
    length_max, size, ahead = shape.max_model_len, shape.block_size, shape.speculative_tokens
    beside = -(-shape.encoder_tokens // size) if shape.encoder_tokens else 0
    each = [beside + sequence_blocks(p, output_tokens, length_max, size, ahead) for p in prompts]
    if share_prompt_of_n and len(prompts) == 1:
        shared = max(min((prompts[0] - 1) // size, each[0]) - (ahead > 0), 0)
        return shared + per_prompt * (each[0] - shared)
    return per_prompt * sum(each)


def inputs_blocks(prompts: Sequence[int], block_size: int) -> int:
    """Blocks of prompts that are computed and generate nothing: `ceil(p / block_size)` each."""
    return sum(max(1, -(-tokens // block_size)) for tokens in prompts)


def used_blocks(prompt_tokens: int, output_tokens: int, prompts: int, sequences: int, block_size: int) -> int:
    """Blocks that a call held at its end, unshared, by the engine's own count of its tokens.

    `prompt_tokens` are those of all `prompts`, each counted once; prompts and outputs are taken as equally long.
    """
    tokens = -(-prompt_tokens // max(1, prompts)) + -(-output_tokens // sequences) - 1
    return sequences * max(1, -(-tokens // block_size))
