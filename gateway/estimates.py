"""Tokens of a request's prompts: by the packaged vocabulary, and by what was learned of such texts."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.core.content import Group, Part, groups, parts, script_of
from gateway.core.estimate import prompt_tokens
from gateway.core.factors import Factors
from gateway.core.prompt import Prompt, PromptText, PromptTokens
from gateway.core.request import GenerationRequest
from gateway.tokens.api import Counted, Counter

GROUPED_PROMPTS_MAX = 8
"""Of more prompts one sample of all has to do."""


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
    if factors is None:
        return Estimate([await _plain(counter, prompt, token_factor) for prompt in request.prompts])
    found = []
    for prompt, of_prompt in zip(request.prompts, _grouped(request.prompts), strict=True):
        found.append(await _learned(counter, prompt, of_prompt, token_factor, factors))
    counts = [counted for counted, _ in found]
    return Estimate(counts, found[0][1] if _teaches(request, counts) else None)


def learn(factors: Factors, guess: Guess, reported: int) -> None:
    """From what an engine counts of a prompt."""
    factors.observe(guess.parts, max(reported - guess.beside, 1))


async def _plain(counter: Counter, prompt: Prompt, token_factor: float) -> Counted:
    if isinstance(prompt, PromptTokens):
        return Counted(prompt.tokens, exact=True)
    counted = await counter.count(prompt.texts)
    return Counted(prompt_tokens(prompt, counted.tokens, token_factor), counted.exact)


async def _learned(
    counter: Counter, prompt: Prompt, of_prompt: Sequence[Group], token_factor: float, factors: Factors
) -> tuple[Counted, Guess | None]:
    if isinstance(prompt, PromptTokens):
        return Counted(prompt.tokens, exact=True), None
    counts = [await counter.count(group.texts) for group in of_prompt]
    together = sum(counted.tokens for counted in counts)
    if not together or not all(counted.exact for counted in counts):
        tokens = prompt_tokens(prompt, together, token_factor)
        return Counted(tokens, all(counted.exact for counted in counts)), None
    found = parts([(group, counted.tokens) for group, counted in zip(of_prompt, counts, strict=True)])
    return Counted(factors.estimate(found) + prompt.fixed_tokens, True), Guess(found, prompt.fixed_tokens)


def _grouped(prompts: Sequence[Prompt]) -> list[list[Group]]:
    """The texts of each by script."""
    if len(prompts) <= GROUPED_PROMPTS_MAX:
        return [groups(prompt) if isinstance(prompt, PromptText) else [] for prompt in prompts]
    texts = [prompt.texts if isinstance(prompt, PromptText) else () for prompt in prompts]
    script = script_of([text for of_prompt in texts for text in of_prompt])
    return [[Group(script, of_prompt)] for of_prompt in texts]


def _teaches(request: GenerationRequest, counts: Sequence[Counted]) -> bool:
    """The engine tells one number: it has to be of this text, whole, and of nothing else."""
    if len(counts) > 1 or request.truncate_prompt_tokens is not None or not request.endpoint.generates:
        return False
    (prompt,) = request.prompts
    return isinstance(prompt, PromptText) and not prompt.media_tokens
