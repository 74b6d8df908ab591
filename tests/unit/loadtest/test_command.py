"""The options of `kvgate loadtest`."""

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.loadtest import command as module
from gateway.loadtest.command import ADMIN_TOKEN_VARIABLE, KEYS_VARIABLE, add_arguments, read_secrets, run
from gateway.loadtest.scenario import ScenarioError, parse
from tests.unit.loadtest.test_report import document

SCENARIO = parse(
    "name: x\nkeys: [a, b]\nphases: [{seconds: 1, sessions: 1}]\ncalls: [{prompt_tokens: 1, output_tokens: 1}]"
)


def command(*options: str, **environ: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(options), environ)


def test_all_keys_have_a_secret_or_none_has() -> None:
    assert read_secrets(["a=1=", " b=2", ""], SCENARIO) == {"a": "1=", "b": "2"}
    assert read_secrets([""], SCENARIO) == {}
    with pytest.raises(ScenarioError, match=f"the keys a, b; without a secret: b.*--key.*{KEYS_VARIABLE}"):
        read_secrets(["a=1"], SCENARIO)


@pytest.mark.parametrize("text", ["hidden", "a=", "=hidden", "a=hid\nden"])
def test_a_bad_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        read_secrets([text], SCENARIO)

    assert "hid" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "environ", "problem"),
    [
        (["--scenario", "steady"], {}, "--url or --target"),
        (["--scenario", "nothing", "--url", "http://a"], {}, "no scenario"),
        (["--scenario", "missing.yaml", "--url", "http://a"], {}, "missing.yaml"),
        (["--scenario", "steady", "--url", "a"], {}, "target 'a'"),
        (["--scenario", "steady", "--url", "http://a", "--admin", "http://a"], {}, ADMIN_TOKEN_VARIABLE),
        (["--scenario", "steady", "--url", "http://a"], {KEYS_VARIABLE: "other=1"}, "secret: default"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    options: list[str], environ: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*options, **environ) == 2

    told = capsys.readouterr().err
    assert problem in told
    assert told.count("\n") == 1


def test_finished_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name in ("ungated", "kvgate"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(document(name) | {"kvgate_loadtest": 1}))
    out, drawn = tmp_path / "out", tmp_path / "picture.svg"

    assert command("--compare", *map(str, files), "--report", str(out), "--picture", str(drawn)) == 0

    assert "ungated" in capsys.readouterr().out.splitlines()[0]
    assert "kvgate" in (out / "report.html").read_text()
    assert not (out / "report.json").exists()
    assert drawn.read_text().startswith("<svg")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvgate_loadtest": 99}'])
def test_only_reports_can_be_compared(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)

    assert command("--compare", str(file)) == 2
    assert "report.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--picture"])
def test_results_that_cannot_be_written_stop_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "execute", lambda *_: pytest.fail("the run has begun"))
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "inside"

    assert command("--scenario", "steady", "--url", "http://a", option, str(place)) == 2

    told = capsys.readouterr().err
    assert f"{option}: cannot write into {tmp_path / 'file'}" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(("admitted", "status"), [(0, 1), (5, 0)])
def test_a_run_without_an_admitted_call_is_no_success(
    admitted: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_: dict[str, Any] = document("x")
    run_["figures"]["attempts"]["admitted"] = admitted
    monkeypatch.setattr(module, "execute", lambda *_: run_)
    folder = tmp_path / "new" / "report"

    assert command("--scenario", "steady", "--url", "http://a", "--report", str(folder)) == status

    assert ("no call was answered" in capsys.readouterr().out) == (admitted == 0)
    assert (folder / "report.json").exists()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Bound, so that nobody else takes it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_dead_admin_url_is_told_before_anything_is_started(
    dead_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--scenario", "steady", "--url", dead_url, "--admin", dead_url]

    assert command(*options, **{ADMIN_TOKEN_VARIABLE: "x"}) == 2

    told = capfd.readouterr().err
    assert f"the admin API at {dead_url} does not answer" in told
    assert told.count("\n") == 1


def test_results_are_kept_when_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(_: object) -> str:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(module, "execute", lambda *_: document("x"))
    monkeypatch.setattr(module, "terminal", gone)

    assert command("--scenario", "steady", "--url", "http://a", "--report", str(tmp_path)) == 2
    assert (tmp_path / "report.json").exists()
