"""What an engine is asked so that it counts the tokens of a request, and how it answers (vLLM 0.32)."""

from typing import Any

import msgspec

from gateway.core.body import Members, Refused, is_given, read_members, read_value
from gateway.core.conversation import Inexpressible, read_variables
from gateway.core.prefixes import PromptCount, points
from gateway.core.prompt import PromptText
from gateway.core.request import Endpoint, GenerationRequest
from gateway.core.sse import Tokens

PROMPTS_MAX = 4
"""Each prompt of a completion is a question of its own."""
_ASKED = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES})
_OF_CHATS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
)
_OF_TEXTS = ("model", "add_special_tokens")
_OF_TEMPLATES = ("chat_template_kwargs", "documents", "reasoning_effort")
"""`/tokenize` knows the first one only, which may hold the others."""
_UNTOLD = "response_format"
"""It knows nothing of this, which some models' prompts show (Kimi K3 in vLLM 0.32)."""


class Question(msgspec.Struct, frozen=True):
    path: str
    body: bytes
    untold: bytes = b""
    """What the engine may show in the prompt and is not told here: of prompts that differ in it nobody knows what they
    have in common."""


class _Answer(msgspec.Struct):
    count: Tokens | None = None
    input_tokens: Tokens | None = None


class _AnswerWithIds(_Answer):
    tokens: Any = None
    """Not typed: ids of another kind must not cost the count."""


_ANSWER = msgspec.json.Decoder(_Answer)
_ANSWER_WITH_IDS = msgspec.json.Decoder(_AnswerWithIds)


def questions(request: GenerationRequest) -> list[Question] | None:
    """One for each prompt; None for what an engine is not asked: media, which it would fetch, and many prompts.

    None also for protocols that `/tokenize` does not speak.
    """
    if any(isinstance(prompt, PromptText) and not prompt.is_text_alone for prompt in request.prompts):
        return None
    if request.endpoint not in _ASKED or len(request.prompts) > PROMPTS_MAX:
        return None
    if request.endpoint is Endpoint.MESSAGES:
        return [Question(f"{Endpoint.MESSAGES}/count_tokens", request.body)]
    members = read_members(request.body)
    if request.endpoint is Endpoint.CHAT:
        fields = _raw(members, _OF_CHATS)
        if any(name in members for name in _OF_TEMPLATES):
            try:
                given = read_variables({name: read_value(members, name) for name in _OF_TEMPLATES}, {})
            except (Inexpressible, Refused):
                return None
            fields["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode(given))
        untold = bytes(members[_UNTOLD].raw) if is_given(members, _UNTOLD) else b""
        return [_question(fields, untold)]
    texts = read_value(members, "prompt")
    fields = _raw(members, _OF_TEXTS)
    return [_question(fields | {"prompt": text}) for text in ([texts] if isinstance(texts, str) else texts)]


def count_in(answer: bytes) -> int | None:
    """The tokens of which an answer tells; None where it tells of none."""
    try:
        found = _ANSWER.decode(answer)
    except msgspec.DecodeError:
        return None
    return found.input_tokens if found.count is None else found.count


def measured_in(answer: bytes, block_size: int, moment: bytes) -> PromptCount | None:
    """The same with how the prompt begins, where its tokens are told: `count_tokens` does not.

    `moment`: as `points` has it.
    """
    try:
        found = _ANSWER_WITH_IDS.decode(answer)
    except msgspec.DecodeError:
        return None
    count = found.input_tokens if found.count is None else found.count
    if count is None:
        return None
    ids = found.tokens
    if not isinstance(ids, list) or len(ids) != count:
        return PromptCount(count)
    try:
        return PromptCount(count, points(ids, block_size, moment))
    except (OverflowError, TypeError):
        return PromptCount(count)


def _raw(members: Members, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: msgspec.Raw(members[name].raw) for name in names if name in members}


def _question(fields: dict[str, Any], untold: bytes = b"") -> Question:
    return Question("/tokenize", msgspec.json.encode(fields), untold)
