"""Engines that speak HTTP on simulated connections: they stream at a speed of their own, fail, hang and reset."""

import asyncio
import json
import random
from typing import Any

import httptools

from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, chunk, event, whole
from tests.sim.loop import Process
from tests.sim.network import Listener, Network, Transport

BLOCK_SIZE = 16
PREFILL_TOKENS_PER_SECOND = 6000
TOKEN_SECONDS = (0.02, 0.09)
SLOW_TOKEN_SECONDS = (0.3, 1.2)
"""Of a few calls, so that some streams outlive a lease."""
SLOW_SHARE = 0.15
OUTPUT_TOKENS_MAX = 24
TOKENS_AN_EVENT = (1, 8, 20)
"""Of streams that tell their usage in each event, so that some grow."""
UNTOLD_SHARE = 0.05
"""Of these, that leave it out once."""
TROUBLES = ("status", "first event", "no choice", "reset early", "reset late", "hang early", "hang late")


class Engine:
    """One engine.  Its capacity is what its gateways are told; who holds it is the judge's business."""

    def __init__(self, name: str, pool: str, blocks: int, network: Network, seed: str) -> None:
        self.name = name
        self.pool = pool
        self.blocks = blocks
        """Including the null block."""
        self.mode = "guaranteed"
        """Of the ledger: how calls are charged there."""
        self.trouble_share = 0.0
        """Of calls that fail."""
        self.hangs = False
        self.started_at = 1.0
        self.process = Process(name)
        self.connections: dict[EngineConnection, None] = {}
        self.random = random.Random(seed)
        self.network = network
        self.listener: Listener = network.listen(name, lambda: EngineConnection(self), self.process.context)

    @property
    def url(self) -> str:
        return f"http://{self.name}:8000"

    def crash(self) -> None:
        self.listener.refuses = True
        for connection in self.network.between(None, self.name):
            self.network.cut(connection)

    def start(self) -> None:
        """Another process, with another cache."""
        self.started_at += 1.0
        self.listener.refuses = False

    def trouble(self) -> str:
        return self.random.choice(TROUBLES) if self.random.random() < self.trouble_share else ""


class EngineConnection(asyncio.Protocol):
    """One connection; requests on it follow one another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._engine.connections[self] = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = json.loads(self._body), b""
        self._task = asyncio.create_task(self._serve(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.pop(self, None)
        if self._task:
            self._task.cancel()

    def _write(self, *parts: bytes) -> None:
        assert self._transport is not None
        for part in parts:
            self._transport.write(part)

    def _reset(self) -> None:
        engine = self._engine
        for connection in engine.network.between(None, engine.name):
            if connection.server is self._transport:
                engine.network.cut(connection)

    async def _serve(self, body: dict[str, Any]) -> None:
        trouble, pick = self._engine.trouble(), self._engine.random
        prompt = prompt_tokens(body)
        await self._wait(prompt / PREFILL_TOKENS_PER_SECOND)
        if trouble == "hang early":
            await asyncio.Event().wait()
        if trouble == "reset early":
            return self._reset()
        if trouble == "status":
            return self._write(whole(pick.choice([500, 503]), b'{"error": {"message": "no"}}'))
        tokens = pick.randint(1, min(body["max_tokens"], OUTPUT_TOKENS_MAX))
        if body["stream"]:
            meter = None
            if body.get("stream_options", {}).get("continuous_usage_stats"):
                meter = Meter(prompt, body["max_tokens"], pick)
            await self._stream(prompt, tokens, trouble, meter)
        else:
            await self._wait(tokens * sum(TOKEN_SECONDS) / 2)
            self._write(whole(200, json.dumps(answer(prompt, tokens)).encode()))

    async def _stream(self, prompt: int, tokens: int, trouble: str, meter: "Meter | None") -> None:
        pick = self._engine.random
        pace = SLOW_TOKEN_SECONDS if pick.random() < SLOW_SHARE else TOKEN_SECONDS
        self._write(STREAM_HEAD)
        if trouble == "first event":
            return self._write(chunk(b'data: {"error": {"message": "no"}}\n\n' + DONE), LAST_CHUNK)
        if trouble == "no choice":
            return self._write(chunk(DONE), LAST_CHUNK)
        for number in range(tokens):
            if trouble.endswith("late") and number == tokens // 2:
                if trouble == "hang late":
                    await asyncio.Event().wait()
                return self._reset()
            told = event("x", "length" if number == tokens - 1 else None)
            if meter is not None:
                told = meter.told(event("x", "stop" if number == tokens - 1 else None), number + 1)
            self._write(chunk(told))
            await self._wait(pick.uniform(*pace))
        frame = {**answer(prompt, tokens if meter is None else meter.written(tokens)), "choices": []}
        self._write(chunk(b"data: " + json.dumps(frame).encode() + b"\n\n" + DONE), LAST_CHUNK)

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._engine.hangs:
            await asyncio.sleep(0.05)


class Meter:
    """What a stream tells of itself in each event."""

    def __init__(self, prompt: int, tokens_max: int, pick: random.Random) -> None:
        self._prompt = prompt
        self._tokens_max = tokens_max
        self._stride = pick.choice(TOKENS_AN_EVENT)
        self._untold = pick.randint(1, OUTPUT_TOKENS_MAX) if pick.random() < UNTOLD_SHARE else 0

    def written(self, number: int) -> int:
        """Tokens after so many events."""
        return min(number * self._stride, self._tokens_max)

    def told(self, frame: bytes, number: int) -> bytes:
        if number == self._untold:
            return frame
        usage = json.dumps(answer(self._prompt, self.written(number))["usage"]).encode()
        return frame.removesuffix(b"}\n\n") + b',"usage":' + usage + b"}\n\n"


def prompt_tokens(body: dict[str, Any]) -> int:
    """A token a word, and what the chat template adds."""
    return sum(len(message["content"].split()) + 4 for message in body["messages"]) + 3


def blocks_of(body: dict[str, Any]) -> int:
    """The most blocks that the call can hold: the last token's KV is never written."""
    tokens = prompt_tokens(body) + body["max_tokens"] - 1
    return int(body.get("n", 1)) * -(-tokens // BLOCK_SIZE)


def answer(prompt: int, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "demo",
        "choices": [choice],
        "usage": usage,
    }
