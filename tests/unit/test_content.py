"""Of what kind a prompt is."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.content import SIZES, TEXTS_MAX, WINDOW_BYTES, WINDOWS, Group, groups, parts, script_of
from gateway.core.prompt import PromptText, Text, text_bytes
from gateway.core.request import Endpoint, GenerationRequest, parse
from tests.corpus import KINDS

CODE = "for (i = 0; i < n; i++) { total += prices[i] * (1 - discount); }\n" * 40
SCRIPTS = {
    "English": "words",
    "Chinese": "han",
    "Japanese": "kana",
    "Korean": "hangul",
    "Russian": "cyrillic",
    "JSON": "marks",
    "emoji": "four",
    "base64": "marks",
}


def prompt_of(*texts: Text) -> PromptText:
    return PromptText(texts, 7, sum(map(text_bytes, texts)))


def parsed(text: str, ensure_ascii: bool) -> PromptText:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    request = parse(Endpoint.CHAT, json.dumps(body, ensure_ascii=ensure_ascii).encode(), 1)
    assert isinstance(request, GenerationRequest)
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    return prompt


@pytest.mark.parametrize("ensure_ascii", [False, True], ids=["as it is", "escaped"])
@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("chars", [200, 3000, 30_000])
def test_a_text_has_its_script_however_it_came(kind: str, chars: int, ensure_ascii: bool) -> None:
    text = KINDS[kind](random.Random(3), chars)
    (group,) = groups(parsed(text, ensure_ascii))
    assert group.script == SCRIPTS[kind]


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
    assert script_of([text]) == script


@given(st.lists(st.text(max_size=400), max_size=50))
def test_every_text_is_in_one_group(texts: list[str]) -> None:
    found = [text for group in groups(prompt_of(*texts)) for text in group.texts]
    assert sorted(found) == sorted(texts)


def test_few_texts_are_looked_at_one_by_one() -> None:
    texts = ["word " * 100] * (2 * TEXTS_MAX) + ["中文" * 10]
    found = groups(prompt_of(*texts))
    assert sum(len(group.texts) for group in found) == len(texts)
    assert {group.script for group in found} == {"words"}


def test_a_sample_is_of_the_whole_text_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[bytes] = []
    monkeypatch.setattr("gateway.core.content._script", lambda text: sampled.append(text) or "x")
    script_of(["a" * 100_000, "д" * 100_000])
    (text,) = sampled
    assert len(text) <= (WINDOWS + 2) * WINDOW_BYTES
    assert 0.2 < text.count(b"a") / len(text) < 0.8


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_parts_are_the_groups_with_their_counts(counts: list[int]) -> None:
    counted = [(Group(f"s{index}x", ("x" * 200,)), count) for index, count in enumerate(counts)]
    found = parts(counted)
    assert [part.tokens for part in found] == counts
    size = sum(sum(counts) >= bound for bound in SIZES)
    for part, (group, _) in zip(found, counted, strict=True):
        assert part.coarse == f"{group.script}/{size}"
        assert part.exact.startswith(group.script)
        assert part.exact.endswith(f"/{size}")
