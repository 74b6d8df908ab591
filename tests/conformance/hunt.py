"""`python -m tests.conformance.hunt`: plants every fault, or those that are named, and says how soon each is found;
status 1 when one survives.

Faults of the Lua are looked for by the state machine, but for those that it meets by chance only.  These, and faults of
the Python around it, are looked for by the tests that have to see them, run against a copy of the package with the
fault in it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from hypothesis import Phase, Verbosity, settings

import gateway
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.scripts import Library, library, script_folder
from tests.conformance.machine import CALM, PARTS, BooksMachine, play
from tests.conformance.mutants import MUTANTS
from tests.conformance.tested_mutants import TESTED_MUTANTS, TestedMutant
from tests.conformance.twin import Twin

QUICK = settings(CALM, phases=(Phase.generate,), verbosity=Verbosity.quiet)
CHECKOUT = Path(__file__).parents[2]
TESTS_SECONDS = 180
"""Of one fault: a test that waits in vain takes its time until it says so."""


@dataclass(frozen=True, slots=True)
class Hunted:
    found: bool
    effort: str
    seconds: float


def planted(fault: str) -> Library:
    """The library with a fault of `MUTANTS` in it."""
    before, after = MUTANTS[fault]
    text = library().text
    assert before in text, f"the Lua has changed: plant `{fault}` anew"
    return Library(library().name, text.replace(before, after))


class Caught(BaseException):
    """Ends a hunt at once: Hypothesis would play the example again to show a failure that nobody looks at."""


class HuntingTwin(Twin):
    def evaluate(self, script: str, *arguments: Any) -> Any:
        try:
            return super().evaluate(script, *arguments)
        except redis.ResponseError as failure:
            raise Caught from failure

    def compare(self, lua: Any, spec: Any) -> None:
        try:
            super().compare(lua, spec)
        except AssertionError as failure:
            raise Caught from failure


class HuntingMachine(BooksMachine):
    twins = HuntingTwin


def hunt(client: "redis.Redis[bytes]", fault: str) -> Hunted:
    """Play the suite until the comparison fails."""
    faulty, machines = planted(fault), list[BooksMachine]()

    def new_machine() -> BooksMachine:
        machines.append(HuntingMachine(client, faulty))
        return machines[-1]

    started, found = time.monotonic(), False
    try:
        for part in range(PARTS):
            play(new_machine, part, QUICK)
    except (Caught, AssertionError):
        found = True
    finally:
        client.flushall()
    commands = sum(machine.commands for machine in machines)
    return Hunted(found, f"{len(machines)} examples, {commands} commands", time.monotonic() - started)


@contextmanager
def faulty_package(mutant: TestedMutant) -> Iterator[Path]:
    """A folder with the package and the scripts as they are, but for the fault."""
    with tempfile.TemporaryDirectory(prefix="kvgate-fault-") as folder:
        root = Path(folder)
        package = Path(gateway.__file__).parent
        shutil.copytree(package, root / "gateway", ignore=shutil.ignore_patterns("__pycache__", "_lua"))
        shutil.copytree(script_folder(), root / "lua")
        path = root / mutant.file
        text = path.read_text()
        assert mutant.before in text, f"{mutant.file} has changed: plant the fault anew"
        path.write_text(text.replace(mutant.before, mutant.after))
        yield root


def hunt_by_tests(mutant: TestedMutant) -> Hunted:
    """Run the tests that have to fail."""
    started = time.monotonic()
    with faulty_package(mutant) as root:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        environ.pop("TEST_INSTALLED", None)
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TESTS_SECONDS,
            check=False,
        )
    failed = re.search(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert done.returncode == 0 or failed, done.stdout[-2000:]
    return Hunted(failed is not None, failed[1] if failed else "no test", time.monotonic() - started)


def main() -> int:
    """The table: fault, found or not, after how much, and in what time."""
    store = EmbeddedStore()
    store.start()
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    survivors, faults = 0, sys.argv[1:] or [*MUTANTS, *TESTED_MUTANTS]
    try:
        for fault in faults:
            hunted = hunt(client, fault) if fault in MUTANTS else hunt_by_tests(TESTED_MUTANTS[fault])
            survivors += not hunted.found
            verdict = "found" if hunted.found else "SURVIVED"
            print(f"{fault:50} {verdict:8} {hunted.effort:34} {hunted.seconds:5.1f} s", flush=True)
    finally:
        client.close()
        store.stop()
    print(f"\n{len(faults)} faults planted, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
