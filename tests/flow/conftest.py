from collections.abc import Iterator

import pytest

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
