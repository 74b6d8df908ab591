"""How prompts begin: what the ledger is asked to charge once, and where calls are placed."""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.prefixes import PromptCount, points
from gateway.core.request import GenerationRequest
from gateway.core.segments import Segment
from gateway.http.auth import Key
from gateway.ledger.api import Admission, Reservation
from gateway.mock.engine import EngineConfig
from tests.flow.engines import MockEngine, mock_engine
from tests.flow.world import World, chat, gateway

SIZE = 16
CHAT, BATCH, COMPLETIONS = "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"
COMMON_BLOCKS = 20


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
