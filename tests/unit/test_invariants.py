"""Each rule sees its own corruption of books that hold, and says what it is about."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.books import Call, FleetConfig, Key, Replica
from gateway.core.elastic import Path, flat, pack
from gateway.core.holds import WARM, Hold
from gateway.core.invariants import (
    Flow,
    Line,
    Rule,
    SessionRecord,
    Snapshot,
    step_violations,
    violations,
)
from gateway.core.order import OPERATOR
from gateway.core.order import POOL_SHARE_SCALE as SCALE

RUNNING, WAITING, GRANTED = "00000000aa", "00000000bb", "00000000cc"
HOLDER = Key(blocks=15, calls=2, pools=("p", 15))
FLEET = FleetConfig(6000, 1000, 20, (("a", ("p",)), ("b", ("p",))), (("high", 0), ("normal", 200)), ())


def call(id_: str, state: str, blocks: int, arrival: int, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "owner": "o0", "replica": "" if state == "queued" else "r0",
        "pool": "" if state == "queued" else "p", "key": "k", "class_": "normal", "lane": "a",
        "sequences": 1, "prefill": 5, "prefilling": 0, "cost": blocks, "deadline": 9000, "charged": 64 * blocks,
        "asked": blocks, "held": 0 if state == "queued" else blocks,
    }  # fmt: skip
    return Call(id=id_, state=state, blocks=blocks, arrival=arrival, **{**values, **changes})


def books(**changes: Any) -> Snapshot:
    """One replica of 20 blocks: 15 are taken by two calls, a call of 10 waits."""
    calls = {
        RUNNING: call(RUNNING, "reserved", 10, 1),
        GRANTED: call(GRANTED, "unclaimed", 5, 2, prefilling=5),
        WAITING: call(WAITING, "queued", 10, 3, charged=0),
    }
    values: dict[str, Any] = {
        "fleet": FLEET, "epoch": 1, "clock": 5000, "opens_at": 0, "arrivals": 3, "dirty": False,
        "replicas": {"r0": replica()},
        "calls": calls,
        "keys": {"k": HOLDER},
        "flows": {("a", "normal", "k"): Flow(7, 1, 10, 1, 0)},
        "lines": {("a", "normal"): Line(7, 1, 10, 1, 0)},
        "blocked": {"a": WAITING},
        "owners": {"o0": 9000},
        "sessions": {"o0": SessionRecord(4, 1, 1, 1, 0xAA)},
        "indexes": indexes(),
    }  # fmt: skip
    return Snapshot(**{**values, **changes})


def replica(**changes: Any) -> Replica:
    return replace(Replica("r0", "p", 20, 20, 10, 10, 100, used=15, sequences=2, prefill=5, full=15, assured=15),
                   **changes)  # fmt: skip


def indexes(**changes: set[str]) -> dict[str, frozenset[str]]:
    found = {
        "queue": {f"a:normal:k:1000000000003:{WAITING}"},
        "order": {"a:normal:0000000000000007:k"},
        "parked": set(),
        "owned": {f"o0:{id_}" for id_ in (RUNNING, WAITING, GRANTED)},
        "outbox": {f"o0:{GRANTED}"},
        "deadlines": {f"{WAITING}:9000"},
        "backlog": {"a:normal:000000000010:k"},
        "places": set(),
    }
    return {name: frozenset(members) for name, members in {**found, **changes}.items()}


TALK = "0123456789abcdef"


def held_softly(due: int = 9_000, **changes: Any) -> Snapshot:
    """Four blocks of a conversation."""
    figures = {"soft": 4, "holds": 1, "soft_end": 9_000, "cache": 7, **changes}
    return books(
        replicas={"r0": replica(**figures)},
        holds={TALK: Hold("r0", 4, due)},
        hold_ends=frozenset({f"r0:{due:013d}:{TALK}"}),
    )


PLACE = "a:normal:k:0123456789abcdef:000000000004"


def left(places: dict[str, int] | None = None, **changes: Any) -> Snapshot:
    """A second call of the flow has left the queue."""
    ends = {PLACE: 9000} if places is None else places
    return books(**{"arrivals": 4, "place_ends": ends, "indexes": indexes(places=set(ends)), **changes})


def with_call(id_: str, **changes: Any) -> Snapshot:
    calls = dict(books().calls)
    calls[id_] = replace(calls[id_], **changes)
    return books(calls=calls)


def by_path(path: Path, **changes: Any) -> Snapshot:
    """The running call is charged by such a path and holds 4 of its 10 blocks; a call of 11 waits."""
    packed = pack(path)
    calls = dict(books().calls)
    calls[RUNNING] = replace(calls[RUNNING], held=4, asked=4, base=16, path=packed, elastic=1)
    calls[WAITING] = replace(calls[WAITING], blocks=11, asked=11)
    figures: dict[str, Any] = {"used": 9, "full": 15, "assured": 5, "elastic": 1, "base": 16, "sums": packed}
    found = books(
        calls=calls,
        replicas={"r0": replica(**{**figures, "mode": "shared", **changes})},
        flows={("a", "normal", "k"): Flow(7, 1, 11, 1, 0)},
        lines={("a", "normal"): Line(7, 1, 11, 1, 0)},
    )
    return replace(found, indexes=indexes(backlog={"a:normal:000000000011:k"}))


def parked(**key: int) -> Snapshot:
    """The waiting flow is parked, rightly when its key is at a cap."""
    return books(
        flows={("a", "normal", "k"): Flow(7, 1, 10, 1, 1)},
        indexes=indexes(order=set(), parked={"k:a:normal"}),
        keys={"k": replace(HOLDER, **key)},
    )


def held_behind() -> Snapshot:
    """Another call of the flow is before the one for which the replica is held."""
    first = call("00000000dd", "queued", 10, 2)
    return books(calls={**books().calls, first.id: first}, replicas={"r0": replica(held_for=WAITING)})


def empty(**changes: Any) -> Snapshot:
    nothing: dict[str, Any] = {
        "calls": {}, "flows": {}, "lines": {("a", "normal"): Line()}, "blocked": {}, "sessions": {}, "owners": {},
        "keys": {"k": Key()}, "replicas": {"r0": replica(used=0, sequences=0, prefill=0, full=0, assured=0)},
        "indexes": dict.fromkeys(indexes(), frozenset()),
    }  # fmt: skip
    return books(**{**nothing, **changes})


def rules(found: Snapshot) -> set[Rule]:
    return {violation.rule for violation in violations(found)}


WHOLE = [
    books(),
    empty(),
    parked(blocks_max=20),
    parked(pool_share=SCALE),
    books(dirty=True),
    left(),
    replace(with_call(WAITING, once="e5"), once={"e5": WAITING}),
    replace(parked(pool_share=2 * SCALE), dirty=True),
    replace(with_call(WAITING, passed=36), keys={"k": replace(HOLDER, pool_share=SCALE)}),
    by_path(flat(8)),
    held_softly(),
    held_softly(limit=28),
]
"""While a script has left something to do, who is parked for a part of a pool may be within it again; no replica is
held for a call of a key that is at its part."""


@pytest.mark.parametrize("whole", WHOLE)
def test_books_that_hold(whole: Snapshot) -> None:
    assert violations(whole) == []


CORRUPTIONS: list[tuple[Rule, str, Callable[[], Snapshot]]] = [
    (Rule.RECORD, "record calls 00", lambda: books(unreadable=("calls 00",))),
    (Rule.SUMS, "replica r0 used", lambda: books(replicas={"r0": replica(used=14)})),
    (Rule.SUMS, "replica r0 used", lambda: books(replicas={"r0": replica(used=-1)})),
    (Rule.SUMS, "replica r0 sequences", lambda: books(replicas={"r0": replica(sequences=3)})),
    (Rule.SUMS, "replica r0 prefill", lambda: books(replicas={"r0": replica(prefill=0)})),
    (Rule.SUMS, "replica r0 full", lambda: books(replicas={"r0": replica(full=14)})),
    (Rule.SUMS, "replica r0 assured", lambda: books(replicas={"r0": replica(assured=14)})),
    (Rule.SUMS, "replica r0 elastic", lambda: by_path(flat(8), elastic=2)),
    (Rule.SUMS, "replica r0 base", lambda: by_path(flat(8), base=32)),
    (Rule.SUMS, "replica r0 sums", lambda: by_path(flat(8), sums=pack(flat(7)))),
    (Rule.SUMS, "replica r0 sums", lambda: books(replicas={"r0": replica(sums=bytes(132))})),
    (Rule.STATE, f"call {RUNNING} held", lambda: with_call(RUNNING, held=9)),
    (Rule.STATE, f"call {WAITING} held", lambda: with_call(WAITING, held=10)),
    (Rule.STATE, f"call {WAITING} elastic", lambda: with_call(WAITING, elastic=1)),
    (Rule.STATE, f"call {RUNNING} path", lambda: with_call(RUNNING, elastic=1)),
    (Rule.STATE, f"call {RUNNING} base", lambda: by_path(flat(8), base=32)),
    (Rule.PROMISE, f"call {RUNNING}", lambda: with_call(RUNNING, elastic=1, promised=1)),
    (Rule.DISPATCH, f"call {WAITING}", lambda: by_path(flat(1))),
    (Rule.HOLDINGS, "key k blocks", lambda: books(keys={"k": replace(HOLDER, blocks=16)})),
    (Rule.HOLDINGS, "key k calls", lambda: books(keys={"k": replace(HOLDER, calls=1)})),
    (Rule.HOLDINGS, "key k blocks", lambda: books(keys={})),
    (Rule.HOLDINGS, "key k pools", lambda: books(keys={"k": replace(HOLDER, pools=("p", 14))})),
    (Rule.HOLDINGS, "key k pools", lambda: books(keys={"k": replace(HOLDER, pools=("p", 15, "q", 0))})),
    (Rule.STATE, f"call {WAITING} pool", lambda: with_call(WAITING, pool="p")),
    (Rule.STATE, f"call {RUNNING} state", lambda: with_call(RUNNING, state="lost")),
    (Rule.STATE, f"call {RUNNING} replica", lambda: with_call(RUNNING, replica="r9")),
    (Rule.STATE, f"call {WAITING} replica", lambda: with_call(WAITING, replica="r0")),
    (Rule.STATE, f"call {RUNNING} prefilling", lambda: with_call(RUNNING, prefilling=4)),
    (Rule.ARRIVAL, f"call {GRANTED}", lambda: with_call(GRANTED, arrival=1)),
    (Rule.ARRIVAL, f"call {RUNNING}", lambda: with_call(RUNNING, arrival=4)),
    (Rule.OWNER, f"call {RUNNING} owner", lambda: with_call(RUNNING, owner="o9")),
    (Rule.OWNER, "session o0", lambda: books(owners={})),
    (Rule.DIGEST, "session o0 count", lambda: books(sessions={"o0": SessionRecord(4, 1, 1, 2, 0xAA)})),
    (Rule.DIGEST, "session o0 sum", lambda: books(sessions={"o0": SessionRecord(4, 1, 1, 1, 0xAB)})),
    (Rule.INDEX, f"outbox o0:{GRANTED}", lambda: books(indexes=indexes(outbox=set()))),
    (Rule.INDEX, "owned o0:00000000dd", lambda: books(indexes=indexes(owned={*indexes()["owned"], "o0:00000000dd"}))),
    (Rule.INDEX, f"deadlines {WAITING}:9000", lambda: books(indexes=indexes(deadlines={f"{WAITING}:9001"}))),
    (Rule.INDEX, "backlog a:normal:000000000010:k", lambda: books(indexes=indexes(backlog=set()))),
    (Rule.INDEX, "order a:normal:0000000000000007:k", lambda: books(indexes=indexes(order=set()))),
    (Rule.INDEX, f"queue a:normal:k:1000000000003:{WAITING}", lambda: books(indexes=indexes(queue=set()))),
    (Rule.WAITING, "flow a:normal:k waiting", lambda: books(flows={("a", "normal", "k"): Flow(7, 2, 10, 1, 0)})),
    (Rule.WAITING, "flow a:normal:k weight", lambda: books(flows={("a", "normal", "k"): Flow(7, 1, 10, 0, 0)})),
    (Rule.WAITING, "class a:normal blocks", lambda: books(lines={("a", "normal"): Line(7, 1, 9, 1, 0)})),
    (Rule.WAITING, "class a:high credit", lambda: books(lines={**books().lines, ("a", "high"): Line(credit=5)})),
    (Rule.PARKED, "flow a:normal:k", parked),
    (Rule.PARKED, "flow a:normal:k", lambda: parked(pool_share=2 * SCALE)),
    (Rule.REST, "replica r0 state", lambda: books(replicas={"r0": replica(state="draining")})),
    (Rule.REST, "replica r0 state", lambda: books(rests={("r0", OPERATOR): "drained"})),
    (Rule.REST, "rest of replica r9", lambda: books(rests={("r9", "o9"): "asleep"})),
    (Rule.HOLD, "replica r0 held for", lambda: books(replicas={"r0": replica(held_for=RUNNING)})),
    (Rule.HOLD, "replica r0 held for", held_behind),
    (Rule.HOLD, "replica r0 held for", lambda: replace(parked(), replicas={"r0": replica(held_for=WAITING)})),
    (Rule.HOLD, "replica r0 state", lambda: books(replicas={"r0": replica(held_for=WAITING, state="down")})),
    (Rule.BLOCKED, "lane a", lambda: books(blocked={"a": RUNNING})),
    (Rule.BLOCKED, "lane b", lambda: books(blocked={"b": WAITING})),
    (Rule.DISPATCH, f"call {WAITING}", lambda: books(replicas={"r0": replica(limit=25)})),
    (Rule.OVERTAKING, f"lane a call {WAITING}", lambda: with_call(WAITING, passed=36)),
    (Rule.PLACE, "places members", lambda: left(indexes=indexes(places=set()))),
    (Rule.PLACE, f"place {PLACE}", lambda: left(arrivals=3)),
    (Rule.PLACE, f"place {PLACE}", lambda: left(calls={**books().calls, "dd": call("dd", "queued", 10, 4)})),
    (Rule.PLACE, f"place {PLACE} end", lambda: left({PLACE: 15_001})),
    (Rule.PLACE, "places", lambda: left({f"{PLACE[:-5]}{i:05d}": 9000 for i in range(10_001)})),
    (Rule.PLACE, "flow a:normal:k later", lambda: books(flows={("a", "normal", "k"): Flow(7, 1, 10, 1, later=9)})),
    (Rule.PLACE, "flow a:normal:k resume", lambda: left(flows={("a", "normal", "k"): Flow(7, 1, 10, 1, 0, 0, 7)})),
    (Rule.PLACE, "flow b:normal:k resume", lambda: left(flows={**books().flows, ("b", "normal", "k"): Flow(resume=7)})),
    (Rule.WAITING, "flow a:normal:k warm", lambda: with_call(WAITING, yields_until=WARM)),
    (Rule.WAITING, "class a:normal warm", lambda: with_call(WAITING, yields_until=WARM)),
    (Rule.SOFT, "replica r0 soft", lambda: held_softly(soft=5)),
    (Rule.SOFT, "replica r0 holds", lambda: held_softly(holds=2)),
    (Rule.SOFT, "replica r0 soft_end", lambda: held_softly(soft_end=0)),
    (Rule.SOFT, "replica r0 soft_end", lambda: held_softly(soft_end=9_001)),
    (Rule.SOFT, f"hold {TALK}", lambda: held_softly(cache=0)),
    (Rule.SOFT, f"hold {TALK}", lambda: held_softly(state="down")),
    (Rule.SOFT, f"hold {TALK} end", lambda: held_softly(due=15_001)),
    (Rule.SOFT, "hold_ends members", lambda: replace(held_softly(), hold_ends=frozenset())),
    (Rule.DISPATCH, f"call {WAITING}", lambda: held_softly(limit=29)),
    (Rule.ONCE, "once e5", lambda: with_call(WAITING, once="e5")),
    (Rule.ONCE, "once e5", lambda: books(once={"e5": WAITING})),
    (Rule.ONCE, "once e5", lambda: replace(with_call(WAITING, once="e5"), once={"e5": RUNNING})),
    (Rule.QUIET, "flow a:normal:k", lambda: empty(flows={("a", "normal", "k"): Flow(tag=9)})),
    (Rule.QUIET, "class a:normal virtual", lambda: empty(lines={("a", "normal"): Line(virtual=9)})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "about", "corrupt"), CORRUPTIONS, ids=lambda value: getattr(value, "name", "")
)
def test_a_corruption_is_seen(rule: Rule, about: str, corrupt: Callable[[], Snapshot]) -> None:
    assert (rule, about) in {(v.rule, v.about) for v in violations(corrupt())}


def test_a_violation_says_what_was_expected_and_what_was_found() -> None:
    (violation,) = violations(books(replicas={"r0": replica(used=14)}))
    text = "replica r0 used: a replica's figures are the sums of its calls: expected 15, found 14"
    assert str(violation) == text


def test_two_replicas_held_for_one_call() -> None:
    other = Replica("r1", "p", 5, 20, 10, 10, 100, held_for=WAITING)
    found = violations(books(replicas={"r0": replica(held_for=WAITING), "r1": other}))
    assert (Rule.HOLD, "replica r1 held for") in {(v.rule, v.about) for v in found}


@pytest.mark.parametrize("changes", [{"dirty": True}, {"opens_at": 6000}], ids=["more to do", "gate closed"])
def test_what_a_dispatch_has_not_looked_at_yet_is_no_violation(changes: dict[str, Any]) -> None:
    room = {"r0": replica(limit=25)}
    assert rules(books(replicas=room)) == {Rule.DISPATCH}
    assert rules(books(replicas=room, **changes)) == set()


@pytest.mark.parametrize(
    "changes", [{"used": 11}, {"prefilling": 0}, {"state": "down"}, {"held_for": WAITING}]
)
def test_a_head_waits_rightly_when_nothing_fits(changes: dict[str, Any]) -> None:
    """A hold for itself lets it in; of these only that one would be a violation, and only with room."""
    full = {name: value for name, value in changes.items() if name not in ("used", "prefilling")}
    assert Rule.DISPATCH not in rules(books(replicas={"r0": replica(**full)}))


# -- one step --------------------------------------------------------------------------------------------------------


def step_rules(before: Snapshot, after: Snapshot) -> set[Rule]:
    return {violation.rule for violation in step_violations(before, after)}


def arrived(used_before: int, **changes: Any) -> tuple[Snapshot, Snapshot]:
    """A call of 10 blocks takes its place on the replica with 20."""
    newcomer = call("00000000dd", "reserved", 10, 4, **changes)
    before = books(replicas={"r0": replica(used=used_before)})
    return before, replace(
        before,
        arrivals=4,
        calls={**before.calls, newcomer.id: newcomer},
        replicas={"r0": replica(used=used_before + 10)},
    )


def test_a_step_that_changes_nothing() -> None:
    assert step_rules(books(), books()) == set()


@pytest.mark.parametrize("name", ["clock", "epoch", "arrivals"])
def test_what_only_rises_went_back(name: str) -> None:
    assert step_rules(books(), replace(books(), **{name: 0})) == {Rule.CLOCK}


def test_a_batch_after_a_later_one() -> None:
    late = books(sessions={"o0": SessionRecord(3, 1, 1, 1, 0xAA)})
    assert step_rules(books(), late) == {Rule.CLOCK}


def test_a_grant_above_the_limit() -> None:
    assert step_rules(*arrived(10)) == set()
    assert step_rules(*arrived(11)) == {Rule.LIMIT}


def test_a_call_that_has_grown_may_exceed_the_limit() -> None:
    before, after = arrived(10)
    grown = replace(after.calls[RUNNING], held=12)
    replicas = {"r0": replica(used=22)}
    assert step_rules(before, replace(after, replicas=replicas)) == {Rule.LIMIT}
    assert (
        step_rules(before, replace(after, calls={**after.calls, RUNNING: grown}, replicas=replicas)) == set()
    )


@pytest.mark.parametrize(("blocks", "found"), [(1, set()), (9, {Rule.FORESEEN})])
def test_a_grant_above_what_paths_leave(blocks: int, found: set[Rule]) -> None:
    """Their whole demands are above the limit, what they hold now is below."""
    path = flat(blocks)
    before = by_path(path)
    newcomer = call("00000000dd", "reserved", 10, 4, held=4, asked=4, base=16, path=pack(path), elastic=1)
    full = {"used": 13, "full": 25, "elastic": 2, "sums": pack(flat(2 * blocks))}
    after = replace(
        before,
        arrivals=4,
        calls={**before.calls, newcomer.id: newcomer},
        replicas={"r0": replace(before.replicas["r0"], **full)},
    )
    assert step_rules(before, after) == found


def test_a_promise_that_is_not_kept() -> None:
    before, after = arrived(10, promised=1)
    assert step_rules(before, after) == set()
    elastic = {"r0": replica(used=10, mode="elastic")}, {"r0": replica(used=20, mode="elastic")}
    broken = replace(before, replicas=elastic[0]), replace(after, replicas=elastic[1])
    assert step_rules(*broken) == {Rule.PROMISE}


def test_a_call_declared_by_force_may_exceed_the_limit() -> None:
    assert step_rules(*arrived(15, charged=0)) == set()


def test_a_limit_lowered_in_the_same_step_excuses() -> None:
    before, after = arrived(10)
    assert step_rules(before, replace(after, replicas={"r0": replica(used=20, limit=15)})) == set()


def test_a_large_call_alone_may_exceed_a_lowered_limit() -> None:
    large = call("00000000dd", "reserved", 18, 4)
    before = empty(replicas={"r0": replica(limit=15, used=0)})
    after = replace(before, calls={large.id: large}, arrivals=4, replicas={"r0": replica(limit=15, used=18)})
    assert step_rules(before, after) == set()


def test_a_grant_behind_a_closed_gate() -> None:
    before, after = arrived(10)
    assert step_rules(replace(before, opens_at=9000), replace(after, opens_at=9000)) == {Rule.GATE}
    assert step_rules(replace(before, opens_at=9000), after) == set(), "the step opened it first"


def test_a_declaration_behind_a_closed_gate() -> None:
    before, after = arrived(5, charged=0)
    assert step_rules(replace(before, opens_at=9000), replace(after, opens_at=9000)) == set()
