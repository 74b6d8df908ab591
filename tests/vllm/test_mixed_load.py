"""Mixed load on two real engines through kvgate: full, and yet never a preemption.

KVGATE_VLLM_LOAD_SECONDS=60 make test-vllm ARGS="-k mixed"       # of load; 600 by default
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.processes import GatewayProcess, World
from tests.vllm.beside import Cancelled, Look, Watch, fed, filled, rows_of, shortfalls
from tests.vllm.engine import MODEL, SLOW_MACHINE, START_SECONDS, Vllm
from tests.vllm.environment import place, ready_place
from tests.vllm.mixed import CALL_SECONDS, Callers, Mix
from tests.wire import Wire, soon

LOAD_SECONDS = float(os.environ.get("KVGATE_VLLM_LOAD_SECONDS", "600"))
BLOCKS = 1024
USABLE_BLOCKS = BLOCKS - 1
CALL_BLOCKS = USABLE_BLOCKS * 2 // 100
"""The largest call: 2 % of an engine."""
OPTIONS = ("--num-gpu-blocks-override", str(BLOCKS))
MEAN_BLOCKS = 8
"""That a call reserves at least, on average."""
WAITING = 160
CALLERS = 2 * USABLE_BLOCKS // MEAN_BLOCKS + WAITING
FILLED_MIN = 0.95
FED_MIN = 0.9
MODEL_FOLDER = place(os.environ) / "model"

pytestmark = pytest.mark.timeout(2 * START_SECONDS + LOAD_SECONDS + CALL_SECONDS + 300)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vllm]]:
    """Two, started one after the other: at once they take twice their time."""
    logs, started = tmp_path_factory.mktemp("engines"), {}
    try:
        for name in "ab":
            started[name] = Vllm(ready_place(os.environ), logs / f"{name}.log", *OPTIONS)
            started[name].wait_ready()
        yield started
    finally:
        for engine in started.values():
            engine.stop()


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    seconds: float
    is_exact: bool

    @property
    def limit(self) -> int:
        """Of one engine, in blocks."""
        return int(USABLE_BLOCKS * self.settings["safe_fraction"])


CASES = {
    "exact": Case(
        {"safe_fraction": 1.0, "tokenizer": str(MODEL_FOLDER), "exact_above": 0}, LOAD_SECONDS, True
    ),
    "learned": Case({"safe_fraction": 0.95, "token_factor": None}, LOAD_SECONDS / 4, False),
}
"""With the model's tokenizer the last block may be given away; without it prompts are estimated, with kvgate's own
defaults."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def gateway(case: Case, engines: Mapping[str, Vllm], new_world: World) -> GatewayProcess:
    """It is told the engines' addresses, nothing of what they have."""
    replicas = [{"name": name, "url": engine.url} for name, engine in engines.items()]
    config, keys = new_world.config(
        [{"name": "only", "replicas": replicas}],
        fleet={"model": MODEL, **case.settings},
        queue={"seconds_max": 3600},
        log={"level": "info", "format": "json"},
        **SLOW_MACHINE,
    )
    return new_world.gateway(config, keys[0])


async def test_full_and_never_a_preemption(
    engines: dict[str, Vllm], gateway: GatewayProcess, case: Case
) -> None:
    await soon(lambda: sees(gateway, engines), "both engines are found")
    callers = Callers(gateway, Mix(7, CALL_BLOCKS, MODEL_FOLDER), CALLERS, CALL_BLOCKS)
    async with Watch(gateway, engines, USABLE_BLOCKS) as watch:
        calling = asyncio.create_task(callers.run())
        await asyncio.wait([calling], timeout=case.seconds)
        callers.end()
        full = len(watch.looks)
        await calling
    Wire.hang_up_all()
    ended = ended_calls(gateway)
    told(callers, watch, full, case.limit, ended)
    print(f"warnings: {warnings(gateway)}")
    assert not callers.lost, callers.lost
    judge(watch.looks, full, case.limit, ended)
    judge_estimates(ended, case.is_exact)
    await soon(gateway.is_quiet, "nothing is held")
    for engine in engines.values():
        await soon(
            lambda engine=engine: engine.metric("vllm:kv_cache_usage_perc") == 0, "all blocks are free"
        )


def sees(gateway: GatewayProcess, engines: Mapping[str, Vllm]) -> bool:
    return set(rows_of(gateway.state())) == set(engines) and gateway.takes_calls()


def told(callers: Callers, watch: Watch, full: int, limit: int, ended: Sequence[Mapping[str, Any]]) -> None:
    """Figures for whoever runs it."""
    looks, blind = watch.looks, watch.blind
    sights = [sight for look in looks for sight in look.sights.values()]
    gaps = sorted(after.at - before.at for before, after in pairwise(looks))
    short = [one.seconds for one in shortfalls(looks, cancelled_of(ended))]
    part = filled(looks[:full], 2 * limit)
    for line in (
        f"{looks[full - 1].at - looks[0].at:.0f} s of load",
        f"{callers.answered.total()} calls answered: {dict(callers.answered)}",
        f"{callers.left.total()} left: {dict(callers.left)}; {len(callers.lost)} lost",
        f"preemptions: {preempted(looks)}",
        f"reserved / limit while calls waited ({fed(looks[:full]):.1%} of the time): {part:.4f}",
        f"used / usable: {max(sight.used for sight in sights) / USABLE_BLOCKS:.3f} at most",
        f"{len(looks)} looks, {blind} more in vain, {gaps[len(gaps) // 2]:.3f} s apart in the median,"
        f" {gaps[-1]:.2f} s at most",
        f"reserved - used under full load: {least_spare(looks[:full])} blocks at least",
        f"the ledger below the engine: {len(short)} times, for {max([0.0, *short]):.2f} s at most",
        f"limits seen: blocks {sorted({sight.limit for sight in sights})}, sequences"
        f" {sorted({sight.sequences_limit for sight in sights})}, prefill"
        f" {sorted({sight.prefill_limit for sight in sights})}",
        f"waiting inside an engine: {max(sight.waiting for sight in sights)} at most",
        f"prompt estimates: {estimates(ended)}",
    ):
        print(line)


def least_spare(looks: Sequence[Look]) -> int:
    """Blocks of one replica that the ledger held beyond what its engine used, while calls waited."""
    return min(s.reserved - s.used for look in looks if look.queue for s in look.sights.values())


def judge(looks: Sequence[Look], full: int, limit: int, ended: Sequence[Mapping[str, Any]]) -> None:
    assert preempted(looks) == 0
    assert fed(looks[:full]) >= FED_MIN
    assert filled(looks[:full], 2 * limit) >= FILLED_MIN
    assert not [one for one in shortfalls(looks, cancelled_of(ended)) if one.is_long]
    assert {sight.limit for look in looks for sight in look.sights.values()} == {limit}


def preempted(looks: Sequence[Look]) -> int:
    first, last = looks[0].sights, looks[-1].sights
    return sum(last[name].preemptions - first[name].preemptions for name in first)


def judge_estimates(ended: Sequence[Mapping[str, Any]], is_exact: bool) -> None:
    errors = [estimated - real for estimated, real in counts(ended)]
    assert errors
    assert not is_exact or not any(errors)


def logged(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]


def ended_calls(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return [line for line in logged(gateway) if line["message"] == "call ended"]


def warnings(gateway: GatewayProcess) -> dict[str, int]:
    """What it said that is no matter of course, and how often."""
    return dict(
        Counter(line["message"] for line in logged(gateway) if line["level"] not in ("info", "debug"))
    )


def cancelled_of(ended: Sequence[Mapping[str, Any]]) -> list[Cancelled]:
    return [
        Cancelled(datetime.fromisoformat(line["time"]).timestamp(), line["replica"], line["reserved_blocks"])
        for line in ended
        if line["outcome"] == "cancelled" and "replica" in line
    ]


def counts(ended: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Prompt tokens as estimated and as the engine counted them."""
    return [
        (line["prompt_tokens_estimated"], line["prompt_tokens"]) for line in ended if "prompt_tokens" in line
    ]


def estimates(ended: Sequence[Mapping[str, Any]]) -> str:
    errors = [estimated - real for estimated, real in counts(ended)]
    under, over = -sum(min(error, 0) for error in errors), sum(max(error, 0) for error in errors)
    tokens = sum(real for _, real in counts(ended))
    return (
        f"of {len(errors)} calls {sum(error < 0 for error in errors)} too low, {sum(error > 0 for error in errors)} too"
        f" high; of {tokens} tokens {under} missed ({under / tokens:.2%}), {over} too many ({over / tokens:.2%})"
    )
