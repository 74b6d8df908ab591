"""Prompts of token ids: what is read of a body is how its prompt begins, in whatever form and place that stands."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prefixes import points
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.tokens import ids as room
from gateway.tokens.ids import ThreadedIdReader
from gateway.tokens.threads import CountingThreads

IDS = st.lists(st.integers(0, 3) | st.integers(0, 2**53 - 1), min_size=1, max_size=120)


@pytest.fixture(scope="module")
def threads() -> Iterator[CountingThreads]:
    made = CountingThreads()
    yield made
    made.close()


def request_of(prompt: Any, **fields: Any) -> GenerationRequest:
    body = json.dumps({"model": "m", **fields, "prompt": prompt, "max_tokens": 4}).encode()
    request = parse(Endpoint.COMPLETIONS, body, n_max=1)
    assert isinstance(request, GenerationRequest), request
    return request


def as_it_is(ids: list[int]) -> Any:
    return ids


def in_a_list(ids: list[int]) -> Any:
    return [ids]


@given(ids=IDS, size=st.integers(1, 4), form=st.sampled_from((as_it_is, in_a_list)), inline=st.booleans())
async def test_a_body_begins_as_its_ids_do(
    threads: CountingThreads, ids: list[int], size: int, form: Callable[[list[int]], Any], inline: bool
) -> None:
    """Read at once or in a thread."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(room, "INLINE_BODY_BYTES", 1 << 20 if inline else 0)
        found = await ThreadedIdReader(threads).points(request_of(form(ids), stop=["[1, 2, 3]"]), size)
    assert found == points(ids, size)


@pytest.mark.parametrize(
    "prompt",
    [[1, -2] * 100, [-1, 2] * 100, [2**53] * 200, [1, 10**30] * 100, [10**400] * 200],
    ids=["negative", "negative first", "too large", "beyond 64 bits", "beyond any float"],
)
async def test_what_no_vocabulary_has_says_nothing(threads: CountingThreads, prompt: list[int]) -> None:
    """Its engine refuses it."""
    assert await ThreadedIdReader(threads).points(request_of(prompt), 1) == b""
