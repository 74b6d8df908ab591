"""The image and the compose file, as far as they can be judged without a container engine."""

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from gateway import config
from tests.repo.files import ROOT, text_of

COMPOSE: dict[str, Any] = yaml.safe_load(text_of("deploy/compose.yaml"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of each line, continuation lines joined, comments left out."""
    lines = [line for line in text_of("Dockerfile").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def last(instruction: str) -> str:
    return [rest for word, rest in dockerfile() if word == instruction][-1]


def test_base_images_are_pinned_to_a_release() -> None:
    bases = [rest.split()[0] for word, rest in dockerfile() if word == "FROM"]

    assert all(re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base) for base in bases)


def test_the_process_is_not_root() -> None:
    user, _, group = last("USER").partition(":")

    assert int(user) > 0
    assert int(group) > 0


def test_signals_reach_the_process() -> None:
    """The exec form has no shell in between that would swallow SIGTERM."""
    assert json.loads(last("ENTRYPOINT")) == ["kvgate"]
    assert json.loads(last("CMD"))[:3] == ["serve", "--config", "/etc/kvgate/kvgate.yaml"]


def test_health_check_asks_for_liveness() -> None:
    """Liveness, not readiness: a lost store must not get the gateway restarted."""
    _, _, command = last("HEALTHCHECK").partition("CMD ")
    program, flag, code = json.loads(command)
    compile(code, "HEALTHCHECK", "exec")

    assert (program, flag) == ("python", "-c")
    assert "/health/live" in code


def test_what_the_build_copies_is_let_through() -> None:
    let_through = {line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")}
    sources = [name for word, rest in dockerfile() if word == "COPY" for name in rest.split()[:-1]]
    from_checkout = {name for name in sources if not name.startswith(("/", "--"))}

    assert from_checkout == let_through
    assert [name for name in sorted(from_checkout) if not (ROOT / name).exists()] == []


def test_no_secret_is_baked_in() -> None:
    baked = [rest for word, rest in dockerfile() if word in {"ENV", "ARG"}]

    assert not any(re.search(r"key|token|secret|password", rest, re.IGNORECASE) for rest in baked)


def test_services_are_the_ones_that_the_files_speak_of() -> None:
    assert set(SERVICES) == {"valkey", "mock-short", "mock-long", "gateway", "prometheus"}
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_images_are_pinned_and_mounts_exist(name: str) -> None:
    service = SERVICES[name]
    mounts = [volume.split(":") for volume in service.get("volumes", [])]

    assert "build" in service or re.search(r":v?\d", service["image"])
    for source, target, mode in mounts:
        assert (ROOT / "deploy" / source).exists()
        assert PurePosixPath(target).is_absolute()
        assert mode == "ro"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_published_ports_stay_on_this_host(name: str) -> None:
    """A demo with a key that everybody can read is not for the network."""
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in SERVICES[name].get("ports", []))


def test_the_store_evicts_nothing() -> None:
    """An evicted key is a lost reservation."""
    command = SERVICES["valkey"]["command"]

    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert "healthcheck" in SERVICES["valkey"]


def test_draining_ends_before_the_container_is_killed() -> None:
    settings = yaml.safe_load(text_of("deploy/kvgate.yaml"))
    seconds = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))

    assert seconds > settings["server"]["grace_seconds"]


def test_prometheus_scrapes_the_gateway() -> None:
    (job,) = yaml.safe_load(text_of("deploy/prometheus.yml"))["scrape_configs"]

    assert job["static_configs"] == [{"targets": ["gateway:8080"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_the_gateway_accepts_its_configuration() -> None:
    settings = config.load(ROOT / "deploy/kvgate.yaml", {})
    keys = config.load_keys(ROOT / "deploy/keys.yaml", [class_.name for class_ in settings.classes])

    assert settings.store.url == "redis://valkey:6379/0"
    assert settings.auth.keys_file == str(ROOT / "deploy/keys.yaml")
    assert [key.name for key in keys] == ["demo"]


def test_replicas_are_services_that_listen_where_they_are_looked_for() -> None:
    (fleet,) = yaml.safe_load(text_of("deploy/kvgate.yaml"))["fleets"]
    looked_for = {url for pool in fleet["pools"] for url in pool["replicas"]}
    listening = set()
    for name, service in SERVICES.items():
        command = service.get("command", [])
        if command[:1] == ["mock"]:
            listening.add(f"http://{name}:{command[command.index('--port') + 1]}")
            assert command[command.index("--model") + 1] == fleet["model"]

    assert looked_for == listening


def test_the_demo_key_opens_the_demo() -> None:
    """The key that the comment names is the one whose hash is listed, and the file says that it is public."""
    text = text_of("deploy/keys.yaml")
    (key,) = re.findall(r"^#\s+(kvg_[a-z2-7]{32})$", text, re.MULTILINE)
    (entry,) = yaml.safe_load(text)["keys"]

    assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert text.startswith("# DEMO ONLY.")
