"""Calls that hold no blocks: passed to any replica that answers, bounded by the process alone."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.events import CallEnded
from gateway.core.lifecycle import Event
from gateway.core.outcomes import Code, Outcome
from gateway.core.responses import new_id
from gateway.http.auth import Key
from gateway.http.relay import AnswerCutOff
from gateway.ledger.closed import Closed
from gateway.ledger.wire import StoreAway
from gateway.mock.engine import EngineConfig
from gateway.upstream.limits import UpstreamLimits
from tests.flow.driver import Visitor
from tests.flow.engines import STREAM_HEAD, Peer, RawEngine, chunk, mock_engine, raw_engine, whole
from tests.flow.world import LONG, MESSAGES, World, gateway, soon, soon_true

TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
ASKED = {"model": "demo", "prompt": "one two"}
OTHER = "/tokenizer_info"
ANSWER = whole(200, b'{"ok":true}')
NOWHERE = "http://127.0.0.1:9"


@asynccontextmanager
async def mocked(store_url: str, **options: Any) -> AsyncIterator[World]:
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as mock,
        gateway(store_url, {"a": mock.url}, **options) as world,
    ):
        yield world


@asynccontextmanager
async def held(store_url: str, **options: Any) -> AsyncIterator[tuple[World, RawEngine, asyncio.Event]]:
    """Behind the gateway an engine that answers once the event is set."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await go.wait()
        await peer.send(ANSWER)

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}, **options) as world:
        yield world, engine, go


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (TOKENIZE, ASKED, {"count": 2, "max_model_len": 65536}),
        (TOKENIZE, {"messages": MESSAGES}, {"count": 8}),
        (DETOKENIZE, {"model": "demo", "tokens": [97, 98]}, {"prompt": "ab"}),
        (COUNT, {"model": "demo", "messages": MESSAGES}, {"input_tokens": 8}),
    ],
)
async def test_the_engine_answers(
    store_url: str, path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with mocked(store_url) as world:
        visitor = await world.visit(body, path=path)
        assert visitor.status == 200, visitor.body
        assert expected.items() <= visitor.json.items()
        assert visitor.header("x-kvgate-reserved-blocks") is None
        assert (visitor.header("x-kvgate-replica"), visitor.header("x-kvgate-pool")) == ("a", "short")
        end = world.only_end()
        assert (end.outcome, end.route, end.reserves, end.charged) == (Outcome.COMPLETED, path, False, False)
        await world.quiet()


async def test_it_works_while_the_fleet_is_full(store_url: str) -> None:
    async with mocked(store_url, queue_max=0) as world:
        give_back = await world.hold(1000)
        chat = await world.visit({"model": "demo", "messages": MESSAGES})
        assert (chat.status, chat.json["error"]["code"]) == (429, Code.CAPACITY_EXCEEDED)
        assert (await world.visit(ASKED, path=TOKENIZE)).status == 200
        give_back()
        await world.quiet()


@pytest.mark.parametrize(("path", "outer"), [(TOKENIZE, ["error"]), (COUNT, ["type", "error"])])
async def test_refusals_are_in_the_words_of_the_route(store_url: str, path: str, outer: list[str]) -> None:
    async with mocked(store_url) as world:
        for body, status, code in (
            (b"{", 400, Code.INVALID_JSON),
            (b'{"model":"demo","model":"demo"}', 400, Code.DUPLICATE_FIELD),
            (b'{"model":1}', 400, Code.INVALID_VALUE),
            (b'{"model":"nope"}', 404, Code.MODEL_NOT_FOUND),
        ):
            visitor = await world.visit(body, path=path)
            assert (visitor.status, visitor.json["error"]["code"]) == (status, code)
            assert list(visitor.json) == outer
        visitor = await world.visit(b"", path=path, method="GET")
        assert (visitor.status, visitor.header("allow")) == (405, "POST")
        await world.quiet()


async def test_the_engines_own_refusals_pass(store_url: str) -> None:
    async with mocked(store_url) as world:
        visitor = await world.visit({"model": "demo"}, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["type"]) == (400, "Bad Request")
        await world.quiet()


async def test_replicas_are_asked_in_turn(store_url: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(ANSWER)

    async with (
        raw_engine(script) as a,
        raw_engine(script) as b,
        gateway(store_url, {"a": a.url, "b": b.url}) as world,
    ):
        for _ in range(4):
            await world.visit(ASKED, path=TOKENIZE)
        assert (len(a.bodies), len(b.bodies)) == (2, 2)
        world.replicas.down.add("a")
        for _ in range(2):
            await world.visit(ASKED, path=TOKENIZE)
        assert (len(a.bodies), len(b.bodies)) == (2, 4)
        world.replicas.down.add("b")
        visitor = await world.visit(ASKED, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["code"]) == (503, Code.NO_BACKEND)
        assert visitor.header("retry-after") is not None
        await world.quiet()


@pytest.mark.parametrize("failure", [whole(500, b"{}"), b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
async def test_what_failed_is_asked_of_another_replica(store_url: str, failure: bytes) -> None:
    async def fails(peer: Peer) -> None:
        await peer.send(failure)

    async def serves(peer: Peer) -> None:
        await peer.send(ANSWER)

    async with (
        raw_engine(fails) as a,
        raw_engine(serves) as b,
        gateway(store_url, {"a": a.url, "b": b.url}) as world,
    ):
        visitors = [await world.visit(ASKED, path=TOKENIZE) for _ in range(2)]
        assert [visitor.status for visitor in visitors] == [200, 200]
        assert len(a.bodies) == len(b.bodies) == 2
        assert world.replicas.failures == [], "it says nothing of how the engine generates"
        world.replicas.down.add("b")
        visitor = await world.visit(ASKED, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["code"]) == (502, Code.UPSTREAM_ERROR)
        await world.quiet()


async def test_an_engine_that_is_silent_is_given_up(store_url: str) -> None:
    limits = UpstreamLimits(LONG, 0.05, LONG, LONG)
    async with held(store_url, limits=limits) as (world, _, _):
        visitor = await world.visit(ASKED, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["code"]) == (504, Code.UPSTREAM_TIMEOUT)
        await world.quiet()


async def test_so_many_at_once_and_half_of_them_for_a_key(store_url: str) -> None:
    async with held(store_url, unreserved_max=4) as (world, engine, go):
        running = [asyncio.create_task(world.visit(ASKED, path=TOKENIZE)) for _ in range(2)]
        await soon(lambda: len(engine.bodies) == 2, "two are under way")
        visitor = await world.visit(ASKED, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["code"]) == (429, Code.CAPACITY_EXCEEDED)
        assert "`routes.unreserved_max` is 4" in visitor.json["error"]["message"]
        assert visitor.header("retry-after") == "1"
        go.set()
        assert [(await task).status for task in running] == [200, 200]
        assert (await world.visit(ASKED, path=TOKENIZE)).status == 200
        await world.quiet()


async def test_a_client_that_leaves_ends_the_engines_work(store_url: str) -> None:
    async with held(store_url) as (world, engine, _):
        visitor = Visitor(world.app, ASKED, path=TOKENIZE)
        visit = asyncio.create_task(visitor.run())
        await soon(lambda: len(engine.bodies) == 1, "the engine has the call")
        visitor.leave()
        await visit
        assert (await engine.peers[0].reader.read()) == b"", "the connection is closed"
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.CANCELLED, Code.CLIENT_DISCONNECT)
        await world.quiet()


@pytest.mark.parametrize(("event", "code"), [(Event.GRACE_OVER, Code.DRAINING), (Event.CUT, Code.CUT)])
async def test_it_ends_with_the_process_and_with_its_key(store_url: str, event: Event, code: Code) -> None:
    async with held(store_url) as (world, engine, _):
        visit = asyncio.create_task(world.visit(ASKED, path=TOKENIZE))
        await soon(lambda: len(engine.bodies) == 1, "the engine has the call")
        world.calls.interrupt(event)
        visitor = await visit
        assert (visitor.status, visitor.json["error"]["code"]) == (503, code)
        await world.quiet()


async def test_a_key_of_no_calls_gets_none_here_either(store_url: str) -> None:
    async with mocked(store_url, key=Key("none", "normal", requests_max=0)) as world:
        visitor = await world.visit(ASKED, path=TOKENIZE)
        assert (visitor.status, visitor.json["error"]["code"]) == (429, Code.QUOTA_EXCEEDED)
        await world.quiet()


async def test_a_key_of_other_models(store_url: str) -> None:
    async with mocked(store_url, key=Key("k", "normal", models=frozenset({"other"}))) as world:
        visitor = await world.visit(ASKED, path=COUNT)
        assert (visitor.status, visitor.json["error"]["type"]) == (403, "permission_error")
        await world.quiet()


# -- paths that an operator allows ---------------------------------------------------------------------------------


async def raw_call(
    store_url: str, answer: bytes, body: bytes, **options: Any
) -> tuple[Visitor, RawEngine, CallEnded]:
    async def script(peer: Peer) -> None:
        await peer.send(answer)

    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, pass_through=[OTHER]) as world,
    ):
        visitor = await world.visit(body, path=OTHER, **options)
        await world.quiet()
        return visitor, engine, world.only_end()


async def test_another_path_passes_as_it_is(store_url: str) -> None:
    body = b"\x00 no JSON"
    headers = {"content-type": "audio/wav"}
    visitor, engine, end = await raw_call(
        store_url, whole(503, b"full"), body, headers=headers, query="a=%20b"
    )
    assert (visitor.status, visitor.body) == (503, b"full"), "what it means is not known"
    assert engine.bodies == [body]
    assert engine.lines == [f"POST {OTHER}?a=%20b HTTP/1.1"]
    assert (end.route, end.outcome, end.status) == (OTHER, Outcome.COMPLETED, 503)


async def test_another_path_is_read_too(store_url: str) -> None:
    visitor, engine, _ = await raw_call(store_url, ANSWER, b"", method="GET", query="model=demo")
    assert (visitor.status, visitor.json) == (200, {"ok": True})
    assert engine.lines == [f"GET {OTHER}?model=demo HTTP/1.1"]


@pytest.mark.parametrize(
    ("body", "query", "status"),
    [
        (b'{"model":"nope"}', "", 404),
        (b"", "model=nope", 404),
        (b'{"model":"demo","model":"demo"}', "", 400),
        (b"", "x=\xe9", 400),
    ],
)
async def test_what_another_path_is_asked_for_must_be_clear(
    store_url: str, body: bytes, query: str, status: int
) -> None:
    visitor, engine, _ = await raw_call(store_url, ANSWER, body, query=query)
    assert visitor.status == status
    assert engine.bodies == []


async def test_a_stream_of_another_path_is_not_held_back(store_url: str) -> None:
    """Nor judged: what ends it is the engine's affair."""
    more = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(b"data: 1\n\n"))
        await more.wait()
        await peer.send(chunk(b"event: error\ndata: {}\n\n"), chunk(b""))

    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, pass_through=[OTHER]) as world,
    ):
        visitor = Visitor(world.app, b"{}", path=OTHER)
        visit = asyncio.create_task(visitor.run())
        await soon(visitor.begun.is_set, "the first event is there")
        assert visitor.body == b"data: 1\n\n"
        more.set()
        await visit
        assert visitor.complete
        assert visitor.body == b"data: 1\n\nevent: error\ndata: {}\n\n"
        await world.quiet()


async def test_a_stream_of_another_path_that_breaks_is_cut_off(store_url: str) -> None:
    """In what words it could say so is not known."""

    async def script(peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(b"data: 1\n\n"))

    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, pass_through=[OTHER]) as world,
    ):
        visitor = Visitor(world.app, b"{}", path=OTHER)
        with pytest.raises(AnswerCutOff):
            await visitor.run()
        assert (visitor.body, visitor.complete) == (b"data: 1\n\n", False)
        end = world.only_end()
        assert (end.outcome, end.reason) == (Outcome.FAILED, Code.UPSTREAM_ERROR)
        await world.quiet()


async def test_a_reload_allows_and_forbids_paths(store_url: str) -> None:
    async with held(store_url, pass_through=[OTHER]) as (world, engine, go):
        scope = {"raw_path": OTHER.encode()}
        settings = world.app._settings
        running = asyncio.create_task(world.visit(b"{}", path=OTHER))
        await soon(lambda: len(engine.bodies) == 1, "the engine has the call")
        world.app.use(replace(settings, pass_through=frozenset(), unreserved_max=1))
        assert world.app.route(scope) is None
        refused = await world.visit(ASKED, path=TOKENIZE)
        assert (refused.status, refused.json["error"]["code"]) == (429, Code.CAPACITY_EXCEEDED)
        go.set()
        assert (await running).status == 200, "who runs is let go on"
        world.app.use(settings)
        assert world.app.route(scope)
        await world.quiet()


async def test_what_may_have_been_done_is_not_done_again(store_url: str) -> None:
    """Reading is repeated, anything else only where the first engine cannot have heard of it."""

    async def fails(peer: Peer) -> None:
        peer.reset()

    async def serves(peer: Peer) -> None:
        await peer.send(ANSWER)

    async with (
        raw_engine(fails) as a,
        raw_engine(serves) as b,
        gateway(store_url, {"a": a.url, "b": b.url, "c": NOWHERE}, pass_through=[OTHER]) as world,
    ):
        world.replicas.down.add("c")
        assert (await world.visit(b"{}", path=OTHER)).status == 502
        assert b.bodies == []
        await world.visit(b"{}", path=OTHER)
        assert (await world.visit(b"", path=OTHER, method="GET")).status == 200
        assert (len(a.bodies), len(b.bodies)) == (2, 2)
        world.replicas.down = {"a"}
        assert [(await world.visit(b"{}", path=OTHER)).status for _ in range(2)] == [200, 200]
        assert json.loads(b.bodies[-1]) == {}
        await world.quiet()


async def test_a_closed_fleet_takes_no_new_call_of_any_kind(store_url: str) -> None:
    """Within a second; what an engine has begun can still be asked for, and ended."""
    async with mocked(store_url, pass_through=[OTHER]) as world:
        assert (await world.visit(ASKED, path=TOKENIZE)).status == 200
        await world.ledger.shut(True)

        async def refused() -> bool:
            visitor = await world.visit(ASKED, path=TOKENIZE)
            return visitor.status == 429 and visitor.json["error"]["code"] == Code.GATE_CLOSED

        await soon_true(refused, "the word is heard")
        visitor = await world.visit(b"", path=OTHER, method="GET")
        assert (visitor.status, visitor.header("x-kvgate-reason")) == (429, Code.GATE_CLOSED)
        assert visitor.header("retry-after") == "5"
        mine = new_id("0" * 16, (world.ledger.fleet, "a"), "anonymous")
        visitor = await world.visit(b"", path=f"/v1/responses/{mine}", method="GET")
        assert (visitor.status, visitor.json["error"]["param"]) == (404, "response_id"), "the engine says so"
        await world.ledger.shut(False)

        async def served() -> bool:
            return (await world.visit(ASKED, path=TOKENIZE)).status == 200

        await soon_true(served, "it is open again")
        await world.quiet()


async def test_the_store_is_asked_once_a_second_whether_a_fleet_is_closed(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def read(*_: object) -> dict[bytes, bytes]:
        nonlocal asked
        asked += 1
        return {b"shut": b"1"}

    monkeypatch.setattr("gateway.ledger.closed.read_hash", read)
    clock = 100.0
    closed = Closed(None, lambda: clock)  # type: ignore[arg-type]
    assert [await closed() for _ in range(3)] == [True] * 3
    assert asked == 1
    clock += 1

    async def away(*_: object) -> dict[bytes, bytes]:
        nonlocal asked
        asked += 1
        raise StoreAway("gone")

    monkeypatch.setattr("gateway.ledger.closed.read_hash", away)
    assert [await closed() for _ in range(3)] == [True] * 3, "the last word counts"
    assert asked == 2
