"""The books of shared pieces and kept histories, call by call and under random loads."""

import random
from itertools import count

import pytest

from benchmarks.experiment.gates import Elastic, Guaranteed, Held
from benchmarks.experiment.sharing import SharingBooks
from benchmarks.experiment.traces import AGENT_TOKENS, BLOCK_SIZE, Turn
from gateway.core import elastic
from gateway.core.order import HISTORIES, YIELD_MS
from gateway.core.returns import KNOWN, PROBED, SOON_SECONDS
from gateway.mock.pool import EMPTY

PIECE = AGENT_TOKENS // BLOCK_SIZE
"""Blocks that all begin with."""
EVER = float("inf")


class Asker:
    """Turns of sessions for some books, one at a time."""

    def __init__(self, books: SharingBooks, gate: type[Guaranteed] = Guaranteed) -> None:
        self.books = books
        self.gate = gate(books, books.base) if gate is Elastic else gate(books)  # type: ignore[call-arg]
        self._numbers = count()

    def hold(self, session: int, turn: int, blocks: int = PIECE + 100, output: int = 200) -> Held:
        prompt = blocks * BLOCK_SIZE - output + 1
        call = Turn(next(self._numbers), prompt, output, output, EMPTY, session, turn, 3.0)
        return self.gate.hold(call, EVER)

    def ask(self, session: int, turn: int, now: float = 0.0, blocks: int = PIECE + 100) -> Held:
        held = self.hold(session, turn, blocks)
        self.books.admit(held, now)
        return held

    def learn_that_turns_come_back(self, now: float) -> None:
        """Of small conversations."""
        for turn in range(80):
            held = self.ask(999, turn, now, PIECE + 20)
            assert held.granted
            self.books.first_token(held, now)
            self.books.settle(held, now)


def test_who_comes_after_the_first_token_needs_only_the_rest() -> None:
    books = SharingBooks(2_000)
    asker = Asker(books)
    one, two = asker.ask(1, 0), asker.ask(2, 0)
    assert books.used == 2 * (PIECE + 100)  # nothing is computed yet
    books.first_token(one, 0)
    assert books.used == 2 * (PIECE + 100)
    asker.ask(3, 0)
    assert books.used == 2 * (PIECE + 100) + 100
    books.first_token(two, 0)  # its copy of the piece is none
    assert books.used == PIECE + 300


def test_the_last_one_out_gives_the_piece_back_whoever_that_is() -> None:
    books = SharingBooks(2_000)
    asker = Asker(books)
    one = asker.ask(1, 0)
    books.first_token(one, 0)
    two = asker.ask(2, 0)
    books.settle(one, 0)
    assert books.used == PIECE + 100
    three = asker.ask(3, 0)  # the only one in it has no first token: nobody holds what was computed
    assert not three.shared
    books.settle(two, 0)
    assert books.used == PIECE + 100
    books.settle(three, 0)
    assert (books.used, books.full, books.assured, books.nodes) == (0, 0, 0, {})


def test_a_held_history_counts_against_cold_calls_only_and_until_it_is_gone_on_with() -> None:
    books = SharingBooks(8_000, warm_first=True, soft=True)
    asker = Asker(books)
    asker.learn_that_turns_come_back(0)
    here = asker.ask(1, 0, 20)
    books.first_token(here, 20)
    kept = asker.ask(2, 0, 20, PIECE + 400)
    books.first_token(kept, 20)
    books.settle(kept, 20)
    assert books.soft_blocks == 400
    room = books.limit - books.used
    assert not asker.ask(3, 0, 21, PIECE + room - 399).granted
    assert asker.ask(2, 1, 21, PIECE + room - 399).granted
    assert books.soft_blocks == 0


def test_what_nobody_comes_back_to_is_not_held() -> None:
    books = SharingBooks(8_000, warm_first=True, soft=True)
    asker = Asker(books)
    kept = 0
    for number in range(200):
        now = 20.0 * number
        held = asker.ask(number, 0, now)
        books.first_token(held, now)
        books.settle(held, now)
        kept += books.soft_blocks > 0
    assert kept <= KNOWN + 200 / PROBED, "but for what has to be kept to find out"


def test_a_hold_ends_by_itself_and_is_at_most_half_of_the_replica() -> None:
    books = SharingBooks(8_000, warm_first=True, soft=True)
    asker = Asker(books)
    asker.learn_that_turns_come_back(0)
    running = []
    for number in range(15):
        running.append(asker.ask(number, 0, 20, PIECE + 400))
        books.first_token(running[-1], 20)
    for held in running:
        books.settle(held, 20)
    assert books.soft_blocks > books.limit // 2
    books.first_token(asker.ask(100, 0, 21, PIECE + 100), 21)  # so that the replica is not idle
    half = asker.ask(101, 0, 21, PIECE + books.limit // 2 - books.used)
    assert half.granted
    books.first_token(half, 21)
    more = asker.ask(102, 0, 21, PIECE + 1)
    assert not more.granted
    asker.ask(103, 0, 20 + SOON_SECONDS + 1)
    assert books.soft_blocks == 0
    assert more.granted


def test_a_small_replica_holds_nothing() -> None:
    books = SharingBooks(HISTORIES * 400 - 1, warm_first=True, soft=True)
    asker = Asker(books)
    for turn in range(50):
        held = asker.ask(1, turn, 0, PIECE + 400)
        books.first_token(held, 0)
        books.settle(held, 0)
    assert books.soft_blocks == 0


@pytest.mark.parametrize("waited", [0.0, YIELD_MS / 1000 + 1])
def test_warm_goes_before_cold_until_that_has_waited_long(waited: float) -> None:
    books = SharingBooks(8_000, warm_first=True, soft=True)
    asker = Asker(books)
    asker.learn_that_turns_come_back(100)
    big, last = asker.ask(1, 0, 100, 7_000), asker.ask(2, 5, 100, PIECE + 10)
    books.first_token(big, 100)
    books.first_token(last, 100)
    cold = asker.ask(3, 0, 100, PIECE + 3_000)
    books.settle(last, 100 + waited)
    warm = asker.ask(2, 6, 101 + waited, PIECE + 3_000)
    assert warm.warm
    assert not warm.granted
    assert books.settle(big, 101 + waited) == [cold if waited else warm]


@pytest.mark.parametrize("gate", [Guaranteed, Elastic])
@pytest.mark.parametrize("seed", range(8))
def test_the_sums_are_those_of_the_calls_whatever_happens(seed: int, gate: type[Guaranteed]) -> None:
    chance = random.Random(seed)
    books = SharingBooks(4_000, warm_first=seed % 2 == 0, soft=seed % 4 == 0)
    asker, inside, now = Asker(books, gate), list[Held](), 0.0
    waiting: list[Held] = []
    for _ in range(600):
        now += chance.random() * 3
        what = chance.random()
        if what < 0.4:
            held = asker.hold(chance.randrange(20), chance.randrange(3), PIECE + chance.randint(1, 400))
            held.deadline = now + 10
            waiting.append(held)
            books.admit(held, now)
        elif what < 0.65 and (untold := [held for held in inside if not held.told]):
            held = chance.choice(untold)
            asker.gate.written(held, 1, now)
        elif inside:
            held = chance.choice(inside)
            inside.remove(held)
            books.settle(held, now)
        inside += [held for held in waiting if held.granted]
        waiting = [held for held in waiting if not held.granted]
        _check(books, inside)
    while inside:
        books.settle(inside.pop(), now)
        inside += [held for held in waiting if held.granted]
        waiting = [held for held in waiting if not held.granted]
        _check(books, inside)
    assert not books.waiting
    assert not books.nodes
    assert len(books.dropped) == len(waiting)


def _check(books: SharingBooks, inside: list[Held]) -> None:
    nodes = books.nodes.values()
    pieces = sum(node.blocks for node in nodes if node.own is None)
    assert books.used == pieces + sum(held.held for held in inside)
    assert books.full == pieces + sum(held.blocks for held in inside)
    assert books.assured == pieces + sum(held.blocks for held in inside if held.path is None)
    assert books.prefill == sum(held.prefill for held in inside)
    assert books.soft_blocks == sum(blocks for blocks, _ in books._soft.values())
    sharing = [held for held in inside if held.inside]
    assert all(bool(held.shared) == (held not in [node.own for node in nodes]) for held in sharing)
    assert sum(node.holders for node in nodes) == sum(held.told for held in sharing)
    assert sum(node.newcomers for node in nodes) == sum(not held.told for held in sharing)
    assert all(node.holders >= 0 and node.newcomers >= 0 for node in nodes)
    columns = zip(*(held.path for held in inside if held.path is not None), strict=True)
    assert books.sums == ([sum(column) for column in columns] or [0] * elastic.POINTS)
