"""The mock answers as a real vLLM does: status, headers, keys in their order, types, refusals word by word, events."""

import pytest

from tests.processes import Mock
from tests.vllm.answers import Facts, differences, exchange, facts
from tests.vllm.asks import ASKS, Ask
from tests.vllm.engine import TEST_SECONDS, Vllm

pytestmark = pytest.mark.timeout(TEST_SECONDS)
MERGED_DELTAS_ATTEMPTS = 3
"""A real server that falls behind merges the deltas of several tokens into one event."""


@pytest.mark.parametrize("ask", ASKS, ids=[ask.name for ask in ASKS])
def test_same_answer(real: Vllm, mock: Mock, ask: Ask) -> None:
    found: list[str] = []
    for _ in range(MERGED_DELTAS_ATTEMPTS):
        expected, given = seen(real.url, ask), seen(mock.url, ask)
        found = differences(ask.name, expected, given)
        if not found or "chunks" not in expected:
            break
    assert not found, "\n" + "\n".join(found)


def seen(url: str, ask: Ask) -> Facts:
    return facts(exchange(url, ask), exact=ask.exact)


def test_names_are_unique() -> None:
    assert len({ask.name for ask in ASKS}) == len(ASKS)
