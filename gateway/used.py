"""What a call used of what it was given, for the books and for its key's quotas."""

import time

from gateway.call import Call
from gateway.core.blocks import inputs_blocks, used_blocks
from gateway.core.estimate import Demand, held_cost
from gateway.core.quota import Units


def blocks_used(call: Call, demand: Demand) -> tuple[int | None, int | None]:
    """Blocks really used, where the engine said, and block-seconds really held."""
    if call.grant is None:
        return None, None
    held_seconds = time.monotonic() - call.sent_at
    call.blocks_used = _unshared_blocks_used(call, demand)
    return call.blocks_used, held_cost(demand.unshared_blocks, held_seconds)


def units_counted(call: Call, demand: Demand) -> Units | None:
    """What quotas count of it; None where its key has none."""
    return units_used(call, demand) if call.charges or call.all_fleets_charges else None


def units_used(call: Call, demand: Demand) -> Units:
    """What counts against its key: nothing without an answer, of one what the engine reported, else an estimate."""
    if not call.status or call.status >= 400:
        return Units()
    usage = call.usage
    if usage is not None and usage.completion_tokens is not None:
        hears = call.generation.sound is not None  # then the engine counts its length, not tokens
        return Units(1, demand.prompt_tokens if hears else usage.prompt_tokens, usage.completion_tokens)
    estimate = demand.units
    return Units(
        1, estimate.prompt_tokens, call.output_events if call.request.stream else estimate.output_tokens
    )


def _unshared_blocks_used(call: Call, demand: Demand) -> int | None:
    """From the engine's `usage`; None where it sent none, or counts what is no block: a sound by its length."""
    usage, request = call.usage, call.generation
    if usage is None or usage.completion_tokens is None or request.sound is not None:
        return None
    prompts = request.prompt_count
    if not request.endpoint.generates:
        each = -(-usage.prompt_tokens // prompts)
        return min(demand.blocks, demand.sequences * inputs_blocks([each], demand.block_size))
    return used_blocks(
        usage.prompt_tokens, usage.completion_tokens, prompts, demand.sequences, demand.block_size
    )
