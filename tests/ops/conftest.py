"""These tests take minutes, and some need programs of the system: they run with KVGATE_TEST_OPS set (`make test-ops`).

Without it one of each kind runs, of those that need nothing but the server of the wheel.
"""

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop

SHORT = {
    "test_sentinel.py": "test_calls_survive_a_failover[kill]",
    "test_cluster.py": "test_a_slot_moves_under_load[0.3]",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KVGATE_TEST_OPS"):
        return
    here = [item for item in items if item.path.parent.name == "ops"]
    left_out = [item for item in here if SHORT.get(item.path.name) != item.name]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What serves in production."""
    return {"uvloop": uvloop.new_event_loop}
