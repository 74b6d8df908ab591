"""A request body read without changing a byte of it: its top-level members, where they are, and scalars.

Values stay raw until something asks for them: fields that nobody reads cost one pass at C speed, no objects.
"""

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from gateway.core.outcomes import Code, Refusal

MEMBERS_MAX = 1024
"""Members of one object; a request of vLLM's has about a hundred."""
CONTAINERS_MAX = 200_000
COLONS_MAX = 250_000
COMMAS_MAX = 1_500_000
"""Brackets, colons and commas of a body, those in its texts too if it is long: every value costs time that no other
thread gets."""
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b"[{:")
NUMBER_BYTES_MAX = 64
"""Longest literal that is read as a number; every accepted integer has at most 20 digits."""
SHOWN_CHARS_MAX = 40
"""How much of a wrong value a message repeats."""

Edit = tuple[int, int, bytes]
"""Replace `body[start:end]` by these bytes."""

_SPACE = rb"[ \t\n\r]*"
_KEY = re.compile(_SPACE + b"[{,]" + _SPACE + rb'("(?:[^"\\]++|\\.)*+")' + _SPACE + b":" + _SPACE, re.DOTALL)
_END = re.compile(_SPACE + b"[{]?" + _SPACE + b"}" + _SPACE)
_ERROR_AT = re.compile(r"\(byte (\d+)\)")
_NOT_A_NUMBER = re.compile(rb'(?<!\\)"(\w{1,64})"\s*:\s*(-?(?:NaN|Infinity))')
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANYTHING = msgspec.json.Decoder()


class Refused(Exception):
    """Carries a refusal out of nested readers; `request.parse` turns it back into a value."""

    def __init__(self, code: Code, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message, param)


class Member(msgspec.Struct, frozen=True):
    """One member of an object: its value is `body[start:end]`."""

    body: bytes
    start: int
    end: int

    @property
    def raw(self) -> bytes:
        """A copy, which for a long prompt is worth avoiding."""
        return self.body[self.start : self.end]

    @property
    def view(self) -> memoryview:
        return memoryview(self.body)[self.start : self.end]

    @property
    def is_null(self) -> bool:
        return self.end - self.start == 4 and self.raw == b"null"


Members = dict[str, Member]


def read_members(body: bytes) -> Members:
    """The members of the object that `body` is, in order.

    Raises Refused: `invalid_json` for anything but one strict JSON object in UTF-8 (no NaN, no nesting deeper
    than the interpreter's limit), `duplicate_field` for a key that comes twice, however it is escaped, and
    `invalid_value` for more than MEMBERS_MAX members, CONTAINERS_MAX lists and objects, COLONS_MAX colons or COMMAS_MAX
    commas.
    """
    _check_values(body)
    values = _decode_object(body)
    if len(values) > MEMBERS_MAX:
        message = f"The body has {len(values)} fields; at most {MEMBERS_MAX} are accepted."
        raise Refused(Code.INVALID_VALUE, message)
    return _members_at_usual_places(body, values) or _members(body, values)


def _members_at_usual_places(body: bytes, values: dict[str, msgspec.Raw]) -> Members | None:
    """Where the text is as clients write it: no white space but a blank, or none, behind every comma and colon.

    None for any other text, and where a key comes twice: its first value stands in a place where nothing is expected.
    """
    colon = body.find(b":")
    blank = b" " if body[colon + 1 : colon + 2] == b" " else b""
    before, after = b'{"', b'":' + blank
    found: Members = {}
    at = 0
    for name, value in values.items():
        key = b"%b%b%b" % (before, name.encode(), after)
        start = at + len(key)
        end = start + len(value)
        if not (body.startswith(key, at) and body.startswith(value, start)):
            return None
        found[name] = Member(body, start, end)
        at, before = end, b"," + blank + b'"'
    return found if body[at:] == b"}" else None


def _members(body: bytes, values: dict[str, msgspec.Raw]) -> Members:
    """The same of any text."""
    found: Members = {}
    at, name = 0, ""
    while key := _KEY.match(body, at):
        name = _key_text(key[1])
        value, start = values[name], key.end()
        at = start + len(value)
        if name in found or not body.startswith(value, start):
            raise _given_twice(name)
        found[name] = Member(body, start, at)
    if not _END.fullmatch(body, at):  # the last one's value goes on
        raise _given_twice(name)
    return found


def _given_twice(name: str) -> Refused:
    return Refused(Code.DUPLICATE_FIELD, f"`{shorten(name)}` is given more than once.", shorten(name))


def read_value(members: Members, name: str) -> Any:
    """The decoded value of a member; None where it is absent or null."""
    member = members.get(name)
    return None if member is None else decode(member.view, name)


def decode(value: bytes | memoryview, name: str, decoder: msgspec.json.Decoder[Any] = _ANYTHING) -> Any:
    """What stands in the member `name`, or a part of it.

    Raises Refused, but msgspec.ValidationError where the decoder wants another type and has one of its own.
    """
    try:
        return decoder.decode(value)
    except msgspec.ValidationError:
        if decoder is not _ANYTHING:
            raise
        raise Refused(Code.INVALID_VALUE, f"`{name}` holds a number out of range.", name) from None
    except (msgspec.DecodeError, RecursionError):
        raise Refused(Code.INVALID_JSON, f"`{name}` is not valid JSON text.", name) from None


def read_integer(members: Members, name: str, minimum: int, maximum: int) -> int | None:
    """An integer within the bounds; 10.0 counts as 10, null as absent; anything else is refused."""
    member = members.get(name)
    if member is None:
        return None
    raw = member.raw
    if raw == b"null":
        return None
    value = _integer(raw)
    if value is None or not minimum <= value <= maximum:
        wanted = f"an integer from {minimum} to {maximum}"
        raise Refused(Code.INVALID_VALUE, f"`{name}` must be {wanted}, got {shown(member)}.", name)
    return value


def read_boolean(members: Members, name: str, param: str = "") -> bool:
    """True or false; null and absent are false.  `param` is the field that `name` is nested in, if any."""
    member = members.get(name)
    if member is None or member.raw in (b"false", b"null"):
        return False
    if member.raw != b"true":
        message = f"`{name}` must be true or false, got {shown(member)}."
        raise Refused(Code.INVALID_VALUE, message, param or name)
    return True


def shown(member: Member) -> str:
    """A wrong value as a message may repeat it."""
    return shorten(bytes(member.view[: 4 * SHOWN_CHARS_MAX]).decode(errors="replace"))


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."


def is_given(members: Members, name: str) -> bool:
    """Present and not null."""
    return name in members and not members[name].is_null


def splice(body: bytes, edits: Sequence[Edit]) -> bytes:
    """`body` with the edits applied, which must not overlap; edits at one place keep their order."""
    uncut = memoryview(body)
    if len(edits) == 1:
        ((start, end, text),) = edits
        return b"".join((uncut[:start], text, uncut[end:]))
    pieces: list[bytes | memoryview] = []
    at = 0
    for start, end, text in sorted(edits, key=itemgetter(0)):
        pieces += (uncut[at:start], text)
        at = end
    return b"".join((*pieces, uncut[at:]))


def append_member(body: bytes, name: str, value: bytes) -> Edit:
    """The edit that adds a member at the end of an object that has some already."""
    end = body.rindex(b"}")
    return end, end, b',"%s":%s' % (name.encode(), value)


def _check_values(body: bytes) -> None:
    """Counting bytes is a hundred times cheaper than decoding what they separate; a short body cannot have too many."""
    size = len(body)
    if size > 2 * CONTAINERS_MAX:  # each is closed, too
        marks = body.translate(None, _NO_MARKS)
        if marks.count(b"[") + marks.count(b"{") > CONTAINERS_MAX:
            raise Refused(Code.INVALID_VALUE, f"The body has more than {CONTAINERS_MAX} lists and objects.")
        if marks.count(b":") > COLONS_MAX:
            raise Refused(Code.INVALID_VALUE, f"The body has more than {COLONS_MAX} colons.")
    if size > COMMAS_MAX and body.count(b",") > COMMAS_MAX:
        raise Refused(Code.INVALID_VALUE, f"The body has more than {COMMAS_MAX} commas.")


def _decode_object(body: bytes) -> dict[str, msgspec.Raw]:
    """The last value of every key.

    A value is self-delimiting, so a key whose first place does not hold exactly these bytes comes twice.
    """
    try:
        if not body.isascii():
            body.decode()
        return _OBJECT.decode(body)
    except msgspec.ValidationError:
        raise Refused(Code.INVALID_JSON, "The body must be a JSON object.") from None
    except RecursionError:
        raise Refused(Code.INVALID_JSON, "The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise Refused(Code.INVALID_JSON, f"The body is not UTF-8 (byte {error.start}).") from None
    except msgspec.DecodeError as error:
        raise _malformed(body, error) from None


def _malformed(body: bytes, error: msgspec.DecodeError) -> Refused:
    place = _ERROR_AT.search(str(error))
    at = int(place[1]) if place else 0
    literal = _NOT_A_NUMBER.search(body[max(0, at - 100) : at + 16])
    if literal is None:
        return Refused(Code.INVALID_JSON, f"The body is not valid JSON: {error}.")
    name = literal[1].decode(errors="replace")
    return Refused(Code.INVALID_JSON, f"`{name}` is {literal[2].decode()}, which JSON does not have.", name)


def _key_text(quoted: bytes) -> str:
    text: str = _ANYTHING.decode(quoted) if b"\\" in quoted else quoted[1:-1].decode()
    return text


def _integer(raw: bytes) -> int | None:
    """Exact for integers; None for what is not a number, not finite, or has a fraction."""
    if len(raw) > NUMBER_BYTES_MAX or raw[0] not in b"-0123456789":
        return None
    if raw.isdigit():
        return int(raw)
    if raw.lstrip(b"-").isdigit():
        return int(raw)
    value = float(raw)
    return int(value) if value.is_integer() else None
