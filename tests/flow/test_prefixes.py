"""How prompts begin: what the ledger is asked to charge once, and where calls are placed."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.events import CacheDoubted, Miscounted, PrefixFound
from gateway.core.prefixes import PromptCount, points
from gateway.core.request import GenerationRequest
from gateway.core.segments import Segment
from gateway.core.warm import JUDGED_CALLS
from gateway.http.auth import Key
from gateway.ledger.api import Admission, Reservation
from gateway.mock.engine import EngineConfig
from gateway.mock.options import Options
from gateway.mock.tokenizer import encode_chat
from tests.flow.driver import Visitor
from tests.flow.engines import MockEngine, mock_engine
from tests.flow.world import World, chat, gateway, soon, soon_true

SIZE = 16
CHAT, BATCH, COMPLETIONS = "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"
COMMON_BLOCKS = 20
RUNS_ON = 4_000
"""Tokens for which an engine needs longer than a test."""


def ids(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 32_000), k=tokens)


def prompt(rest: int, tokens: int = 40) -> list[int]:
    """Of COMMON_BLOCKS that all have, and others."""
    return [*ids(COMMON_BLOCKS * SIZE), *ids(tokens, 1 + rest)]


def completion(rest: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt(rest), "max_tokens": 8, **fields}


class Asked:
    """What the ledger is asked for."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admissions: list[Admission] = []
        opened = world.ledger.open

        def open_(admission: Admission, lost: Callable[[], None]) -> Reservation:
            self.admissions.append(admission)
            return opened(admission, lost)

        monkeypatch.setattr(world.ledger, "open", open_)

    @property
    def last(self) -> Admission:
        return self.admissions[-1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.last.segments


@asynccontextmanager
async def caching(
    store_url: str, monkeypatch: pytest.MonkeyPatch, engines: int = 1, **options: Any
) -> AsyncIterator[tuple[World, Asked, list[MockEngine]]]:
    async with (
        mock_engine(EngineConfig(), speed=float("inf")) as one,
        mock_engine(EngineConfig(), speed=float("inf")) as other,
    ):
        urls = {"a": one.url, "b": other.url} if engines == 2 else {"a": one.url}
        async with gateway(store_url, urls, **{"caching": True, **options}) as world:
            for replica in urls:
                await world.learn_cache(replica)
            yield world, Asked(world, monkeypatch), [one, other]


async def served(world: World, body: Mapping[str, Any], path: str = COMPLETIONS) -> None:
    visitor = await world.visit(body, path=path)
    assert visitor.status == 200, visitor.body
    world.facts.clear()


def blocks(segments: Sequence[Segment]) -> int:
    return sum(segment.blocks for segment in segments)


async def test_prompts_of_ids_say_what_they_have_in_common(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(store_url, monkeypatch) as (world, asked, _):
        found = []
        for rest in range(3):
            await served(world, completion(rest))
            found.append(asked.segments)
            assert (asked.last.block_size, blocks(found[-1]) < asked.last.blocks) == (SIZE, True)
        common = [segment for segment in found[2] if segment in found[1]]
        assert blocks(common) == COMMON_BLOCKS
        assert common == list(found[1][: len(common)])
        await served(world, {**completion(2), "prompt": [prompt(2)]})
        assert blocks(segment for segment in asked.segments if segment in found[2]) >= COMMON_BLOCKS
        await world.quiet()


async def test_long_prompts_of_ids_are_read_in_a_thread(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(store_url, monkeypatch) as (world, asked, _):
        await served(world, {"model": "demo", "prompt": ids(7_000), "max_tokens": 8})
        assert blocks(asked.segments) == 384
        await world.quiet()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt_logprobs": 0}, COMPLETIONS),
        ({"echo": True, "logprobs": 1}, COMPLETIONS),
        ({"use_beam_search": True}, COMPLETIONS),
        ({"truncate_prompt_tokens": 300}, COMPLETIONS),
        ({"truncate_prompt_tokens": -1}, COMPLETIONS),
        ({"n": 2}, COMPLETIONS),
        ({"best_of": 2}, COMPLETIONS),
        ({"prompt": [prompt(0), prompt(1)]}, COMPLETIONS),
        ({"prompt": ids(8 * SIZE)}, COMPLETIONS),
        ({"prompt": "a text whose tokens are not known " * 100}, COMPLETIONS),
    ],
)
async def test_what_an_engine_does_not_take_from_its_cache_shares_nothing(
    store_url: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], path: str
) -> None:
    async with caching(store_url, monkeypatch) as (world, asked, _):
        await served(world, completion())
        assert asked.segments
        await served(world, completion(**fields), path)
        assert asked.segments == ()
        await world.quiet()


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": None}, {"echo": False}, {"n": 1}, {"cache_salt": None}]
)
async def test_fields_that_say_nothing_change_nothing(
    store_url: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    async with caching(store_url, monkeypatch) as (world, asked, _):
        await served(world, completion(**fields))
        assert asked.segments
        await world.quiet()


class Told:
    """As an engine's tokenizer, a token a character; says how often it was asked."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        self.sizes.append(block_size)
        body = request.body.decode()
        text = body[body.index(":") :]
        return [PromptCount(len(text), points(list(map(ord, text)), block_size or SIZE))] * len(
            request.prompts
        )


async def test_chats_are_counted_where_they_are_long_enough_to_share(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is reserved; a short one only while little room is left."""
    told = Told()
    async with caching(store_url, monkeypatch, model_counter=told, notes_fill=True) as (world, asked, _):
        while world.ledger.fill is None:
            await served(world, chat(), CHAT)
        told.sizes.clear()
        await served(world, chat(), CHAT)
        assert (told.sizes, asked.segments, asked.last.block_size) == ([], (), SIZE)
        long = chat(messages=[{"role": "user", "content": "word " * 200}])
        await served(world, long, CHAT)
        assert told.sizes == [SIZE]
        assert asked.segments
        await served(world, {"model": "demo", "messages": [long["messages"]] * 2, "max_tokens": 8}, BATCH)
        assert (asked.segments, asked.last.block_size) == ((), 0)
        await world.quiet()


async def test_without_a_cache_nothing_is_counted_for_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    async with caching(store_url, monkeypatch, model_counter=told, notes_fill=True, caching=False) as (
        world,
        asked,
        _,
    ):
        while world.ledger.fill is None:
            await served(world, chat(), CHAT)
        told.sizes.clear()
        await served(world, chat(messages=[{"role": "user", "content": "word " * 200}]), CHAT)
        await served(world, completion())
        assert (told.sizes, asked.segments, asked.last.block_size) == ([], (), 0)
        await world.quiet()


async def test_what_keeps_caches_apart_keeps_charges_apart(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's salt, a key's, an adapter; but not the name by which the model was asked for."""
    found: dict[str, tuple[Segment, ...]] = {}
    key = Key("tenant", "normal", cache_salt="x")
    for name, options in (("nobody", {}), ("tenant", {"key": key})):
        async with caching(store_url, monkeypatch, adapters=("lora",), **options) as (world, asked, _):
            for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"tool_choice": "none"}):
                await served(world, completion(**more))
                found[f"{name} {more}"] = asked.segments
            if name == "nobody":
                await served(
                    world, {field: value for field, value in completion().items() if field != "model"}
                )
                assert asked.segments[0] in found["nobody {}"]
                await world.visit(completion(model="lora"), path=COMPLETIONS)
                found["lora"] = asked.segments
            await world.quiet()
    names = [segment.id for segments in found.values() for segment in segments]
    assert all(found.values())
    assert len(set(names)) == len(names)


async def test_a_call_goes_where_its_beginning_was(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with caching(store_url, monkeypatch, engines=2) as (world, asked, engines):
        for body, path in ((completion, COMPLETIONS), (story, CHAT)):
            first = body(0)
            assert await placed(world, first, path) == "a"
            assert asked.last.prefer == ()
            release = await world.hold(1, exclude=("b",))  # else the name decides
            assert await placed(world, body(1), path) == "a"
            assert asked.last.prefer == ("a",)
            release()
        await world.quiet()
        assert [engine.app.driver.engine.prefix_hits > 0 for engine in engines] == [True, False]


def story(rest: int) -> dict[str, Any]:
    texts = ["once upon a time " * 40, "and then " * 40 * (1 + rest)]
    return chat(messages=[{"role": "user", "content": text} for text in texts])


async def placed(world: World, body: Mapping[str, Any], path: str) -> str:
    visitor = await world.visit(body, path=path)
    assert visitor.status == 200, visitor.body
    return visitor.header("x-kvgate-replica") or ""


# What is charged ------------------------------------------------------------------------------------------------


class Stream:
    """A call that runs until it is told to end."""

    def __init__(
        self, world: World, body: Mapping[str, Any], tokens: int = RUNS_ON, stream: bool = True
    ) -> None:
        asked = {**body, "stream": stream, "max_tokens": tokens}
        self.visitor = Visitor(world.app, asked, path=COMPLETIONS)
        self.task = asyncio.create_task(self.visitor.run())

    async def has_begun(self) -> None:
        await soon(lambda: self.visitor.body, "its answer has begun")

    async def leave(self) -> None:
        self.visitor.leave()
        await self.task


@asynccontextmanager
async def stepping(store_url: str, sizes: EngineConfig | None = None, **options: Any) -> AsyncIterator[World]:
    """Engines whose streams last as long as a test needs them, and tell what they had cached."""
    told = Options(enable_prompt_tokens_details=True)
    async with (
        mock_engine(sizes or EngineConfig(), speed=1, options=told) as engine,
        gateway(store_url, {"a": engine.url}, caching=True, **options) as world,
    ):
        await world.learn_cache("a")
        yield world


async def used(world: World) -> tuple[int, int]:
    """Blocks that the ledger counts on the replica, and those of them that calls share."""
    state = (await world.ledger.state())["pools"]["short"]["replicas"]["a"]
    return state["reserved"], state["shared_blocks"]


async def held(world: World, blocks: int, shared: int) -> None:
    async def is_so() -> bool:
        return await used(world) == (blocks, shared)

    try:
        await soon_true(is_so, f"{blocks} blocks are held, {shared} of them shared")
    except AssertionError as error:
        raise AssertionError(f"{error}; {await used(world)}") from None


ALONE = -(-(len(prompt(0)) + RUNS_ON - 1) // SIZE)
"""Blocks of a stream that shares nothing."""


async def teach(world: World) -> None:
    """Two prompts that begin alike have come before; from then on each is cut where they branch."""
    for rest in range(2):
        await served(world, completion(100 + rest))


async def test_what_others_hold_is_charged_once(store_url: str) -> None:
    """The first one leaves first; the last one gives all back."""
    async with stepping(store_url) as world:
        await teach(world)
        first = Stream(world, completion(1))
        await held(world, ALONE, COMMON_BLOCKS)
        second = Stream(world, completion(2))
        await held(world, 2 * ALONE - COMMON_BLOCKS, COMMON_BLOCKS)
        await second.has_begun()  # what it needs is computed: else nobody shares with it alone
        await first.leave()
        await held(world, ALONE, COMMON_BLOCKS)
        third = Stream(world, completion(3))
        await held(world, 2 * ALONE - COMMON_BLOCKS, COMMON_BLOCKS)
        await third.has_begun()
        found = [stream.visitor.header("x-kvgate-shared-blocks") for stream in (first, second, third)]
        assert found == [None, str(COMMON_BLOCKS), str(COMMON_BLOCKS)]
        assert third.visitor.header("x-kvgate-reserved-blocks") == str(ALONE)
        await second.leave()
        await third.leave()
        await world.quiet()
        assert sorted(end.shared_blocks for end in world.ended) == [0, COMMON_BLOCKS, COMMON_BLOCKS]


async def test_more_run_at_once_than_fit_alone(store_url: str) -> None:
    """Of 300 blocks one needs 273; a second one alike waits until the first one's prompt is computed."""
    async with stepping(store_url, blocks={"a": 301}) as world:
        await teach(world)
        body = completion(max_tokens=2_000)
        streams = [Stream(world, {**body, "prompt": prompt(rest)}, tokens=2_200) for rest in range(2)]
        each = -(-(len(prompt(0)) + 2_200 - 1) // SIZE)
        assert 2 * each > 300 >= 2 * each - COMMON_BLOCKS
        await held(world, 2 * each - COMMON_BLOCKS, COMMON_BLOCKS)
        for stream in streams:
            await stream.leave()
        await world.quiet()


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "mine"}, {"prompt_logprobs": 0, "stream": False}, {"n": 2}, {"echo": True}]
)
async def test_what_is_apart_is_charged_in_full(store_url: str, fields: dict[str, Any]) -> None:
    async with stepping(store_url) as world:
        await teach(world)
        first = Stream(world, completion(1))
        await held(world, ALONE, COMMON_BLOCKS)
        visitor = await world.visit(completion(2, **fields), path=COMPLETIONS)
        assert (visitor.status, visitor.header("x-kvgate-shared-blocks")) == (200, None), visitor.body
        visitor = await world.visit(completion(2), path=COMPLETIONS)
        assert (visitor.status, visitor.header("x-kvgate-shared-blocks")) == (200, str(COMMON_BLOCKS))
        await first.leave()
        await world.quiet()


async def test_an_engine_that_keeps_nothing_shares_nothing(store_url: str) -> None:
    async with stepping(store_url) as world:
        await teach(world)
        await world.learn_cache("a", caching=False)
        first = Stream(world, completion(1))
        await held(world, ALONE, 0)
        second = Stream(world, completion(2))
        await held(world, 2 * ALONE, 0)
        await first.leave()
        await second.leave()
        await world.quiet()


async def test_whoever_comes_to_a_new_process_of_an_engine_shares_with_nobody_of_the_old_one(
    store_url: str,
) -> None:
    async with stepping(store_url) as world:
        await teach(world)
        first = Stream(world, completion(1))
        await held(world, ALONE, COMMON_BLOCKS)
        await world.learn_cache("a", started_at=2.0)
        second = Stream(world, completion(2))
        await held(world, 2 * ALONE, 2 * COMMON_BLOCKS)
        await first.leave()
        await second.leave()
        await world.quiet()


async def test_an_answer_that_is_no_stream_is_shared_after_its_prompt_is_expected_to_be_computed(
    store_url: str,
) -> None:
    async with stepping(store_url) as world:
        await teach(world)
        first = Stream(world, completion(1), stream=False)
        await held(world, ALONE, COMMON_BLOCKS)
        visitor = await world.visit(completion(2), path=COMPLETIONS)
        assert visitor.header("x-kvgate-shared-blocks") == str(COMMON_BLOCKS)
        await first.leave()
        await world.quiet()


# What is cached -------------------------------------------------------------------------------------------------


def found_in(world: World) -> list[PrefixFound]:
    return [fact for fact in world.facts if isinstance(fact, PrefixFound)]


async def test_what_an_engine_had_is_compared(store_url: str) -> None:
    async with stepping(store_url) as world:
        await teach(world)
        first = Stream(world, completion(1))
        await held(world, ALONE, COMMON_BLOCKS)
        await world.visit(completion(2), path=COMPLETIONS)
        await world.visit(completion(3, stream=True), path=COMPLETIONS)
        await first.leave()
        tokens = COMMON_BLOCKS * SIZE
        here = PrefixFound(world.fleet.name, "short", "a", tokens, tokens)
        assert found_in(world) == [here, here]
        await world.quiet()


async def test_a_cache_that_has_less_than_it_should_is_shared_no_more(store_url: str) -> None:
    """Who shares goes on as charged; a new process is trusted again."""
    async with stepping(store_url, EngineConfig(enable_prefix_caching=False)) as world:
        await teach(world)
        first = Stream(world, completion(1))
        await held(world, ALONE, COMMON_BLOCKS)
        for rest in range(JUDGED_CALLS):
            assert not [fact for fact in world.facts if isinstance(fact, CacheDoubted)]
            visitor = await world.visit(completion(2 + rest), path=COMPLETIONS)
            assert visitor.header("x-kvgate-shared-blocks") == str(COMMON_BLOCKS)
        assert [fact for fact in world.facts if isinstance(fact, CacheDoubted)]
        assert {fact.found_tokens for fact in found_in(world)} == {0}
        for started_at, shared in ((1.0, False), (2.0, True)):
            await world.learn_cache("a", started_at)
            second = Stream(world, completion(90))
            await held(world, 2 * ALONE, (1 + shared) * COMMON_BLOCKS)
            visitor = await world.visit(completion(91), path=COMPLETIONS)
            assert visitor.header("x-kvgate-shared-blocks") == (str(COMMON_BLOCKS) if shared else None)
            await second.leave()
        await first.leave()
        await world.quiet()


@pytest.mark.parametrize("wrong", [0, 1])
async def test_where_prompts_are_not_counted_as_their_engine_does_nothing_is_shared(
    store_url: str, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Ids are what they are."""
    async with (
        mock_engine(EngineConfig(), speed=float("inf")) as engine,
        gateway(store_url, {"a": engine.url}, caching=True, model_counter=Counting(wrong)) as world,
    ):
        asked = Asked(world, monkeypatch)
        body, told = chat(messages=[{"role": "user", "content": "word " * 200}]), []
        for turn in range(JUDGED_CALLS):
            assert (await world.visit(body, path=CHAT)).status == 200
            assert asked.segments, turn
            told += [(fact.route, fact.key) for fact in world.facts if isinstance(fact, Miscounted)]
            world.facts.clear()
        await served(world, body, CHAT)
        assert bool(asked.segments) == (not wrong)
        assert told == [(CHAT, "anonymous")] * wrong
        await served(world, completion())
        assert asked.segments
        await world.quiet()


class Counting:
    """Counts as the mock engine does, or too many."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        found = encode_chat(json.loads(request.body)["messages"], None)
        return [PromptCount(len(found) + self.wrong, points(found, block_size or SIZE))]
