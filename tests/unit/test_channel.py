"""The order of ops, their numbers, and what becomes of a batch whose fate is not known."""

import msgspec
import pytest

from gateway.core.order import BATCH_OPS
from gateway.ledger.channel import Channel, Op
from gateway.ledger.records import Place
from gateway.ledger.wire import StoreAway

OWNER = "owner"


class Store:
    """Plays `Connection`: keeps the batches that it gets and answers what it is told."""

    def __init__(self):
        self.batches: list[tuple[int, list[list]]] = []
        self.answers: list = []

    async def evaluate(self, script, now, owner, number, wake, *packed, take):
        assert (script, now, owner) == ("step", "", OWNER)
        ops = [msgspec.msgpack.decode(op) for op in packed]
        self.batches.append((number, ops))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        done = [["done", op[1] if op[1:] else ""] for op in ops]
        return take(answer or [b"ok", 1, 0, 1, 0, msgspec.msgpack.encode(done), []])

    @property
    def letters(self):
        return ["".join(op[0] for op in ops) for _, ops in self.batches]


@pytest.fixture
def channel():
    return Channel("wake:", lambda id_, replica: None)


@pytest.fixture
def store():
    return Store()


async def send(channel, store, heartbeat=None):
    return await channel.send(store, OWNER, lambda: heartbeat)


def ignore(result):
    pass


async def test_heartbeat_frees_moves_declaration_then_admits(channel, store):
    channel.admit(["A", "1"], ignore)
    channel.admit(["A", "2"], ignore)
    channel.declare(ignore)
    channel.move(["R", "3"], ignore)
    channel.move(["M", "4"], ignore)
    channel.free(["S", "5"], ignore)
    channel.free(["K", "6"], ignore)
    await send(channel, store, Op(["H", "0"], ignore))
    assert [op[0] + op[1] if op[1:] else op[0] for op in store.batches[0][1]] == [
        "H0", "S5", "K6", "R3", "M4", "Y", "A1", "A2",
    ]  # fmt: skip
    assert not channel.busy


async def test_a_batch_is_bounded_and_the_declaration_waits_for_the_last_redeclaration(channel, store):
    for i in range(BATCH_OPS + 3):
        channel.move(["R", str(i)], ignore)
    channel.declare(ignore)
    channel.admit(["A", "1"], ignore)
    await send(channel, store)
    await send(channel, store)
    assert store.letters == ["R" * BATCH_OPS, "RRRYA"]


async def test_a_full_batch_leaves_the_declaration_for_the_next(channel, store):
    for i in range(BATCH_OPS):
        channel.move(["R", str(i)], ignore)
    channel.declare(ignore)
    await send(channel, store)
    await send(channel, store)
    assert store.letters == ["R" * BATCH_OPS, "Y"]


async def test_numbers_rise_by_one_and_start_anew_with_an_owner(channel, store):
    for _ in range(3):
        await send(channel, store)
    channel.restart()
    await send(channel, store)
    assert [number for number, _ in store.batches] == [1, 2, 3, 1]


async def test_the_same_batch_is_sent_until_it_is_answered(channel, store):
    results = []
    channel.admit(["A", "1"], results.append)
    store.answers = [StoreAway("late"), StoreAway("refused"), [b"unconfigured"]]
    for _ in range(2):
        with pytest.raises(StoreAway):
            await send(channel, store)
        channel.free(["S", "2"], ignore)
        assert channel.unanswered
    assert (await send(channel, store)).status == "unconfigured"
    assert results == []
    await send(channel, store, Op(["H", "0"], ignore))
    assert store.batches == [(1, [["A", "1"]])] * 4
    assert results == [["done", "1"]]
    assert not channel.unanswered
    await send(channel, store)
    assert store.batches[-1] == (2, [["S", "2"], ["S", "2"]])


async def test_a_declaration_of_the_epoch_before_is_not_repeated(channel, store):
    channel.declare(ignore)
    channel.admit(["A", "1"], ignore)
    store.answers = [[b"epoch", 2, 0, 1]]
    assert (await send(channel, store)).status == "epoch"
    await send(channel, store)
    assert store.letters == ["YA", "A"]


async def test_what_was_not_sent_is_taken_back(channel, store):
    channel.admit(["A", "1"], ignore)
    channel.move(["R", "2"], ignore)
    channel.move(["M", "2"], ignore)
    channel.move(["R", "3"], ignore)
    assert channel.drop("1")
    assert not channel.drop("1")
    assert channel.declares("2")
    assert not channel.drop("2")
    assert not channel.declares("2")
    await send(channel, store)
    assert store.batches == [(1, [["R", "3"]])]


async def test_a_result_that_cannot_be_taken_does_not_keep_the_others(channel, store, caplog):
    results = []

    def fail(result):
        raise ZeroDivisionError

    channel.admit(["A", "1"], fail)
    channel.admit(["A", "2"], results.append)
    await send(channel, store)
    assert results == [["done", "2"]]
    assert "ZeroDivisionError" in caplog.text


async def test_an_answer_of_another_length_is_no_answer(channel, store):
    channel.admit(["A", "1"], ignore)
    store.answers = [[b"ok", 1, 0, 1, 0, b"\x90", []]]
    with pytest.raises(ValueError, match="zip"):
        await send(channel, store)
    assert channel.unanswered


async def test_grants_and_more_work_are_passed_on(store):
    offered = []
    channel = Channel("wake:", lambda *grant: offered.append(grant))
    store.answers = [[b"ok", 1, 0, 1, 1, b"\x90", [b"aa", b"r0", b"bb", [b"r1", 2, 7], b"cc", b""]]]
    reply = await send(channel, store)
    assert reply.more
    assert offered == [("aa", Place("r0")), ("bb", Place("r1", joined=2, cache=7)), ("cc", Place(""))]


async def test_a_new_owner_sends_nothing_of_the_old_one(channel, store):
    channel.admit(["A", "1"], ignore)
    store.answers = [[b"fenced"]]
    assert (await send(channel, store)).status == "fenced"
    channel.free(["S", "2"], ignore)
    channel.move(["R", "3"], ignore)
    channel.declare(ignore)
    channel.restart()
    assert not channel.busy
    await send(channel, store)
    assert store.batches[-1] == (1, [])


async def test_an_op_that_cannot_be_packed_fails_its_own_call_and_is_in_no_batch(channel, store):
    with pytest.raises(OverflowError):
        channel.admit(["A", "1", 1 << 70], ignore)
    assert not channel.busy
    channel.admit(["A", "2"], ignore)
    await send(channel, store)
    assert store.batches == [(1, [["A", "2"]])]
