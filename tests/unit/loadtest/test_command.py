"""The options of `kvgate loadtest`."""

import argparse
import json
from pathlib import Path

import pytest

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
    with pytest.raises(ScenarioError, match="'b'"):
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
        (["--scenario", "steady", "--url", "http://a"], {KEYS_VARIABLE: "other=1"}, "'default'"),
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
