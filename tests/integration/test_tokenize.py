"""Counting by the engines: real sockets, and mock engines that answer as vLLM does or do not."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.core.prefixes import PromptCount, points
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.mock.engine import EngineConfig
from gateway.upstream import tokenize
from gateway.upstream.api import Access
from gateway.upstream.scraper import Scraper
from gateway.upstream.tokenize import ASKED_MAX, PAUSE_SECONDS, EngineCounter
from tests.flow.engines import Peer, mock_engine, raw_engine, whole
from tests.flow.world import soon

USER = {"role": "user", "content": "one two three"}
FIVE = PromptCount(5)
ANSWER = whole(200, b'{"count":5,"tokens":[]}')


def request_of(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> GenerationRequest:
    prompt = {} if endpoint is Endpoint.COMPLETIONS else {"messages": [USER]}
    request = parse(endpoint, json.dumps({"model": "demo", **prompt, **fields}).encode(), 16)
    assert isinstance(request, GenerationRequest), request
    return request


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of ours answers at once, but the machine may stand still."""
    monkeypatch.setattr(tokenize, "ANSWER_SECONDS", 60.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def counting(urls: Sequence[str], key: str | None = None) -> AsyncIterator[tuple[EngineCounter, Clock]]:
    clock, engines = Clock(), [(url, Access.of(key)) for url in urls]
    async with Scraper() as scraper:
        yield EngineCounter(lambda: engines, scraper.post, clock), clock


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.COMPLETIONS, {"prompt": ["a b c", "d"]}),
        (Endpoint.CHAT, {}),
        (Endpoint.CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Endpoint.MESSAGES, {"system": "Be brief."}),
    ],
)
async def test_it_says_what_the_engine_then_reports(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    request = request_of(endpoint, max_tokens=1, **fields)
    async with mock_engine(EngineConfig(), speed=math.inf) as engine, counting([engine.url]) as (counter, _):
        counts = await counter.count(request)
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            usage = (await client.post(endpoint, json=json.loads(request.body))).json()["usage"]
    assert counts is not None
    assert len(counts) == len(request.prompts)
    assert sum(tokens for tokens, _ in counts) == usage.get("prompt_tokens", usage.get("input_tokens"))


async def test_replicas_take_turns_and_get_our_key() -> None:
    async def answer(peer: Peer) -> None:
        await peer.send(ANSWER)

    async with (
        raw_engine(answer) as one,
        raw_engine(answer) as other,
        counting([one.url, other.url], "secret") as (counter, _),
    ):
        for _ in range(4):
            assert await counter.count(request_of()) == [FIVE]
        assert [len(one.bodies), len(other.bodies)] == [2, 2]
        assert all(b"authorization: Bearer secret\r\n" in peer.head for peer in (*one.peers, *other.peers))


@pytest.mark.parametrize(
    "answer",
    [whole(404, b"{}"), whole(503, b"{}"), b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b""],
    ids=["no such route", "overloaded", "cut", "gone"],
)
async def test_an_engine_that_does_not_count_is_left_alone_for_a_while(answer: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.send(answer)

    async with raw_engine(play) as engine, counting([engine.url]) as (counter, clock):
        for now, asked in ((0.0, 1), (PAUSE_SECONDS - 0.01, 1), (PAUSE_SECONDS, 2)):
            clock.now = now
            assert await counter.count(request_of()) is None
            assert len(engine.bodies) == asked


@pytest.mark.parametrize("answer", [whole(400, b"{}"), whole(200, b"{}"), whole(200, b"what?")])
async def test_a_question_that_is_refused_says_nothing_against_the_engine(answer: bytes) -> None:
    answers = [answer, ANSWER]

    async def play(peer: Peer) -> None:
        await peer.send(answers.pop(0))

    async with raw_engine(play) as engine, counting([engine.url]) as (counter, _):
        assert await counter.count(request_of()) is None
        assert await counter.count(request_of()) == [FIVE]


async def test_an_engine_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "ANSWER_SECONDS", 0.01)

    async def silent(peer: Peer) -> None:
        await peer.until_gone()

    async with raw_engine(silent) as engine, counting([engine.url]) as (counter, _):
        assert await counter.count(request_of()) is None
        await soon(engine.peers[0].gone.is_set, "its connection is closed")
        assert await counter.count(request_of()) is None
        assert len(engine.bodies) == 1


async def test_not_too_many_ask_at_once_and_each_gives_its_place_back() -> None:
    answered = asyncio.Event()

    async def wait(peer: Peer) -> None:
        await answered.wait()
        await peer.send(ANSWER)

    async with raw_engine(wait) as engine, counting([engine.url]) as (counter, _):
        for _ in range(2):
            asking = [asyncio.create_task(counter.count(request_of())) for _ in range(ASKED_MAX)]
            await soon(lambda: counter._asked == ASKED_MAX, "all ask")
            assert await counter.count(request_of()) is None
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        answered.set()
        assert await counter.count(request_of()) == [FIVE]


async def test_without_a_replica_nobody_is_asked() -> None:
    async with counting([]) as (counter, _):
        assert await counter.count(request_of()) is None


async def test_it_tells_how_prompts_begin_where_the_engine_tells_the_tokens() -> None:
    """`count_tokens` tells how many there are, and nothing else."""
    text = "one two three four " * 20
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as engine,
        counting([engine.url]) as (counter, _),
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        asked = {"model": "demo", "prompt": text}
        ids = (await client.post("/tokenize", json=asked)).json()["tokens"]
        found = await counter.count(request_of(Endpoint.COMPLETIONS, prompt=text), 1)
        assert found == [PromptCount(len(ids), points(ids, 1))]
        assert len(found[0].points) > 10 * 16
        message = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        found = await counter.count(request_of(Endpoint.MESSAGES, **message), 1)
    assert found is not None
    assert found[0].tokens > 0
    assert found[0].points == b""


async def test_chats_of_another_quarter_of_an_hour_begin_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their template may show the date, of which nothing is known here.  Long answers are read in a thread."""
    monkeypatch.setattr(tokenize, "READ_AT_ONCE_BYTES", 0)
    times = iter((0.0, 899.0, 900.0))
    request = request_of(messages=[{"role": "user", "content": "one two three four " * 20}])
    async with mock_engine(EngineConfig(), speed=math.inf) as engine, Scraper() as scraper:
        counter = EngineCounter(
            lambda: [(engine.url, Access.of(None))], scraper.post, Clock(), lambda: next(times)
        )
        first, same, later = [await counter.count(request, 1) for _ in range(3)]
    assert first == same != later
    assert first is not None


async def test_chats_begin_otherwise_where_an_engine_may_show_what_it_was_not_asked_with() -> None:
    """The count is the same: nothing says whether it does."""
    words = [{"role": "user", "content": "one two three four " * 20}]
    formats: list[Any] = [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
    ]
    async with mock_engine(EngineConfig(), speed=math.inf) as engine, Scraper() as scraper:
        counter = EngineCounter(lambda: [(engine.url, Access.of(None))], scraper.post, Clock(), lambda: 0.0)
        requests = [request_of(messages=words, response_format=shown) for shown in (*formats, *formats)]
        found = [counts[0] for request in requests if (counts := await counter.count(request, 1))]
    assert found[:3] == found[3:]
    assert len({tokens for tokens, _ in found}) == 1
    assert len({points for _, points in found if points}) == len(formats)


@pytest.mark.parametrize("tokens", [b"null", b"[1,2]", b'["a","b","c","d","e"]', b"[1,2,3,-4,5]"])
async def test_tokens_that_are_none_cost_no_count(tokens: bytes) -> None:
    async def answer(peer: Peer) -> None:
        await peer.send(whole(200, b'{"count":5,"tokens":' + tokens + b"}"))

    async with raw_engine(answer) as engine, counting([engine.url]) as (counter, _):
        assert await counter.count(request_of(), 1) == [FIVE]
