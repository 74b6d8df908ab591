"""Of what kind a prompt is."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.content import SCRIPTS, SIZES, WINDOW_BYTES, WINDOWS, Share, parts, script_of
from gateway.core.prompt import PromptText, Text
from gateway.core.request import Endpoint, GenerationRequest, parse
from tests.corpus import KINDS

CODE = "for (i = 0; i < n; i++) { total += prices[i] * (1 - discount); }\n" * 40
SCRIPT_OF = {
    "English": "words",
    "Chinese": "han",
    "Japanese": "kana",
    "Korean": "hangul",
    "Russian": "cyrillic",
    "JSON": "marks",
    "emoji": "four",
    "base64": "marks",
}


def parsed(text: str, ensure_ascii: bool) -> Text:
    """As a body has it."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    request = parse(Endpoint.CHAT, json.dumps(body, ensure_ascii=ensure_ascii).encode(), 1)
    assert isinstance(request, GenerationRequest)
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    (found,) = prompt.texts
    return found


@pytest.mark.parametrize("ensure_ascii", [False, True], ids=["as it is", "escaped"])
@pytest.mark.parametrize("kind", SCRIPT_OF)
@pytest.mark.parametrize("chars", [200, 3000, 30_000])
def test_a_text_has_its_script_however_it_came(kind: str, chars: int, ensure_ascii: bool) -> None:
    text = KINDS[kind](random.Random(3), chars)
    assert script_of(parsed(text, ensure_ascii)) == SCRIPT_OF[kind]


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("", "words"),
        ("0123456789 " * 40, "digits"),
        (" " * 1000, "blank"),
        ("é" * 3 + "e" * 97, "accented"),
        (CODE, "marks"),
    ],
)
def test_some_have_no_letters_of_their_own(text: str, script: str) -> None:
    assert script_of(text) == script


@given(st.text(max_size=400))
def test_every_text_has_one(text: str) -> None:
    assert script_of(text) in SCRIPTS


def test_a_sample_is_of_the_whole_text_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[bytes] = []
    monkeypatch.setattr("gateway.core.content._script", lambda text: sampled.append(text) or "x")
    script_of("a" * 100_000 + "д" * 100_000)
    (text,) = sampled
    assert len(text) <= (WINDOWS + 2) * WINDOW_BYTES
    assert 0.2 < text.count(b"a") / len(text) < 0.8


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_parts_are_the_shares_with_the_size_of_all(counts: list[int]) -> None:
    found = parts([Share(f"s{index}x", count, 200) for index, count in enumerate(counts)])
    assert [part.tokens for part in found] == counts
    size = sum(sum(counts) >= bound for bound in SIZES)
    for index, part in enumerate(found):
        assert part.coarse == f"s{index}x/{size}"
        assert part.exact.startswith(f"s{index}x")
        assert part.exact.endswith(f"/{size}")
