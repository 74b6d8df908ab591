"""Which rank of an engine a call is sent to."""

from gateway.core.headers import pinned

HEADERS = [(b"accept", b"*/*"), (b"x-data-parallel-rank", b"3"), (b"x-request-id", b"r")]


def test_a_call_is_pinned_to_the_rank_that_has_its_blocks() -> None:
    assert pinned(HEADERS, 0) == [HEADERS[0], HEADERS[2], (b"x-data-parallel-rank", b"0")]


def test_one_engine_gets_what_the_client_sent() -> None:
    assert pinned(HEADERS, None) == HEADERS
