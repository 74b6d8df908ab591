"""kvgate's own calls that keep a prefix: admitted, sent, counted, and given back whatever becomes of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import pins as room
from gateway.core.events import Event, PinCall, PinUse
from gateway.core.outcomes import Code, Refusal
from gateway.core.pins import Page, Pin, pin_of
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.core.route import FleetShape, PoolShape
from gateway.core.sse import Usage
from gateway.ledger.api import Admission, Grant
from gateway.pins import KEY, Pins
from gateway.upstream.api import Access, UpstreamFailed

TOKENS = 1000
SHAPE = FleetShape(
    name="demo",
    model="demo",
    names=frozenset({"demo"}),
    default_output_tokens=100,
    max_output_tokens=None,
    token_factor=1.0,
    speculative_tokens=0,
    share_prompt_of_n=False,
    pools=(PoolShape("all", None, 8192, 16, 4096, 256),),
    bases=frozenset({"demo", "alias"}),
)


GRANT = Grant("a", 0, False)


class Engines:
    def shape(self) -> FleetShape:
        return SHAPE

    def knows(self, replica: str) -> bool:
        return replica in self.names()

    def names(self) -> tuple[str, ...]:
        return "a", "b"

    def url(self, replica: str) -> str:
        return f"http://{replica}"

    def rank(self, replica: str) -> int | None:
        return 3

    def access(self, replica: str) -> Access:
        return Access.of("secret")

    def pool(self, replica: str) -> str:
        return "all"


class Books:
    """A ledger that gives the answer that a test wants, and one reservation after the other."""

    def __init__(self, answer: Grant | Refusal | None) -> None:
        self.answer = answer
        """None = it never comes."""
        self.admissions: list[Admission] = []
        self.settled = 0
        self.lost: Callable[[], None] = lambda: None

    def open(self, admission: Admission, lost: Callable[[], None]) -> "Books":
        self.admissions.append(admission)
        self.lost = lost
        return self

    async def granted(self) -> Grant | Refusal:
        return self.answer or await asyncio.get_running_loop().create_future()

    def settle(self, used_blocks: int | None, cost: int | None) -> None:
        self.settled += 1


class World:
    def __init__(self, answer: Grant | Refusal | None = GRANT) -> None:
        self.books = Books(answer)
        self.facts: list[Event] = []
        self.sent: list[tuple[str, str, dict[str, Any], dict[bytes, bytes]]] = []
        self.answer: Callable[[], Awaitable[tuple[int, bytes]]] = answered(cached_tokens=TOKENS - 16)
        pin = pin_of("clerk", "demo", None, [{"role": "system", "content": "Be brief."}], None)
        assert isinstance(pin, Pin)
        made: Any = Pins("demo", Engines(), self.books, self._post, self._count, self.facts.append)  # type: ignore[arg-type]
        self.pins: Pins = made
        self.pins.use([pin], "low", 7)

    async def _count(self, pin: Pin) -> int:
        return TOKENS

    async def _post(
        self, base_url: str, path: str, body: bytes, timeout_seconds: float, access: Access
    ) -> tuple[int, bytes]:
        self.sent.append((base_url, path, json.loads(body), dict(access.headers)))
        return await self.answer()

    def is_due(self, replica: str = "a") -> None:
        """A call has begun with it, and then more has passed than its engine had free."""
        self.pins.see_page(replica, Page(0, 0, 10_000))
        self.pins._see_use("clerk", replica, 0)
        self.pins.see_page(replica, Page(20_000, 0, 10_000))

    async def play(self, *, until: Callable[[], object]) -> None:
        task = asyncio.create_task(self.pins.run())
        async with asyncio.timeout(30):
            while not until():
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def ended(self) -> list[PinCall]:
        return [fact for fact in self.facts if isinstance(fact, PinCall)]


def answered(
    status: int = 200, cached_tokens: int | None = None
) -> Callable[[], Awaitable[tuple[int, bytes]]]:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 1, "prompt_tokens_details": details}
    body = json.dumps({"choices": [{"finish_reason": "length"}], "usage": usage}).encode()

    async def answer() -> tuple[int, bytes]:
        return status, body

    return answer


async def test_it_is_admitted_for_one_replica_and_asks_for_one_token() -> None:
    world = World()
    world.is_due()
    await world.play(until=lambda: world.ended)
    (admission,) = world.books.admissions
    assert (admission.key, admission.class_, admission.queue_max, admission.exclude) == (
        KEY,
        "low",
        7,
        ("b",),
    )
    assert (admission.blocks, admission.sequences, admission.lane) == (TOKENS // 16 + 1, 1, "all")
    ((url, path, body, headers),) = world.sent
    assert (url, path, body["max_tokens"]) == ("http://a", "/v1/chat/completions", 1)
    assert headers == {b"authorization": b"Bearer secret", b"x-data-parallel-rank": b"3"}
    assert world.ended == [PinCall("demo", "clerk", "warm", 16 + 1)]
    assert world.books.settled == 1


@pytest.mark.parametrize(
    ("answer", "ending", "tokens"),
    [
        (answered(cached_tokens=0), "cold", TOKENS + 1),
        (answered(), "untold", TOKENS + 1),
        (answered(500), "failed", 0),
    ],
)
async def test_how_it_ended_is_told(
    answer: Callable[[], Awaitable[tuple[int, bytes]]], ending: str, tokens: int
) -> None:
    world = World()
    world.answer = answer
    world.is_due()
    await world.play(until=lambda: world.ended)
    assert world.ended == [PinCall("demo", "clerk", ending, tokens)]
    assert world.books.settled == 1


async def test_without_a_place_nothing_is_sent() -> None:
    world = World(Refusal(Code.QUEUE_TIMEOUT, "full"))
    world.is_due()
    await world.play(until=lambda: world.ended)
    assert (world.ended[0].ending, world.sent, world.books.settled) == ("refused", [], 1)


async def test_an_engine_that_breaks_costs_one_call() -> None:
    world = World()

    async def broken() -> tuple[int, bytes]:
        raise UpstreamFailed("reset")

    world.answer = broken
    world.is_due()
    await world.play(until=lambda: world.ended)
    assert (world.ended[0].ending, world.books.settled) == ("failed", 1)
    world.answer = answered(cached_tokens=TOKENS)
    world.pins.see_page("a", Page(40_000, 0, 10_000))
    await world.play(until=lambda: len(world.ended) == 2)
    assert (world.ended[1].ending, world.books.settled) == ("warm", 2)


async def test_one_at_a_time_on_each_replica() -> None:
    world = World()
    world.is_due()
    for passed in (30_000, 40_000):
        world.pins.see_page("a", Page(passed, 0, 10_000))
    world.is_due("b")
    await world.play(until=lambda: len(world.ended) == 2)
    assert sorted(admission.exclude for admission in world.books.admissions) == [("a",), ("b",)]


@pytest.mark.parametrize("answer", [GRANT, None], ids=["sent", "waiting"])
async def test_whoever_loses_its_place_or_ends_gives_it_back_once(answer: Grant | None) -> None:
    for lost in (True, False):
        world = World(answer)
        begun = asyncio.Event()

        async def never(begun: asyncio.Event = begun) -> tuple[int, bytes]:
            begun.set()
            return await asyncio.get_running_loop().create_future()

        world.answer = never
        world.is_due()
        task = asyncio.create_task(world.pins.run())
        while not (world.sent if answer else world.books.admissions):
            await asyncio.sleep(0)
        if lost:
            world.books.lost()
            async with asyncio.timeout(30):
                while not world.ended:
                    await asyncio.sleep(0)
            assert world.ended[0].ending == "failed"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.books.settled == 1


async def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CALL_SECONDS", 0.01)
    world = World(None)
    world.is_due()
    await world.play(until=lambda: world.ended)
    assert (world.ended[0].ending, world.books.settled) == ("failed", 1)


async def test_a_bug_costs_one_call(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.pins._count = None  # type: ignore[assignment]
    world.is_due()
    await world.play(until=lambda: "could not be kept" in caplog.text)
    world.pins._count = world._count
    world.pins.see_page("a", Page(40_000, 0, 10_000))
    await world.play(until=lambda: world.ended)
    assert world.ended[0].ending == "warm"


async def test_what_was_taken_out_of_the_settings_is_not_asked_for() -> None:
    world = World()
    world.is_due()
    world.pins.use([], "low", 7)
    await world.play(until=lambda: not world.pins._asked)
    assert (world.ended, world.books.admissions) == ([], [])


@pytest.mark.parametrize(
    ("fields", "uses"),
    [
        ({}, 1),
        ({"model": "alias"}, 1),
        ({"model": None}, 1),
        ({"echo": False, "tool_choice": "none"}, 1),
        ({"model": "adapter"}, 0),
        ({"prompt_logprobs": 0}, 0),
        ({"cache_salt": "mine"}, 0),
        ({"messages": [{"role": "system", "content": "Be brief!"}]}, 0),
    ],
)
def test_what_counts_as_a_use(fields: dict[str, Any], uses: int) -> None:
    """Of what is in the same part of the engine's cache, and is read there."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    body = json.dumps({"model": "demo", "messages": messages, "max_tokens": 8, **fields}).encode()
    request = parse(Endpoint.CHAT, body, n_max=1)
    assert isinstance(request, GenerationRequest)
    world = World()
    call: Any = SimpleNamespace(
        grant=GRANT, usage=Usage(TOKENS, 8, 16), terms=SimpleNamespace(cache_salt=""), generation=request
    )
    world.pins.see_page("a", Page(0, 0, 10_000))
    world.pins.see_call(call)
    assert len([fact for fact in world.facts if isinstance(fact, PinUse)]) == uses
