"""The engines of one server behind one door: ranks, queue limits, and the states that an operator or a fault sets."""

import asyncio
import time
from itertools import count

from gateway.mock.engine import Engine, EngineConfig
from gateway.mock.metrics import Metrics
from gateway.mock.rank import Rank
from gateway.mock.stream import Busy, EngineDead, Plan, Stream

__all__ = ["PAUSE_MODES", "Busy", "Driver", "EngineDead", "Plan", "Stream"]

PAUSE_MODES = ("abort", "wait", "keep")


class Driver:
    """Owns the engines.  They start with the first call; `close` ends them."""

    def __init__(self, config: EngineConfig, speed: float = 1.0) -> None:
        """`speed` divides step times; `math.inf` makes every step take no time."""
        if not speed > 0:
            raise ValueError(f"speed must be above 0, got {speed}")
        self._config = config
        self._ranks = [
            Rank(config, speed, self._forget, self.crash) for _ in range(config.data_parallel_size)
        ]
        self.metrics = Metrics([rank.metrics for rank in self._ranks], time.time())
        self.stopped = asyncio.Event()
        self.draining = False
        self.dead = False
        self.paused = False
        self.sleeping_level = 0
        """0 also while awake."""
        self._numbers = count(1)
        self._turn = 0
        self._streams: dict[str, Stream] = {}
        self._parked: dict[Stream, int | None] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return len(self._ranks)

    @property
    def engine(self) -> Engine:
        """The engine of rank 0."""
        return self._ranks[0].engine

    @property
    def engines(self) -> list[Engine]:
        return [rank.engine for rank in self._ranks]

    @property
    def sleeping(self) -> bool:
        """As vLLM answers `/is_sleeping`: also true while only paused."""
        return self.paused

    def submit(self, plan: Plan, rank: int | None = None) -> Stream:
        """Queue a call, on the given rank or where vLLM would put each of its sequences.

        The caller gives it back with `withdraw` however it ends.  After `stop` or `drain` the stream is stopped from
        the start; while paused it waits outside of the engines.  Raises Busy at a queue limit, EngineDead after a
        crash.
        """
        if self.dead:
            raise EngineDead
        loop = asyncio.get_running_loop()
        stream = Stream(str(next(self._numbers)), plan, loop.time())
        if self.stopped.is_set() or self.draining:
            stream.stop()
            return stream
        self._check_limits(plan)
        self._streams[stream.id] = stream
        self._empty.clear()
        if plan.hold_seconds > 0:
            stream.hold = loop.call_later(plan.hold_seconds, self._release, stream)
        if self.paused:
            self._parked[stream] = rank
        else:
            self._start(stream, rank)
        return stream

    def withdraw(self, stream: Stream) -> bool:
        """Forget a call and free what it still holds at once; True when it was not finished."""
        if self._streams.get(stream.id) is not stream:
            return False
        self._parked.pop(stream, None)
        for rank in self._ranks:
            rank.withdraw(stream)
        self._forget(stream)
        return True

    def stop(self) -> None:
        """What SIGTERM does to vLLM: every call ends with what it has, and new ones get nothing."""
        self.stopped.set()
        self._end_all()

    def drain(self) -> None:
        """What SIGTERM does with a shutdown timeout: what is here finishes, new calls get nothing."""
        self.draining = True

    async def drained(self) -> None:
        """Returns when no call is left."""
        await self._empty.wait()

    def crash(self) -> None:
        """What the death of the engine core does: everybody who waits for a token gets EngineDead."""
        self.dead = True
        for stream in tuple(self._streams.values()):
            self.withdraw(stream)
            stream.fail(EngineDead())

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Schedule nothing new until `resume`; new calls wait without being counted as waiting.

        What is here is ended ("abort"), runs on unless it still waits ("wait"), or stops where it is ("keep").
        `clear_cache` empties the prefix cache as soon as nothing runs, and makes what is kept compute again.  Raises
        ValueError for another mode.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        self.paused = True
        if mode == "abort":
            self._count_aborted()
            self._end_all()
        for rank in self._ranks:
            rank.pause(freeze=mode == "keep", clear_cache=clear_cache)

    def resume(self) -> None:
        """Undo `pause`; without effect while weights are offloaded."""
        if self.sleeping_level:
            return
        self.paused = False
        for rank in self._ranks:
            rank.resume()
        parked, self._parked = self._parked, {}
        for stream, number in parked.items():
            self._start(stream, number)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and, from level 1 on, give up the KV cache.  Raises ValueError for an unknown mode."""
        self.pause(mode, clear_cache=level >= 1)
        self.sleeping_level = self.metrics.sleeping_level = level
        self.metrics.awake = False

    def wake_up(self) -> None:
        self.sleeping_level = self.metrics.sleeping_level = 0
        self.metrics.awake = True
        self.resume()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False when a rank could not, because blocks are held there.

        `reset_running_requests`: what runs is preempted for it, and computes all of its tokens again.
        """
        if reset_running_requests:
            for rank in self._ranks:
                rank.preempt_all()
        done = [engine.reset_prefix_cache() for engine in self.engines]
        return all(done)

    def slow(self, factor: float) -> None:
        """Make every step that begins from now on take so many times as long as a healthy engine's."""
        if not factor > 0:
            raise ValueError(f"factor must be above 0, got {factor}")
        for rank in self._ranks:
            rank.factor = factor

    async def close(self) -> None:
        self.stop()
        for rank in self._ranks:
            await rank.close()

    def _check_limits(self, plan: Plan) -> None:
        """vLLM's own admission control (`check_admission` of `v1/engine/async_llm.py`)."""
        requests_max, tokens_max = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        streams = self._streams.values()
        if requests_max:
            unfinished = sum(stream.unfinished for stream in streams)
            if unfinished + len(plan.sequences) > requests_max:
                raise Busy("requests")
        if tokens_max and sum(stream.prefill_tokens for stream in streams) >= tokens_max:
            raise Busy("tokens")

    def _start(self, stream: Stream, number: int | None) -> None:
        """Each sequence is placed by itself, as vLLM does with the choices of a call."""
        parts: dict[int, list[int]] = {}
        for index in range(len(stream.plan.sequences)):
            parts.setdefault(self._choose(parts) if number is None else number, []).append(index)
        for chosen, indexes in parts.items():
            self._ranks[chosen].add(stream, indexes)

    def _choose(self, placed: dict[int, list[int]]) -> int:
        """The rank of the least load; of equal ones the next in turn."""
        order = [(self._turn + step) % self.ranks for step in range(self.ranks)]
        self._turn = (self._turn + 1) % self.ranks
        return min(order, key=lambda number: self._ranks[number].load + len(placed.get(number, ())))

    def _release(self, stream: Stream) -> None:
        stream.hold = None
        for rank in self._ranks:
            rank.release(stream)

    def _end_all(self) -> None:
        for stream in tuple(self._streams.values()):
            self.withdraw(stream)
            stream.stop()

    def _count_aborted(self) -> None:
        for stream in self._streams.values():
            self.metrics.aborted(stream.unfinished)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if stream.hold is not None:
            stream.hold.cancel()
        if not self._streams:
            self._empty.set()
