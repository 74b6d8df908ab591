"""The load test's clients try again as the OpenAI SDK does, which is asked itself."""

from typing import Any

import httpx
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.loadtest.records import Attempt, End
from gateway.loadtest.retries import retry_delay_seconds
from gateway.loadtest.scenario import Client

SDK: Any = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:9")
DELAYS = st.sampled_from(
    ["0", "0.25", "7", "59", "61", "119", "120", "121", "1e4", "-3", "nan", "inf", "x", ""]
)


@settings(deadline=None)
@given(
    status=st.sampled_from([400, 401, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504, 529]),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "retry-after": DELAYS,
            "retry-after-ms": st.sampled_from(["0", "1", "2500", "120000", "120001", "x", "nan"]),
            "x-should-retry": st.sampled_from(["true", "false", "maybe"]),
        },
    ),
    done=st.integers(0, 4),
)
def test_refusals_are_retried_as_the_sdk_retries_them(
    status: int, headers: dict[str, str], done: int
) -> None:
    """Its own two functions, on the same answer; of the jitter only the range is known."""
    client = Client(retries=5, backoff_seconds=0.5, backoff_seconds_max=8, retry_after_seconds_max=120)
    attempt = Attempt(0, 0.0, end=End.REFUSED, status=status)

    ours = [retry_delay_seconds(client, attempt, headers, done, chance) for chance in (0.0, 1.0)]

    theirs = _sdk_delay(status, headers, retries=5, done=done)
    if theirs is None:
        assert ours == [None, None]
    else:
        longest, shortest = ours
        assert longest is not None
        assert shortest is not None
        assert shortest - 1e-9 <= theirs <= longest + 1e-9


def _sdk_delay(status: int, headers: dict[str, str], retries: int, done: int) -> float | None:
    response = httpx.Response(status, headers=headers)
    options = openai._models.FinalRequestOptions(method="post", url="/", max_retries=retries)
    if not SDK._should_retry(response):
        return None
    found: float = SDK._calculate_retry_timeout(retries - done, options, response.headers)
    return found
