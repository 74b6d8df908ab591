import pytest
import redis

from gateway.ledger.embedded import EmbeddedStore


@pytest.fixture(scope="session")
def store_client():
    """A client of a real Valkey that this test session owns."""
    store = EmbeddedStore()
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    yield client
    client.close()
    store.stop()
