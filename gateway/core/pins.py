"""Named beginnings of prompts that are kept in the engines' caches: when one would be forgotten, and whether it is
worth a call.

An engine forgets, of the blocks that nobody holds, those first that were left longest ago.  What was left when so many
tokens fitted in free blocks (its room) is forgotten once about as many have passed: computed ones take free blocks, and
found ones are taken out of the same row.  So time is counted in tokens that pass through an engine, not in seconds: the
same rule holds for an engine at rest and for one under load.

Source of the rule: `vllm/v1/core/block_pool.py` of vLLM 0.32 (`free_blocks`, `get_new_blocks`, `touch`).
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import msgspec

from gateway.core.outcomes import Refusal
from gateway.core.prompt import PromptText, Text, literal_text
from gateway.core.request import Endpoint, GenerationRequest, parse

CALL_TOKENS = 32
"""What a call of one token costs an engine that has its prompt: a block computed again, and a place in a step."""
FOUND_PART = 0.5
"""Of a prefix: with more of it an engine has it still, but for the last blocks."""
PART_MAX, PART_MIN = 0.7, 1 / 16
"""Of the room that may pass before the prefix is asked for again: at first, and the least that is learned.  Never more,
as what is found in blocks that are held has passed as well and took nothing out of the row.
"""
PART_LONGER, PART_SHORTER = 1.05, 0.5
MEMORY_ROOMS = 8
"""So many rooms later a use counts half."""


class Page(msgspec.Struct, frozen=True):
    """An engine's cache, as its metrics tell."""

    passed: int
    """Tokens of prompts and answers, since its process began."""
    found: int
    """Those of them that were in the cache, but for what calls found that begin with what is kept."""
    room: int
    """Tokens that fit in the blocks that nobody holds."""


class Kept(msgspec.Struct):
    """One prefix on one replica."""

    tokens: int = 0
    """Of the prefix, as the engine counts it; 0 until that is known."""
    left_at: int | None = None
    """`Page.passed` when it was in use last; None where the engine is believed not to have it."""
    room: int = 0
    """`Page.room` at that time."""
    part: float = PART_MAX
    """Learned: of the room, what may pass before it is asked for again."""
    uses: float = 0.0
    """By calls of clients.  Each counts the less, the more has passed since."""
    seen_at: int = 0
    """`Page.passed` up to which the uses were discounted."""

    def use(self, page: Page, found_tokens: int | None) -> None:
        """A client's call that begins with it has ended there; `found_tokens` of its prompt were in the cache, None
        where the engine does not tell."""
        self._age(page)
        self.uses += 1
        self._learn(page, found_tokens)
        self._touch(page)

    def asked(self, page: Page, sent_at: int, tokens: int, found_tokens: int | None) -> None:
        """A call of ours has ended there; `sent_at`: `Page.passed` before it was sent.

        Its own tokens have passed since then, and push it nowhere.
        """
        self._age(page)
        self.tokens = tokens
        self._learn(page, found_tokens)
        self._touch(page, sent_at + tokens)

    def is_due(self, page: Page, passing: int) -> bool:
        """Whether it should be asked for now; `passing`: tokens that will pass until the next page.

        Not where the engine has forgotten it already: then the next call of a client brings it back for the price that
        a call of ours would have.
        """
        self._age(page)
        if self.left_at is None or self.room < self.tokens:
            return False
        if page.passed + passing - self.left_at < self.part * self.room:
            return False
        return self.earns(page)

    def earns(self, page: Page) -> bool:
        """Whether the calls that find it save more than keeping it costs.

        In the time until it has to be asked for again: its uses times its tokens, against our call, and what else its
        place would hold times the part of such that is found.
        """
        if not self.tokens:
            return self.uses > 0
        uses = self.uses * log(2) / MEMORY_ROOMS * self.part
        others = self.part * page.found / max(page.passed, 1)
        return (uses - others) * self.tokens > CALL_TOKENS

    def _age(self, page: Page) -> None:
        """Engines count from 0 when they begin: what one held before is gone."""
        if page.passed < self.seen_at:
            self.left_at, self.uses = None, 0.0
        elif self.uses:
            self.uses *= 0.5 ** ((page.passed - self.seen_at) / (MEMORY_ROOMS * max(self.room, 1)))
        self.seen_at = page.passed

    def _learn(self, page: Page, found_tokens: int | None) -> None:
        if self.left_at is None or found_tokens is None or not self.tokens:
            return
        passed, believed = page.passed - self.left_at, self.part * self.room
        if found_tokens < FOUND_PART * self.tokens:
            if passed < believed:
                self.part = max(self.part * PART_SHORTER, PART_MIN)
        elif passed >= believed / 2:
            self.part = min(self.part * PART_LONGER, PART_MAX)

    def _touch(self, page: Page, passed: int = 0) -> None:
        self.left_at, self.room = max(page.passed, passed), page.room


class PinBook:
    """What is known of each prefix on each replica of a fleet."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Kept]] = {}
        self._pages: dict[str, Page] = {}
        self._ours: dict[str, int] = {}
        """Tokens that calls which begin with what is kept have found on each replica."""

    def use(self, name: str, replica: str, found_tokens: int | None) -> None:
        """A client's call that begins with the prefix has ended there: says nothing before the engine's first page."""
        page = self._pages.get(replica)
        if page is not None:
            self._ours[replica] = self._ours.get(replica, 0) + (found_tokens or 0)
            self._of(name, replica).use(page, found_tokens)

    def passed(self, replica: str) -> int:
        """`Page.passed` of its last page."""
        page = self._pages.get(replica)
        return page.passed if page else 0

    def asked(self, name: str, replica: str, sent_at: int, tokens: int, found_tokens: int | None) -> None:
        """A call of ours has ended there; `sent_at`: what `passed` was when it was sent."""
        page = self._pages.get(replica)
        if page is not None:
            self._ours[replica] = self._ours.get(replica, 0) + (found_tokens or 0)
            self._of(name, replica).asked(page, sent_at, tokens, found_tokens)

    def turn(self, replica: str, page: Page) -> Sequence[str]:
        """The engine has told how it is (`found`: by whatever calls): the prefixes to be asked for there now."""
        before = self._pages.get(replica, page)
        if page.passed < before.passed:
            self._ours[replica] = 0
        passing = max(page.passed - before.passed, 0)
        page = Page(page.passed, max(page.found - self._ours.get(replica, 0), 0), page.room)
        self._pages[replica] = page
        return [name for name, kept in self._kept.get(replica, {}).items() if kept.is_due(page, passing)]

    def tokens(self, name: str, replica: str) -> int:
        """Of the prefix as the engine counted it; 0 where that is not known."""
        kept = self._kept.get(replica, {}).get(name)
        return kept.tokens if kept else 0

    def keep_only(self, names: Sequence[str], replicas: Sequence[str]) -> None:
        """Forget all others."""
        for replica in [*self._kept, *self._pages]:
            if replica not in replicas:
                self._kept.pop(replica, None)
                self._pages.pop(replica, None)
                self._ours.pop(replica, None)
        for kept in self._kept.values():
            for name in [name for name in kept if name not in names]:
                del kept[name]

    def _of(self, name: str, replica: str) -> Kept:
        return self._kept.setdefault(replica, {}).setdefault(name, Kept())


class Beginning(msgspec.Struct, frozen=True):
    """How one tells that a call begins with a prefix: by its texts, whatever its roles are called."""

    endpoint: Endpoint
    texts: tuple[str, ...]
    """Of a completion one, with which that of the call begins."""
    beside: tuple[str, ...] = ()
    """Tools: they stand before the messages in the prompt, and behind them among the texts."""

    @classmethod
    def of(cls, request: GenerationRequest, beside: int) -> "Beginning":
        """`beside`: how many of its texts are no messages."""
        (prompt,) = request.prompts
        assert isinstance(prompt, PromptText)
        texts = tuple(map(_decoded, prompt.texts))
        end = len(texts) - beside
        return cls(request.endpoint, texts[:end], texts[end:])

    def is_of(self, request: GenerationRequest) -> bool:
        """Whether that call begins so."""
        if request.endpoint is not self.endpoint or len(request.prompts) != 1:
            return False
        prompt = request.prompts[0]
        if not isinstance(prompt, PromptText) or len(prompt.texts) < len(self.texts):
            return False
        if self.endpoint is Endpoint.COMPLETIONS:
            return _decoded(prompt.texts[0]).startswith(self.texts[0])
        if any(_differ(text, own) for text, own in zip(prompt.texts, self.texts, strict=False)):
            return False
        return all(text in prompt.texts[len(self.texts) :] for text in self.beside)


class Pin(msgspec.Struct, frozen=True):
    """A prefix that operators have named."""

    name: str
    request: GenerationRequest
    """Has an engine compute it: it asks for one token."""
    beginning: Beginning


def pin_of(
    name: str,
    model: str,
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> Pin | Refusal:
    """`prompt`, or `messages` with `tools` or without.  A refusal names the field that an engine would not take."""
    endpoint = Endpoint.CHAT if prompt is None else Endpoint.COMPLETIONS
    given: dict[str, Any] = {"prompt": prompt, "messages": messages, "tools": tools}
    fields = {field: value for field, value in given.items() if value is not None}
    body = msgspec.json.encode({"model": model, **fields, "max_tokens": 1, "temperature": 0})
    request = parse(endpoint, body, n_max=1)
    if isinstance(request, Refusal):
        return request
    return Pin(name, request, Beginning.of(request, beside=tools is not None))


def _decoded(text: Text) -> str:
    return text if isinstance(text, str) else literal_text(text)


def _differ(text: Text, own: str) -> bool:
    """A text that is shorter as it stands in the body than decoded cannot be the same: it is not decoded for that."""
    if not isinstance(text, str) and len(text) - len(b'""') < len(own):
        return True
    return _decoded(text) != own
