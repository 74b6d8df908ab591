"""SR-03: a closed network changes nothing, and a damaged vocabulary is told at the start, in one line."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gateway
from gateway.tokens.tiktoken_counter import VOCABULARY
from tests.processes import World

CLOSED = ("unshare", "--net", "--map-root-user")
"""A network namespace of its own: no interface but loopback, no route, so no name server either."""
START_SECONDS = 20.0
"""Of a busy machine; whoever waits for a network that is not there waits for longer, or was counted."""


def _can_close() -> bool:
    if shutil.which(CLOSED[0]) is None:
        return False
    return subprocess.run([*CLOSED, "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not _can_close(), reason="this host lets us make no network namespace")


def first_request(folder: Path) -> dict[str, Any]:
    """Runs inside the closed network: a world, its first request, and what the kernel counted meanwhile."""
    from tests.processes import world

    _raise_loopback()
    with world() as here:
        mock = here.mock()
        settings = {"store": {"heartbeat_seconds": 0.2}}
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], **settings)
        before = _attempts()
        started = time.monotonic()
        running = here.gateway(config, key, TIKTOKEN_CACHE_DIR=str(folder), DATA_GYM_CACHE_DIR=str(folder))
        start_seconds = time.monotonic() - started
        prompt = "A prompt that is long enough to be counted. " * 500
        body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        answer = running.client.post("/v1/chat/completions", json=body)
        return {
            "status": answer.status_code,
            "reserved": answer.headers.get("x-kvgate-reserved-blocks"),
            "start_seconds": start_seconds,
            "attempts": {name: count - before[name] for name, count in _attempts().items()},
            "cached": os.listdir(folder),
        }


def _raise_loopback() -> None:
    import fcntl
    import socket
    import struct

    get_flags, set_flags, up = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, get_flags, request), 16)
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def _attempts() -> dict[str, int]:
    """Packets for which there was no route, and datagrams, which only name look-ups send: of the whole namespace."""
    counters: dict[str, int] = {}
    rows = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    for names, values in zip(rows[::2], rows[1::2], strict=True):
        counters |= {names[0] + name: int(value) for name, value in zip(names[1:], values[1:], strict=True)}
    for line in Path("/proc/net/snmp6").read_text().splitlines():
        name, value = line.split()
        counters[name] = int(value)
    return {
        name: counters[name]
        for name in ("Ip:OutNoRoutes", "Udp:OutDatagrams", "Ip6OutNoRoutes", "Udp6OutDatagrams")
    }


@needs_namespaces
def test_sr03_a_closed_network_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    """Started with an empty cache it serves its first request, and nothing was sent anywhere else."""
    cache = tmp_path / "cache"
    cache.mkdir()
    program = (
        "import json, pathlib, sys; sys.path.append(sys.argv[2]);"
        "from tests.integration.test_case_sr import first_request;"
        "print(json.dumps(first_request(pathlib.Path(sys.argv[1]))))"
    )
    root = str(Path(__file__).parents[2])
    command = [*CLOSED, sys.executable, "-c", program, str(cache), root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == 200
    assert int(found["reserved"]) >= 4500 // 16, "counted with the real vocabulary"
    assert found["start_seconds"] < START_SECONDS
    assert not any(found["attempts"].values()), found["attempts"]
    assert found["cached"] == []


def start_with(vocabulary: bytes | None, world: World) -> "subprocess.CompletedProcess[str]":
    """`kvgate serve` from a copy of the package whose vocabulary holds this; None removes it."""
    package = world.folder / "copy" / "gateway"
    shutil.copytree(Path(gateway.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    copied = package / VOCABULARY.relative_to(Path(gateway.__file__).parent)
    copied.unlink()
    if vocabulary is not None:
        copied.write_bytes(vocabulary)
    config, _ = world.config([{"name": "only", "replicas": ["http://127.0.0.1:9"]}])
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config), "--port", "0"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, env=environ, cwd=package.parent, capture_output=True, text=True, timeout=30, check=False
    )


def _flipped() -> bytes:
    data = bytearray(VOCABULARY.read_bytes())
    data[len(data) // 2] ^= 1
    return bytes(data)


DAMAGED = {
    "a flipped bit": (_flipped, "is damaged: its sha256 is"),
    "cut short": (lambda: VOCABULARY.read_bytes()[:-100], "is damaged: its sha256 is"),
    "empty": (lambda: b"", "is damaged: its sha256 is"),
    "missing": (lambda: None, "cannot read the tokenizer's vocabulary"),
}


@pytest.mark.parametrize(("vocabulary", "words"), DAMAGED.values(), ids=DAMAGED)
def test_sr03_a_damaged_vocabulary_stops_the_start_with_one_line(
    new_world: World, vocabulary: Any, words: str
) -> None:
    done = start_with(vocabulary(), new_world)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvgate: ")
    assert words in line
