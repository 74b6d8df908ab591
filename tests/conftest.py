"""Says which `gateway` the tests run against, the checkout or the wheel that `.ci/run` installed, and which store."""

import gc
import os
from pathlib import Path

import pytest

import gateway
from tests.ops import redis_server

CHECKOUT = Path(__file__).parents[1]
FROM_CHECKOUT = Path(gateway.__file__).resolve().is_relative_to(CHECKOUT / "gateway")


def pytest_configure() -> None:
    """Refuse the checkout where the installed wheel is to be tested."""
    if FROM_CHECKOUT and os.environ.get("TEST_INSTALLED"):
        raise pytest.UsageError("TEST_INSTALLED is set, but gateway is imported from the checkout")


STORE = redis_server.apply(os.environ)


def pytest_report_header() -> list[str]:
    where = "the checkout" if FROM_CHECKOUT else "site-packages"
    return [f"kvgate {gateway.__version__}, gateway from {where}", f"store: {STORE}"]


def pytest_collection_finish() -> None:
    """What was collected stays until the end: no full collection has to look at it again (a tenth of the unit tests)."""
    gc.freeze()
