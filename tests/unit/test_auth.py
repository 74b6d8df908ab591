"""API keys: who is let in, and how a changed file takes effect."""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.http.auth import Key, Keyring, KeyringWatch, anonymous, new_key

ANYBODY = anonymous("normal")


def key(secret: str, **more: object) -> Key:
    return Key(name=secret, class_="normal", digest=sha256(secret.encode()).digest(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("authorization", "api_key", "name"),
    [
        (b"Bearer one", None, "one"),
        (b"bearer  one ", None, "one"),
        (None, b"two", "two"),
        (b"Bearer one", b"two", "one"),
        (b"Bearer wrong", b"two", None),
        (b"Basic one", None, None),
        (b"Basic dTpw", b"two", "two"),
        (b"one", None, None),
        (b"Bearer", None, None),
        (b"Bearer ", b"", None),
        (b"Bearer \xff\xfe", None, None),
        (b"Bearer " + b"o" * 100_000, None, None),
        (None, None, None),
    ],
)
def test_a_key_is_found_by_its_secret(
    authorization: bytes | None, api_key: bytes | None, name: str | None
) -> None:
    found = Keyring([key("one"), key("two")], None).find(authorization, api_key, 0)
    assert (found.name if found else None) == name


def test_a_credential_of_unusual_length_is_not_even_hashed() -> None:
    ring = Keyring([key("o" * 512), key("o" * 513)], None)
    assert ring.find(None, b"o" * 512, 0) is not None
    assert ring.find(None, b"o" * 513, 0) is None


def test_a_key_ends_at_its_expiry() -> None:
    ring = Keyring([key("one", expires_ms=1_000)], None)
    assert ring.find(b"Bearer one", None, 999) is not None
    assert ring.find(b"Bearer one", None, 1_000) is None


def test_no_keys_let_nobody_in() -> None:
    ring = Keyring([], None)
    assert ring.find(None, None, 0) is None
    assert ring.find(b"Bearer ", None, 0) is None


def test_where_no_key_is_required_the_others_are_anonymous() -> None:
    ring = Keyring([key("one", expires_ms=10)], ANYBODY)
    assert ring.find(None, None, 0) is ANYBODY
    assert ring.find(b"Bearer wrong", None, 0) is ANYBODY
    assert ring.find(b"Bearer one", None, 10) is ANYBODY
    assert ring.find(b"Bearer one", None, 9) is not ANYBODY


def test_a_new_key_opens_its_own_entry() -> None:
    secret, digest = new_key()
    assert re.fullmatch(r"kvg_[a-z2-7]{32}", secret)
    ring = Keyring([Key(name="new", class_="normal", digest=bytes.fromhex(digest))], None)
    assert ring.find(b"Bearer " + secret.encode(), None, 0) is not None
    assert new_key()[0] != secret


def test_a_key_does_not_show_its_digest() -> None:
    assert "digest" not in repr(key("one"))


class File:
    """A keys file of one secret a line; `bad` on a line is a mistake."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.reads = 0
        self.failures = 0
        self.write(text)

    def write(self, text: str) -> None:
        """Replaced as by an editor, so that the inode differs however coarse the clock of the file system is."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        if self.path.exists():
            os.link(self.path, self.path.with_suffix(f".{self.path.stat().st_ino}"))
        os.replace(fresh, self.path)

    def read(self) -> Iterable[Key]:
        self.reads += 1
        lines = self.path.read_text().split()
        if "bad" in lines:
            raise ValueError(f"line {lines.index('bad') + 1} is bad")
        return [key(line) for line in lines]

    def failed(self) -> None:
        self.failures += 1

    def watch(self) -> KeyringWatch:
        return KeyringWatch(self.path, self.read, None, self.failed)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "keys", "one")


def opens(watch: KeyringWatch, secret: str) -> bool:
    return watch.find(f"Bearer {secret}".encode(), None, 0) is not None


async def test_a_changed_file_takes_effect_once_it_has_settled(file: File) -> None:
    watch = file.watch()
    assert opens(watch, "one")
    file.write("two")
    await watch.poll()
    assert opens(watch, "one")
    await watch.poll()
    assert (opens(watch, "one"), opens(watch, "two")) == (False, True)


async def test_an_unchanged_file_is_not_read_again(file: File) -> None:
    watch = file.watch()
    for _ in range(5):
        await watch.poll()
    assert file.reads == 1


async def test_a_file_that_is_still_being_written_is_left_alone(file: File) -> None:
    watch = file.watch()
    for text in ("", "two", "two three"):
        file.write(text)
        await watch.poll()
        assert opens(watch, "one")
    await watch.poll()
    assert opens(watch, "three")
    assert file.reads == 2


async def test_a_bad_file_is_told_once_and_the_last_good_keys_stay(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    watch = file.watch()
    file.write("two bad")
    with caplog.at_level(logging.INFO, "kvgate.auth"):
        for _ in range(5):
            await watch.poll()
    assert opens(watch, "one")
    assert file.failures == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["keys file not reloaded, the last good keys stay: line 2 is bad"]
    file.write("three")
    await watch.poll()
    await watch.poll()
    assert opens(watch, "three")


async def test_a_file_that_goes_away_keeps_its_keys(file: File) -> None:
    watch = file.watch()
    file.path.unlink()
    for _ in range(4):
        await watch.poll()
    assert opens(watch, "one")
    assert file.failures == 1


async def test_a_reload_on_demand_reads_at_once(file: File) -> None:
    watch = file.watch()
    file.write("two")
    assert await watch.reload()
    assert opens(watch, "two")
    file.write("bad")
    assert not await watch.reload()
    assert opens(watch, "two")


def test_a_bad_file_at_start_is_an_error(file: File) -> None:
    file.write("bad")
    with pytest.raises(ValueError, match="line 1 is bad"):
        file.watch()


async def test_the_task_follows_the_file_until_it_is_cancelled(file: File) -> None:
    watch = KeyringWatch(file.path, file.read, None, file.failed, reload_seconds=0)
    task = asyncio.create_task(watch.run())
    file.write("two")
    async with asyncio.timeout(10):
        while not opens(watch, "two"):
            await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
