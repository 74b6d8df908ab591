"""The machine as the yardstick uses it: what is measured on core 0, everything else on core 1.  Linux only."""

import json
import os
import platform
import resource
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MEASURED_CORE, OTHER_CORE = 0, 1
QUIET_SHARE = 0.10
"""Of a core, used by others; more than this and a figure is not taken."""
STOP_SECONDS = 6.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def stay_on_the_other_core() -> None:
    """This process and, unless they are told otherwise, those that it starts."""
    if not {MEASURED_CORE, OTHER_CORE} <= os.sched_getaffinity(0):
        raise SystemExit("the yardstick needs the cores 0 and 1 of a Linux machine")
    os.sched_setaffinity(0, {OTHER_CORE})


def move_to_measured_core(pid: int) -> None:
    """A process with all its threads; not those that it has started."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {MEASURED_CORE})


def allow_open_files(wanted: int) -> None:
    """For this process and those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(
            f"the yardstick opens {wanted} files, and no more than {hard} are allowed: see ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def running(
    command: Sequence[str], core: int, log: Path, folder: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process group on one core, ended with the block; `folder` is where it runs."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in reversed(family(process.pid)):
                _kill(pid)
            process.wait()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process and its family, all threads, to the nanosecond."""
    used = 0
    for member in family(pid):
        tasks = Path("/proc", str(member), "task")
        try:
            threads = list(tasks.iterdir())
        except OSError:
            continue
        used += sum(int((_read(thread / "schedstat") or "0").split()[0]) for thread in threads)
    return used / 1e9


def memory_kb(pid: int) -> int:
    """Proportional set size of a process and its family."""
    pages = [_read(Path("/proc", str(member), "smaps_rollup")) or "" for member in family(pid)]
    lines = [line for page in pages for line in page.splitlines() if line.startswith("Pss:")]
    return sum(int(line.split()[1]) for line in lines)


def busy_seconds() -> tuple[float, float]:
    """What the two cores have worked since the machine started."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in ("cpu0", "cpu1"):
            counts = list(map(int, ticks))
            found[name] = (sum(counts[:3]) + sum(counts[5:8])) / TICKS_PER_SECOND
    return found["cpu0"], found["cpu1"]


def wait_until_quiet(seconds_max: float) -> None:
    """Until half a second passes in which neither core is used, or for `seconds_max`."""
    end = time.monotonic() + seconds_max
    while time.monotonic() < end:
        before, began = busy_seconds(), time.monotonic()
        time.sleep(0.5)
        seconds = time.monotonic() - began
        if max(b - a for a, b in zip(before, busy_seconds(), strict=True)) < QUIET_SHARE * seconds:
            return


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def get_json(url: str) -> Any:
    return json.loads(get(url))


def description() -> dict[str, str]:
    """What figures of two machines differ by."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None  # the process ended meanwhile
