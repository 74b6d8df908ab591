"""Reads an engine's pages, `/health`, `/metrics` and `/v1/models`, and sends it a call of one token.

On the client of the calls, because a general one keeps the event loop for milliseconds with each page, and every
token that comes meanwhile is late by them.
"""

from typing import Self

from gateway.deadline import patience
from gateway.upstream.api import Access, Collected, UpstreamFailed, UpstreamRequest
from gateway.upstream.client import EngineClient
from gateway.upstream.limits import UpstreamLimits

PAGE_BYTES_MAX = 4_000_000
"""The longest `/metrics` or `/v1/models` that is read; vLLM sends about 60 KB."""
_PART_SECONDS = 10.0
"""For each part of an answer; the whole has the caller's limit, which is lower."""


NO_ACCESS = Access()
_HEADERS = ((b"accept-encoding", b"identity"), (b"connection", b"close"))


class Unusable(Exception):
    """A replica that cannot be used, in words for the operator."""


class Late(Unusable):
    """It did not answer in time."""


class Scraper:
    """Each page on a connection of its own: a probe has to see that an engine still accepts them."""

    def __init__(self) -> None:
        self._client = EngineClient(UpstreamLimits(*[_PART_SECONDS] * 4))

    async def get(
        self, base_url: str, path: str, timeout_seconds: float, access: Access = NO_ACCESS
    ) -> bytes:
        """The body of a 200, within time and size.  Raises Unusable; Late where that takes too long."""
        headers = [*_HEADERS, *access.headers]
        request = UpstreamRequest(base_url, path, headers, b"", method="GET", alone=True, tls=access.tls)
        page = await self._ask(request, timeout_seconds)
        if page.status != 200:
            raise Unusable(f"{base_url}{path} answers {page.status}")
        return page.content

    async def post(
        self, base_url: str, path: str, body: bytes, timeout_seconds: float, access: Access = NO_ACCESS
    ) -> tuple[int, bytes]:
        """Status and body of the answer to JSON, within time and size.  Raises Unusable where there is none."""
        headers = [*_HEADERS, (b"content-type", b"application/json"), *access.headers]
        request = UpstreamRequest(base_url, path, headers, body, alone=True, tls=access.tls)
        page = await self._ask(request, timeout_seconds)
        return page.status, page.content

    async def _ask(self, request: UpstreamRequest, timeout_seconds: float) -> Collected:
        page, url = Collected(PAGE_BYTES_MAX), request.url + request.path
        try:
            async with patience(timeout_seconds):
                await self._client.exchange(request, page)
        except TimeoutError as error:
            raise Late(f"{url} does not answer within {timeout_seconds:g} s") from error
        except UpstreamFailed as error:
            raise Unusable(f"{url}: {error.detail}"[:200]) from error
        return page

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
