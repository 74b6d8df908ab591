"""Between pools: where a call goes by what is left of its prompt to compute, and where it overflows to."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.mock.engine import EngineConfig
from tests.flow.engines import mock_engine
from tests.flow.test_prefixes import CHAT, COMPLETIONS, Asked, ids
from tests.flow.world import PoolOf, World, chat, gateway

BOUND = 512
SHORT, LONG = PoolOf("short", BOUND, ("a", "b")), PoolOf("long", None, ("c",))
OVERFLOWING = SHORT._replace(lane=("short", "long"))
POOLS_MANY = 12


@asynccontextmanager
async def fleet(
    store_url: str, pools: Sequence[PoolOf], monkeypatch: pytest.MonkeyPatch, caching: bool = True
) -> AsyncIterator[tuple[World, Asked]]:
    """One engine stands for all replicas: what it has cached makes no difference here."""
    async with mock_engine(EngineConfig(), speed=float("inf")) as engine:
        urls = {replica: engine.url for pool in pools for replica in pool.replicas}
        async with gateway(store_url, urls, caching=caching, pools=pools) as world:
            for replica in urls if caching else ():
                await world.learn_cache(replica)
            yield world, Asked(world, monkeypatch)
            await world.quiet()


def turn(tokens: int, conversation: int = 0) -> dict[str, Any]:
    """A conversation that has grown to so many tokens."""
    return {"model": "demo", "prompt": ids(tokens, conversation), "max_tokens": 8}


async def went(world: World, body: Mapping[str, Any], path: str = COMPLETIONS) -> str:
    visitor = await world.visit(body, path=path)
    assert visitor.status == 200, visitor.body
    return visitor.header("x-kvgate-replica") or ""


async def test_a_conversation_stays_where_it_is_warm_when_it_grows(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(store_url, [SHORT._replace(replicas=("a",)), LONG], monkeypatch) as (world, asked):
        assert await went(world, turn(400)) == "a"
        assert await went(world, turn(BOUND + 300, conversation=1)) == "c"
        for tokens in (800, 1_200, 1_500):
            assert await went(world, turn(tokens)) == "a"
            assert (asked.last.lane, asked.last.exclude) == ("short", ())
        assert await went(world, turn(1_500 + 2 * BOUND)) == "c", "too much of it is new"
        assert await went(world, turn(BOUND + 300, conversation=1)) == "c", "it is warm where it belongs"


async def test_it_is_kept_from_where_it_is_cold_and_overflows_past_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(store_url, [OVERFLOWING, LONG], monkeypatch) as (world, asked):
        assert await went(world, turn(400)) == "a"
        assert await went(world, turn(800)) == "a"
        assert (asked.last.lane, asked.last.exclude) == ("short", ("b",))
        release = await world.hold(980, exclude=("b", "c"))
        assert await went(world, turn(1_000)) == "c"
        assert (asked.last.lane, asked.last.exclude) == ("short", ("b",))
        release()


async def test_without_overflow_one_warm_replica_of_several_is_not_waited_for(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(store_url, [SHORT, LONG], monkeypatch) as (world, _):
        assert await went(world, turn(400)) == "a"
        assert await went(world, turn(800)) == "c"


async def test_a_chat_whose_tokens_are_not_known_goes_by_its_texts(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token a word here."""

    def story(turns: int) -> dict[str, Any]:
        """Of a hundred words each."""
        texts = [
            " ".join(f"word{i:04}" for i in range(100 * turn, 100 * turn + 100)) for turn in range(turns)
        ]
        return chat(messages=[{"role": "user", "content": text} for text in texts])

    async with fleet(store_url, [SHORT._replace(replicas=("a",)), LONG], monkeypatch) as (world, asked):
        assert await went(world, story(4), CHAT) == "a"
        assert await went(world, story(7), CHAT) == "a"
        assert asked.last.segments == ()
        assert await went(world, story(20), CHAT) == "c"


async def test_engines_that_keep_nothing_get_prompts_by_their_length(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [SHORT._replace(replicas=("a",)), LONG]
    async with fleet(store_url, pools, monkeypatch, caching=False) as (world, _):
        assert await went(world, turn(400)) == "a"
        assert await went(world, turn(800)) == "c"


async def test_any_number_of_pools_by_length_and_by_overflow(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"p{i:02}" for i in range(POOLS_MANY)]
    pools = [
        PoolOf(name, None if name == names[-1] else 100 * (i + 1), (f"r{i:02}",), names[i:])
        for i, name in enumerate(names)
    ]
    async with fleet(store_url, pools, monkeypatch) as (world, asked):
        for i in range(POOLS_MANY):
            assert await went(world, turn(100 * i + 50, conversation=i)) == f"r{i:02}"
            assert asked.last.lane == names[i]
        releases = []
        for i in range(POOLS_MANY - 1):
            others = tuple(f"r{j:02}" for j in range(POOLS_MANY) if j != i)
            releases.append(await world.hold(1000, lane=names[i], exclude=others))
            assert await went(world, turn(50, conversation=i)) == f"r{i + 1:02}"
            assert asked.last.lane == names[0]
        for release in releases:
            release()
