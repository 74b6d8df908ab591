"""Whether and when a client of the load test tries again; `tests/sdk` asks the OpenAI SDK the same."""

import pytest

from gateway.loadtest.records import Attempt, End
from gateway.loadtest.retries import retry_delay_seconds
from gateway.loadtest.scenario import Client

CLIENT = Client(retries=3, backoff_seconds=0.5, backoff_seconds_max=8, retry_after_seconds_max=120)


def delay(end: End, status: int = 0, done: int = 0, chance: float = 0.0, **headers: str) -> float | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return retry_delay_seconds(CLIENT, Attempt(0, 0.0, end=end, status=status), named, done, chance)


@pytest.mark.parametrize("end", [End.TIMED_OUT, End.FAILED])
def test_delays_double_up_to_their_bound(end: End) -> None:
    patient = Client(retries=9, backoff_seconds=0.5, backoff_seconds_max=8)
    attempt = Attempt(0, 0.0, end=end, status=200)

    found = [retry_delay_seconds(patient, attempt, {}, done, 0.0) for done in range(10)]

    assert found == [0.5, 1, 2, 4, 8, 8, 8, 8, 8, None]


def test_chance_takes_a_quarter_at_most() -> None:
    assert delay(End.FAILED, chance=0.0) == 0.5
    assert delay(End.FAILED, chance=1.0) == pytest.approx(0.375)


@pytest.mark.parametrize("end", [End.ANSWERED, End.LEFT, End.STOPPED])
def test_what_is_over_is_not_tried_again(end: End) -> None:
    assert delay(end) is None


def test_the_gateways_wish_is_kept() -> None:
    assert delay(End.REFUSED, 429, retry_after="3", retry_after_ms="2500") == 2.5
    assert delay(End.REFUSED, 429, retry_after="3") == 3
    assert delay(End.REFUSED, 429, retry_after="600") is None  # beyond what clients wait for
    assert delay(End.REFUSED, 429, retry_after="-1") == 0.5
    assert delay(End.REFUSED, 429, retry_after="Wed, 21 Oct 2026 07:28:00 GMT") == 0.5
    assert delay(End.FAILED, 200, retry_after="3") == 0.5  # a stream that broke is no refusal


def test_a_client_may_ignore_the_wish() -> None:
    deaf = Client(honour_retry_after=False)
    attempt = Attempt(0, 0.0, end=End.REFUSED, status=429)

    assert retry_delay_seconds(deaf, attempt, {"retry-after": "30"}, 0, 0.0) == 0.5
