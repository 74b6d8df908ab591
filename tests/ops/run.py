"""`make test-ops`: the suites that need programs of the system, which it installs where it may.

With CI set it fails when something is missing; elsewhere it says in a line each what it leaves out, and runs the rest.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_STORE_OF_THEIRS = ("tests/integration/test_ledger_embedded.py",)
"""About how the server of the wheel is found and started."""
CLOSED_NETWORK = ("unshare", "--net", "--map-root-user", "true")
INSTALL_SECONDS = 120
SUITES_AT_ONCE = 2
"""Failovers mostly wait for time-outs of the servers."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:xdist", "-q")


@dataclass(frozen=True, slots=True)
class Need:
    what: str
    present: Callable[[], bool]
    package: str
    """Debian's."""


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    paths: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    settings: Mapping[str, str] | None = None


def _has(program: str) -> Callable[[], bool]:
    return lambda: shutil.which(program) is not None


def _can_close_a_network() -> bool:
    if shutil.which(CLOSED_NETWORK[0]) is None:
        return False
    return subprocess.run(CLOSED_NETWORK, capture_output=True, check=False).returncode == 0


REDIS = Need("redis-server", _has("redis-server"), "redis-server")
OPENSSL = Need("openssl", _has("openssl"), "openssl")
NAMESPACES = Need("right to make a network namespace", _can_close_a_network, "util-linux")


def _ledger_suites() -> tuple[str, ...]:
    """Each file that drives the ledger on a store of its own."""
    folders = (ROOT / "tests/faults", ROOT / "tests/integration")
    found = [str(file.relative_to(ROOT)) for folder in folders for file in folder.glob("test_ledger_*.py")]
    files = sorted(set(found).difference(NO_STORE_OF_THEIRS))
    return ("tests/lua", "tests/conformance/test_conformance.py", "tests/integration/test_wire.py", *files)


SUITES = (
    Suite("Sentinel and Cluster", ("tests/ops/test_sentinel.py", "tests/ops/test_cluster.py")),
    Suite("certificates", ("tests/ops/test_tls.py",), (REDIS, OPENSSL)),
    Suite(
        "the ledger on redis-server by TLS",
        _ledger_suites(),
        (REDIS, OPENSSL),
        {
            "KVGATE_TEST_STORE": "redis-server",
            "KVGATE_TEST_STORE_TLS": "1",
            "KVGATE_CONFORMANCE_EXAMPLES": "16",
        },
    ),
    Suite(
        "a closed network",
        ("tests/integration/test_case_sr.py::test_sr03_a_closed_network_in_a_namespace_of_its_own",),
        (NAMESPACES,),
    ),
)


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Exit status: that of the first suite that failed, or 1 where CI lacks something."""
    _install(sorted({need.package for suite in SUITES for need in suite.needs if not need.present()}))
    runnable = [suite for suite in SUITES if not _missing(suite)]
    for suite in SUITES:
        if missing := _missing(suite):
            print(f"test-ops: left out: {suite.name}, there is no {' and no '.join(missing)}", flush=True)
    status = 0
    with ThreadPoolExecutor(SUITES_AT_ONCE) as pool:
        for suite, done in zip(runnable, pool.map(partial(_run, arguments, environ), runnable), strict=True):
            print(f"test-ops: {suite.name}\n{done.stdout}", flush=True)
            status = status or done.returncode
    if len(runnable) < len(SUITES) and environ.get("CI"):
        print("test-ops: CI is set, so nothing may be left out", flush=True)
        return status or 1
    return status


def _missing(suite: Suite) -> list[str]:
    return [need.what for need in suite.needs if not need.present()]


def _run(
    arguments: list[str], environ: Mapping[str, str], suite: Suite
) -> "subprocess.CompletedProcess[str]":
    # The checkout stays off sys.path: `import gateway` finds what is installed.
    settings = {"KVGATE_TEST_OPS": "1", "PYTHONSAFEPATH": "1", **(suite.settings or {})}
    return subprocess.run(
        [*PYTEST, *suite.paths, *arguments],
        cwd=ROOT,
        env={**environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _install(packages: list[str]) -> None:
    """By apt-get, as root; what it cannot do is told by what is left out."""
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        print(f"test-ops: apt-get {' '.join(command)}", flush=True)
        try:
            done = subprocess.run(
                ["apt-get", "-q", *command],
                env=quiet,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"test-ops: not within {INSTALL_SECONDS} s", flush=True)
            return
        if done.returncode:
            print("\n".join(done.stderr.strip().splitlines()[-1:]), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
