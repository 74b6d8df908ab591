"""Tokens of a request's prompts: by the packaged vocabulary, and by what was learned of such texts."""

from typing import NamedTuple

from gateway.core.content import Part, parts
from gateway.core.estimate import prompt_tokens
from gateway.core.factors import Factors
from gateway.core.prompt import Prompt, PromptText, PromptTokens
from gateway.core.request import GenerationRequest
from gateway.tokens.api import Counted, Counter


class Guess(NamedTuple):
    """How a prompt was estimated."""

    parts: tuple[Part, ...]
    beside: int
    """Tokens of what is no text: a template's words."""


class Estimate(NamedTuple):
    counts: list[Counted]
    guess: Guess | None = None
    """What something can be learned from, once the engine has told its count."""


async def estimate(
    counter: Counter, request: GenerationRequest, token_factor: float, factors: Factors | None
) -> Estimate:
    """Of each prompt, by `factors` where they are given; `token_factor` is what holds without any."""
    counts: list[Counted] = []
    guess: Guess | None = None
    for prompt in request.prompts:
        counted, guess = await _estimate(counter, prompt, token_factor, factors)
        counts.append(counted)
    return Estimate(counts, guess if guess is not None and _teaches(request) else None)


def learn(factors: Factors, guess: Guess, reported: int) -> None:
    """From what an engine counts of a prompt."""
    factors.observe(guess.parts, max(reported - guess.beside, 1))


async def _estimate(
    counter: Counter, prompt: Prompt, token_factor: float, factors: Factors | None
) -> tuple[Counted, Guess | None]:
    if isinstance(prompt, PromptTokens):
        return Counted(prompt.tokens, exact=True), None
    counted = await counter.count(prompt.texts)
    if factors is None or not (counted.tokens and counted.shares):
        return Counted(prompt_tokens(prompt, counted.tokens, token_factor), counted.exact), None
    found = parts(counted.shares)
    return Counted(factors.estimate(found) + prompt.fixed_tokens, True), Guess(found, prompt.fixed_tokens)


def _teaches(request: GenerationRequest) -> bool:
    """The engine tells one number: it has to be of this text, whole, and of nothing else."""
    if (
        len(request.prompts) > 1
        or request.truncate_prompt_tokens is not None
        or not request.endpoint.generates
    ):
        return False
    (prompt,) = request.prompts
    return isinstance(prompt, PromptText) and prompt.is_text_alone
