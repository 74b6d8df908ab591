"""How a call's prompt begins: read before the call is admitted, noted where it runs, compared with what its engine had.

Only what is known by its tokens is charged once for several calls; what is known by its texts says where to place it.
"""

from gateway.call import Call
from gateway.core.estimate import Demand
from gateway.core.events import Miscounted, Observer, PrefixFound
from gateway.core.prefixes import GRID, TEXT_BYTES, Salt, keys_of, segments, text_points, tokens_min
from gateway.core.prompt import PromptText, PromptTokens
from gateway.core.route import LIKELY_TOKEN_BYTES
from gateway.core.warm import warmest
from gateway.ledger.api import Grant
from gateway.tokens.api import Counted, IdReader


def is_worth_counting(call: Call) -> bool:
    """It is likely to be long enough to have something in common with others, and its tokens would say what."""
    size = call.block_size
    if not size:
        return False
    (prompt,) = call.generation.prompts
    return isinstance(prompt, PromptText) and prompt.utf8_bytes >= LIKELY_TOKEN_BYTES * tokens_min(size)


def block_size_of(call: Call) -> int:
    """Of the blocks of its prompt that others may hold as well; 0 where none are shared."""
    size, request = call.fleet.engines.shape().prefix_block_size, call.generation
    if not size or not request.may_share:
        return 0
    is_text = isinstance(request.prompts[0], PromptText)
    if is_text and call.fleet.counts.are_wrong(call.request.path, call.terms.caller):
        return 0
    return size


async def read(call: Call, counts: list[Counted], ids: IdReader | None, now: float) -> None:
    """Note in a call that was counted how it begins, and where that is warm.

    `now`: seconds of the monotonic clock.
    """
    size = call.block_size
    if not size:
        return
    (prompt,), (counted,) = call.generation.prompts, counts
    found = counted.points
    if isinstance(prompt, PromptTokens) and ids is not None and prompt.tokens >= tokens_min(size):
        found = await ids.points(call.generation, size)
    call.tokens_known = bool(found)
    if call.tokens_known:
        call.beginning = keys_of(_salt(call, size), found)
    elif isinstance(prompt, PromptText) and _has_choice(call):
        call.beginning = keys_of(_salt(call, size), text_points(prompt.texts))
    if _has_choice(call):
        warm = call.fleet.memory.warm.depths(call.beginning, now)
        depths = {name: depth for name, depth in warm.items() if call.fleet.engines.knows(name)}
        call.prefer = warmest(depths)
        call.cached = {name: _tokens(call, counted.tokens, depth) for name, depth in depths.items()}


def cut(call: Call, demand: Demand) -> None:
    """Note in a call that was read which pieces of it others may hold as well."""
    if call.block_size != demand.block_size:  # another engine has come meanwhile, or nothing is shared
        call.block_size, call.beginning, call.prefer = 0, (), ()
    elif call.tokens_known:
        call.segments = segments(call.beginning, call.fleet.memory.seen.cut(call.beginning))


def _tokens(call: Call, tokens: int, depth: int) -> int:
    """Up to so many of its points, of so many tokens; where only its texts are known that is their part."""
    blocks = GRID[depth - 1]
    if call.tokens_known:
        return blocks * call.block_size
    (prompt,) = call.generation.prompts
    assert isinstance(prompt, PromptText)
    return min(tokens * blocks * TEXT_BYTES // max(prompt.utf8_bytes, 1), tokens - 1)


def note_run(call: Call, grant: Grant, now: float) -> None:
    """It begins or has ended there.  `now`: as in `read`."""
    if call.beginning and _has_choice(call):
        call.fleet.memory.warm.note(call.beginning, grant.replica, now)


def compare(call: Call, demand: Demand, grant: Grant, observer: Observer) -> None:
    """What its engine had in its cache with what calls there hold, where it tells; doubts go into the call.

    Also its count of the prompt with the one that is charged.
    """
    usage = call.usage
    if call.segments and usage is not None and isinstance(call.generation.prompts[0], PromptText):
        route, key, fleet = call.request.path, call.terms.caller, call.fleet
        if fleet.counts.note(route, key, usage.prompt_tokens == demand.prompt_tokens):
            observer(Miscounted(fleet.name, route, "" if fleet.counts.are_wrong(route) else key))
    if not grant.cache:
        return
    expected, replica = grant.shared * demand.block_size, grant.replica
    found = call.fleet.caches.note(replica, grant.cache, expected, usage)
    if found is None:
        return
    pool = call.fleet.engines.pool(replica)
    observer(PrefixFound(call.fleet.name, pool, replica, expected, found.tokens))
    call.doubted = found.doubted


def _has_choice(call: Call) -> bool:
    """There are replicas between which a call may be placed."""
    return len(call.fleet.engines.names()) > 1


def _salt(call: Call, block_size: int) -> bytes:
    fleet, beside = call.fleet, call.generation.beside or b""
    adapter = fleet.engines.shape().adapter(call.request.model)
    return Salt(fleet.name, adapter, call.terms.cache_salt, block_size, beside).digest()
