"""What kind of text a prompt is, from a sample of its bytes: what its tokens by one vocabulary say of another's.

How many tokens a served model makes of one of cl100k_base's lies between 0.4 (Korean, Chinese) and 3 (digits, one by
one); within one script and one density, tokens for bytes, it hardly differs.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gateway.core.prompt import Text, text_bytes

WINDOWS = 16
WINDOW_BYTES = 128
"""A sample has up to so many windows of so many bytes."""
FOREIGN = 0.3
ACCENTED = 0.005
"""Parts of the characters that are outside of ASCII: from here on their script names the kind, or they are noticed."""
DENSITY_STEP = 0.08
"""Of the logarithm of tokens for bytes."""
SIZES = (32, 128, 512, 2048)
"""Tokens; in short prompts a template's words count for more."""

_ESCAPES = re.compile(rb"(?:\\u[0-9a-fA-F]{4})+")
_ESCAPED_QUOTES = re.compile(rb'\\(["\\/])')
_LEADS = {
    "han": bytes(range(0xE4, 0xEA)),
    "kana": b"\xe3",
    "hangul": bytes(range(0xEA, 0xEE)),
    "cyrillic": bytes(range(0xD0, 0xD4)),
    "two": bytes([*range(0xC2, 0xD0), *range(0xD4, 0xE0)]),
    "three": b"\xe0\xe1\xe2\xee\xef",
    "four": bytes(range(0xF0, 0xF5)),
}
"""By the first byte of a character in UTF-8."""
SCRIPTS = ("words", "marks", "digits", "blank", "accented", *_LEADS)
_ASCII = bytes(range(0x80))
_DIGITS = b"0123456789"
_BLANKS = b" \t\r\n"
_MARKS = b"\n\t{}[]()<>=_;:\"'`/\\|#*+&%$@0123456789"
MARKED = 0.1
"""Code, data and encodings have more of these than prose."""
_KANA_PART = 0.15
"""Japanese has so many kana among its characters, Chinese only punctuation of that block."""
_MANY = 0.5


class Share(NamedTuple):
    """What of a prompt's texts is of one script."""

    script: str
    tokens: int
    """By the packaged vocabulary."""
    json_bytes: int


class Part(NamedTuple):
    """What of a prompt is of one kind."""

    exact: str
    """Script, density, and the size of the whole prompt."""
    coarse: str
    """Without the density."""
    tokens: int
    """By the packaged vocabulary."""


def parts(shares: Iterable[Share]) -> tuple[Part, ...]:
    """Of the texts of a prompt."""
    found = tuple(shares)
    if len(found) == 1:
        return (_part(found[0], bisect_right(SIZES, found[0].tokens)),)
    size = bisect_right(SIZES, sum(share.tokens for share in found))
    return tuple(_part(share, size) for share in found)


def _part(share: Share, size: int) -> Part:
    script, tokens, size_bytes = share
    density = math.log(max(tokens, 1) / max(size_bytes, tokens, 1))
    return Part(f"{script}{round(density / DENSITY_STEP)}/{size}", f"{script}/{size}", tokens)


def json_bytes(text: str) -> int:
    """About what its JSON has: the ends of lines and quotes count twice, of which code has more than prose."""
    return text_bytes(text) + text.count("\n") + text.count('"')


def script_of(text: Text) -> str:
    """One of `SCRIPTS`, from an even sample."""
    step = max(len(text) // WINDOWS, WINDOW_BYTES)
    if isinstance(text, str) and text.isascii():  # a window of characters is one of bytes
        data = text.encode()
        return _script(b"".join([data[start : start + WINDOW_BYTES] for start in range(0, len(data), step)]))
    return _script(b"".join(_windows(text, step)))


def _windows(text: Text, step: int) -> Iterator[bytes]:
    """`step` characters apart."""
    for start in range(0, len(text), step):
        yield _window(text, start)


def _window(text: Text, start: int) -> bytes:
    if isinstance(text, str):
        return text[start : start + WINDOW_BYTES].encode(errors="surrogatepass")[:WINDOW_BYTES]
    window = bytes(memoryview(text)[1:-1][start : start + WINDOW_BYTES])
    if b"\\" not in window:
        return window
    return _ESCAPED_QUOTES.sub(rb"\1", _ESCAPES.sub(_unescaped, window))


def _unescaped(found: re.Match[bytes]) -> bytes:
    """Pairs of surrogates are one character; half a pair, as at the end of a window, is no character of any script."""
    halves = found[0].decode("unicode_escape")
    return halves.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _script(text: bytes) -> str:
    foreign = None if text.isascii() else _foreign_script(text)
    if foreign:
        return foreign
    for name, marks in (("digits", _DIGITS), ("blank", _BLANKS)):
        if _count(text, marks) > _MANY * len(text):
            return name
    return "marks" if _count(text, _MARKS) > MARKED * len(text) else "words"


def _foreign_script(text: bytes) -> str | None:
    """None where there is hardly a character outside of ASCII."""
    counts = {name: _count(text, leads) for name, leads in _LEADS.items()}
    foreign = sum(counts.values())
    part = foreign / max(_count(text, _ASCII) + foreign, 1)
    if part >= FOREIGN:
        asian = counts["han"] + counts["kana"]
        if asian and counts["kana"] >= _KANA_PART * asian and asian >= foreign / 2:
            return "kana"
        return max(counts, key=lambda name: counts[name])
    return "accented" if part >= ACCENTED else None


def _count(text: bytes, marks: bytes) -> int:
    return len(text) - len(text.translate(None, marks))
