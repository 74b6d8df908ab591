"""What has to come out, and whether it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.experiment.cells import Case, Figures, Results, best_of, part_of_best

EPISODE_CALLS = 3_000
"""After a shift, and a start, in which calls may be preempted."""


@dataclass(frozen=True, slots=True)
class Bound:
    what: str
    found: float
    least: float | None = None
    most: float | None = None
    calls: int = 0
    """That it was found from."""

    @property
    def holds(self) -> bool:
        return (self.least is None or self.found >= self.least) and (
            self.most is None or self.found <= self.most
        )

    @property
    def limit(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def __str__(self) -> str:
        return f"{'ok ' if self.holds else 'NO '}{self.what}: {self.found:.3f} ({self.limit}), {self.calls:,} calls"


THROUGHPUT: dict[tuple[str, int], tuple[float, float]] = {
    ("chat", 40_000): (0.97, 0),
    ("chat", 8_000): (0.97, 0),
    ("chat", 4_000): (0.90, 1),
    ("chat", 2_000): (0.70, 5),
    ("generous", 16_000): (0.97, 0),
    ("generous", 6_000): (0.97, 0),
    ("generous", 2_000): (0.90, 1),
    ("rag", 40_000): (0.95, 1),
    ("rag", 8_000): (0.95, 1),
    ("benign", 40_000): (0.95, 1),
    ("benign", 2_000): (0.95, 1),
}
"""Of the elastic mode: part of the best ungated throughput at least, preemptions in 10,000 calls at most."""
SESSIONS_PART = 0.95
"""Of sessions whose ends are kept: part of the best ungated throughput, and of its good answers, at least."""
BROKEN_OFF = {"1.1": 1, "1.5": 4}
"""By load: of their turns after the first so many in a hundred are refused at most."""
PREFIX_PART = 0.99
"""Of RAG with whole demands, what all share counted once."""
UNHARMED = 0.99
"""On a replica that is too small for a soft hold: of what it does without."""


def bounds(results: Results, case: Case, slack: float = 0.0) -> Iterator[Bound]:
    """Of what is known of a case.  `slack`: less throughput than that, for short runs, of which the cold start is a
    large part."""
    elastic = results.get(f"{case.name} closed elastic")
    if elastic and (case.trace, case.blocks) in THROUGHPUT:
        least, most = THROUGHPUT[case.trace, case.blocks]
        calls = elastic["calls"]
        part = part_of_best(results, case, elastic)
        yield Bound(f"{case.name}: elastic throughput, of the best ungated", part, least - slack, calls=calls)
        yield Bound(
            f"{case.name}: elastic, preemptions in 10,000",
            10_000 * elastic["preemptions"] / calls,
            most=most,
            calls=calls,
        )
        yield Bound(
            f"{case.name}: elastic, preemptions in the first 1,000 calls",
            elastic["first_preemptions"],
            most=0,
            calls=min(calls, 1_000),
        )
    guaranteed = [
        figures
        for name, figures in results.items()
        if name.startswith(case.name + " ") and " guaranteed" in name
    ]
    if guaranteed:
        found, calls = (sum(figures[name] for figures in guaranteed) for name in ("preemptions", "calls"))
        yield Bound(f"{case.name}: guaranteed, preemptions", found, most=0, calls=calls)
    yield from _sharing(results, case)
    yield from _bursts(results, case)
    yield from _shift(results, case)
    if figures := results.get(f"{case.name} real books"):
        what = f"{case.name}: grants that the real books gave otherwise, of {figures['grants']:,}"
        yield Bound(what, figures["differ"], most=0, calls=figures["calls"])


def _sharing(results: Results, case: Case) -> Iterator[Bound]:
    if (figures := results.get(f"{case.name} closed guaranteed + prefix")) and case.trace == "rag":
        part = part_of_best(results, case, figures)
        what = f"{case.name}: guaranteed, shared prefix once, throughput, of the best ungated"
        yield Bound(what, part, least=PREFIX_PART, calls=figures["calls"])
    for mode, without in (("guaranteed", "prefix"), ("elastic", "warm first")):
        hold = results.get(f"{case.name} closed {mode} + soft hold")
        none = results.get(f"{case.name} closed {mode} + {without}")
        if hold and none:
            part = hold["tokens_per_second"] / none["tokens_per_second"]
            what = f"{case.name}: {mode}, soft hold, throughput, of that without"
            yield Bound(what, part, least=UNHARMED, calls=hold["calls"])
    for load, most in BROKEN_OFF.items():
        if figures := results.get(f"{case.name} sessions {load} elastic + soft hold"):
            yield from _sessions(
                f"{case.name}: load {load}, elastic, soft hold", figures, most, best_of(results, case)
            )


def _sessions(what: str, figures: Figures, most: float, best: Figures) -> Iterator[Bound]:
    calls = figures["calls"]
    part = figures["tokens_per_second"] / best["tokens_per_second"]
    yield Bound(f"{what}, throughput, of the best ungated", part, least=SESSIONS_PART, calls=calls)
    part = good_per_second(figures) / good_per_second(best)
    yield Bound(f"{what}, good answers, of the best ungated", part, least=SESSIONS_PART, calls=calls)
    broken = 100 * figures["broken"] / max(figures["later"], 1)
    yield Bound(f"{what}, turns after the first refused, in 100", broken, most=most, calls=calls)
    preempted = 10_000 * figures["preemptions"] / calls
    yield Bound(f"{what}, preemptions in 10,000", preempted, most=1, calls=calls)


def good_per_second(figures: Figures) -> float:
    return float(figures["good"] / figures["seconds"])


def _bursts(results: Results, case: Case) -> Iterator[Bound]:
    if figures := results.get(f"{case.name} bursts elastic"):
        calls = figures["calls"]
        found = 10_000 * figures["preemptions"] / max(calls, 1)
        yield Bound(f"{case.name}: bursts, elastic, preemptions in 10,000", found, most=1, calls=calls)
    if figures := results.get(f"{case.name} bursts watermark .05"):
        calls = figures["calls"]
        found = 10_000 * figures["preemptions"] / max(calls, 1)
        yield Bound(
            f"{case.name}: bursts, watermark .05, preemptions in 10,000", found, least=100, calls=calls
        )


def _shift(results: Results, case: Case) -> Iterator[Bound]:
    figures = results.get(f"{case.name} shift elastic")
    if figures is None:
        return
    thousands, most = figures["preempted_at"], THROUGHPUT[case.trace, case.blocks][1]
    later = thousands[(figures["asked"] // 2 + EPISODE_CALLS) // 1_000 :]
    found = 10 * sum(later) / max(len(later), 1)
    what = f"{case.name}: from {EPISODE_CALLS:,} calls after a shift on, elastic, preemptions in 10,000"
    if later:
        yield Bound(what, found, most=max(most, 1), calls=1_000 * len(later))
