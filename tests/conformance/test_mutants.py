"""The comparison notices broken Lua.  Some of the faults; `make mutants` hunts them all."""

import pytest

from tests.conformance.hunt import hunt, planted
from tests.conformance.mutants import MUTANTS

SOME = tuple(MUTANTS)[::5]


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_can_be_planted(fault: str) -> None:
    """Its text is still in the scripts."""
    assert planted(fault)


@pytest.mark.parametrize("fault", SOME)
def test_a_planted_fault_is_found(store_client, fault: str) -> None:
    assert hunt(store_client, fault).found
