"""Names of conversations: a turn and the one before it agree, and nobody else does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.talk import Talk, read_talk

SALT = b"salt"
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}


def talk(messages: list[dict[str, Any]], salt: bytes = SALT) -> Talk:
    return read_talk(json.dumps(messages).encode(), salt)


@pytest.mark.parametrize("more", [[ANSWER, USER], [CALL, RESULT], [CALL, RESULT, RESULT, USER]])
def test_a_turn_goes_on_with_what_the_one_before_sent(more: list[dict[str, Any]]) -> None:
    first = [{"role": "system", "content": "Be brief."}, USER]
    assert talk([*first, *more]).past == talk(first).whole
    assert talk([*first, *more]).whole != talk(first).whole


def test_a_first_turn_goes_on_with_nothing() -> None:
    assert talk([USER]).past == ""
    assert talk([ANSWER]).past == ""
    assert talk([ANSWER, USER]).past == ""


def test_names_have_what_the_ledger_takes() -> None:
    assert len(talk([USER]).whole) == 16
    assert set(talk([USER]).whole) <= set("0123456789abcdef")


def test_another_salt_is_another_conversation() -> None:
    assert talk([USER], b"other").whole != talk([USER]).whole
    assert talk([USER, ANSWER, USER], b"other").past != talk([USER]).whole


def test_where_a_client_wants_its_cache_says_nothing() -> None:
    """The mark moves from turn to turn."""
    marked = {"type": "ephemeral"}
    first = [{"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": marked}]}]
    then = [
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
        {"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": marked}]},
    ]
    assert talk(then).past == talk(first).whole


_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "tool"]),
            "content": st.text(max_size=3) | st.just(None),
        }
    ),
    min_size=1,
    max_size=6,
)


@given(_MESSAGES, _MESSAGES)
def test_only_the_same_messages_have_a_name_in_common(
    some: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    assert (talk(some).whole == talk(others).whole) is (json.dumps(some) == json.dumps(others))
    last = max((at for at, message in enumerate(some) if message["role"] == "assistant"), default=0)
    assert talk(some).past == (talk(some[:last]).whole if last else "")
