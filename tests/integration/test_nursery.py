"""Processes that tests fork are those that a command line starts: see `tests/nursery.py`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import nursery
from tests.processes import HANG_SECONDS, wait_until

pytestmark = pytest.mark.skipif(not nursery.CAN_FORK, reason="started as usual here")

MOCK = ("mock", "--port", "0")
MOCKS = (MOCK, (*MOCK, "--die-with-parent"))


@contextmanager
def mock() -> Iterator[nursery.Process]:
    process = nursery.start_piped(MOCK)
    assert process.stdout
    try:
        assert "http://" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait(HANG_SECONDS)
        process.stdout.close()


def run(arguments: list[str], told: Path, **environ: str) -> int:
    """Its exit status; `told` gets what it says on stderr."""
    with told.open("wb") as file:
        process = nursery.start(arguments, file.fileno(), file.fileno(), environ)
    assert isinstance(process, nursery.Forked)
    return process.wait(HANG_SECONDS)


def test_it_has_the_folder_the_environment_and_the_status_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["keys", "--help"], tmp_path / "told", **os.environ) == 0, (
        "the first may start what forks, here"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVGATE_LOG__LEVEL", "nonsense")  # ours alone
    Path("keys.yaml").write_text("[]")
    document = {
        "store": {"url": "embedded"},
        "auth": {"keys_file": "keys.yaml"},
        "fleets": [{"model": "demo", "pools": [{"name": "only", "replicas": ["http://127.0.0.1:1"]}]}],
    }
    Path("kvgate.yaml").write_text(json.dumps(document))
    path = os.environ.get("PYTHONPATH")
    given = {"PATH": os.environ["PATH"]} | ({"PYTHONPATH": path} if path else {})
    assert run(["check-config", "kvgate.yaml"], tmp_path / "told", **given) == 0
    assert run(["check-config", "kvgate.yaml"], tmp_path / "told", **given, KVGATE_LOG__LEVEL="loud") == 2
    assert "log.level" in (tmp_path / "told").read_text()


@pytest.mark.parametrize(("sig", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_its_end_is_known(sig: signal.Signals, status: int) -> None:
    with mock() as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(sig)
        assert process.wait(HANG_SECONDS) == status
        assert process.poll() == status
        process.send_signal(signal.SIGTERM)  # to nobody


def test_it_holds_nothing_of_the_process_that_forks() -> None:
    """Nor of the one before it."""
    with mock() as first, mock() as second:
        kinds = [_kinds(process.pid) for process in (first, second)]
        command = [sys.executable, "-m", "gateway", *MOCK]
        usual = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        with usual:
            assert usual.stdout
            assert "http://" in usual.stdout.readline()
            usually = _kinds(usual.pid)
            usual.kill()
        assert kinds == [usually] * 2


def _kinds(pid: int) -> list[str]:
    """Of its descriptors."""
    folder = Path(f"/proc/{pid}/fd")
    return sorted(os.readlink(link).partition(":")[0] for link in folder.iterdir())


def test_one_with_a_path_of_its_own_is_started_as_usual(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    process = nursery.start(["--version"], 2, 2, {**os.environ, "PYTHONPATH": path})
    assert isinstance(process, subprocess.Popen)
    assert process.wait(HANG_SECONDS) == 0


def test_it_ends_with_the_process_of_the_tests() -> None:
    """However that ends."""
    program = f"""if True:
        import os, sys
        sys.path.append({str(Path(nursery.__file__).parents[1])!r})
        from tests import nursery
        for arguments in {MOCKS!r}:
            process = nursery.start_piped(arguments)
            process.stdout.readline()
            print(process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=HANG_SECONDS, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == len(MOCKS)
    wait_until(lambda: not any(map(_lives, pids)), "they have ended")


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
