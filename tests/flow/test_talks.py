"""Conversations: what the ledger is told of them, and that who goes on with one is known by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway import talks
from gateway.call import Call
from gateway.core.invariants import Snapshot
from gateway.core.returns import KNOWN, PROBED
from gateway.mock.engine import EngineConfig
from tests.conformance.books import assert_books_hold
from tests.flow.engines import mock_engine
from tests.flow.world import World, gateway, soon

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SYSTEM = {"role": "system", "content": "Be brief."}


@asynccontextmanager
async def talking(store_url: str, caching: bool = True) -> AsyncIterator[World]:
    async with (
        mock_engine(EngineConfig(), speed=float("inf")) as engine,
        gateway(store_url, {"a": engine.url}, caching=caching) as world,
    ):
        await world.learn_cache("a", caching=caching)
        yield world


def said(*texts: str) -> list[dict[str, str]]:
    """By user and assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


async def ask(world: World, *texts: str, path: str = CHAT, **fields: Any) -> None:
    system = [] if path == MESSAGES else [SYSTEM]
    body = {"model": "demo", "messages": [*system, *said(*texts)], "max_tokens": 8, **fields}
    visitor = await world.visit(body, path=path)
    assert visitor.status == 200, visitor.body
    await soon(lambda: not world.ledger.inflight, "it was given back")


async def holds(world: World) -> int:
    found: int = (await world.ledger.state())["pools"]["short"]["replicas"]["a"]["soft_holds"]
    return found


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_goes_on_finds_what_was_held(store_url: str, path: str, stream: bool) -> None:
    async with talking(store_url) as world:
        await ask(world, "Why?", path=path, stream=stream)
        assert await holds(world) == 1
        await ask(world, "Why?", "So.", "And?", path=path, stream=stream)
        assert [end.warm for end in world.ended] == [False, True]
        assert await holds(world) == 1, "the first one's has ended, and the second one may go on, too"
        await ask(world, "Who?", "So.", "And?", path=path, stream=stream)
        assert [end.warm for end in world.ended] == [False, True, False]
        state = (await world.ledger.state())["pools"]["short"]["replicas"]["a"]
        assert (state["reserved"], state["soft_blocks"] > 0) == (0, True)
        await world.quiet()


async def test_a_tools_answer_is_a_turn(store_url: str) -> None:
    async with talking(store_url) as world:
        await ask(world, "Why?")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            SYSTEM,
            *said("Why?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]
        await world.visit({"model": "demo", "messages": messages, "max_tokens": 8})
        assert world.ended[-1].warm
        await world.quiet()


async def test_long_conversations_are_read_in_a_thread(store_url: str) -> None:
    async with talking(store_url) as world:
        text = "x" * 150_000
        await ask(world, text)
        await ask(world, text, "So.", "And?")
        assert world.ended[-1].warm
        await world.quiet()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"prompt_logprobs": 1},
        {"mock": {"status": 500}},
    ],
)
async def test_nothing_is_held_of_what_nobody_goes_on_with(store_url: str, fields: dict[str, Any]) -> None:
    async with talking(store_url) as world:
        body = {"model": "demo", "messages": said("Why?"), "max_tokens": 8, **fields}
        await world.visit(body)
        await soon(lambda: not world.ledger.inflight, "it was given back")
        assert await holds(world) == 0
        assert not any(kind._pending for kind in world.fleet.returns._kinds.values())
        await world.quiet()


async def test_nothing_is_held_where_engines_forget(store_url: str) -> None:
    async with talking(store_url, caching=False) as world:
        await ask(world, "Why?")
        assert await holds(world) == 0
        await world.quiet()


async def test_where_nobody_goes_on_little_is_held(store_url: str) -> None:
    async with talking(store_url) as world:
        for number in range(3 * KNOWN):
            await ask(world, f"Why {number}?")
        (kind,) = world.fleet.returns._kinds.values()
        kind._over, kind._came = float(KNOWN), 0.0  # as after their time
        before = await holds(world)
        for number in range(PROBED):
            await ask(world, f"Who {number}?")
        assert await holds(world) <= before + 1
        await world.quiet()


async def test_a_warm_call_is_asked_about_in_spite_of_what_others_were_refused(store_url: str) -> None:
    """A full queue that refused cold calls a moment ago takes it, or refuses it itself."""
    async with talking(store_url) as world:
        await ask(world, "Why?")
        refused: list[Any] = []

        def known(*_: Any) -> None:
            refused.append(1)

        world.ledger.known_refusal = known  # type: ignore[method-assign, assignment]
        world.ledger._known["x", "y", "z"] = None  # type: ignore[assignment]
        await ask(world, "Why?", "So.", "And?")
        assert not refused
        await ask(world, "Who?")
        assert refused
        world.ledger._known.clear()
        await world.quiet()


def test_another_keys_conversation_is_another_one() -> None:
    def salt(**changes: str) -> bytes:
        told = {"key": "k", "cache_salt": "", "fleet": "f", "model": "demo", **changes}
        shape = SimpleNamespace(adapter=lambda model: "" if model == "demo" else model)
        call = SimpleNamespace(
            fleet=SimpleNamespace(name=told["fleet"], engines=SimpleNamespace(shape=lambda: shape)),
            terms=SimpleNamespace(key=told["key"], cache_salt=told["cache_salt"]),
            request=SimpleNamespace(model=told["model"]),
            generation=SimpleNamespace(beside=told.get("beside", "").encode()),
        )
        return talks._salt(cast(Call, call))

    others = [{"key": "k2"}, {"cache_salt": "s"}, {"fleet": "g"}, {"model": "lora"}, {"beside": "x"}]
    assert len({salt(), *(salt(**other) for other in others)}) == 1 + len(others)
    assert salt() == salt(key="k")


async def test_who_waits_for_what_is_held_starts_when_that_ends(store_url: str) -> None:
    """Nothing happens meanwhile but heartbeats."""
    async with talking(store_url) as world:
        await ask(world, "Why?")
        running = await world.hold(500)
        (blocks,) = [hold.blocks for hold in snapshot(world).holds.values()]
        late = asyncio.create_task(world.hold(1_000 - 500 - blocks + 1, key="late"))
        await world.queued(1)
        release = await late
        assert await holds(world) == 0
        release()
        running()
        await world.quiet()


def snapshot(world: World) -> Snapshot:
    return assert_books_hold(world.store, world.ledger.fleet)


async def test_what_another_process_has_held_teaches_as_well(store_url: str) -> None:
    """It answered a moment ago what goes on here; a cold call, or one that was seen to end here, teaches nothing."""
    async with talking(store_url) as world:
        await ask(world, "Why?")
        (kind,) = world.fleet.returns._kinds.values()
        kind._pending.clear()  # it was another process
        await ask(world, "Why?", "So.", "And?")
        assert (kind._came, kind._over) == (1, 0)
        await ask(world, "Why?", "So.", "And?", "So.", "And?")
        assert (kind._came, kind._over) == (2, 1)
        await ask(world, "Who?", "So.", "And?")
        assert (kind._came, kind._over) == (2, 1)
        await world.quiet()
