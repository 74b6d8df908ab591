"""Calls that grow: what they hold, what they are told, what they teach, and that nobody sees it on the wire."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.core.elastic import blocks_at
from gateway.core.events import CallEnded, Overdraft, Unmetered
from gateway.core.learned import LearnedLengths
from gateway.core.lengths import BUCKETS, Watched
from gateway.core.modes import Mode
from gateway.core.outcomes import Code, Outcome
from gateway.core.urgency import YIELDING
from gateway.http import relay
from gateway.mock.engine import EngineConfig
from tests.flow.driver import CHAT, Visitor
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, Peer, chunk, event, mock_engine, raw_engine
from tests.flow.test_wire import FAST, TEXT, direct, received
from tests.flow.world import World, chat, gateway, soon, soon_true

KIND = "normal:demo"
PROMPT = 8
"""Tokens that the scripted engine counts of a prompt; the gateway's counter says the same of `chat()`."""
BOTH = {"include_usage": True, "continuous_usage_stats": True}


def known(written: int, calls: int = 200) -> LearnedLengths:
    """As if so many calls had each written so much."""
    lengths = LearnedLengths()
    for _ in range(calls):
        news: dict[int, tuple[int, int]] = {}
        Watched().end(written, True, news)
        lengths.observe(KIND, news)
    lengths.take_news()
    return lengths


def counted(written: int, finish: str | None = None) -> bytes:
    usage = {"prompt_tokens": PROMPT, "total_tokens": PROMPT + written, "completion_tokens": written}
    frame = json.loads(event("x", finish)[6:]) | {"usage": usage}
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


class Engine:
    """Sends what it is told, when it is told."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()

    def write(self, *events: bytes) -> None:
        for each in events:
            self._parts.put_nowait(chunk(each))

    def end(self, *events: bytes) -> None:
        """The last event of all may come with the stream's end."""
        self.write(*events, *([] if events[-1].endswith(DONE) else [DONE]))
        self._parts.put_nowait(LAST_CHUNK)

    async def play(self, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        while (part := await self._parts.get()) != LAST_CHUNK:
            await peer.send(part)
        await peer.send(part)


class Stream:
    """One call under way against an engine that is told what to send."""

    def __init__(self, world: World, engine: Engine, call: "asyncio.Task[Visitor]") -> None:
        self.world, self.engine, self.call = world, engine, call

    async def holds(self, blocks: int) -> None:
        async def does() -> bool:
            return bool((await self.world.ledger.state())["reserved"] == blocks)

        await soon_true(does, f"{blocks} blocks are held")

    async def ended(self) -> Visitor:
        visitor = await self.call
        await self.world.quiet()
        return visitor

    @property
    def counts(self) -> tuple[int, int]:
        """Calls that began and that ended of themselves, in halves."""
        seen = self.world.lengths.of(KIND)
        return seen.entries[0], sum(seen.exits)


@asynccontextmanager
async def streaming(store_url: str, **options: Any) -> AsyncIterator[Stream]:
    engine = Engine()
    fields = {"max_tokens": 1000, **options.pop("fields", {})}
    async with (
        raw_engine(engine.play) as raw,
        gateway(store_url, {"a": raw.url}, **{"mode": Mode.ELASTIC, **options}) as world,
    ):
        call = asyncio.create_task(world.visit(chat(stream=True, **fields)))
        try:
            yield Stream(world, engine, call)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


def held(written: int, limit: int = 1000) -> int:
    return blocks_at(PROMPT, min(written, limit), 16, 0)


# -- the wire ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": {"include_usage": True}}, {"stream_options": BOTH}]
)
async def test_a_client_sees_what_it_asked_for(
    store_url: str, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, Any]
) -> None:
    """As if the engine had been asked by the client alone; the usage of the end is left out as ever."""
    monkeypatch.setattr("gateway.mock.server.time", SimpleNamespace(time=lambda: 1_800_000_000))
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body = {"model": "demo", "max_tokens": 30, "stream": True, **prompt, **options}
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, mode=Mode.ELASTIC) as world,
    ):
        visitor = await world.visit(body, path=path)
        sent = received(mock)
        assert sent["body"]["stream_options"] == BOTH
        own = {"stream_options": {"include_usage": True}} | options
        expected = await direct(mock, sent | {"body": sent["body"] | own})
        await world.quiet()
    frames = expected.split(b"\n\n")
    if not options:
        frames = [frame for frame in frames if b'"choices":[]' not in frame]
    assert visitor.body == b"\n\n".join(frames)
    end = world.only_end()
    assert (end.output_tokens, end.outcome) == (30, Outcome.COMPLETED)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"stream": False}, {}),
        ({"stream": True, "n": 2}, {}),
        ({"stream": True}, {"promise": Mode.GUARANTEED, "mode": Mode.SHARED}),
        ({"stream": True}, {"mode": Mode.GUARANTEED}),
        ({"stream": True}, {"encoder_tokens": 100}),
    ],
    ids=["no stream", "two choices", "promised", "a guaranteed pool", "kept beside the context"],
)
async def test_others_hold_all_of_their_demand(
    store_url: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, **{"mode": Mode.ELASTIC, **options}) as world,
    ):
        visitor = await world.visit(chat(max_tokens=40, **fields))
        assert visitor.status == 200
        sent = received(mock)["body"].get("stream_options")
        assert sent == ({"include_usage": True} if fields["stream"] else None)
        assert not world.lengths.has_news
        await world.quiet()


@pytest.mark.parametrize("own", [{}, {"priority": 3}, {"priority": -3}])
@pytest.mark.parametrize(
    ("mode", "promise", "added"),
    [
        (Mode.SHARED, None, YIELDING),
        (Mode.SHARED, Mode.GUARANTEED, 0),
        (Mode.ELASTIC, None, 0),
        (Mode.GUARANTEED, None, 0),
    ],
)
async def test_in_a_shared_pool_an_engine_is_told_whom_to_preempt(
    store_url: str, own: dict[str, int], mode: Mode, promise: Mode | None, added: int
) -> None:
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, mode=mode, promise=promise) as world,
    ):
        visitor = await world.visit(chat(max_tokens=40, stream=True, **own))
        assert visitor.status == 200
        await world.quiet()
        expected = own.get("priority", 0) + added if own or added else None
        assert received(mock)["body"].get("priority") == expected


# -- what they hold ------------------------------------------------------------------------------------------------


async def test_it_holds_what_it_needs_until_it_grows(store_url: str) -> None:
    async with streaming(store_url, lengths=known(200)) as stream:
        await stream.holds(held(64))
        stream.engine.write(counted(1), *(counted(written) for written in range(2, 56)))
        await stream.holds(held(64))
        stream.engine.write(counted(56))
        await stream.holds(held(120))
        stream.engine.write(counted(500))
        await stream.holds(held(564))
        stream.engine.end(counted(990, "stop"))
        visitor = await stream.ended()
        assert visitor.header("x-kvgate-reserved-blocks") == str(held(1000))
        assert b"usage" not in visitor.body


async def test_it_grows_above_what_there_is(store_url: str) -> None:
    """What is written is written: the store takes it down, and tells."""
    sure = LearnedLengths()
    sure.learn({KIND: [(bucket, 2000, 2000 if 4 <= bucket < 9 else 0) for bucket in range(BUCKETS)]})
    async with streaming(store_url, lengths=sure, blocks={"a": 65}) as stream:
        await stream.holds(held(64))
        give_back = await stream.world.hold(20)
        stream.engine.write(counted(950))
        await stream.holds(held(1000) + 20)
        found = [fact for fact in stream.world.facts if isinstance(fact, Overdraft)]
        assert [(fact.replica, fact.blocks) for fact in found] == [("a", held(1000) + 20 - 64)]
        give_back()
        stream.engine.end(counted(501, "stop"))
        await stream.ended()


async def test_without_counts_it_holds_all_at_once(store_url: str) -> None:
    async with streaming(store_url, lengths=known(200)) as stream:
        await stream.holds(held(64))
        stream.engine.write(event("x"), event("y"), event("z"))
        await stream.holds(held(1000))
        stream.engine.end(event("x", "stop"))
        visitor = await stream.ended()
        assert sum(isinstance(fact, Unmetered) for fact in stream.world.facts) == 1
        assert visitor.body.count(b"content") == 4
        assert not stream.world.lengths.has_news


async def test_a_call_whose_client_does_not_read_holds_all(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine writes on, unread; and how much is on its way when it is read again nobody knows."""
    monkeypatch.setattr(relay, "SIGHT_SECONDS", 0.0)
    engine = Engine()
    async with (
        raw_engine(engine.play) as raw,
        gateway(store_url, {"a": raw.url}, mode=Mode.ELASTIC, lengths=known(200)) as world,
    ):
        visitor = Visitor(world.app, chat(stream=True, max_tokens=1000), read_sends=2)
        stream = Stream(world, engine, asyncio.create_task(visitor.run()))
        engine.write(counted(1))
        await visitor.begun.wait()
        await stream.holds(held(64))
        engine.write(counted(2))
        await stream.holds(held(1000))
        visitor.read_on()
        engine.write(counted(100), counted(200))
        await soon(lambda: visitor.body.count(b"content") == 4, "the client reads again")
        await stream.holds(held(1000))
        assert stream.counts == (2 * 201, 2 * 200)
        engine.end(counted(210, "stop"))
        await stream.ended()
        assert stream.counts == (2 * 201, 2 * 201)
        assert not any(isinstance(fact, Unmetered) for fact in world.facts)


async def test_a_complete_answer_holds_no_more_for_a_client_that_does_not_read(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SIGHT_SECONDS", 0.0)
    engine = Engine()
    async with (
        raw_engine(engine.play) as raw,
        gateway(store_url, {"a": raw.url}, mode=Mode.ELASTIC, lengths=known(200)) as world,
    ):
        visitor = Visitor(world.app, chat(stream=True, max_tokens=1000), read_sends=2)
        stream = Stream(world, engine, asyncio.create_task(visitor.run()))
        engine.write(counted(1))
        await visitor.begun.wait()
        engine.end(counted(2, "stop") + DONE)
        await soon(lambda: visitor.unread, "the client does not read")
        await asyncio.sleep(0.1)
        await stream.holds(held(64))
        visitor.read_on()
        await stream.ended()


async def test_a_leaving_client_gives_back_what_was_grown(store_url: str) -> None:
    async with streaming(store_url, lengths=known(200)) as stream:
        stream.engine.write(counted(100))
        await stream.holds(held(164))
        stream.call.cancel()
        await asyncio.gather(stream.call, return_exceptions=True)
        await stream.world.quiet()
        assert stream.counts == (2 * 201, 2 * 200)


# -- what they teach -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "ends"), [("stop", 2), ("tool_calls", 2), ("length", 0)])
async def test_an_end_counts_where_it_was_the_models_own(store_url: str, finish: str, ends: int) -> None:
    async with streaming(store_url) as stream:
        stream.engine.write(counted(1), counted(40))
        await soon(lambda: stream.counts == (2, 0), "it has begun")
        stream.engine.end(counted(70, finish))
        await stream.ended()
        assert stream.counts == (2, ends)
        seen = stream.world.lengths.of(KIND)
        assert seen.exits[4] == ends  # 64 to 95
        assert seen.entries[:6] == [2, 2, 2, 2, 2 if ends else 1, 0]


async def test_a_failing_engine_teaches_no_length(store_url: str) -> None:
    async with streaming(store_url) as stream:
        stream.engine.write(counted(1), event("x", "abort"))
        visitor = await stream.ended()
        assert b"upstream_error" in visitor.body
        assert stream.counts == (1, 0)


async def together(store_url: str, lengths: LearnedLengths, mode: Mode) -> int:
    """How many calls of 64 blocks with a limit of 1,000 tokens run at once on 640 blocks."""
    engines = [Engine() for _ in range(60)]
    waiting = iter(engines)

    async def play(peer: Peer) -> None:
        await next(waiting).play(peer)

    async with (
        raw_engine(play) as raw,
        gateway(store_url, {"a": raw.url}, blocks={"a": 641}, mode=mode, lengths=lengths) as world,
    ):
        calls = [asyncio.create_task(world.visit(chat(stream=True, max_tokens=1000))) for _ in engines]

        async def all_are_there() -> bool:
            state = await world.ledger.state()
            return bool(state["queue"] + state["leases"] == len(calls))

        await soon_true(all_are_there, "all run or wait")
        running = (await world.ledger.state())["leases"]
        for engine in engines:
            engine.end(counted(1, "stop"))
        await asyncio.gather(*calls)
        assert {fact.outcome for fact in world.ended} == {Outcome.COMPLETED}
        await world.quiet()
        return int(running)


async def test_more_run_at_once_when_it_is_known_that_they_are_short(store_url: str) -> None:
    whole = 640 // held(1000)
    assert await together(store_url, known(100), Mode.GUARANTEED) == whole
    assert await together(store_url, LearnedLengths(), Mode.ELASTIC) == whole
    assert await together(store_url, known(100), Mode.ELASTIC) > 3 * whole


# -- promises, and when the first token is wanted ------------------------------------------------------------------


async def test_a_promise_that_nobody_keeps_is_no_call(store_url: str) -> None:
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, mode=Mode.ELASTIC, promise=Mode.GUARANTEED) as world,
    ):
        visitor = await world.visit(chat())
        assert (visitor.status, visitor.header("x-should-retry")) == (503, "false")
        assert visitor.json["error"]["code"] == Code.NO_BACKEND
        assert "every pool of lane short is elastic" in visitor.json["error"]["message"]


async def refused_after(store_url: str, check: Callable[[CallEnded, Visitor], None], **options: Any) -> None:
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, blocks={"a": 65}, **options) as world,
    ):
        give_back = await world.hold(64)
        visitor = await world.visit(chat(stream=True))
        check(world.only_end(), visitor)
        give_back()
        await world.quiet()


async def test_a_place_that_would_come_too_late_is_not_waited_for(store_url: str) -> None:
    def check(end: CallEnded, visitor: Visitor) -> None:
        assert (visitor.status, end.reason) == (429, Code.QUEUE_TIMEOUT)
        assert "queue.ttft_seconds wants its first token within 300 ms" in visitor.json["error"]["message"]

    await refused_after(store_url, check, ttft_ms=300)


async def test_a_shorter_wait_is_explained_as_ever(store_url: str) -> None:
    def check(end: CallEnded, visitor: Visitor) -> None:
        assert (visitor.status, end.reason) == (429, Code.QUEUE_TIMEOUT)
        assert "ttft" not in visitor.json["error"]["message"]

    await refused_after(store_url, check, ttft_ms=60_000, wait_ms=300)


async def test_a_place_that_is_free_is_taken_however_late_it_is(store_url: str) -> None:
    async with (
        mock_engine(EngineConfig(), speed=FAST) as mock,
        gateway(store_url, {"a": mock.url}, ttft_ms=1) as world,
    ):
        long = [{"role": "user", "content": "word " * 4000}]
        assert (await world.visit(chat(stream=True, messages=long))).status == 200
        await world.quiet()
