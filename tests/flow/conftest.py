import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from gateway.ledger.embedded import EmbeddedStore


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """One Valkey for the folder: every world has a fleet of its own, and so its own keys."""
    store = EmbeddedStore()
    try:
        store.start()
        yield store.url
    finally:
        store.stop()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What serves in production."""
    return {"uvloop": uvloop.new_event_loop}
