"""With which conversation a call goes on, and whether its own is likely to go on: the ledger keeps that place warm."""

import asyncio
from functools import lru_cache

from gateway.call import Call
from gateway.core.prefixes import Salt
from gateway.core.returns import Returns
from gateway.core.talk import INLINE_BYTES_MAX, SALTS, read_talk


async def read(call: Call, now: float) -> None:
    """Note in a call that was parsed what it goes on with; nothing where no engine would still have it.

    `now`: seconds of the monotonic clock.
    """
    begin, end = call.generation.messages
    shape = call.fleet.engines.shape()
    if (
        not end
        or not shape.keeps_histories
        or call.generation.beside is None
        or call.generation.sequences > 1
    ):
        return
    messages, salt = call.request.body[begin:end], _salt(call)
    if len(messages) > INLINE_BYTES_MAX:
        call.talk = await asyncio.to_thread(read_talk, messages, salt)
    else:
        call.talk = read_talk(messages, salt)
    if call.talk.past:
        call.came_back = _returns(call).came(call.talk.past, now)


def note_grant(call: Call, warm: bool) -> None:
    """The ledger kept the place of its conversation, or did not."""
    if warm and not call.came_back:
        call.came_back = True
        _returns(call).came_from_elsewhere()


def ended(call: Call, now: float) -> str:
    """The name under which the blocks of its answer are kept for the next turn; '' = they are not.

    `now`: as in `read`.
    """
    if call.talk is None or call.blocks_used is None or not 200 <= call.status < 300 or call.interrupted:
        return ""
    return call.talk.whole if _returns(call).ended(call.talk.whole, now) else ""


def _returns(call: Call) -> Returns:
    return call.fleet.returns.of(call.terms.key, call.terms.class_)


def _salt(call: Call) -> bytes:
    """Another key's conversation is another one, whatever it says."""
    fleet, beside = call.fleet, call.generation.beside or b""
    adapter = fleet.engines.shape().adapter(call.request.model)
    salt = Salt(fleet.name, adapter, call.terms.cache_salt, 0, beside)
    digest = salt.digest() if beside or adapter else _digest(salt)  # a client may send what it likes as these
    return digest + call.terms.key.encode()


@lru_cache(SALTS)
def _digest(salt: Salt) -> bytes:
    """Of those that the settings alone decide."""
    return salt.digest()
