"""Each pool's engines have a key and certificates of their own, and hear of no other pool's."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.cli import main
from tests.ops.redis_server import HOST, Certificates, make_certificates
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

SECONDS = 30.0
KEYS = {"SHORT_KEY": "sk-short", "LONG_KEY": "sk-long"}


class Door:
    """In front of an engine: it lets in who shows a certificate of its authority."""

    def __init__(self, target: str, certificates: Certificates) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca_file))
        self._tls.verify_mode = ssl.CERT_REQUIRED
        self._tls.load_cert_chain(certificates.certificate, certificates.key)
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Door"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"https://{HOST}:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        engine_reader, engine_writer = await asyncio.open_connection(*self._target)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_copy(reader, engine_writer), _copy(engine_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


def access_of(certificates: Certificates, key: str) -> dict[str, str]:
    return {
        "api_key_env": key,
        "ca_file": str(certificates.ca_file),
        "client_cert_file": str(certificates.certificate),
        "client_key_file": str(certificates.key),
    }


@asynccontextmanager
async def two_pools(here: World, shown: int = 1) -> AsyncIterator[tuple[GatewayProcess, dict[str, Mock]]]:
    """Each with an authority, a certificate and a key of its own; calls of `short` may use both.

    `shown`: the certificate that the gateway shows to `long`.
    """
    folders = [here.folder / name for name in ("short", "long")]
    for folder in folders:
        folder.mkdir()
    certificates = [make_certificates(folder) for folder in folders]
    mocks = {name: here.mock("--api-key", f"sk-{name}") for name in ("short", "long")}
    accesses = [
        access_of(certificates[0], "SHORT_KEY"),
        access_of(certificates[1], "LONG_KEY")
        | {
            "client_cert_file": str(certificates[shown].certificate),
            "client_key_file": str(certificates[shown].key),
        },
    ]
    doors = [Door(mock.url, own) for mock, own in zip(mocks.values(), certificates, strict=True)]
    async with doors[0].open(), doors[1].open():
        short = {
            "name": "short",
            "max_prompt_tokens": 100,
            "replicas": [doors[0].url],
            "upstream": accesses[0],
        }
        long = {"name": "long", "replicas": [doors[1].url], "upstream": accesses[1]}
        lanes = {"lanes": {"short": ["short", "long"]}}
        config, (key,) = here.config([short, long], store=QUICK_STORE, fleet=lanes)
        gateway = here.gateway(config, key, wait=False, **KEYS)
        await soon(gateway.is_ready, "the gateway is ready", SECONDS)
        yield gateway, mocks


def state_of(gateway: GatewayProcess, pool: str) -> str:
    (row,) = gateway.state()["fleets"]["demo"]["pools"][pool]["replicas"].values()
    return str(row["state"])


async def pool_of(gateway: GatewayProcess, prompt_tokens: int) -> tuple[int, str]:
    answer = await ask(gateway.url, post(gateway.key, completion(prompt_tokens, 2)))
    return answer.status, answer.headers["x-kvgate-pool"]


async def test_each_pool_is_let_in_by_its_own(new_world: World) -> None:
    """A call that is tried in the other pool gets the key of that one."""
    async with two_pools(new_world) as (gateway, mocks):
        for pool in mocks:
            await soon(lambda pool=pool: state_of(gateway, pool) == "up", f"{pool} lets us in", SECONDS)
        assert await pool_of(gateway, 16) == (200, "short")
        assert await pool_of(gateway, 200) == (200, "long")
        mocks["short"].fail("status:500")
        assert await pool_of(gateway, 16) == (200, "long")
        assert mocks["long"].log()["finished"] == 2


async def test_another_certificate_lets_nobody_in(new_world: World) -> None:
    async with two_pools(new_world, shown=0) as (gateway, _):
        await soon(lambda: state_of(gateway, "short") == "up", "short lets us in", SECONDS)
        assert state_of(gateway, "long") == "down"


@pytest.mark.parametrize("content", ["", "not a certificate"])
def test_certificates_are_checked_with_the_settings(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.pem").write_text(content)
    upstream: dict[str, Any] = {"client_cert_file": "own.pem"}
    config = tmp_path / "kvgate.yaml"
    config.write_text(
        "auth: {required: false}\n"
        f"fleets: [{{model: m, pools: [{{name: only, replicas: ['https://a:1'], upstream: {upstream}}}]}}]\n"
    )
    assert main(["check-config", str(config)]) == 2
    assert "fleets[0].pools[0].upstream: its files cannot be used for TLS" in capsys.readouterr().err
