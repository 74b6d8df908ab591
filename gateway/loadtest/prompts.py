"""Request bodies whose prompts have an exact number of tokens: pure, and cheap enough for the event loop.

A text is words of four letters with a space before each: one token each in the mock's tokenizer, and nearly so in
others, but for the few that make it unique.  A completion's prompt is token ids, exact on every engine.
"""

import json

from gateway.loadtest.scenario import Mix, Scenario
from gateway.loadtest.workload import PlannedCall

TEMPLATE_TOKENS = 7
"""What the mock's chat template puts around one message: four, and three before the reply."""
UNIQUE_TOKENS = 3
"""At a prompt's beginning, so that no prefix cache helps: two for the call, one for the run."""
WORDS = (
    " time year week hand part life case work days eyes word fact home room area book side kind head line game body",
    " name idea door face city road town form team mind back rest food land wall fire love hope star moon rain wind",
)
_FILLER = "".join(WORDS)
_WORD_BYTES = 5
_IDS = range(100, 1_000)
"""Three digits each, and in every vocabulary."""
_ID_BYTES = 4


class Prompts:
    """The bodies of one run.  `run_tag` sets its prompts apart from those of other runs on the same engines."""

    def __init__(self, scenario: Scenario, run_tag: int, prompt_tokens_max: int) -> None:
        self._mixes = scenario.calls
        self._chat = scenario.endpoint == "chat"
        self._tag = run_tag
        self._token_bytes = _WORD_BYTES if self._chat else _ID_BYTES
        unit = _FILLER if self._chat else "".join(f"{number}," for number in _IDS)
        self._filler = unit * (prompt_tokens_max * self._token_bytes // len(unit) + 1)
        self._head = '{"model":' + json.dumps(scenario.model)

    def body(self, call: PlannedCall) -> bytes:
        mix = self._mixes[call.mix]
        tail = f'"max_tokens":{call.output_tokens}{_tail(call, mix)}}}'
        prompt = self._prompt(call, mix)
        if self._chat:
            return f'{self._head},"messages":[{{"role":"user","content":"{prompt}"}}],{tail}'.encode()
        return f'{self._head},"prompt":[{prompt[:-1]}],{tail}'.encode()

    def _prompt(self, call: PlannedCall, mix: Mix) -> str:
        tokens = max(1, call.prompt_tokens - TEMPLATE_TOKENS) if self._chat else call.prompt_tokens
        unique = self._unique(call.number)
        shared = min(mix.shared_prefix_tokens, max(0, tokens - UNIQUE_TOKENS))
        if mix.unique_every_tokens:
            return self._unique_throughout(unique, tokens, mix.unique_every_tokens)
        if not shared:
            return (unique + self._filler)[: tokens * self._token_bytes]
        prefix = self._token(self._tag + call.mix) + self._filler[: (shared - 1) * self._token_bytes]
        return (prefix + unique + self._filler)[: tokens * self._token_bytes]

    def _unique_throughout(self, unique: str, tokens: int, every_tokens: int) -> str:
        part = unique + self._filler[: max(0, every_tokens - UNIQUE_TOKENS) * self._token_bytes]
        return (part * (tokens // every_tokens + 1))[: tokens * self._token_bytes]

    def _unique(self, number: int) -> str:
        """What differs most comes first."""
        kinds = 26**4 if self._chat else len(_IDS)
        return self._token(number) + self._token(number // kinds) + self._token(self._tag)

    def _token(self, number: int) -> str:
        if not self._chat:
            return f"{_IDS[number % len(_IDS)]},"
        letters = [chr(97 + number // 26**place % 26) for place in range(_WORD_BYTES - 1)]
        return " " + "".join(letters)


def _tail(call: PlannedCall, mix: Mix) -> str:
    """`ignore_eos`, so that a real engine's answers have the length that was asked for."""
    tail = ',"temperature":0,"ignore_eos":true'
    if mix.stream:
        tail += ',"stream":true,"stream_options":{"include_usage":true}'
    if call.answer_tokens is not None:
        tail += f',"mock":{{"output_tokens":{call.answer_tokens}}}'
    return tail
