"""Replicas that say they are asleep or ending, that fail, or that owe an answer: they answer, and get no new calls.

Each is drained for all gateways by the one that sees it, and calls lose nothing by it.
"""

from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.test_drain import (
    LONG,
    SECONDS,
    SHORT,
    complete,
    replicas_of,
    state_of,
    stream,
    two_replicas,
)
from tests.processes import Mock, World
from tests.wire import Wire, ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CHAT = "/v1/chat/completions"
UP = ("up", [])
ENDLESS = completion(16, 100, True, hold_seconds=600)
HEADERS_SECONDS = 6.0
"""Longer than a busy machine stands still."""
FAILURES = 5
"""In a row, until a replica rests."""


def chat(stream: bool, output_tokens: int = 3) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": output_tokens,
        "stream": stream,
    }


async def becomes(mock: Mock, state: str, **how: Any) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{mock.url}/mock/state", json={"state": state, **how})
    answer.raise_for_status()


def port_of(mock: Mock) -> int:
    return urlsplit(mock.url).port or 0


async def test_one_that_sleeps_rests_until_it_is_awake(new_world: World) -> None:
    """Each gateway sees it in the metrics; of those that go on one is enough."""
    (first, second), (_, b) = two_replicas(new_world, 2)
    await becomes(b, "sleep")
    await soon(lambda: state_of(first, "b") == ("draining", ["asleep"]), "it is seen", SECONDS)
    for gateway in (first, second):
        wire, replica = await stream(gateway, SHORT)
        assert (replica, await complete(wire)) == ("a", True)
    line = 'kvgate_replica_rests{fleet="demo",pool="only",replica="b",why="asleep"} 1.0'
    await soon(lambda: line in second.metrics(), "the metrics show it", SECONDS)
    await becomes(b, "wake")
    await soon(lambda: state_of(first, "b") == UP, "it is awake", SECONDS)
    assert (await stream(first, SHORT))[1] == "b"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(16, 3, True)),
        ("/v1/completions", completion(16, 3)),
        (CHAT, chat(True)),
        (CHAT, chat(False)),
    ],
    ids=["completion, streamed", "completion", "chat, streamed", "chat"],
)
async def test_one_that_shuts_down_finishes_and_gets_nothing_new(
    new_world: World, path: str, body: dict[str, Any]
) -> None:
    """It turns each kind of call away in another way; every one is answered by the other replica."""
    (gateway, other), (_, b) = two_replicas(new_world, 2)
    running, replica = await stream(gateway, LONG)
    assert replica == "b"
    await becomes(b, "drain")
    for _ in range(2):
        answer = await ask(gateway.url, post(gateway.key, body, path))
        assert (answer.status, answer.headers["x-kvgate-replica"]) == (200, "a")
        assert b"abort" not in answer.body
    await soon(lambda: state_of(gateway, "b") == ("draining", ["ending"]), "it is known", SECONDS)
    assert (await stream(other, SHORT))[1] == "a"
    assert await complete(running)
    b.stop()
    anew = new_world.mock("--blocks", "401", "--port", str(port_of(b)))
    await soon(lambda: state_of(gateway, "b") == UP, "another process has begun", SECONDS)
    await soon(lambda: _serves(gateway.url, gateway.key, anew), "and serves", SECONDS)
    assert gateway.metric("kvgate_admission_requests_total") > 0
    assert 'outcome="failed"' not in gateway.metrics()


def _serves(url: str, key: str, mock: Mock) -> bool:
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{url}/v1/completions", json=completion(16, 1), headers=headers, trust_env=False)
    return bool(mock.log()["finished"])


async def test_one_that_answers_too_late_is_a_suspect_until_a_call_has_ended_there(new_world: World) -> None:
    settings = {"upstream": {"headers_seconds": HEADERS_SECONDS}}
    (gateway,), (_, b) = two_replicas(new_world, 1, **settings)
    held = [await Wire.open(gateway.url) for _ in range(2)]
    for wire in held:
        await wire.send(post(gateway.key, ENDLESS))
    await soon(lambda: b.metric("vllm:num_requests_running") == 2, "they run there", SECONDS)
    b.fail("hang")
    answer = await ask(gateway.url, post(gateway.key, SHORT))
    assert (answer.status, answer.headers["x-kvgate-replica"]) == (200, "a")
    await soon(lambda: state_of(gateway, "b") == ("draining", ["suspect"]), "it is a suspect", SECONDS)
    assert (await stream(gateway, SHORT))[1] == "a"
    held[0].reset()
    await soon(lambda: state_of(gateway, "b") == UP, "a call has ended there", SECONDS)
    assert (await stream(gateway, SHORT))[1] == "b"


async def test_one_that_fails_rests_until_a_trial_is_answered(new_world: World) -> None:
    """Its failures reach no client."""
    (gateway,), (_, b) = two_replicas(new_world, 1)
    b.fail("status:500", 1000)
    for _ in range(FAILURES):
        answer = await ask(gateway.url, post(gateway.key, SHORT))
        assert (answer.status, answer.headers["x-kvgate-replica"]) == (200, "a")
    await soon(lambda: state_of(gateway, "b") == ("draining", ["failing"]), "it rests", SECONDS)
    b.reset()
    await soon(lambda: state_of(gateway, "b") == UP, "a trial was answered", SECONDS)
    assert (await stream(gateway, SHORT))[1] == "b"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_refusals_let_no_replica_rest(new_world: World, status: int) -> None:
    """What load does to it is in `test_case_bs.py`."""
    (gateway,), (_, b) = two_replicas(new_world, 1)
    b.fail(f"status:{status}", 4 * FAILURES)
    for _ in range(4 * FAILURES):
        answer = await ask(gateway.url, post(gateway.key, SHORT))
        assert answer.status == status
    assert (await stream(gateway, SHORT))[1] == "b"
    assert state_of(gateway, "b") == UP
    assert {row["state"] for row in replicas_of(gateway).values()} == {"up"}
