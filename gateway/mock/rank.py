"""The clock of one engine: a task that steps it and hands its tokens to the calls that wait for them."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from gateway.mock.engine import Engine, EngineConfig, Request, Step, Token
from gateway.mock.observed import RankMetrics
from gateway.mock.stream import Stream, Track

_log = logging.getLogger(__name__)


class Rank:
    """Owns one engine.  Starts its task with the first call; `close` ends it."""

    def __init__(
        self,
        config: EngineConfig,
        speed: float,
        on_finished: Callable[[Stream], None],
        on_failure: Callable[[], None],
    ) -> None:
        """`on_finished` is told a call whose last token was delivered, `on_failure` that the engine failed."""
        self.engine = Engine(config)
        self.metrics = RankMetrics(self.engine)
        self.factor = 1.0
        """Multiplies step times."""
        self._speed = speed
        self._on_finished = on_finished
        self._on_failure = on_failure
        self._frozen = False
        self._clear_when_quiet = False
        self._streams: dict[str, Stream] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> float:
        """How much vLLM thinks it has to do (`get_core_engine_for_request` of `v1/engine/core_client.py`)."""
        waiting = len(self.engine.waiting)
        return waiting + len(self.engine.running) + waiting * 6 * max(0.0, self.engine.kv_usage - 0.5)

    def add(self, stream: Stream, indexes: Sequence[int]) -> None:
        """Queue those sequences of a call."""
        plan = stream.plan
        sizes = tuple(plan.sequences[index] for index in indexes)
        held = stream.hold is not None
        self.engine.add(Request(stream.id, sizes, held, plan.priority, tuple(indexes)))
        self._streams[stream.id] = stream
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._work.set()

    def withdraw(self, stream: Stream) -> None:
        """Forget a call and free what it still holds at once."""
        if self._streams.pop(stream.id, None) is not None:
            self.engine.abort(stream.id)
            self._work.set()

    def release(self, stream: Stream) -> None:
        self.engine.release(stream.id)
        self._work.set()

    def pause(self, *, freeze: bool, clear_cache: bool) -> None:
        """Admit nothing, and with `freeze` also step no more after the step that runs.

        `clear_cache` empties the prefix cache as soon as nothing runs; what is frozen is preempted for it.
        """
        self.engine.admitting = False
        self._frozen = freeze
        self._clear_when_quiet = clear_cache
        if self._task is None or not self.engine.blocks_used:
            self._quiet()
        self._work.set()

    def resume(self) -> None:
        self.engine.admitting = True
        self._frozen = self._clear_when_quiet = False
        self._work.set()

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue."""
        for sequence in self.engine.running:
            self._streams[sequence.request_id].tracks[sequence.index].preemptions += 1
        self.engine.preempt_all()
        self._work.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._step_for_ever()
        except Exception:
            _log.exception("mock engine failed")
            self._on_failure()

    async def _step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = None if self._frozen else self.engine.schedule()
            if step is None or step.idle:
                self._quiet()
                self._work.clear()
                await self._work.wait()
                due = loop.time()
                continue
            self._see_scheduled(step, loop.time())
            seconds = 0.0 if math.isinf(self._speed) else step.duration_ms * self.factor / 1000 / self._speed
            due = max(due + seconds, loop.time())  # a late wake-up shortens the next step, so the pace holds
            await asyncio.sleep(due - loop.time())
            self.engine.complete(step)
            self._deliver(step.tokens, loop.time())

    def _quiet(self) -> None:
        """No step is open: clear the cache if that was asked for and nothing runs on."""
        if not self._clear_when_quiet or (self.engine.running and not self._frozen):
            return
        self._clear_when_quiet = False
        self.preempt_all()
        self.engine.reset_prefix_cache()

    def _see_scheduled(self, step: Step, now: float) -> None:
        for sequence in step.preempted:
            self._streams[sequence.request_id].tracks[sequence.index].preemptions += 1
        for sequence in step.admitted:
            stream = self._streams[sequence.request_id]
            if sequence.preemptions == 0:
                track = stream.tracks[sequence.index]
                track.admitted_at, track.cached_tokens = now, sequence.cached_tokens
            if stream.admitted_at is None:
                stream.admitted_at = now
                stream.plan.on_admitted()

    def _deliver(self, tokens: Sequence[Token], now: float) -> None:
        if not tokens:
            return
        prompt_tokens = 0
        gaps: dict[float, int] = {}
        for token in tokens:
            stream = self._streams[token.request_id]
            track = stream.tracks[token.index]
            last_at, track.last_at = track.last_at, now
            if last_at is None:
                prompt_tokens += self._see_first(stream, track, token, now)
            else:
                gaps[last_at] = gaps.get(last_at, 0) + 1
            stream.put(token)
            if token.last:
                self._see_last(stream, track, token, now)
        self.metrics.observe("iteration_tokens_total", prompt_tokens + len(tokens))
        for last_at, count in gaps.items():
            self.metrics.observe("inter_token_latency_seconds", now - last_at, count)
        self._forget_finished(tokens)

    def _see_first(self, stream: Stream, track: Track, token: Token, now: float) -> int:
        """A sequence's first token; the prompt tokens that were computed for it."""
        track.first_at = now
        if stream.first_token_at is None:
            stream.first_token_at = now
        self.metrics.observe("time_to_first_token_seconds", now - stream.arrived)
        return stream.plan.sequences[token.index].prompt_tokens - track.cached_tokens

    def _see_last(self, stream: Stream, track: Track, token: Token, now: float) -> None:
        track.tokens = token.number
        self.metrics.see_finished(stream, token.index, now)
        stream.unfinished -= 1
        if stream.unfinished == 0:
            self._on_finished(stream)

    def _forget_finished(self, tokens: Sequence[Token]) -> None:
        """Last, because several sequences of one call may end in one step."""
        for token in tokens:
            if token.last and not self.engine.has(token.request_id):
                self._streams.pop(token.request_id, None)
