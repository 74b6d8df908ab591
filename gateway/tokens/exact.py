"""Counting with the served model's own tokenizer and chat template, as vLLM does.

What it needs is an extra: it is imported only where a tokenizer is configured.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer

from gateway.core.body import Refused, decode
from gateway.core.conversation import Chat, Inexpressible, read_chat
from gateway.core.prefixes import PromptCount, moment_of, points
from gateway.core.request import Endpoint, GenerationRequest
from gateway.tokens.api import ModelCounter
from gateway.tokens.files import TokenizerError, TokenizerFiles
from gateway.tokens.memo import Memo, text_key
from gateway.tokens.template import ChatTemplate
from gateway.tokens.threads import CountingThreads, IsLate

BODY_BYTES_MAX = 1 << 20
PROMPT_CHARS_MAX = 1 << 20
"""Longer prompts keep to the estimate.  A tokenizer needs a second for a million characters, and cannot be stopped."""
BEGINNINGS_MAX = 6_000
"""Prompts whose beginnings are remembered; each has 700 bytes at most, so that all of them have 8 MB."""
_TOOL_USE = "tool_use"
"""The name of a template that is for chats with tools."""


class TokenizerCounter(ModelCounter):
    """Counts in the threads that all counters share, each prompt as a whole: a template may show any message anywhere
    and in any form, and a tokenizer's words do not end where a message ends.
    """

    def __init__(
        self, files: TokenizerFiles, threads: CountingThreads, wall: Callable[[], float] = time.time
    ) -> None:
        """Raises TokenizerError."""
        self._wall = wall
        config = _read_config(files.tokenizer.with_name("tokenizer_config.json"))
        self._special_tokens = _special_tokens(config)
        self._tokenizer = load_tokenizer(files.tokenizer, config, _names(self._special_tokens.values()))
        self._added = self._tokenizer.num_special_tokens_to_add(False)
        self._templates = _read_templates(files, config)
        self._template_kwargs = files.template_kwargs
        self._threads = threads
        self._memo: Memo[int] = Memo()
        self._beginnings: Memo[PromptCount] = Memo(BEGINNINGS_MAX)

    async def count(self, request: GenerationRequest, block_size: int = 0) -> list[PromptCount] | None:
        if len(request.body) > BODY_BYTES_MAX:
            return None
        return await self._threads.run(lambda is_late: self._count(request, block_size, is_late))

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _count(
        self, request: GenerationRequest, block_size: int, is_late: IsLate
    ) -> list[PromptCount] | None:
        counts = []
        try:
            for prompt, added, moment in self._prompts(request):
                if is_late() or len(prompt) > PROMPT_CHARS_MAX:
                    return None
                counts.append(self._measured(prompt, added, block_size, moment))
        except (Inexpressible, Refused):
            return None
        return counts

    def _prompts(self, request: GenerationRequest) -> Iterator[tuple[str, int, bytes | None]]:
        """The texts that the engine tokenizes, how many tokens it adds to each, and the moment of one that may show the
        date; None of one that may show the time of day.  Raises Inexpressible."""
        body = decode(request.body, "")
        if request.endpoint is Endpoint.CHAT:
            yield self._render(body)
        elif (
            request.endpoint is Endpoint.CHAT_BATCH
        ):  # what all have in common is in each, and tools are not shown
            yield "", 0, b""
            shared = {name: value for name, value in body.items() if name != "tools"}
            yield from (self._render(shared | {"messages": messages}) for messages in body["messages"])
        elif request.endpoint is Endpoint.COMPLETIONS:
            given = body["prompt"]
            added = self._added if body.get("add_special_tokens", True) else 0
            yield from ((text, added, b"") for text in ([given] if isinstance(given, str) else given))
        else:
            raise Inexpressible("a protocol that vLLM translates first")

    def _render(self, body: Mapping[str, Any]) -> tuple[str, int, bytes | None]:
        wanted = _TOOL_USE if body.get("tools") is not None else ""
        template = self._templates.get(wanted) or self._templates.get("")
        if template is None:
            raise Inexpressible("no template for it")
        chat: Chat = read_chat(body, template.style, self._template_kwargs)
        prompt = template.render(chat, self._special_tokens)
        added = self._added if chat.add_special_tokens else 0
        if template.shows_clock:
            return prompt, added, None
        return prompt, added, moment_of(self._wall()) if template.shows_time else b""

    def _measured(self, text: str, added: int, block_size: int, moment: bytes | None) -> PromptCount:
        if not block_size or moment is None:
            return PromptCount(self._tokens(text) + added)
        key = text_key(f"{block_size} {bool(added)} {moment!r} {text}")
        known = self._beginnings.get(key)
        if known is None:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=bool(added))[0].ids
            known = PromptCount(len(ids), points(ids, block_size, moment))
            self._beginnings.put(key, known)
        return known

    def _tokens(self, text: str) -> int:
        """Without what is added.  Of the ways to encode only a batch lets other threads go on meanwhile."""
        key = text_key(text)
        known = self._memo.get(key)
        if known is None:
            known = len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])
            self._memo.put(key, known)
        return known


# Files ------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TokenizerError(f"cannot read {path}: {why}") from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return config


def load_tokenizer(path: Path, config: Mapping[str, Any], special_tokens: Iterable[str]) -> Tokenizer:
    """Raises TokenizerError."""
    text = _read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} is not a tokenizer: {error}"[:300]) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in special_tokens if token not in known]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in missing])
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a template knows by the names that they have there: `bos_token`, `eos_token` and so on."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name.endswith("_token") and (token := _content(value)) is not None:
            found[name] = token
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    if isinstance(more, list):
        found["additional_special_tokens"] = [token for each in more if (token := _content(each))]
    return found


def _content(token: Any) -> str | None:
    """A token is written as its text, or as an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _names(special_tokens: Iterable[Any]) -> Iterator[str]:
    for token in special_tokens:
        yield from [token] if isinstance(token, str) else token


def _read_templates(files: TokenizerFiles, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """By what they are for, '' for any chat; none where the model has none, as for completions only."""
    if files.chat_template is not None:
        return {"": _compile(_read_text(files.chat_template), str(files.chat_template))}
    folder = files.tokenizer.parent
    own = folder / "chat_template.jinja"
    if own.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        found = {path.stem: _compile(_read_text(path), str(path)) for path in more}
        return found | {"": _compile(_read_text(own), str(own))}
    given = config.get("chat_template")
    where = f"chat_template in {folder / 'tokenizer_config.json'}"
    if isinstance(given, str):
        return {"": _compile(given, where)}
    named = {each.get("name"): each.get("template") for each in given or () if isinstance(each, dict)}
    return {
        "" if name == "default" else name: _compile(source, where)
        for name, source in named.items()
        if isinstance(name, str) and isinstance(source, str)
    }


def _compile(source: str, where: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TemplateError as error:
        raise TokenizerError(f"{where} is not a chat template: {error}"[:300]) from None
