"""One page over several worker processes: whoever is scraped asks the others, and what a worker has shown outlives it.

Every worker has a socket and a file in a folder that only their user may enter.  Whoever connects is sent a snapshot
and the connection is closed.  A snapshot is in the file before it leaves the process or is shown, so a worker that is
killed takes with it only what it counted since the last question; the one that starts in its place counts on from the
file.  Thus a sum over workers never goes down, with two small files a worker however often one dies.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from gateway.telemetry.counted import Snapshot, Totals

log = logging.getLogger("kvgate.workers")

ANSWER_SECONDS = 0.5
"""A worker that has not answered by then is left out of the page, and counted as missing."""
SNAPSHOT_BYTES_MAX = 8 * 1024 * 1024
"""Fifty pools with four classes make 50 KB."""
BACKLOG = 64
"""Questions that wait for a worker that stands still; further ones are refused at once."""
SHARED_MEMORY = Path("/dev/shm")
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of `count`, numbered from 0; a new process takes the place of one that ended."""

    folder: Path
    number: int
    count: int

    def socket(self, number: int) -> str:
        return str(self.folder / f"{number}.sock")

    def file(self, number: int) -> Path:
        return self.folder / f"{number}.snapshot"


@dataclass(frozen=True, slots=True)
class RollCall:
    """What one question to all workers found."""

    answered: Mapping[int, Snapshot]
    """By number; the asking one is among them."""
    left: Sequence[Snapshot]
    """The last ones of workers that did not answer, as far as there are any."""
    missing: int
    """Workers that did not answer."""

    def inflight(self) -> dict[str, int]:
        """Calls by fleet, of the workers that answered."""
        sums: dict[str, int] = {}
        for snapshot in self.answered.values():
            for fleet, count in snapshot.inflight.items():
                sums[fleet] = sums.get(fleet, 0) + count
        return sums


def workers_folder() -> tempfile.TemporaryDirectory[str]:
    """Mode 0700, in memory where the system has such a place: a busy disk never stops the event loop."""
    in_memory = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return tempfile.TemporaryDirectory(prefix="kvgate-workers-", dir=SHARED_MEMORY if in_memory else None)


class Workers:
    """The worker at `place`, and its sight of the others."""

    def __init__(self, place: Place, snapshot: Callable[[], Snapshot]) -> None:
        self._place = place
        self._snapshot = snapshot
        self._server: asyncio.Server | None = None
        self._current: asyncio.Task[RollCall] | None = None
        self._next: asyncio.Task[RollCall] | None = None

    def inherited(self) -> Totals | None:
        """What the one before at this place had counted; read before the first snapshot is made."""
        left = self._left(self._place.number)
        return left.totals if left else None

    async def start(self) -> None:
        """Answer from now on.  A worker that cannot serves all the same, and is missing on every page but its own."""
        path = self._place.socket(self._place.number)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Answer(self._written), path, backlog=BACKLOG
            )
        except OSError as error:
            log.error("other workers cannot ask this one for its metrics: %s", error)

    async def stop(self) -> None:
        """Leave the final counts behind."""
        self._written()
        if self._server:
            self._server.close()
        for task in (self._current, self._next):
            if task:
                task.cancel()

    async def call_roll(self) -> RollCall:
        """Ask all.  Callers that come while a question is under way share the next one: it is not older than they are.

        Takes `ANSWER_SECONDS` at most, and twice that behind another question.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._take_turn(self._current))
        return await asyncio.shield(self._next)

    async def _take_turn(self, before: asyncio.Task[RollCall] | None) -> RollCall:
        if before:
            await asyncio.wait((before,))
        self._current, self._next = self._next, None
        return await self._ask_all()

    async def _ask_all(self) -> RollCall:
        others = [number for number in range(self._place.count) if number != self._place.number]
        found = dict(zip(others, await asyncio.gather(*map(self._ask, others)), strict=True))
        missing = [number for number, snapshot in found.items() if snapshot is None]
        left = [snapshot for snapshot in map(self._left, missing) if snapshot]
        own = self._snapshot()
        self._write(msgspec.msgpack.encode(own))
        found[self._place.number] = own
        answered = {number: snapshot for number, snapshot in sorted(found.items()) if snapshot}
        return RollCall(answered, left, len(missing))

    async def _ask(self, number: int) -> Snapshot | None:
        """None where it does not answer: it stands still, has just ended or has not started yet."""
        with suppress(OSError, EOFError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(ANSWER_SECONDS):
                return _decoded(await _read(self._place.socket(number)))
        return None

    def _left(self, number: int) -> Snapshot | None:
        try:
            return _decoded(self._place.file(number).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.error("what worker %s had counted cannot be read: %s", number, error)
            return None

    def _written(self) -> bytes:
        """A snapshot that is in the file."""
        raw = msgspec.msgpack.encode(self._snapshot())
        self._write(raw)
        return raw

    def _write(self, raw: bytes) -> None:
        """In one turn of the loop with its snapshot: no older one can overtake it."""
        file = self._place.file(self._place.number)
        new = file.with_suffix(".new")
        try:
            new.write_bytes(raw)
            new.replace(file)
        except OSError as error:
            log.error("what this worker has counted cannot be kept for its successor: %s", error)


class _Answer(asyncio.Protocol):
    """Sends a snapshot, whatever is asked, and closes; who does not read it within `ANSWER_SECONDS` is cut off."""

    def __init__(self, snapshot: Callable[[], bytes]) -> None:
        self._snapshot = snapshot

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's are of another class
        raw = self._snapshot()
        transport.write(len(raw).to_bytes(_LENGTH_BYTES, "big") + raw)
        transport.close()
        asyncio.get_running_loop().call_later(ANSWER_SECONDS, transport.abort)


async def _read(path: str) -> bytes:
    """Raises OSError or EOFError where there is no whole answer."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > SNAPSHOT_BYTES_MAX:
            raise OSError(f"{length} bytes are no snapshot")
        return await reader.readexactly(length)
    finally:
        writer.transport.abort()


def _decoded(raw: bytes) -> Snapshot:
    return msgspec.msgpack.decode(raw, type=Snapshot)
