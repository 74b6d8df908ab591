"""Processes of `kvgate` in a tenth of their usual time: forked from one that has imported everything.

A gateway's start takes 0.8 s of processor time, nearly all of it for imports and the vocabulary, and the tests start
hundreds.  A forked one runs `gateway.cli.main` as `python -m gateway` does, with descriptors, environment, folder and
session of its own; that the command itself starts is for the tests of the command line to say.

This file is also the program that forks.  It has one thread, and lives as long as the process of the tests.
"""

import atexit
import ctypes
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

REQUEST_BYTES_MAX = 1 << 16
IMPORTED = ("gateway.cli", "gateway.serve", "gateway.mock.serve", "gateway.mock.server")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
CAN_FORK = sys.platform == "linux"
"""Elsewhere processes are started as usual: what they import there has threads."""
_PATH = os.environ.get("PYTHONPATH")
"""One with another is started as usual, too: its test has it import something else."""


class Forked:
    """As much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        """`arguments` of `kvgate`; the descriptors stay the caller's."""
        self.args = arguments
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self._asking = threading.Lock()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "arguments": arguments,
            "env": dict(env),
            "folder": os.getcwd(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "session": start_new_session,
        }
        with theirs:
            socket.send_fds(_nursery(), [json.dumps(request).encode()], [stdout, stderr, theirs.fileno()])
        self.pid = int(self._status.recv(64) or _is_gone())

    def poll(self) -> int | None:
        with self._asking:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(self._status.recv(64) or _is_gone())
                self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[Any]


def start(
    arguments: Sequence[str], stdout: int, stderr: int, env: Mapping[str, str], *, new_session: bool = False
) -> Process:
    """`kvgate` with these arguments; the descriptors stay the caller's."""
    if CAN_FORK and env.get("PYTHONPATH") == _PATH:
        return Forked(arguments, stdout, stderr, env, new_session)
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, start_new_session=new_session)


def start_piped(arguments: Sequence[str]) -> Process:
    """With our environment, and a `stdout` that can be read."""
    reading, writing = os.pipe()
    try:
        process = start(arguments, writing, 2, os.environ)
    finally:
        os.close(writing)
    process.stdout = os.fdopen(reading)
    return process


def _is_gone() -> str:
    raise RuntimeError("the process that forks has ended")


_STARTING = threading.Lock()


def _nursery() -> socket.socket:
    """Where to ask for processes."""
    with _STARTING:
        return _start_nursery()


@cache
def _start_nursery() -> socket.socket:
    import gateway

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        place = str(Path(gateway.__file__).parents[1])
        command = [sys.executable, __file__, str(theirs.fileno()), place]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


# -- the process that forks ------------------------------------------------------------------------------------------


class Nursery:
    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._selector = selectors.DefaultSelector()
        self._selector.register(asked, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """By the descriptor that tells of its end: whose it is, and who wants to know."""

    def run(self) -> list[str] | None:
        """The arguments, in a child; None in the process itself, once nobody can ask any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asked:
                    self._bury(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._asked, REQUEST_BYTES_MAX, 3)
                if not message:
                    return None
                request = json.loads(message)
                if self._fork(request, descriptors):
                    arguments: list[str] = request["arguments"]
                    return arguments

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """True in the child."""
        status = socket.socket(fileno=descriptors[2])
        pid = os.fork()
        if pid == 0:
            status.close()
            self._close()
            _become(request, descriptors[:2])
            return True
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        ends = os.pidfd_open(pid)
        self._children[ends] = pid, status
        self._selector.register(ends, selectors.EVENT_READ)
        status.send(b"%d" % pid)
        return False

    def _bury(self, ends: int) -> None:
        pid, status = self._children.pop(ends)
        self._selector.unregister(ends)
        os.close(ends)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with status:
            try:
                status.send(b"%d" % code)
            except OSError:
                return  # nobody waits for it

    def _close(self) -> None:
        """What is the parent's."""
        self._selector.close()
        self._asked.close()
        for ends, (_, status) in self._children.items():
            os.close(ends)
            status.close()


def _become(request: dict[str, Any], outputs: list[int]) -> None:
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
    if request["session"]:
        os.setsid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of a run that is killed nothing goes on


def _import_everything(place: str) -> None:
    """From where the tests have it; what is found first on the path may be this folder."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if place not in sys.path:
        sys.path.append(place)
    import gateway

    assert str(Path(gateway.__file__).parents[1]) == place, "the tests have another gateway"
    for module in IMPORTED:
        import_module(module)
    from gateway.tokens import tiktoken_counter
    from gateway.tokens.threads import THREADS

    load = cache(tiktoken_counter.load_encodings)
    load(tiktoken_counter.VOCABULARY, 1 + THREADS)
    tiktoken_counter.load_encodings = load
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked"


def _main() -> int:
    asked = socket.socket(fileno=int(sys.argv[1]))
    _import_everything(sys.argv[2])
    arguments = Nursery(asked).run()
    if arguments is None:
        return 0
    from gateway.cli import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(_main())
