"""The store as a child process."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gateway.ledger import embedded
from gateway.ledger.embedded import EmbeddedStore, EmbeddedStoreError, find_server
from tests.integration.ledger_world import eventually, running_store, world


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_it_answers_and_ends_with_its_folder():
    with running_store() as store:
        assert store.process.poll() is None
        folder = store.socket.parent
        assert store.socket.exists()
    assert store.process.poll() is not None
    assert not folder.exists()


def test_a_server_that_does_not_start_says_why():
    store = EmbeddedStore("--no-such-setting", "1")
    with pytest.raises(EmbeddedStoreError, match=r"did not start: .*(no-such-setting|directive)"):
        store.start()
    assert store.process.poll() is not None
    store.stop()


def test_a_server_that_never_answers_is_ended(monkeypatch):
    monkeypatch.setattr(embedded, "START_SECONDS", 0.1)
    monkeypatch.setattr(EmbeddedStore, "_accepts", lambda self: False)
    store = EmbeddedStore()
    with pytest.raises(EmbeddedStoreError, match="did not start"):
        store.start()
    assert store.process.poll() is not None
    store.stop()


def test_no_server_is_one_clear_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedStoreError) as failure:
        EmbeddedStore()
    assert "pip install 'kvgate[embedded]'" in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ["valkey-server", "redis-server"])
def test_a_server_in_the_path_serves_where_there_is_no_wheel(monkeypatch, tmp_path, name):
    server = tmp_path / name
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == server


async def test_a_child_that_dies_is_started_again_and_filled(monkeypatch):
    """The processes that use it declare what runs, as after any loss of data."""
    monkeypatch.setattr(embedded, "RESTART_SECONDS", (0.05,))
    with running_store() as store:
        supervisor = asyncio.create_task(store.supervise())
        async with world(str(store.socket), 100) as w:
            m = await w.join()
            ask = await m.reserve(60)
            for _ in range(2):
                pid = store.process.pid
                os.kill(pid, signal.SIGKILL)
                await eventually(lambda pid=pid: store.process.pid != pid)
                await eventually(store._accepts)
                await eventually(lambda: w.states() == {ask.id: "reserved"})
            await eventually(lambda: m.ledger.ready)
            ask.settle(None, None)
            await eventually(w.empty)
        supervisor.cancel()
        await asyncio.wait([supervisor])


async def test_restarts_back_off(monkeypatch, caplog):
    monkeypatch.setattr(embedded, "RESTART_SECONDS", (0.0, 0.01, 0.02, 0.03))
    monkeypatch.setattr(embedded, "WATCH_SECONDS", 0.001)
    with running_store() as store:
        monkeypatch.setattr(store, "_command", lambda: ["/bin/false"])
        store.process.kill()
        supervisor = asyncio.create_task(store.supervise())
        await eventually(lambda: caplog.text.count("in 0.03 s") == 2)
        supervisor.cancel()
        await asyncio.wait([supervisor])
    assert ["in 0.01 s" in caplog.text, "in 0.02 s" in caplog.text] == [True, True]


def test_a_loop_that_supervises_ends_while_the_child_lives():
    """Nothing of it waits for the child in a thread, which would keep the loop from closing."""
    with running_store() as store:

        async def supervise_a_moment():
            supervisor = asyncio.create_task(store.supervise())
            await asyncio.sleep(0.02)
            supervisor.cancel()

        asyncio.run(supervise_a_moment())
        assert store.process.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_ends_with_a_parent_that_is_killed():
    script = textwrap.dedent(
        """
        import sys, time
        from gateway.ledger.embedded import EmbeddedStore
        store = EmbeddedStore()
        store.start()
        print(store.process.pid, flush=True)
        time.sleep(60)
        """
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environ)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(eventually(lambda: not alive(pid)))
