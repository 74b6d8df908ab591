"""Has engines compute named beginnings of prompts again before their caches forget them: `core/pins.py` says when.

A call for it is one of the lowest class, admitted like any other, and asks for one token.  Of several gateways the one
that reads an engine's metrics for all makes them; it counts the uses that it sees itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol

from gateway.call import Call
from gateway.core.estimate import Demand
from gateway.core.events import Observer, PinCall, PinUse
from gateway.core.factors import Factors
from gateway.core.headers import pinned
from gateway.core.identity import Identity
from gateway.core.outcomes import Refusal
from gateway.core.pins import FOUND_PART, Page, Pin, PinBook
from gateway.core.route import KeyLimits, route
from gateway.core.salt import FIELD
from gateway.core.sse import inspect_answer
from gateway.estimates import estimate
from gateway.ledger.api import Admission, Grant, Ledger
from gateway.tokens.api import Counter, ModelCounter
from gateway.upstream.api import Access, Engines, UpstreamFailed

log = logging.getLogger(__name__)

KEY = "kvgate/pins"
"""Under which the books have such calls: no key of a client can have that name, and so its caps."""
AT_ONCE_MAX = 4
"""Such calls of one process to the engines of one fleet."""
WAIT_MS = 5_000
"""For its place; the engine's next page asks anew."""
CALL_SECONDS = 30.0
"""For all of it: what takes longer is ended."""


class Ending(StrEnum):
    """How such a call ended."""

    WARM = "warm"
    """The engine had the prefix."""
    COLD = "cold"
    """It had to compute it."""
    UNTOLD = "untold"
    """It does not say (vLLM's `--enable-prompt-tokens-details`)."""
    REFUSED = "refused"
    """There was no place in time."""
    FAILED = "failed"


class Post(Protocol):
    """Sends one body and returns status and answer, within a time.  Raises UpstreamFailed."""

    async def __call__(
        self, base_url: str, path: str, body: bytes, timeout_seconds: float, access: Access
    ) -> tuple[int, bytes]: ...


class PinCounter:
    """Tokens of a prefix before an engine has counted them: as those of any other call."""

    def __init__(
        self, counter: Counter, exact: ModelCounter | None, engines: Engines, factors: Factors
    ) -> None:
        self._counter = counter
        self._exact = exact
        self._engines = engines
        self._factors = factors

    async def count(self, pin: Pin) -> int:
        found = await self._exact.count(pin.request) if self._exact else None
        if found is not None:
            return sum(prompt.tokens for prompt in found)
        shape = self._engines.shape()
        factors = self._factors if shape.learns else None
        counts, _ = await estimate(self._counter, pin.request, shape.token_factor, factors)
        return sum(counted.tokens for counted in counts)


class Pins:
    """Of one fleet."""

    def __init__(
        self,
        fleet: str,
        engines: Engines,
        ledger: Ledger,
        post: Post,
        count: Callable[[Pin], Awaitable[int]],
        observer: Observer,
    ) -> None:
        """`count`: tokens of a prefix, as far as this gateway can tell."""
        self._fleet = fleet
        self._engines = engines
        self._ledger = ledger
        self._post = post
        self._count = count
        self._observer = observer
        self._pins: dict[str, Pin] = {}
        self._class, self._queue_max = "", 0
        self._book = PinBook()
        self._due: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._asked: set[tuple[str, str]] = set()
        """Prefix and replica of what is in the queue or under way: each once, so that the queue is bounded."""

    def use(self, pins: Sequence[Pin], class_: str, queue_max: int) -> None:
        """Those of now, and the class in which their calls are admitted, of which so many may wait."""
        self._pins = {pin.name: pin for pin in pins}
        self._class, self._queue_max = class_, queue_max

    def see_call(self, call: Call) -> None:
        """One of a client's has ended.  A key's own part of the cache has nothing to do with what is kept here, nor has
        an adapter's, and what reads no cache finds nothing in one."""
        if not self._pins or call.grant is None or call.usage is None or call.terms.cache_salt:
            return
        request, adapter = call.generation, self._engines.shape().adapter
        if request.beside is None or FIELD.encode() in request.body:
            return
        for pin in self._pins.values():
            if adapter(pin.request.model) == adapter(request.model) and pin.beginning.is_of(request):
                self._see_use(pin.name, call.grant.replica, call.usage.cached_tokens)

    def _see_use(self, name: str, replica: str, found_tokens: int | None) -> None:
        self._book.use(name, replica, found_tokens)
        known = self._book.tokens(name, replica)
        saved = min(found_tokens or 0, known) if known else 0
        self._observer(PinUse(self._fleet, name, saved))

    def see_page(self, replica: str, page: Page) -> None:
        """What an engine says whose metrics this gateway reads for all."""
        if not self._pins:
            return
        self._book.keep_only(tuple(self._pins), tuple(self._engines.names()))
        for name in self._book.turn(replica, page):
            place = name, replica
            if place not in self._asked:
                self._asked.add(place)
                self._due.put_nowait(place)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(AT_ONCE_MAX):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            place = await self._due.get()
            try:
                await self._ask(*place)
            except Exception:  # a bug of ours costs one such call: the engine's next page asks for another
                log.exception("prefix %s could not be kept on %s", *place)
            finally:
                self._asked.discard(place)

    async def _ask(self, name: str, replica: str) -> None:
        pin = self._pins.get(name)
        if pin is None or not self._engines.knows(replica):
            return
        ending, tokens = Ending.FAILED, 0
        try:
            ending, tokens = await self._reserved(pin, replica)
        except TimeoutError:
            log.warning("the call that keeps prefix %s on %s took too long", name, replica)
        except UpstreamFailed as failed:
            log.warning("the call that keeps prefix %s on %s failed: %s", name, replica, failed.detail)
        self._observer(PinCall(self._fleet, name, ending.value, tokens))

    async def _reserved(self, pin: Pin, replica: str) -> tuple[Ending, int]:
        """How it ended, and how many tokens the engine had to compute.  Raises TimeoutError, UpstreamFailed."""
        async with asyncio.timeout(CALL_SECONDS) as limit:
            tokens = self._book.tokens(pin.name, replica) or await self._count(pin)
            shape = self._engines.shape().only(self._engines.pool(replica))
            demand = route(shape, pin.request, (tokens,), KeyLimits())
            if isinstance(demand, Refusal):
                log.warning("prefix %s does not fit on %s: %s", pin.name, replica, demand.message)
                return Ending.REFUSED, 0
            loop = asyncio.get_running_loop()
            lost = lambda: limit.reschedule(loop.time())  # noqa: E731 - its place is somebody else's now
            reservation = self._ledger.open(self._admission(pin, demand, replica), lost)
            try:
                answer = await reservation.granted()
                if not isinstance(answer, Grant):
                    return Ending.REFUSED, 0
                return await self._sent(pin, answer.replica)
            finally:
                reservation.settle(None, None)

    def _admission(self, pin: Pin, demand: Demand, replica: str) -> Admission:
        request = pin.request
        return Admission(
            key=KEY,
            class_=self._class,
            lane=demand.lane,
            blocks=demand.blocks,
            sequences=demand.sequences,
            prefill=demand.prefill,
            cost=demand.cost,
            wait_ms=WAIT_MS,
            weight=1,
            blocks_max=-1,
            requests_max=-1,
            queue_max=self._queue_max,
            queue_key_max=AT_ONCE_MAX,
            identity=Identity(KEY, f"{request.path} {replica}", request.body),
            exclude=tuple(other for other in self._engines.names() if other != replica),
            body_bytes=len(request.body),
        )

    async def _sent(self, pin: Pin, replica: str) -> tuple[Ending, int]:
        engines, request = self._engines, pin.request
        access = engines.access(replica)
        access = Access(tuple(pinned(access.headers, engines.rank(replica))), access.tls)
        url, sent_at = engines.url(replica), self._book.passed(replica)
        status, answer = await self._post(url, request.path, request.body, CALL_SECONDS, access)
        usage = inspect_answer(answer).usage if status == 200 else None
        if usage is None:
            raise UpstreamFailed(f"the engine answered {status}")
        self._book.asked(pin.name, replica, sent_at, usage.prompt_tokens, usage.cached_tokens)
        written = usage.completion_tokens or 0
        if usage.cached_tokens is None:
            return Ending.UNTOLD, usage.prompt_tokens + written
        warm = usage.cached_tokens >= FOUND_PART * usage.prompt_tokens
        computed = usage.prompt_tokens - usage.cached_tokens + written
        return Ending.WARM if warm else Ending.COLD, computed
