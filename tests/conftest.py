"""Says which `gateway` the tests run against: the checkout, or the wheel that `.ci/run` installed."""

import os
from pathlib import Path

import pytest

import gateway

CHECKOUT = Path(__file__).parents[1]
FROM_CHECKOUT = Path(gateway.__file__).resolve().is_relative_to(CHECKOUT / "gateway")


def pytest_configure() -> None:
    """Refuse the checkout where the installed wheel is to be tested."""
    if FROM_CHECKOUT and os.environ.get("TEST_INSTALLED"):
        raise pytest.UsageError("TEST_INSTALLED is set, but gateway is imported from the checkout")


def pytest_report_header() -> str:
    return (
        f"kvgate {gateway.__version__}, gateway from {'the checkout' if FROM_CHECKOUT else 'site-packages'}"
    )
