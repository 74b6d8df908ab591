"""An event loop in virtual time: when nothing can run, the clock jumps to the next timer.

Callbacks run in the order in which they became ready, so a world whose chance comes from a seed goes the same way
every time.  A callback belongs to the process of its context, and one of a stopped process waits until it goes on.
"""

import asyncio
import contextvars
import heapq
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.network import Network

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
CALLBACKS_AT_ONCE_MAX = 200_000
"""Callbacks at one instant; more can only be a loop that never waits."""


class Stuck(Exception):
    """Nothing will ever happen any more, or the clock stands still."""


class Process:
    """One operating-system process.  Whatever is begun in its context is its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        """Killed: its connections are gone and it never goes on."""
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._waiting: list[asyncio.Handle] = []

    def __repr__(self) -> str:
        return self.name

    def stop(self) -> None:
        """As SIGSTOP: nothing of it runs, its timers fire late."""
        self.stopped = True

    def go_on(self, loop: "VirtualLoop") -> None:
        self.stopped = False
        loop.make_ready(self._waiting)
        self._waiting = []

    def keep(self, handle: asyncio.Handle) -> None:
        self._waiting.append(handle)


class VirtualLoop(asyncio.BaseEventLoop):
    """Sockets are those of `network`; threads and signals do not exist."""

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.network: Network | None = None
        self._now = 0.0
        self._callbacks_at_once = 0
        self._processes: weakref.WeakKeyDictionary[asyncio.Task[Any], Process | None]
        self._processes = weakref.WeakKeyDictionary()

    def time(self) -> float:
        return self._now

    def make_ready(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def create_task(self, coro: Any, *, context: contextvars.Context | None = None, **options: Any) -> Any:
        task = super().create_task(coro, context=context, **options)
        self._processes[task] = PROCESS.get() if context is None else context.get(PROCESS)
        return task

    def tasks_of(self, process: Process) -> list[asyncio.Task[Any]]:
        """Those that have not ended."""
        return [task for task, owner in self._processes.items() if owner is process and not task.done()]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:  # type: ignore[override]
        assert self.network is not None
        return await self.network.connect(protocol_factory, host, port)

    def _run_once(self) -> None:
        """One turn.  BaseEventLoop calls it; its queues are `_ready` and the heap `_scheduled`."""
        self._collect_due()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.stopped:
                process.keep(handle)
            else:
                handle._run()

    def _collect_due(self) -> None:
        timers = self._scheduled
        while timers and timers[0]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not self._ready:
            if not timers:
                raise Stuck("nothing can run, and no timer is set")
            if timers[0].when() > self._now:
                self._now = timers[0].when()
                self._callbacks_at_once = 0
        while timers and timers[0].when() <= self._now:
            self._ready.append(heapq.heappop(timers))
        self._callbacks_at_once += len(self._ready)
        if self._callbacks_at_once > CALLBACKS_AT_ONCE_MAX:
            raise Stuck(f"the clock stands still at {self._now:.3f} s")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer leaves the heap when its time comes."""

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        raise AssertionError("a thread spoke to the virtual loop")
