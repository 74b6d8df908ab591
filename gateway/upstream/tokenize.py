"""Counting by the engines themselves: `/tokenize`, and `count_tokens` for Anthropic's protocol."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.core.prefixes import PromptCount, moment_of
from gateway.core.request import Endpoint, GenerationRequest
from gateway.core.tokenize import Question, count_in, measured_in, questions
from gateway.upstream.api import Access
from gateway.upstream.scraper import Unusable

ANSWER_SECONDS = 0.5
"""For all prompts of a call together; an engine needs 0.1 s for 64k tokens."""
ASKED_MAX = 16
"""Calls that ask at the same time; what is beyond it is estimated."""
READ_AT_ONCE_BYTES = 32 * 1024
"""Answers up to this, 6,000 ids, are read for how a prompt begins on the event loop: 0.4 ms."""
PAUSE_SECONDS = 1.0
"""After an engine that did not answer, or not as hoped, none is asked for so long."""


class Post(Protocol):
    """`Scraper.post`."""

    async def __call__(
        self, base_url: str, path: str, body: bytes, timeout_seconds: float, access: Access
    ) -> tuple[int, bytes]: ...


class EngineCounter:
    """Asks a replica that is up, each in turn.  Implements `tokens.api.ModelCounter`; it never raises."""

    def __init__(
        self,
        engines: Callable[[], Sequence[tuple[str, Access]]],
        post: Post,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`engines`: base URL and access of the replicas that may be asked now."""
        self._engines = engines
        self._post = post
        self._now = now
        self._wall = wall
        self._asked = 0
        self._turn = 0
        self._not_before = now()

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        await asyncio.sleep(0)
        engines = self._engines()
        if not engines or self._asked >= ASKED_MAX or self._now() < self._not_before:
            return None
        asked = questions(request)
        if asked is None:
            return None
        self._turn += 1
        is_shown = request.endpoint is not Endpoint.COMPLETIONS  # by a template, which may show the date
        moment = moment_of(self._wall(), asked[0].untold) if is_shown else b""
        return await self._ask(*engines[self._turn % len(engines)], asked, block_size, moment)

    async def _ask(
        self, url: str, access: Access, asked: Sequence[Question], block_size: int, moment: bytes
    ) -> list[PromptCount] | None:
        self._asked += 1
        ends_at = self._now() + ANSWER_SECONDS
        counts = []
        try:
            for question in asked:
                seconds = ends_at - self._now()
                status, answer = await self._post(url, question.path, question.body, seconds, access)
                count = await _measured(answer, block_size, moment) if status == 200 else None
                if status not in (200, 400):
                    self._pause()
                if count is None:  # what it refuses here it will refuse to generate from
                    return None
                counts.append(count)
        except Unusable:
            self._pause()
            return None
        finally:
            self._asked -= 1
        return counts

    def _pause(self) -> None:
        self._not_before = self._now() + PAUSE_SECONDS


async def _measured(answer: bytes, block_size: int, moment: bytes) -> PromptCount | None:
    if not block_size:
        count = count_in(answer)
        return None if count is None else PromptCount(count)
    if len(answer) <= READ_AT_ONCE_BYTES:
        return measured_in(answer, block_size, moment)
    return await asyncio.to_thread(measured_in, answer, block_size, moment)  # ASKED_MAX at a time
