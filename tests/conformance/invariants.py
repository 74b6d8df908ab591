"""The invariants of `docs/ledger.md` on the specification's content; the Lua's is compared with it after every step."""

from gateway.core.books import Books, Call, Replica
from gateway.core.order import LOOKAHEAD


def check_invariants(books: Books) -> None:
    for replica in books.replicas.values():
        _check_replica(books, replica)
    _check_keys(books)
    _check_waiters(books)
    if not books.opens_at and not books.dirty:
        _check_nobody_fits(books)
    if not books.calls:
        assert not books.tags
        assert not books.parked
        assert not books.blocked


def _held(books: Books, replica: Replica) -> list[Call]:
    return [c for c in books.calls.values() if c.replica == replica.name]


def _check_replica(books: Books, replica: Replica) -> None:
    held = _held(books, replica)
    assert replica.used == sum(c.blocks for c in held) >= 0
    assert replica.sequences == sum(c.sequences for c in held) >= 0
    assert replica.prefill == sum(c.prefilling for c in held) >= 0
    if replica.held_for:
        assert books.calls[replica.held_for].state == "queued"
        assert replica.state == "up"


def _check_keys(books: Books) -> None:
    for name, key in books.keys.items():
        held = [c for c in books.calls.values() if c.key == name and c.state != "queued"]
        assert key.blocks == sum(c.blocks for c in held)
        assert key.calls == len(held)


def _check_waiters(books: Books) -> None:
    for call in books.calls.values():
        assert (call.state == "queued") == (call.replica == "")
    for flow in books.parked:
        assert books._waiting(*flow), "a parked flow has waiters"
    for lane, id_ in books.blocked.items():
        assert books.calls[id_].state == "queued", lane


def _check_nobody_fits(books: Books) -> None:
    """After a script that says there is no more to do, no head among the first flows could start."""
    for lane, _ in books._fleet.lanes:
        for class_, _ in books._fleet.classes:
            for key in books._flows(lane, class_)[:LOOKAHEAD]:
                head = books._waiting(lane, class_, key)[0]
                assert books._capped(head) or books._place(head) is None, head
