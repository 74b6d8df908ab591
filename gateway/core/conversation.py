"""A chat as a vLLM server hands it to its model's chat template; nothing where only the engine can tell.

Source: `ChatCompletionRequest`, `parse_chat_messages` and `safe_apply_chat_template` of vLLM 0.32.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Fields = dict[str, Any]

_TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Parts that are text, and where they have it."""
_OF_PARTS = frozenset(
    {"type", "text", "refusal", "thinking", "name", "data", "closed", "file", "prompt_cache_breakpoint"}
)
"""Fields that are a part's own; a template that takes parts sees any others."""
_SKIPPED_EMPTY = frozenset({"text", "refusal"})
_MEDIA = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
    "input_image",
    "uuid",
)
"""A part with one of these is no text, whatever else it has."""
_BILLING = "x-anthropic-billing-header"
"""Some clients begin their system prompt with a line of their own, which vLLM takes out."""
_NOT_VARIABLES = frozenset({"chat_template", "tokenize", "tools", "conversation", "messages"})
"""What `chat_template_kwargs` may not set, or would set behind the back of what is counted here."""


class Chat(msgspec.Struct, frozen=True):
    """What a template is rendered with."""

    messages: list[Fields]
    tools: list[Fields] | None
    variables: Fields
    """Whatever else it may ask for."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Those of the tokenizer, beside what the template writes."""


class Style(msgspec.Struct, frozen=True):
    """What vLLM reads off a template before it renders it."""

    shows_parts: bool
    """The template loops over the parts of a message: it gets them as they are, not joined by line ends."""
    knows_developer: bool
    """It has words for the role; else such messages become the system's."""


class Inexpressible(Exception):
    """A chat whose prompt cannot be told from here: it has media, a template of its own, or is wrong."""


def read_chat(body: Mapping[str, Any], style: Style, defaults: Mapping[str, Any]) -> Chat:
    """The chat in a body of `/v1/chat/completions`; `defaults` are the server's `--default-chat-template-kwargs`.

    Raises Inexpressible.
    """
    if body.get("chat_template") is not None:
        raise Inexpressible("a template of its own")
    goes_on = _flag(body, "continue_final_message", False)
    begins = _flag(body, "add_generation_prompt", True)
    if goes_on and begins:
        raise Inexpressible("it cannot both go on and begin")
    messages = [_message(message, style) for message in _objects(body.get("messages"))]
    if not messages:
        raise Inexpressible("no messages")
    if not style.knows_developer and any(message["role"] == "developer" for message in messages):
        messages = _with_one_system([_without_developer(message) for message in messages])
    return Chat(
        messages,
        _tools(body.get("tools")),
        read_variables(body, defaults),
        begins,
        goes_on,
        _flag(body, "add_special_tokens", False),
    )


# Messages ---------------------------------------------------------------------------------------------------


def _message(message: Fields, style: Style) -> Fields:
    role = message.get("role")
    if not isinstance(role, str):
        raise Inexpressible("a message without a role")
    shown: Fields = {"role": role, "content": _content(message.get("content"), role, style)}
    if role == "assistant":
        _add_assistants(message, shown)
    if role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown


def _content(content: Any, role: str, style: Style) -> str | list[Fields]:
    parts: Sequence[Any] = [] if content is None else content
    if isinstance(content, str):
        parts = [content]
    if not isinstance(parts, list):
        raise Inexpressible("content of another type")
    shown = [text for part in parts if (text := _text_part(part)) is not None]
    if role == "system":
        shown = [rest for part in shown if (rest := _without_billing(part)) is not None]
    if style.shows_parts and role != "tool":
        return shown
    return "\n".join(part["text"] for part in shown)


def _text_part(part: Any) -> Fields | None:
    """As a template is shown it; None for a part that is left out."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or any(name in part for name in _MEDIA):
        raise Inexpressible("a part that is no text")
    kind = part.get("type")
    field = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if field else None
    if text is None and kind in _SKIPPED_EMPTY:
        return None
    if not isinstance(text, str):
        raise Inexpressible("a part that is no text")
    return {"type": "text", "text": text} | {k: v for k, v in part.items() if k not in _OF_PARTS}


def _without_billing(part: Fields) -> Fields | None:
    if not part["text"].startswith(_BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return part | {"text": rest} if rest else None


def _add_assistants(message: Fields, shown: Fields) -> None:
    calls = message.get("tool_calls")
    if calls:
        shown["tool_calls"] = [_tool_call(call) for call in _objects(calls)]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        shown["reasoning"] = shown["reasoning_content"] = reasoning


def _tool_call(call: Fields) -> Fields:
    """In the order of OpenAI's types, then what they do not have: so vLLM's validation leaves it."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise Inexpressible("a tool call that is no function's")
    named = _in_order(function | {"arguments": _arguments(function.get("arguments"))}, ("arguments", "name"))
    return _in_order(call | {"function": named}, ("id", "function", "type"))


def _in_order(fields: Fields, first: Sequence[str]) -> Fields:
    return {name: fields[name] for name in first if name in fields} | fields


def _arguments(arguments: Any) -> Fields:
    """What is no object is shown as an empty one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _without_developer(message: Fields) -> Fields:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _with_one_system(messages: list[Fields]) -> list[Fields]:
    """All of the system's as one, at the start."""
    of_system = [message for message in messages if message["role"] == "system"]
    if of_system == messages[:1]:
        return messages
    texts = [text for message in of_system if (text := _joined(message["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined(content: str | list[Fields]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# The rest ---------------------------------------------------------------------------------------------------


def _tools(tools: Any) -> list[Fields] | None:
    return None if tools is None else [_tool(tool) for tool in _objects(tools)]


def _tool(tool: Fields) -> Fields:
    """With the fields that vLLM knows, in its order."""
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise Inexpressible("a tool that is no function")
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    of_function = function.get("defer_loading")
    for name, value in (
        ("strict", function.get("strict")),
        ("defer_loading", deferred if of_function is None else of_function),
    ):
        if value is not None:
            shown[name] = value
    whole = {"type": "function", "function": shown}
    return whole if deferred is None else whole | {"defer_loading": deferred}


def read_variables(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """What a template is given beside messages and tools.  Raises Inexpressible."""
    own = body.get("chat_template_kwargs")
    if own is None:
        own = {}
    if not isinstance(own, dict) or own.keys() & _NOT_VARIABLES:
        raise Inexpressible("variables that no template is given")
    effort = body.get("reasoning_effort")
    given = own | {
        name: value
        for name, value in (("documents", body.get("documents")), ("reasoning_effort", effort))
        if value is not None
    }
    if effort is not None and "enable_thinking" not in own:
        given["enable_thinking"] = effort != "none"
    return {**defaults, **{name: value for name, value in given.items() if value not in (None, "auto")}}


def _objects(values: Any) -> list[Fields]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Inexpressible("not a list of objects")
    return values


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise Inexpressible(f"{name} is neither true nor false")
    return value
