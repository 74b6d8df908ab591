"""What a request's prompt is made of, as far as counting its tokens needs to know."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Any

import msgspec

from gateway.core.body import Member, Members, Refused, decode, is_given, read_members, read_value, shown
from gateway.core.media import KINDS, NO_MEDIA, TENSOR, USUAL, Media, MediaRule, Source, kind_of, sources_of
from gateway.core.outcomes import Code

PROMPTS_MAX = 1024
"""Prompts of one call."""
INPUTS_MAX = 2048
"""Of one call that embeds or scores: as many as OpenAI takes in one list."""
PIECES_MAX = 10_000
"""Messages, and texts or media, of one call: each costs about a microsecond on the event loop."""

MESSAGE_TOKENS = 4
"""Tokens of a message besides its text: start, role, separator and end, as in ChatML and its descendants."""
NAME_TOKENS = 1
REPLY_TOKENS = 3
"""Every reply is primed with start, role and separator."""
START_TOKENS = 1
"""Many tokenizers put a begin-of-text token before a completion's prompt; ids are sent as they are."""
ENDS_TOKENS = 2
"""Around a text that is embedded: at its begin and its end, as BERT and its descendants have it."""
TOOL_TOKENS = 16
"""A chat template's words around one tool's JSON."""
LITERAL_BYTES_MIN, LITERAL_BYTES_MAX = 512, 16 * 1024
"""Strings of messages that stay as they stand in the body: to decode a known text takes as long as all else that is
done with it.  Shorter ones cost little, longer ones are remembered in parts, and no cut may go through an escape.
"""
ESCAPES_COUNTED_BYTES_MIN = 512 * 1024
"""Counting escapes takes half a microsecond a kilobyte.  Of what is shorter the least tokens matter only to a context
of less than 4,096: a token has up to 128 bytes.
"""
_ESCAPE_BYTES_MAX = 5
"""An escape has at most so many bytes more than its character, for each backslash: `\\u0041`."""

_USUAL_ROLES = frozenset({b'"system"', b'"developer"', b'"user"', b'"assistant"', b'"tool"', b'"function"'})
"""One token each, which MESSAGE_TOKENS covers."""
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_TOOL_KINDS = frozenset({"tool_use", "tool_addition"})
"""Parts that are shown as JSON: a call, and a tool that is declared in the middle of a conversation."""
_QUOTE = ord('"')
_NULL_BYTES = len(b"null")
_NO_MESSAGES = "`messages` must be a non-empty list."
_LIST_OF_NUMBERS = re.compile(rb"\[[ \t\r\n]*[0-9]")
_STARTS_A_CHAT = re.compile(rb"\[[ \t\r\n\[]*\{")
_ID_BYTES = b"0123456789 \t\r\n"
_NOT_SHOWN_OF_ITEMS = frozenset({"type", "id", "status", "encrypted_content"})
"""What an item of a response says of itself."""
_MESSAGES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_CONVERSATIONS = msgspec.json.Decoder(list[list[dict[str, msgspec.Raw]]])
_STRING = msgspec.json.Decoder(str)
_ID = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_IDS = msgspec.json.Decoder(list[_ID])
_ID_LISTS = msgspec.json.Decoder(Annotated[list[list[_ID]], msgspec.Meta(min_length=1, max_length=1)])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_SHOWN_EVERYWHERE = ("chat_template", "chat_template_kwargs")
_TEMPLATE_FIELDS = ("documents", *_SHOWN_EVERYWHERE)
"""Fields of vLLM's chat API, beside messages and tools, that reach the prompt through the chat template."""
_SHOWN_BESIDE = frozenset({"tools", "functions", "response_format", *_TEMPLATE_FIELDS})


Text = str | msgspec.Raw
"""Raw is a string as it stands in the body, with its quotes and escapes: `literal_text` decodes it, and never fails."""


class PromptText(msgspec.Struct, frozen=True):
    """One prompt to be counted: the tokens of `texts` plus `fixed_tokens`."""

    texts: tuple[Text, ...]
    fixed_tokens: int
    utf8_bytes: int
    """Of the texts together: a byte-level tokenizer never makes more tokens than this."""
    escape_bytes: int = 0
    """By how much `utf8_bytes` may be too many, because of escapes that were not decoded."""
    media: Media = NO_MEDIA
    media_tokens: int = 0
    """Of `fixed_tokens`, those of `media`, and of what an engine remembers: no text here says anything of them."""
    sources: tuple[Source, ...] = ()
    """Whence its media come, each once."""

    @property
    def is_text_alone(self) -> bool:
        return not self.media.count and not self.media_tokens

    def by_rule(self, rule: MediaRule) -> "PromptText":
        """With what a fleet counts for media in place of the usual; of a prompt as it was read."""
        more = rule.tokens(self.media) - USUAL.tokens(self.media)
        return msgspec.structs.replace(
            self, fixed_tokens=self.fixed_tokens + more, media_tokens=self.media_tokens + more
        )


class PromptTokens(msgspec.Struct, frozen=True):
    """One prompt given as token ids, known exactly."""

    tokens: int


Prompt = PromptText | PromptTokens


def read_chat(members: Members) -> tuple[Prompt, ...]:
    """The one prompt that a chat template makes of messages, tools and schemas.  Raises Refused."""
    return _read_conversation(members, _Gathered(fixed_tokens=REPLY_TOKENS))


def read_batch(members: Members) -> tuple[Prompt, ...]:
    """First what the template shows in each of the conversations, tools and schemas, then these.  Raises Refused."""
    member = members.get("messages")
    if member is None or member.is_null:
        raise Refused(Code.MISSING_FIELD, "`messages` is missing.", "messages")
    try:
        conversations = decode(member.view, "messages", _CONVERSATIONS)
    except msgspec.ValidationError:
        message = "`messages` must be a list of conversations, each a list of messages, each an object."
        raise Refused(Code.INVALID_VALUE, message, "messages") from None
    if not conversations:
        raise Refused(Code.INVALID_VALUE, "`messages` has no conversation.", "messages")
    if len(conversations) > PROMPTS_MAX:
        message = f"`messages` has {len(conversations)} conversations; a call may have {PROMPTS_MAX}."
        raise Refused(Code.TOO_MANY_SEQUENCES, message, "messages")
    everywhere = _Gathered()
    _read_tools(members, everywhere)
    return everywhere.prompt(), *_read_each(conversations, member, "messages")


def read_messages(members: Members) -> tuple[Prompt, ...]:
    """The same of Anthropic's: `system` stands beside the messages.  Raises Refused."""
    gathered = _Gathered(fixed_tokens=REPLY_TOKENS)
    system = read_value(members, "system")
    if system:
        gathered.fixed_tokens += MESSAGE_TOKENS
        _read_parts(system, gathered, _Place.SYSTEM)
    output = read_value(members, "output_config")
    if isinstance(output, dict) and output.get("format") is not None:  # some templates show the schema
        gathered.add_text(output["format"])
    return _read_conversation(members, gathered)


def read_response(members: Members) -> tuple[Prompt, ...]:
    """The prompt of a response: instructions, then a text or the items of a conversation.  Raises Refused."""
    gathered = _Gathered(fixed_tokens=REPLY_TOKENS, field="input")
    instructions = read_value(members, "instructions")
    if instructions is not None:
        gathered.fixed_tokens += MESSAGE_TOKENS
        gathered.add_text(instructions)
    for name in ("previous_input_messages", "input"):
        if is_given(members, name):
            _read_items(members[name], name, gathered)
    text = read_value(members, "text")
    if isinstance(text, dict) and text.get("format") is not None:
        gathered.add_text(text["format"])
    _read_tools(members, gathered)
    escape_bytes = _escape_bytes(members["input"], gathered.literal_bytes)
    return (gathered.prompt(escape_bytes),)


def _read_items(member: Member, name: str, gathered: "_Gathered") -> None:
    """An item is a message, a call of a tool, what that gave, or a thought; each may be a message of its own."""
    if member.view[0] == _QUOTE:
        gathered.fixed_tokens += MESSAGE_TOKENS
        gathered.add_literal(msgspec.Raw(member.view))
        return
    try:
        items: list[dict[str, msgspec.Raw]] = decode(member.view, name, _MESSAGES)
    except msgspec.ValidationError:
        raise Refused(Code.INVALID_VALUE, f"`{name}` must be a string or a list of items.", name) from None
    if not items:
        raise Refused(Code.INVALID_VALUE, f"`{name}` is an empty list.", name)
    _check_pieces(len(items), gathered.field)
    for item in items:
        _read_item(item, gathered)


def _read_item(item: dict[str, msgspec.Raw], gathered: "_Gathered") -> None:
    if _text_of(item.get("type")) == "function_call":
        gathered.fixed_tokens += TOOL_TOKENS
    shown = {name: value for name, value in item.items() if name not in _NOT_SHOWN_OF_ITEMS}
    given = shown.pop("output", None)
    _read_message(shown, gathered)
    if given is None:
        return
    if memoryview(given)[0] == _QUOTE:
        gathered.add_literal(given)
        return
    output = decode(given, gathered.field)
    if isinstance(output, list):
        _read_parts(output, gathered, _Place.USER)
    elif isinstance(output, dict) and output.get("type") == "computer_screenshot":
        _read_part(output, gathered, _Place.USER)
    else:
        gathered.add_text(output)


def _read_conversation(members: Members, gathered: "_Gathered") -> tuple[Prompt, ...]:
    messages = _read_messages(members)
    _check_pieces(len(messages), gathered.field)
    for message in messages:
        _read_message(message, gathered)
    _read_tools(members, gathered)
    return (gathered.prompt(_escape_bytes(members["messages"], gathered.literal_bytes)),)


def _read_conversations(member: Member, name: str) -> tuple[Prompt, ...]:
    """One or several, of messages alone: what else a template shows is the call's, not theirs."""
    try:
        conversations = [decode(member.view, name, _MESSAGES)]
    except msgspec.ValidationError:
        try:
            conversations = decode(member.view, name, _CONVERSATIONS)
        except msgspec.ValidationError:
            message = f"`{name}` must be a list of messages, or a list of such lists, each message an object."
            raise Refused(Code.INVALID_VALUE, message, name) from None
    check_inputs(len(conversations), name)
    return _read_each(conversations, member, name)


def _read_each(
    conversations: list[list[dict[str, msgspec.Raw]]], member: Member, name: str
) -> tuple[Prompt, ...]:
    _check_pieces(sum(map(len, conversations)), name)
    if not all(conversations):
        raise Refused(Code.INVALID_VALUE, f"`{name}` has a conversation without messages.", name)
    escapes = member.body.find(b"\\", member.start, member.end) >= 0
    return tuple(_read_messages_alone(messages, name, escapes) for messages in conversations)


def _read_messages_alone(messages: list[dict[str, msgspec.Raw]], name: str, escapes: bool) -> PromptText:
    """`escapes`: there are some among the messages of the call."""
    gathered = _Gathered(fixed_tokens=REPLY_TOKENS, field=name)
    for message in messages:
        _read_message(message, gathered)
    return gathered.prompt(_most_escape_bytes(gathered.literal_bytes) if escapes else 0)


def literal_text(literal: msgspec.Raw) -> str:
    """The string that a JSON string is."""
    text: str = _STRING.decode(literal)
    return text


def read_prompts(members: Members) -> tuple[Prompt, ...]:
    """The prompts of a completion: tensors, then a string, strings, token ids, or lists of ids.  Raises Refused."""
    tensors = _read_tensors(members, "prompt_embeds")
    tokens = _count_ids(members, "prompt")
    if tokens:
        return (*tensors, PromptTokens(tokens))
    prompt = read_value(members, "prompt")
    if tensors and (prompt is None or prompt == ""):
        return tensors if prompt is None else (*tensors, _prompt_text([""], START_TOKENS))
    if prompt is None:
        raise Refused(Code.MISSING_FIELD, "`prompt` is missing.", "prompt")
    prompts = _read_prompt_list(prompt, "prompt", PROMPTS_MAX, START_TOKENS)
    if prompts is None or prompt == "" or (isinstance(prompt, list) and "" in prompt):
        message = "`prompt` must be a string, strings, token ids, or lists of token ids, none of them empty."
        raise Refused(Code.INVALID_VALUE, message, "prompt")
    return (*tensors, *prompts)


def _read_tensors(members: Members, name: str) -> tuple[Prompt, ...]:
    """Each is a prompt of its own, and stays as it stands in the body: it can be megabytes.  Raises Refused."""
    if not is_given(members, name):
        return ()
    try:
        tensors = decode(members[name].view, name, _RAWS)
    except msgspec.ValidationError:
        tensors = [msgspec.Raw(members[name].view)]
    if not all(bytes(memoryview(tensor)[:1]) == b'"' for tensor in tensors):
        raise Refused(Code.INVALID_VALUE, f"`{name}` must be a string, or strings, of base64.", name)
    if len(tensors) > PROMPTS_MAX:
        message = f"`{name}` has {len(tensors)} prompts; a call may have {PROMPTS_MAX}."
        raise Refused(Code.TOO_MANY_SEQUENCES, message, name)
    prompt = PromptText((), 0, 0, media=Media(tensors=1), sources=((name, TENSOR),))
    return (prompt,) * len(tensors)


def read_inputs(members: Members, name: str) -> tuple[Prompt, ...]:
    """What is embedded: a text, texts, token ids, lists of token ids, a conversation, or conversations.

    An empty text is one to models that put tokens around it.  Raises Refused.
    """
    tokens = _count_ids(members, name)
    if tokens:
        return (PromptTokens(tokens),)
    if _STARTS_A_CHAT.match(members[name].body, members[name].start):
        return _read_conversations(members[name], name)
    inputs = _read_prompt_list(read_value(members, name), name, INPUTS_MAX, ENDS_TOKENS)
    if inputs is None:
        message = (
            f"`{name}` must be a string, strings, token ids, lists of token ids, messages, or lists of messages,"
            " no list of them empty."
        )
        raise Refused(Code.INVALID_VALUE, message, name)
    return inputs


def read_content(value: Any, name: str) -> PromptText:
    """What is scored: a text, or an object whose `content` is a list of parts.  Raises Refused."""
    if isinstance(value, str):
        return _prompt_text([value], 0)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        message = f"`{name}` must be a string or an object with a list as its `content`, or a list of such."
        raise Refused(Code.INVALID_VALUE, message, name)
    gathered = _Gathered(field=name)
    for part in content:
        _read_part(part, gathered, _Place.USER)
    return gathered.prompt()


def read_template(members: Members, fixed_tokens: int, *names: str) -> PromptText:
    """What a template adds to every prompt of a call, with the fields of these names."""
    gathered = _Gathered(fixed_tokens=fixed_tokens)
    for name in (*_SHOWN_EVERYWHERE, *names):
        if is_given(members, name):
            gathered.add_text(read_value(members, name))
    return gathered.prompt()


def check_inputs(count: int, name: str) -> None:
    """Raises Refused for more than a call may have."""
    if count > INPUTS_MAX:
        message = f"`{name}` has {count} inputs; a call may have {INPUTS_MAX}."
        raise Refused(Code.TOO_MANY_SEQUENCES, message, name)


@dataclass(slots=True)
class _Gathered:
    """What was found in a chat so far."""

    texts: list[Text] = field(default_factory=list)
    media: list[int] | None = None
    """By kind; None where there is none."""
    sources: dict[Source, None] = field(default_factory=dict)
    fixed_tokens: int = 0
    field: str = "messages"
    """Named in refusals."""
    pieces: int = 0
    literal_bytes: int = 0
    """Of the texts that are not decoded."""

    def add_text(self, value: Any) -> None:
        self._add_piece()
        self.texts.append(value if isinstance(value, str) else _compact(value))

    def add_literal(self, literal: msgspec.Raw) -> None:
        """A string as it stands in the body."""
        self.pieces += 1  # as `_add_piece`: a history has hundreds
        if self.pieces > PIECES_MAX:
            _check_pieces(self.pieces, self.field)
        size = len(literal)
        if LITERAL_BYTES_MIN <= size <= LITERAL_BYTES_MAX:
            self.literal_bytes += size
            self.texts.append(literal)
        else:
            self.texts.append(literal_text(literal))

    def add_media(self, kind: int) -> None:
        self._add_piece()
        self.media = self.media or [0] * KINDS
        self.media[kind] += 1

    def prompt(self, escape_bytes: int = 0) -> PromptText:
        """`escape_bytes`: as there."""
        media, texts = Media(*self.media) if self.media else NO_MEDIA, tuple(self.texts)
        media_tokens = USUAL.tokens(media) if self.media else 0
        decoded = [text for text in texts if isinstance(text, str)]
        quotes = len(b'""') * (len(texts) - len(decoded))
        utf8_bytes = self.literal_bytes - quotes + sum(map(text_bytes, decoded))
        fixed = self.fixed_tokens + media_tokens
        return PromptText(texts, fixed, utf8_bytes, escape_bytes, media, media_tokens, tuple(self.sources))

    def _add_piece(self) -> None:
        self.pieces += 1
        _check_pieces(self.pieces, self.field)


class _Place(Enum):
    """Where parts stand."""

    SYSTEM = auto()
    USER = auto()
    """In a message of a user."""
    OTHERS = auto()
    """In any other message."""
    RESULT = auto()
    """In what a tool gave."""


def _check_pieces(count: int, field_: str) -> None:
    if count > PIECES_MAX:
        message = f"`{field_}` has more than {PIECES_MAX} messages or parts."
        raise Refused(Code.INVALID_VALUE, message, field_)


def _read_messages(members: Members) -> list[dict[str, msgspec.Raw]]:
    """Each message's fields as they stand in the body."""
    member = members.get("messages")
    if member is None or member.is_null:
        raise Refused(Code.MISSING_FIELD, "`messages` is missing.", "messages")
    try:
        messages: list[dict[str, msgspec.Raw]] = decode(member.view, "messages", _MESSAGES)
    except msgspec.ValidationError:
        is_list = bytes(member.view[:1]) == b"["
        wanted = "Every one of `messages` must be an object." if is_list else _NO_MESSAGES
        raise Refused(Code.INVALID_VALUE, wanted, "messages") from None
    if not messages:
        raise Refused(Code.INVALID_VALUE, _NO_MESSAGES, "messages")
    return messages


def _read_message(message: dict[str, msgspec.Raw], gathered: _Gathered) -> None:
    """Any field may be shown by a chat template; a usual role is in the frame that every message has."""
    gathered.fixed_tokens += MESSAGE_TOKENS
    for name, value in message.items():
        if name == "role" and bytes(value) in _USUAL_ROLES:
            continue
        if len(value) == _NULL_BYTES and bytes(value) == b"null":
            continue
        if name == "name":
            gathered.fixed_tokens += NAME_TOKENS
        if memoryview(value)[0] == _QUOTE:
            gathered.add_literal(value)
        elif name == "content":
            is_users = _text_of(message.get("role")) == "user"
            place = _Place.USER if is_users else _Place.OTHERS
            _read_parts(decode(value, gathered.field), gathered, place)
        else:
            gathered.add_text(decode(value, gathered.field))


def _text_of(value: msgspec.Raw | None) -> str | None:
    return literal_text(value) if value and memoryview(value)[0] == _QUOTE else None


def _read_parts(content: Any, gathered: _Gathered, place: _Place) -> None:
    """A text, or a list of parts."""
    if isinstance(content, str):
        gathered.add_text(content)
        return
    if not isinstance(content, list):
        what = "`system`" if place is _Place.SYSTEM else "`content`"
        raise Refused(
            Code.INVALID_VALUE, f"{what} must be a string or a list of parts.", _field(gathered, place)
        )
    if place is _Place.RESULT and content:
        gathered.fixed_tokens += len(content) - 1  # a new line between two
    for part in content:
        _read_part(part, gathered, place)


def _field(gathered: _Gathered, place: _Place) -> str:
    return "system" if place is _Place.SYSTEM else gathered.field


def _read_part(part: Any, gathered: _Gathered, place: _Place) -> None:
    """Media are charged a fixed number: their bytes say nothing of their tokens."""
    if isinstance(part, str):
        gathered.add_text(part)
        return
    if not isinstance(part, dict):
        message = "Every part of a `content` list must be an object."
        raise Refused(Code.INVALID_VALUE, message, _field(gathered, place))
    kind = str(part.get("type"))
    if kind in _TOOL_KINDS:
        gathered.fixed_tokens += TOOL_TOKENS
        gathered.add_text(part)
        return
    if kind == "tool_result" and place is not _Place.RESULT:
        _read_result(part, gathered, place)
        return
    text = part.get(_TEXT_KEYS.get(kind, "text"))
    if isinstance(text, str):
        gathered.add_text(text)
    if kind in _TEXT_KEYS and isinstance(text, str) and part.get("uuid") is None:
        return
    gathered.add_media(kind_of(part))
    for source in sources_of(part):
        gathered.sources[source] = None


def _read_result(part: dict[str, Any], gathered: _Gathered, place: _Place) -> None:
    """What a tool gave: of a user a message of its own, of anybody else a text, as Python shows it, images too.

    Source: `_convert_tool_result_block` of vLLM 0.32.
    """
    gathered.fixed_tokens += MESSAGE_TOKENS
    gathered.add_text(part.get("tool_use_id"))
    content = part.get("content") or ""
    if place is _Place.USER:
        _read_parts(content, gathered, _Place.RESULT)
    else:
        gathered.add_text(content)


def _read_tools(members: Members, gathered: _Gathered) -> None:
    """Tools, response schemas and whatever else a chat template shows, as compact JSON."""
    if _SHOWN_BESIDE.isdisjoint(members):
        return
    for name in ("tools", "functions"):
        tools = read_value(members, name)
        if tools is None:
            continue
        if not isinstance(tools, list):
            raise Refused(Code.INVALID_VALUE, f"`{name}` must be a list, got {shown(members[name])}.", name)
        gathered.add_text(tools)
        gathered.fixed_tokens += TOOL_TOKENS * len(tools)
    response_format = read_value(members, "response_format")
    if isinstance(response_format, dict) and response_format.get("json_schema") is not None:
        gathered.add_text(response_format["json_schema"])
    for name in _TEMPLATE_FIELDS:
        if is_given(members, name):
            gathered.add_text(read_value(members, name))


def _count_ids(members: Members, name: str) -> int:
    """How many ids a plain list of them has, 0 for any other prompt.  That the text is JSON is known.

    Decoding 64k ids takes 1.5 ms, looking at their bytes a tenth of that; whether an id is in the vocabulary is for the
    engine to say.
    """
    prompt = members.get(name)
    if prompt is None or not _LIST_OF_NUMBERS.match(prompt.body, prompt.start):
        return 0
    around = len(_marks(prompt.body[: prompt.start])), len(_marks(prompt.body[prompt.end :]))
    marks = _marks(prompt.body)  # of all: a copy of the prompt alone would take as long
    commas = len(marks) - sum(around) - 2
    is_list = marks.startswith(b"[%b]" % (b"," * commas), around[0])
    return commas + 1 if is_list else 0


def read_ids(body: bytes) -> list[int]:
    """Those of the only prompt of a completion whose prompts are ids; a list in a list is one, too.

    Raises msgspec.ValidationError for ids that no vocabulary has, and for several prompts.
    """
    prompt = read_members(body)["prompt"]
    if _LIST_OF_NUMBERS.match(prompt.body, prompt.start):
        return _IDS.decode(prompt.view)
    (ids,) = _ID_LISTS.decode(prompt.view)
    return ids


def _marks(text: bytes) -> bytes:
    """Without what a list of ids has between its commas."""
    return text.translate(None, _ID_BYTES)


def _read_prompt_list(prompt: Any, name: str, most: int, fixed_tokens: int) -> tuple[Prompt, ...] | None:
    """None for what is not a prompt: mixed, a list of nothing, or of another type."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        return None
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (PromptTokens(len(prompt)),)
    if len(prompt) > most:
        message = f"`{name}` has {len(prompt)} prompts; a call may have {most}."
        raise Refused(Code.TOO_MANY_SEQUENCES, message, name)
    if kinds == {str}:
        return tuple(_prompt_text([text], fixed_tokens) for text in prompt)
    if kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt):
        return tuple(PromptTokens(len(ids)) for ids in prompt)
    return None


def _prompt_text(texts: Sequence[Text], fixed_tokens: int) -> PromptText:
    return PromptText(tuple(texts), fixed_tokens, sum(map(text_bytes, texts)))


def _escape_bytes(messages: Member, literal_bytes: int) -> int:
    """The most by which so many bytes of strings in `messages` can be longer than their texts."""
    if not literal_bytes or messages.body.find(b"\\", messages.start, messages.end) < 0:
        return 0
    most = _most_escape_bytes(literal_bytes)
    if literal_bytes < ESCAPES_COUNTED_BYTES_MIN:
        return most
    return min(most, _ESCAPE_BYTES_MAX * messages.body.count(b"\\", messages.start, messages.end))


def _most_escape_bytes(literal_bytes: int) -> int:
    """Where nearly every character of so many bytes is escaped."""
    return literal_bytes * _ESCAPE_BYTES_MAX // (1 + _ESCAPE_BYTES_MAX)


def text_bytes(text: Text) -> int:
    """Bytes of the text in UTF-8; of one that is not decoded, as many or more."""
    if not isinstance(text, str):
        return len(text) - len(b'""')
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _compact(value: Any) -> str:
    """JSON without white space or needless escapes, as chat templates show it."""
    return msgspec.json.encode(value).decode()
