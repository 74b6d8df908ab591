"""`benchmarks` are scripts and no package; what these tests import of them is made importable here."""

import sys
from types import ModuleType

from tests.repo.files import ROOT

if "benchmarks" not in sys.modules:
    package = ModuleType("benchmarks")
    package.__path__ = [str(ROOT / "benchmarks")]
    sys.modules["benchmarks"] = package
