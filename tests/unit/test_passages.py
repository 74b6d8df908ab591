"""How many calls that reserve nothing are under way at once, and which paths such calls may have."""

import pytest

from gateway.core.outcomes import Code, Refusal
from gateway.core.request import UNRESERVED, Dialect, Endpoint
from gateway.http.passages import Passages
from gateway.http.routes import find_route


def test_each_key_takes_half_and_all_together_take_no_more_than_there_are() -> None:
    passages = Passages(5)
    assert [passages.take("a") for _ in range(2)] == [None, None]
    refusal = passages.take("a")
    assert isinstance(refusal, Refusal)
    assert refusal.message.startswith("2 calls of this key that reserve nothing are under way")
    assert [passages.take("b") for _ in range(2)] == [None, None]
    assert passages.take("c") is None
    refusal = passages.take("d")
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.retry_ms) == (Code.CAPACITY_EXCEEDED, 1000)
    assert refusal.message == (
        "5 calls that reserve nothing are under way; `routes.unreserved_max` is 5, of which one key may take half"
    )
    for key in "aabbc":
        passages.give_back(key)
    assert (passages.count, passages._held) == (0, {})


def test_one_place_is_anybodys() -> None:
    passages = Passages(1)
    assert passages.take("a") is None
    assert passages.take("b") is not None


def test_a_lower_bound_counts_from_the_next_call_on() -> None:
    passages = Passages(4)
    assert [passages.take(key) for key in "ab"] == [None, None]
    passages.most = 2
    assert passages.take("c") is not None
    passages.give_back("a")
    assert passages.take("c") is None


@pytest.mark.parametrize("path", [*Endpoint, *UNRESERVED])
def test_known_paths_take_post_alone(path: str) -> None:
    route = find_route(path.encode(), [])
    assert route
    assert (route.name, route.methods) == (path, ("POST",))
    assert (route.endpoint is None) == (path in UNRESERVED)
    is_anthropics = path.startswith("/v1/messages")
    assert route.dialect is (Dialect.ANTHROPIC if is_anthropics else Dialect.OPENAI)


@pytest.mark.parametrize(
    "path", [b"/tokenize/", b"/Tokenize", b"/%74okenize", b"//tokenize", b"/classify", b"/", b"*", b"\xff"]
)
def test_other_paths_are_none(path: bytes) -> None:
    assert find_route(path, ["/classif", "/v1/classify"]) is None


def test_a_path_that_is_allowed_is_compared_as_it_stands() -> None:
    route = find_route(b"/classify", ["/classify"])
    assert route
    assert route.methods == ("GET", "POST")
    assert find_route(b"/%63lassify", ["/classify"]) is None
