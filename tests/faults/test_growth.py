"""The short form of the faults of calls that grow: `make faults` plays all of them with more in flight."""

import pytest

from tests.faults.catalogue import Fault
from tests.faults.of_growth import PART
from tests.faults.scene import SHORT


@pytest.mark.parametrize("fault", [f for f in PART.faults if f.short], ids=lambda fault: fault.play.__name__)
async def test_fault(fault: Fault) -> None:
    found = await fault.run(SHORT)
    assert found.leaked_blocks == 0
