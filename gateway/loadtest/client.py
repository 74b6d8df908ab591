"""Callers as real clients are: each call tries, waits, tries again, leaves or gives up by itself."""

import asyncio
import errno
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.loadtest.exchange import Exchange, Notes
from gateway.loadtest.prompts import Prompts
from gateway.loadtest.records import Attempt, CallRecord, End, Outcome
from gateway.loadtest.retries import retry_delay_seconds
from gateway.loadtest.scenario import Scenario
from gateway.loadtest.targets import Target, choose
from gateway.loadtest.wire import Connection, Pool
from gateway.loadtest.workload import PlannedCall

_NO_SOCKET = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS}
_OUTCOMES = {End.ANSWERED: Outcome.ANSWERED, End.LEFT: Outcome.LEFT}


@dataclass(slots=True)
class Counts:
    """Since the start, for the line of progress."""

    offered: int = 0
    live: int = 0
    answered: int = 0
    gave_up: int = 0
    left: int = 0
    refused: int = 0
    timed_out: int = 0
    failed: int = 0


class Clients:
    """All callers of one process.  `start` never waits; `stop` ends what still runs."""

    def __init__(
        self,
        scenario: Scenario,
        targets: Sequence[Target],
        secrets: Mapping[str, str],
        prompts: Prompts,
        notes: Notes,
    ) -> None:
        """`secrets` by the name of the key; without any, calls carry no authorization."""
        self.counts = Counts()
        self._scenario = scenario
        self._targets = targets
        self._prompts = prompts
        self._notes = notes
        self._pools = [Pool(target) for target in targets]
        path = "/v1/chat/completions" if scenario.endpoint == "chat" else "/v1/completions"
        self._heads = [
            {key.name: _head(target, path, secrets.get(key.name)) for key in scenario.weighted_keys}
            for target in targets
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, planned: PlannedCall) -> None:
        task = asyncio.get_running_loop().create_task(self._call(planned))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self, seconds: float) -> None:
        """Wait until no call runs, for so long at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools:
            pool.close()

    async def _call(self, planned: PlannedCall) -> None:
        mix = self._scenario.calls[planned.mix]
        body = self._prompts.body(planned)
        record = CallRecord(
            number=planned.number,
            key=planned.key,
            arrival=planned.arrival_seconds,
            lateness=self._now() - planned.arrival_seconds,
            prompt_tokens=planned.prompt_tokens,
            output_tokens=planned.output_tokens,
            body_bytes=len(body),
            stream=mix.stream,
            slow=planned.slow,
        )
        self._notes.recording.calls.append(record)
        self.counts.offered += 1
        self.counts.live += 1
        try:
            record.outcome = await self._try_until_done(planned, body, record)
        finally:
            self.counts.live -= 1
            self._count_outcome(record.outcome)

    async def _try_until_done(self, planned: PlannedCall, body: bytes, record: CallRecord) -> Outcome:
        chance = random.Random(f"{self._scenario.seed}/{planned.number}/retries")
        failed: int | None = None
        while True:
            index = choose(self._targets, planned.prompt_tokens, failed)
            attempt, done = Attempt(index, self._now()), len(record.attempts)
            record.attempts.append(attempt)
            headers = await self._attempt(planned, body, attempt, done)
            self._count_attempt(attempt.end)
            if attempt.end in _OUTCOMES:
                return _OUTCOMES[attempt.end]
            delay = retry_delay_seconds(self._scenario.client, attempt, headers, done, chance.random())
            if delay is None:
                return Outcome.GAVE_UP
            failed = index
            await asyncio.sleep(delay)

    async def _attempt(
        self, planned: PlannedCall, body: bytes, attempt: Attempt, done: int
    ) -> Mapping[str, str]:
        """The headers of the answer; how it ended is noted in the attempt.  `done`: attempts before this one."""
        target = self._targets[attempt.target]
        target.outstanding += 1
        try:
            connection = await self._connect(attempt)
            if connection is None:
                return {}
            return await self._exchange(planned, body, attempt, done, connection)
        finally:
            target.outstanding -= 1
            if not attempt.ended:
                attempt.ended = self._now()

    async def _connect(self, attempt: Attempt) -> Connection | None:
        try:
            async with asyncio.timeout(self._scenario.client.timeout_seconds):
                connection = await self._pools[attempt.target].take()
            if not connection.closed:
                return connection
            attempt.end, attempt.reason = End.FAILED, "reset_before_headers"
        except TimeoutError:
            attempt.end, attempt.reason = End.TIMED_OUT, "connect"
        except OSError as error:
            attempt.end, attempt.reason = End.FAILED, "connect"
            self._notes.recording.socket_shortage += error.errno in _NO_SOCKET
        return None

    async def _exchange(
        self, planned: PlannedCall, body: bytes, attempt: Attempt, done: int, connection: Connection
    ) -> Mapping[str, str]:
        mix = self._scenario.calls[planned.mix]
        exchange = Exchange(
            attempt,
            self._notes,
            stream=mix.stream,
            timeout_seconds=self._scenario.client.timeout_seconds,
            leave_after=planned.leave_after_tokens,
        )
        head = self._heads[attempt.target][planned.key]
        request = b"%b%d\r\nx-stainless-retry-count: %d\r\n\r\n%b" % (head, len(body), done, body)
        try:
            exchange.begin(connection, request, mix.slow.read_seconds if mix.slow and planned.slow else 0)
            await exchange.done
        finally:
            exchange.abandon()
        if planned.slow:
            connection.close()  # its small buffer is of no use to others
        return exchange.headers

    def _now(self) -> float:
        return time.monotonic() - self._notes.start

    def _count_attempt(self, end: End) -> None:
        counts = self.counts
        counts.refused += end is End.REFUSED
        counts.timed_out += end is End.TIMED_OUT
        counts.failed += end is End.FAILED

    def _count_outcome(self, outcome: Outcome) -> None:
        counts = self.counts
        counts.answered += outcome is Outcome.ANSWERED
        counts.gave_up += outcome is Outcome.GAVE_UP
        counts.left += outcome is Outcome.LEFT


def _head(target: Target, path: str, secret: str | None) -> bytes:
    """Everything up to the length of the body."""
    lines = [
        f"POST {target.prefix}{path} HTTP/1.1",
        f"host: {target.authority}",
        "user-agent: kvgate-loadtest",
        "accept: */*",
        "content-type: application/json",
    ]
    if secret is not None:
        lines.append(f"authorization: Bearer {secret}")
    return "\r\n".join([*lines, "content-length: "]).encode("latin-1")
