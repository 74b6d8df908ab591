"""Prompts that begin alike: what each call says of it, by dice, and who reads which cache an engine has."""

import asyncio
import random
from collections.abc import Sequence

import msgspec

from gateway.core.capacity import Learned, Reading
from gateway.core.segments import Segment
from gateway.ledger.api import Admission
from gateway.ledger.seats import Seats
from tests.sim.engines import BLOCK_SIZE, Engine

SHARED_SHARE = 0.6
"""Of worlds in which calls begin alike."""
READ_SECONDS = 1.0
CHAINS = tuple(
    tuple(Segment(f"{salt}{'0' * 29}{parts[0]}{at}", blocks) for at, blocks in enumerate(parts[1:]))
    for salt in "ab"
    for parts in ((0, 1), (1, 2, 1), (2, 4, 8, 8))
)
"""Segments with which prompts begin, in blocks."""


class Beginnings:
    """Of one process."""

    def __init__(self, engines: Sequence[Engine], seed: str, shares: bool) -> None:
        self._random = random.Random(f"beginnings {seed}")
        self._engines = engines
        self._shares = shares

    def of(self, admission: Admission) -> Admission:
        """Most calls begin as some others do, as far as they are long enough."""
        if not self._shares or self._random.random() < 0.2:
            return admission
        segments = list(self._random.choice(CHAINS))
        while segments and sum(segment.blocks for segment in segments) >= admission.blocks:
            segments.pop()
        return msgspec.structs.replace(admission, segments=tuple(segments), block_size=BLOCK_SIZE)

    async def read(self, seats: Seats) -> None:
        """What engines say of their caches, again and again, until cancelled."""
        while self._shares:
            for engine in self._engines:
                seat = await seats.seat(engine.name)
                if seat and seat.mine:
                    reading = Reading(
                        num_gpu_blocks=engine.blocks, started_at=engine.started_at, prefix_caching=True
                    )
                    await seats.learn(engine.name, seat.number + 1, Learned(engine=reading), seat.configured)
            await asyncio.sleep(READ_SECONDS)
