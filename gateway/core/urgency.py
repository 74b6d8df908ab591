"""How urgent a call is: the class of its key, which the call may lower, and how long it may wait."""

import re
from collections.abc import Sequence

from gateway.core.body import Edit, append_member, read_members
from gateway.core.outcomes import Code, Refusal

PRIORITY = b"x-kvgate-priority"
"""Header: the name of a class."""
DEADLINE = b"x-kvgate-deadline-ms"
"""Header: milliseconds after which the client no longer wants the call to begin."""
DEADLINE_MS_MAX = 24 * 3_600_000
FIELD = "priority"
"""Of the body, to engines that heed it: a higher number waits, and is preempted, before a lower one."""
YIELDING = 2**32
"""Added to that of a call that has to be preempted before any other: more than clients' own can differ by."""

_NUMBER = re.compile(rb"[0-9]{1,10}")
_SHOWN_CHARS = 40


def lowered_class(own: str, classes: Sequence[str], asked: bytes | None, priority: int) -> str | Refusal:
    """The class of a call; `classes` are all names, highest first, `own` is the key's.

    `asked` is the header, `priority` the body's number: each step above 0 is a class lower.  Neither raises.
    """
    rank = classes.index(own)
    lowest = min(rank + max(priority, 0), len(classes) - 1)
    if asked is None:
        return classes[lowest]
    name = asked.decode("utf-8", "replace").strip()
    if name not in classes:
        message = f"`{PRIORITY.decode()}` is {name[:_SHOWN_CHARS]!r}; the classes are {', '.join(classes)}."
        return Refusal(Code.INVALID_VALUE, message, PRIORITY.decode())
    return classes[max(lowest, classes.index(name))]


def yielding_edit(body: bytes, priority: int) -> Edit:
    """Writes the `priority` of a call that yields to others into a body that was read before; `priority` is its own."""
    member, value = read_members(body).get(FIELD), b"%d" % (priority + YIELDING)
    return append_member(body, FIELD, value) if member is None else (member.start, member.end, value)


def read_deadline(raw: bytes | None) -> int | Refusal | None:
    """Milliseconds, None where the client names none."""
    if raw is None:
        return None
    text = raw.strip()
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= DEADLINE_MS_MAX:
        shown = text[:_SHOWN_CHARS].decode("utf-8", "replace")
        message = f"`{DEADLINE.decode()}` must be an integer from 1 to {DEADLINE_MS_MAX}, got {shown!r}."
        return Refusal(Code.INVALID_VALUE, message, DEADLINE.decode())
    return int(text)
