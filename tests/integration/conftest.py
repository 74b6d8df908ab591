from collections.abc import Iterator

import pytest

from tests.processes import World, world


@pytest.fixture
def new_world() -> Iterator[World]:
    """A Valkey, and what the test starts on it."""
    with world() as here:
        yield here
