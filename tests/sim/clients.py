"""Clients: they call, read at their own speed, leave when they like, and come back after a refusal."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.http.relay import AnswerCutOff
from tests.flow.driver import Visitor
from tests.sim.gateways import FLEET, Gateway

ATTEMPTS_MAX = 4
TURNS_MAX = 5
GOES_ON_SHARE = 0.8
THINK_SECONDS = (0.1, 3.0)
KEYS = ("high", "normal", "normal", "normal", "low", "low", "few", "small")


@dataclass(slots=True)
class Visit:
    """One request and who answered it."""

    id: str
    gateway: Gateway
    visitor: Visitor
    began: float
    left: bool = False
    cut: bool = False
    """The answer was no stream and broke, or its process ended while this client did not read."""
    dawdles: bool = False
    over: bool = False


class Crowd:
    """The clients of one world."""

    def __init__(
        self,
        random_: random.Random,
        gateways: Callable[[], Sequence[Gateway]],
        trace: Callable[[str], None],
        talks: random.Random | None = None,
    ) -> None:
        """`gateways`: those that a balancer would send to now.  `talks`: of conversations; None = nobody goes on."""
        self._talks = talks
        self.visits: list[Visit] = []
        self._random = random_
        self._gateways = gateways
        self._trace = trace
        self._clients: dict[asyncio.Task[None], None] = {}

    @property
    def waiting(self) -> list[Visit]:
        return [visit for visit in self.visits if not visit.over]

    async def arrive(self, seconds: float, per_second: float) -> None:
        """Clients come at random for so long, now and then several at once."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        while loop.time() < ends_at:
            await asyncio.sleep(self._random.expovariate(per_second))
            for _ in range(self._random.choice([1, 1, 1, 1, 1, 4])):
                body, key = self._body(), self._random.choice(KEYS)
                work = self._talk(body, key, self._talks) if self._talks else self._live(body, key)
                task = loop.create_task(work)
                self._clients[task] = None
                task.add_done_callback(self._clients.pop)

    async def gone(self) -> None:
        """Return when the last client has gone, its retries included."""
        while self._clients:
            await asyncio.wait(list(self._clients))

    def _body(self) -> dict[str, Any]:
        pick = self._random
        words = pick.choice([1, 9, 60, 300, 560, 900])
        return {
            "model": FLEET,
            "messages": [{"role": "user", "content": "w " * words}],
            "max_tokens": pick.choice([1, 16, 40, 200, 400]) if words < 500 else pick.choice([16, 200]),
            "stream": pick.random() < 0.8,
            **({"n": 2} if pick.random() < 0.1 else {}),
        }

    async def _talk(self, body: dict[str, Any], key: str, talks: random.Random) -> None:
        """A few turns of a conversation of its own."""
        body["messages"][0]["content"] += f"t{talks.getrandbits(32)}"
        for _ in range(TURNS_MAX):
            if not await self._live(body, key) or talks.random() > GOES_ON_SHARE:
                return
            await asyncio.sleep(talks.uniform(*THINK_SECONDS))
            answer = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
            body = {**body, "messages": [*body["messages"], *answer]}

    async def _live(self, body: dict[str, Any], key: str) -> bool:
        """Whether it was answered."""
        for _ in range(ATTEMPTS_MAX):
            gateways = self._gateways()
            if gateways:
                visit = await self._visit(self._random.choice(gateways), body, key)
                if visit.left or visit.visitor.status not in (0, 429, 503):
                    return visit.visitor.status == 200 and not visit.left and not visit.cut
                wait_ms = int(visit.visitor.header("retry-after-ms") or 200)
            else:
                wait_ms = 500
            await asyncio.sleep(min(wait_ms / 1000, 3) * self._random.uniform(1, 1.25))
        return False

    async def _visit(self, gateway: Gateway, body: dict[str, Any], key: str) -> Visit:
        loop = asyncio.get_running_loop()
        id_ = f"v{len(self.visits)}"
        headers = {"x-request-id": id_, "authorization": f"Bearer kvg_{key}"}
        visitor = Visitor(gateway.app, body, headers=headers)
        visit = Visit(id_, gateway, visitor, loop.time())
        self.visits.append(visit)
        self._trace(f"{id_} of {key} visits {gateway}")
        task = gateway.visit(visitor.run())
        moods = [asyncio.create_task(mood) for mood in self._moods(visit)]
        gone = asyncio.create_task(gateway.ended.wait())
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        for other in (*moods, gone):
            other.cancel()
        if task.cancelled():
            visit.cut = visit.dawdles
        elif task.done() and (error := task.exception()):
            if not isinstance(error, AnswerCutOff):
                raise error
            visit.cut = True
        visit.over = True
        self._trace(f"{id_} ended {visitor.status}{' left' if visit.left else ''}")
        return visit

    def _moods(self, visit: Visit) -> list[Any]:
        mood = self._random.random()
        if mood < 0.2:
            return [self._leave(visit, self._random.expovariate(1))]
        if mood < 0.3:
            return [self._dawdle(visit, self._random.expovariate(2), self._random.uniform(0.1, 6))]
        return []

    async def _leave(self, visit: Visit, seconds: float) -> None:
        await asyncio.sleep(seconds)
        visit.left = True
        visit.visitor.leave()

    async def _dawdle(self, visit: Visit, after_seconds: float, seconds: float) -> None:
        await visit.visitor.begun.wait()
        await asyncio.sleep(after_seconds)
        visit.dawdles = True
        visit.visitor.stop_reading()
        try:
            await asyncio.sleep(seconds)
        finally:
            visit.visitor.read_on()
