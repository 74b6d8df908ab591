"""Clients of gateways that meet a fault: each says how its call went, in the words of `docs/reliability.md`."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.processes import GatewayProcess
from tests.wire import Wire, completion, post, soon

COMPLETE = "complete"
LOST = "connection lost"
ENDED_SECONDS = 40.0


def error_event(code: str) -> str:
    return f"error event `{code}`"


def refused(status: int, code: str) -> str:
    return f"{status} `{code}`"


class Caller:
    """One client of one gateway; `ending` is there when its call is over."""

    def __init__(
        self, gateway: GatewayProcess, group: str, tokens: int, output_tokens: int, **script: Any
    ) -> None:
        """`group` is what the table calls clients like this one; `tokens` count the prompt, too; `script` is the mock
        engine's."""
        self.gateway = gateway
        self.group = group
        self.replica = ""
        """As the answer's header names it."""
        self.streams = False
        """Its answer has begun, and is not over."""
        self.ending = ""
        self.queue_ms = 0
        self._output_tokens = output_tokens
        self._body = completion(tokens - output_tokens, output_tokens, stream=True, **script)
        self._wire: Wire | None = None
        self._task = asyncio.create_task(self._run())

    async def ended(self) -> str:
        async with asyncio.timeout(ENDED_SECONDS):
            await asyncio.wait([self._task])
        self._task.result()
        return self.ending

    def leave(self) -> None:
        if self._wire:
            self._wire.reset()

    async def _run(self) -> None:
        try:
            self.ending = await self._call()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.ending = LOST
        finally:
            self.streams = False
            self.leave()

    async def _call(self) -> str:
        self._wire = await Wire.open(self.gateway.url)
        await self._wire.send(post(self.gateway.key, self._body))
        status, headers = await self._wire.head()
        self.queue_ms = int(headers.get("x-kvgate-queue-ms", "0"))
        if status != 200:
            return refused(status, (await self._wire.rest())["error"]["code"])
        self.replica = headers["x-kvgate-replica"]
        self.streams = True
        return self._judge(await self._wire.events())

    def _judge(self, events: list[bytes]) -> str:
        """An answer that ended without a word is no success, and neither is one with tokens missing."""
        if not events or events[-1] != b"data: [DONE]":
            return "cut off without a word"
        last = json.loads(events[-2].removeprefix(b"data: "))
        if "error" in last:
            return error_event(last["error"]["code"])
        tokens = sum(b'"text":' in event for event in events)
        return COMPLETE if tokens == self._output_tokens else f"{tokens} of {self._output_tokens} tokens"


class Crowd:
    """All clients of a scene."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def add(self, caller: Caller) -> Caller:
        self.callers.append(caller)
        return caller

    def streaming(self) -> int:
        return sum(caller.streams for caller in self.callers)

    def open_calls(self) -> int:
        return sum(not caller.ending for caller in self.callers)

    async def begun(self, count: int) -> None:
        """So many streams have begun."""
        await soon(lambda: self.streaming() >= count, f"{count} streams have begun")

    async def ended(self) -> None:
        await asyncio.gather(*(caller.ended() for caller in self.callers))

    def endings(self, which: Callable[[Caller], bool] = lambda caller: True) -> dict[str, dict[str, int]]:
        """Group -> ending -> clients."""
        found: dict[str, Counter[str]] = {}
        for caller in filter(which, self.callers):
            found.setdefault(caller.group, Counter())[caller.ending] += 1
        return {group: dict(counts) for group, counts in found.items()}
