"""A prompt's beginning, in pieces that the books can count once for all calls that share it."""

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the KV cache that begins where the one before it ends; a prompt's first one begins at its start.

    Two prompts have a segment in common only where all that decides an engine's cache up to its end is the same: the
    tokens, model, LoRA adapter, `cache_salt`, media.
    """

    id: str
    """32 hexadecimal digits: of everything before its end, and of where it begins."""
    blocks: int
    """Whole blocks, 1 at least."""


SEGMENTS_MAX = 4
"""Of one call.  Each costs the store about a microsecond at admission, first token and settle."""
