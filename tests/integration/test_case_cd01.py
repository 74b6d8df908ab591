"""CD-01: calls that ask at the same instant, of one gateway process or of several, never get more than there is.

Of 64 calls 10 fit.  In most rounds the engine holds the admitted ones until every other call was refused, and then
their clients leave; in the last rounds they hold 2 s and are answered.  Nothing is given back while calls are judged,
so what is reserved after the last refusal is the most that was reserved in the round.
"""

import asyncio
from typing import Any

import pytest

from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Answer, Wire, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CALLS, PLACES = 64, 10
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 1201
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
BUDGET = PLACES * BLOCKS
ANSWERED_ROUNDS = 2
"""Of the rounds: those with the whole hold of 2 s."""
JUDGED_SECONDS = 10.0


class Crowd:
    """64 clients, each with a connection of its own to one of the gateways."""

    def __init__(self, gateways: list[GatewayProcess], mock: Mock) -> None:
        self.gateways = gateways
        self.mock = mock
        self.wires: list[Wire] = []

    async def gather(self) -> None:
        urls = [self.gateways[number % len(self.gateways)].url for number in range(CALLS)]
        self.wires = list(await asyncio.gather(*map(Wire.open, urls)))

    async def rush(self, hold_seconds: float) -> list[asyncio.Task[Answer]]:
        """All calls at once: every request is written before anything else happens."""
        body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, hold_seconds=hold_seconds, output_tokens=1)
        request = post(self.gateways[0].key, body)
        tasks = [asyncio.create_task(wire.ask(request)) for wire in self.wires]
        await soon(
            lambda: sum(t.done() for t in tasks) >= CALLS - PLACES, "all others are refused", JUDGED_SECONDS
        )
        await soon(
            lambda: self.mock.log()["received"] >= PLACES, "the engine has the admitted ones", JUDGED_SECONDS
        )
        return tasks

    async def round(self, code: str, answered: bool) -> None:
        await self.gather()
        tasks = await self.rush(2 if answered else 60)
        state = self.gateways[0].state()
        assert (state["reserved"], state["leases"], state["queue"]) == (BUDGET, PLACES, 0)
        refused = [task.result() for task in tasks if task.done()]
        assert [(answer.status, answer.code) for answer in refused] == [(429, code)] * (CALLS - PLACES)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        if answered:
            answers = await asyncio.gather(*tasks)
            assert sorted(answer.status for answer in answers) == [200] * PLACES + [429] * (CALLS - PLACES)
        await self.leave(tasks)

    async def leave(self, tasks: list[asyncio.Task[Answer]]) -> None:
        for task in tasks:
            task.cancel()
        for wire in self.wires:
            wire.reset()
        await asyncio.gather(*tasks, return_exceptions=True)
        await soon(self.is_quiet, "all is given back")
        assert self.mock.log()["received"] == PLACES, "no refused call reached the engine"
        self.mock.reset()

    def is_quiet(self) -> bool:
        return all(gateway.is_quiet() for gateway in self.gateways) and self.engine_is_done()

    def engine_is_done(self) -> bool:
        log = self.mock.log()
        return bool(log["received"] == log["finished"] + log["aborted"])


def start(world: World, processes: int, blocks: int, key: dict[str, Any]) -> Crowd:
    mock = world.mock("--blocks", str(blocks + 1), "--step-base-ms", "1")
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (secret,) = world.config(pools, key, queue={"depth_max": 0}, store=QUICK_STORE)
    gateways = [world.gateway(config, secret, wait=False) for _ in range(processes)]
    for gateway in gateways:
        gateway.wait_ready()
    return Crowd(gateways, mock)


@pytest.mark.parametrize(("processes", "rounds"), [(1, 16), (2, 50), (4, 16)])
async def test_budget(new_world: World, processes: int, rounds: int) -> None:
    crowd = start(new_world, processes, BUDGET, {})
    for number in range(rounds):
        await crowd.round("capacity_exceeded", answered=number >= rounds - ANSWERED_ROUNDS)


async def test_cap_of_a_key(new_world: World) -> None:
    """The same for what one key may hold, where the engine has room for all."""
    crowd = start(new_world, 2, CALLS * BLOCKS, {"limits": {"blocks_max": BUDGET}})
    for number in range(5):
        await crowd.round("quota_exceeded", answered=number == 4)


@pytest.mark.parametrize(("processes", "rounds"), [(1, 16), (2, 18), (4, 16)])
async def test_tokens_per_minute_of_a_key(new_world: World, processes: int, rounds: int) -> None:
    """The same for a rate quota: what leavers were charged comes back, what is answered is charged as it was."""
    limits = {"output_tokens_per_minute": PLACES * OUTPUT_TOKENS}
    crowd = start(new_world, processes, CALLS * BLOCKS, {"limits": limits})
    for number in range(rounds):
        await crowd.round("quota_exceeded", answered=number >= rounds - ANSWERED_ROUNDS)
