"""Where replicas are found while the gateway runs: a host name's addresses, or the pods of a Kubernetes service."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socket import SOCK_STREAM, gaierror
from typing import Annotated, Protocol
from urllib.parse import quote, urlsplit

import msgspec

from gateway.upstream.api import Access
from gateway.upstream.client import tls_context
from gateway.upstream.scraper import Scraper, Unusable

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""For one answer of a source."""
PAGES_MAX = 100
PAGE_ITEMS = 100
"""EndpointSlices in one answer of the API."""
_PORTS = {"http": 80, "https": 443}


class SourceAway(Exception):
    """A source cannot say which replicas there are, in words for the operator."""


class ReplicaSource(Protocol):
    async def find(self) -> Sequence[str]:
        """The URLs of all replicas, at least one.  Raises SourceAway."""
        ...


class Dns:
    """Each address of a host is a replica, as of a Kubernetes service without a cluster IP (headless)."""

    def __init__(self, url: str) -> None:
        """Scheme, host and port."""
        parts = urlsplit(url)
        self._scheme, self._host = parts.scheme, parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]

    async def find(self) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                found = await loop.getaddrinfo(self._host, self._port, type=SOCK_STREAM)
        except TimeoutError as late:
            raise SourceAway(f"{self._host} was not resolved within {LOOK_SECONDS:g} s") from late
        except gaierror as error:
            raise SourceAway(f"{self._host} is not resolved: {error.strerror}") from error
        addresses = dict.fromkeys(str(address[0]) for *_, address in found)
        return [url_of(self._scheme, address, self._port) for address in addresses]


class _Port(msgspec.Struct):
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    name: str | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Slice(msgspec.Struct, rename="camel"):
    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _More(msgspec.Struct, rename={"token": "continue"}):
    token: str = ""


class _Slices(msgspec.Struct):
    items: list[_Slice]
    metadata: _More = msgspec.field(default_factory=_More)


class EndpointSlices:
    """The pods of one service that are ready.  One that is being ended is none of them: its streams finish."""

    def __init__(
        self,
        api: str,
        namespace: str,
        service: str,
        port: str | int,
        scheme: str,
        token_file: Path,
        ca_file: Path | None,
    ) -> None:
        """`port`: name or number, "" where the service has one.  The files are read at each look, for they change;
        without `ca_file` the system's certificates count."""
        self._api = api
        label = quote(f"kubernetes.io/service-name={service}", safe="")
        self._path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector={label}&limit={PAGE_ITEMS}"
        )
        self._service = f"service {namespace}/{service}"
        self._port = port
        self._scheme = scheme
        self._token_file = token_file
        self._ca_file = ca_file

    async def find(self) -> Sequence[str]:
        try:
            access = await asyncio.to_thread(self._access)
        except (OSError, ValueError) as error:
            raise SourceAway(f"{self._service}: the token or the CA cannot be read: {error}") from error
        async with Scraper() as scraper:
            slices = await self._slices(scraper, access)
        urls = [url for slice_ in slices for url in self._urls(slice_)]
        if not urls:
            raise SourceAway(f"{self._service} has no pod that is ready")
        return list(dict.fromkeys(urls))

    def _access(self) -> Access:
        token = self._token_file.read_text(encoding="ascii").strip()
        return Access.of(token, tls_context(str(self._ca_file)) if self._ca_file else None)

    async def _slices(self, scraper: Scraper, access: Access) -> list[_Slice]:
        found: list[_Slice] = []
        path = self._path
        for _ in range(PAGES_MAX):
            try:
                page = msgspec.json.decode(
                    await scraper.get(self._api, path, LOOK_SECONDS, access), type=_Slices
                )
            except Unusable as trouble:
                raise SourceAway(f"{self._service}: {trouble}") from trouble
            except msgspec.MsgspecError as error:
                raise SourceAway(
                    f"{self._service}: the API's answer is no list of EndpointSlices: {error}"
                ) from error
            found += page.items
            if not page.metadata.token:
                return found
            path = f"{self._path}&continue={quote(page.metadata.token, safe='')}"
        raise SourceAway(f"{self._service} has more than {PAGES_MAX * PAGE_ITEMS} EndpointSlices")

    def _urls(self, slice_: _Slice) -> Iterator[str]:
        port = self._port_of(slice_.ports or [])
        if port is None or slice_.address_type == "FQDN":
            return
        for endpoint in slice_.endpoints or []:
            conditions = endpoint.conditions
            if conditions.ready is not False and not conditions.terminating and endpoint.addresses:
                yield url_of(self._scheme, endpoint.addresses[0], port)

    def _port_of(self, ports: Iterable[_Port]) -> int | None:
        """Of all addresses of an endpoint the first one counts, and of the ports the one that is asked for."""
        numbers = [port.port for port in ports if self._port in ("", port.name, port.port)]
        return numbers[0] if len(numbers) == 1 else None


def url_of(scheme: str, address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{port}"


class Follower:
    """Looks again and again, and tells what is new.  What a source said last counts while it cannot say."""

    def __init__(
        self,
        source: ReplicaSource,
        use: Callable[[Sequence[str]], None],
        failed: Callable[[str], None],
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`use` gets the sorted URLs when they differ from the last ones, and raises ValueError for what cannot be
        used; `failed` gets the reason, once until it is another one or all is well again."""
        self._source = source
        self._use = use
        self._failed = failed
        self._seconds = seconds
        self._sleep = sleep
        self._known: Sequence[str] = ()
        self._problem = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._sleep(self._seconds)
            try:
                await self.look()
            except Exception:
                log.exception("a source of replicas could not be asked")

    async def look(self) -> None:
        try:
            found = sorted(await self._source.find())
            if found != self._known:
                self._use(found)
                self._known = found
            self._problem = ""
        except (SourceAway, ValueError) as trouble:
            if str(trouble) != self._problem:
                self._problem = str(trouble)
                self._failed(self._problem)
