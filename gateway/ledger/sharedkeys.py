"""The keys that all gateways of a store share, followed by asking for what is new; and whose calls are to end.

Each change raises a version in the store.  A store whose version is below the one that was read last has lost its data:
what was read last stays in use and is put back, so the highest version that a living gateway knows is what all come to.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Cut, Edit, printable
from gateway.ledger.connection import REPLY_SECONDS, Connection
from gateway.ledger.scripts import CALLERS_KEYS
from gateway.ledger.wire import StoreAway

log = logging.getLogger("kvgate.keys")

POLL_SECONDS = 0.5
"""So that a change counts everywhere within a second."""
TRIES_MAX = 10
"""Of an edit that others are quicker than."""
NAMES_TOLD = 20
DONE_MAX = 4000
"""Cuts that are remembered; the store lists a thousand."""
NO_INTEREST = "*"
AWAY = "the store does not answer: whether the change was made is not known"


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read last."""

    version: int = 0
    mark: str = ""
    entries: Mapping[str, bytes] = field(default_factory=dict)


class FollowedKeys:
    """Implements `SharedKeys`.  Whoever starts `run` as a task cancels it at the end, then calls `close`."""

    def __init__(
        self,
        url: str,
        read: Callable[[Mapping[str, bytes]], Callable[[], None]] | None,
        cut: Callable[[Cut], int],
        now: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        """`read` gets all entries whenever they changed, in a thread; what it returns puts them in use, in the event
        loop.  None: keys are not kept in the store, only cuts are followed.

        `cut` ends calls and returns how many; cuts of a change come after the entries are in use.
        """
        self.up_to_date = read is None
        """The store's keys were read once."""
        self._connection = Connection(url, CALLERS_KEYS, lambda _: None, reply_seconds)
        self._open = False
        self._read = read
        self._cut = cut
        self._now = now
        self._poll_seconds = poll_seconds
        self._known = _Known()
        self._last_cut = ""
        self._done: dict[bytes, None] | None = None
        """Cuts that count no more, the latest last, also those that the store forgot: it may be one with older data
        tomorrow.  None before the first look: what is listed then is of the past."""
        self._turn = asyncio.Lock()
        self._told = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_seconds)

    async def poll(self) -> None:
        """Look once; a store that is away is told once."""
        try:
            async with self._turn:
                await self._follow()
        except StoreAway as away:
            self._tell(f"the keys in the store cannot be followed, the last ones known stay in use: {away}")
        except Exception:  # a bug of ours: the next look may be better
            if not self._told:
                log.exception("the keys in the store could not be followed")
            self._told = "a bug"
        else:
            if self._told:
                log.info("the keys in the store are followed again")
            self._told = ""

    def close(self) -> None:
        self._connection.close()

    # -- SharedKeys ----------------------------------------------------------------------------------------------

    async def change(self, decide: Callable[[Mapping[str, bytes]], Edit | Refusal]) -> int | Refusal:
        try:
            async with self._turn:
                for _ in range(TRIES_MAX):
                    await self._follow()
                    edit = decide(self._known.entries)
                    if isinstance(edit, Refusal):
                        return edit
                    if await self._make(edit):
                        return await self._follow()
        except StoreAway:
            return _away()
        return Refusal(Code.STORE_UNAVAILABLE, "others change the keys all the time", retry_ms=1000)

    async def cut(self, name: str) -> int | Refusal:
        try:
            async with self._turn:
                await self._follow()
                await self._ask("callers_cut", _new_id(), name)
                return await self._follow()
        except StoreAway:
            return _away()

    # -- one after the other -------------------------------------------------------------------------------------

    async def _follow(self) -> int:
        """Take over what is new; returns how many calls were ended.  Raises StoreAway."""
        await self._connect()
        asked_at = self._now()
        mark = self._known.mark if self._read else NO_INTEREST
        version, found, cut, micros, entries, cuts = await self._ask("callers_follow", mark, self._last_cut)
        put_in_use = None
        if self._read and version < self._known.version:
            await self._restore(version)
        elif self._read and found.decode() != mark:
            known = _Known(version, found.decode(), _pairs(entries))
            put_in_use = await asyncio.to_thread(self._read, known.entries)
            if version == self._known.version:
                _tell_of_another_history(self._known, known)
            self._known = known
        self.up_to_date = True
        if put_in_use:
            put_in_use()
        return self._end_calls(cut.decode(), cuts, micros, asked_at)

    def _end_calls(self, last: str, cuts: Sequence[bytes], micros: int, asked_at: float) -> int:
        """Each cut once.  It happened, by this process's clock, so long before the question as it is old by the
        store's: a little too early, so that no call is ended that came after it.

        One that came with a revocation ends whatever got in until that was known here.
        """
        if last == self._last_cut and self._done is not None:
            return 0
        listed = dict(zip(cuts[::2], cuts[1::2], strict=True))
        fresh = () if self._done is None else [member for member in listed if member not in self._done]
        self._last_cut, self._done = last, _latest({**(self._done or {}), **dict.fromkeys(listed)})
        ended = 0
        for member in fresh:
            _, kind, name = member.decode().split(":", 2)
            age_seconds = max(0.0, (micros - float(listed[member])) / 1e6)
            before = self._now() if kind == "revoked" else asked_at - age_seconds
            count = self._cut(Cut(name, before))
            log.info("%d calls of key %s were cut", count, name)
            ended += count
        return ended

    async def _restore(self, version: int) -> None:
        known = self._known
        flat = [part for name, entry in known.entries.items() for part in (_raw(name), entry)]
        if await self._ask("callers_restore", known.version, known.mark, *flat):
            log.error(
                "the store lost its keys (it had version %d, known is %d): the %d known ones stay in use and were put "
                "back",
                version,
                known.version,
                len(known.entries),
            )

    async def _make(self, edit: Edit) -> bool:
        """False where somebody else was quicker."""
        cut = _new_id() if edit.cut else ""
        entry = b"" if edit.entry is None else edit.entry
        name = _raw(edit.name)
        return bool(await self._ask("callers_change", self._known.mark, _new_id(), name, entry, cut))

    async def _connect(self) -> None:
        """Raises StoreAway."""
        if not self._open:
            await self._connection.open()
            self._open = True

    async def _ask(self, script: str, *arguments: str | bytes | int) -> Any:
        """Raises StoreAway; then the next question needs a new connection."""
        try:
            return await self._connection.evaluate(script, *arguments)
        except StoreAway:
            self._open = False
            raise

    def _tell(self, text: str) -> None:
        if not self._told:
            log.warning("%s", text)
        self._told = text


def _tell_of_another_history(known: _Known, found: _Known) -> None:
    """One version was read with two marks: a primary that lacked the last change took another one in its place."""
    changed = [
        name
        for name in sorted({*known.entries, *found.entries})
        if known.entries.get(name) != found.entries.get(name)
    ]
    log.error(
        "the store lost a change of its keys that was answered: version %d has come twice; what was done to these "
        "may be undone: %s%s",
        found.version,
        ", ".join(map(printable, changed[:NAMES_TOLD])),
        " and others" if len(changed) > NAMES_TOLD else "",
    )


def _latest(cuts: dict[bytes, None]) -> dict[bytes, None]:
    return dict.fromkeys(list(cuts)[-DONE_MAX:])


def _pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Names are whatever the store has: one that is no text must not hide the others."""
    names = [name.decode(errors="surrogateescape") for name in flat[::2]]
    return dict(zip(names, flat[1::2], strict=True))


def _raw(name: str) -> bytes:
    return name.encode(errors="surrogateescape")


def _new_id() -> str:
    return secrets.token_hex(8)


def _away() -> Refusal:
    return Refusal(Code.STORE_UNAVAILABLE, AWAY, retry_ms=1000)
