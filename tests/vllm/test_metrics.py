"""What the mock writes on `/metrics` a real vLLM writes as well, under the same names, types, labels and buckets.

What only the mock can tell begins with "mock:".
"""

import re
from collections import defaultdict

import httpx
import pytest

from tests.processes import Mock
from tests.vllm.answers import exchange
from tests.vllm.asks import Ask, text
from tests.vllm.engine import TEST_SECONDS, Vllm

pytestmark = pytest.mark.timeout(TEST_SECONDS)
FREE_LABELS = {"cache_dtype", "kv_cache_size_tokens", "kv_cache_max_concurrency", "num_cpu_blocks"}
SAMPLE = re.compile(r"([a-zA-Z0-9_:]+)(?:\{(.*)\})? ")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNTED = [
    text("ids", 7, prompt=list(range(100, 200))),
    text("ids again", 9, prompt=list(range(100, 200))),
    text("two prompts, two choices", 5, prompt=[[10, 11], list(range(300, 377))], n=2),
    text("refused", prompt=[10] * 5000),
    text("one token", 1, prompt=[77, 78, 79]),
    text("stream", 4, prompt=[80, 81, 82], stream=True),
]
"""Calls whose tokens are the same on both."""
TIMES = ("_sum", "_bucket", "_created")
BY_CHANCE = {"vllm:iteration_tokens_total_count"}
"""How many steps there were is a matter of moments."""


def page(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text


def families(text: str) -> dict[str, str]:
    """The type of each family."""
    lines = [line.split(" ") for line in text.splitlines() if line.startswith("# TYPE ")]
    return {name: kind for _, _, name, kind in lines}


def series(text: str) -> dict[str, set[str]]:
    """The label sets of each sample name, in the order in which the page writes the labels."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        if not line.startswith("#"):
            sample = SAMPLE.match(line)
            assert sample, line
            labels = LABEL.findall(sample[2] or "")
            found[sample[1]].add(",".join(f"{k}={'*' if k in FREE_LABELS else v}" for k, v in labels))
    return found


def test_pages(real: Vllm, mock: Mock) -> None:
    expected = page(real.url)
    given = "\n".join(line for line in page(mock.url).splitlines() if "mock:" not in line)
    wrong = [
        f"{name}: vllm {families(expected).get(name, '-')} | mock {kind}"
        for name, kind in families(given).items()
        if families(expected).get(name) != kind
    ]
    theirs, ours = series(expected), series(given)
    for name, labels in ours.items():
        wrong += [f"{name}: only the mock has {one}" for one in sorted(labels - theirs.get(name, set()))]
        wrong += [f"{name}: only vLLM has {one}" for one in sorted(theirs.get(name, set()) - labels)]
    assert not wrong, "\n" + "\n".join(wrong)


def counters(text: str) -> dict[str, float]:
    """Values of everything that counts calls or tokens; no times."""
    kinds = families(text)
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        is_counter = kinds.get(name) == "counter" or kinds.get(name.removesuffix("_count")) == "histogram"
        if is_counter and not name.endswith(TIMES) and name.startswith("vllm:") and name not in BY_CHANCE:
            key, _, value = line.rpartition(" ")
            found[key] = float(value)
    return found


def growth(url: str, asks: list[Ask]) -> dict[str, float]:
    before = counters(page(url))
    for ask in asks:
        exchange(url, ask)
    return {key: value - before.get(key, 0) for key, value in counters(page(url)).items()}


def test_the_same_calls_count_the_same(real: Vllm, mock: Mock) -> None:
    expected, given = growth(real.url, COUNTED), growth(mock.url, COUNTED)
    wrong = [
        f"{key}: vllm +{expected[key]:.0f} | mock +{value:.0f}"
        for key, value in given.items()
        if key in expected and expected[key] != value
    ]
    assert not wrong, "\n" + "\n".join(wrong)
