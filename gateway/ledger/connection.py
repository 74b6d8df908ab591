"""One connection to the store.  Any error and any late reply closes it: what was sent may or may not have happened."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.events import Observer, StoreAnswered
from gateway.ledger.scripts import fleet_keys, load

log = logging.getLogger(__name__)

SCRIPTS = ("step", "hello", "configure", "page", "snapshot")
REPLY_SECONDS = 1.0
"""A store that has not answered by then is away; commands are idempotent, so they are simply sent again."""
LISTEN_AGAIN_SECONDS = 0.25

T = TypeVar("T")


class StoreAway(Exception):
    """The store refused, broke off or was late."""


def new_client(url: str) -> redis.asyncio.Redis:
    """redis-py's own retries are off: they would run a script twice behind the batch numbers.

    Its socket time-out is off too: every command has our own deadline, and a subscription waits for ever.
    """
    return redis.asyncio.Redis.from_url(
        url,
        single_connection_client=True,
        socket_timeout=None,
        socket_connect_timeout=REPLY_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
    )


async def close_client(client: redis.asyncio.Redis) -> None:
    """Never raises: nobody is left to care."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(REPLY_SECONDS):
            await client.aclose()


async def listen(url: str, channel: str, heard: Callable[[], None]) -> None:
    """Call `heard` for each message, once the subscription stands, and when it breaks off; until cancelled.

    A store that ends closes this connection, so an idle process learns of it at once and not at its next heartbeat.
    """
    while True:
        client = new_client(url)
        try:
            async with client.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                async for _ in pubsub.listen():
                    heard()
        except (RedisError, OSError):
            heard()
        except Exception:
            log.exception("the subscription to %s failed", channel)
        finally:
            await close_client(client)
        await asyncio.sleep(LISTEN_AGAIN_SECONDS)


class Connection:
    """Used by one task at a time."""

    def __init__(
        self, url: str, fleet: str, observer: Observer, reply_seconds: float = REPLY_SECONDS
    ) -> None:
        self.run_id = ""
        """Of the server process at the other end; another one than before may have lost its data."""
        self._url = url
        self._keys = fleet_keys(fleet)
        self._observer = observer
        self._reply_seconds = reply_seconds
        self._client: redis.asyncio.Redis | None = None

    async def open(self) -> None:
        """Connect, load the scripts and learn the run id, in one round trip.  Raises StoreAway."""
        await self.close()
        client = self._client = new_client(self._url)
        pipeline = client.pipeline(transaction=False)
        for name in SCRIPTS:
            pipeline.execute_command("SCRIPT LOAD", load(name).text)
        pipeline.execute_command("INFO", "server")
        replies = await self._answered(pipeline.execute())
        self.run_id = str(replies[-1]["run_id"])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await close_client(client)

    async def evaluate(self, script: str, *arguments: Any) -> Any:
        """Run a script on the fleet's keys.  Raises StoreAway."""
        if self._client is None:
            raise StoreAway("not connected")
        command = ("EVALSHA", load(script).sha, len(self._keys), *self._keys, *arguments)
        return await self._answered(self._client.execute_command(*command))  # type: ignore[no-untyped-call]

    async def _answered(self, reply: Awaitable[T]) -> T:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._reply_seconds):
                answer = await reply
        except (RedisError, OSError, TimeoutError) as failure:
            await self.close()
            raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
        self._observer(StoreAnswered((time.monotonic() - started) * 1000))
        return answer
