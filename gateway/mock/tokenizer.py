"""The mock's tokenizer: a fixed regular expression, so that every count can be worked out by hand.

A token is one of: an optional space and up to five ASCII letters; up to three digits; up to two ASCII punctuation
marks; up to four white-space or control characters, NUL alone; one character beyond ASCII.  So a token is at most
six bytes of UTF-8, no text but the empty one has zero tokens, and English prose has about 1.4 tokens a word.

A token's id is its bytes read as a big-endian integer, which makes decoding exact.  The chat template puts three
tokens before each message and before the reply, and one behind each message, so that a conversation that goes on
begins with the shorter one and its reply; tools come first.  Tools and tool calls count as their compact JSON, a
content part that is not text counts `PART_TOKENS`.

A piece is the text of a token.  Those of the template begin with NUL and are longer, which no piece of a text is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

TOKEN_BYTES_MAX = 6
VOCABULARY = 1 << (8 * TOKEN_BYTES_MAX)
"""Ids are below this."""
MESSAGE_TOKENS = 4
REPLY_TOKENS = 3
PART_TOKENS = 256
ROLE_CHARS_MAX = 16
"""A role up to this length is part of the template; a longer one counts as text."""
WORDS = (
    " lorem",
    " ipsum",
    " dolor",
    " sit",
    " amet",
    " sed",
    " quis",
    " nisi",
    " duis",
    " aute",
    " irure",
    " magna",
)
"""The text of every answer is this cycle; each word is one token."""

_PIECE = re.compile(
    r" ?[A-Za-z]{1,5}|[0-9]{1,3}|[!-/:-@\[-`{-~]{1,2}|\x00|[\x01-\x20\x7f]{1,4}|[^\x00-\x7f]",
)
_TEMPLATE_ID = 1
"""Stands for every token of the chat template; no text holds it alone but the control character U+0001."""
_IDS_REMEMBERED = 65536


def word(number: int) -> str:
    """Text of the n-th output token, counted from 1."""
    return WORDS[(number - 1) % len(WORDS)]


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


def ids_pieces(ids: Sequence[int]) -> list[str]:
    """The texts of ids, different for different ids: bytes that are not UTF-8 become lone surrogates.

    Raises ValueError for an id outside the vocabulary.
    """
    return [_piece_of(number) for number in ids]


@lru_cache(_IDS_REMEMBERED)
def _piece_of(number: int) -> str:
    return _bytes_of(number).decode("utf-8", "surrogateescape")


def chat_pieces(
    messages: Sequence[Mapping[str, Any]], tools: object = None, *, reply: bool = True
) -> list[str]:
    """The prompt of a conversation: tools, messages, and the head of the reply if there is to be one."""
    found = pieces(_compact(tools)) if tools else []
    for message in messages:
        found += _message_pieces(message)
    return found + (_head("assistant") if reply else [])


def count_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> int:
    return len(chat_pieces(messages, tools))


def encode_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[int]:
    """As many ids as `count_chat` counts."""
    return [
        _TEMPLATE_ID
        if piece.startswith("\0") and len(piece) > 1
        else int.from_bytes(piece.encode("utf-8", "replace"), "big")
        for piece in chat_pieces(messages, tools)
    ]


def _message_pieces(message: Mapping[str, Any]) -> Iterator[str]:
    role, text = message.get("role"), message.get("content")
    yield from _head(role)
    if isinstance(text, str):
        yield from pieces(text)
    for part in _parts(message):
        yield from _part_pieces(part)
    if message.get("tool_calls"):
        yield from pieces(_compact(message["tool_calls"]))
    yield "\0end"


def _head(role: object) -> list[str]:
    if not isinstance(role, str):
        role = ""
    if len(role) > ROLE_CHARS_MAX:
        return ["\0role", "\0long", "\0text", *pieces(role)]
    return ["\0role", "\0 " + role, "\0text"]


def _part_pieces(part: Mapping[str, Any]) -> list[str]:
    """Of a text part its text; anything else is one token that names it and the rest that fills it up."""
    text = part.get("text")
    if isinstance(text, str):
        return pieces(text)
    return ["\0 " + _compact(part)] + ["\0part"] * (PART_TOKENS - 1)


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
