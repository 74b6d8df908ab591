"""The sending side as a whole: open loop, honest about itself."""

import asyncio
import json
import time
from typing import Any

import pytest

from gateway.loadtest import worker
from gateway.loadtest.exchange import Notes
from gateway.loadtest.prompts import Prompts
from gateway.loadtest.records import Outcome, Recording
from gateway.loadtest.scenario import Scenario, parse
from gateway.loadtest.targets import parse_target
from gateway.loadtest.worker import Job, send_all
from gateway.loadtest.workload import arrivals_end_seconds, plan
from tests.unit.loadtest.servers import (
    DONE,
    END,
    GOOD,
    HEAD,
    LAST,
    ROLE,
    WORD,
    Behaviour,
    Peer,
    saying,
    server,
)


def scenario(**settings: Any) -> Scenario:
    document = {
        "name": "x",
        "phases": [{"seconds": 0.5, "calls_per_second": 100}],
        "session": {"arrivals": "even"},
        "calls": [{"prompt_tokens": 20, "output_tokens": 3}],
        "drain_seconds": 5,
        **settings,
    }
    return parse(json.dumps(document))


async def run(found: Scenario, behaviour: Behaviour) -> Recording:
    calls = plan(found)
    async with server([behaviour]) as served:
        job = Job(found, [parse_target(served.url)], {}, calls, 20, 1, arrivals_end_seconds(found, calls))
        return await send_all(job, Prompts(found, 1, 20), time.monotonic())


async def never(peer: Peer) -> None:
    await peer.gone()


async def test_arrivals_never_wait_for_answers() -> None:
    recording = await run(scenario(drain_seconds=0), never)

    assert len(recording.calls) == 50
    assert {call.outcome for call in recording.calls} == {Outcome.UNFINISHED}
    assert all(call.lateness >= 0 for call in recording.calls)


async def test_a_run_ends_as_soon_as_all_have_their_answers() -> None:
    recording = await run(scenario(drain_seconds=60), saying(HEAD, GOOD))

    assert {call.outcome for call in recording.calls} == {Outcome.ANSWERED}
    assert sum(recording.tokens) == sum(call.attempts[0].events for call in recording.calls) == 150
    assert recording.own_errors == 0
    assert recording.lags
    assert 0 < recording.cpu_seconds < recording.sending_seconds < 60


async def test_an_error_of_its_own_spoils_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that breaks must not pass for a target that does."""
    monkeypatch.setattr(Notes, "token", lambda *_: 1 / 0)

    recording = await run(scenario(phases=[{"seconds": 0.1, "calls_per_second": 20}]), saying(HEAD, GOOD))

    attempts = [attempt for call in recording.calls for attempt in call.attempts]
    assert recording.own_errors == len(attempts) > 0
    assert {attempt.reason for attempt in attempts} == {"own_error"}


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    async def hold_up() -> None:
        await asyncio.sleep(0.1)
        time.sleep(0.2)  # noqa: ASYNC251 (that is the fault)

    _, recording = await asyncio.gather(hold_up(), run(scenario(), saying(HEAD, GOOD)))

    assert max(recording.lags) > 0.15
    assert max(call.lateness for call in recording.calls) > 0.15


async def test_streams_are_counted_while_they_run() -> None:
    async def linger(peer: Peer) -> None:
        await peer.send(HEAD, ROLE, WORD)
        await asyncio.sleep(0.6)
        await peer.send(LAST, DONE, END)

    recording = await run(scenario(phases=[{"seconds": 1, "calls_per_second": 10}]), linger)

    assert {call.outcome for call in recording.calls} == {Outcome.ANSWERED}
    assert max(recording.running) > 1
    assert recording.running[-1] == 0


def test_the_loop_is_uvloop() -> None:
    factory = worker.loop_factory()

    assert factory is not None
    loop = factory()
    assert type(loop).__module__.startswith("uvloop")
    loop.close()
