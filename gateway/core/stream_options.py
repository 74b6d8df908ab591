"""How a stream tells its usage: what its client asked to hear, and what is written so that kvgate hears it."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.core.body import Edit, Member, Members, Refused, append_member, read_boolean, read_members, shown
from gateway.core.outcomes import Code

_USAGE, _METER = "include_usage", "continuous_usage_stats"
_WANTED = ((_USAGE,), (_USAGE, _METER))


class StreamOptions(NamedTuple):
    """What a client asked to hear of usage, and what to change so that it is reported."""

    asked: bool
    meter_asked: bool
    edits: tuple[Edit, ...]
    meter_edits: tuple[Edit, ...]


NO_STREAM = StreamOptions(asked=False, meter_asked=False, edits=(), meter_edits=())


def read_stream_options(members: Members, body: bytes) -> StreamOptions:
    """Of a stream.  Raises Refused."""
    options = members.get("stream_options")
    if options is None:
        usage, meter = [append_member(body, "stream_options", _options(names)) for names in _WANTED]
        return StreamOptions(False, False, (usage,), (meter,))
    if options.is_null:
        return _replaced(options)
    if options.raw[:1] != b"{":
        message = f"`stream_options` must be an object, got {shown(options)}."
        raise Refused(Code.INVALID_VALUE, message, "stream_options")
    inner = read_members(options.raw)
    asked = read_boolean(inner, _USAGE, "stream_options")
    continuous = read_boolean(inner, _METER, "stream_options")
    if continuous and not asked:  # alone it means nothing to vLLM, beside our `include_usage` it would
        return _replaced(options)
    edits = [_set_true(options, inner, names) for names in _WANTED]
    return StreamOptions(asked, continuous, edits[0], edits[1])


def _options(names: Sequence[str]) -> bytes:
    return b"{%b}" % b",".join(b'"%b":true' % name.encode() for name in names)


def _replaced(options: Member) -> StreamOptions:
    edits = [((options.start, options.end, _options(names)),) for names in _WANTED]
    return StreamOptions(False, False, edits[0], edits[1])


def _set_true(options: Member, inner: Members, names: Sequence[str]) -> tuple[Edit, ...]:
    """In the object that `options` is, whose members are `inner`."""
    given = [inner[name] for name in names if name in inner]
    missing = [b'"%b":true' % name.encode() for name in names if name not in inner]
    edits = [(options.start + member.start, options.start + member.end, b"true") for member in given]
    if missing:
        added = (b"," if inner else b"") + b",".join(missing)
        edits.append((options.end - 1, options.end - 1, added))
    return tuple(edits)
