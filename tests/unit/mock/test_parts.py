"""Fault scripts and journal of the mock."""

import json

import pytest

from gateway.mock.faults import SCRIPTS_MAX, Fault, Faults, Kind, parse_fault, parse_script
from gateway.mock.journal import BODY_BYTES_KEPT, RECORDS_MAX, Journal, Record, State


def test_faults_are_read_strictly() -> None:
    assert parse_fault("status:503") == Fault(Kind.STATUS, 503)
    assert parse_fault("reset_after_events:2").strikes_after_events == 2
    assert parse_fault("finish_abort").strikes_after_events == 1
    assert parse_fault("error_event").strikes_after_events == 0
    assert parse_fault("hang").strikes_after_events is None
    assert parse_fault("hang:0").strikes_after_events == 0
    assert parse_fault("slow:3").strikes_after_events == 0
    assert parse_fault("crash").strikes_after_events == 0
    assert [parse_fault(text).engine_wide for text in ("crash:5", "drain", "sleep", "slow:2", "hang")] == [
        *(True, True, True, True, False)
    ]
    for text in (
        "",
        "nope",
        "status",
        "status:200",
        "gzip:1",
        "hang:x",
        "hang:",
        "reset_after_events",
        "slow",
        "slow:0",
        None,
        5,
    ):
        with pytest.raises(ValueError, match="fail"):
            parse_fault(text)
    for script in (
        [],
        {"x": 1},
        {"output_tokens": True},
        {"hold_seconds": -1},
        {"hold_seconds": "1"},
        {"late_busy": 1},
    ):
        with pytest.raises(ValueError, match="mock"):
            parse_script(script)


def test_global_faults_are_taken_once_each_and_bounded() -> None:
    faults = Faults()
    faults.add(Fault(Kind.GZIP), 2)
    faults.add(Fault(Kind.GARBAGE), 1)
    assert [fault and fault.kind for fault in (faults.take() for _ in range(4))] == [
        Kind.GZIP,
        Kind.GZIP,
        Kind.GARBAGE,
        None,
    ]
    for count in (0, SCRIPTS_MAX + 1):
        with pytest.raises(ValueError, match="count"):
            faults.add(Fault(Kind.GZIP), count)


def test_the_journal_keeps_the_last_calls_and_hashes_large_bodies() -> None:
    journal = Journal()
    for number in range(RECORDS_MAX + 1):
        journal.receive(Record("/v1/completions", [], json.dumps({"n": number}).encode()))
    large = Record("/v1/completions", [("a", "b")], b"1" * (BODY_BYTES_KEPT + 1))
    journal.receive(large)
    journal.move(large, State.ABORTED)
    shown = journal.shown()
    assert (shown["received"], shown["aborted"], len(shown["requests"])) == (RECORDS_MAX + 2, 1, RECORDS_MAX)
    assert shown["requests"][0]["body"] == {"n": 2}
    last = shown["requests"][-1]
    assert (last["body"], last["body_bytes"], last["state"]) == (None, BODY_BYTES_KEPT + 1, "aborted")
    assert len(last["sha256"]) == 64


def test_the_journal_tells_when_what_happened() -> None:
    times = iter((10.0, 10.5, 12.0, 13.0))
    journal = Journal(lambda: next(times))
    record = Record("/v1/completions", [], b"{}")
    journal.receive(record)
    journal.move(record, State.STARTED)
    journal.note_first_token(record, 1.0)
    journal.move(record, State.FINISHED)
    record.counts = [2, 3]
    shown = journal.shown()["requests"][0]
    assert shown["times"] == {"received": 10.0, "started": 10.5, "first_token": 11.0, "ended": 13.0}
    assert shown["output_tokens"] == 5


@pytest.mark.parametrize(("seconds", "told"), [(0.4, 10.5), (9.0, 12.0)])
def test_a_coarse_clock_does_not_put_the_first_token_out_of_order(seconds: float, told: float) -> None:
    times = iter((10.0, 10.5, 12.0))
    journal = Journal(lambda: next(times))
    record = Record("/v1/completions", [], b"{}")
    journal.receive(record)
    journal.move(record, State.STARTED)
    journal.note_first_token(record, seconds)
    assert record.times["first_token"] == told
