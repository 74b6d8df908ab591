"""Every route, whatever its engine answers and wherever its client leaves: one end is told, and nothing is held."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from gateway import background
from gateway.core.outcomes import STATUS, Code, Outcome
from gateway.core.responses import new_id
from gateway.http.relay import AnswerCutOff
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from tests.flow.driver import CHAT, Suspensions, Visitor
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, Peer, chunk, mock_engine, raw_engine, whole
from tests.flow.world import LONG, World, gateway, soon
from tests.forms import CONTENT_TYPE, form, wav

RESPONSES = "/v1/responses"
SUSPENSIONS_MAX = 80
SECRET = "sesame"
"""What every call says."""
SAID = [{"role": "user", "content": SECRET}]
PREVIOUS = "resp_of_a_call_before"
"""Stands for the id of a response that the engine has."""


@dataclass(frozen=True)
class Asked:
    """One call of a route."""

    path: str
    body: Mapping[str, Any] | bytes
    method: str = "POST"
    query: str = ""
    content_type: str = "application/json"
    pools: bool = False
    """Its engine embeds and scores."""

    def visitor(self, world: World, response_id: str, **options: Any) -> Visitor:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return Visitor(
            world.app,
            body.replace(PREVIOUS.encode(), response_id.encode()),
            path=self.path.replace(PREVIOUS, response_id),
            method=self.method,
            query=self.query,
            headers={"content-type": self.content_type, "authorization": f"Bearer {SECRET}"},
            **options,
        )


def asked(path: str, /, pools: bool = False, **fields: Any) -> Asked:
    return Asked(path, {"model": "demo", **fields}, pools=pools)


def spoken(path: str, *fields: tuple[str, str]) -> Asked:
    body = form(
        ("model", "demo"), ("file", wav(1)), ("max_completion_tokens", "4"), ("prompt", SECRET), *fields
    )
    return Asked(path, body, content_type=CONTENT_TYPE)


RESPONSE = {"input": f"{SECRET} two", "max_output_tokens": 4}
GENERATED = {"messages": SAID, "max_tokens": 4}
CALLS = {
    "chat": asked(CHAT, **GENERATED),
    "chat, streamed": asked(CHAT, stream=True, **GENERATED),
    "batch": asked(f"{CHAT}/batch", messages=[SAID, SAID], max_tokens=4),
    "completion": asked("/v1/completions", prompt=[SECRET, "two"], n=2, max_tokens=4),
    "completion, streamed": asked("/v1/completions", prompt=SECRET, stream=True, max_tokens=4),
    "message": asked("/v1/messages", **GENERATED),
    "message, streamed": asked("/v1/messages", stream=True, **GENERATED),
    "response": asked(RESPONSES, **RESPONSE),
    "response, streamed": asked(RESPONSES, stream=True, **RESPONSE),
    "response in the background": asked(RESPONSES, background=True, **RESPONSE),
    "response in the background, streamed": asked(RESPONSES, background=True, stream=True, **RESPONSE),
    "response that goes on": asked(RESPONSES, previous_response_id=PREVIOUS, **RESPONSE),
    "embeddings": asked("/v1/embeddings", pools=True, input=[SECRET, "two"]),
    "pooling": asked("/pooling", pools=True, input=SECRET),
    "score": asked("/score", pools=True, text_1=SECRET, text_2=["two", "three"]),
    "rerank": asked("/rerank", pools=True, query=SECRET, documents=["two"]),
    "transcription": spoken("/v1/audio/transcriptions"),
    "transcription, streamed": spoken("/v1/audio/transcriptions", ("stream", "true")),
    "translation": spoken("/v1/audio/translations"),
    "tokenize": asked("/tokenize", messages=SAID),
    "detokenize": asked("/detokenize", tokens=[1, 2]),
    "count_tokens": asked("/v1/messages/count_tokens", messages=SAID),
    "stored response": Asked(f"{RESPONSES}/{PREVIOUS}", b"", "GET"),
    "cancelled response": Asked(f"{RESPONSES}/{PREVIOUS}/cancel", b""),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine that answers nonsense is asked about a response in the background."""
    monkeypatch.setattr(background, "POLL_SECONDS_MIN", 0.005)
    monkeypatch.setattr(background, "END_SECONDS", 0.02)


# -- engines ---------------------------------------------------------------------------------------------------------

ERROR = b'{"error":{"message":"no","type":"t","param":null,"code":500}}'
DEEP = b"[" * 20_000 + b"]" * 20_000


def streamed(*events: bytes) -> list[bytes]:
    return [STREAM_HEAD, *map(chunk, events), LAST_CHUNK]


ANSWERS: dict[str, list[bytes]] = {
    **{
        f"{status} {what}": [whole(status, body)]
        for status in (400, 404, 429, 500, 503)
        for what, body in {"error": ERROR, "empty": b"", "garbage": b"\xff\x00<html>"}.items()
    },
    "200 empty": [whole(200, b"")],
    "200 null": [whole(200, b"null")],
    "200 list": [whole(200, b"[1]")],
    "200 object of nothing": [whole(200, b"{}")],
    "200 error": [whole(200, ERROR)],
    "200 garbage": [whole(200, b"\xff\x00{")],
    "200 deep": [whole(200, DEEP)],
    "200 deep within": [whole(200, b'{"usage":' + DEEP + b',"choices":' + DEEP + b',"status":[]}')],
    "200 wrong types": [
        whole(200, b'{"usage":{"input_tokens":-1,"prompt_tokens":"x"},"choices":{},"status":7,"error":null}')
    ],
    "204": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "302": [whole(302, b"", extra="location: http://127.0.0.1:1/\r\n")],
    "stream of nothing": streamed(),
    "stream of done": streamed(DONE),
    "stream of null": streamed(b"data: null\n\n", DONE),
    "stream of garbage": streamed(b"data: {\n\n\xff\n\n", b"event: x\n\n", DONE),
    "stream of deep": streamed(b"data: " + DEEP + b"\n\n", DONE),
    "stream of wrong types": streamed(b'data: {"choices":[null],"type":7,"usage":[],"delta":1}\n\n', DONE),
    "stream of an error": streamed(b"data: " + ERROR + b"\n\n", DONE),
    "nothing": [],
    "half a head": [b"HTTP/1.1 200 OK\r\ncontent-le"],
    "half a body": [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"],
    "half a stream": [STREAM_HEAD, b"fff\r\ndata: {"],
}


@pytest.mark.parametrize("parts", ANSWERS.values(), ids=ANSWERS)
async def test_whatever_an_engine_answers(
    store_url: str, parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A client gets the engine's own answer, or an error in its words; our own fault it never is.

    Nothing of it is logged, whatever went wrong.
    """
    caplog.set_level(logging.DEBUG)

    async def script(peer: Peer) -> None:
        await peer.send(*parts)

    async with (
        raw_engine(script) as engine,
        gateway(store_url, {"a": engine.url}, background_seconds=0.05) as world,
    ):
        previous = new_id("0" * 16, (world.ledger.fleet, "a"), "anonymous")
        for name, call in CALLS.items():
            visitor = call.visitor(world, previous)
            with suppress(AnswerCutOff):
                async with asyncio.timeout(LONG):
                    await visitor.run()
            end = world.only_end()
            assert end.reason is not Code.INTERNAL_ERROR, name
            expect_known(name, visitor, b"".join(parts))
            await world.quiet()
    ours = [record for record in caplog.records if record.name in ("kvgate.proxy", "asyncio")]
    assert not [record for record in ours if record.levelno >= logging.ERROR]
    assert SECRET not in caplog.text


def expect_known(name: str, visitor: Visitor, answered: bytes) -> None:
    """The engine's, or an error of the gateway's."""
    reason = visitor.header("x-kvgate-reason")
    if reason is None:
        assert answered.startswith(b"HTTP/1.1 %d " % visitor.status), name
        return
    error = visitor.json["error"]
    assert (error["code"], visitor.status) == (reason, STATUS[Code(reason)][0]), name
    assert ("type" in visitor.json) == (name.startswith("message") or name == "count_tokens")
    if visitor.status in (429, 503):
        assert visitor.header("retry-after"), name


# -- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leaves", "cancelled"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_client_can_leave_at_every_suspension(store_url: str, name: str, how: str) -> None:
    call, outcomes = CALLS[name], set()
    options = Options(runner="pooling") if call.pools else Options(responses_store=True, listens=True)
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=20, options=options) as mock,
        gateway(store_url, {"a": mock.url}) as world,
    ):
        previous = ""
        if not call.pools:
            previous = (await world.visit({"model": "demo", **RESPONSE}, path=RESPONSES)).json["id"]
            world.facts.clear()
        for at in range(1, SUSPENSIONS_MAX):
            visitor = call.visitor(world, previous, pieces=2)
            steps, task = struck(visitor, at, how)
            async with asyncio.timeout(LONG):
                await asyncio.wait({task})
            if not task.cancelled():
                assert task.result() is None
            outcomes.add(world.only_end().outcome)
            await world.quiet()
            await soon(lambda: not mock.open_calls, "the engine's calls have ended")
            if not steps.struck:
                break
        assert 2 <= at < SUSPENSIONS_MAX - 1
        assert outcomes <= {Outcome.CANCELLED, Outcome.COMPLETED}
        assert Outcome.CANCELLED in outcomes
        assert visitor.status == (400 if name == "cancelled response" else 200), visitor.body


def struck(visitor: Visitor, at: int, how: str) -> tuple[Suspensions, "asyncio.Task[None]"]:
    steps = Suspensions(visitor.run(), at, lambda: visitor.leave() if how == "leaves" else task.cancel())

    async def finish() -> None:
        await steps

    task = asyncio.create_task(finish())
    return steps, task
