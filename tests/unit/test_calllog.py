"""The call log: a line for each call, whole lines only, and nothing lost without being counted."""

import fcntl
import itertools
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.events import CallEnded, StoreUp
from gateway.core.outcomes import Code, Outcome
from gateway.telemetry import calllog
from gateway.telemetry.calllog import BATCH_CALLS_MAX, COMPLAIN_SECONDS, FOLLOW_SECONDS, CallLog

NOON = 1_793_534_400.1234
"""2026-11-01T12:00:00.123Z, and a bit."""
STREAMED = CallEnded(
    request_id="r-1", route="/v1/chat/completions", model="llama", fleet="llama-70b", lane="short", pool="short",
    replica="short-0", key="team-a", group="research", class_="normal", outcome=Outcome.COMPLETED, reason=None,
    status=200, refusal_ms=None, queue_ms=12.34567, reserved_blocks=10, shared_blocks=4, held_seconds=1.5, charged=True,
    prompt_tokens_estimated=60, prompt_tokens=50, cached_tokens=32, output_tokens_estimated=8, output_tokens=7,
    duration_ms=1512.3456789,
)  # fmt: skip

WRITTEN_SECONDS = 30
"""For what waits, on a busy machine."""
REFUSED = CallEnded(
    request_id="r-2", route="/v1/completions", key="", group="", class_="", outcome=Outcome.REFUSED,
    reason=Code.INVALID_API_KEY, status=401, refusal_ms=0.2, duration_ms=0.2,
)  # fmt: skip


def changed(**changes: Any) -> CallEnded:
    return msgspec.structs.replace(STREAMED, **changes)


class Clock:
    """The monotonic clock of a log, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


@pytest.fixture
def new_log(path: Path, clock: Clock) -> Callable[..., CallLog]:
    """A log whose thread does not run: the test flushes."""
    return lambda **options: CallLog(options.pop("path", path), now=lambda: NOON, clock=clock, **options)


def written(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def ids(path: Path) -> list[str]:
    return [line["request_id"] for line in written(path)]


def put(log: CallLog, *names: str) -> None:
    for name in names:
        log(changed(request_id=name))
    log.flush()


# -- lines -------------------------------------------------------------------------------------------------------


def test_a_call_is_a_line(path: Path, new_log: Callable[..., CallLog]) -> None:
    log = new_log()
    log(StoreUp(True))
    log(STREAMED)
    log.flush()
    assert written(path) == [
        {
            "time": "2026-11-01T12:00:00.123000Z", "seconds": 1.512346, "request_id": "r-1",
            "route": "/v1/chat/completions", "model": "llama", "fleet": "llama-70b", "key": "team-a",
            "group": "research", "class": "normal", "lane": "short", "pool": "short", "replica": "short-0",
            "outcome": "completed", "reason": None, "status": 200, "retry_ms": None, "queue_ms": 12.346,
            "prompt_tokens": 50, "prompt_estimated": False, "cached_tokens": 32, "output_tokens": 7,
            "output_estimated": False, "reserved_blocks": 10, "shared_blocks": 4, "block_seconds": 15.0,
            "charged": True,
        }
    ]  # fmt: skip


def test_a_refusal_before_anything_was_known_is_a_line(path: Path, new_log: Callable[..., CallLog]) -> None:
    log = new_log()
    log(REFUSED)
    log.flush()
    (line,) = written(path)
    known = {name: value for name, value in line.items() if value not in (None, False, 0)}
    assert known == {
        "time": "2026-11-01T12:00:00.123000Z", "seconds": 0.0002, "request_id": "r-2", "route": "/v1/completions",
        "outcome": "refused", "reason": "invalid_api_key", "status": 401,
    }  # fmt: skip
    assert set(line) == {field.encode_name for field in msgspec.structs.fields(calllog.CallLine)}


@pytest.mark.parametrize(
    ("told", "prompt", "output"),
    [
        ({"prompt_tokens": 50, "output_tokens": 7}, (50, False), (7, False)),
        ({"prompt_tokens": 0, "output_tokens": 0}, (0, False), (0, False)),
        ({"prompt_tokens": None, "output_tokens": None}, (60, True), (8, True)),
        ({"prompt_tokens": 50, "output_tokens": None}, (50, False), (8, True)),
        (
            {"prompt_tokens": None, "output_tokens": None, "output_tokens_estimated": 0},
            (60, True),
            (0, True),
        ),
        (
            {
                "prompt_tokens": None,
                "output_tokens": None,
                "output_tokens_estimated": 0,
                "charged": False,
                "prompt_tokens_estimated": 0,
            },
            (None, False),
            (None, False),
        ),
    ],
)
def test_what_is_an_estimate_is_told(
    told: dict[str, Any],
    prompt: tuple[int | None, bool],
    output: tuple[int | None, bool],
    path: Path,
    new_log: Callable[..., CallLog],
) -> None:
    log = new_log()
    log(changed(**told))
    log.flush()
    (line,) = written(path)
    assert (line["prompt_tokens"], line["prompt_estimated"]) == prompt
    assert (line["output_tokens"], line["output_estimated"]) == output


@pytest.mark.parametrize("model", ["a\nb", '"}\n{"lost":1}', "\ud800", "\u2028", "\x00", "é"])
def test_no_name_breaks_a_line(model: str, path: Path, new_log: Callable[..., CallLog]) -> None:
    log = new_log()
    log(changed(model=model))
    log(STREAMED)
    log.flush()
    first, second = path.read_bytes().splitlines()
    assert json.loads(first)["model"] == model.encode("utf-8", "replace").decode()
    assert json.loads(second)["model"] == "llama"


# -- the file ----------------------------------------------------------------------------------------------------


def test_it_is_its_owners_alone_and_appended_to(path: Path, new_log: Callable[..., CallLog]) -> None:
    put(new_log(), "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    put(new_log(), "b")
    assert ids(path) == ["a", "b"]


def test_a_file_that_was_moved_away_is_followed(
    path: Path, clock: Clock, new_log: Callable[..., CallLog]
) -> None:
    log, moved = new_log(), path.with_suffix(".1")
    put(log, "a")
    path.rename(moved)
    clock.seconds += FOLLOW_SECONDS / 2
    put(log, "b")
    assert not path.exists(), "it looks once a second"
    clock.seconds += FOLLOW_SECONDS / 2
    put(log, "c")
    assert (ids(moved), ids(path)) == (["a", "b"], ["c"])
    path.rename(moved)
    path.touch(mode=0o640)
    clock.seconds += FOLLOW_SECONDS
    put(log, "d")
    assert (ids(moved), ids(path)) == (["c"], ["d"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "one that the rotation has made is used as it is"
    os.truncate(path, 0)
    put(log, "e")
    assert ids(path) == ["e"]


def test_while_there_is_no_new_file_the_old_one_is_written(
    path: Path, clock: Clock, new_log: Callable[..., CallLog]
) -> None:
    """A folder in which only the rotation may make files: between its two steps nothing is lost."""
    log, moved = new_log(), path.with_suffix(".1")
    put(log, "a")
    path.rename(moved)
    path.mkdir()
    clock.seconds += FOLLOW_SECONDS
    put(log, "b")
    assert (ids(moved), log.lost) == (["a", "b"], 0)
    path.rmdir()
    clock.seconds += FOLLOW_SECONDS
    put(log, "c")
    assert ids(path) == ["c"]


def test_a_line_that_somebody_left_unfinished_takes_no_other_with_it(
    path: Path, new_log: Callable[..., CallLog]
) -> None:
    path.write_text('{"time":"2026-')
    put(new_log(), "a", "b")
    torn, *lines = path.read_text().splitlines()
    assert torn == '{"time":"2026-'
    assert [json.loads(line)["request_id"] for line in lines] == ["a", "b"]


def test_a_line_that_somebody_is_writing_is_waited_for(path: Path) -> None:
    """Half of it can be seen in the file before the rest is there; it must not be taken for a torn one."""
    naps: list[float] = []

    def clock() -> float:
        """Each look costs nothing, so the wait ends by what the other one does, never by time."""
        naps.append(0.0)
        if len(naps) == 3:
            os.write(other, b'"other"}\n')
            fcntl.flock(other, fcntl.LOCK_UN)
        return 0.0

    other = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    os.write(other, b'{"request_id":')
    log = CallLog(path, clock=clock)
    put(log, "own")
    os.close(other)
    assert ids(path) == ["other", "own"]


def test_one_that_was_stopped_in_its_write_is_not_waited_for_long(path: Path) -> None:
    other = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    ticks = itertools.count()
    put(CallLog(path, clock=lambda: next(ticks) * 0.2), "own")
    os.close(other)
    assert ids(path) == ["own"]


def test_several_write_at_once(path: Path) -> None:
    logs = [CallLog(path) for _ in range(4)]
    for log in logs:
        log.start()
    for number in range(1000):
        for writer, log in enumerate(logs):
            log(changed(request_id=f"{writer}-{number}"))
    for log in logs:
        log.close(WRITTEN_SECONDS)
    assert sorted(ids(path)) == sorted(f"{writer}-{number}" for writer in range(4) for number in range(1000))
    for writer in range(4):
        own = [name for name in ids(path) if name.startswith(f"{writer}-")]
        assert own == [f"{writer}-{number}" for number in range(1000)], "in the order in which they ended"
    assert [log.lost for log in logs] == [0] * 4


# -- what is lost ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_counted_and_told(path: Path, new_log: Callable[..., CallLog]) -> None:
    log = new_log(calls_max=2)
    put(log, "a", "b", "c", "d", "e")
    assert log.lost == 3
    put(log, "f")
    put(log, "g")
    told, *rest = [line for line in written(path) if line.get("request_id") not in ("a", "b")]
    assert told == {"time": "2026-11-01T12:00:00.123000Z", "lost": 3}
    assert [line["request_id"] for line in rest] == ["f", "g"]


def problems(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    caplog.clear()
    return found


def test_a_disk_that_takes_nothing_costs_lines_and_nothing_else(
    tmp_path: Path, clock: Clock, new_log: Callable[..., CallLog], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "calls.jsonl"
    log = new_log(path=path)
    put(log, "a", "b")
    put(log, "c")
    assert log.lost == 3
    (told,) = problems(caplog)
    assert told == f"{path}: No such file or directory; 2 calls are missing in it since the start"
    clock.seconds += COMPLAIN_SECONDS
    put(log)
    (told,) = problems(caplog)
    assert "3 calls are missing" in told
    path.parent.mkdir()
    put(log, "d")
    assert [line.get("request_id", line.get("lost")) for line in written(path)] == [3, "d"]
    clock.seconds += COMPLAIN_SECONDS
    put(log, "e")
    assert (problems(caplog), log.lost) == ([], 3)


def test_a_disk_that_takes_a_part(
    path: Path, clock: Clock, new_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines that are there are not lost; the rest is, and a torn line does not spoil the next."""
    log, real = new_log(), os.write
    log(STREAMED)
    log.flush()
    length = path.stat().st_size
    monkeypatch.setattr(calllog.os, "write", lambda file, data: real(file, data[: 2 * length + 5]))
    put(log, "r-2", "r-3", "r-4", "r-5")
    assert log.lost == 2
    monkeypatch.undo()
    put(log, "r-6")
    *whole, torn, told, last = path.read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in whole] == ["r-1", "r-2", "r-3"]
    assert torn == '{"tim'
    assert json.loads(told)["lost"] == 2
    assert json.loads(last)["request_id"] == "r-6"


def test_a_part_that_has_not_even_the_count_tells_it_again(
    path: Path, new_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real = new_log(calls_max=1), os.write
    put(log, "a")
    monkeypatch.setattr(calllog.os, "write", lambda file, data: real(file, data[:5]))
    put(log, "b", "c")
    monkeypatch.undo()
    put(log, "d")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line.get("request_id", line.get("lost")) for line in lines] == ["a", 2, "d"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_written(
    kind: str, path: Path, new_log: Callable[..., CallLog], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor waited for: opening a pipe that nobody reads would last for ever."""
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    log = new_log()
    put(log, "a")
    assert log.lost == 1
    (told,) = problems(caplog)
    assert "it is no file" in told or "Is a directory" in told


def test_a_call_that_cannot_be_a_line_costs_its_batch_only(
    path: Path, new_log: Callable[..., CallLog], caplog: pytest.LogCaptureFixture
) -> None:
    log = new_log()
    log(changed(queue_ms="soon"))
    log.flush()
    put(log, "a")
    assert log.lost == 1
    assert [line.get("request_id", line.get("lost")) for line in written(path)] == [1, "a"]
    assert "cannot be written as lines" in caplog.text


# -- its thread --------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that does not answer; set when somebody waits for it."""
    reached, gone_on, real = threading.Event(), threading.Event(), os.write

    def write(descriptor: int, data: bytes) -> int:
        reached.set()
        gone_on.wait()
        return real(descriptor, data)

    monkeypatch.setattr(calllog.os, "write", write)
    yield reached
    gone_on.set()


def test_closing_writes_what_waits(path: Path, new_log: Callable[..., CallLog]) -> None:
    count = 3 * BATCH_CALLS_MAX + 1
    log = new_log(calls_max=count)
    for number in range(count + 1):
        log(changed(request_id=str(number)))
    log.start()
    log.close(WRITTEN_SECONDS)
    lines = written(path)
    assert [line["request_id"] for line in lines if "request_id" in line] == [*map(str, range(count))]
    assert [line["lost"] for line in lines if "lost" in line] == [1]


def test_closing_tells_what_is_missing_though_nothing_comes_after(
    tmp_path: Path, new_log: Callable[..., CallLog]
) -> None:
    path = tmp_path / "folder" / "calls.jsonl"
    log = new_log(path=path)
    put(log, "a")
    path.parent.mkdir()
    log.start()
    log.close(WRITTEN_SECONDS)
    assert [line["lost"] for line in written(path)] == [1]


def test_closing_waits_no_longer_than_it_may(
    stuck: threading.Event, new_log: Callable[..., CallLog], caplog: pytest.LogCaptureFixture
) -> None:
    log = new_log(calls_max=2)
    log.start()
    log(STREAMED)
    assert stuck.wait(10)
    for _ in range(3):
        log(STREAMED)
    assert log.lost == 1
    log.close(0.01)
    assert "2 calls could not be written in time" in caplog.text


def test_one_that_was_never_started_can_be_closed(new_log: Callable[..., CallLog], path: Path) -> None:
    new_log().close()
    assert not path.exists()
