"""What engines say of their blocks beside what the ledger holds, looked at again and again; and what follows from it.

The judgements are pure: they take what was seen.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Any, Self

import httpx

from tests.processes import ADMIN_TOKEN, GatewayProcess, sum_of
from tests.vllm.engine import Vllm

LOOK_SECONDS = 0.1
ANSWER_SECONDS = 60.0
"""For one page of a process on a machine that is busy."""
SHORT_SECONDS = 0.2
"""For which the ledger may hold less than an engine: both have to hear of an end, one after the other."""


@dataclass(frozen=True)
class Sight:
    """One replica.  Blocks."""

    used: int
    """By the engine's own metric."""
    reserved: int
    """By the ledger: the most of before and after the engine was asked, as all of them may be there still."""
    reserved_least: int
    limit: int
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    """Requests inside the engine that do not run."""
    sequences: int = 0
    """That the ledger has reserved."""
    sequences_limit: int = 0
    prefill_limit: int = 0


@dataclass(frozen=True)
class Look:
    """All replicas at one moment, in seconds since the epoch; and how many calls wait for one."""

    at: float
    queue: int
    sights: Mapping[str, Sight]


@dataclass(frozen=True)
class Cancelled:
    """A call that its client left, when the ledger had its blocks back: the engine gives them up a step later."""

    at: float
    replica: str
    blocks: int


@dataclass(frozen=True)
class Shortfall:
    """The ledger held less than the engine, without a break; `looks` saw it."""

    seconds: float
    looks: int
    blocks: int

    @property
    def is_long(self) -> bool:
        """Two looks that are far from each other do not tell of what was between them."""
        return self.seconds > SHORT_SECONDS and self.looks > 2


def shortfalls(looks: Sequence[Look], cancelled: Sequence[Cancelled]) -> list[Shortfall]:
    """Of all replicas.  What was cancelled while one lasted, or just before it began, is no part of it."""
    names = sorted({name for look in looks for name in look.sights})
    return [found for name in names for found in _shortfalls(name, looks, cancelled)]


def _shortfalls(name: str, looks: Sequence[Look], cancelled: Sequence[Cancelled]) -> Iterator[Shortfall]:
    ended = [one for one in cancelled if one.replica == name]
    run: list[tuple[float, int]] = []
    since = looks[0].at
    for look in looks:
        sight = look.sights[name]
        excused = sum(one.blocks for one in ended if since - SHORT_SECONDS <= one.at <= look.at)
        missing = sight.used - sight.reserved - excused
        if missing > 0:
            run.append((look.at, missing))
            continue
        if run:
            yield _shortfall(run)
            run = []
        if sight.used <= sight.reserved:
            since = look.at
    if run:
        yield _shortfall(run)


def _shortfall(run: Sequence[tuple[float, int]]) -> Shortfall:
    return Shortfall(run[-1][0] - run[0][0], len(run), max(blocks for _, blocks in run))


def filled(looks: Sequence[Look], limit: int) -> float:
    """Reserved blocks as a part of `limit`, that of all replicas together: the average over the time in which calls
    waited.  Raises ZeroDivisionError where none ever did."""
    reserved = waited = 0.0
    for seconds, look in _lasting(looks):
        if look.queue:
            waited += seconds
            reserved += seconds * sum(sight.reserved_least for sight in look.sights.values())
    return reserved / waited / limit


def fed(looks: Sequence[Look]) -> float:
    """The part of the time in which calls waited, from the first that did: before, not all callers had come."""
    came = dropwhile(lambda look: not look.queue, looks)
    seconds = [(seconds, look.queue > 0) for seconds, look in _lasting(tuple(came))]
    return sum(part for part, waits in seconds if waits) / sum(part for part, _ in seconds)


def _lasting(looks: Sequence[Look]) -> Iterator[tuple[float, Look]]:
    """Each look, and the time until the next one."""
    for look, following in pairwise(looks):
        yield following.at - look.at, look


class Watch:
    """Looks every `look_seconds` while it is open, as far as the machine lets it."""

    def __init__(
        self,
        gateway: GatewayProcess,
        engines: Mapping[str, Vllm],
        usable_blocks: int,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`engines` by the names of their replicas, each with so many blocks."""
        self.looks: list[Look] = []
        self.blind = 0
        """Looks in vain: the gateway had to wait too long for its store."""
        self._gateway = gateway
        self._engines = engines
        self._usable_blocks = usable_blocks
        self._look_seconds = look_seconds

    async def __aenter__(self) -> Self:
        fresh = httpx.Limits(max_keepalive_connections=0)  # a server hangs up on one that was idle for 5 s
        self._client = httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS, limits=fresh)
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises what ended it early."""
        self._task.cancel()
        ended = (await asyncio.gather(self._task, return_exceptions=True))[0]
        await self._client.aclose()
        if not isinstance(ended, asyncio.CancelledError):
            raise ended

    async def _go_on(self) -> None:
        due = time.monotonic()
        while True:
            if look := await self._look():
                self.looks.append(look)
            else:
                self.blind += 1
            due = max(due + self._look_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _look(self) -> Look | None:
        """The ledger is asked before and after: what comes or goes meanwhile was reserved at the one or the other."""
        before = await self._state()
        pages = await asyncio.gather(*map(self._page, self._engines.values()))
        at = time.time()
        after = await self._state()
        rows = [rows_of(state) for state in (before, after)]
        if not all(set(self._engines) <= set(found) for found in rows):
            return None
        found = zip(self._engines, pages, strict=True)
        sights = {name: self._sight(page, [each[name] for each in rows]) for name, page in found}
        return Look(at, min(before["queue"], after["queue"]), sights)

    async def _state(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = await self._client.get(f"{self._gateway.url}/admin/v1/state", headers=headers)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    async def _page(self, engine: Vllm) -> str:
        return (await self._client.get(f"{engine.url}/metrics")).raise_for_status().text

    def _sight(self, page: str, rows: Sequence[Mapping[str, Any]]) -> Sight:
        row = rows[-1]
        return Sight(
            used=round(sum_of("vllm:kv_cache_usage_perc", page) * self._usable_blocks),
            reserved=max(each["reserved"] for each in rows),
            reserved_least=min(each["reserved"] for each in rows),
            limit=row["limit"],
            preemptions=round(sum_of("vllm:num_preemptions_total", page)),
            running=round(sum_of("vllm:num_requests_running", page)),
            waiting=round(sum_of("vllm:num_requests_waiting", page)),
            sequences=row["sequences"],
            sequences_limit=row["sequences_limit"],
            prefill_limit=row["prefill_tokens_limit"],
        )


def rows_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a gateway's state says of each replica."""
    pools = [pool for fleet in state["fleets"].values() for pool in fleet["pools"].values()]
    return {name: row for pool in pools for name, row in pool["replicas"].items()}
