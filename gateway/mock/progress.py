"""How far a call has come: the pure bookkeeping behind every shape of answer."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.mock.calls import Call
from gateway.mock.engine import Token
from gateway.mock.tokenizer import word

Json = dict[str, Any]


def dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def event(name: str, document: object) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dump(document))


def text_of(first: int, last: int) -> str:
    """The text of the output tokens from `first` to `last`, counted from 1."""
    return "".join(map(word, range(first, last + 1)))


@dataclass(frozen=True, slots=True)
class Extras:
    """What the last frame tells where the server was started to tell it."""

    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; None: not told."""
    metrics: Mapping[str, float | None] | None = None
    created_cache_tokens: int = 0
    """Prompt tokens of full blocks that were not found there, and are from now on."""


NO_EXTRAS = Extras()


class Progress:
    """Tokens seen of a call, tokens told, and why each of its choices ended."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.counts = [0] * call.width
        self.told = [0] * call.width
        self.reasons: list[str | None] = [None] * call.width
        self._open = call.width

    @property
    def started(self) -> bool:
        return any(self.counts)

    @property
    def finished(self) -> bool:
        return self._open == 0

    def see(self, token: Token) -> None:
        self.counts[token.index] = token.number
        if token.last:
            self.end(token.index, self.call.reason_at(token.index, token.number))

    def end(self, index: int, reason: str) -> None:
        self.reasons[index] = reason
        self._open -= 1

    def due(self, indices: Iterable[int]) -> list[int]:
        """Those of the choices that have a chunk to send: as vLLM, the first token, every interval, and the end; beams
        are told whole."""
        if self.call.beams:
            return [index for index in dict.fromkeys(indices) if self.reasons[index] is not None]
        interval = self.call.stream_interval
        return [
            index
            for index in dict.fromkeys(indices)
            if self.told[index] == 0
            or self.reasons[index] is not None
            or self.counts[index] - self.told[index] >= interval
        ]

    def tell(self, index: int) -> tuple[int, int]:
        """The first and the last token of a choice's next chunk."""
        first, self.told[index] = self.told[index] + 1, self.counts[index]
        return first, self.counts[index]
