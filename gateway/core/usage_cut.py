"""Taking an event's usage out again, for a client that did not ask for it; every other byte stays as it came.

An unescaped quote ends a string, so `,"usage":{` within JSON is always a member of some object.  Of which one is plain
where the object that it begins ends right before the last brace of the event: that brace ends the event's own object.
Whatever else looks like it is read as JSON; what is none, or begins with its usage, is left as it is.
"""

import json
import re

from gateway.core.body import Refused, read_members
from gateway.core.outcomes import Code

_USAGE = b',"usage":{'
_LAST_OF_ALL = b"}}\n\n"
"""How nearly all events end: with an object that has no braces in it, so that its end is found without expressions."""
_WITHIN = rb'(?:[^{}"]++|"(?:[^"\\]++|\\.)*+")*+'
_LAST = re.compile(rb"\{" + _WITHIN + rb"(?:\{" + _WITHIN + rb"\}" + _WITHIN + rb")*+\}(\}\s*+)", re.DOTALL)
"""The rest of an event from its usage on: an object that holds objects without others in them, then the last brace."""


def without_usage(data: bytes, start: int, end: int) -> bytes | None:
    """The event that is `data[start:end]` without its usage; None where that is not its last member, or nested deeper.

    For an event that is one line of valid JSON with `usage` among its members: of any other the answer means nothing.
    """
    at = data.rfind(_USAGE, start, end)
    if at < 0:
        return None
    rest_at = at + len(_USAGE) - 1
    is_plain = data.find(b"}", rest_at) == end - len(_LAST_OF_ALL) and data.find(b"{", rest_at + 1, end) < 0
    if is_plain and data.endswith(_LAST_OF_ALL, rest_at, end):
        return data[start:at] + _LAST_OF_ALL[1:]
    last = _LAST.fullmatch(data, rest_at, end)
    return data[start:at] + last[1] if last else None


def cut_usage(event: bytes) -> bytes:
    """Any event without the usage of its data; as it came where it has none that can be taken out."""
    if b'"usage"' not in event or not event.startswith(b"data:") or event.find(b"\ndata:") >= 0:
        return event
    line_end = event.find(b"\n")
    payload = event[5 : line_end if line_end >= 0 else len(event)]
    try:
        members = read_members(payload)
    except Refused as refused:
        return _lenient_cut(event, payload) if refused.refusal.code is Code.INVALID_JSON else event
    names = list(members)
    if "usage" not in members or names[0] == "usage":
        return event
    before, usage = members[names[names.index("usage") - 1]], members["usage"]
    return event[: 5 + before.end] + event[5 + usage.end :]


def _lenient_cut(event: bytes, payload: bytes) -> bytes:
    """Engines write what strict JSON does not have: half a surrogate pair, `-Infinity` as a log probability."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        return event
    has_usage = isinstance(fields, dict) and "usage" in fields
    return (without_usage(event, 0, len(event)) or event) if has_usage else event
