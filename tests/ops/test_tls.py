"""`rediss://`: the ledger trusts the certificates of `store.ca_file`, and checks the name in them."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from gateway.ledger.connection import Connection, listen
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.scripts import fleet_keys
from gateway.ledger.state import read_state
from gateway.ledger.wire import StoreAway
from tests.integration.ledger_world import WAIT_SECONDS, eventually, world
from tests.ops.redis_server import HOST, Certificates, make_certificates, tls_options
from tests.processes import free_port


@dataclass(frozen=True)
class Secured:
    store: EmbeddedStore
    port: int
    trusted: Certificates

    def url(self, host: str = HOST, ca_file: Path | None = None) -> str:
        """As the settings pass it on."""
        return f"rediss://{host}:{self.port}/0?ssl_ca_certs={ca_file or self.trusted.ca_file}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    trusted, port = make_certificates(tmp_path_factory.mktemp("trusted")), free_port()
    with pytest.MonkeyPatch.context() as patch:
        program = shutil.which("redis-server")
        assert program
        patch.setattr("gateway.ledger.embedded.find_server", lambda: Path(program))
        store = EmbeddedStore(*tls_options(port, trusted))
    store.start()
    yield Secured(store, port, trusted)
    store.stop()


async def test_everything_goes_by_tls(secured: Secured) -> None:
    async with world(str(secured.store.socket), 100) as w:
        m = await w.join(secured.url())
        ask = await m.reserve(10)
        assert (await read_state(secured.url(), w.fleet))["reserved"] == 10
        heard = asyncio.Event()
        ears = asyncio.create_task(listen(secured.url(), "here", heard.set))
        await eventually(lambda: w.store.publish("here", ""))
        await asyncio.wait_for(heard.wait(), WAIT_SECONDS)
        ears.cancel()
        await asyncio.wait([ears])
        ask.settle(None, None)
        await eventually(w.empty)


@pytest.mark.parametrize("wrong", ["host", "authority", "system", "plain"])
async def test_who_cannot_prove_its_name_is_no_store(secured: Secured, tmp_path: Path, wrong: str) -> None:
    """Neither for the calls, nor for reading state, nor for listening."""
    url = {
        "host": secured.url("127.0.0.1"),
        "authority": secured.url(ca_file=make_certificates(tmp_path).ca_file),
        "system": f"rediss://{HOST}:{secured.port}",
        "plain": f"redis://{HOST}:{secured.port}",
    }[wrong]
    connection, breaks = Connection(url, fleet_keys("f"), lambda event: None), asyncio.Event()
    ears = asyncio.create_task(listen(url, "here", breaks.set))
    try:
        with pytest.raises(StoreAway):
            await connection.open()
        with pytest.raises(StoreAway):
            await read_state(url, "f")
        await asyncio.wait_for(breaks.wait(), WAIT_SECONDS)
        with redis.Redis(unix_socket_path=str(secured.store.socket), protocol=2) as client:
            assert not client.pubsub_channels("here")
    finally:
        connection.close()
        ears.cancel()
        await asyncio.wait([ears])
