"""When a replica that answers its probes gets no new calls, and what lets it back in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rests import BUSY_SECONDS, BUSY_SECONDS_MAX, Why, busy_seconds, read_retry_after
from gateway.upstream.api import Trouble
from gateway.upstream.breaker import FAILURES_MAX, Breaker, Verdict, verdict_of
from gateway.upstream.metrics_text import Vitals, read_page

ANSWER = {"object": "text_completion", "choices": [{"text": "x", "finish_reason": "length"}]}


def failing(trouble: Trouble = Trouble.BROKEN, times: int = FAILURES_MAX) -> Breaker:
    breaker = Breaker()
    for _ in range(times):
        breaker.failed(trouble)
    return breaker


def why_of(breaker: Breaker) -> Why | None:
    return next(iter(breaker.reasons), None)


def test_failures_in_a_row_open_it() -> None:
    breaker = failing(times=FAILURES_MAX - 1)
    assert why_of(breaker) is None
    breaker.succeeded()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(Trouble.BROKEN)
    assert why_of(breaker) is None
    breaker.failed(Trouble.BROKEN)
    assert why_of(breaker) is Why.FAILING
    assert breaker.wants_trial(True)


def test_two_failures_in_a_row_are_looked_into() -> None:
    """An engine that shuts down answers a chat with 500, and says to a completion what it does."""
    breaker = failing(times=1)
    breaker.succeeded()
    breaker.failed(Trouble.BROKEN)
    assert not breaker.wants_trial(True)
    breaker.failed(Trouble.SLOW)
    assert breaker.doubtful
    breaker.tried(Verdict.GOOD)
    assert not breaker.doubtful


def test_refused_connections_do_not() -> None:
    """Of these the watch takes care: a replica that takes no connection is down."""
    assert why_of(failing(Trouble.UNREACHABLE, 100)) is None


def test_load_never_opens_it() -> None:
    """It is left alone until its time is over, and nothing is held against it then."""
    breaker = failing(Trouble.BUSY, 100)
    assert (why_of(breaker), breaker.wants_trial(True), breaker.asks_for_rest) == (Why.BUSY, False, False)
    breaker.succeeded()
    assert why_of(breaker) is Why.BUSY, "a call that began before"
    breaker.rested()
    assert why_of(breaker) is None
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(Trouble.BROKEN)
    assert why_of(breaker) is None


def test_one_that_fails_is_not_healed_by_its_being_busy() -> None:
    breaker = failing()
    breaker.failed(Trouble.BUSY, 3.0)
    assert breaker.asks_for_rest
    assert breaker.reasons == [Why.FAILING, Why.BUSY]
    breaker.rested()
    assert (breaker.reasons, breaker.asks_for_rest) == ([Why.FAILING], False)


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (b"", None),
        (b"soon", None),
        (b"-1", None),
        (b"1.5", None),
        (b"0", 0.0),
        (b" 7 ", 7.0),
        (b"61", BUSY_SECONDS_MAX),
        (b"9" * 5000, BUSY_SECONDS_MAX),
        ("٣".encode(), None),
        (b"Tue, 14 Nov 2023 22:13:30 GMT", 10.0),
        (b"Tue, 14 Nov 2023 22:13:10 GMT", 0.0),
        (b"Tue, 14 Nov 2033 22:13:20 GMT", BUSY_SECONDS_MAX),
        (b"Tue, 99 Nov 2023 22:13:20 GMT", None),
    ],
)
def test_what_an_engine_asks_for(value: bytes | None, seconds: float | None) -> None:
    assert read_retry_after(value, NOW) == seconds


@given(st.binary(max_size=60))
def test_whatever_it_asks_for_is_bounded(value: bytes) -> None:
    seconds = read_retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= BUSY_SECONDS_MAX
    assert BUSY_SECONDS <= busy_seconds(seconds) <= BUSY_SECONDS_MAX


def test_only_a_good_trial_closes_it() -> None:
    breaker = failing()
    for verdict in (Verdict.BAD, Verdict.NEUTRAL):
        breaker.tried(verdict)
        assert (why_of(breaker), breaker.wants_trial(True)) == (Why.FAILING, True)
    breaker.tried(Verdict.GOOD)
    assert (why_of(breaker), breaker.wants_trial(True)) == (None, False)
    assert why_of(failing(times=1)) is None


def test_one_call_that_the_engine_ended_is_enough() -> None:
    breaker = failing(Trouble.ENDING, 1)
    for verdict in (Verdict.ENDING, Verdict.BAD, Verdict.NEUTRAL):
        assert (why_of(breaker), breaker.wants_trial(True)) == (Why.ENDING, True)
        breaker.tried(verdict)
    breaker.tried(Verdict.GOOD)
    assert why_of(breaker) is None


def test_calls_of_others_that_the_engine_ended_are_looked_into() -> None:
    """The count alone proves nothing, and what it was at the first look neither."""
    breaker = Breaker()
    for aborted in (None, 7, 7):
        breaker.saw(Vitals(aborted=aborted))
        assert not breaker.wants_trial(True)
    breaker.saw(Vitals(aborted=8))
    breaker.saw(Vitals(aborted=8))
    assert (why_of(breaker), breaker.wants_trial(True)) == (None, True)
    breaker.tried(Verdict.NEUTRAL)
    assert breaker.wants_trial(True)
    breaker.tried(Verdict.ENDING)
    assert why_of(breaker) is Why.ENDING
    breaker.tried(Verdict.GOOD)
    breaker.saw(Vitals(aborted=0))
    assert (why_of(breaker), breaker.wants_trial(True)) == (None, False)


def test_it_sleeps_as_long_as_its_metrics_say() -> None:
    """What they leave out is not known, and no reason."""
    breaker = Breaker()
    for awake, why in ((True, None), (False, Why.ASLEEP), (None, None), (False, Why.ASLEEP), (True, None)):
        breaker.saw(Vitals(awake=awake))
        assert (why_of(breaker), breaker.wants_trial(True)) == (why, False)


@pytest.mark.parametrize(
    "readings", [[3, 3, 4, 4, 3], [0], [2, 2, 0], [1, 0]], ids=["fell", "idle", "all ended", "one ended"]
)
def test_a_suspect_is_one_until_a_call_has_ended_there(readings: list[int]) -> None:
    breaker = failing(Trouble.SLOW, 1)
    for running in readings:
        assert why_of(breaker) is Why.SUSPECT
        breaker.saw(Vitals(running=running))
    assert why_of(breaker) is None


def test_a_suspect_that_does_not_say_what_runs_is_tried() -> None:
    breaker = failing(Trouble.SLOW, 1)
    breaker.saw(Vitals())
    assert (why_of(breaker), breaker.wants_trial(True)) == (Why.SUSPECT, True)
    breaker.tried(Verdict.BAD)
    assert why_of(breaker) is Why.SUSPECT
    breaker.tried(Verdict.GOOD)
    assert why_of(breaker) is None
    breaker.failed(Trouble.SLOW)
    breaker.saw(Vitals(running=2))
    assert (why_of(breaker), breaker.wants_trial(True)) == (Why.SUSPECT, False)


def test_a_trial_does_not_clear_a_suspect_that_says_what_runs() -> None:
    """It answers again, and what it has not answered may hold blocks still."""
    breaker = failing(Trouble.SLOW)
    breaker.saw(Vitals(running=2))
    assert breaker.reasons == [Why.FAILING, Why.SUSPECT]
    breaker.tried(Verdict.GOOD)
    assert breaker.reasons == [Why.SUSPECT]
    breaker.saw(Vitals(running=1))
    assert breaker.reasons == []


def test_the_last_one_of_a_pool_is_tried_only_where_nothing_else_tells() -> None:
    breaker = failing(Trouble.SLOW)
    assert breaker.wants_trial(False)
    breaker.saw(Vitals(running=2))
    assert not breaker.wants_trial(False)
    assert not failing(Trouble.ENDING, 1).wants_trial(False)


def test_more_late_answers_do_not_make_it_less_of_a_suspect() -> None:
    breaker = failing(Trouble.SLOW, 1)
    breaker.saw(Vitals(running=5))
    breaker.failed(Trouble.SLOW)
    breaker.saw(Vitals(running=4))
    assert why_of(breaker) is None, "one that ran when it became one has ended"


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, ANSWER, Verdict.GOOD),
        (200, ANSWER | {"choices": [{"text": "", "finish_reason": "abort"}]}, Verdict.ENDING),
        (200, {"error": {"message": "it failed", "code": 500}}, Verdict.BAD),
        (200, {"error": {"message": "busy", "code": 503}}, Verdict.NEUTRAL),
        (200, "<html>", Verdict.BAD),
        (400, {}, Verdict.GOOD),
        (404, {}, Verdict.GOOD),
        (429, {}, Verdict.NEUTRAL),
        (503, {}, Verdict.NEUTRAL),
        (500, {}, Verdict.BAD),
        (502, {}, Verdict.BAD),
    ],
)
def test_what_a_trial_comes_to(status: int, body: object, verdict: Verdict) -> None:
    assert verdict_of(status, json.dumps(body).encode()) is verdict


RUNNING = 'vllm:num_requests_running{engine="%d",model_name="m"} %s\n'
ABORTED = 'vllm:request_success_total{engine="%d",finished_reason="abort",model_name="m"} %s\n'
STOPPED = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 9.0\n'
STATE = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="%s"} %s\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Vitals()),
        (RUNNING % (0, "3.0") + RUNNING % (1, "2.0"), Vitals(running=5)),
        (STOPPED + ABORTED % (0, "2.0") + ABORTED % (1, "1.0"), Vitals(aborted=3)),
        (STATE % ("awake", "1.0") + STATE % ("discard_all", "0.0"), Vitals(awake=True)),
        (STATE % ("awake", "0.0") + STATE % ("weights_offloaded", "1.0"), Vitals(awake=False)),
        (RUNNING % (0, "NaN") + ABORTED % (0, "-1") + STATE % ("awake", "?"), Vitals()),
        ("# HELP vllm:num_requests_running x\nvllm:num_requests_running{", Vitals()),
    ],
)
def test_what_metrics_say_of_an_engine(text: str, expected: Vitals) -> None:
    assert read_page(text).vitals == expected


def test_each_rank_is_for_itself() -> None:
    """What the others of one address run, or end, tells nothing of it."""
    text = RUNNING % (0, "3.0") + RUNNING % (1, "2.0") + ABORTED % (0, "1.0") + ABORTED % (1, "0.0")
    text += STATE % ("awake", "0.0") + (STATE % ("awake", "1.0")).replace('engine="0"', 'engine="1"')
    assert read_page(text, rank=0).vitals == Vitals(awake=False, running=3, aborted=1)
    assert read_page(text, rank=1).vitals == Vitals(awake=True, running=2, aborted=0)
