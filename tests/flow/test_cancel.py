"""A call can end at every one of its suspensions; whatever ends it, everything is given back, and it is told once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gateway.core.lifecycle import Event
from gateway.core.outcomes import Code, Outcome
from gateway.core.quota import ALL_FLEETS_LIMITS, AllFleets, Quota
from gateway.http.auth import Key
from gateway.http.proxy import CUTS_MAX, PARSE_INLINE_BYTES_MAX
from gateway.http.relay import AnswerCutOff
from gateway.ledger.api import Cut, Reservation
from gateway.mock.engine import EngineConfig
from gateway.mock.faults import Fault, Kind
from gateway.mock.journal import State
from gateway.tokens.threads import CountingThreads
from gateway.tokens.tiktoken_counter import TiktokenCounter
from tests.flow.driver import Suspensions, Visitor
from tests.flow.engines import MockEngine, mock_engine
from tests.flow.world import World, chat, gateway, soon

Running = asyncio.Task[None]

STREAM = chat(stream=True, max_tokens=4)
WHOLE = chat(max_tokens=4)
SUSPENSIONS_MAX = 80
"""No scenario here suspends so often; more is a loop that never ends."""
TURNS = 24
"""Turns of the loop in which a queued call goes from being asked for to being served."""


@dataclass
class Stage:
    """A world and what has to happen before each run, and while it runs."""

    world: World
    mocks: list[MockEngine]
    prepare: Callable[[], Awaitable[Callable[[Running], None]]]
    """Returns what is called with the run once it has begun."""

    async def check(self) -> None:
        await self.world.quiet()
        for mock in self.mocks:
            await soon(lambda mock=mock: not mock.open_calls, "every engine's calls have ended")
            mock.app.faults.clear()


@asynccontextmanager
async def plain(store_url: str) -> AsyncIterator[Stage]:
    async def nothing() -> Callable[[Running], None]:
        return lambda task: None

    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}) as world,
    ):
        yield Stage(world, [mock], nothing)


@asynccontextmanager
async def full(store_url: str) -> AsyncIterator[Stage]:
    """The one replica is taken until the call has begun to wait."""

    async def take() -> Callable[[Running], None]:
        release = await world.hold(1000)
        return lambda task: asyncio.get_running_loop().call_later(0.004, release)

    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}) as world,
    ):
        yield Stage(world, [mock], take)


@asynccontextmanager
async def limited(store_url: str) -> AsyncIterator[Stage]:
    """The one call that the key may have over all fleets runs elsewhere until this one has begun to wait."""

    async def take() -> Callable[[Running], None]:
        release = await world.hold_limit(LIMITED.name)
        return lambda task: asyncio.get_running_loop().call_later(0.004, release)

    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=LIMITED) as world,
    ):
        yield Stage(world, [mock], take)


@asynccontextmanager
async def failing_once(store_url: str) -> AsyncIterator[Stage]:
    """The roomiest replica breaks the first attempt off."""

    async def break_first() -> Callable[[Running], None]:
        first.app.faults.add(Fault(Kind.RESET_BEFORE_HEADERS), 1)
        return lambda task: None

    config = EngineConfig(step_base_ms=1)
    async with mock_engine(config, speed=4) as first, mock_engine(config, speed=4) as second:
        urls = {"a": first.url, "b": second.url}
        async with gateway(store_url, urls, blocks={"a": 2001}) as world:
            yield Stage(world, [first, second], break_first)


@asynccontextmanager
async def taken(store_url: str, key: Key | None = None) -> AsyncIterator[Stage]:
    """The one replica is taken until the call has ended, and nobody may queue."""

    async def take() -> Callable[[Running], None]:
        release = await world.hold(1000)
        return lambda task: task.add_done_callback(lambda _: release())

    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, queue_max=0, key=key) as world,
    ):
        yield Stage(world, [mock], take)


@asynccontextmanager
async def counting(store_url: str) -> AsyncIterator[Stage]:
    """Prompts are counted with the vocabulary, long ones in the thread pool."""

    async def nothing() -> Callable[[Running], None]:
        return lambda task: None

    threads = CountingThreads()
    counter = TiktokenCounter(threads)
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, counter=counter) as world,
    ):
        yield Stage(world, [mock], nothing)
    threads.close()


@dataclass(frozen=True)
class Scene:
    make: Callable[[str], AbstractAsyncContextManager[Stage]]
    body: Mapping[str, object] | bytes
    status: int = 200
    """Of an uninterrupted call."""
    replica: str = "a"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the visitor."""


TOLD = {Event.GRACE_OVER: Code.DRAINING, Event.CUT: Code.CUT}
"""What a client hears of an end from outside."""
LIMITED = Key("limited", "normal", all_fleets=AllFleets(1, (Quota(0, 10_000, 10_000, ALL_FLEETS_LIMITS),)))
LONG_PROMPT = [{"role": "user", "content": "word " * 2000}]
SCENES = {
    "streaming": Scene(plain, STREAM),
    "whole": Scene(plain, WHOLE),
    "read slowly": Scene(plain, STREAM, options={"pause_seconds": 0.002}),
    "queued": Scene(full, STREAM),
    "retried": Scene(failing_once, STREAM, replica="b"),
    "retried whole": Scene(failing_once, WHOLE, replica="b"),
    "counted in a thread": Scene(counting, chat(stream=True, max_tokens=4, messages=LONG_PROMPT)),
    "parsed in a thread": Scene(plain, {**STREAM, "user": "x" * PARSE_INLINE_BYTES_MAX}),
    "refused by the store": Scene(taken, STREAM, status=429, replica=""),
    "limited over all fleets": Scene(limited, STREAM),
    "refused within its limits": Scene(partial(taken, key=LIMITED), STREAM, status=429, replica=""),
    "refused unread": Scene(
        plain, STREAM, status=400, replica="", options={"headers": {"content-length": "7"}}
    ),
    "refused on its bytes": Scene(plain, chat(max_tokens=1 << 20), status=400, replica=""),
}


def scenes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [SCENES[name] for name in names or SCENES], ids=names or SCENES)


async def run(stage: Stage, scene: Scene, at: int, how: str, turns: int = 0) -> tuple[Suspensions, Visitor]:
    """One call that is ended at its suspension `at`, `turns` of the loop later, by `how`."""
    begun = await stage.prepare()
    visitor = Visitor(stage.world.app, scene.body, pieces=2, **scene.options)
    loop = asyncio.get_running_loop()

    def strike(turns_left: int = turns) -> None:
        if turns_left:
            loop.call_soon(strike, turns_left - 1)
        else:
            end(stage, visitor, task, how)

    steps = Suspensions(visitor.run(), at, strike)

    task = asyncio.create_task(_finished(steps))
    begun(task)
    async with asyncio.timeout(30):
        await asyncio.wait({task})
    if how != "cancelled" or not task.cancelled():
        assert task.result() is None
    return steps, visitor


async def _finished(steps: Suspensions) -> None:
    await steps


def end(stage: Stage, visitor: Visitor, task: "asyncio.Task[Any]", how: str) -> None:
    if how == "leaves":
        visitor.leave()
    elif how == "cancelled":
        task.cancel()
    elif how == Event.CUT:
        stage.world.calls.cut(Cut("anonymous", time.monotonic()))
    else:
        stage.world.calls.interrupt(Event(how))


@scenes()
async def test_uninterrupted_calls_are_served(store_url: str, scene: Scene) -> None:
    """What the other tests here interrupt really is what they say."""
    async with scene.make(store_url) as stage:
        steps, visitor = await run(stage, scene, SUSPENSIONS_MAX, "leaves")
        assert 2 <= steps.count < SUSPENSIONS_MAX
        assert (visitor.status, visitor.complete) == (scene.status, True)
        end = stage.world.only_end()
        outcome = Outcome.COMPLETED if scene.status == 200 else Outcome.REFUSED
        assert (end.outcome, end.replica) == (outcome, scene.replica)
        assert end.queue_ms > 0 or scene is not SCENES["queued"]
        await stage.check()


@scenes()
@pytest.mark.parametrize("how", ["leaves", "cancelled", Event.LEFT, Event.GRACE_OVER, Event.CUT])
async def test_a_call_can_end_at_every_suspension(store_url: str, scene: Scene, how: str) -> None:
    """The client leaves, the task is cancelled as uvicorn does at its end, or the process ends the call."""
    async with scene.make(store_url) as stage:
        for at in range(1, SUSPENSIONS_MAX):
            steps, visitor = await run(stage, scene, at, how)
            end = stage.world.only_end()
            await stage.check()
            if not steps.struck:
                break
            expect_end(end.outcome, end.reason, how, visitor)
        assert 2 <= at < SUSPENSIONS_MAX - 1


@scenes("streaming", "whole", "retried", "refused by the store", "refused unread")
@pytest.mark.parametrize("how", ["leaves", "cancelled", Event.LEFT, Event.GRACE_OVER, Event.CUT])
async def test_a_call_can_end_at_every_message_that_is_not_read(
    store_url: str, scene: Scene, how: str
) -> None:
    """Events are passed on outside of the call's task, which has no suspension of its own for each."""
    async with scene.make(store_url) as stage:
        for message in range(1, SUSPENSIONS_MAX):
            begun = await stage.prepare()
            visitor = Visitor(stage.world.app, scene.body, read_sends=message, **scene.options)
            task = asyncio.create_task(visitor.run())
            begun(task)
            await soon(lambda: visitor.unread or task.done(), "the message is there")  # noqa: B023
            struck = visitor.unread
            end(stage, visitor, task, how)
            asyncio.get_running_loop().call_soon(visitor.read_on)
            (answer,) = await asyncio.gather(task, return_exceptions=True)
            ended = stage.world.only_end()
            await stage.check()
            if not struck:
                break
            if isinstance(answer, AnswerCutOff):
                assert scene is SCENES["whole"], "only its connection can tell"
                assert how in TOLD
            else:
                expect_end(ended.outcome, ended.reason, how, visitor)
        assert 2 <= message < SUSPENSIONS_MAX - 1


def expect_end(outcome: Outcome, reason: Code | None, how: str, visitor: Visitor) -> None:
    """How a call ends that was struck; a strike while the body is read or after the last byte changes nothing."""
    if outcome is Outcome.COMPLETED:
        assert visitor.complete
        return
    if outcome is Outcome.REFUSED and reason not in TOLD.values():
        assert visitor.status in (0, 400, 429)
        return
    if how in ("leaves", "cancelled", Event.LEFT):
        assert outcome is Outcome.CANCELLED
        assert not visitor.complete
    else:
        assert reason is TOLD[how]
        assert visitor.complete
        assert visitor.status in (200, 503)
        if visitor.status == 200:
            assert visitor.body.count(b'"code":"%s"' % reason.encode()) == 1
            assert visitor.body.endswith(b"data: [DONE]\n\n")


@scenes("streaming", "queued", "limited over all fleets", "retried", "refused by the store")
@pytest.mark.parametrize("how", ["leaves", "cancelled"])
async def test_a_waiting_call_can_end_at_every_turn_of_the_loop(
    store_url: str, scene: Scene, how: str
) -> None:
    """Asked and not sent, sent, ticket held, granted and not yet told: a wait is one suspension with many states."""
    async with scene.make(store_url) as stage:
        asking = await suspension_of_asking(stage, scene)
        for turns in range(TURNS):
            await run(stage, scene, asking, how, turns)
            stage.world.only_end()
            await stage.check()


async def suspension_of_asking(stage: Stage, scene: Scene) -> int:
    """The number of the suspension in which the call waits for its place."""
    found: list[int] = []
    ledger = stage.world.limits if stage.world.limits.opened else stage.world.ledger
    begun = await stage.prepare()
    steps = Suspensions(Visitor(stage.world.app, scene.body, pieces=2).run())

    def noted(*arguments: Any) -> Reservation:
        found.append(steps.count + 1)
        return type(ledger).open(ledger, *arguments)

    ledger.open = noted  # type: ignore[assignment]
    task = asyncio.create_task(_finished(steps))
    begun(task)
    await task
    del ledger.open
    stage.world.only_end()
    await stage.check()
    return found[0]


@pytest.mark.parametrize("receives", [0, 1, 2, 3])
async def test_a_client_leaves_while_its_body_is_read(store_url: str, receives: int) -> None:
    async with plain(store_url) as stage:
        visitor = await stage.world.visit(STREAM, pieces=4, leave_after_receives=receives)
        assert not visitor.status
        assert stage.world.only_end().outcome is Outcome.CANCELLED
        await stage.check()
        assert stage.mocks[0].count(State.RECEIVED) == 0


@pytest.mark.parametrize("sends", [1, 2, 3])
async def test_a_client_leaves_while_its_answer_is_written(store_url: str, sends: int) -> None:
    async with plain(store_url) as stage:
        body = chat(stream=True, max_tokens=2000)
        visitor = await stage.world.visit(body, leave_after_sends=sends)
        assert not visitor.complete
        end = stage.world.only_end()
        assert (end.outcome, end.reason) == (Outcome.CANCELLED, Code.CLIENT_DISCONNECT)
        await stage.check()
        assert stage.mocks[0].count(State.ABORTED) == 1


async def test_a_stream_whose_place_is_lost_says_so(store_url: str) -> None:
    async with plain(store_url) as stage:
        visitor = Visitor(stage.world.app, chat(stream=True, max_tokens=2000))
        task = asyncio.create_task(visitor.run())
        await visitor.begun.wait()
        stage.world.calls.interrupt(Event.LEASE_LOST)
        await task
        assert visitor.complete
        assert visitor.body.count(b'"code":"lease_lost"') == 1
        assert visitor.body.endswith(b"data: [DONE]\n\n")
        end = stage.world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.LEASE_LOST)
        await stage.check()
        assert stage.mocks[0].count(State.ABORTED) == 1


async def test_a_call_whose_place_is_lost_before_its_answer_is_refused(store_url: str) -> None:
    async with plain(store_url) as stage:
        visitor = Visitor(stage.world.app, chat(mock={"hold_seconds": 60}))
        task = asyncio.create_task(visitor.run())
        await soon(lambda: stage.mocks[0].count(State.STARTED), "the engine computes")
        stage.world.calls.interrupt(Event.LEASE_LOST)
        await task
        assert (visitor.status, visitor.json["error"]["code"]) == (503, "lease_lost")
        assert visitor.header("retry-after") == "1"
        stage.world.only_end()
        await stage.check()


async def test_a_cut_is_of_one_key_and_of_what_arrived_before(store_url: str) -> None:
    """Whatever of it runs, waits or is being read; the rest goes on."""
    async with plain(store_url) as stage:
        old = Visitor(stage.world.app, chat(stream=True, max_tokens=200))
        tasks = [asyncio.create_task(old.run())]
        await old.begun.wait()
        cut_at = time.monotonic()
        new = Visitor(stage.world.app, chat(stream=True, max_tokens=20))
        tasks.append(asyncio.create_task(new.run()))
        await new.begun.wait()
        assert stage.world.calls.cut(Cut("another", time.monotonic())) == 0
        assert stage.world.calls.cut(Cut("anonymous", cut_at)) == 1
        assert stage.world.calls.cut(Cut("anonymous", cut_at)) == 0, "it has ended"
        await asyncio.gather(*tasks)
        assert old.body.count(b'"code":"cut"') == 1
        assert b"cut" not in new.body
        assert [end.reason for end in stage.world.ended] == [Code.CUT, None]
        assert (await stage.world.visit(WHOLE)).status == 200
        await stage.check()


async def test_a_call_that_is_cut_before_its_answer_is_refused(store_url: str) -> None:
    async with plain(store_url) as stage:
        visitor = Visitor(stage.world.app, chat(mock={"hold_seconds": 60}))
        task = asyncio.create_task(visitor.run())
        await soon(lambda: stage.mocks[0].count(State.STARTED), "the engine computes")
        assert stage.world.calls.cut(Cut("anonymous", time.monotonic())) == 1
        await task
        assert (visitor.status, visitor.json["error"]["code"]) == (503, "cut")
        assert visitor.header("x-should-retry") == "false"
        end = stage.world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.CUT)
        await stage.check()
        assert stage.mocks[0].count(State.ABORTED) == 1


@scenes("streaming", "parsed in a thread")
async def test_a_request_that_is_being_read_when_its_key_is_cut_is_refused(
    store_url: str, scene: Scene
) -> None:
    """Its body, or that as JSON in a thread: it is no call yet that could be ended."""
    async with scene.make(store_url) as stage:
        for at in (1, 2):
            steps, visitor = await run(stage, scene, at, Event.CUT)
            assert steps.struck
            assert (visitor.status, visitor.json["error"]["code"]) == (503, "cut")
            end = stage.world.only_end()
            assert (end.outcome, end.reason, end.fleet) == (Outcome.REFUSED, Code.CUT, "")
            await stage.check()


async def test_remembered_cuts_are_bounded(store_url: str) -> None:
    async with plain(store_url) as stage:
        for number in range(CUTS_MAX + 10):
            stage.world.calls.cut(Cut(f"k{number}", 1.0))
        assert not stage.world.calls.is_cut("k9", 0.5)
        assert stage.world.calls.is_cut("k10", 0.5)


async def test_draining_ends_what_waits_and_leaves_what_runs(store_url: str) -> None:
    async with plain(store_url) as stage:
        running = Visitor(stage.world.app, chat(stream=True, max_tokens=200))
        tasks = [asyncio.create_task(running.run())]
        await running.begun.wait()
        release = await stage.world.hold(980)
        waiting = Visitor(stage.world.app, chat(max_tokens=2000))
        tasks.append(asyncio.create_task(waiting.run()))
        await stage.world.queued(1)
        stage.world.calls.drain()
        await asyncio.gather(*tasks)
        assert (waiting.status, waiting.json["error"]["code"]) == (503, "draining")
        assert (running.status, running.events[-1]) == (200, b"[DONE]")
        assert b"error" not in running.body
        late = await stage.world.visit(STREAM)
        assert (late.status, late.json["error"]["code"]) == (503, "draining")
        release()
        await stage.check()
