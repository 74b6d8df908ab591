"""Real processes for tests: a Valkey, mock engines and gateways on loopback, ended with the test that started them."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from gateway.http.auth import new_key
from gateway.ledger.embedded import EmbeddedStore
from tests import nursery

HANG_SECONDS = 30.0
"""What has not happened by then never will; nothing is proven by how soon it did, for a busy machine stands still."""
ADMIN_TOKEN = "admin-token-of-the-tests"
PORTS = range(20_000, 32_000)
LAST_PORT_FILE = Path(tempfile.gettempdir()) / f"kvgate-tests-port-{os.getuid()}"
"""The port that a test of this machine was given last."""
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}
"""Of a client that needs no TLS, which would load a list of authorities for 17 ms."""
QUICK_STORE = {"heartbeat_seconds": 0.2, "hold_seconds": 20}
"""The gate of an empty store opens after two heartbeats; and a store that stands still with a busy machine is waited
for, where nothing is said of its outage."""


def free_port() -> int:
    """Nothing listens on it, and until it is bound nothing will: tests that run beside this one get others.

    A server that is started again finds it free again: connections and servers without a wish get higher ones.
    """
    with LAST_PORT_FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = int(file.read() or PORTS[0])
        following = (PORTS[(last - PORTS[0] + step) % len(PORTS)] for step in range(1, len(PORTS)))
        port = next(filter(_is_free, following))
        file.truncate(0)
        file.write(str(port))
    return port


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False


def wait_until(condition: Callable[[], Any], what: str, seconds: float = HANG_SECONDS) -> Any:
    """The first true value of the condition; fails the test when a look that begins after that time finds none."""
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not (value := condition()):
        assert began < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
        began = time.monotonic()
    return value


def sum_of(name: str, page: str) -> float:
    """The sum of a metric's samples."""
    samples = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


class Mock:
    """One mock engine in a process of its own."""

    def __init__(self, *options: str) -> None:
        self.process = nursery.start_piped(["mock", "--port", "0", "--die-with-parent", *options])
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert "http://" in line, line
        self.url = line[line.index("http://") :].strip()
        self._client = httpx.Client(base_url=self.url, timeout=10, **PLAIN)

    def log(self) -> dict[str, Any]:
        """What it received, started, aborted and finished: see `gateway/mock/journal.py`."""
        found: dict[str, Any] = self._client.get("/mock/log").json()
        return found

    def fail(self, fault: str, count: int = 1) -> None:
        """The next requests meet a fault: see `gateway/mock/faults.py`."""
        self._client.post("/mock/faults", json={"fail": fault, "count": count}).raise_for_status()

    def slow(self, factor: float) -> None:
        """Its steps take so many times as long from now on; below 1 it is quick."""
        self.change("slow", factor=factor)

    def change(self, state: str, **fields: float) -> None:
        """See `gateway/mock/control.py`."""
        self._client.post("/mock/state", json={"state": state, **fields}).raise_for_status()

    def reset(self) -> None:
        self._client.post("/mock/reset").raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum_of(name, self._client.get("/metrics").text)

    def stop(self) -> None:
        self._client.close()
        _end(self.process)
        assert self.process.stdout
        self.process.stdout.close()


class GatewayProcess:
    """One `kvgate serve`; `url`, and a client with a valid key."""

    def __init__(self, config: Path, key: str, log: Path, environ: dict[str, str], *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        self.log = log
        arguments = ["serve", "--config", str(config), "--port", str(self.port), *options]
        env = {"PATH": os.environ["PATH"], "KVGATE_ADMIN_TOKEN": ADMIN_TOKEN, **environ}
        for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
            if name in os.environ:
                env[name] = os.environ[name]
        with log.open("ab") as output:
            # A process group of its own, which a test may signal as a terminal does.
            self.process = nursery.start(arguments, output.fileno(), output.fileno(), env, new_session=True)
        headers = {"authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=30, **PLAIN)

    def wait_ready(self) -> "GatewayProcess":
        try:
            wait_until(self.is_ready, "the gateway is ready")
        except AssertionError as late:
            late.add_note(self.log.read_text()[-4000:])
            raise
        return self

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health/ready").status_code == 200
        return False

    def state(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        found: dict[str, Any] = self.client.get("/admin/v1/state", headers=headers).json()
        return found

    def is_quiet(self) -> bool:
        """Nothing is held, nobody waits, nothing is in flight."""
        state = self.state()
        return all(state[name] == 0 for name in ("reserved", "leases", "queue", "inflight"))

    def takes_calls(self) -> bool:
        """Every replica is up, so none rests for what its calls met."""
        fleets = self.state()["fleets"].values()
        pools = [pool for fleet in fleets for pool in fleet["pools"].values()]
        return all(replica["state"] == "up" for pool in pools for replica in pool["replicas"].values())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum_of(name, self.metrics())

    def metrics(self) -> str:
        return self.client.get("/metrics").text

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 15) -> None:
        self.client.close()
        _end(self.process, sig, seconds)

    def end(self) -> None:
        """The same after a test, when nothing is left to prove: streams that are still open are not waited for."""
        self.client.close()
        _end(self.process, seconds=1, again=True)


def _end(
    process: nursery.Process, sig: int = signal.SIGTERM, seconds: float = 15, again: bool = False
) -> None:
    """`again`: a gateway that hears it twice ends its grace period."""
    if process.poll() is None:
        process.send_signal(sig)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            if again:
                return _end(process, sig)
            process.kill()
            process.wait()


class World:
    """What one test needs, ended in reverse order."""

    def __init__(self, folder: Path, *store_options: str) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._gateways = 0
        self.store = EmbeddedStore(*store_options)
        self._stack.callback(self.store.stop)
        self.store.start()

    def mock(self, *options: str) -> Mock:
        mock = Mock(*options)
        self._stack.callback(mock.stop)
        return mock

    def keys_file(self, *entries: dict[str, Any]) -> tuple[Path, list[str]]:
        """A keys file with one entry for each of `entries` (without its hash), and the secrets."""
        secrets, rows = [], []
        for number, entry in enumerate(entries):
            secret, digest = new_key()
            secrets.append(secret)
            rows.append({"name": f"key-{number}", **entry, "sha256": digest})
        path = self.folder / "keys.yaml"
        path.write_text(json.dumps(rows))
        return path, secrets

    def config(
        self, pools: list[dict[str, Any]], *keys: dict[str, Any], **settings: Any
    ) -> tuple[Path, list[str]]:
        """A configuration of one fleet `demo` on this world's store; JSON is YAML.  Also the keys' secrets.

        A call needs the same whatever came before it: nothing is learned of estimates.
        """
        path, secrets = self.keys_file(*(keys or ({},)))
        fleet = {"model": "demo", "pools": pools, "safe_fraction": 1.0, "token_factor": 1.0}
        fleet |= settings.pop("fleet", {})
        document = {
            "store": {"url": self.store.url, **settings.pop("store", {})},
            "auth": {"keys_file": str(path), **settings.pop("auth", {})},
            "fleets": [fleet],
            **settings,
        }
        config = self.folder / "kvgate.yaml"
        config.write_text(json.dumps(document))
        return config, secrets

    def gateway(
        self, config: Path, key: str, *options: str, wait: bool = True, **environ: str
    ) -> GatewayProcess:
        self._gateways += 1
        gateway = GatewayProcess(
            config, key, self.folder / f"gateway-{self._gateways}.log", environ, *options
        )
        self._stack.callback(gateway.end)
        return gateway.wait_ready() if wait else gateway

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def world(*store_options: str) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="kvgate-test-") as folder:
        here = World(Path(folder), *store_options)
        try:
            yield here
        finally:
            here.close()
