"""All replicas of a fleet are restarted one after the other under load: no call is lost."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.integration.test_admin_keys import admin_of
from tests.integration.test_drain import SECONDS, replicas_of, state_of
from tests.integration.test_resting import CHAT, chat, port_of
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Answer, ask, completion, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(180)]

NAMES = "abc"
CALLERS = 6
TOKENS = 20
OPTIONS = ("--blocks", "101", "--step-base-ms", "5", "--shutdown-timeout", "60")
COMPLETION = "/v1/completions"
LENGTH = re.compile(rb'"finish_reason": ?"length"')
ERROR = re.compile(rb'^(?:data: )?\{"error"', re.MULTILINE)
Kind = tuple[str, dict[str, Any]]
KINDS: Sequence[Kind] = [
    (CHAT, chat(True, TOKENS)),
    (CHAT, chat(False, TOKENS)),
    (COMPLETION, completion(16, TOKENS, True)),
    (COMPLETION, completion(16, TOKENS)),
]
"""Each is turned away by an engine that shuts down in another way."""


class Load:
    """Callers of several gateways who call again and again, one kind after the other."""

    def __init__(
        self, gateways: Sequence[GatewayProcess], kinds: Sequence[Kind], patience_seconds: float
    ) -> None:
        self.lost: list[bytes] = []
        self.answered = 0
        self._gateways = gateways
        self._kinds = kinds
        self._patience_seconds = patience_seconds

    async def call_on(self, number: int) -> None:
        gateway = self._gateways[number % len(self._gateways)]
        for path, body in itertools.islice(itertools.cycle(self._kinds), number, None):
            answer = await ask(gateway.url, post(gateway.key, body, path), self._patience_seconds)
            if is_whole(answer, body):
                self.answered += 1
            else:
                self.lost.append(b"%d %b" % (answer.status, answer.body[-500:]))


def is_whole(answer: Answer, body: Mapping[str, Any]) -> bool:
    """It runs to its limit, and has no word of an error, which as a token of a real model is none."""
    if answer.status != 200 or ERROR.search(answer.body) or not LENGTH.search(answer.body):
        return False
    if body.get("stream"):
        return answer.body.endswith(b"data: [DONE]\n\n")
    return bool(answer.json()["usage"]["completion_tokens"] == body["max_tokens"])


@asynccontextmanager
async def under_load(
    gateways: Sequence[GatewayProcess], kinds: Sequence[Kind] = KINDS, patience_seconds: float = SECONDS
) -> AsyncIterator[Load]:
    """Fails where a call was lost, or where the load does not go on to its end.

    `patience_seconds`: for an answer, and in the end for one more of each caller.
    """
    load = Load(gateways, kinds, patience_seconds)
    callers = [asyncio.create_task(load.call_on(number)) for number in range(CALLERS)]
    try:
        yield load
        answered = load.answered
        await soon(lambda: load.answered > answered + CALLERS, "the load goes on", patience_seconds)
    finally:
        for caller in callers:
            caller.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
    assert not load.lost, load.lost
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def drained(gateway: GatewayProcess, name: str, mock: Mock, start: Callable[[], Mock]) -> Mock:
    """An operator waits until nothing runs there, and lets it in when it answers again."""
    with admin_of(gateway) as admin:
        await asyncio.to_thread(admin, "POST", "/drain", json={"replica": name})
        await soon(lambda: not replicas_of(gateway)[name]["sequences"], "nothing runs there", SECONDS)
        await asyncio.to_thread(mock.stop)
        anew = await asyncio.to_thread(start)
        await soon(lambda: state_of(gateway, name)[0] == "draining", "it answers", SECONDS)
        assert anew.log()["received"] == 0
        await asyncio.to_thread(admin, "POST", "/undrain", json={"replica": name})
    return anew


async def unannounced(gateway: GatewayProcess, name: str, mock: Mock, start: Callable[[], Mock]) -> Mock:
    """It is told to end, finishes what it has, and is started again: nobody tells a gateway."""
    mock.process.terminate()
    assert await asyncio.to_thread(mock.process.wait, SECONDS) == 0
    return await asyncio.to_thread(start)


Restart = Callable[[GatewayProcess, str, Mock, Callable[[], Mock]], Awaitable[Mock]]


async def one_by_one(here: World, gateway: GatewayProcess, name: str, mock: Mock, restart: Restart) -> None:
    """Restart a replica that serves, until it serves again."""
    await soon(lambda: mock.log()["finished"], f"{name} serves", SECONDS)
    port = str(port_of(mock))
    anew = await restart(gateway, name, mock, lambda: here.mock(*OPTIONS, "--port", port))
    await soon(lambda: anew.log()["finished"], f"{name} serves again", SECONDS)
    await soon(lambda: state_of(gateway, name) == ("up", []), f"{name} is up", SECONDS)


@pytest.mark.parametrize("restart", [drained, unannounced])
async def test_a_rolling_restart_loses_no_call(new_world: World, restart: Restart) -> None:
    mocks = {name: new_world.mock(*OPTIONS) for name in NAMES}
    replicas = [{"name": name, "url": mock.url} for name, mock in mocks.items()]
    config, (key,) = new_world.config([{"name": "only", "replicas": replicas}], store=QUICK_STORE)
    gateways = [new_world.gateway(config, key) for _ in range(2)]
    async with under_load(gateways) as load:
        for name, mock in mocks.items():
            await one_by_one(new_world, gateways[0], name, mock, restart)
        assert load.answered
    await soon(gateways[0].is_quiet, "all was given back", SECONDS)
    for gateway in gateways:
        assert 'outcome="failed"' not in gateway.metrics()
