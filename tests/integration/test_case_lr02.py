"""LR-02: whatever goes wrong upstream, 50 times, the client hears one error and the engine's whole budget is left.

Ten calls fit, so the other 40 of each batch wait for the places that failed calls give back.  Afterwards ten healthy
calls run side by side, and none of them has to wait.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import gateway
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World, world
from tests.wire import Answer, ask, blocks_of, completion, post, soon

CALLS, PLACES = 50, 10
HANGING = 20
"""Of those that hang: each ten wait out their limit, and then the engine is suspect until it is seen to have none."""
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 120
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
HEADERS_SECONDS = 3.0
"""Longer than a healthy call takes on a busy machine."""
QUEUE_SECONDS = 60.0
"""Longer than any call here has to wait."""
CHUNK = 65_536
FIELDS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Error:
    status: int
    code: str | int
    """The gateway's own, or the engine's, which vLLM gives as a number."""


FAILED = Error(502, "upstream_error")
SCRIPTED = {
    "reset_before_headers": FAILED,
    "status:400": Error(400, 400),
    "status:404": Error(404, 404),
    "status:429": Error(429, 429),
    "status:500": FAILED,
    "status:503": Error(503, "no_backend"),
    "hang": Error(504, "upstream_timeout"),
    "reset_after_headers": FAILED,
    "garbage": FAILED,
}
"""What the engine does to a call, and what its client gets."""


def engine(here: World, port: int = 0) -> Mock:
    return here.mock("--blocks", str(PLACES * BLOCKS + 1), "--step-base-ms", "1", "--port", str(port))


class Scene:
    def __init__(self, here: World, mock: Mock, url: str = "", queue_seconds: float = QUEUE_SECONDS) -> None:
        """`url`: where the gateway finds the engine, if not at the engine's own."""
        self.mock = mock
        config, (key,) = here.config(
            [{"name": "only", "replicas": [url or mock.url]}],
            queue={"seconds_max": queue_seconds},
            store=QUICK_STORE,
            upstream={"headers_seconds": HEADERS_SECONDS},
        )
        self.gateway: GatewayProcess = here.gateway(config, key)

    async def batch(self, count: int = CALLS) -> list[Answer]:
        """All at once; every second one asks for a stream."""
        bodies = (completion(PROMPT_TOKENS, OUTPUT_TOKENS, number % 2 == 0) for number in range(count))
        calls = (ask(self.gateway.url, post(self.gateway.key, body)) for body in bodies)
        return list(await asyncio.gather(*calls))

    async def nothing_is_held(self) -> None:
        await soon(self.gateway.is_quiet, "all is given back")

    async def healthy_calls_fit(self) -> None:
        """All ten at a time: the engine stands still until it has them."""
        self.mock.reset()
        await soon(self.gateway.takes_calls, "the engine does not rest any more")
        await asyncio.to_thread(self.mock.change, "pause")
        request = post(self.gateway.key, completion(PROMPT_TOKENS, OUTPUT_TOKENS, output_tokens=1))
        calls = [asyncio.create_task(ask(self.gateway.url, request)) for _ in range(PLACES)]
        await soon(lambda: self.mock.log()["received"] == PLACES, "they are there side by side")
        await asyncio.to_thread(self.mock.change, "resume")
        answers = await asyncio.gather(*calls)
        assert [answer.status for answer in answers] == [200] * PLACES
        assert [answer.headers["x-kvgate-queue-ms"] for answer in answers] == ["0"] * PLACES
        await soon(lambda: self.mock.log()["finished"] == PLACES, "the engine has noted their ends")
        await self.nothing_is_held()


def errors(answers: list[Answer]) -> Counter[Error]:
    """All in OpenAI's envelope."""
    assert all(set(answer.json()) == {"error"} for answer in answers)
    assert all(set(answer.json()["error"]) == FIELDS for answer in answers)
    return Counter(Error(answer.status, answer.json()["error"]["code"]) for answer in answers)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Every fault finds what the one before has left: nothing."""
    with world() as here:
        yield Scene(here, engine(here))


@pytest.mark.parametrize("fault", SCRIPTED)
async def test_the_engine_fails(scene: Scene, fault: str) -> None:
    scene.mock.reset()
    scene.mock.fail(fault, 10 * CALLS)  # a call that meets a connection just being closed is sent again
    count = HANGING if fault == "hang" else CALLS
    assert errors(await scene.batch(count)) == {SCRIPTED[fault]: count}
    await scene.nothing_is_held()
    await scene.healthy_calls_fit()


async def test_nobody_listens(new_world: World) -> None:
    """Whose connection is refused hears 502, and two of them take the engine out.

    Who waits already goes on to the end of its time, for an engine that is started again would serve it; a new call is
    told at once that there is none.
    """
    mock = engine(new_world)
    scene = Scene(new_world, mock, queue_seconds=3)
    mock.stop()
    found = errors(await scene.batch())
    assert found[FAILED] >= 2, found
    assert set(found) <= {FAILED, Error(429, "queue_timeout"), Error(503, "no_backend")}
    await scene.nothing_is_held()
    assert set(errors(await scene.batch())) == {Error(503, "no_backend")}
    await scene.nothing_is_held()
    scene.mock = engine(new_world, urlsplit(mock.url).port or 0)
    await soon(scene.gateway.is_ready, "the engine is found again")
    await scene.healthy_calls_fit()


class Door:
    """In front of the engine.  It closes the connection of a call before it is answered, until `opened`."""

    def __init__(self, mock: Mock) -> None:
        self.opened = False
        self._engine = urlsplit(mock.url)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read(CHUNK)
        if request.startswith(b"POST") and not self.opened:
            return writer.close()
        engine = await asyncio.open_connection(self._engine.hostname, self._engine.port)
        engine[1].write(request)
        await asyncio.gather(_pass_on(reader, engine[1]), _pass_on(engine[0], writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def behind_a_door(here: World) -> AsyncIterator[tuple[Scene, Door]]:
    mock = engine(here)
    door = Door(mock)
    server = await asyncio.start_server(door.accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    scene = await asyncio.to_thread(Scene, here, mock, url)
    try:
        yield scene, door
    finally:
        await asyncio.to_thread(scene.gateway.stop)  # with its connections the door's end
        server.close()


async def test_connections_are_closed_in_order_before_the_headers(new_world: World) -> None:
    async with behind_a_door(new_world) as (scene, door):
        assert errors(await scene.batch()) == {FAILED: CALLS}
        await scene.nothing_is_held()
        door.opened = True
        await scene.healthy_calls_fit()


HOOK = """
from pathlib import Path

import gateway.flow

broken, forward = Path(__file__).with_name("broken"), gateway.flow.forward


def forward_or_fail(*arguments, **named):
    if broken.exists():
        raise RuntimeError("planted")
    return forward(*arguments, **named)


gateway.flow.forward = forward_or_fail
"""
"""Python runs `sitecustomize.py` before the gateway.  What fails is the first step of a call that has got its place."""


async def test_the_gateway_itself_fails(new_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_world.folder / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    mock = engine(new_world)
    paths = [str(folder), str(Path(gateway.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    scene = Scene(new_world, mock)
    (folder / "broken").touch()
    answers = await scene.batch()
    assert errors(answers) == {Error(500, "internal_error"): CALLS}
    assert not any(b"planted" in answer.body for answer in answers)
    await scene.nothing_is_held()
    assert mock.log()["received"] == 0
    (folder / "broken").unlink()
    await scene.healthy_calls_fit()
