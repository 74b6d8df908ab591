"""A call at the engine: what it runs, and its tokens on their way to whoever answers it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.mock.engine import Sizes, Token


class Busy(Exception):
    """A queue limit of the engine's own was reached: `reason` is "requests" or "tokens"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineDead(Exception):
    """The engine core has crashed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call will run."""

    sequences: tuple[Sizes, ...]
    reasons: tuple[str, ...]
    """Why each sequence will end, for the metrics."""
    on_admitted: Callable[[], None]
    """Called once, when the engine first gives the call blocks."""
    hold_seconds: float = 0.0
    """No token before this time has passed since arrival."""
    priority: int = 0
    choices: int = 1
    """The first so many sequences are choices of one prompt, and so on; for the metrics."""
    limits: tuple[int, ...] = ()
    """max_tokens of each sequence, for the metrics; empty: what it will produce."""


@dataclass(slots=True)
class Track:
    """The loop times of one sequence, None until known, and what the prefix cache had of it."""

    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    tokens: int = 0


class Stream:
    """The tokens of one call, for one reader.

    It buffers at most what the call may produce: the sum of its output limits.
    """

    def __init__(self, stream_id: str, plan: Plan, arrived: float) -> None:
        self.id = stream_id
        self.plan = plan
        self.arrived = arrived
        """Loop time, as those below."""
        self.admitted_at: float | None = None
        """When the engine first gave it blocks."""
        self.first_token_at: float | None = None
        self.unfinished = len(plan.sequences)
        self.tracks = [Track() for _ in plan.sequences]
        self.hold: asyncio.TimerHandle | None = None
        self._tokens: deque[Token] = deque()
        self._stopped = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had, over all sequences; complete when each gave its first token."""
        return sum(track.cached_tokens for track in self.tracks)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the sequences that gave no token yet."""
        pairs = zip(self.plan.sequences, self.tracks, strict=True)
        return sum(sizes.prompt_tokens for sizes, track in pairs if track.first_at is None)

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        if self._reader is not None:
            self._wake()

    def stop(self) -> None:
        """No token comes any more."""
        self._stopped = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """The reader gets this error, and none of the tokens it has not read."""
        self._error = error
        self._tokens.clear()
        self._wake()

    async def next(self) -> Token | None:
        """The next token, or None when the engine was stopped.  Raises EngineDead when it crashed."""
        while not self._tokens:
            if self._error is not None:
                raise self._error
            if self._stopped:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._tokens.popleft()

    def take(self) -> list[Token]:
        """All tokens at hand."""
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
