"""Says which `gateway` the tests run against, the checkout or the wheel that `.ci/run` installed, and which store."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import gateway
from tests.ops import redis_server

CHECKOUT = Path(__file__).parents[1]
FROM_CHECKOUT = Path(gateway.__file__).resolve().is_relative_to(CHECKOUT / "gateway")


def pytest_configure() -> None:
    """Refuse the checkout where the installed wheel is to be tested."""
    if FROM_CHECKOUT and os.environ.get("TEST_INSTALLED"):
        raise pytest.UsageError("TEST_INSTALLED is set, but gateway is imported from the checkout")


STORE = redis_server.apply(os.environ)

# An example that a busy machine holds up is no slow example: pytest's own limit sees one that never ends.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_report_header() -> list[str]:
    where = "the checkout" if FROM_CHECKOUT else "site-packages"
    return [f"kvgate {gateway.__version__}, gateway from {where}", f"store: {STORE}"]


LONG_FIRST = ("faults", "integration", "sim", "ops", "conformance", "flow")
"""Folders by what one of their files takes; the others take seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, and short ones for whichever worker is free: the workers end together."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(CHECKOUT / "tests").parts[0]
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)


def pytest_collection_finish() -> None:
    """What was collected stays: no full collection looks at it again, which is a tenth of the unit tests' time."""
    gc.freeze()
