"""One connection to the store.  Any error and any late reply closes it: what was sent may or may not have happened."""

import asyncio
import time
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.events import Observer, StoreAnswered
from gateway.ledger.scripts import fleet_keys, load

SCRIPTS = ("step", "hello", "configure", "page", "snapshot")
REPLY_SECONDS = 1.0
"""A store that has not answered by then is away; commands are idempotent, so they are simply sent again."""


class StoreAway(Exception):
    """The store refused, broke off or was late."""


def new_client(url: str) -> redis.asyncio.Redis:
    """redis-py's own retries are off: they would run a script twice behind the batch numbers."""
    return redis.asyncio.Redis.from_url(
        url,
        single_connection_client=True,
        socket_connect_timeout=REPLY_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
    )


class Connection:
    """Used by one task at a time."""

    def __init__(self, url: str, fleet: str, observer: Observer, reply_seconds: float = REPLY_SECONDS) -> None:
        self._url = url
        self._keys = fleet_keys(fleet)
        self._observer = observer
        self._reply_seconds = reply_seconds
        self._client: redis.asyncio.Redis | None = None

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        """Connect and load the scripts.  Raises StoreAway."""
        await self.close()
        self._client = new_client(self._url)
        for name in SCRIPTS:
            await self._command("SCRIPT LOAD", load(name).text)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            try:
                async with asyncio.timeout(self._reply_seconds):
                    await client.aclose()
            except (RedisError, OSError, TimeoutError):
                return

    async def evaluate(self, script: str, *arguments: Any) -> Any:
        """Run a script on the fleet's keys.  Raises StoreAway."""
        return await self._command("EVALSHA", load(script).sha, len(self._keys), *self._keys, *arguments)

    async def _command(self, *command: Any) -> Any:
        if self._client is None:
            raise StoreAway("not connected")
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._reply_seconds):
                reply = await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as failure:
            await self.close()
            raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
        except asyncio.CancelledError:
            self._client = None
            raise
        self._observer(StoreAnswered((time.monotonic() - started) * 1000))
        return reply
