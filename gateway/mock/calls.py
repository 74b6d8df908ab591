"""What a request body means to vLLM: defaults, coercions, clamps and the refusals with their exact texts.

Source: a real vLLM 0.32.0, its answers recorded field by field.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.mock import tokenizer
from gateway.mock.engine import EngineConfig, Sizes
from gateway.mock.faults import Script, parse_script

COMPLETION_DEFAULT_TOKENS = 16
SEQUENCES_MAX = 16384
"""vLLM's VLLM_MAX_N_SEQUENCES."""


class Refusal(Exception):
    """An error answer in vLLM's envelope."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Call:
    """One generation call, resolved: sequence `prompt * choices + choice` has that prompt's sizes."""

    chat: bool
    id: str
    model: str
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    limits: tuple[int, ...]
    """Output tokens allowed per sequence of each prompt."""
    choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    script: Script

    def sequences(self, output_tokens: int | None) -> tuple[Sizes, ...]:
        """The sequences to run; `output_tokens` is the server's own bound for calls that script none."""
        wanted = self.script.output_tokens or output_tokens
        sizes = [
            Sizes(prompt, min(wanted, limit) if wanted else limit)
            for prompt, limit in zip(self.prompts, self.limits, strict=True)
        ]
        return tuple(size for size in sizes for _ in range(self.choices))

    def reason_at(self, index: int, tokens: int) -> str:
        """finish_reason of a sequence that ends after so many tokens."""
        return "length" if tokens == self.limits[index // self.choices] else "stop"

    def prompt_tokens_of(self, index: int) -> int:
        return self.prompts[index // self.choices]


def parse_call(chat: bool, raw: bytes, request_id: str, config: EngineConfig, header_id: str = "") -> Call:
    """Read a chat or text completion body.  Raises Refusal as vLLM would answer.

    As in vLLM the `X-Request-Id` header names the call, else the body's `request_id`, else `request_id`.
    """
    body = parse_object(raw)
    _require(chat, body)
    check_model(body, config)
    _check_options(body)
    choices = _choices(body)
    prompts = _chat_prompts(body, config) if chat else _text_prompts(body, config)
    stream_options = body.get("stream_options") or {}
    return Call(
        chat=chat,
        id=("chatcmpl-" if chat else "cmpl-") + (header_id or _request_id(body, request_id)),
        model=config.model,
        prompts=prompts,
        limits=tuple(_limit(chat, body, tokens, config) for tokens in prompts),
        choices=choices,
        stream=bool(body.get("stream")),
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(
            stream_options.get("include_usage") and stream_options.get("continuous_usage_stats")
        ),
        script=_script(body),
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.  Raises Refusal with vLLM's text for what it is instead."""
    if not raw:
        raise validation_error([("missing", "body", "Field required", "None")])
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise _json_invalid(error) from None
    except (UnicodeDecodeError, RecursionError):
        raise Refusal(400, "There was an error parsing the body", "Bad Request") from None
    if isinstance(body, dict):
        return body
    text = "Input should be a valid dictionary or object to extract fields from"
    raise validation_error([("model_attributes_type", "body", text, _shown(body))])


def check_model(body: Mapping[str, Any], config: EngineConfig) -> None:
    model = body.get("model")
    if model is not None and model != config.model:
        message = f"The model `{model}` does not exist. Valid aliases: {config.model}."
        raise Refusal(404, message, "NotFoundError", "model")


def validation_error(errors: list[tuple[str, str, str, str]]) -> Refusal:
    """vLLM's rendering of pydantic errors, each (type, location, message, input)."""
    lines = [
        str({"type": kind, "loc": place, "msg": text, "input": shown}) for kind, place, text, shown in errors
    ]
    return _validation(lines, errors[0][1])


def missing(body: Mapping[str, Any], *names: str) -> Refusal:
    """The validation error for absent fields."""
    return validation_error([("missing", f"body.{name}", "Field required", _shown(body)) for name in names])


def check_token_ids(ids: Iterable[int]) -> None:
    for number in ids:
        if not 0 <= number < tokenizer.VOCABULARY:
            raise Refusal(400, f"Token id {number} is out of vocabulary")


def _validation(lines: list[str], param: str) -> Refusal:
    heading = f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}:"
    return Refusal(400, "\n  ".join([heading, *lines]), "Bad Request", param)


def _json_invalid(error: json.JSONDecodeError) -> Refusal:
    place = f"body.{error.pos}"
    line = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": "<dict of 0 items>"}
    return _validation([str(line | {"ctx": {"error": error.msg}})], place)


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def _require(chat: bool, body: Mapping[str, Any]) -> None:
    if chat and "messages" not in body:
        raise missing(body, "messages")
    if chat and not _is_list_of(body["messages"], dict):
        raise validation_error(
            [("list_type", "body.messages", "Input should be a valid list", _shown(body["messages"]))]
        )
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        text = "Input should be a valid dictionary"
        raise validation_error([("dict_type", "body.stream_options", text, _shown(options))])


def _check_options(body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise _bad("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("cache_salt") == "":
        raise _bad("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if body.get("suffix"):
        text = "suffix is only supported for models with FIM completion rendering"
        raise Refusal(400, text, param="suffix")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        shown = float(temperature)
        text = f"temperature must be non-negative, got {shown}. (parameter=temperature, value={shown})"
        raise Refusal(400, text, param="temperature")


def _bad(message: str, param: str) -> Refusal:
    return Refusal(400, f"{message} (parameter={param})", param=param)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    """An integer field as pydantic's lax mode reads it: "12", 3.0 and true are 12, 3 and 1."""
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    place = f"body.{name}"
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, float):
        text = "Input should be a valid integer, got a number with a fractional part"
        raise validation_error([("int_from_float", place, text, str(value))])
    if not isinstance(value, str):
        raise validation_error([("int_type", place, "Input should be a valid integer", _shown(value))])
    try:
        return int(value)
    except ValueError:
        text = "Input should be a valid integer, unable to parse string as an integer"
        raise validation_error([("int_parsing", place, text, value)]) from None


def _choices(body: Mapping[str, Any]) -> int:
    choices = _integer(body, "n")
    if choices is None:
        return 1
    if choices < 1:
        raise Refusal(400, f"n must be at least 1, got {choices}.")
    if choices > SEQUENCES_MAX:
        text = f"n must be at most {SEQUENCES_MAX}, got {choices}. To increase this limit, set the VLLM_MAX_N_SEQUENCES"
        raise Refusal(400, f"{text} environment variable.")
    return choices


def _chat_prompts(body: Mapping[str, Any], config: EngineConfig) -> tuple[int, ...]:
    messages = body["messages"]
    if not messages:
        raise Refusal(
            400, "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    return (_fitting(tokenizer.count_chat(messages, body.get("tools")), config, text=True),)


def _text_prompts(body: Mapping[str, Any], config: EngineConfig) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise Refusal(400, "You must pass at least one prompt")
    if isinstance(prompt, str) or _is_list_of(prompt, int):
        prompt = [prompt]
    if not (
        _is_list_of(prompt, str)
        or (_is_list_of(prompt, list) and all(_is_list_of(ids, int) for ids in prompt))
    ):
        text = "Input should be a valid string or list of token ids"
        raise validation_error([("string_type", "body.prompt", text, _shown(prompt))])
    cut = _integer(body, "truncate_prompt_tokens")
    return tuple(_prompt_tokens(one, cut, config) for one in prompt)


def _prompt_tokens(prompt: str | list[int], cut: int | None, config: EngineConfig) -> int:
    if isinstance(prompt, str):
        tokens = tokenizer.count(prompt)
    else:
        check_token_ids(prompt)
        tokens = len(prompt)
    if tokens == 0:
        raise Refusal(400, "The decoder prompt cannot be empty")
    if cut is not None and cut > 0:
        tokens = min(tokens, cut)
    return _fitting(tokens, config, text=isinstance(prompt, str))


def _fitting(tokens: int, config: EngineConfig, *, text: bool) -> int:
    """The prompt's tokens; a text's count stops one above the context, as vLLM stops tokenizing there."""
    most = config.max_model_len
    if tokens <= most:
        return tokens
    tokens = most + 1 if text else tokens
    raise Refusal(
        400,
        f"This model's maximum context length is {most} tokens. However, your prompt contains"
        f" {'at least ' if text else ''}{tokens} input tokens, which exceeds this limit even without any output tokens."
        f" Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})",
        param="input_tokens",
    )


def _limit(chat: bool, body: Mapping[str, Any], prompt_tokens: int, config: EngineConfig) -> int:
    """Output tokens of a sequence: the field, or its default, clamped to what the context leaves."""
    wanted = _integer(body, "max_tokens")
    if chat:
        both = _integer(body, "max_completion_tokens")
        wanted = both if both is not None else wanted
    room = config.max_model_len - prompt_tokens
    if wanted is None:
        wanted = room if chat else COMPLETION_DEFAULT_TOKENS
    if wanted > config.max_model_len:
        text = f"max_tokens={wanted} cannot be greater than max_model_len={config.max_model_len}."
        text += f" Please request fewer output tokens. (parameter=max_tokens, value={wanted})"
        raise Refusal(400, text, param="max_tokens")
    limit = min(wanted, room)
    if limit < 1:
        text = f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})"
        raise Refusal(400, text, param="max_tokens")
    return limit


def _request_id(body: Mapping[str, Any], request_id: str) -> str:
    own = body.get("request_id")
    return own if isinstance(own, str) and own else request_id


def _script(body: Mapping[str, Any]) -> Script:
    try:
        return parse_script(body.get("mock"))
    except ValueError as error:
        raise Refusal(400, str(error), param="mock") from None


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
