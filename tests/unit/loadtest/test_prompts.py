"""Bodies: as many tokens as were planned, by the mock's own tokenizer, and no two alike at the beginning."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.loadtest.prompts import TEMPLATE_TOKENS, Prompts
from gateway.loadtest.scenario import Scenario, parse
from gateway.loadtest.workload import PlannedCall
from gateway.mock import tokenizer

CALL = PlannedCall(
    number=0, arrival_seconds=0, key="default", mix=0, prompt_tokens=100, output_tokens=9,
    answer_tokens=None, leave_after_tokens=None, slow=False,
)  # fmt: skip
FIRST_BLOCK_TOKENS = 16


def scenario(endpoint: str = "chat", **mix: Any) -> Scenario:
    kind = {"prompt_tokens": 100, "output_tokens": 9, **mix}
    phases = [{"seconds": 1, "sessions": 1}]
    return parse(json.dumps({"name": "x", "endpoint": endpoint, "phases": phases, "calls": [kind, kind]}))


def body(call: PlannedCall, endpoint: str = "chat", tag: int = 5, **mix: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Prompts(scenario(endpoint, **mix), tag, 70_000).body(call))
    return found


def pieces(call: PlannedCall, endpoint: str = "chat", tag: int = 5, **mix: Any) -> list[Any]:
    return pieces_of(Prompts(scenario(endpoint, **mix), tag, 70_000), call)


def pieces_of(prompts: Prompts, call: PlannedCall) -> list[Any]:
    found = json.loads(prompts.body(call))
    return found["prompt"] if "prompt" in found else tokenizer.pieces(found["messages"][0]["content"])


@pytest.mark.parametrize("tokens", [8, 9, 10, 11, 100, 4096, 65_536])
def test_a_chat_prompt_has_its_tokens(tokens: int) -> None:
    found = body(replace(CALL, prompt_tokens=tokens, number=123_456_789))

    assert tokenizer.count_chat(found["messages"]) == tokens


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 100, 65_536])
def test_a_completion_prompt_has_its_tokens(tokens: int) -> None:
    assert len(body(replace(CALL, prompt_tokens=tokens), "completions")["prompt"]) == tokens


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_no_two_prompts_share_their_first_block(endpoint: str) -> None:
    numbers = [*range(2_000), 26**4, 26**4 + 1, 1_999_999]
    prompts = Prompts(scenario(endpoint), 5, 70_000)
    starts = {tuple(pieces_of(prompts, replace(CALL, number=n))[:FIRST_BLOCK_TOKENS]) for n in numbers}

    assert len(starts) == len(numbers)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_another_run_has_other_prompts(endpoint: str) -> None:
    assert pieces(CALL, endpoint, tag=5)[:3] != pieces(CALL, endpoint, tag=6)[:3]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_shared_prefix_is_as_long_as_it_was_asked_for_and_then_unique(endpoint: str) -> None:
    one, two = (pieces(replace(CALL, number=n), endpoint, shared_prefix_tokens=48) for n in (1, 2))
    other_kind = pieces(replace(CALL, mix=1), endpoint, shared_prefix_tokens=48)

    assert one[:48] == two[:48]
    assert one[48] != two[48]
    assert one[:1] != other_kind[:1]
    assert len(one) == 100 - (TEMPLATE_TOKENS if endpoint == "chat" else 0)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_that_are_unique_throughout_share_no_part(endpoint: str) -> None:
    call = replace(CALL, prompt_tokens=5_000)
    one, two = (pieces(replace(call, number=n), endpoint, unique_every_tokens=100) for n in (1, 2))

    assert len(one) == len(two) == 5_000 - (TEMPLATE_TOKENS if endpoint == "chat" else 0)
    assert all(one[start : start + 100] != two[start : start + 100] for start in range(0, 4_900))


def test_a_prefix_longer_than_the_prompt_leaves_room_to_be_unique() -> None:
    one, two = (pieces(replace(CALL, number=n), shared_prefix_tokens=1_000) for n in (1, 2))

    assert one != two
    assert len(one) == len(two) == 100 - TEMPLATE_TOKENS


def test_what_else_a_body_says() -> None:
    plain = body(replace(CALL, answer_tokens=4))
    whole = body(CALL, stream=False)

    assert plain["model"] == "demo"
    assert (plain["max_tokens"], plain["mock"]) == (9, {"output_tokens": 4})
    assert plain["stream_options"] == {"include_usage": True}
    assert not {"stream", "stream_options", "mock"} & set(whole)
