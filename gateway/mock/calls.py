"""What a request body means to vLLM: defaults, clamps and refusals of the OpenAI routes, and a call made of it.

Source: a real vLLM 0.32.0, its answers recorded field by field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.mock.bodies import (
    Refusal,
    ValidationError,
    check_messages,
    integer,
    is_list_of,
    missing,
    parameter_error,
    shown,
    validation_error,
)
from gateway.mock.engine import EngineConfig, Sizes
from gateway.mock.faults import Script, parse_script
from gateway.mock.fields import CHAT_FIELDS, TEXT_FIELDS, Kind, check_ranges, coerced
from gateway.mock.options import Options
from gateway.mock.prompts import Prompt, Reader
from gateway.mock.tokenizer import VOCABULARY

COMPLETION_DEFAULT_TOKENS = 16
SEQUENCES_MAX = 16384
"""vLLM's VLLM_MAX_N_SEQUENCES."""
LOGPROBS_MAX = 20
"""vLLM's --max-logprobs."""
CHAT_LIMITS = ("max_completion_tokens", "max_tokens")
"""The first that is given counts."""
TEXT_LIMITS = ("max_tokens",)

Json = Mapping[str, Any]


class Api(StrEnum):
    """The protocol a call is answered in."""

    CHAT = "chat"
    TEXT = "text"
    MESSAGES = "messages"
    RESPONSES = "responses"
    AUDIO = "audio"
    EMBEDDING = "embedding"
    POOLING = "pooling"
    LABELS = "labels"
    SCORE = "score"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that can be asked for, and gone on from."""

    document: dict[str, Any]
    messages: tuple[Json, ...]
    """Of the conversation, with the answer."""


@dataclass(frozen=True, slots=True)
class Server:
    """What reading a body needs to know of the server."""

    engine: EngineConfig
    options: Options
    stored: dict[str, "Stored"] = field(default_factory=dict)
    """Responses by their ids, where they are kept; the last ones come last."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.engine.model, *self.options.aliases)


@dataclass(frozen=True, slots=True)
class Call:
    """One generation call, resolved: sequence `prompt * choices + choice` has that prompt's sizes."""

    api: Api
    id: str
    model: str
    prompts: tuple[Prompt, ...]
    limits: tuple[int, ...]
    """Output tokens allowed per sequence of each prompt."""
    body: Json
    script: Script
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int = 1
    logprobs: int | None = None
    """Most likely tokens told beside each one; None: no log probabilities at all."""
    echo: bool = False
    silent: bool = False
    """`echo` with `max_tokens` 0: the one token that vLLM samples is not told."""
    return_token_ids: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    priority: int = 0
    reads_cache: bool = True
    """Of the prefix cache."""

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def beams(self) -> bool:
        """Beam search: `choices` is its width."""
        return bool(self.body.get("use_beam_search"))

    @property
    def width(self) -> int:
        """Sequences of the call."""
        return len(self.prompts) * self.choices

    def sequences(self, output_tokens: int | None) -> tuple[Sizes, ...]:
        """The sequences to run; `output_tokens` is the server's own bound for calls that script none."""
        wanted = self.script.output_tokens or (None if self.ignore_eos else output_tokens)
        sizes = [
            Sizes(prompt.tokens, self._length(wanted, limit), prompt.content, self.reads_cache)
            for prompt, limit in zip(self.prompts, self.limits, strict=True)
        ]
        return tuple(size for size in sizes for _ in range(self.choices))

    def reason_at(self, index: int, tokens: int) -> str:
        """finish_reason of a sequence that ends after so many tokens; one that samples none stops."""
        limit = self.limits[index // self.choices]
        return "length" if limit and tokens == limit else "stop"

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.choices]

    def _length(self, wanted: int | None, limit: int) -> int:
        return limit if wanted is None else min(max(wanted, self.min_tokens), limit)


def parse_chat(body: Json, call_id: str, server: Server) -> Call:
    """A body of /v1/chat/completions.  Raises Refusal as vLLM would answer."""
    check_messages(body)
    body = _checked(body, CHAT_FIELDS, server)
    keep = bool(body.get("return_token_ids"))
    prompt = Reader(body, server.engine, keep=keep).chat(body["messages"], body.get("tools"))
    return resolved(Api.CHAT, body, (prompt,), f"chatcmpl-{call_id}", server, _chat_logprobs(body))


def parse_batch(body: Json, call_id: str, server: Server) -> Call:
    """A body of /v1/chat/completions/batch: `messages` holds conversations, and the answer never streams."""
    if "messages" not in body:
        raise missing(body, "messages")
    conversations = body["messages"]
    if not is_list_of(conversations, list):
        errors: list[ValidationError] = [
            ("list_type", "body.messages", "Input should be a valid list", shown(conversations))
        ]
        raise validation_error(errors)
    body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    for messages in conversations:
        check_messages({"messages": messages})
    body = _checked(body, CHAT_FIELDS, server)
    reader = Reader(body, server.engine, keep=bool(body.get("return_token_ids")))
    prompts = tuple(reader.chat(messages, None) for messages in conversations)
    return resolved(Api.CHAT, body, prompts, f"chatcmpl-{call_id}", server, _chat_logprobs(body))


def parse_text(body: Json, call_id: str, server: Server) -> Call:
    """A body of /v1/completions.  Raises Refusal as vLLM would answer."""
    body = _checked(body, TEXT_FIELDS, server)
    if body.get("use_beam_search") and body.get("stream"):
        raise Refusal(400, "Streaming is not currently supported with beam search")
    if body.get("suffix"):
        text = "suffix is only supported for models with FIM completion rendering"
        raise Refusal(400, text, param="suffix")
    echo = bool(body.get("echo"))
    reader = Reader(body, server.engine, keep=echo or bool(body.get("return_token_ids")))
    if body.get("prompt_embeds") not in (None, []):
        words = "You must set `--enable-prompt-embeds` to input `prompt_embeds`."
        raise parameter_error(words, "prompt_embeds")
    prompts = reader.completion(body.get("prompt"))
    logprobs = _checked_logprobs(integer(body, "logprobs"), "logprobs")
    return resolved(Api.TEXT, body, prompts, f"cmpl-{call_id}", server, logprobs)


def resolved(
    api: Api,
    body: Json,
    prompts: tuple[Prompt, ...],
    call_id: str,
    server: Server,
    logprobs: int | None = None,
    limits: tuple[str, ...] | None = None,
) -> Call:
    """The call of a body whose prompts are read; `limits` names the fields that bound its output."""
    echo = api is Api.TEXT and bool(body.get("echo"))
    silent = echo and integer(body, "max_tokens") == 0
    if limits is None:
        limits = TEXT_LIMITS if api is Api.TEXT else CHAT_LIMITS
    sizes = [1 if silent else _limit(api, body, prompt.tokens, server.engine, limits) for prompt in prompts]
    stream = body.get("stream_options") or {}
    usage = bool(stream.get("include_usage"))
    return Call(
        api=api,
        id=call_id,
        model=server.engine.model,
        prompts=prompts,
        limits=tuple(sizes),
        body=body,
        script=_script(body),
        choices=_choices(body),
        stream=bool(body.get("stream")),
        include_usage=usage,
        continuous_usage=usage and bool(stream.get("continuous_usage_stats")),
        stream_interval=max(1, integer(body, "stream_interval") or server.options.stream_interval),
        logprobs=logprobs,
        echo=echo,
        silent=silent,
        return_token_ids=bool(body.get("return_token_ids")),
        min_tokens=_min_tokens(body, min(sizes)),
        ignore_eos=bool(body.get("ignore_eos")),
        priority=integer(body, "priority") or 0,
        reads_cache=not _wants_prompt_logprobs(api, body, logprobs),
    )


def pooled(api: Api, body: Json, prompts: tuple[Prompt, ...], call_id: str, server: Server) -> Call:
    """The call of a body that samples nothing; its prompts are read."""
    return Call(
        api=api,
        id=call_id,
        model=server.engine.model,
        prompts=prompts,
        limits=(0,) * len(prompts),
        body=body,
        script=_script(body),
        priority=integer(body, "priority") or 0,
    )


def check_model(body: Json, server: Server) -> None:
    model = body.get("model")
    if model is None or model in server.names:
        return
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(server.names)}."
    raise Refusal(404, message, "NotFoundError", "model")


def _checked(body: Json, kinds: Mapping[str, Kind], server: Server) -> Json:
    """The body with its fields coerced.  Raises Refusal for what is wrong with them."""
    body = coerced(body, kinds)
    check_model(body, server)
    options = body.get("stream_options")
    if options and not body.get("stream"):
        raise parameter_error("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("cache_salt") == "":
        raise parameter_error("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    check_ranges(body)
    return body


def _choices(body: Json) -> int:
    choices = integer(body, "n")
    if choices is None:
        return 1
    if choices < 1:
        raise Refusal(400, f"n must be at least 1, got {choices}.")
    if choices > SEQUENCES_MAX:
        text = f"n must be at most {SEQUENCES_MAX}, got {choices}. To increase this limit, set the VLLM_MAX_N_SEQUENCES"
        raise Refusal(400, f"{text} environment variable.")
    return choices


def _limit(api: Api, body: Json, prompt_tokens: int, config: EngineConfig, names: tuple[str, ...]) -> int:
    """Output tokens of a sequence: the field, or its default, clamped to what the context leaves."""
    given = ((name, integer(body, name)) for name in names)
    name, wanted = next(((name, value) for name, value in given if value is not None), (names[0], None))
    room = config.max_model_len - prompt_tokens
    if wanted is None:
        wanted = COMPLETION_DEFAULT_TOKENS if api is Api.TEXT else room
    if wanted > config.max_model_len:
        text = f"{name}={wanted} cannot be greater than max_model_len={config.max_model_len}."
        raise parameter_error(f"{text} Please request fewer output tokens.", name, wanted)
    limit = min(wanted, room)
    if limit < 1:
        raise parameter_error(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    return limit


def _min_tokens(body: Json, limit: int) -> int:
    least = integer(body, "min_tokens") or 0
    if least < 0:
        raise Refusal(400, f"min_tokens must be greater than or equal to 0, got {least}.")
    if least > limit:
        raise Refusal(400, f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    return least


def _wants_prompt_logprobs(api: Api, body: Json, logprobs: int | None) -> bool:
    """vLLM computes all of such a prompt: what it has cached has no log probabilities (`SamplingParams`)."""
    if api not in (Api.CHAT, Api.TEXT):
        return False
    if body.get("prompt_logprobs") is not None:
        return True
    if not body.get("echo"):
        return False
    return logprobs is not None if api is Api.TEXT else body.get("top_logprobs", 0) is not None


def _chat_logprobs(body: Json) -> int | None:
    top = integer(body, "top_logprobs") or 0
    if top and not body.get("logprobs"):
        raise parameter_error("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    return _checked_logprobs(top, "top_logprobs") if body.get("logprobs") else None


def _checked_logprobs(number: int | None, name: str) -> int | None:
    if number == -1:
        number = VOCABULARY
    if number is not None and number < 0:
        raise parameter_error(f"`{name}` must be a positive value or -1.", name, number)
    if number is not None and number > LOGPROBS_MAX:
        text = f"Requested sample logprobs of {number}, which is greater than max allowed: {LOGPROBS_MAX}"
        raise parameter_error(text, "logprobs", number)
    return number


def _script(body: Json) -> Script:
    try:
        return parse_script(body.get("mock"))
    except ValueError as error:
        raise Refusal(400, str(error), param="mock") from None
