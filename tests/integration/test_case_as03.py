"""AS-03: what the keys file says of a key counts in every process, also while the key is in use.

That it does within a second is for a clock that can be given: see `tests/unit/test_reload.py`.  Here two processes get
ten calls a second of one key, streams that last longer than that second.  The key is blocked, then
its quota is lowered, then its secret is replaced.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.http.auth import new_key
from tests.integration.arrivals import Arrivals, Seen, arriving
from tests.processes import QUICK_STORE, GatewayProcess, World
from tests.wire import Answer, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PROCESSES, PER_SECOND = 2, 10
BEFORE_SECONDS, AFTER_SECONDS = 1.0, 1.0
"""Traffic before a change, and after both processes know of it."""
STREAM, BLOCKS = completion(16, 60, stream=True), blocks_of(16, 60)
STEP_MS = 50
"""So that a stream takes 3 s: some run at the change."""
SHORT = completion(16, 1)
DAILY, LOWERED = 200, 5
NAME = "k1"


@dataclass
class Scene:
    gateways: list[GatewayProcess]
    arrivals: list[Arrivals]
    """Of each process."""
    keys: Path

    def running(self) -> int:
        """Streams that have begun and are not over."""
        return sum(arrivals.blocks.total() for arrivals in self.arrivals) // BLOCKS

    def sent(self, start: float, end: float = math.inf) -> list[list[Seen]]:
        """To each process."""
        return [arrivals.between(start, end) for arrivals in self.arrivals]

    async def change(self, *rows: dict[str, Any]) -> float:
        """Write the keys file whole, as a careful operator does; when it was written."""
        await asyncio.sleep(BEFORE_SECONDS)
        await soon(lambda: self.running() >= PER_SECOND / 2, "streams run")
        new = self.keys.with_suffix(".new")
        new.write_text(json.dumps(rows))
        os.replace(new, self.keys)
        return time.monotonic()

    async def followed(self, changed: float) -> float:
        """When both processes had refused a call that came after the change.  The traffic goes on for a while."""
        await soon(
            lambda: all(any(seen.status != 200 for seen in calls) for calls in self.sent(changed)),
            "both processes follow",
        )
        known = time.monotonic()
        await asyncio.sleep(AFTER_SECONDS)
        return known

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.keys.read_text())
        return found


@asynccontextmanager
async def scene(world: World, **limits: int) -> AsyncIterator[Scene]:
    """On leaving, every stream that had begun has come to its end."""
    mock = world.mock("--blocks", "4001", "--step-base-ms", str(STEP_MS))
    key = {"name": NAME, "limits": limits}
    config, (secret,) = world.config([{"name": "only", "replicas": [mock.url]}], key, store=QUICK_STORE)
    gateways = [world.gateway(config, secret, wait=False) for _ in range(PROCESSES)]
    for gateway in gateways:
        gateway.wait_ready()
    async with AsyncExitStack() as stack:
        coming = [arriving([gateway], STREAM, PER_SECOND // PROCESSES) for gateway in gateways]
        arrivals = [await stack.enter_async_context(one) for one in coming]
        yield Scene(gateways, arrivals, world.folder / "keys.yaml")
    for gateway in gateways:
        await soon(gateway.is_quiet, "all is given back")


def answers_of(calls: list[Seen]) -> set[tuple[int, str]]:
    return {(seen.status, seen.code) for seen in calls}


async def test_a_blocked_key(new_world: World) -> None:
    """New calls are refused; running streams go on."""
    async with scene(new_world) as here:
        blocked = {**here.rows()[0], "expires": "2020-01-01"}
        changed = await here.change(blocked)
        known = await here.followed(changed)
    for arrivals in here.arrivals:
        assert answers_of(arrivals.answered(0, changed)) == {(200, "")}, (
            "each of these was followed to its end"
        )
    for after in here.sent(known):
        assert answers_of(after) == {(401, "invalid_api_key")}


async def test_a_lowered_quota(new_world: World) -> None:
    """What was used stays used, and both processes go by the lower limit: together they give what it leaves."""
    async with scene(new_world, requests_per_day=DAILY) as here:
        changed = await here.change({**here.rows()[0], "limits": {"requests_per_day": LOWERED}})
        known = await here.followed(changed)
        answers = [await ask(gateway.url, post(gateway.key, SHORT)) for gateway in here.gateways]
    for answer in answers:
        assert (answer.status, answer.code) == (429, "quota_exceeded")
        assert answer.headers["x-ratelimit-limit-requests"] == str(LOWERED)
    for after in here.sent(known):
        assert answers_of(after) == {(429, "quota_exceeded")}, "more than the lower limit was used before"


async def test_a_replaced_secret(new_world: World) -> None:
    """The old one is refused, and the new one goes on with what the old one has left of the quota."""
    async with scene(new_world, requests_per_day=DAILY) as here:
        secret, digest = new_key()
        changed = await here.change({**here.rows()[0], "sha256": digest})
        known = await here.followed(changed)
        first = await asyncio.gather(*(ask(gateway.url, post(secret, SHORT)) for gateway in here.gateways))
    for after in here.sent(known):
        assert answers_of(after) == {(401, "invalid_api_key")}
    used = sum(seen.status == 200 for calls in here.sent(0) for seen in calls)
    assert used >= PER_SECOND * BEFORE_SECONDS / 2
    left = DAILY - used
    assert sorted(remaining(answer) for answer in first) == [left - 2, left - 1]
    await expect_used_up(here.gateways, secret, left - len(first))


def remaining(answer: Answer) -> int:
    assert answer.status == 200, answer
    return int(answer.headers["x-ratelimit-remaining-requests"])


async def expect_used_up(gateways: list[GatewayProcess], secret: str, left: int) -> None:
    """After exactly so many more calls, at whichever process."""
    request = post(secret, SHORT)
    urls = [gateways[number % PROCESSES].url for number in range(left)]
    answers = await asyncio.gather(*(ask(url, request) for url in urls))
    assert sorted(remaining(answer) for answer in answers) == list(range(left))
    for gateway in gateways:
        answer = await ask(gateway.url, request)
        assert (answer.status, answer.code) == (429, "quota_exceeded")
