"""`kvgate usage`: what is summed up, of which period, in which form, and what is said of what cannot be read."""

import csv
import gzip
import io
import json
import os
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.cli import main
from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.telemetry.calllog import line_of
from gateway.telemetry.callreader import LINE_BYTES_MAX, NotACallLog, read_calls
from tests.repo.files import ROOT

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOUR = 3600.0


def line(hours: float = 0, **changes: Any) -> bytes:
    """A call that ended so many hours after noon."""
    usual: dict[str, Any] = {
        "request_id": "r", "route": "/v1/completions", "model": "llama", "fleet": "llama-70b", "lane": "short",
        "pool": "short", "replica": "s0", "key": "team-a", "group": "", "class_": "normal",
        "outcome": Outcome.COMPLETED, "reason": None, "status": 200, "refusal_ms": None, "reserved_blocks": 10,
        "held_seconds": 1.5, "charged": True, "prompt_tokens_estimated": 60, "prompt_tokens": 50,
        "cached_tokens": 32, "output_tokens_estimated": 8, "output_tokens": 7, "duration_ms": 1500.0,
    }  # fmt: skip
    return (
        msgspec.json.encode(line_of(NOON.timestamp() + hours * HOUR, CallEnded(**(usual | changes)))) + b"\n"
    )


REFUSED = {
    "outcome": Outcome.REFUSED, "reason": Code.QUEUE_FULL, "status": 429, "refusal_ms": 1.0, "reserved_blocks": 0,
    "held_seconds": 0.0, "charged": False, "prompt_tokens": None, "cached_tokens": None,
    "output_tokens_estimated": 0, "output_tokens": None, "pool": "", "replica": "",
}  # fmt: skip
LEFT = {
    "outcome": Outcome.CANCELLED,
    "reason": Code.CLIENT_DISCONNECT,
    "prompt_tokens": None,
    "cached_tokens": None,
    "output_tokens": None,
}
UNKNOWN = REFUSED | {"reason": Code.INVALID_API_KEY, "status": 401, "key": "", "fleet": "", "model": ""}
LOST = b'{"time":"2026-11-01T12:00:00Z","lost":4}\n'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(
        line()
        + line(1, key="team-b", group="research", reserved_blocks=3)
        + line(2, **REFUSED)
        + line(3, **LEFT)
        + line(4, **UNKNOWN)
    )
    return path


@pytest.fixture
def usage(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a good command prints, and what it notes."""

    def run(*arguments: object) -> tuple[str, str]:
        assert main(["usage", *map(str, arguments)]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


@pytest.fixture
def problem(capsys: pytest.CaptureFixture[str]) -> Any:
    """The line that a wrong command is answered with."""

    def run(*arguments: object) -> str:
        assert main(["usage", *map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (told,) = printed.err.splitlines()
        return told

    return run


def rows(printed: tuple[str, str]) -> list[dict[str, Any]]:
    text, notes = printed
    assert notes == ""
    return [json.loads(row) for row in text.splitlines()]


# -- sums --------------------------------------------------------------------------------------------------------


def test_without_by_all_is_one_row(log: Path, usage: Any) -> None:
    (row,) = rows(usage(log, "--jsonl"))
    assert row == {
        "since": None, "until": None, "calls": 5, "refused": 2, "charged": 3, "prompt_tokens": 160,
        "cached_tokens": 64, "output_tokens": 22, "block_seconds": 34.5, "estimated_tokens": 68,
    }  # fmt: skip


def test_a_table_with_its_total(log: Path, usage: Any) -> None:
    text, notes = usage(log, "--by", "key")
    assert notes == ""
    assert text.splitlines() == [
        "KEY     CALLS  REFUSED  CHARGED  PROMPT TOKENS  CACHED  OUTPUT TOKENS  BLOCK-SECONDS  ESTIMATED",
        "-           1        1        0              0       0              0            0.0          0",
        "team-a      3        1        2            110      32             15           30.0         68",
        "team-b      1        0        1             50      32              7            4.5          0",
        "total       5        2        3            160      64             22           34.5         68",
    ]


@pytest.mark.parametrize(
    ("by", "counts"),
    [
        ("key", {None: 1, "team-a": 3, "team-b": 1}),
        ("group", {None: 4, "research": 1}),
        ("fleet", {None: 1, "llama-70b": 4}),
        ("model", {None: 1, "llama": 4}),
        ("class", {"normal": 5}),
        ("outcome", {"completed": 2, "refused": 2, "cancelled": 1}),
        ("reason", {None: 2, "queue_full": 1, "client_disconnect": 1, "invalid_api_key": 1}),
    ],
)
def test_by_what(by: str, counts: dict[str | None, int], log: Path, usage: Any) -> None:
    assert {row[by]: row["calls"] for row in rows(usage(log, "--by", by, "--jsonl"))} == counts


def test_by_several_in_the_order_that_was_asked(log: Path, usage: Any) -> None:
    text, _ = usage(log, "--by", "outcome", "--by", "key", "--csv")
    head, *found = csv.reader(io.StringIO(text))
    assert head[:3] == ["outcome", "key", "calls"]
    assert [row[:3] for row in found] == [
        ["cancelled", "team-a", "1"],
        ["completed", "team-a", "1"],
        ["completed", "team-b", "1"],
        ["refused", "", "1"],
        ["refused", "team-a", "1"],
    ]


def test_names_that_clients_make_up_are_one_row(tmp_path: Path, usage: Any) -> None:
    """A model that no fleet serves may have any name."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(line(**REFUSED | {"fleet": "", "model": f"m-{n}"}) for n in range(9)))
    (row,) = rows(usage(path, "--by", "model", "--jsonl"))
    assert (row["model"], row["calls"]) == (None, 9)


def test_a_document(log: Path, usage: Any) -> None:
    text, _ = usage(log, "--by", "group", "--json", "--since", "2026-11-01", "--until", "2026-11-02")
    found = json.loads(text)
    assert (found["since"], found["until"]) == ("2026-11-01T00:00:00+00:00", "2026-11-02T00:00:00+00:00")
    assert [row["group"] for row in found["rows"]] == [None, "research"]
    assert found["total"]["calls"] == sum(row["calls"] for row in found["rows"]) == 5
    assert (found["lost"], found["skipped_lines"]) == (0, 0)


def test_names_are_not_obeyed_by_a_terminal(tmp_path: Path, usage: Any) -> None:
    path = tmp_path / "log"
    path.write_bytes(line(key="\x1b[2J"))
    text, _ = usage(path, "--by", "key")
    assert "'\\x1b[2J'" in text
    assert text.replace("\n", "").isprintable()


# -- period ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "calls"),
    [
        (["--since", "2026-11-01"], 5),
        (["--since", "2026-11-01T14:00:00Z"], 3),
        (["--since", "2026-11-01T15:00:00+01:00"], 3),
        (["--until", "2026-11-01T14:00:00Z"], 2),
        (["--since", "2026-11-01T13:00:00Z", "--until", "2026-11-01T15:00:00Z"], 2),
        (["--until", "2026-11-01"], 0),
    ],
)
def test_a_call_belongs_to_when_it_ended(period: list[str], calls: int, log: Path, usage: Any) -> None:
    (row,) = rows(usage(log, "--jsonl", *period)) or [{"calls": 0}]
    assert row["calls"] == calls


@pytest.mark.parametrize(("ago", "calls"), [("1d", 4), ("23h", 3), ("1320m", 2), ("0m", 0), ("99999d", 5)])
def test_how_long_ago(ago: str, calls: int, log: Path, monkeypatch: pytest.MonkeyPatch, usage: Any) -> None:
    """As of one in the afternoon on the next day."""

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 11, 2, 13, tzinfo=UTC)

    monkeypatch.setattr("gateway.usage.datetime", Now)
    found = rows(usage(log, "--jsonl", "--by", "key", "--since", ago))
    assert sum(row["calls"] for row in found) == calls


@pytest.mark.parametrize(
    "when", ["yesterday", "2026-13-01", "2026-11-01T12:00:00", "7w", "-1d", "", "\uff11d"]
)
def test_a_time_that_is_none(when: str, log: Path, problem: Any) -> None:
    assert problem(log, f"--since={when}").startswith("kvgate: --since: has to be a date (2026-11-01)")


def test_a_period_that_ends_before_it_begins(log: Path, problem: Any) -> None:
    assert "--until: has to be after --since" in problem(
        log, "--since", "2026-11-02", "--until", "2026-11-01"
    )


# -- files -------------------------------------------------------------------------------------------------------


def test_several_files_packed_or_not(tmp_path: Path, log: Path, usage: Any) -> None:
    older = tmp_path / "calls.jsonl.2.gz"
    older.write_bytes(gzip.compress(line()) + gzip.compress(line()))
    assert rows(usage(log, older, "--jsonl"))[0]["calls"] == 7


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(packed: bool, log: Path, monkeypatch: pytest.MonkeyPatch, usage: Any) -> None:
    content = gzip.compress(log.read_bytes()) if packed else log.read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[type-var]
    assert rows(usage("-", "--jsonl"))[0]["calls"] == 5


def test_a_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch, problem: Any) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert problem("-") == "kvgate: standard input is closed"


def test_no_sum_is_infinite(log: Path, usage: Any) -> None:
    """Which is no JSON; so what could make one is no call's line."""
    log.write_bytes(
        line() + line(reserved_blocks=1, held_seconds=1.7e308) * 2 + line(held_seconds=2.0**49) * 2
    )
    text, notes = usage(log, "--jsonl")
    assert json.loads(text, parse_constant=pytest.fail)["calls"] == 3
    assert notes.endswith(" 2\n")


def test_what_a_killed_process_left_is_skipped_and_counted(log: Path, usage: Any) -> None:
    half = line()[:200]
    log.write_bytes(line() + half + b"\n" + line() + b"\n" + half)
    text, notes = usage(log, "--jsonl")
    assert json.loads(text)["calls"] == 2
    assert notes == "kvgate: note: lines that cannot be read, and are left out: 2\n"


def test_what_the_log_says_is_missing_is_told(log: Path, usage: Any) -> None:
    log.write_bytes(line() + LOST + LOST.replace(b"12:00", b"13:00"))
    text, notes = usage(log, "--json")
    assert json.loads(text)["lost"] == 8
    assert notes.startswith("kvgate: note: calls that are missing")
    assert notes.endswith(" 8\n")
    _, notes = usage(log, "--since", "2026-11-01T12:30:00Z")
    assert notes.endswith(" 4\n")


def test_a_log_that_was_just_begun(tmp_path: Path, usage: Any) -> None:
    path = tmp_path / "log"
    for content in (b"", line()[:99], LOST):
        path.write_bytes(content)
        text, _ = usage(path, "--json", "--by", "key")
        assert json.loads(text)["rows"] == []


def test_a_line_without_end_is_not_kept_in_memory(tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        """More than there is memory for: `line()`, then zeros, then the end of that line and `line()` again."""

        left = 200 * LINE_BYTES_MAX

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if self.left <= 0:
                return 0
            self.left -= len(buffer)
            buffer[:] = bytes(len(buffer)) if self.left > 0 else (b"\n" + line()).rjust(len(buffer), b" ")
            return len(buffer)

    found = list(read_calls("x", io.BufferedReader(Endless())))
    assert [call is None for call in found] == [True, False]


@pytest.mark.parametrize("size", [LINE_BYTES_MAX - 1, LINE_BYTES_MAX, LINE_BYTES_MAX + 1])
def test_a_line_about_as_long_as_one_may_be(size: int) -> None:
    raw = line()[:-2] + b" " * (size - len(line())) + b"}\n"
    assert len(raw) == size
    found = list(read_calls("x", io.BufferedReader(io.BytesIO(raw + line()))))  # type: ignore[arg-type]
    assert [call is None for call in found] == [size > LINE_BYTES_MAX, False]


OTHER_FILES = {
    "text": b"root:x:0:0\nbin:x:1:1\n",
    "JSON of another kind": b'{"time":"2026-11-01T12:00:00Z","level":"info","outcome":"completed","status":200}\n',
    "binary": bytes(range(256)) * 10 + b"\n",
    "a wrong type": line().replace(b'"charged":true', b'"charged":1'),
    "a negative number": line().replace(b'"prompt_tokens":50', b'"prompt_tokens":-50'),
    "deep": b"[" * 30_000 + b"\n",
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_is_no_call_log(content: bytes, tmp_path: Path, problem: Any) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert problem(path) == f"kvgate: {path}: no line of it is a call log's"


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:20] + b"\xff" * 9 + raw[29:]])
def test_a_damaged_packed_file(damage: Any, log: Path, tmp_path: Path, problem: Any) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(damage(gzip.compress(log.read_bytes())))
    assert problem(path) == f"kvgate: {path}: is packed by gzip, but damaged or not complete"


def test_files_that_cannot_be_read(tmp_path: Path, log: Path, problem: Any) -> None:
    assert (
        problem(tmp_path / "nowhere")
        == f"kvgate: {tmp_path}/nowhere: cannot be read: No such file or directory"
    )
    assert problem(tmp_path) == f"kvgate: {tmp_path}: cannot be read: Is a directory"
    link = tmp_path / "link"
    link.symlink_to(log)
    assert problem(log, link) == f"kvgate: {link}: is given twice"


def test_a_configuration_names_its_file(tmp_path: Path, log: Path, usage: Any, problem: Any) -> None:
    config = tmp_path / "kvgate.yaml"
    fleets = [{"model": "m", "pools": [{"name": "p", "replicas": ["http://127.0.0.1:9"]}]}]
    config.write_text(json.dumps({"fleets": fleets, "log": {"calls": "calls.jsonl"}}))
    assert rows(usage("--config", config, "--jsonl"))[0]["calls"] == 5
    assert "--config: goes without FILE" in problem(log, "--config", config)
    config.write_text(json.dumps({"fleets": fleets}))
    assert problem("--config", config) == "kvgate: log.calls: is not set in kvgate.yaml: it has no call log"
    assert "FILE: is missing" in problem()


def test_what_is_not_known_cannot_be_asked_for(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--by", "prompt"], ["--json", "--csv"]):
        with pytest.raises(SystemExit) as ended:
            main(["usage", str(log), *wrong])
        assert ended.value.code == 2


# -- the document ------------------------------------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "usage.md").read_text()
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
"""By language; the last one of each."""


def test_the_example_of_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands print what it says they do."""
    monkeypatch.chdir(tmp_path)
    Path("calls.jsonl").write_text(BLOCKS["jsonl"])
    for session in BLOCKS["console"].strip().split("\n\n"):
        command, _, shown = session.partition("\n")
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "kvgate"
        assert main(arguments) == 0
        assert capsys.readouterr().out.rstrip("\n") == shown


def test_every_field_is_in_the_document() -> None:
    for name in json.loads(line()):
        assert f"`{name}`" in DOCUMENT, name


def test_the_loader_of_the_example_is_the_reader() -> None:
    lines = BLOCKS["jsonl"].encode()
    found = list(read_calls("x", io.BufferedReader(io.BytesIO(lines))))  # type: ignore[arg-type]
    assert all(found)
    assert os.linesep == "\n"


def test_an_unreadable_disk() -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(NotACallLog, match="x: cannot be read: Input/output error"):
        list(read_calls("x", io.BufferedReader(Broken())))
