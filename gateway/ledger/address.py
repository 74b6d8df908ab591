"""Where the store is, as its URL says: one server, or several that are asked which one it is.

Our own grammar, beside that of redis-py for one server (`redis://`, `rediss://`, `unix://`):

    redis+sentinel://[user:password@]host[:26379],host.../NAME[/database]
    redis+cluster://[user:password@]host[:6379],host...
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import parse_url

SERVER_PORT = 6379
SENTINEL_PORT = 26379


class Kind(StrEnum):
    """What the named servers are."""

    STORE = "redis"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True)
class Server:
    """A host and port, or the path of a unix socket."""

    host: str = "localhost"
    port: int = SERVER_PORT
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """Everything that a connection needs; its text never has the password."""

    kind: Kind
    servers: tuple[Server, ...]
    primary: str = ""
    """What sentinels call it."""
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: bool = False
    ca_file: str = ""
    """Certificates (PEM) that are trusted instead of the system's."""


def parse(url: str) -> Address:
    """Raises ValueError, whose text has nothing of the URL: a part that is not understood may be of the password."""
    try:
        return _parse(url)
    except ValueError:
        raise ValueError(
            "it is not the URL of a store; in a password, / ? # [ and % are written as %XX"
        ) from None


def _parse(url: str) -> Address:
    scheme, _, rest = url.partition("://")
    if scheme == Kind.SENTINEL:
        return _several(Kind.SENTINEL, rest, SENTINEL_PORT)
    if scheme == Kind.CLUSTER:
        return _several(Kind.CLUSTER, rest, SERVER_PORT)
    return _one(scheme, parse_url(url))


def _one(scheme: str, options: Any) -> Address:
    server = Server(
        options.get("host", "localhost"), options.get("port", SERVER_PORT), options.get("path", "")
    )
    return Address(
        Kind.STORE,
        (server,),
        username=options.get("username", ""),
        password=options.get("password", ""),
        database=int(options.get("db", 0)),
        tls=scheme == "rediss",
        ca_file=options.get("ssl_ca_certs", ""),
    )


def _several(kind: Kind, rest: str, default_port: int) -> Address:
    authority, _, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    username, _, password = login.partition(":")
    primary, _, database = path.partition("/")
    return Address(
        kind,
        tuple(_server(host, default_port) for host in hosts.split(",")),
        primary=unquote(primary),
        username=unquote(username),
        password=unquote(password),
        database=int(database or 0),
    )


def _server(text: str, default_port: int) -> Server:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing in the list of servers")
    return Server(parts.hostname, parts.port or default_port)
