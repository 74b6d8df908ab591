"""The clock of the mock: one task that steps the engine and hands its tokens to the calls that wait for them."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from gateway.mock.engine import Engine, EngineConfig, Request, Sizes, Step, Token
from gateway.mock.metrics import Metrics

_log = logging.getLogger(__name__)


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


class Stream:
    """The tokens of one call.  It buffers at most what the call may produce: the sum of its output limits."""

    def __init__(self, stream_id: str, plan: Plan, arrived: float) -> None:
        self.id = stream_id
        self.plan = plan
        self.arrived = arrived
        self.unfinished = len(plan.sequences)
        self.admitted = False
        self.last_at: list[float | None] = [None] * self.unfinished
        self.hold: asyncio.TimerHandle | None = None
        self._tokens: deque[Token] = deque()
        self._stopped = False
        self._wake = asyncio.Event()

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        self._wake.set()

    def stop(self) -> None:
        """No token comes any more."""
        self._stopped = True
        self._wake.set()

    async def next(self) -> Token | None:
        """The next token, or None when the engine was stopped."""
        while not self._tokens:
            if self._stopped:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._tokens.popleft()


class Driver:
    """Owns the engine.  Starts its task with the first call; `close` ends it."""

    def __init__(self, config: EngineConfig, speed: float = 1.0) -> None:
        """`speed` divides step times; `math.inf` makes every step take no time."""
        if not speed > 0:
            raise ValueError(f"speed must be above 0, got {speed}")
        self.engine = Engine(config)
        self.metrics = Metrics(self.engine, time.time())
        self.stopped = asyncio.Event()
        self._speed = speed
        self._numbers = count(1)
        self._streams: dict[str, Stream] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def submit(self, plan: Plan) -> Stream:
        """Queue a call.  The caller gives it back with `withdraw` however it ends."""
        loop = asyncio.get_running_loop()
        stream = Stream(str(next(self._numbers)), plan, loop.time())
        if self.stopped.is_set():
            stream.stop()
            return stream
        self.engine.add(Request(stream.id, plan.sequences, held=plan.hold_seconds > 0))
        self._streams[stream.id] = stream
        if plan.hold_seconds > 0:
            stream.hold = loop.call_later(plan.hold_seconds, self._release, stream.id)
        if self._task is None:
            self._task = loop.create_task(self._run())
        self._work.set()
        return stream

    def withdraw(self, stream: Stream) -> bool:
        """Forget a call and free what it still holds at once; True when it was not finished."""
        if self._streams.get(stream.id) is not stream:
            return False
        del self._streams[stream.id]
        if stream.hold is not None:
            stream.hold.cancel()
        aborted = self.engine.abort(stream.id)
        self._work.set()
        return aborted

    def stop(self) -> None:
        """What SIGTERM does to vLLM: every call ends with what it has, and new ones get nothing."""
        self.stopped.set()
        for stream in tuple(self._streams.values()):
            self.withdraw(stream)
            stream.stop()

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _release(self, stream_id: str) -> None:
        self.engine.release(stream_id)
        self._work.set()

    async def _run(self) -> None:
        try:
            await self._step_for_ever()
        except Exception:
            _log.exception("mock engine failed")
            self.stop()

    async def _step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = self.engine.schedule()
            if step.idle:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
                continue
            self._see_admitted(step, loop.time())
            seconds = 0.0 if math.isinf(self._speed) else step.duration_ms / 1000 / self._speed
            due = max(due + seconds, loop.time())  # a late wake-up shortens the next step, so the pace holds
            await asyncio.sleep(due - loop.time())
            self.engine.complete(step)
            self._deliver(step, loop.time())

    def _see_admitted(self, step: Step, now: float) -> None:
        self.metrics.see_step(step)
        for sequence in step.admitted:
            stream = self._streams[sequence.request_id]
            if sequence.preemptions == 0:
                self.metrics.queue_time.observe(now - stream.arrived)
            if not stream.admitted:
                stream.admitted = True
                stream.plan.on_admitted()

    def _deliver(self, step: Step, now: float) -> None:
        for token in step.tokens:
            stream = self._streams[token.request_id]
            self._observe(stream, token, now)
            stream.put(token)
            if token.last:
                stream.unfinished -= 1
                if stream.unfinished == 0:
                    del self._streams[token.request_id]

    def _observe(self, stream: Stream, token: Token, now: float) -> None:
        previous = stream.last_at[token.index]
        if previous is None:
            self.metrics.first_token.observe(now - stream.arrived)
        else:
            self.metrics.inter_token.observe(now - previous)
        stream.last_at[token.index] = now
        if token.last:
            self.metrics.latency.observe(now - stream.arrived)
            self.metrics.finished[stream.plan.reasons[token.index]] += 1
