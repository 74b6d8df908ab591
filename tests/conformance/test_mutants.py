"""The comparison notices broken Lua.  Faults of all parts that are found soon; `make mutants` hunts them all."""

from pathlib import Path

import pytest

import gateway
from gateway.ledger.scripts import script_folder
from tests.conformance.hunt import hunt, planted
from tests.conformance.mutants import MUTANTS
from tests.conformance.tested_mutants import TESTED_MUTANTS

SOME = (
    "fit off by one",
    "no dispatch after settle",
    "another owner's call settled",
    "lease end exclusive",
    "stale batch accepted",
    "overtaking without bound",
    "key's caps not given back",
    "prefill ignored",
    "refund forgotten",
    "gate opens before all have declared",
    "quotas go by the ledger's clock",
    "a displaced call is not told",
    "a place is not remembered",
    "two calls under one Idempotency-Key",
    "a flow that left stays in the front",
    "the bound is not looked at",
    "whole demands are not given back",
    "soft hold leaked: it stays when its conversation goes on",
    "the sum of soft holds drifts",
)


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_can_be_planted(fault: str) -> None:
    """Its text is still in the scripts."""
    assert planted(fault)


@pytest.mark.parametrize("fault", TESTED_MUTANTS)
def test_a_fault_that_tests_have_to_see_can_be_planted(fault: str) -> None:
    mutant = TESTED_MUTANTS[fault]
    room, _, path = mutant.file.partition("/")
    folder = script_folder() if room == "lua" else Path(gateway.__file__).parent
    assert mutant.before in (folder / path).read_text()


@pytest.mark.parametrize("fault", SOME)
def test_a_planted_fault_is_found(store_client, fault: str) -> None:
    assert hunt(store_client, fault).found
