import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import uvloop

from gateway import background
from gateway.ledger.embedded import EmbeddedStore
from tests.flow.world import soon


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """One Valkey for the folder: every world has a fleet of its own, and so its own keys."""
    store = EmbeddedStore()
    try:
        store.start()
        yield store.url
    finally:
        store.stop()


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Every test gives back its tasks and its sockets, which are the only files that it opens."""
    tasks, sockets = _other_tasks(), _sockets()
    yield
    await soon(lambda: _other_tasks() <= tasks, "no task is left")
    await soon(lambda: _sockets() <= sockets, "no socket is left")


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is asked about a response in the background every few milliseconds."""
    monkeypatch.setattr(background, "POLL_SECONDS_MIN", 0.01)
    monkeypatch.setattr(background, "POLL_SECONDS_MAX", 0.02)


def _other_tasks() -> set["asyncio.Task[object]"]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def _sockets() -> int:
    return sum(_is_socket(int(name)) for name in os.listdir("/dev/fd"))


def _is_socket(descriptor: int) -> bool:
    """The listing itself has a descriptor, which is gone by now."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What serves in production."""
    return {"uvloop": uvloop.new_event_loop}
