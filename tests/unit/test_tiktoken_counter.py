"""Counting with the packaged vocabulary."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens import tiktoken_counter
from gateway.tokens.tiktoken_counter import (
    INLINE_CHARS,
    JOBS_MAX,
    PIECE_CHARS,
    THREADS,
    VOCABULARY,
    TiktokenCounter,
    VocabularyError,
    load_encoding,
    utf8_bytes,
)

LONG = "the quick brown fox jumps over the lazy dog, " * 1000


@pytest.fixture
def counter() -> Iterator[TiktokenCounter]:
    counter = TiktokenCounter()
    yield counter
    counter.close()


async def tokens_of(counter: TiktokenCounter, texts: list[str]) -> int:
    return (await counter.count(texts)).tokens


class Gate:
    """Holds every count that is off the loop until it is opened."""

    def __init__(self, counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.pieces = 0
        count_piece = counter._count_piece

        def held(piece: str) -> int:
            self.open.wait(30)
            self.pieces += 1
            return count_piece(piece)

        monkeypatch.setattr(counter, "_count_piece", held)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("hello world", 2),
        ("tiktoken is great!", 6),
        ("お誕生日おめでとう", 9),
        ("2 + 2 = 4", 7),
        (" " * 128, 1),
    ],
)
async def test_known_counts_of_cl100k(counter: TiktokenCounter, text: str, tokens: int) -> None:
    assert await tokens_of(counter, [text]) == tokens


async def test_texts_are_counted_together(counter: TiktokenCounter) -> None:
    assert await tokens_of(counter, ["hello world", "hello world"]) == 4
    assert await tokens_of(counter, []) == 0


async def test_no_network_is_ever_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "socket", forbidden)
    counter = TiktokenCounter()
    assert await tokens_of(counter, ["hello world"]) == 2
    assert await tokens_of(counter, [LONG]) > 9000
    counter.close()


@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "<|fim_prefix|>", "<|im_start|>system", "<|endofprompt|>" * 1000]
)
async def test_special_tokens_are_ordinary_text(counter: TiktokenCounter, text: str) -> None:
    assert await tokens_of(counter, [text]) >= text.count("<|") * 3


@pytest.mark.parametrize("text", ["\ud800", "a\udfff" * 5000, "\x00", "\u2028" * 5000])
async def test_odd_characters_do_not_raise(counter: TiktokenCounter, text: str) -> None:
    assert 0 < await tokens_of(counter, [text]) <= utf8_bytes(text)


@pytest.mark.parametrize("text", ["a" * 50_000, " " * 50_000, "😀" * 20_000, LONG])
async def test_pieces_count_as_the_whole_give_or_take_a_cut(counter: TiktokenCounter, text: str) -> None:
    whole = len(load_encoding(VOCABULARY).encode_ordinary(text))
    assert abs(await tokens_of(counter, [text]) - whole) <= len(text) // PIECE_CHARS + 1


async def test_short_texts_are_counted_on_the_loop_and_long_ones_off_it(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def seen(_: str) -> int:
        threads.append(threading.current_thread())
        return 1

    monkeypatch.setattr(counter, "_count_piece", seen)
    await counter.count(["x" * (INLINE_CHARS - 1)])
    await counter.count(["x" * INLINE_CHARS])
    await counter.count([""] * (INLINE_CHARS + 1))
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]


async def test_equal_pieces_are_counted_once(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    assert await tokens_of(counter, ["a" * PIECE_CHARS * 100]) == 100 * PIECE_CHARS // 8
    assert gate.pieces == 1


async def test_beyond_the_bound_bytes_are_the_estimate(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    waiting = [asyncio.create_task(counter.count([LONG])) for _ in range(JOBS_MAX)]
    await asyncio.sleep(0)
    assert await counter.count(["é" * 5000]) == (10_000, False)
    gate.open.set()
    assert {counted.exact for counted in await asyncio.gather(*waiting)} == {True}
    assert await tokens_of(counter, [LONG]) < len(LONG) / 3


async def test_what_is_late_is_estimated_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    counter = TiktokenCounter(clock=lambda: now)
    gate = Gate(counter, monkeypatch)
    task = asyncio.create_task(counter.count([LONG]))
    await asyncio.sleep(0)
    now = tiktoken_counter.COUNT_SECONDS_MAX
    gate.open.set()
    counted = await task
    assert len(LONG) - PIECE_CHARS < counted.tokens <= len(LONG)
    assert not counted.exact
    counter.close()


async def test_a_cancelled_count_stops_at_its_next_piece_and_gives_its_place_back(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    tasks = [asyncio.create_task(counter.count([f"{i}" + LONG])) for i in range(JOBS_MAX)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert await tokens_of(counter, [LONG]) == len(LONG)  # what waits for a thread still holds its place
    gate.open.set()
    await asyncio.gather(*(asyncio.to_thread(counter._threads.submit(int).result) for _ in range(THREADS)))
    assert gate.pieces <= THREADS
    assert await tokens_of(counter, [LONG]) < len(LONG) / 3


async def test_closing_ends_counts_under_way_with_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TiktokenCounter()
    gate = Gate(counter, monkeypatch)
    task = asyncio.create_task(counter.count([LONG]))
    await asyncio.sleep(0)
    counter.close()
    counter.close()
    gate.open.set()
    assert (await task).tokens > len(LONG) - PIECE_CHARS
    assert await tokens_of(counter, [LONG]) == len(LONG)


def test_a_missing_vocabulary_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        VocabularyError, match=r"cannot read the tokenizer's vocabulary .*: No such file"
    ) as raised:
        TiktokenCounter(tmp_path / "absent")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", [b"", b"AA== 0\n", b"not a vocabulary"])
def test_a_damaged_vocabulary_is_one_clear_line(tmp_path: Path, damage: bytes) -> None:
    damaged = tmp_path / "vocabulary"
    damaged.write_bytes(damage + VOCABULARY.read_bytes()[: 1000 if damage else -1])
    with pytest.raises(VocabularyError, match=r"damaged: its sha256 is [0-9a-f]{64}, not 223921b7") as raised:
        TiktokenCounter(damaged)
    assert "\n" not in str(raised.value)


def test_the_data_carries_its_licence() -> None:
    notice = (VOCABULARY.parent / "NOTICE").read_text()
    assert tiktoken_counter.VOCABULARY_SHA256 in notice
    assert "MIT License" in notice
    assert "Copyright (c) 2022 OpenAI, Shantanu Jain" in notice
