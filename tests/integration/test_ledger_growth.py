"""Calls that are charged by their paths: what the store holds of them as they grow, move, and are declared again."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.elastic import ELASTIC, GUARANTEED, base_of, flat, pack, unpack
from gateway.core.events import Overdraft
from gateway.core.outcomes import Code, Refusal
from gateway.core.segments import Segment
from gateway.ledger.api import Grant
from gateway.ledger.reservation import Ask
from gateway.ledger.verify import verify
from tests.integration.ledger_world import Member, World, eventually, running_store, world

LIMIT = 100
BASE = base_of(LIMIT)


@pytest.fixture(scope="module")
def path():
    with running_store() as store:
        yield str(store.socket)


def set_modes(w: World, *modes: str) -> None:
    """Of the replicas, before anybody joins."""
    replicas = (replace(r, mode=mode) for r, mode in zip(w.config.replicas, modes, strict=True))
    w.config = replace(w.config, replicas=tuple(replicas))


def weight(held: int, later: int) -> dict[str, Any]:
    """Of an admission: blocks held at first, and at every horizon."""
    return {"held": held, "base": BASE, "path": pack(flat(later))}


def row(w: World, replica: str = "r0") -> dict[str, Any]:
    return w.rows("replicas", "replica")[replica]


def points(w: World, replica: str = "r0") -> int:
    """Blocks at the first horizon of all its paths."""
    sums = row(w, replica)["sums"]
    return unpack(sums)[0] // 64 if sums else 0


async def assert_books_hold(w: World) -> None:
    assert (await verify(f"unix://{w.path}", w.fleet)).violations == ()


async def test_more_run_than_fit_at_their_limits(path: str) -> None:
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        asks = [await m.reserve(50, **weight(4, 6)) for _ in range(5)]
        figures = {"used": 20, "full": 250, "assured": 0, "elastic": 5, "base": BASE}
        assert {name: row(w)[name] for name in figures} == figures
        assert points(w) == 30
        full = m.open(70, queue_max=0, queue_key_max=0)
        refusal = await full.granted()
        assert isinstance(refusal, Refusal)
        assert "one replica has 0 free at most" in refusal.message, "whole demands, as what it needs is one"
        await assert_books_hold(w)
        for ask in asks:
            ask.settle(None, None)
        await eventually(w.empty)
        assert row(w)["sums"] == b""


async def test_a_call_grows_and_shrinks(path: str) -> None:
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        ask = await m.reserve(50, **weight(4, 6))
        for held in (9, 30, 3):
            ask.grow(held, BASE, pack(flat(2 * held)))
            await eventually(lambda held=held: (row(w)["used"], points(w)) == (held, 2 * held))
        ask.grow(3, 0, b"")
        await eventually(lambda: (row(w)["used"], row(w)["elastic"], row(w)["sums"]) == (50, 0, b""))
        assert m.count(Overdraft) == 0
        ask.settle(None, None)
        await eventually(w.empty)
        ask.grow(9, BASE, pack(flat(9)))
        assert not m.ledger.channel._growths, "it has no place any more"


async def test_growth_without_room_is_written_down_and_told(path: str) -> None:
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        ask, other = await m.reserve(80, **weight(4, 6)), await m.reserve(80, **weight(60, 60))
        ask.grow(47, BASE, pack(flat(50)))
        await eventually(lambda: m.count(Overdraft) == 1)
        assert Overdraft(w.fleet, "p", "r0", 7) in m.events
        assert row(w)["used"] == 107
        await assert_books_hold(w)
        waits = asyncio.create_task(m.open(1).granted())
        await eventually(lambda: "queued" in w.states().values())
        ask.grow(40, BASE, pack(flat(40)))
        await eventually(lambda: row(w)["used"] == 100)
        assert m.count(Overdraft) == 1
        assert not waits.done()
        other.settle(None, None)
        assert isinstance(await waits, Grant)


async def test_what_was_not_sent_yet_is_replaced(path: str) -> None:
    """The store hears of the last one only, and of none that comes after the end."""
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        first, second = await m.reserve(50, **weight(4, 6)), await m.reserve(50, **weight(4, 6))
        await eventually(lambda: not m.ledger.channel.busy)
        await m.stop()
        for held in (5, 6, 7):
            first.grow(held, BASE, pack(flat(held)))
            second.grow(held, BASE, pack(flat(held)))
        assert list(m.ledger.channel._growths) == [first.id, second.id]
        second.settle(None, None)
        assert list(m.ledger.channel._growths) == [first.id]
        m.go_on()
        await eventually(lambda: (row(w)["used"], points(w)) == (7, 7))


@pytest.mark.parametrize("promised", [False, True])
async def test_on_a_guaranteed_replica_all_is_charged(path: str, promised: bool) -> None:
    """And who was promised that never runs on an elastic one."""
    async with world(path, LIMIT, LIMIT) as w:
        set_modes(w, ELASTIC, GUARANTEED)
        m = await w.join()
        asks = [await m.reserve(30, promised=True), await m.reserve(30, exclude=("r0",), **weight(4, 6))]
        asks[1].grow(9, BASE, pack(flat(9)))
        await eventually(lambda: not m.ledger.channel.busy)
        assert (row(w)["full"], row(w, "r1")["used"], row(w, "r1")["elastic"]) == (0, 60, 0)
        ask = m.open(50, promised=promised, queue_max=0, queue_key_max=0)
        assert isinstance(await ask.granted(), Refusal if promised else Grant)


async def test_no_replica_keeps_the_promise(path: str) -> None:
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        refusal = await m.open(10, promised=True).granted()
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.NO_BACKEND
        assert "promised" in refusal.message


async def test_what_a_call_holds_is_declared_again(path: str) -> None:
    """The store lost everything, also what had not been sent when it did."""
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        asks = [await m.reserve(50, **weight(4, 6)) for _ in range(3)]
        asks[0].grow(11, BASE, pack(flat(12)))
        await eventually(lambda: not m.ledger.channel.busy)
        await m.stop()
        asks[1].grow(21, BASE, pack(flat(22)))
        w.store.delete(*w.key_names())
        m.go_on()
        await eventually(
            lambda: (row(w)["used"], points(w)) == (11 + 21 + 4, 12 + 22 + 6) if w.calls() else False
        )
        await assert_books_hold(w)


async def test_growth_while_the_declaration_waits_is_part_of_it(path: str) -> None:
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        ask = await m.reserve(50, **weight(4, 6))
        await eventually(lambda: not m.ledger.channel.busy)
        await m.stop()
        ask.redeclare(force=False)
        ask.grow(11, BASE, pack(flat(12)))
        assert not m.ledger.channel._growths, (
            "it would be carried out first, and the older declaration after it"
        )
        m.go_on()
        await eventually(lambda: (row(w)["used"], points(w)) == (11, 12))


async def test_a_call_that_moves_holds_there_what_it_held(path: str) -> None:
    async with world(path, LIMIT, LIMIT) as w:
        set_modes(w, ELASTIC, ELASTIC)
        m = await w.join()
        ask = await m.reserve(50, **weight(4, 6))
        ask.grow(11, BASE, pack(flat(12)))
        assert isinstance(await ask.moved("r0"), Grant)
        await eventually(lambda: not m.ledger.channel.busy)
        assert (row(w)["used"], row(w, "r1")["used"], points(w, "r1")) == (0, 11, 12)
        await assert_books_hold(w)


async def test_the_store_answers_a_question_by_the_path(path: str) -> None:
    """Of a call whose size is not known yet, while the queue is full."""
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        await m.reserve(100, **weight(50, 50))
        assert await asked(m, **weight(4, 6)) is None
        assert await asked(m) is Code.CAPACITY_EXCEEDED


async def asked(m: Member, **changes: Any) -> Code | None:
    """Whether a call of 60 blocks would be refused."""
    ask: Ask = m.open(60, queue_max=0, queue_key_max=0, **changes)
    with m.ledger.counted(ask.admission) as ahead:
        refusal = await m.ledger.would_refuse(ask.admission, 60, ahead)
    ask.settle(None, None)
    return refusal.code if refusal else None


async def test_what_stays_in_the_document() -> None:
    """Each op of a call that grows is in docs/ledger.md."""
    text = (Path(__file__).parents[2] / "docs/ledger.md").read_text()
    assert "| `Z id held base path net` |" in text


async def test_a_call_that_grows_is_charged_for_what_it_does_not_share(path: str) -> None:
    """What it holds is told whole, its path without what it shares; also when the store has lost all of that."""
    segments = {"segments": (Segment("a" * 32, 40),), "block_size": 16}
    async with world(path, LIMIT) as w:
        set_modes(w, ELASTIC)
        m = await w.join()
        await w.learn_cache(m)
        asks = [await m.reserve(50, **weight(44, 50), **segments) for _ in range(2)]
        for ask in asks:
            ask.first_token()
        await eventually(lambda: row(w)["used"] == 40 + 4 + 4)
        third = m.open(50, **weight(44, 50), **segments)
        grant = await third.granted()
        assert isinstance(grant, Grant)
        assert (grant.shared, row(w)["used"], points(w)) == (40, 52, 30)
        third.grow(46, BASE, pack(flat(7)), 40)
        third.first_token()
        await eventually(lambda: (row(w)["used"], points(w)) == (54, 27))
        await assert_books_hold(w)
        for ask in asks:
            ask.settle(None, None)
        await eventually(lambda: (row(w)["used"], row(w)["shared"], points(w)) == (46, 40, 7))
        third.settle(None, None)
        await eventually(w.empty)
