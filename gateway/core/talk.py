"""Names of conversations: of what a call goes on with, and of what may be gone on with after it.

A turn sends all messages again.  So all that it has before its last answer is what the turn before it sent, and a hash
of that is a name on which both agree, without their tokens or an id of the session.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

NAME_BYTES = 8
"""The ledger takes 16 characters."""
INLINE_BYTES_MAX = 128 * 1024
"""0.3 ms; what is longer is read off the event loop."""
_MARK = "cache_control"
"""Where a client wants its provider to cache: it moves from turn to turn, and engines do not read it."""
_MARKED = b'"cache_control"'
_ASSISTANT = "assistant"
SALTS = 1_024
"""Kept at hand, of keys that have conversations now."""


class Talk(NamedTuple):
    past: str
    """Of all messages before the last answer; '' = there is none, or nothing before it."""
    whole: str
    """Of all messages."""


class _Message(msgspec.Struct):
    role: Any = None


_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(_Message)


def read_talk(messages: bytes, salt: bytes) -> Talk:
    """`messages`: the list as it stands in a body, which was read before.  `salt`: what else tells two conversations
    apart; whoever has another one has no name in common.

    Raises msgspec.MsgspecError for what is no list of objects.
    """
    raws: Sequence[bytes | msgspec.Raw] = _RAWS.decode(messages)
    last = _last_answer(raws) if len(raws) > 1 else 0
    if _MARKED in messages:
        raws = [_without_marks(raw) for raw in raws]
    hasher, past = _begun(salt).copy(), ""
    for at, raw in enumerate(raws):
        if at == last and at:
            past = hasher.copy().hexdigest()
        hasher.update(b"%d:" % len(raw))
        hasher.update(raw)
    return Talk(past, hasher.hexdigest())


@lru_cache(SALTS)
def _begun(salt: bytes) -> "blake2b":
    return blake2b(b"%d:%b" % (len(salt), salt), digest_size=NAME_BYTES)


def _last_answer(raws: Sequence[bytes | msgspec.Raw]) -> int:
    """Its place; 0 = there is none."""
    for at in range(len(raws) - 1, 0, -1):
        if _MESSAGE.decode(raws[at]).role == _ASSISTANT:
            return at
    return 0


def _without_marks(raw: bytes | msgspec.Raw) -> bytes:
    return msgspec.json.encode(_cleared(msgspec.json.decode(raw)))


def _cleared(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cleared(inner) for name, inner in value.items() if name != _MARK}
    if isinstance(value, list):
        return [_cleared(inner) for inner in value]
    return value
