"""`/v1/embeddings`, `/pooling`, `/score` and `/rerank` through the gateway, in front of a model that pools."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.core.prefill import PrefillTimes
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import Visitor
from tests.flow.engines import MockEngine, Peer, mock_engine, raw_engine, whole
from tests.flow.world import World, gateway, soon

EMBEDDINGS, POOLING, SCORE, RERANK = "/v1/embeddings", "/pooling", "/score", "/rerank"
POOLS = Options(runner="pooling")
USAGE = {"usage": {"prompt_tokens": 600, "total_tokens": 600, "completion_tokens": 0}}


@asynccontextmanager
async def pooling(store_url: str, options: Options = POOLS) -> AsyncIterator[tuple[World, MockEngine]]:
    async with (
        mock_engine(EngineConfig(blocks=1001), speed=math.inf, options=options) as mock,
        gateway(store_url, {"a": mock.url}) as world,
    ):
        yield world, mock


async def one_call(store_url: str, path: str, body: Any) -> tuple[Visitor, dict[str, Any], CallEnded]:
    """The answer, the request upstream and the report."""
    async with pooling(store_url) as (world, mock):
        visitor = await world.visit(body, path=path)
        request: dict[str, Any] = mock.app.journal.shown()["requests"][-1]
        await world.quiet()
        return visitor, request, world.only_end()


@pytest.mark.parametrize(
    ("path", "fields", "blocks"),
    [
        (EMBEDDINGS, {"input": [list(range(10, 26)), list(range(10, 27))]}, 3),
        (EMBEDDINGS, {"input": "one two", "encoding_format": "base64"}, 1),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "hi"}]}, 1),
        (POOLING, {"input": ["one", "two"]}, 2),
        (SCORE, {"text_1": "one", "text_2": ["two", "three"]}, 2),
        ("/v1/score", {"queries": ["one", "two"], "documents": ["two", "three"]}, 2),
        (RERANK, {"query": "one", "documents": ["two", "one"]}, 2),
        ("/v1/rerank", {"query": "one", "documents": "two"}, 1),
        ("/v2/rerank", {"query": "one", "documents": ["two"], "top_n": 1}, 1),
    ],
)
async def test_a_call_holds_the_blocks_of_its_inputs(
    store_url: str, path: str, fields: dict[str, Any], blocks: int
) -> None:
    asked = {"model": "demo", **fields}
    visitor, request, end = await one_call(store_url, path, asked)
    assert visitor.status == 200, visitor.body
    assert (request["path"], request["body"]) == (path, asked), "its bytes are the client's"
    assert visitor.header("x-kvgate-reserved-blocks") == str(blocks)
    assert (end.outcome, end.route, end.reserved_blocks) == (Outcome.COMPLETED, path, blocks)
    assert (end.prompt_tokens, end.output_tokens) == (visitor.json["usage"]["prompt_tokens"], 0)
    assert end.unused_blocks is not None


async def test_vectors_as_bytes_pass_as_they_are(store_url: str) -> None:
    body = {"model": "demo", "input": [[1, 2], [3]], "encoding_format": "bytes"}
    visitor, _, end = await one_call(store_url, EMBEDDINGS, body)
    assert (visitor.status, visitor.header("content-type")) == (200, "application/octet-stream")
    assert len(visitor.body) == 2 * 4 * 128
    assert json.loads(visitor.header("metadata") or "")["usage"]["prompt_tokens"] == 3
    assert (end.outcome, end.prompt_tokens, end.prompt_tokens_estimated) == (Outcome.COMPLETED, None, 3)


@pytest.mark.parametrize("path", [EMBEDDINGS, POOLING, SCORE, RERANK])
async def test_a_replica_without_the_route_says_so_itself(store_url: str, path: str) -> None:
    async with pooling(store_url, Options()) as (world, _):
        fields = {"query": "a", "documents": "b"} if path == RERANK else {"input": "a"}
        fields = {"text_1": "a", "text_2": "b"} if path == SCORE else fields
        visitor = await world.visit({"model": "demo", **fields}, path=path)
        assert (visitor.status, visitor.json) == (404, {"detail": "Not Found"})
        assert world.only_end().charged is False
        await world.quiet()


async def test_more_inputs_than_an_engine_runs_at_once(store_url: str) -> None:
    """256 of them: the engine takes the others from its queue, and never holds more than is reserved."""
    async with pooling(store_url) as (world, mock):
        inputs = [[number] * 20 for number in range(10, 310)]
        visitor = await world.visit({"model": "demo", "input": inputs}, path=EMBEDDINGS)
        assert (visitor.status, len(visitor.json["data"])) == (200, 300)
        assert visitor.header("x-kvgate-reserved-blocks") == str(256 * 2)
        assert mock.app.driver.engine.preemptions == 0
        await world.quiet()


async def test_more_blocks_than_an_engine_has(store_url: str) -> None:
    """It runs alone there, in parts."""
    async with pooling(store_url) as (world, _):
        inputs = [[number] * 8000 for number in range(10, 13)]
        visitor = await world.visit({"model": "demo", "input": inputs}, path=EMBEDDINGS)
        assert visitor.status == 200
        assert visitor.header("x-kvgate-reserved-blocks") == "1000"
        await world.quiet()


async def test_the_whole_call_is_prefill(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt is not computed while it runs, however long that takes."""
    monkeypatch.setattr(PrefillTimes, "seconds", lambda self, replica, tokens: 0.0)
    asked, answered = 0, asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await answered.wait()
        await peer.send(whole(200, json.dumps(USAGE).encode()))

    body = {"model": "demo", "input": [7] * 600}
    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, prefill_tokens=1000) as world,
    ):
        first = asyncio.create_task(world.visit(body, path=EMBEDDINGS))
        await soon(lambda: asked == 1, "the first one runs")
        second = asyncio.create_task(world.visit(body, path=EMBEDDINGS))
        await world.queued(1)
        answered.set()
        assert [(await each).status for each in (first, second)] == [200, 200]
        await world.quiet()


@pytest.mark.parametrize("answer", [whole(200, b"oops"), whole(500, b"{}"), whole(200, b'{"error": {}}')])
async def test_a_failed_call_is_tried_elsewhere(store_url: str, answer: bytes) -> None:
    async def fails(peer: Peer) -> None:
        await peer.send(answer)

    async def serves(peer: Peer) -> None:
        await peer.send(whole(200, json.dumps(USAGE).encode()))

    async with (
        raw_engine(fails) as a,
        raw_engine(serves) as b,
        gateway(store_url, {"a": a.url, "b": b.url}, blocks={"a": 2001}) as world,
    ):
        visitor = await world.visit({"model": "demo", "input": "x"}, path=EMBEDDINGS)
        assert (visitor.status, visitor.json) == (200, USAGE)
        assert len(a.bodies) == len(b.bodies) == 1
        await world.quiet()


async def test_a_client_that_leaves_ends_the_engines_work(store_url: str) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.until_gone()
        gone.set()

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}) as world:
        visitor = Visitor(world.app, {"model": "demo", "input": "x"}, path=EMBEDDINGS)
        visit = asyncio.create_task(visitor.run())
        await soon(lambda: len(engine.bodies) == 1, "the engine has the call")
        visitor.leave()
        await soon(gone.is_set, "the connection is closed")
        await visit
        assert world.only_end().reason is Code.CLIENT_DISCONNECT
        await world.quiet()


async def test_a_refusal_is_in_openais_words(store_url: str) -> None:
    visitor_of = {"input": 1, "model": "demo"}
    async with pooling(store_url) as (world, mock):
        visitor = await world.visit(visitor_of, path=EMBEDDINGS)
        assert (visitor.status, visitor.json["error"]["param"]) == (400, "input")
        assert mock.app.journal.shown()["received"] == 0
        await world.quiet()
