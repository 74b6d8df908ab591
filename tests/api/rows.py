"""What a row of the table says, in words that tests can check."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.core.outcomes import Code


class Counts(StrEnum):
    """What of a call's demand a field changes."""

    PROMPT = "prompt tokens"
    """More of them."""
    CUT = "fewer prompt tokens"
    SEQUENCES = "sequences"
    OUTPUT = "output limit"
    CLASS = "class in the queue"


class Written(StrEnum):
    """What the gateway writes."""

    LIMIT = "the output limit that was reserved for"
    ID = "an id that leads back to the replica"


@dataclass(frozen=True)
class Field:
    """One field, with a value for which the row holds."""

    name: str
    value: Any
    counts: tuple[Counts, ...] = ()
    """() = nothing."""
    words: str = ""
    """How it counts, or why it is refused."""
    writes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the forwarded body that are not as the client sent them.  Of a call without this field nothing is."""
    refused: Code | None = None
    without: tuple[str, ...] = ()
    """Fields of the usual body that do not go with it."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Others that it needs."""


@dataclass(frozen=True)
class Form:
    """The fields of one kind of body."""

    paths: tuple[str, ...]
    body: Mapping[str, Any]
    """A usual one, which is forwarded as it came."""
    fields: tuple[Field, ...]
    plain: tuple[str, ...]
    """Fields that count nothing and pass untouched; `EXAMPLES` has a value of each."""
    words: str = ""
    is_json: bool = True
    """False: multipart/form-data, of which each value is a text or, of `file`, bytes."""


class As(StrEnum):
    """What a part of a message counts as."""

    TEXT = "its text"
    MEDIA = "what the fleet's `media` says for its kind, whatever its bytes"
    NOTHING = "it is refused, unless the fleet's `media.tensor_tokens` says what one counts"


class Way(StrEnum):
    """How a route leads to an engine."""

    ADMITTED = "admitted"
    UNRESERVED = "passed on without a reservation"
    OWN = "answered by kvgate"
    CLOSED = "404"


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    way: Way
    words: str = ""
    public: bool = False
    """Needs no key."""
