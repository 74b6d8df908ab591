"""The mock's tokenizer: a fixed regular expression, so that every count can be worked out by hand.

A token is one of: an optional space and up to five ASCII letters; up to three digits; up to two ASCII punctuation
marks; up to four white-space or control characters, NUL alone; one character beyond ASCII.  So a token is at most
six bytes of UTF-8, no text but the empty one has zero tokens, and English prose has about 1.4 tokens a word.

A token's id is its bytes read as a big-endian integer, which makes decoding exact.  The chat template puts four
tokens around each message and three before the reply; tools and tool calls count as their compact JSON, a content
part that is not text counts `PART_TOKENS`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TOKEN_BYTES_MAX = 6
VOCABULARY = 1 << (8 * TOKEN_BYTES_MAX)
"""Ids are below this."""
MESSAGE_TOKENS = 4
REPLY_TOKENS = 3
PART_TOKENS = 256
ROLE_CHARS_MAX = 16
"""A role up to this length is part of the template; a longer one counts as text."""

_PIECE = re.compile(
    r" ?[A-Za-z]{1,5}|[0-9]{1,3}|[!-/:-@\[-`{-~]{1,2}|\x00|[\x01-\x20\x7f]{1,4}|[^\x00-\x7f]",
)
_TEMPLATE_ID = 1
"""Stands for every token of the chat template; no text holds it alone but the control character U+0001."""


def pieces(text: str) -> list[str]:
    """The text cut into tokens; joined they are the text again."""
    return _PIECE.findall(text)


def count(text: str) -> int:
    return len(pieces(text))


def encode(text: str) -> list[int]:
    return [int.from_bytes(piece.encode("utf-8", "replace"), "big") for piece in pieces(text)]


def decode(ids: Sequence[int]) -> str:
    """The text of the ids.  Raises ValueError for an id outside the vocabulary."""
    return b"".join(_bytes_of(number) for number in ids).decode("utf-8", "replace")


def _bytes_of(number: int) -> bytes:
    if not 0 <= number < VOCABULARY:
        raise ValueError(f"Token id {number} is out of vocabulary")
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")


def count_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> int:
    texts = sum(count(text) for text in _texts(messages, tools))
    return texts + _template_tokens(messages)


def encode_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[int]:
    """As many ids as `count_chat` counts; those of the template come first."""
    ids = [_TEMPLATE_ID] * _template_tokens(messages)
    for text in _texts(messages, tools):
        ids.extend(encode(text))
    return ids


def _template_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    parts = sum(
        1 for message in messages for part in _parts(message) if not isinstance(part.get("text"), str)
    )
    return MESSAGE_TOKENS * len(messages) + REPLY_TOKENS + PART_TOKENS * parts


def _texts(messages: Sequence[Mapping[str, Any]], tools: object) -> Iterator[str]:
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and len(role) > ROLE_CHARS_MAX:
            yield role
        if isinstance(content, str):
            yield content
        for part in _parts(message):
            if isinstance(part.get("text"), str):
                yield part["text"]
        if message.get("tool_calls"):
            yield _compact(message["tool_calls"])
    if tools:
        yield _compact(tools)


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
