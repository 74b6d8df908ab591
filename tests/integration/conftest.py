import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import uvloop

from tests.processes import World, world
from tests.wire import Wire

LOOPS = dict.fromkeys(("test_upstream_client.py", "test_loadtest_client.py"), ("uvloop", "asyncio"))
"""Files that do not run on uvloop alone."""


@pytest.fixture
def new_world() -> Iterator[World]:
    """A Valkey, and what the test starts on it."""
    with world() as here:
        yield here


@pytest.fixture
async def hang_up() -> AsyncIterator[None]:
    """Whatever connections the test has left open are closed."""
    yield
    Wire.hang_up_all()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop is what serves; where it does not exist asyncio's own loop does."""
    loops = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    wanted = LOOPS.get(item.path.name, ("uvloop",))
    return {name: loops[name] for name in wanted}
