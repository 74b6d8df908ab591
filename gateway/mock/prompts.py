"""Prompts of every form that vLLM takes, read into what the engine and the answers need of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.mock import tokenizer
from gateway.mock.bodies import (
    Refusal,
    check_token_ids,
    integer,
    is_list_of,
    parameter_error,
    wrong_prompt,
)
from gateway.mock.engine import EngineConfig
from gateway.mock.pool import EMPTY, Content, content

Json = Mapping[str, Any]
_EMPTY_CHAT = "Cannot apply chat template to an empty conversation. Provide at least one message."


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.  `ids` and `text` are kept only where the answer repeats them."""

    tokens: int
    content: Content
    """What prefix caching compares."""
    ids: tuple[int, ...] = ()
    text: str = ""


class Reader:
    """Reads the prompts of one body.  Raises Refusal for what vLLM refuses."""

    def __init__(self, body: Json, config: EngineConfig, *, keep: bool, pooled: bool = False) -> None:
        """`keep`: the answer repeats the prompts, as `echo` and `return_token_ids` ask for.

        `pooled`: no reply follows a conversation.
        """
        self._config = config
        self._pooled = pooled
        self._keep = keep
        self._cut = integer(body, "truncate_prompt_tokens")
        if self._cut == -1:
            self._cut = config.max_model_len
        self._salt = str(body.get("cache_salt") or "")

    def chat(self, messages: Sequence[Json], tools: object) -> Prompt:
        if not messages:
            raise Refusal(400, _EMPTY_CHAT)
        pieces = tokenizer.chat_pieces(messages, tools, reply=not self._pooled)
        ids = tokenizer.encode_chat(messages, tools)[: len(pieces)] if self._keep else []
        return self._prompt(pieces, ids, is_text=True)

    def text(self, text: str, most: int = 0) -> Prompt:
        """A text, or its first `most` tokens."""
        end = most or None
        ids = tokenizer.encode(text)[:end] if self._keep else []
        return self._prompt(tokenizer.pieces(text)[:end], ids, is_text=True)

    def pair(self, query: str, document: str, query_most: int, document_most: int) -> Prompt:
        """Two texts in one prompt, each of them whole or cut."""
        cuts = (query, query_most or None), (document, document_most or None)
        pieces = [piece for text, end in cuts for piece in tokenizer.pieces(text)[:end]]
        ids = [number for text, end in cuts for number in tokenizer.encode(text)[:end]]
        return self._prompt(pieces, ids, is_text=True)

    def ids(self, ids: Sequence[int]) -> Prompt:
        check_token_ids(ids)
        return self._prompt(tokenizer.ids_pieces(ids), ids, is_text=self._pooled)

    def completion(self, prompt: object) -> tuple[Prompt, ...]:
        """A text, texts, token ids, or lists of token ids."""
        if prompt is None or prompt == "":
            raise parameter_error("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if prompt == []:
            raise Refusal(400, "You must pass at least one prompt")
        if isinstance(prompt, str):
            return (self.text(prompt),)
        if is_list_of(prompt, int) and min(prompt) >= 0:
            return (self.ids(prompt),)
        if is_list_of(prompt, str):
            return tuple(map(self.text, prompt))
        if isinstance(prompt, list) and all(_are_ids(one) for one in prompt):
            return tuple(map(self.ids, prompt))
        raise wrong_prompt(prompt)

    def _prompt(self, pieces: Sequence[str], ids: Sequence[int], *, is_text: bool) -> Prompt:
        if not pieces:
            raise Refusal(400, "The decoder prompt cannot be empty")
        if self._cut is not None and 0 < self._cut < len(pieces):
            pieces, ids = pieces[-self._cut :], ids[-self._cut :]
        self._check_fits(len(pieces), is_text=is_text)
        known = EMPTY
        if self._config.enable_prefix_caching:
            known = content(pieces, self._config.block_size, self._salt)
        if not self._keep:
            return Prompt(len(pieces), known)
        return Prompt(len(pieces), known, tuple(ids), tokenizer.decode(ids))

    def _check_fits(self, tokens: int, *, is_text: bool) -> None:
        """A text's count stops one above the context, as vLLM stops tokenizing there."""
        most = self._config.max_model_len
        if tokens <= most:
            return
        tokens = most + 1 if is_text else tokens
        raise parameter_error(
            f"This model's maximum context length is {most} tokens. However, your prompt contains"
            f" {'at least ' if is_text else ''}{tokens} input tokens, which exceeds this limit even without any"
            " output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            tokens,
        )


def _are_ids(value: object) -> bool:
    return is_list_of(value, int) and min(value, default=0) >= 0
