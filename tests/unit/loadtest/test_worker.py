"""The load generator's own measure of itself."""

from array import array

import pytest

from gateway.loadtest.worker import LAG_SAMPLE_SECONDS, _note_lag


def test_a_long_stall_is_as_many_samples_as_should_have_come() -> None:
    lags = array("d")
    for _ in range(1_000):
        _note_lag(lags, -0.001)
    _note_lag(lags, 1.0)
    late = [lag for lag in lags if lag > 0]
    assert late[0] == 1.0
    assert len(late) == pytest.approx(1 / LAG_SAMPLE_SECONDS, abs=1)
    assert sorted(lags)[int(len(lags) * 0.99)] > 0.5
