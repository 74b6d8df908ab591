"""One run: one engine, one gate, calls in a closed or an open loop, in virtual time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from benchmarks.experiment.counted import Counted, Served
from benchmarks.experiment.gates import PREFILL_MIN, Books, Guaranteed, Held
from benchmarks.experiment.mocked import Mocked
from benchmarks.experiment.traces import Call, Turn
from gateway.core.prefill import PrefillTimes, wait_for_first_token_ms
from gateway.mock.config import EngineConfig

TTFT_SECONDS = 10.0
GAP_MS = 100.0
FIRST_CALLS = 1_000
"""That a cold start is judged by."""
EVER = float("inf")
REPLICA = "r"


@dataclass(slots=True, eq=False)
class Course:
    """One call on its way."""

    call: Call
    at: float
    """When it was asked for, in seconds."""
    held: Held | None = None
    session: Iterator[Call] | None = None
    """What its client does next."""
    started: float = 0.0
    """When the engine got it."""
    slow: int = 0
    """Steps over GAP_MS before its first token."""
    ttft: float = -1.0


@dataclass(slots=True)
class Found:
    """What came of a run."""

    calls: int = 0
    """That ended."""
    dropped: int = 0
    later_turns: int = 0
    """Of sessions, after their first; `broken_off`: of these dropped."""
    broken_off: int = 0
    seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    first_preemptions: int = 0
    """Before FIRST_CALLS calls had ended."""
    recomputed_tokens: int = 0
    block_use: float = 0.0
    """Mean part of the pool that was held."""
    running: float = 0.0
    """Mean number of calls inside the engine."""
    overdrafts: int = 0
    surprises: int = 0
    good: int = 0
    """Calls that had their first token and their gaps in time."""
    ttfts: list[float] = field(default_factory=list)
    gap_p99_ms: float = 0.0
    preempted_at: list[int] = field(default_factory=list)
    """Per thousand calls that ended, in order."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def per_10k(self) -> float:
        return 10_000 * self.preemptions / self.calls if self.calls else 0.0


@dataclass(slots=True)
class Before:
    """What was until the moment from which on a run is measured."""

    until: float = EVER
    """When that will be; EVER: it was, or all counts."""
    at: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    overdrafts: int = 0
    dropped: int = 0


class World:
    """`gate` None: every call goes to the engine at once."""

    def __init__(
        self, config: EngineConfig, gate: Guaranteed | None, *, shared_prompts: bool = False
    ) -> None:
        self.now = 0.0
        self.found = Found()
        self.seconds: list[tuple[float, int, int, int]] = []
        """Of every second: blocks held, preemptions and output tokens until then."""
        self._gate = gate
        self._shared = shared_prompts
        self._engine: Counted | Mocked = (Mocked if shared_prompts else Counted)(config, self._told)
        self._config = config
        self._source: Iterator[Call] = iter(())
        self._sessions: Iterator[Iterator[Call]] | None = None
        self._later: list[tuple[float, int, Iterator[Call]]] = []
        """Whose clients think: until when, and what comes then."""
        self._numbers = count()
        self._slow = 0
        self._inside = 0
        self._closed = False
        self._gaps: dict[int, int] = {}
        """By whole milliseconds, weighted with the calls that had them."""
        self._last_preemptions = 0
        self._patient = True
        self._times = PrefillTimes()
        self._before = Before()

    @property
    def books(self) -> Books | None:
        """Those of the experiment, where its gate has them."""
        ledger = None if self._gate is None else self._gate.ledger
        return ledger if isinstance(ledger, Books) else None

    def closed_loop(self, source: Iterator[Call], clients: int, calls: int) -> Found:
        """So many clients, each with its next call when one ends, until so many calls have ended."""
        self._source, self._closed = source, True
        for _ in range(clients):
            self._submit(next(source))
        return self._run(lambda: self.found.calls >= calls, iter(()))

    def session_loop(
        self, sessions: Iterator[Iterator[Call]], clients: int, calls: int, warm_up: float = 0.0
    ) -> Found:
        """So many clients, each of which goes on with its session when it has thought about an answer, or with a new
        one.  What comes of so many calls after the `warm_up` in seconds, in which sessions grow to their length."""
        self._sessions, self._closed, self._before.until = sessions, True, warm_up
        for _ in range(clients):
            self._go_on(next(sessions), self.now)
        return self._run(lambda: self.found.calls >= calls, iter(()))

    def open_loop(
        self, source: Iterator[Call], arrivals: Iterator[float], calls: int, patience: bool
    ) -> Found:
        """Calls arrive whatever runs, until so many came and all are gone.  With patience TTFT_SECONDS is all that a
        call waits for a place, less what its prompt takes then; without a gate it waits for ever."""
        self._source, self._patient = source, not patience
        asked = (at for at, _ in zip(arrivals, range(calls), strict=False))
        return self._run(lambda: False, asked)

    def open_sessions(
        self,
        sessions: Iterator[Iterator[Call]],
        arrivals: Iterator[float],
        warm_up: float,
        seconds: float,
        patience: bool,
    ) -> Found:
        """Sessions begin whatever runs, and each ends early with a call that is dropped.  What comes of the `seconds`
        after the `warm_up`."""
        self._sessions, self._patient = sessions, not patience
        self._before.until = warm_up
        return self._run(lambda: self.now >= warm_up + seconds, arrivals)

    def _deadline(self, call: Call) -> float:
        """As the product has it: all its time less what such prompts took until their first tokens."""
        if self._patient:
            return EVER
        target = round(1_000 * TTFT_SECONDS)
        expected = self._times.expected_ms([REPLICA], call.prompt_tokens)
        return self.now + wait_for_first_token_ms(target, target, 0, expected) / 1_000

    def _run(self, over: Callable[[], bool], arrivals: Iterator[float]) -> Found:
        following, second, use, running = next(arrivals, EVER), 1.0, 0.0, 0.0
        while not over():
            if self._before.until <= self.now:
                self._begin_measuring()
                use = running = 0.0
            following = self._arrive(self.now, following, arrivals)
            milliseconds = self._engine.schedule()
            if not milliseconds:
                coming = min(following, self._later[0][0] if self._later else EVER)
                if coming == EVER:
                    break
                self.now = coming
                continue
            took = milliseconds / 1e3
            following = self._arrive(self.now + took, following, arrivals)
            self.now += took
            use += took * self._engine.used
            running += took * self._inside
            self._slow += milliseconds > GAP_MS
            self._gaps[int(milliseconds)] = self._gaps.get(int(milliseconds), 0) + self._inside
            self._engine.complete()
            while second <= self.now:
                self.seconds.append(
                    (second, self._engine.used, self._engine.preemptions, self._engine.generated_tokens)
                )
                second += 1.0
                if self._gate is not None:
                    self.found.surprises += self._gate.second()
        return self._sum_up(use, running)

    def _arrive(self, until: float, following: float, arrivals: Iterator[float]) -> float:
        """All that comes until then; returns when the next one of `arrivals` does."""
        while following <= until:
            if self._sessions is not None:
                self._go_on(next(self._sessions), following)
            else:
                self._submit(next(self._source), following)
            following = next(arrivals, EVER)
        while self._later and self._later[0][0] <= until:
            at, _, session = heappop(self._later)
            self._go_on(session, at)
        return following

    def _begin_measuring(self) -> None:
        engine, books = self._engine, self.books
        self._before = Before(
            EVER,
            self.now,
            engine.generated_tokens,
            engine.preemptions,
            engine.recomputed_tokens,
            0 if self._gate is None else self._gate.ledger.overdrafts,
            0 if books is None else len(books.dropped),
        )
        self.found, self._gaps = Found(), {}

    def _sum_up(self, use: float, running: float) -> Found:
        found, engine, before = self.found, self._engine, self._before
        found.seconds, found.tokens = self.now - before.at, engine.generated_tokens - before.tokens
        found.preemptions = engine.preemptions - before.preemptions
        found.recomputed_tokens = engine.recomputed_tokens - before.recomputed_tokens
        if found.calls < FIRST_CALLS:
            found.first_preemptions = found.preemptions
        found.block_use = use / found.seconds / self._config.usable_blocks if found.seconds else 0.0
        found.running = running / found.seconds if found.seconds else 0.0
        if self._gate is not None:
            found.overdrafts = self._gate.ledger.overdrafts - before.overdrafts
        if (books := self.books) is not None:
            gone = books.dropped[before.dropped :]
            found.dropped = len(gone) + books.waiting * (not self._closed)
            found.broken_off = sum(isinstance(held.call, Turn) and held.call.turn > 0 for held in gone)
        found.gap_p99_ms = _percentile(self._gaps, 0.99)
        return found

    # -- one call -----------------------------------------------------------------------------------------------------

    def _go_on(self, session: Iterator[Call], at: float) -> None:
        """With its next turn, or with the first of another one."""
        assert self._sessions is not None
        while (call := next(session, None)) is None:
            if not self._closed:
                return
            session = next(self._sessions)
        self.found.later_turns += isinstance(call, Turn) and call.turn > 0
        self._submit(call, at, session)

    def _submit(self, call: Call, at: float | None = None, session: Iterator[Call] | None = None) -> None:
        course = Course(call, self.now if at is None else at, session=session)
        if self._gate is None:
            self._start(course)
            return
        course.held = self._gate.hold(call, self._deadline(call))
        course.held.course = course
        self._grant(self._gate.ledger.admit(course.held, course.at))

    def _grant(self, granted: list[Held]) -> None:
        for held in granted:
            self._start(held.course)

    def _start(self, course: Course) -> None:
        call = course.call
        served = Served(course, call.prompt_tokens, call.output_tokens)
        self._inside += 1
        course.started = self.now
        if isinstance(self._engine, Mocked):
            self._engine.add(served, call.content)
        else:
            self._engine.add(served)

    def _told(self, served: Served, outputs: int) -> int:
        course: Course = served.call
        mark = 1 << 62
        if course.ttft < 0:
            course.ttft, course.slow = self.now - course.at, self._slow
            if course.call.prompt_tokens >= PREFILL_MIN:
                took = 1_000 * (self.now - course.started)
                self._times.observe(REPLICA, course.call.prompt_tokens, took)
            if self._gate is not None and course.held is not None:
                mark, granted = self._gate.written(course.held, outputs, self.now)
                self._grant(granted)
        elif self._gate is not None and course.held is not None and outputs < served.output_tokens:
            mark, granted = self._gate.written(course.held, outputs, self.now)
            self._grant(granted)
        if outputs >= served.output_tokens:
            self._end(course, served)
        return mark

    def _end(self, course: Course, served: Served) -> None:
        found = self.found
        self._inside -= 1
        found.calls += 1
        found.ttfts.append(course.ttft)
        gaps = max(served.output_tokens - 1, 1)
        late = self._slow - course.slow + served.preemptions
        found.good += course.ttft < TTFT_SECONDS and late <= 0.01 * gaps
        if found.calls == FIRST_CALLS:
            found.first_preemptions = self._engine.preemptions
        if found.calls % 1_000 == 0:
            found.preempted_at.append(self._engine.preemptions - self._last_preemptions)
            self._last_preemptions = self._engine.preemptions
        if self._gate is not None and course.held is not None:
            self._grant(self._gate.ended(course.held, self.now))
        if course.session is not None:
            assert isinstance(course.call, Turn)
            heappush(self._later, (self.now + course.call.think, next(self._numbers), course.session))
        elif self._closed and (call := next(self._source, None)) is not None:
            self._submit(call)


def _percentile(counts: dict[int, int], part: float) -> float:
    """Of values by whole milliseconds."""
    left = part * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return float(value)
    return 0.0
