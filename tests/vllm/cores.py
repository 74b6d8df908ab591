"""Processes on cores of their own, so that a time says what one of them needs and not what another took from it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CORES_MIN = 2


@contextmanager
def apart(alone: int, *others: int) -> Iterator[None]:
    """The process `alone` and all that it started have a core to themselves while this is open; `others` and all that
    those started, and this process, have the rest.  Where there is one core, nothing changes."""
    cores = os.sched_getaffinity(0)
    if len(cores) < CORES_MIN:
        yield
        return
    first = {min(cores)}
    of_one, of_others = _family([alone]), _family([*others, os.getpid()])
    _bind(of_one, first)
    _bind(of_others - of_one, cores - first)
    try:
        yield
    finally:
        _bind(of_one | of_others, cores)


def _family(pids: Iterable[int]) -> set[int]:
    """They, and all that they started, and so on."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # After the name, which may hold anything: the state, and the parent.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _bind(pids: Iterable[int], cores: set[int]) -> None:
    """Every thread of them; one that has ended meanwhile is left out."""
    for pid in pids:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    os.sched_setaffinity(int(thread), cores)
