"""Calls that are charged by their paths: what each asks for, and how it grows while it runs.

In some worlds the product does that, with the tokens that its engines report.  In the others growth is the world's own,
by dice, so that it comes at any moment and faster than short answers would: what the ledger makes of it is judged, not
whether it was foreseen well.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import msgspec

from gateway.core.elastic import ELASTIC, GUARANTEED, SHARED, base_of, blocks_at, next_growth, pack, path_of
from gateway.ledger.api import Admission
from gateway.ledger.reservation import Ask, Phase
from tests.sim.engines import BLOCK_SIZE, Engine

GROWTH_SECONDS = (0.02, 0.6)
"""Between two calls of a process that grow."""
TOKENS = 120
"""A call writes more than so many with a chance of 1 in e."""
GUARANTEED_ONLY = (GUARANTEED,)
MODES = (GUARANTEED_ONLY, (ELASTIC, SHARED), (GUARANTEED, ELASTIC, SHARED))
Weight = tuple[int, int, bytes, int]
"""What a call holds, its path with the size that it is made for, and blocks that are not in the path."""


def survival(written: int) -> float:
    return math.exp(-written / TOKENS)


class Growth:
    """Of one process."""

    def __init__(self, engines: Sequence[Engine], seed: str, metered: bool) -> None:
        """`metered`: by what the engines report; nothing is diced."""
        self._random = random.Random(f"growth {seed}")
        elastic = [] if metered else [engine for engine in engines if engine.mode != GUARANTEED]
        self._bases = [base_of(engine.blocks - 1) for engine in elastic]
        self._keeps_promise = any(engine.mode != ELASTIC for engine in engines if engine.pool == "long")
        """Some replica that every lane may use."""
        self._written: dict[str, int] = {}

    def weighted(self, admission: Admission) -> Admission:
        """Most calls are charged by their paths."""
        if not self._bases:
            return admission
        lot = self._random.random()
        if lot < 0.3 or not admission.tokens_max:
            return msgspec.structs.replace(admission, promised=lot < 0.15 and self._keeps_promise)
        held, base, path, _ = self._weight(admission, 0, self._random.choice(self._bases), 0)
        return msgspec.structs.replace(admission, held=held, base=base, path=path)

    def _weight(self, admission: Admission, written: int, base: int, net: int) -> Weight:
        """Of all its sequences together."""
        output, sequences = admission.tokens_max // admission.sequences, admission.sequences
        prompt = max(admission.blocks // sequences * BLOCK_SIZE - output, 1)
        written = min(written, output)
        held = blocks_at(prompt, next_growth(written, output), BLOCK_SIZE, 0)
        rest = max(prompt - net * BLOCK_SIZE // sequences, 1)
        path = path_of(rest, output, written, survival, BLOCK_SIZE, base)
        return sequences * held, base, pack(tuple(sequences * point for point in path)), net

    async def go_on(self, asks: Callable[[], Sequence[Ask]]) -> None:
        """Again and again one of them has written more, until cancelled."""
        while self._bases:
            await asyncio.sleep(self._random.uniform(*GROWTH_SECONDS))
            running = [ask for ask in asks() if ask.phase is Phase.RESERVED and ask.path]
            self._written = {ask.id: self._written.get(ask.id, 0) for ask in running}
            if running:
                self._grow(self._random.choice(running))

    def _grow(self, ask: Ask) -> None:
        self._written[ask.id] += self._random.choice((16, 64, 64, 100))
        if self._random.random() < 0.05:
            return ask.grow(-1, 0, b"")
        net = self._random.choice((0, ask.shared))
        ask.grow(*self._weight(ask.admission, self._written[ask.id], ask.base, net))
