"""What a benchmark plays on: mock engines, a gateway with its own Valkey, and the load test, as processes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.http.auth import new_key

START_SECONDS = 30.0
ADMIN_TOKEN = "benchmark"
NOTHING_ADMITTED = 1
"""Exit status of a load test of which every call was refused."""
KVGATE = (sys.executable, "-m", "gateway")


@dataclass(frozen=True)
class Bound:
    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Pool:
    name: str
    engines: int
    max_prompt_tokens: int | None = None
    """None takes what no other pool does."""


@dataclass(frozen=True)
class Fleet:
    """Running engines: the URLs of each pool, in the pools' order."""

    pools: Sequence[Pool]
    urls: Sequence[Sequence[str]]

    @property
    def all_urls(self) -> list[str]:
        return [url for urls in self.urls for url in urls]

    def targets(self) -> list[str]:
        """For `kvgate loadtest --target`."""
        return [
            f"{url},max_prompt_tokens={pool.max_prompt_tokens}" if pool.max_prompt_tokens else url
            for pool, urls in zip(self.pools, self.urls, strict=True)
            for url in urls
        ]


@dataclass(frozen=True)
class Gateway:
    pid: int
    url: str
    keys: Mapping[str, str]
    """Secrets by name."""


@contextmanager
def fleet(pools: Sequence[Pool], *options: str) -> Iterator[Fleet]:
    """Mock engines, each a process of its own as real ones are; `options` are those of `kvgate mock`."""
    with ExitStack() as stack:

        def engine() -> str:
            process = stack.enter_context(started("mock", "--port", "0", *options, stdout=subprocess.PIPE))
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            return line[line.index("http://") :].strip()

        yield Fleet(pools, [[engine() for _ in range(pool.engines)] for pool in pools])


@contextmanager
def gateway(engines: Fleet, keys: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Gateway]:
    """kvgate in front of the engines; `settings` are put over its configuration, `fleet` over that of its fleet."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        secrets = {name: new_key() for name in keys}
        entries = [{"name": name, "sha256": digest} for name, (_, digest) in secrets.items()]
        Path(folder, "keys.yaml").write_text(yaml.safe_dump(entries))
        pools = [
            {"name": pool.name, "replicas": list(urls)}
            | ({"max_prompt_tokens": pool.max_prompt_tokens} if pool.max_prompt_tokens else {})
            for pool, urls in zip(engines.pools, engines.urls, strict=True)
        ]
        document = {
            "store": {"url": "embedded"},
            "auth": {"keys_file": str(Path(folder, "keys.yaml"))},
            "log": {"level": "warning"},
            "fleets": [{"model": "demo", "pools": pools, **settings.get("fleet", {})}],
        } | {key: value for key, value in settings.items() if key != "fleet"}
        config = Path(folder, "kvgate.yaml")
        config.write_text(yaml.safe_dump(document))
        port = _free_port()
        process = stack.enter_context(started("serve", "--config", str(config), "--port", str(port)))
        url = f"http://127.0.0.1:{port}"
        _until_ready(url)
        yield Gateway(process.pid, url, {name: secret for name, (secret, _) in secrets.items()})


def load(
    scenario: str, report: Path, label: str, *options: str, gate: Gateway | None = None
) -> dict[str, Any]:
    """Run a scenario; the report it wrote, also where nothing was admitted."""
    environment = dict(os.environ)
    if gate is not None:
        environment["KVGATE_LOADTEST_KEYS"] = ",".join(
            f"{name}={secret}" for name, secret in gate.keys.items()
        )
        environment["KVGATE_ADMIN_TOKEN"] = ADMIN_TOKEN
        options = ("--url", gate.url, "--admin", gate.url, *options)
    command = [
        *KVGATE,
        "loadtest",
        "--scenario",
        scenario,
        "--label",
        label,
        "--report",
        str(report),
        *options,
    ]
    finished = subprocess.run(command, check=False, env=environment, stdout=subprocess.DEVNULL)
    if finished.returncode > NOTHING_ADMITTED:
        raise SystemExit(f"kvgate loadtest --scenario {scenario} ended with status {finished.returncode}")
    found: dict[str, Any] = json.loads((report / "report.json").read_text())
    return found


@contextmanager
def started(command: str, *options: str, stdout: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """`kvgate COMMAND`, ended with the block."""
    environment = os.environ | {"KVGATE_ADMIN_TOKEN": ADMIN_TOKEN}
    process = subprocess.Popen([*KVGATE, command, *options], stdout=stdout, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def kept_up(run: Mapping[str, Any]) -> Bound:
    """The load generator itself did; `run` is a report of `load`."""
    holds = bool(run["figures"]["generator"]["kept_up"])
    return Bound(f"the load generator kept up: {run['label']}", "yes" if holds else "no", holds)


def all_hold(bounds: Iterable[Bound]) -> bool:
    """Print them."""
    found = list(bounds)
    print("\nBOUNDS")
    for bound in found:
        print(f"  {'ok ' if bound.holds else 'NO '} {bound.what}: {bound.found}")
    return all(bound.holds for bound in found)


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"kvgate is not ready after {START_SECONDS:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
