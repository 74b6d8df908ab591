"""Prompts that are token ids, read for how they begin."""

import msgspec

from gateway.core.body import Refused
from gateway.core.prefixes import points
from gateway.core.prompt import read_ids
from gateway.core.request import GenerationRequest
from gateway.tokens.api import IdReader
from gateway.tokens.threads import CountingThreads, IsLate

INLINE_BODY_BYTES = 24 * 1024
"""Bodies up to this are read on the event loop: 4,000 ids take 0.2 ms."""


class ThreadedIdReader(IdReader):
    """Reads long ones in the threads that all counters share."""

    def __init__(self, threads: CountingThreads) -> None:
        self._threads = threads

    async def points(self, request: GenerationRequest, block_size: int) -> bytes:
        if len(request.body) <= INLINE_BODY_BYTES:
            return _points(request.body, block_size)
        return await self._threads.run(lambda is_late: _read(request.body, block_size, is_late)) or b""


def _read(body: bytes, block_size: int, is_late: IsLate) -> bytes:
    return b"" if is_late() else _points(body, block_size)


def _points(body: bytes, block_size: int) -> bytes:
    try:
        return points(read_ids(body), block_size)
    except (Refused, msgspec.ValidationError):  # it is for the engine to judge
        return b""
