from collections.abc import AsyncIterator, Iterator

import pytest

from tests.processes import World, world
from tests.wire import Wire


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
