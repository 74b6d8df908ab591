"""Faults to plant in the product, each a mistake that someone could make: the simulation has to find every one."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from gateway.core.books import Books, Call, Replica
from gateway.core.nodes import Nodes, Prefix
from gateway.ledger.channel import Channel
from gateway.ledger.keeper import Keeper
from gateway.ledger.reservation import Ask, Phase
from gateway.ledger.valkey import ValkeyLedger

Plant = Callable[[], AbstractContextManager[None]]
PLANTS: dict[str, Plant] = {}


def plant(function: Callable[[], Iterator[None]]) -> Plant:
    made = contextmanager(function)
    PLANTS[function.__name__.replace("_", "-")] = made
    return made


def _replaced(owner: type, name: str, new: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, new)


@plant
def lost_wake() -> Iterator[None]:
    """`Keeper.wake` does nothing while the task rests: what was put in waits for the next heartbeat."""
    wake = Keeper.wake

    def lazy(keeper: Keeper) -> None:
        if not keeper._resting:
            wake(keeper)

    with _replaced(Keeper, "wake", lazy):
        yield


@plant
def lost_grant() -> Iterator[None]:
    """A grant is lost with its wake-up: the outbox that a process was told once is not told again."""
    outbox, told = Books._outbox, set[tuple[str, int]]()

    def once(books: Books, owner: str) -> list[str]:
        given = outbox(books, owner)
        pairs = [(id_, books.calls[id_].attempt) for id_ in given[::2]]
        lost = {id_ for id_, attempt in pairs if int(id_, 16) % 8 == 0 or (id_, attempt) in told}
        told.update(pairs)
        return [
            item for pair in zip(given[::2], given[1::2], strict=True) if pair[0] not in lost for item in pair
        ]

    with _replaced(Books, "_outbox", once):
        yield


@plant
def settle_lost_when_cancelled() -> Iterator[None]:
    """A call that is cancelled while its ticket waits only forgets it."""
    settle = Ask.settle

    def forgetful(ask: Ask, used_blocks: int | None, cost: int | None, *more: Any) -> None:
        if ask.phase is Phase.QUEUED and ask._answer is not None and ask._answer.cancelled():
            ask.forget()
        else:
            settle(ask, used_blocks, cost, *more)

    with _replaced(Ask, "settle", forgetful):
        yield


@plant
def settle_lost_in_flight() -> Iterator[None]:
    """A call that left while its admit was on its way is not settled when the answer comes."""

    def forgetful(ask: Ask, result: Any) -> None:
        ask.forget()

    with _replaced(Ask, "_end_abandoned", forgetful):
        yield


@plant
def double_settle() -> Iterator[None]:
    """A settle that comes again, because its reply was lost, gives its blocks back again."""
    settle, settled = Books._settle, dict[str, tuple[str, int]]()

    def again(books: Books, owner: str, id_: str, used: int, cost: int, *more: Any) -> Any:
        call = books.calls.get(id_)
        if call is None and id_ in settled:
            replica, blocks = settled[id_]
            books.replicas[replica].used -= blocks
        elif call is not None and call.replica:
            settled[id_] = (call.replica, call.blocks)
        return settle(books, owner, id_, used, cost, *more)

    with _replaced(Books, "_settle", again):
        yield


@plant
def place_kept_on_move() -> Iterator[None]:
    """A call that moves keeps the blocks that it held."""
    move = Books._move

    def keeping(books: Books, owner: str, id_: str, exclude: Any) -> Any:
        call = books.calls.get(id_)
        replica, blocks = (call.replica, call.blocks) if call else ("", 0)
        answer = move(books, owner, id_, exclude)
        if replica in books.replicas:
            books.replicas[replica].used += blocks
        return answer

    with _replaced(Books, "_move", keeping):
        yield


@plant
def path_kept_at_settle() -> Iterator[None]:
    """Who leaves a replica leaves its path in the sums."""
    uncount = Books._uncount

    def keeping(books: Books, call: Call, replica: Replica) -> None:
        sums = replica.sums
        uncount(books, call, replica)
        replica.sums = sums if replica.elastic else b""

    with _replaced(Books, "_uncount", keeping):
        yield


@plant
def growth_adds() -> Iterator[None]:
    """What a call says that it holds is added to what it held."""
    recount = Books._recount

    def adding(books: Books, call: Call, held: int, base: int, path: bytes, net: int) -> Any:
        return recount(books, call, call.asked + held if held > 0 else held, base, path, net)

    with _replaced(Books, "_recount", adding):
        yield


@plant
def growth_forgotten() -> Iterator[None]:
    """A call that is declared again says what it was admitted with."""
    redeclare = Ask.redeclare

    def forgetful(ask: Ask, force: bool) -> None:
        now = ask.held, ask.base, ask.path
        ask.held, ask.base, ask.path = ask.admission.held, ask.admission.base, ask.admission.path
        redeclare(ask, force)
        ask.held, ask.base, ask.path = now

    with _replaced(Ask, "redeclare", forgetful):
        yield


@plant
def hold_not_given_back() -> Iterator[None]:
    """A replica that was held for a call stays so after the call has left."""

    def nothing(books: Books, call: Call) -> None:
        return

    with _replaced(Books, "_unhold", nothing):
        yield


@plant
def batch_not_repeated() -> Iterator[None]:
    """After a lost reply the next batch is sent, not the same one again."""
    send = Channel.send

    def forgetful(channel: Channel, *arguments: Any) -> Any:
        channel._batch = None
        return send(channel, *arguments)

    with _replaced(Channel, "send", forgetful):
        yield


@plant
def number_not_raised() -> Iterator[None]:
    """All batches have one number, so the store takes a late copy for the last one."""
    send = Channel.send

    def numbered(channel: Channel, *arguments: Any) -> Any:
        channel._number = 0
        return send(channel, *arguments)

    with _replaced(Channel, "send", numbered):
        yield


@plant
def not_declared_again() -> Iterator[None]:
    """Under a new owner id a process asks for its tickets again and forgets to declare what runs."""
    rebuild = Ask.rebuild

    def forgetful(ask: Ask, force: bool) -> None:
        if ask.phase is not Phase.RESERVED:
            rebuild(ask, force)

    with _replaced(Ask, "rebuild", forgetful):
        yield


@plant
def lost_place_kept() -> Iterator[None]:
    """A stream whose place was given to somebody else goes on."""
    open_ = ValkeyLedger.open

    def deaf(ledger: ValkeyLedger, admission: Any, lost: Any) -> Any:
        return open_(ledger, admission, lambda: None)

    with _replaced(ValkeyLedger, "open", deaf):
        yield


@plant
def gate_never_closed() -> Iterator[None]:
    """A store that lost its data admits at once."""
    new_epoch = Books._new_epoch

    def open_at_once(books: Books, run: str) -> None:
        new_epoch(books, run)
        books.opens_at = 0

    with _replaced(Books, "_new_epoch", open_at_once):
        yield


@plant
def declared_too_early() -> Iterator[None]:
    """A process says that it has declared everything before it has."""
    gather = Channel._gather

    def early(channel: Channel, heartbeat: Any) -> Any:
        moves, channel._moves = channel._moves, {}
        if channel._declare is None:
            channel._moves = moves
            return gather(channel, heartbeat)
        ops = gather(channel, heartbeat)
        channel._moves = moves
        return ops

    with _replaced(Channel, "_gather", early):
        yield


@plant
def lease_of_its_own_time() -> Iterator[None]:
    """The store's clock is not clamped: after a pause it fences owners that live."""
    open_ = Books._open

    def unclamped(books: Books, now: int, run: str) -> None:
        passed = now - books.wall if books.wall >= 0 else 0
        before = books.clock
        open_(books, now, run)
        books.clock = before + max(passed, 0)

    with _replaced(Books, "_open", unclamped):
        yield


@plant
def timer_forgotten() -> Iterator[None]:
    """Every fifth call that queues has no timer of its own."""
    wait, turns = Ask._wait_in_queue, itertools.count()

    def untimed(ask: Ask) -> None:
        wait(ask)
        if next(turns) % 5 == 0:
            ask._disarm()

    with _replaced(Ask, "_wait_in_queue", untimed):
        yield


@plant
def reference_kept_at_settle() -> Iterator[None]:
    """Who leaves a replica stays in the nodes that it shared there."""

    def keeping(_: Nodes, prefix: Prefix, replica: str) -> int:
        prefix.leave()
        return 0

    with _replaced(Nodes, "leave", keeping):
        yield


@plant
def sharing_is_not_declared() -> Iterator[None]:
    """After a lost store or lease a call is charged in full, and its process believes that it shares."""
    with _replaced(Ask, "_prefix", lambda _: []):
        yield


@plant
def soft_hold_kept() -> Iterator[None]:
    """What was held for a conversation stays so when it goes on."""
    reserve = Books._reserve

    def keeping(books: Books, call: Call, replica: Replica) -> None:
        with _replaced(Books, "_finish_hold", lambda *_: None):
            reserve(books, call, replica)

    with _replaced(Books, "_reserve", keeping):
        yield


@plant
def soft_sum_drifts() -> Iterator[None]:
    """A hold that ends is not taken off what is held."""
    finish = Books._finish_hold

    def forgetful(books: Books, name: str) -> None:
        hold = books.holds.find(name)
        finish(books, name)
        if hold:
            books.replicas[hold.replica].soft += hold.blocks

    with _replaced(Books, "_finish_hold", forgetful):
        yield
