"""An elastic pool on a real engine: more calls at once than whole demands let in, no preemption, the same answers.

KVGATE_VLLM_ELASTIC_CALLS=400 make test-vllm ARGS="-k elastic"       # of each trace in each mode; 2,000 by default

Each trace is played to the bare engine first, which preempts, and then through kvgate: after some calls from which it
learns, in two parts, each with the pool guaranteed and then elastic, so that what else the machine does meets both.
"""

import asyncio
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.core.modes import Mode
from tests.processes import ADMIN_TOKEN, World
from tests.vllm.beside import Look, Watch, rows_of, shortfalls
from tests.vllm.engine import MODEL, SLOW_MACHINE, START_SECONDS, Vllm
from tests.vllm.environment import place, ready_place
from tests.vllm.mixed import CHAT, Callers, Mix
from tests.vllm.test_mixed_load import cancelled_of, ended_calls, preempted
from tests.vllm.traced import TRACES, Trace, TracedCall, Turn, ask, play
from tests.wire import Wire, post, soon

CALLS = int(os.environ.get("KVGATE_VLLM_ELASTIC_CALLS", "2000"))
LEARNED_FROM = 300
"""Calls that are played before anything is measured."""
PARTS = 2
GAIN_MIN = {"generous": 1.5}
"""Output tokens a second in the elastic pool, of those in the guaranteed one.  How much more throughput more streams
are is the engine's affair; on two cores that other processes use, too, chat's 1.3 would be a bound by chance."""
STREAMS_GAIN_MIN = 2.0
"""Calls that run at once, in the same way."""
CALLS_A_CLIENT_MIN = 5
"""In each turn, for both to be judged: at its beginning and end not every client has a call."""
SEED, OTHER_SEED = 11, 12
LOOK_SECONDS = 0.5
AGAIN = 3
"""How often calls whose answers differ are put to the bare engine again, before they count as wrong."""
SEEN_MIN = 100
"""Calls that must have reached an age before what is learned of it is judged."""
SURVIVAL_ERROR_MAX = 0.12
MODEL_FOLDER = place(os.environ) / "model"
NAME = "only"

pytestmark = pytest.mark.timeout(START_SECONDS + 600 + 2 * CALLS)


@pytest.fixture(params=TRACES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def trace(name: str) -> Trace:
    return TRACES[name]


@pytest.fixture
def engine(trace: Trace, tmp_path: Path) -> Iterator[Vllm]:
    """It computes in single precision: in half of it near ties are ties, and who runs beside a call decides them."""
    options = (
        *("--num-gpu-blocks-override", str(trace.blocks), "--max-model-len", str(trace.context_tokens)),
        *("--stream-interval", str(trace.events_tokens), "--dtype", "float32"),
    )
    started = Vllm(ready_place(os.environ), tmp_path / "vllm.log", *options)
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


class Pool:
    """A gateway before one engine, whose pool is elastic at first."""

    def __init__(self, engine: Vllm, world: World) -> None:
        self._config, keys = world.config(
            [{"name": "all", "mode": Mode.ELASTIC, "replicas": [{"name": NAME, "url": engine.url}]}],
            fleet={"model": MODEL, "tokenizer": str(MODEL_FOLDER), "exact_above": 0},
            queue={"seconds_max": 3600},
            log={"level": "info", "format": "json"},
            **SLOW_MACHINE,
        )
        self.gateway = world.gateway(self._config, keys[0])

    async def becomes(self, mode: Mode) -> None:
        document = json.loads(self._config.read_text())
        document["fleets"][0]["pools"][0]["mode"] = mode
        self._config.write_text(json.dumps(document))
        await soon(lambda: self._row().get("mode") == mode, f"the pool is {mode}")

    def is_up(self) -> bool:
        return bool(self._row()) and self.gateway.takes_calls()

    def lengths(self) -> list[dict[str, Any]]:
        """Of each age that was seen what is known of it."""
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        fleets = self.gateway.client.get("/admin/v1/lengths", headers=headers).json()["fleets"]
        (kind,) = fleets[MODEL]
        found: list[dict[str, Any]] = kind["ages"]
        return found

    def _row(self) -> dict[str, Any]:
        found: dict[str, Any] = rows_of(self.gateway.state()).get(NAME, {})
        return found


async def test_elastic(name: str, trace: Trace, engine: Vllm, new_world: World) -> None:
    calls = trace.calls(SEED, CALLS, MODEL_FOLDER)
    lessons = trace.calls(OTHER_SEED, LEARNED_FROM, MODEL_FOLDER)
    bare = await play(engine, engine.url, "none", calls, trace.clients, "bare")
    pool, turns = Pool(engine, new_world), dict[Mode, list[Turn]]()
    await soon(pool.is_up, "the engine is found")
    async with Watch(pool.gateway, {NAME: engine}, trace.usable_blocks, LOOK_SECONDS) as watch:
        await through(pool, engine, trace, lessons, "lessons")
        for part in range(PARTS):
            for mode in (Mode.GUARANTEED, Mode.ELASTIC):
                await pool.becomes(mode)
                some = calls[part * CALLS // PARTS : (part + 1) * CALLS // PARTS]
                turns.setdefault(mode, []).append(await through(pool, engine, trace, some, mode))
    Wire.hang_up_all()
    report(name, trace, bare, turns, watch.looks)
    print(f"overdrafts: {pool.gateway.metric('kvgate_overdrafts_total'):.0f}")
    print(f"surprises: {pool.gateway.metric('kvgate_length_surprises_total'):.0f}")
    assert preempted(watch.looks) == 0
    assert pool.gateway.metric("kvgate_unmetered_streams_total") == 0
    assert not [one for one in shortfalls(watch.looks, []) if one.is_long]
    judge_lengths(pool.lengths(), [*lessons, *calls])
    await soon(pool.gateway.is_quiet, "nothing is held")
    told = {mode: [turn.told for turn in found] for mode, found in turns.items()}
    await judge_answers(engine, trace, calls, bare, [each for found in told.values() for each in found])
    if CALLS_A_CLIENT_MIN * trace.clients > CALLS // PARTS:
        pytest.skip("all but how much was gained, for which so few calls say nothing, holds")
    assert gain(turns) >= GAIN_MIN.get(name, 0)
    seen = {mode: mean_of(during(found, watch.looks), "running") for mode, found in turns.items()}
    assert seen[Mode.ELASTIC] >= STREAMS_GAIN_MIN * seen[Mode.GUARANTEED], seen


async def through(pool: Pool, engine: Vllm, trace: Trace, calls: Sequence[TracedCall], salt: str) -> Turn:
    turn = await play(engine, pool.gateway.url, pool.gateway.key, calls, trace.clients, salt)
    print(f"{salt}: {len(calls)} calls, {turn.tokens / turn.seconds:.0f} tokens/s over {turn.seconds:.0f} s")
    return turn


def gain(turns: Mapping[Mode, Sequence[Turn]]) -> float:
    return speed(turns[Mode.ELASTIC]) / speed(turns[Mode.GUARANTEED])


def speed(turns: Sequence[Turn]) -> float:
    """Output tokens a second while every client had calls."""
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


# -- what was seen -----------------------------------------------------------------------------------------------------


def report(
    name: str, trace: Trace, bare: Turn, turns: Mapping[Mode, Sequence[Turn]], looks: Sequence[Look]
) -> None:
    """The rows of docs/utilisation.md."""
    rows = {"bare engine": [bare], **turns}
    for way, found in rows.items():
        seen = any(looked := during(found, looks))
        ttfts = sorted(told.ttft_seconds for turn in found for told in turn.told.values())
        used, running = mean_of(looked, "used"), mean_of(looked, "running")
        figures = (
            f"{name}, {way}",
            f"{sum(len(turn.told) for turn in found):,}",
            f"{speed(found):,.0f}",
            f"{sum(turn.preemptions for turn in found):,}",
            f"{used / trace.usable_blocks:.2f}" if seen else "",
            f"{running:.0f}" if seen else "",
            f"{statistics.median(ttfts):.1f}, {ttfts[len(ttfts) * 99 // 100]:.1f}",
        )
        print(f"| {' | '.join(figures)} |")
    print(f"elastic / guaranteed: {gain(turns):.2f}")


def during(turns: Sequence[Turn], looks: Sequence[Look]) -> list[list[Look]]:
    """Those of each turn, while every client had calls."""
    return [[look for look in looks if turn.began <= look.at <= turn.dry] for turn in turns]


def mean_of(turns: Sequence[Sequence[Look]], figure: str) -> float:
    """Over time, of the one replica."""
    lasting = [(later.at - look.at, look.sights[NAME]) for looks in turns for look, later in pairwise(looks)]
    seconds = sum(part for part, _ in lasting)
    return sum(part * getattr(sight, figure) for part, sight in lasting) / max(seconds, 1e-9)


def judge_lengths(learned: Sequence[Mapping[str, Any]], calls: Sequence[TracedCall]) -> None:
    """What was learned is how long the answers were, as the engine told event by event."""
    lines = []
    for age in learned:
        tokens = age["tokens"]
        reached = [call for call in calls if call.limit > tokens]
        true = sum(call.output_tokens >= tokens for call in reached) / max(len(reached), 1)
        if age["entered"] >= SEEN_MIN:
            lines.append((tokens, age["survival"], true))
    print("learned:", ", ".join(f"{tokens}: {known:.2f} ({true:.2f})" for tokens, known, true in lines))
    assert len(lines) >= 5
    assert max(abs(known - true) for _, known, true in lines) <= SURVIVAL_ERROR_MAX, lines


async def judge_answers(
    engine: Vllm, trace: Trace, calls: Sequence[TracedCall], bare: Turn, gated: Sequence[Mapping[int, Any]]
) -> None:
    """Each answer is one that the bare engine gives.

    It need not give the same one each time: who runs beside a call decides how its numbers are added up.  So calls
    that differ are put to it again, alone and beside each other.
    """
    known = {number: {told.text} for number, told in bare.told.items()}
    found = [(number, told.text) for turn in gated for number, told in turn.items()]
    differing = {number for number, text in found if text not in known[number]}
    again = [call for call in calls if call.number in differing]
    for round_ in range(AGAIN if again else 0):
        clients = 1 if not round_ else trace.clients
        turn = await play(engine, engine.url, "none", again, clients, f"again {round_}")
        for number, told in turn.told.items():
            known[number].add(told.text)
    changed = sum(len(known[number]) > 1 for number in differing)
    wrong = [number for number, text in found if text not in known[number]]
    print(f"{len(found)} answers, {len({text for _, text in found})} different ones")
    print(f"{len(differing)} not as from the bare engine; asked again, it differed from itself in {changed}")
    assert not wrong, wrong


# -- calls of every kind -----------------------------------------------------------------------------------------------

OTHERS = 30
"""Callers of whole answers, several choices, several prompts, of streams that run to their limits, and who leave."""
OTHERS_BLOCKS_MAX = 20
"""Of one such call."""


@pytest.mark.parametrize("name", ["chat"])
async def test_calls_that_grow_beside_those_that_do_not(trace: Trace, engine: Vllm, new_world: World) -> None:
    pool = Pool(engine, new_world)
    await soon(pool.is_up, "the engine is found")
    await through(pool, engine, trace, trace.calls(OTHER_SEED, LEARNED_FROM, MODEL_FOLDER), "lessons")
    mix = Mix(SEED, OTHERS_BLOCKS_MAX, MODEL_FOLDER)
    callers = Callers(pool.gateway, mix, OTHERS, OTHERS_BLOCKS_MAX)
    async with Watch(pool.gateway, {NAME: engine}, trace.usable_blocks, LOOK_SECONDS) as watch:
        calling = asyncio.create_task(callers.run())
        await through(pool, engine, trace, trace.calls(SEED, CALLS // 4, MODEL_FOLDER), "beside others")
        callers.end()
        await calling
    Wire.hang_up_all()
    print(f"{callers.answered.total()} others: {dict(callers.answered)}; {callers.left.total()} left")
    print(f"{pool.gateway.metric('kvgate_overdrafts_total'):.0f} overdrafts")
    assert not callers.lost, callers.lost
    assert preempted(watch.looks) == 0
    found = shortfalls(watch.looks, cancelled_of(ended_calls(pool.gateway)))
    assert not [one for one in found if one.is_long]
    assert pool.gateway.metric("kvgate_unmetered_streams_total") == 0
    await soon(pool.gateway.is_quiet, "nothing is held")


# -- one long call -----------------------------------------------------------------------------------------------------

SHORT = 100
"""Calls of a few tokens, from which it is learned that nobody writes much."""
LONG_TOKENS = 3900
RUNNING, TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"
READ_BYTES = 1 << 12
WRITING_SECONDS = 600.0
UNREAD = {"logprobs": True, "top_logprobs": 20}
"""So much is told of each token that a client which does not read fills all buffers on the way to it."""


@pytest.mark.parametrize("name", ["chat"])
async def test_one_long_call_is_held_whether_its_client_reads_or_not(
    trace: Trace, engine: Vllm, new_world: World
) -> None:
    """It grows with what its engine tells.  While its client does not read nobody tells kvgate how far it is, and it
    holds all that it may come to need; it is over when it is written, or on a slow machine after a minute.
    """
    pool = Pool(engine, new_world)
    await soon(pool.is_up, "the engine is found")
    short = [TracedCall(number, CHAT, "hi", None, 8 + number % 16, LONG_TOKENS) for number in range(SHORT)]
    await through(pool, engine, trace, short, "short")
    for reads in (True, False):
        await soon(pool.gateway.is_quiet, "nothing is held")
        before = engine.metric(TOKENS)
        async with Watch(pool.gateway, {NAME: engine}, trace.usable_blocks) as watch:
            await (read_all(pool) if reads else read_nothing(pool, engine))
        found = shortfalls(watch.looks, [])
        written = engine.metric(TOKENS) - before
        print(f"{written:.0f} tokens {'read' if reads else 'unread'}; the ledger below the engine: {found}")
        assert not [one for one in found if one.is_long]
    await soon(pool.gateway.is_quiet, "nothing is held")


def long_call(pool: Pool, **more: Any) -> bytes:
    body = TracedCall(0, CHAT, "hi", None, LONG_TOKENS, LONG_TOKENS).body("long")
    return post(pool.gateway.key, body | more, CHAT, alone=True)


async def read_all(pool: Pool) -> None:
    told = await ask(pool.gateway.url, long_call(pool))
    assert told.usage is not None
    assert told.usage[1] == LONG_TOKENS


async def read_nothing(pool: Pool, engine: Vllm) -> None:
    """But one event, until the engine has nothing to do."""
    wire = await Wire.open(pool.gateway.url, limit=READ_BYTES)
    await wire.send(long_call(pool, **UNREAD))
    assert (await wire.head())[0] == 200
    assert await wire.event()
    await soon(lambda: not engine.metric(RUNNING), "it is written, or cut off", WRITING_SECONDS)
    wire.reset()
