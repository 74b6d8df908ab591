"""An engine that stores one response in the background, and the gateway that follows it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tests.flow.engines import Peer, RawEngine, raw_engine, whole
from tests.flow.world import World, gateway

PATH = "/v1/responses"
BLOCKS = 1
"""What the response holds."""
USAGE = {"input_tokens": 4, "output_tokens": 3}


class StoringEngine:
    """One response, and what is asked about it."""

    def __init__(self) -> None:
        self.status = "queued"
        """As vLLM has it until the end."""
        self.known = True
        """False: it is asked for in vain."""
        self.asked: list[str] = []
        """Methods; and `POST cancel`."""
        self.answer: bytes | None = None
        """To the first request, in place of the usual."""
        self.body: dict[str, Any] = {}

    async def play(self, peer: Peer, body: bytes) -> None:
        method, path, _ = peer.head.split(b"\r\n")[0].decode().split()
        self.asked.append(f"{method} {path.rpartition('/')[2]}" if path.endswith("/cancel") else method)
        if path == PATH:
            self.body = json.loads(body)
            return await self.begin(peer)
        if path.endswith("/cancel"):
            self.status = "cancelled"
        await peer.send(self.shown())

    async def begin(self, peer: Peer) -> None:
        """Answer the request that it came with."""
        await peer.send(self.answer or self.shown())

    def shown(self) -> bytes:
        if not self.known:
            return whole(404, b'{"error": {"message": "not found"}}')
        usage = USAGE if self.status in ("completed", "incomplete") else None
        response = {"id": self.body.get("request_id"), "status": self.status, "usage": usage, "output": []}
        return whole(200, json.dumps(response).encode())


Stores = TypeVar("Stores", bound=StoringEngine)


@asynccontextmanager
async def listening(engine: StoringEngine) -> AsyncIterator[RawEngine]:
    async def script(peer: Peer) -> None:
        await engine.play(peer, here.bodies[-1])

    async with raw_engine(script) as here:
        yield here


@asynccontextmanager
async def following(store_url: str, engine: Stores, **options: Any) -> AsyncIterator[tuple[World, Stores]]:
    """A gateway in front of it."""
    async with listening(engine) as raw, gateway(store_url, {"a": raw.url}, **options) as world:
        yield world, engine


async def held(world: World) -> int:
    """Blocks that the store counts as reserved."""
    found: int = (await world.ledger.state())["reserved"]
    return found
