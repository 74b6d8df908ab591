"""Log probabilities as vLLM tells them: the shapes are real, the figures are not.

A sampled token has -0.5; the most likely ones beside it are the next words of the mock's cycle with -1, -2 and so on.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from gateway.mock import tokenizer
from gateway.mock.tokenizer import word

SAMPLED = -0.5
Json = dict[str, Any]


def chat_logprobs(first: int, last: int, top: int) -> Json:
    """Of a chat's output tokens `first` to `last`; `top` entries each, the sampled token being the first of them."""
    return {"content": [_entry(number, top) for number in range(first, last + 1)]}


def text_logprobs(first: int, last: int, top: int, offset: int, prompt: Sequence[str] = ()) -> Json:
    """Of a completion's tokens: those of an echoed prompt, the first of which has none, then `first` to `last`."""
    numbers = range(first, last + 1)
    tokens = [*prompt, *map(word, numbers)]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else []
    rows = [{text: SAMPLED} | _others(top) for text in prompt[1:]]
    rows += [dict(_candidates(number, top + 1)) for number in numbers]
    values = [SAMPLED for _ in rows]
    nothing = [None for _ in prompt[:1]]
    return {
        "text_offset": offsets,
        "token_logprobs": [*nothing, *values],
        "tokens": tokens,
        "top_logprobs": [*nothing, *rows],
    }


def prompt_logprobs(ids: Sequence[int], top: int) -> list[Json | None]:
    """Of the tokens of an echoed prompt, by id; the first one has none."""
    others = {tokenizer.encode(text)[0]: (text, value) for text, value in _others(top).items()}
    return [None, *(_ranked({number: (tokenizer.decode([number]), SAMPLED)} | others) for number in ids[1:])]


def prompt_pieces(ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([number]) for number in ids]


def _entry(number: int, top: int) -> Json:
    told = [_told(text, value) for text, value in _candidates(number, top)]
    return _told(word(number), SAMPLED) | {"top_logprobs": told}


def _told(text: str, value: float) -> Json:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _ranked(entries: Mapping[int, tuple[str, float]]) -> Json:
    return {
        str(number): {"logprob": value, "rank": rank, "decoded_token": text}
        for rank, (number, (text, value)) in enumerate(entries.items(), 1)
    }


def _others(top: int) -> dict[str, float]:
    """Candidates beside the token of a prompt."""
    return {word(number): -float(number) for number in range(1, min(top, len(tokenizer.WORDS)) + 1)}


def _candidates(number: int, many: int) -> list[tuple[str, float]]:
    """The sampled token and the ones beside it; the cycle of words ends before `many` may."""
    many = min(many, len(tokenizer.WORDS))
    return [(word(number + step), -float(step) if step else SAMPLED) for step in range(many)]
