"""One sending process: its share of the calls at their times, and an eye on whether it keeps up."""

import asyncio
import contextlib
import gc
import signal
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from gateway.loadtest.client import Clients, Counts
from gateway.loadtest.exchange import Notes
from gateway.loadtest.prompts import Prompts
from gateway.loadtest.records import Recording
from gateway.loadtest.scenario import Scenario
from gateway.loadtest.targets import Target
from gateway.loadtest.workload import PlannedCall

LAG_SAMPLE_SECONDS = 0.01
PROGRESS_SECONDS = 1.0
BURST_CALLS = 32
"""Calls that are due are started without a look at the network, so many at most."""
AXIS_MARGIN_SECONDS = 5
"""The time axis is longer than the run by this, for what ends while the clients are stopped."""
_QUIET_COLLECTOR = (2_000, 20, 1_000_000)
"""Often among what is new, a millisecond each time; never through all the records, which pile up by design."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process needs to know."""

    scenario: Scenario
    targets: Sequence[Target]
    secrets: Mapping[str, str] = field(repr=False)
    calls: Sequence[PlannedCall]
    prompt_tokens_max: int
    run_tag: int
    arrivals_end_seconds: float

    @property
    def axis_seconds(self) -> int:
        return int(self.arrivals_end_seconds + self.scenario.drain_seconds) + AXIS_MARGIN_SECONDS


@dataclass(frozen=True, slots=True)
class Progress:
    """What a process tells about once a second."""

    counts: Counts
    streaming: int
    tokens: int


def work(job: Job, pipe: Pipe) -> None:
    """The process: says when it is ready, takes the start by `time.monotonic`, sends its recording at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    _raise_socket_limit()
    prompts = Prompts(job.scenario, job.run_tag, job.prompt_tokens_max)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_QUIET_COLLECTOR)
    try:
        pipe.send("ready")
        start: float = pipe.recv()
    except (EOFError, OSError):
        return  # the parent is gone
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        recording = runner.run(send_all(job, prompts, start, pipe))
    pipe.send(recording)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists, which is everywhere but on Windows."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 (see above)

    return uvloop.new_event_loop


async def send_all(job: Job, prompts: Prompts, start: float, pipe: Pipe | None = None) -> Recording:
    """Every call at its time, whatever became of those before; then wait for the rest, and stop it."""
    recording = Recording(job.axis_seconds)
    notes = Notes(recording, start)
    asyncio.get_running_loop().set_exception_handler(partial(_count_own_error, recording))
    clients = Clients(job.scenario, job.targets, job.secrets, prompts, notes)
    begin, cpu_begin = time.monotonic(), time.process_time()
    aides = [asyncio.create_task(_watch(notes))]
    if pipe is not None:
        aides.append(asyncio.create_task(_tell(pipe, clients, notes)))
    try:
        await _arrive(job.calls, clients, start)
        end = start + job.arrivals_end_seconds
        await asyncio.sleep(end - time.monotonic())
        await clients.finished(max(0.0, end + job.scenario.drain_seconds - time.monotonic()))
    finally:
        recording.cpu_seconds = time.process_time() - cpu_begin
        recording.sending_seconds = time.monotonic() - begin
        await clients.stop()
        for aide in aides:
            aide.cancel()
        await asyncio.gather(*aides, return_exceptions=True)
    return recording


async def _arrive(calls: Sequence[PlannedCall], clients: Clients, start: float) -> None:
    burst = 0
    for planned in calls:
        early = start + planned.arrival_seconds - time.monotonic()
        burst = 0 if early > 0 else burst + 1
        if early > 0 or burst % BURST_CALLS == 0:
            await asyncio.sleep(max(0.0, early))
        clients.start(planned)


async def _watch(notes: Notes) -> None:
    """Notes the lag of this event loop, and how many streams run in each second."""
    recording, last_second = notes.recording, len(notes.recording.running) - 1
    second, seen, samples = 0, 0, 0
    while True:
        due = time.monotonic() + LAG_SAMPLE_SECONDS
        await asyncio.sleep(LAG_SAMPLE_SECONDS)
        now = time.monotonic()
        if now < notes.start:
            continue
        _note_lag(recording.lags, now - due)
        if int(now - notes.start) != second:
            second, seen, samples = int(now - notes.start), 0, 0
        seen, samples = seen + notes.streaming, samples + 1
        recording.running[min(second, last_second)] = seen / samples


def _note_lag(lags: "array[float]", lag: float) -> None:
    """A late wake-up stands for those that should have come in it, or a long stall would be one sample of many."""
    lags.append(max(0.0, lag))
    while (lag := lag - LAG_SAMPLE_SECONDS) > 0:
        lags.append(lag)


async def _tell(pipe: Pipe, clients: Clients, notes: Notes) -> None:
    """Progress once a second; a parent that is gone ends this process."""
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        try:
            pipe.send(Progress(clients.counts, notes.streaming, sum(notes.recording.tokens)))
        except OSError:
            sys.exit(1)


def _count_own_error(recording: Recording, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A run with one is not a measurement."""
    recording.own_errors += 1
    loop.default_exception_handler(context)


def _raise_socket_limit() -> None:
    """A socket for each stream: 2,400 of them pass the usual limit of 1,024."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 (Unix)

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
