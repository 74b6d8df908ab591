"""All runs, each by its name; what a run found as plain figures."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.experiment import traces
from benchmarks.experiment.gates import Books, Elastic, Guaranteed
from benchmarks.experiment.sharing import SharingBooks
from benchmarks.experiment.traces import BLOCK_SIZE, Call
from benchmarks.experiment.world import Found, World
from gateway.mock.config import EngineConfig

ENGINE = EngineConfig(
    block_size=BLOCK_SIZE,
    max_num_seqs=1_024,
    max_num_batched_tokens=2_048,
    step_base_ms=10,
    step_prefill_us=30,
    step_running_us=20,
    step_kv_us=0.02,
)
"""10 ms + 0.03 ms a prefill token + 0.02 ms a sequence + 0.02 us a token whose KV is read."""
SEED = 1
GATES = ("ungated", "watermark .05", "watermark .1", "guaranteed", "elastic")
SHARING = ("guaranteed + prefix", "elastic + prefix")
"""What calls share is charged once.  `+ warm first`: and calls go first whose conversation is kept; `+ soft hold`: and
kept it is."""
SESSION_GATES = (
    "ungated",
    "guaranteed",
    "elastic",
    "elastic + prefix",
    "elastic + warm first",
    "elastic + soft hold",
    "guaranteed + soft hold",
)
SWEEP = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.25)
"""Concurrencies of the ungated runs, of what the case's `streams` say."""
LOAD = 1.1
"""Of what the best ungated concurrency served, in the open loops; BURST_LOAD where calls come in bursts."""
BURST_LOAD = 0.8
SESSION_LOADS = (1.1, 1.5)
WARM_UP, SESSION_SECONDS = 300.0, 1_500.0
"""Of runs of sessions: until they have grown to their length, and what is measured of an open loop."""
TURNS = 1_000
"""Sessions whose mean length says how many begin a second."""

AGENTS = "agents"
"""Whose calls come in sessions; all others are independent."""

Figures = dict[str, Any]
Results = dict[str, Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one size of replica."""

    trace: str
    blocks: int
    streams: int
    """About as many calls of it fill the blocks."""
    calls: int
    """Of the elastic run."""
    others: int = 20_000
    """Of every other closed loop."""
    arriving: int = 10_000
    """In an open loop; 0: none is played."""
    burst: int = 0
    """Calls that arrive together; 0: no bursts are played."""
    shift: int = 0
    """Calls before and after outputs become three times as long; 0: not played."""
    misread: bool = False
    """Also with wrong counts of prompt tokens."""
    sharing: tuple[str, ...] = ()
    """Gates that are played in a closed loop beside GATES."""
    sessions: bool = False
    """Sessions are played in open loops."""

    @property
    def name(self) -> str:
        return f"{self.trace} {self.blocks}"


CASES = (
    Case("generous", 2_000, 57, 40_000, burst=40, shift=10_000),
    Case("generous", 6_000, 170, 100_000, arriving=0),
    Case("generous", 16_000, 450, 100_000, burst=220, shift=10_000),
    Case("chat", 2_000, 15, 100_000, shift=10_000),
    Case("chat", 4_000, 29, 100_000, arriving=0),
    Case("chat", 8_000, 60, 100_000, shift=10_000),
    Case("chat", 40_000, 280, 100_000),
    Case("benign", 2_000, 25, 40_000),
    Case("benign", 40_000, 480, 40_000),
    Case("rag", 8_000, 6, 10_000, others=2_000, arriving=2_000, misread=True, sharing=SHARING),
    Case("rag", 40_000, 30, 10_000, others=2_000, arriving=2_000, sharing=SHARING),
    Case(
        AGENTS,
        2_200,
        6,
        2_000,
        others=2_000,
        arriving=0,
        sharing=(*SHARING, "elastic + warm first", "elastic + soft hold", "guaranteed + soft hold"),
    ),
    Case(AGENTS, 40_000, 60, 4_000, others=4_000, arriving=0, sessions=True),
)
SHORT = (
    Case("generous", 2_000, 57, 4_000, others=1_500, arriving=0, burst=40, shift=1_500),
    Case("chat", 4_000, 29, 2_000, others=1_500, arriving=0),
)
"""For a look at it within two minutes, and for the tests."""


def gate_of(name: str, blocks: int, misread: Callable[[Call], int] | None = None) -> Guaranteed | None:
    """None: everything goes to the engine at once."""
    mode, _, more = name.partition(" + ")
    if mode not in ("guaranteed", "elastic"):
        return None
    books = Books(blocks)
    if more:
        books = SharingBooks(blocks, warm_first=more != "prefix", soft=more == "soft hold")
    return Guaranteed(books) if mode == "guaranteed" else Elastic(books, books.base, misread)


class Player:
    """Plays the runs of a case one after the other, and those only that are not known yet from as many calls."""

    def __init__(
        self,
        results: Results,
        keep: Callable[[str, Figures], None],
        most: int = 1 << 62,
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`most`: calls of a run at most.  `wanted`: of those that are not the sweep, by their names."""
        self.results = results
        self._keep = keep
        self._most = most
        self._wanted = wanted

    def case(self, case: Case) -> None:
        self._sweep(case)
        best = best_of(self.results, case)
        clients = 3 * best["clients"]
        if case.sessions:
            self._sessions(case)
            return
        if self._wanted(f"{case.name} closed elastic"):
            name = f"{case.name} best {best['clients']}"
            self._try(name, case.calls, lambda n: closed(case, "ungated", best["clients"], n))
        for gate in (*GATES, *case.sharing):
            calls = case.calls if gate == "elastic" else case.others
            self._play(f"{case.name} closed {gate}", calls, lambda n, g=gate: closed(case, g, clients, n))
        rate = best["calls"] / best["seconds"]
        for gate in ("ungated", "watermark .05", "guaranteed", "elastic"):
            calls = case.arriving or case.others
            if case.arriving:
                self._play(
                    f"{case.name} open {gate}", calls, lambda n, g=gate: opened(case, g, LOAD * rate, n)
                )
            if case.burst:
                name = f"{case.name} bursts {gate}"
                self._play(name, calls, lambda n, g=gate: opened(case, g, BURST_LOAD * rate, n, bursts=True))
            if case.shift:
                name = f"{case.name} shift {gate}"
                self._play(name, 2 * case.shift, lambda n, g=gate: closed(case, g, clients, n, shift=n // 2))
        for name, noise, bias in (
            (("noise 5 %", 0.05, 0.0), ("3 % too low", 0.0, -0.03)) if case.misread else ()
        ):
            self._play(
                f"{case.name} misread {name}",
                case.calls,
                lambda n, o=noise, b=bias: closed(case, "elastic", clients, n, misread=misreader(o, b)),
            )

    def _sessions(self, case: Case) -> None:
        best = best_of(self.results, case)
        rate = best["calls"] / best["seconds"]
        for load in SESSION_LOADS:
            for gate in SESSION_GATES:
                self._play(
                    f"{case.name} sessions {load} {gate}",
                    1,
                    lambda _, g=gate, turns=load * rate: opened_sessions(case, g, turns),
                )

    def _sweep(self, case: Case) -> None:
        for factor in SWEEP:
            clients = max(1, round(factor * case.streams))
            name = f"{case.name} sweep {clients}"
            self._try(name, case.others, lambda n, c=clients: closed(case, "ungated", c, n))

    def _play(self, name: str, calls: int, run: Callable[[int], Figures]) -> None:
        if self._wanted(name):
            self._try(name, calls, run)

    def _try(self, name: str, calls: int, run: Callable[[int], Figures]) -> None:
        calls = min(calls, self._most)
        known = self.results.get(name)
        if known is None or known["asked"] < calls:
            self.results[name] = {"asked": calls, **run(calls)}
            self._keep(name, self.results[name])


def best_of(results: Results, case: Case) -> Figures:
    """Of the ungated concurrencies the one with the most output tokens a second."""
    found = [figures for name, figures in results.items() if name.startswith(f"{case.name} sweep ")]
    return max(found, key=lambda figures: float(figures["tokens_per_second"]))


def part_of_best(results: Results, case: Case, figures: Figures) -> float:
    """Of a closed loop: its output tokens a second, as a part of what the best ungated concurrency makes of the same
    calls; where those were not played, of the sweep's.  How long 20,000 chats are together differs from seed to seed by
    more than a hundredth."""
    best = best_of(results, case)
    same = results.get(f"{case.name} best {best['clients']}")
    if same is not None and same["asked"] == figures["asked"]:
        best = same
    return float(figures["tokens_per_second"] / best["tokens_per_second"])


def world_of(case: Case, gate: str, misread: Callable[[Call], int] | None = None) -> World:
    watermark = float(gate.removeprefix("watermark ")) if gate.startswith("watermark") else 0.0
    config = replace(ENGINE, blocks=case.blocks + 1, watermark=watermark)
    shared = case.trace in ("rag", AGENTS)
    return World(config, gate_of(gate, case.blocks, misread), shared_prompts=shared)


def closed(
    case: Case,
    gate: str,
    clients: int,
    calls: int,
    shift: int | None = None,
    misread: Callable[[Call], int] | None = None,
) -> Figures:
    world = world_of(case, gate, misread)
    if case.trace == AGENTS:
        found = world.session_loop(traces.sessions(SEED), clients, calls, WARM_UP)
    else:
        found = world.closed_loop(traces.calls(traces.TRACES[case.trace], SEED, shift), clients, calls)
    return {"clients": clients, **figures_of(found)}


def opened(case: Case, gate: str, per_second: float, calls: int, *, bursts: bool = False) -> Figures:
    arrivals: Iterator[float] = traces.steady(SEED, per_second)
    if bursts:
        arrivals = traces.bursts(SEED, per_second, case.burst)
    source, patience = traces.calls(traces.TRACES[case.trace], SEED), gate in ("guaranteed", "elastic")
    found = world_of(case, gate).open_loop(source, arrivals, calls, patience)
    return {"per_second": per_second, **figures_of(found)}


def opened_sessions(case: Case, gate: str, turns_per_second: float) -> Figures:
    """So many sessions begin that they have so many turns a second."""
    patience = gate != "ungated"
    found = play_sessions(world_of(case, gate), turns_per_second, patience, WARM_UP, SESSION_SECONDS)
    figures = figures_of(found)
    return {"turns": turns_per_second, "later": found.later_turns, "broken": found.broken_off, **figures}


def play_sessions(world: World, turns: float, patience: bool, warm_up: float, seconds: float) -> Found:
    arrivals = traces.steady(SEED, turns / mean_turns())
    return world.open_sessions(traces.sessions(SEED), arrivals, warm_up, seconds, patience)


@cache
def mean_turns() -> float:
    """Of a session, if nothing is refused."""
    lengths = [
        sum(1 for _ in session) for session, _ in zip(traces.sessions(SEED), range(TURNS), strict=False)
    ]
    return sum(lengths) / len(lengths)


def misreader(noise: float, bias: float) -> Callable[[Call], int]:
    """A prompt's tokens as an estimate off by so much, the same for every look at one call."""

    def misread(call: Call) -> int:
        factor = 1 + bias + noise * random.Random(f"misread {call.number}").gauss(0, 1)
        return max(1, round(call.prompt_tokens * factor))

    return misread


def figures_of(found: Found) -> Figures:
    ttfts = sorted(found.ttfts)
    return {
        "calls": found.calls,
        "dropped": found.dropped,
        "seconds": round(found.seconds, 3),
        "tokens_per_second": round(found.tokens_per_second, 2),
        "preemptions": found.preemptions,
        "first_preemptions": found.first_preemptions,
        "recomputed": round(found.recomputed_tokens / max(found.tokens, 1), 5),
        "block_use": round(found.block_use, 4),
        "running": round(found.running, 2),
        "overdrafts": found.overdrafts,
        "surprises": found.surprises,
        "good": found.good,
        "ttft_p50": round(_quantile(ttfts, 0.5), 3),
        "ttft_p99": round(_quantile(ttfts, 0.99), 3),
        "gap_p99_ms": found.gap_p99_ms,
        "preempted_at": found.preempted_at,
    }


def _quantile(values: list[float], part: float) -> float:
    return values[min(int(part * len(values)), len(values) - 1)] if values else 0.0
