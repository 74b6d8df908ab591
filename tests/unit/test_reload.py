"""Files that are followed, and what of the configuration may change while the gateway runs."""

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config import ConfigError, Settings, load
from gateway.reload import FileWatch, check_reload


class File:
    """A file that holds words; `bad` cannot be read, `unusable` not used."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.reads = 0
        self.failures = 0
        self.used = text.split()
        self.uses = 0
        self.write(text)

    def write(self, text: str) -> None:
        """Replaced as by an editor, so that the inode differs however coarse the clock of the file system is."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        if self.path.exists():
            os.link(self.path, self.path.with_suffix(f".{self.path.stat().st_ino}"))
        os.replace(fresh, self.path)

    def read(self) -> list[str]:
        self.reads += 1
        words = self.path.read_text().split()
        if "bad" in words:
            raise ValueError(f"word {words.index('bad') + 1} is bad")
        return words

    def use(self, words: list[str]) -> None:
        if "unusable" in words:
            raise ValueError("unusable is of no use")
        self.uses += 1
        self.used = words

    def failed(self) -> None:
        self.failures += 1

    def watch(self, poll_seconds: float = 60) -> FileWatch[list[str]]:
        return FileWatch(self.path, self.used, self.read, self.use, self.failed, poll_seconds)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "words", "one")


async def polled(watch: FileWatch[list[str]], times: int) -> None:
    for _ in range(times):
        await watch.poll()


async def test_a_changed_file_takes_effect_once_it_has_settled(file: File) -> None:
    watch = file.watch()
    await watch.poll()
    file.write("two")
    await watch.poll()
    assert file.used == ["one"]
    await watch.poll()
    assert file.used == ["two"]


async def test_a_change_counts_within_a_second(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the task's own pauses; a machine that has no time for it is no matter of ours."""
    pauses: list[float] = []
    used_at: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    def use(_: list[str]) -> None:
        used_at.append(sum(pauses))

    watch = FileWatch(file.path, file.used, file.read, use, file.failed)
    monkeypatch.setattr("gateway.reload.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    task = asyncio.create_task(watch.run())
    while len(pauses) < 3:
        await asyncio.sleep(0)
    file.write("two")
    written_at = sum(pauses[:-1])  # at the beginning of the last pause, at worst
    while not used_at:
        await asyncio.sleep(0)
    assert used_at[0] - written_at < 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_an_unchanged_file_is_read_once_again_and_nothing_is_used(file: File) -> None:
    """It may have changed between the first reading and the watch's beginning."""
    watch = file.watch()
    await polled(watch, 5)
    assert (file.reads, file.uses) == (1, 0)


async def test_a_change_before_the_watch_began_is_found(file: File) -> None:
    file.write("two")
    await file.watch().poll()
    assert file.used == ["two"]


async def test_a_file_that_is_still_being_written_is_left_alone(file: File) -> None:
    watch = file.watch()
    await watch.poll()
    for text in ("", "two", "two three"):
        file.write(text)
        await watch.poll()
        assert file.used == ["one"]
    await watch.poll()
    assert file.used == ["two", "three"]
    assert (file.reads, file.uses) == (2, 1)


@pytest.mark.parametrize(
    ("text", "problem"), [("two bad", "word 2 is bad"), ("unusable", "unusable is of no use")]
)
async def test_a_bad_file_is_told_once_and_what_was_good_stays(
    file: File, caplog: pytest.LogCaptureFixture, text: str, problem: str
) -> None:
    watch = file.watch()
    file.write(text)
    with caplog.at_level(logging.INFO, "kvgate.reload"):
        await polled(watch, 5)
    assert file.used == ["one"]
    assert file.failures == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"words not reloaded, what it held before stays in use: {problem}"]
    file.write("three")
    await polled(watch, 2)
    assert file.used == ["three"]


async def test_a_bad_file_that_is_taken_back_changes_nothing(file: File) -> None:
    watch = file.watch()
    file.write("bad")
    await polled(watch, 2)
    file.write("one")
    await polled(watch, 2)
    assert (file.used, file.uses, file.failures) == (["one"], 0, 1)


async def test_a_file_that_goes_away_leaves_what_it_held(file: File) -> None:
    watch = file.watch()
    await watch.poll()
    file.path.unlink()
    await polled(watch, 4)
    assert file.used == ["one"]
    assert file.failures == 1


async def test_a_pipe_in_its_place_is_not_read(file: File) -> None:
    watch = file.watch()
    await watch.poll()
    file.path.unlink()
    os.mkfifo(file.path)
    async with asyncio.timeout(30):
        await polled(watch, 4)
    assert (file.used, file.failures, file.reads) == (["one"], 1, 1)


async def test_the_task_follows_the_file_until_it_is_cancelled(file: File) -> None:
    task = asyncio.create_task(file.watch(poll_seconds=0).run())
    file.write("two")
    async with asyncio.timeout(30):
        while file.used != ["two"]:
            await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


# -- which settings ------------------------------------------------------------------------------------------------


def settings(folder: Path, **changes: Any) -> Settings:
    fleet = {"model": "demo", "pools": pools(), **changes.pop("fleet", {})}
    path = folder / "kvgate.yaml"
    path.write_text(json.dumps({"fleets": [fleet], **changes}))
    return load(path, {})


def pools(last: str = "long", **replica: Any) -> list[dict[str, Any]]:
    return [
        {"name": "short", "max_prompt_tokens": 4096, "replicas": [{"url": "http://10.0.0.1", **replica}]},
        {"name": last, "replicas": [{"url": "http://10.0.0.2"}]},
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"fleet": {"safe_fraction": 0.5}},
        {"fleet": {"aliases": ["another"], "default_output_tokens": 7, "max_output_tokens": 70}},
        {"fleet": {"pools": pools(num_gpu_blocks=50)}},
        {"queue": {"depth_max": 1}},
        {"answers": {"overload_status": 503}},
        {"server": {"grace_seconds": 1}},
    ],
)
def test_what_may_change(tmp_path: Path, change: dict[str, Any]) -> None:
    check_reload(settings(tmp_path), settings(tmp_path, **change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"store": {"lease_seconds": 9}},
            "store.lease_seconds: cannot change while the gateway runs: restart it",
        ),
        ({"auth": {"required": False, "keys_file": "keys.yaml"}}, "auth.required: cannot change"),
        ({"admin": {"token_env": "OTHER"}}, "admin.token_env: cannot change"),
        (
            {"fleet": {"pools": [pools()[0], pools()[1] | {"upstream": {"api_key_env": "K"}}]}},
            "fleets[0].pools[1].upstream.api_key_env: cannot change while the gateway runs: restart it",
        ),
        ({"log": {"level": "debug"}}, "log.level: cannot change"),
        ({"log": {"calls": "calls.jsonl"}}, "log.calls: cannot change"),
        ({"upstream": {"idle_seconds": 1}}, "upstream.idle_seconds: cannot change"),
        (
            {"classes": [{"name": "normal"}]},
            "classes: names cannot change while the gateway runs (high, normal, low -> normal)",
        ),
        ({"fleet": {"name": "other"}}, "fleets: names cannot change while the gateway runs (demo -> other)"),
        ({"fleet": {"pools": pools(last="longer")}}, "fleets[0].pools: names cannot change"),
        ({"fleet": {"lanes": {"short": ["short", "long"]}}}, "fleets[0].lanes: cannot change"),
        ({"fleet": {"tokenizer": "model"}}, "fleets[0].tokenizer: cannot change"),
    ],
)
def test_what_needs_a_restart_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_reload(settings(tmp_path), settings(tmp_path, **change))
    assert str(told.value).startswith(words)
