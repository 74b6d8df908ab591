"""What may change while the gateway runs: the files that it follows, and which settings of the configuration."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gateway.config import ConfigError, Settings
from gateway.config import Fleet as FleetSettings

log = logging.getLogger("kvgate.reload")

POLL_SECONDS = 0.4
"""A change is used once it was seen twice, so within a second."""

T = TypeVar("T")
Stamp = tuple[int, int, int] | None
"""Inode, bytes and time of change: differs whenever a file was written or replaced.  None = no file is there."""
NEVER: Stamp = (0, 0, 0)


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class FileWatch(Generic[T]):
    """Follows a file.  What was read last of it stays in use while the file is missing or wrong.

    Whoever starts `run` as a task cancels it at the end.
    """

    def __init__(
        self,
        path: Path,
        used: T,
        read: Callable[[], T],
        use: Callable[[T], None],
        failed: Callable[[], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`used` is what was read of the file before; it is read again at first, since it may have changed since.

        `read` runs in a thread; `use` gets what differs from what is in use, in the event loop.  Either raises
        ValueError, with a text fit for logs, or OSError, where the file is not to be used; then `failed` is called,
        once for each change of the file.
        """
        self._path = path
        self._used = used
        self._read = read
        self._use = use
        self._failed = failed
        self._poll_seconds = poll_seconds
        self._noticed: Stamp = _stamp(path)
        self._tried: Stamp = NEVER

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await self.poll()
            except (
                Exception
            ):  # a bug of ours, once for each change of the file: the next one is followed all the same
                log.exception("%s could not be followed", self._path.name)
                self._failed()

    async def poll(self) -> None:
        """Read the file once a change has been seen twice, so that a file being written is left alone."""
        stamp = await asyncio.to_thread(_stamp, self._path)
        settled = stamp == self._noticed
        self._noticed = stamp
        if settled and stamp != self._tried:
            self._tried = (
                stamp  # older than what is read now, so a write in between is noticed by the next poll
            )
            await self._reload(stamp)

    async def _reload(self, stamp: Stamp) -> None:
        try:
            if stamp is None:
                raise OSError("it is not there, or is no file")
            found = await asyncio.to_thread(self._read)
            if found == self._used:
                return
            self._use(found)
        except (ValueError, OSError) as error:
            log.error("%s not reloaded, what it held before stays in use: %s", self._path.name, error)
            self._failed()
            return
        self._used = found
        log.info("%s reloaded", self._path.name)


RESTART_SECTIONS = ("store", "admin", "auth", "log", "upstream")
"""What connections, keys and secrets were made from at the start."""


def check_reload(running: Settings, wanted: Settings) -> None:
    """Raises ConfigError, naming the first setting that cannot change without a restart."""
    for section in RESTART_SECTIONS:
        _same_section(section, getattr(running, section), getattr(wanted, section))
    _same("classes", [c.name for c in running.classes], [c.name for c in wanted.classes])
    _same("fleets", [f.name for f in running.fleets], [f.name for f in wanted.fleets])
    for number, (old, new) in enumerate(zip(running.fleets, wanted.fleets, strict=True)):
        _same_lanes(f"fleets[{number}]", old, new)
        _same_access(f"fleets[{number}]", old, new)
        if old.tokenizer != new.tokenizer:
            raise ConfigError(
                f"fleets[{number}].tokenizer", "cannot change while the gateway runs: restart it"
            )


def _same_section(section: str, running: msgspec.Struct, wanted: msgspec.Struct) -> None:
    for name in running.__struct_fields__:
        if getattr(running, name) != getattr(wanted, name):
            raise ConfigError(f"{section}.{name}", "cannot change while the gateway runs: restart it")


def _same(path: str, running: Sequence[str], wanted: Sequence[str]) -> None:
    if running != wanted:
        shown = f"{', '.join(running)} -> {', '.join(wanted)}"
        raise ConfigError(path, f"names cannot change while the gateway runs ({shown}): restart it")


def _same_access(path: str, running: FleetSettings, wanted: FleetSettings) -> None:
    for number, (old, new) in enumerate(zip(running.pools, wanted.pools, strict=True)):
        _same_section(f"{path}.pools[{number}].upstream", old.upstream, new.upstream)


def _same_lanes(path: str, running: FleetSettings, wanted: FleetSettings) -> None:
    """Calls wait in lanes: those cannot be taken from under them."""
    _same(f"{path}.pools", [p.name for p in running.pools], [p.name for p in wanted.pools])
    if running.lanes != wanted.lanes:
        raise ConfigError(f"{path}.lanes", "cannot change while the gateway runs: restart it")
