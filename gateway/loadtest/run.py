"""One run: sending processes, an observer beside them, a line of progress, and the report's document at the end."""

import asyncio
import contextlib
import multiprocessing
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any

from gateway.loadtest.figures import figures
from gateway.loadtest.observe import Observations, Observer
from gateway.loadtest.records import Recording, together
from gateway.loadtest.scenario import Scenario, TraceLine, to_json
from gateway.loadtest.series import series
from gateway.loadtest.targets import Target
from gateway.loadtest.worker import Job, Progress, work
from gateway.loadtest.workload import PlannedCall, arrivals_end_seconds, plan, share_of

FORMAT = 1
"""Of the report's document."""
READY_SECONDS = 60.0
"""For the processes to start and to build their prompts."""
HEAD_START_SECONDS = 0.5
"""From the start's announcement to the start."""
OVERTIME_SECONDS = 60.0
"""After the drain, for a process to hand over its recording."""


class RunError(Exception):
    """The run could not be made.  Its text is one line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run needs beside its scenario."""

    targets: Sequence[Target]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    engines: Sequence[str] = ()
    admin: str | None = None
    admin_token: str | None = field(default=None, repr=False)
    processes: int = 1
    label: str = ""


Show = Callable[[str], None]


def execute(scenario: Scenario, trace: Sequence[TraceLine], options: Options, show: Show) -> dict[str, Any]:
    """The document of a finished run.  Raises ScenarioError, RunError, AdminError."""
    calls = plan(scenario, trace)
    end_seconds = arrivals_end_seconds(scenario, calls)
    began = datetime.now(UTC)
    recording, observations = asyncio.run(_run(_jobs(scenario, calls, options, end_seconds), options, show))
    return {
        "kvgate_loadtest": FORMAT,
        "label": options.label or scenario.name,
        "began": began.isoformat(timespec="seconds"),
        "scenario": to_json(scenario),
        "targets": [target.url for target in options.targets],
        "processes": options.processes,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
        "figures": figures(scenario, recording, observations, end_seconds),
        "series": series(scenario, recording, observations),
    }


def _jobs(
    scenario: Scenario, calls: Sequence[PlannedCall], options: Options, end_seconds: float
) -> list[Job]:
    run_tag = secrets.randbelow(26**4)
    longest = max((call.prompt_tokens for call in calls), default=1)
    return [
        Job(
            scenario=scenario,
            targets=options.targets,
            secrets=options.secrets,
            calls=share_of(calls, process, options.processes),
            prompt_tokens_max=longest,
            run_tag=run_tag,
            arrivals_end_seconds=end_seconds,
        )
        for process in range(options.processes)
    ]


async def _run(jobs: Sequence[Job], options: Options, show: Show) -> tuple[Recording, Observations]:
    observer = Observer(options.engines, options.admin, options.admin_token)
    try:
        await observer.begin()
        return await _send_and_watch(jobs, observer, show), observer.observations
    finally:
        await observer.close()


async def _send_and_watch(jobs: Sequence[Job], observer: Observer, show: Show) -> Recording:
    senders = _Senders(jobs)
    try:
        await senders.ready()
        start = time.monotonic() + HEAD_START_SECONDS
        watching = asyncio.create_task(observer.watch(start))
        showing = asyncio.create_task(_show_progress(senders, observer.observations, start, show))
        try:
            recording = await senders.send(start)
        finally:
            for task in (watching, showing):
                task.cancel()
            await asyncio.gather(watching, showing, return_exceptions=True)
        await observer.finish(start)
        return recording
    finally:
        senders.close()


class _Senders:
    """The sending processes; they end with this object, and with this process."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._limit_seconds = jobs[0].axis_seconds + OVERTIME_SECONDS
        self.progress: list[Progress | None] = [None] * len(jobs)
        self._pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        for job in jobs:
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    async def ready(self) -> None:
        """Raises RunError."""
        await self._each(self._ready, READY_SECONDS)

    async def send(self, start: float) -> Recording:
        """Announce the start and collect what was noted.  Raises RunError."""
        for pipe in self._pipes:
            pipe.send(start)
        return together(await self._each(self._recording, self._limit_seconds))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()

    async def _each(self, ask: Callable[[int], Any], seconds: float) -> list[Any]:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.gather(*(ask(number) for number in range(len(self._pipes))))
        except TimeoutError:
            raise RunError(f"a sending process said nothing for {seconds:.0f} s") from None
        except (EOFError, OSError):
            raise RunError("a sending process ended early; its error is above") from None

    async def _ready(self, number: int) -> None:
        await self._receive(number)

    async def _recording(self, number: int) -> Recording:
        while True:
            found = await self._receive(number)
            if isinstance(found, Recording):
                return found
            self.progress[number] = found

    async def _receive(self, number: int) -> Any:
        """The next message; it is whole when its first bytes are there, or soon after."""
        pipe, loop = self._pipes[number], asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(pipe.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(pipe.fileno())
        return pipe.recv()


async def _show_progress(senders: _Senders, observations: Observations, start: float, show: Show) -> None:
    tokens = 0
    while True:
        await asyncio.sleep(1)
        known = [progress for progress in senders.progress if progress is not None]
        if known:
            total = sum(progress.tokens for progress in known)
            show(progress_line(time.monotonic() - start, known, total - tokens, observations))
            tokens = total


def progress_line(
    seconds: float, known: Sequence[Progress], new_tokens: int, observations: Observations
) -> str:
    """What there is to say about this second, in one line."""

    def count(name: str) -> int:
        return sum(getattr(progress.counts, name) for progress in known)

    parts = [
        f"{seconds:5.0f} s  offered {count('offered')}  live {count('live')}",
        f"streaming {sum(progress.streaming for progress in known)}  answered {count('answered')}",
        f"refused {count('refused')}  timed out {count('timed_out')}  failed {count('failed')}",
        f"gave up {count('gave_up')}  {new_tokens} tokens/s",
    ]
    engines = [rows[-1] for rows in observations.engines.values() if rows and rows[-1].running is not None]
    if engines:
        running, waiting = (sum(getattr(e, name) or 0 for e in engines) for name in ("running", "waiting"))
        preempted = sum(sample.preemptions or 0 for sample in engines)
        parts.append(f"| engines: running {running:.0f} waiting {waiting:.0f} preemptions {preempted:.0f}")
    if observations.gateway:
        last = observations.gateway[-1]
        parts.append(f"| kvgate: {last.reserved}/{last.limit} blocks, queue {last.queue}")
    return "  ".join(parts)


def show_on_stderr(line: str) -> None:
    """On a terminal each line replaces the one before; elsewhere every fifth second is kept."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif int(line.split(" s", 1)[0]) % 5 == 0:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
