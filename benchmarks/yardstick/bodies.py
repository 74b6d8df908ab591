"""Requests of the yardstick as files.

In a text "@U" and 16 digits is a place that the load generator fills differently in each call.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

MODEL = "mock-model"
OUTPUT_TOKENS = 200
MARKER = "@U" + 16 * "0"
TURNS = 64
LARGE_BYTES = 256 * 1024
SYLLABLES = (
    "an",
    "ber",
    "con",
    "dis",
    "el",
    "gra",
    "lo",
    "mi",
    "nor",
    "per",
    "qui",
    "sta",
    "ter",
    "un",
    "ver",
)
COMMON = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "his",
)


def write(folder: Path) -> None:
    """Every request, by the names that `measures.py` uses."""
    folder.mkdir(parents=True, exist_ok=True)
    small = ["counting budget blocks " * 4]
    _write(folder / "small.json", small)
    _write(folder / "small-stream.json", small, stream=True)
    _write(folder / "256k-known.json", known_history())
    _write(folder / "256k-new.json", new_history())


def known_history() -> list[str]:
    """What an agent sends: turns that were sent before, and a short last one."""
    return [*_turns(TURNS - 1), f"And now step {MARKER}?"]


def new_history() -> list[str]:
    """As long, and no turn was ever sent before."""
    return [f"{MARKER} {text}" for text in _turns(TURNS)]


def _turns(count: int) -> list[str]:
    chance = random.Random(5)
    return [prose(chance, LARGE_BYTES // TURNS - 64) for _ in range(count)]


def prose(chance: random.Random, chars: int) -> str:
    """Words and sentences with fewer characters in a token of cl100k_base than English has."""
    words: list[str] = []
    length = 0
    while length < chars:
        rare = chance.random() < 0.1
        word = "".join(chance.choices(SYLLABLES, k=2)) if rare else chance.choice(COMMON)
        words.append(word + chance.choice(("", "", "", "", "", "", "", ",", ".", ".\n")))
        length += len(words[-1]) + 1
    return " ".join(words)[:chars]


def _write(path: Path, turns: Sequence[str], *, stream: bool = False) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(turns)]
    body = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
    path.write_text(json.dumps(body | ({"stream": True} if stream else {})))
