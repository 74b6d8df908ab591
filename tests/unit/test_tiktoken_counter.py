"""Counting with the packaged vocabulary."""

import asyncio
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.content import Share
from gateway.core.prompt import Text, literal_text, text_bytes
from gateway.steps import Begun
from gateway.tokens import tiktoken_counter
from gateway.tokens.api import Counted
from gateway.tokens.memo import ENTRY_BYTES, GENERATION_ENTRIES_MAX, MEMO_BYTES_MAX, Memo, text_key
from gateway.tokens.threads import COUNT_SECONDS_MAX, JOBS_MAX, THREADS, CountingThreads
from gateway.tokens.tiktoken_counter import (
    INLINE_CHARS,
    INLINE_CHARS_A_TURN,
    LOOKED_UP_BYTES_MAX,
    LOOKED_UP_TEXTS_MAX,
    PART_CHARS,
    PIECE_CHARS,
    VOCABULARY,
    TiktokenCounter,
    VocabularyError,
    load_encodings,
)

LONG = "the quick brown fox jumps over the lazy dog, " * 1000


_load_once = functools.cache(load_encodings)


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    """To load takes a third of a second; counting changes nothing in what was loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken_counter, "load_encodings", _load_once)
        yield


@pytest.fixture
def threads() -> Iterator[CountingThreads]:
    threads = CountingThreads()
    yield threads
    threads.close()


@pytest.fixture
def counter(threads: CountingThreads) -> TiktokenCounter:
    return TiktokenCounter(threads)


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
    threads = CountingThreads()
    counter = TiktokenCounter(threads)
    assert await tokens_of(counter, ["hello world"]) == 2
    assert await tokens_of(counter, [LONG]) > 9000
    threads.close()


@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "<|fim_prefix|>", "<|im_start|>system", "<|endofprompt|>" * 1000]
)
async def test_special_tokens_are_ordinary_text(counter: TiktokenCounter, text: str) -> None:
    assert await tokens_of(counter, [text]) >= text.count("<|") * 3


@pytest.mark.parametrize("text", ["\ud800", "a\udfff" * 5000, "\x00", "\u2028" * 5000])
async def test_odd_characters_do_not_raise(counter: TiktokenCounter, text: str) -> None:
    assert 0 < await tokens_of(counter, [text]) <= text_bytes(text)


@pytest.mark.parametrize("text", ["a" * 50_000, " " * 50_000, "😀" * 20_000, LONG])
async def test_pieces_count_as_the_whole_give_or_take_a_cut(counter: TiktokenCounter, text: str) -> None:
    whole = len(counter._encoding.encode_ordinary(text))
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


async def test_a_turn_of_the_loop_counts_only_so_much(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, on_the_loop = threading.current_thread(), []

    def seen(_: str) -> int:
        on_the_loop.append(threading.current_thread() is here)
        return 1

    monkeypatch.setattr(counter, "_count_piece", seen)
    full = INLINE_CHARS_A_TURN // INLINE_CHARS
    for number in range(full + 2):
        await counter.count([f"{number}" + "x" * (INLINE_CHARS - 2)])
    assert on_the_loop == [True] * full + [False, True]


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
    off_the_loop = LONG[: INLINE_CHARS + 1]
    waiting = [asyncio.create_task(counter.count([off_the_loop])) for _ in range(JOBS_MAX)]
    await asyncio.sleep(0)
    assert await counter.count(["é" * 5000]) == Counted(10_000, False)
    gate.open.set()
    assert {counted.exact for counted in await asyncio.gather(*waiting)} == {True}
    assert await tokens_of(counter, [LONG]) < len(LONG) / 3


async def jobs_begun() -> None:
    """A count that takes a thread waits a turn before."""
    for _ in range(2):
        await asyncio.sleep(0)


async def test_a_count_that_is_closed_before_its_job_begins_has_cost_nothing(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    counting = Begun(counter.count([LONG]))
    assert counting.suspended
    counting.close()
    await jobs_begun()
    assert (gate.pieces, counter._threads._pool._work_queue.qsize()) == (0, 0)
    short = Begun(counter.count(["hello"]))
    assert not short.suspended
    assert short.result[:2] == (1, True)


async def test_what_is_late_is_estimated_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    threads = CountingThreads(lambda: now)
    counter = TiktokenCounter(threads)
    gate = Gate(counter, monkeypatch)
    task = asyncio.create_task(counter.count([LONG]))
    await jobs_begun()
    now = COUNT_SECONDS_MAX
    gate.open.set()
    counted = await task
    assert len(LONG) - PIECE_CHARS < counted.tokens <= len(LONG)
    assert not counted.exact
    threads.close()


async def test_a_cancelled_count_stops_at_its_next_piece_and_gives_its_place_back(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    tasks = [asyncio.create_task(counter.count([f"{i}" + LONG])) for i in range(JOBS_MAX)]
    await jobs_begun()
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert await tokens_of(counter, [LONG]) == len(LONG)  # what waits for a thread still holds its place
    gate.open.set()
    await asyncio.gather(
        *(asyncio.to_thread(counter._threads._pool.submit(int).result) for _ in range(THREADS))
    )
    assert gate.pieces <= THREADS
    assert await tokens_of(counter, [LONG]) < len(LONG) / 3


async def test_closing_ends_counts_under_way_with_their_bytes(
    counter: TiktokenCounter, threads: CountingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(counter, monkeypatch)
    task = asyncio.create_task(counter.count([LONG]))
    await jobs_begun()
    threads.close()
    threads.close()
    gate.open.set()
    assert (await task).tokens > len(LONG) - PIECE_CHARS
    assert await tokens_of(counter, [LONG]) == len(LONG)


# What was counted before


HISTORY = [f"{i} {LONG[: 300 * i]}" for i in range(40)]
"""234,000 characters in 40 messages, which are 67 pieces."""


@pytest.mark.parametrize(
    ("texts", "pieces"), [(["hello world"], 1), ([LONG], 11), (HISTORY, 67)], ids=["short", "long", "history"]
)
async def test_a_known_text_is_not_tokenized_again(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch, texts: list[str], pieces: int
) -> None:
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    first = await counter.count(texts)
    assert gate.pieces == pieces
    assert await counter.count(texts) == first
    assert await tokens_of(counter, [*texts, *texts]) == 2 * first.tokens
    assert gate.pieces == pieces


async def test_a_known_history_with_a_new_turn_needs_no_thread(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await tokens_of(counter, HISTORY)
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    monkeypatch.setattr(counter._threads, "run", None)
    assert (await counter.count([*HISTORY, "hello world"]))[:2] == (history + 2, True)
    assert gate.pieces == 1


async def test_a_text_that_grew_is_counted_from_its_last_part_on(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(str(n) for n in range(PART_CHARS))[: 3 * PART_CHARS]
    await counter.count([text + "the end"])
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    assert (await counter.count([text + "the end, and on"])).exact
    assert gate.pieces == 1


async def test_a_new_text_in_a_long_history_is_all_that_a_thread_counts(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await counter.count(HISTORY)
    gate = Gate(counter, monkeypatch)
    gate.open.set()
    await counter.count([*HISTORY, "x" + LONG])
    assert gate.pieces == 11


async def test_much_is_looked_up_off_the_loop(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, threads = threading.current_thread(), []

    def seen(text: str) -> int:
        threads.append(threading.current_thread() is here)
        return text_key(text)

    monkeypatch.setattr(tiktoken_counter, "text_key", seen)
    many, large, wide = (
        ["a"] * LOOKED_UP_TEXTS_MAX,
        "a" * LOOKED_UP_BYTES_MAX,
        "é" * (LOOKED_UP_BYTES_MAX // 4),
    )
    for texts, on_the_loop in (
        (many, True),
        ([*many, "a"], False),
        ([large], True),
        ([large, "a"], False),
        ([wide], True),
        ([wide, "a"], False),
    ):
        threads.clear()
        assert (await counter.count(texts)).exact
        assert set(threads) == {on_the_loop}


WORDS = st.sampled_from(
    ["a", "the ", " fox", "\n", "  ", "é", "日本", "😀", "\ud800", "\udfff", "<|endoftext|>", "1234"]
)
TEXTS = st.lists(
    st.builds(
        lambda words, times: "".join(words) * times,
        st.lists(WORDS, max_size=6),
        st.sampled_from([1, 7, 3000]),
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[TiktokenCounter]:
    """What one example leaves in the memo, the next one finds."""
    threads = CountingThreads()
    yield TiktokenCounter(threads)
    threads.close()


@settings(max_examples=60, deadline=None)
@given(TEXTS)
async def test_counts_are_those_of_the_pieces_whatever_was_counted_before(
    shared: TiktokenCounter, texts: list[str]
) -> None:
    expected = sum(
        len(shared._encoding.encode_ordinary(text[start : start + PIECE_CHARS]))
        for text in texts
        for start in range(0, len(text), PIECE_CHARS)
    )
    for _ in range(2):
        assert (await shared.count(texts))[:2] == (expected, True)


async def test_shares_are_of_the_text_whatever_is_known_of_it(counter: TiktokenCounter) -> None:
    russian, code = "слово " * 4000, "x[i] = y[i] * 2;\n" * 20
    first = await counter.count([russian, code, "hello"])
    assert [(share.script, share.json_bytes) for share in first.shares] == [
        ("marks", len(code) + code.count("\n")),
        ("words", 5),
        ("cyrillic", len(russian.encode())),
    ]
    assert sum(share.tokens for share in first.shares) == first.tokens
    again = await counter.count([russian, code, "hello"])
    assert (again.tokens, sorted(again.shares)) == (first.tokens, sorted(first.shares))
    assert (await counter.count([literal(code)])).shares == (await counter.count([code])).shares


async def test_a_long_text_is_of_the_script_that_most_of_it_has(counter: TiktokenCounter) -> None:
    mixed = "слово " * 8000 + "word " * 4000
    for _ in range(2):
        counted = await counter.count([mixed])
        assert counted.shares == (Share("cyrillic", counted.tokens, len(mixed.encode())),)


def literal(text: str, *, ascii_only: bool = True) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(text, ensure_ascii=ascii_only).encode())


@settings(max_examples=30, deadline=None)
@given(st.text(st.sampled_from('a the\n"\\é日😀'), min_size=1, max_size=40), st.sampled_from([1, 7, 1500]))
async def test_a_string_as_it_stands_counts_as_its_text(
    shared: TiktokenCounter, words: str, times: int
) -> None:
    text = words * times
    expected = await shared.count([text])
    for _ in range(2):
        for ascii_only in (True, False):
            counted = await shared.count([literal(text, ascii_only=ascii_only)])
            assert (counted.tokens, counted.exact) == (expected.tokens, expected.exact)


async def test_a_known_string_is_not_decoded(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[msgspec.Raw] = []
    monkeypatch.setattr(tiktoken_counter, "literal_text", lambda raw: seen.append(raw) or literal_text(raw))
    for text in ("hello", "hello", "hello\n"):
        await counter.count([literal(text)])
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (literal("A" * 600), "A" * 600),
        (literal("\n" * 300), json.dumps("\n" * 300)),
        ("\u4141" * 300, "A" * 600),
        ("a" * 600, "a" * 599),
        ("a" * 600, "a" * 599 + "b"),
        ("", "\0"),
    ],
)
def test_no_two_texts_share_a_key(one: Text, other: Text) -> None:
    assert text_key(one) != text_key(other)


def test_nobody_outside_of_the_process_knows_a_key() -> None:
    """Not even where the interpreter's own hashes are the same each time."""
    program = "from gateway.tokens.memo import text_key; print(text_key('a' * 600))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    keys = {
        subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(keys) == 2


def test_the_interpreter_hashes_with_a_key() -> None:
    """PEP 456 lets a build have another function, by which strangers could make texts collide."""
    assert sys.hash_info.algorithm.startswith("siphash")
    assert (sys.hash_info.width, sys.hash_info.cutoff) == (64, 0)


async def test_what_bytes_stood_for_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    threads = CountingThreads(lambda: now)
    counter = TiktokenCounter(threads)
    gate = Gate(counter, monkeypatch)
    late, left = (asyncio.create_task(counter.count([text + LONG])) for text in "ab")
    await jobs_begun()
    now = COUNT_SECONDS_MAX
    left.cancel()
    gate.open.set()
    assert not (await late).exact
    await asyncio.gather(left, return_exceptions=True)
    now = 0.0
    for text in "ab":
        counted = await counter.count([text + LONG])
        assert counted.exact
        assert counted.tokens < len(LONG) / 3
    threads.close()


async def test_every_thread_has_an_encoding_of_its_own(counter: TiktokenCounter) -> None:
    together = threading.Barrier(THREADS)

    def mine() -> int:
        together.wait(30)
        counter._take_encoding()
        return id(counter._of_thread.encoding)

    jobs = [asyncio.wrap_future(counter._threads._pool.submit(mine)) for _ in range(THREADS)]
    assert len({id(counter._encoding), *await asyncio.gather(*jobs)}) == 1 + THREADS


def test_a_memo_forgets_what_was_not_asked_for() -> None:
    known: Memo[int] = Memo(4)
    for number in range(40):
        known.put(number, number)
        assert known.get(0) == 0
        assert len(known) <= 8
    assert [known.get(number) for number in (1, 30, 38, 39)] == [None, None, 38, 39]


def test_a_full_memo_needs_no_more_than_its_bytes() -> None:
    keys = random.Random(1)
    tracemalloc.start()
    try:
        known: Memo[int] = Memo()
        for tokens in itertools.count(1000):
            known.put(keys.getrandbits(63), tokens)
            if len(known) == 2 * GENERATION_ENTRIES_MAX:
                break
        needed, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MEMO_BYTES_MAX * 0.8 < needed <= MEMO_BYTES_MAX
    assert 2 * GENERATION_ENTRIES_MAX * ENTRY_BYTES <= MEMO_BYTES_MAX


def test_a_missing_vocabulary_is_one_clear_line(tmp_path: Path, threads: CountingThreads) -> None:
    with pytest.raises(
        VocabularyError, match=r"cannot read the tokenizer's vocabulary .*: No such file"
    ) as raised:
        TiktokenCounter(threads, tmp_path / "absent")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", [b"", b"AA== 0\n", b"not a vocabulary"])
def test_a_damaged_vocabulary_is_one_clear_line(
    tmp_path: Path, threads: CountingThreads, damage: bytes
) -> None:
    damaged = tmp_path / "vocabulary"
    damaged.write_bytes(damage + VOCABULARY.read_bytes()[: 1000 if damage else -1])
    with pytest.raises(VocabularyError, match=r"damaged: its sha256 is [0-9a-f]{64}, not 223921b7") as raised:
        TiktokenCounter(threads, damaged)
    assert "\n" not in str(raised.value)


def test_the_data_carries_its_licence() -> None:
    notice = (VOCABULARY.parent / "NOTICE").read_text()
    assert tiktoken_counter.VOCABULARY_SHA256 in notice
    assert "MIT License" in notice
    assert "Copyright (c) 2022 OpenAI, Shantanu Jain" in notice
