"""The mock's tokenizer: what counts, what comes back, and what one prompt has in common with another."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock import tokenizer


@given(st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()
    assert len(ids) == tokenizer.count(text) >= (len(text.encode("utf-8", "replace")) + 5) // 6
    assert all(0 <= number < tokenizer.VOCABULARY for number in ids)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("def foo(x):", ["def", " foo", "(", "x", "):"]),
        ("implementation 2026", ["imple", "menta", "tion", " ", "202", "6"]),
        ("äöü", ["ä", "ö", "ü"]),
        ("\0\0\n\n\n\n\n", ["\0", "\0", "\n\n\n\n", "\n"]),
        ("", []),
    ],
)
def test_pieces(text: str, pieces: list[str]) -> None:
    assert tokenizer.pieces(text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.ids_pieces(tokenizer.encode(text)) == pieces


def test_different_ids_have_different_pieces() -> None:
    ids = [0, 1, 0x80, 0xFF, 0xC3A4, 0xC3, 0x206C6F72656D]
    pieces = tokenizer.ids_pieces(ids)
    assert len(set(pieces)) == len(ids)
    assert (pieces[4], pieces[6]) == ("ä", " lorem")
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer.ids_pieces([tokenizer.VOCABULARY])


def test_every_word_of_an_answer_is_one_token() -> None:
    text = "".join(map(tokenizer.word, range(1, 30)))
    assert tokenizer.pieces(text) == [tokenizer.word(number) for number in range(1, 30)]
    assert tokenizer.word(1) == tokenizer.word(1 + len(tokenizer.WORDS))


IMAGE = {"type": "image_url", "image_url": {}}


def test_the_chat_template_counts_messages_parts_and_tools() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, IMAGE]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    expected = 3 * 4 + 3 + 2 + 1 + tokenizer.PART_TOKENS + 3
    assert tokenizer.count_chat(messages) == len(tokenizer.encode_chat(messages)) == expected
    assert tokenizer.count_chat(messages, [1]) == expected + 3
    assert len(tokenizer.chat_pieces(messages, [1])) == expected + 3


def test_a_conversation_that_goes_on_begins_with_the_shorter_one_and_its_reply() -> None:
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]
    words = [tokenizer.word(number) for number in range(1, 8)]
    goes_on = [*asked, {"role": "assistant", "content": "".join(words)}, {"role": "user", "content": "more"}]
    before, after = tokenizer.chat_pieces(asked, [1]), tokenizer.chat_pieces(goes_on, [1])
    assert after[: len(before) + len(words)] == before + words


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "ho"},
        {"role": "a role longer than any", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]},
        {"content": "hi"},
    ],
)
def test_messages_differ_by_role_text_and_parts(other: dict[str, Any]) -> None:
    message = {"role": "user", "content": "hi"}
    assert tokenizer.chat_pieces([message]) != tokenizer.chat_pieces([other])


def test_different_images_of_equal_size_differ() -> None:
    def prompt(url: str) -> list[str]:
        return tokenizer.chat_pieces([{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])

    assert prompt("a") == prompt("a")
    assert prompt("a") != prompt("b")


@given(st.text(max_size=20))
@settings(max_examples=40, deadline=None)
def test_no_text_looks_like_the_template(text: str) -> None:
    template = set(tokenizer.chat_pieces([{"role": "user", "content": ""}]))
    assert not template & set(tokenizer.pieces(text))
