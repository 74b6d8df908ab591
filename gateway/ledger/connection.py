"""One connection to the store.  Any error and any late reply closes it: what was sent may or may not have happened."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.core.events import Observer, StoreAnswered
from gateway.ledger.scripts import fleet_keys, load
from gateway.ledger.wire import StoreAway, Take, Wire, connect

log = logging.getLogger(__name__)

SCRIPTS = ("step", "hello", "configure", "page", "snapshot")
REPLY_SECONDS = 1.0
"""A store that has not answered by then is away; commands are idempotent, so they are simply sent again."""
LISTEN_AGAIN_SECONDS = 0.25
_RUN_ID = re.compile(rb"run_id:(\w+)")


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
    """Used by one task at a time, but for `evaluate` itself, which only sends."""

    def __init__(
        self, url: str, fleet: str, observer: Observer, reply_seconds: float = REPLY_SECONDS
    ) -> None:
        self.run_id = ""
        """Of the server process at the other end; another one than before may have lost its data."""
        self._url = url
        self._keys = fleet_keys(fleet)
        self._observer = observer
        self._reply_seconds = reply_seconds
        self._wire = Wire()

    async def open(self) -> None:
        """Connect, load the scripts and learn the run id, in one round trip.  Raises StoreAway."""
        self.close()
        try:
            async with asyncio.timeout(self._reply_seconds):
                wire = self._wire = await connect(self._url)
                loads = [wire.submit(("SCRIPT", "LOAD", load(name).text)) for name in SCRIPTS]
                *_, info = await asyncio.gather(*loads, wire.submit(("INFO", "server")))
        except (OSError, TimeoutError) as failure:
            self.close()
            raise StoreAway(f"{type(failure).__name__}: {failure}") from failure
        self.run_id = _RUN_ID.findall(info)[0].decode()

    def close(self) -> None:
        self._wire.end("closed by this side")

    def evaluate(self, script: str, *arguments: Any, take: Take | None = None) -> Awaitable[Any]:
        """Run a script on the fleet's keys; it is sent before this returns.

        `take` gets the reply as it arrives, its result is what the caller awaits.  Raises StoreAway when awaited.
        """
        command = ("EVALSHA", load(script).sha, len(self._keys), *self._keys, *arguments)
        loop, wire, started = asyncio.get_running_loop(), self._wire, time.monotonic()
        late = loop.call_later(self._reply_seconds, wire.end, f"no reply within {self._reply_seconds:g} s")

        def taken(reply: Any) -> Any:
            late.cancel()
            self._observer(StoreAnswered((time.monotonic() - started) * 1000))
            return take(reply) if take else reply

        answer = wire.submit(command, taken)
        answer.add_done_callback(lambda _: late.cancel())
        return answer
