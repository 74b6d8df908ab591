"""The few fields of a request that matter, and the two changes that are made to it on its way upstream."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from gateway.core.body import (
    Edit,
    Member,
    Members,
    Refused,
    append_member,
    decode,
    is_given,
    read_boolean,
    read_integer,
    read_members,
    read_value,
    shown,
    splice,
)
from gateway.core.inputs import Inputs, Layout, read_embedded, read_reranked, read_scored
from gateway.core.media import NO_HOST, NO_MEDIA, TENSOR, Media, MediaRule, Sound, Source
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import (
    Prompt,
    PromptText,
    PromptTokens,
    read_batch,
    read_chat,
    read_messages,
    read_prompts,
    read_response,
)
from gateway.core.salt import salt_edit
from gateway.core.stream_options import NO_STREAM, read_stream_options
from gateway.core.urgency import yielding_edit

INTEGER_MAX = 2**31 - 1
"""vLLM keeps these numbers in 32 bits."""
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
SEQUENCES_MAX = 1024
"""Sequences of one call: prompts x choices."""
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""They make an engine keep blocks after its answer, for another engine: no reservation covers those."""
EXTRAS = "vllm_xargs"
"""An engine reads what it holds as it reads those fields, and only those are checked to be objects."""


_CLIENTS_TOOLS = frozenset({"function", "custom"})
"""Their calls are the answer; a client runs them.  Any other (`code_interpreter`, `web_search_preview`, `mcp`, ...) an
engine with a tool server does.
"""


class _Tool(msgspec.Struct):
    type: str | None = None


_TOOLS = msgspec.json.Decoder(list[_Tool])


class Dialect(StrEnum):
    """Whose words an answer is in."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    CHAT_BATCH = "/v1/chat/completions/batch"
    COMPLETIONS = "/v1/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    POOLING = "/pooling"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"

    path: str
    """Its value: to ask an enum for that costs two calls.  This and the others are set below."""
    generates: bool
    """False where the answer is computed from the prompts alone: no token is sampled."""
    takes_form: bool
    """Its body is a form with a file, no JSON: `audio.parse_audio` reads it."""
    dialect: Dialect


UNRESERVED = {
    "/tokenize": Dialect.OPENAI,
    "/detokenize": Dialect.OPENAI,
    "/v1/messages/count_tokens": Dialect.ANTHROPIC,
}
"""What an engine answers without a block: its tokenizer does."""
LIMIT_FIELDS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.CHAT_BATCH: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.TRANSCRIPTIONS: ("max_completion_tokens",),
    Endpoint.TRANSLATIONS: ("max_completion_tokens",),
}
"""Where vLLM reads the output limit of what generates, the winner first.  Elsewhere than in chats it ignores
`max_completion_tokens`.
"""


for _endpoint in Endpoint:
    _endpoint.path = _endpoint.value
    _endpoint.generates = _endpoint in LIMIT_FIELDS
    _endpoint.takes_form = _endpoint in (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)
    _endpoint.dialect = Dialect.ANTHROPIC if _endpoint is Endpoint.MESSAGES else Dialect.OPENAI


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of an engine; alone, of one that needs no blocks for it."""

    holds_blocks: ClassVar[bool] = False
    path: str
    """On the engine, with the query."""
    dialect: Dialect
    body: bytes
    """As the client sent it."""
    model: str | None
    method: str = "POST"
    stream: bool = False
    include_usage_asked: bool = True
    """The client itself asked for the usage frame at the end of its stream."""
    meter_asked: bool = False
    """And for the usage until then in each of its events."""
    priority: int = 0
    """vLLM's: a higher number is less urgent, 0 is usual."""
    repeatable: bool = True
    """Another engine may be asked after one that may have begun."""
    response_id: str = ""
    """Of a response that an engine has stored, and that is asked for or goes on: only that engine knows it."""
    replica: str = ""
    """The only one that may be asked; '' for any."""
    sources: tuple[Source, ...] = ()
    """Whence its media come, where they are not those of prompts that are counted."""

    def not_taken(self, rule: MediaRule) -> Refusal | None:
        """Why a fleet of this rule does not take its media, if it does not."""
        return rule.refusal(self.sources, "messages")


class GenerationRequest(Request, frozen=True, kw_only=True):
    """A call that takes blocks for its prompts, and for what it generates if it does."""

    holds_blocks: ClassVar[bool] = True
    endpoint: Endpoint
    output_limit: int | None
    """What the client allows one sequence to generate; None where it leaves that open."""
    limit_field: str
    """The field that `output_limit` came from, or the one that is added."""
    limit_spans: tuple[tuple[int, int], ...]
    """Where the body holds values of output limits."""
    usage_edits: tuple[Edit, ...] = ()
    """Have a stream end with its usage."""
    meter_edits: tuple[Edit, ...] = ()
    """The same, and have each of its events tell the usage until then."""
    id_edit: Edit | None
    """Writes the id of a response that the engine may store, without its text."""
    background: bool = False
    """The engine goes on by itself, whoever is still there."""
    beside: bytes | None = b""
    """What its body says beside its prompt of whether a block of it is another call's; None = none of it is."""
    engine_tools: bool = False
    """It has tools that an engine may run itself, if it can, and go on with what they gave."""
    min_tokens: int
    truncate_prompt_tokens: int | None
    """The engine cuts longer prompts to this; -1: to what its context leaves beside the output limit."""
    sequences_per_prompt: int
    prompts: tuple[Prompt, ...]
    """What is counted.  Without a `layout` each is a prompt of the engine's."""
    prompt_field: str
    """Where the prompts are; named in refusals."""
    limit_around: tuple[bytes, bytes] = (b"", b"")
    """What comes before and after the limit where `limit_spans` are replaced."""
    sound: Sound | None = None
    """What is to be understood, of which an engine makes prompts of its own."""
    layout: Layout | None = None
    """How the engine's prompts are made of `prompts`, where each is not one of them."""
    messages: tuple[int, int] = (0, 0)
    """Where the body has those of a conversation that a client goes on with by sending it again; (0, 0) = nowhere."""

    @property
    def may_share(self) -> bool:
        """Its prompt is one of tokens alone, as they are sent, and nothing that is asked for hinders sharing."""
        if len(self.prompts) > 1 or self.layout is not None or self.sequences_per_prompt > 1:
            return False
        if self.beside is None or self.truncate_prompt_tokens is not None or self.response_id or self.sound:
            return False
        (prompt,) = self.prompts
        return self.endpoint.generates and (isinstance(prompt, PromptTokens) or prompt.is_text_alone)

    @property
    def prompt_count(self) -> int:
        """Of the engine's: each becomes sequences of its own, which share blocks with no other prompt's."""
        return self.layout.count(len(self.prompts)) if self.layout else len(self.prompts)

    @property
    def sequences(self) -> int:
        return self.prompt_count * self.sequences_per_prompt

    @property
    def is_metered(self) -> bool:
        """Its answer can tell with each event how many tokens its one sequence has."""
        return self.stream and self.sequences == 1 and self.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)

    def not_taken(self, rule: MediaRule) -> Refusal | None:
        for prompt in self.prompts:
            if isinstance(prompt, PromptText) and prompt.sources:
                refusal = rule.refusal(prompt.sources, self.prompt_field)
                if refusal:
                    return refusal
        return None

    def by_rule(self, rule: MediaRule) -> "GenerationRequest":
        """With its media counted as a fleet counts them; of a request as it was read."""
        if self.sound is not None:
            return self._with_clips(self.sound, rule)
        if not self.has_media:
            return self
        counted = (p.by_rule(rule) if isinstance(p, PromptText) else p for p in self.prompts)
        return msgspec.structs.replace(self, prompts=tuple(counted))

    @property
    def has_media(self) -> bool:
        for prompt in self.prompts:
            if isinstance(prompt, PromptText) and prompt.media is not NO_MEDIA and prompt.media.count:
                return True
        return False

    def _with_clips(self, sound: Sound, rule: MediaRule) -> "GenerationRequest":
        """Each has the same text, and a sound of its own."""
        (prompt,) = self.prompts
        assert isinstance(prompt, PromptText)
        media_tokens = rule.tokens(Media(audios=1))
        shared = msgspec.structs.replace(
            prompt,
            media=Media(audios=1),
            fixed_tokens=prompt.fixed_tokens + media_tokens,
            media_tokens=media_tokens,
        )
        clips = (PromptTokens(0),) * rule.clips(sound)
        return msgspec.structs.replace(self, prompts=(shared, *clips), layout=Layout())

    def after(self, tokens: int) -> "GenerationRequest":
        """The same behind so many tokens that the engine remembers."""
        (prompt,) = self.prompts
        assert isinstance(prompt, PromptText)
        longer = msgspec.structs.replace(
            prompt, fixed_tokens=prompt.fixed_tokens + tokens, media_tokens=prompt.media_tokens + tokens
        )
        return msgspec.structs.replace(self, prompts=(longer,))

    def prompt_tokens(self, counts: Sequence[int]) -> Sequence[int]:
        """Tokens of each of the engine's prompts, from those of `prompts`."""
        return self.layout.prompts(counts) if self.layout else counts


def parse(endpoint: Endpoint, body: bytes, n_max: int) -> GenerationRequest | Refusal:
    """Read and check a body; fields that do not matter here are left for the engine to judge.

    A refusal names the field, its value (shortened) and the limit; its `param` is the field.
    """
    assert not endpoint.takes_form
    try:
        if not endpoint.generates:
            return _parse_inputs(endpoint, body)
        if endpoint is Endpoint.RESPONSES:
            return _parse_response(body)
        return _parse_message(body) if endpoint is Endpoint.MESSAGES else _parse(endpoint, body, n_max)
    except Refused as refused:
        return refused.refusal


def read_passed(
    path: str, dialect: Dialect, body: bytes, *, method: str = "POST", repeatable: bool = True
) -> Request | Refusal:
    """A JSON body of which only the model matters here, and whence an engine would fetch what its messages name."""
    try:
        members = read_members(body)
        model = _read_model(members)
    except Refused as refused:
        return refused.refusal
    sources = _sources(members, dialect) if is_given(members, "messages") else ()
    return Request(
        path=path,
        dialect=dialect,
        body=body,
        model=model,
        method=method,
        repeatable=repeatable,
        sources=sources,
    )


def _sources(members: Members, dialect: Dialect) -> tuple[Source, ...]:
    """What cannot be read here is for the engine to judge, but not where an operator has named the hosts.

    Tensors come from nowhere, and take no blocks where nothing is generated.
    """
    try:
        (prompt,) = read_messages(members) if dialect is Dialect.ANTHROPIC else read_chat(members)
    except Refused:
        return (("messages", NO_HOST),)
    assert isinstance(prompt, PromptText)
    return tuple(source for source in prompt.sources if source[1] != TENSOR)


def forward(
    request: GenerationRequest,
    output_limit: int,
    response_id: str = "",
    metered: bool = False,
    salt: str = "",
    yields: bool = False,
) -> bytes:
    """The client's bytes with `output_limit` written in, usage asked for on a stream (`metered`: in each event), the id
    of a response that may be asked for again, the salt of its key's prefixes, and the `priority` of a call that
    `yields` to others in its engine; nothing else.
    """
    edits = (
        _generation_edits(request, output_limit, response_id, metered) if request.endpoint.generates else []
    )
    if salt and not request.endpoint.takes_form and (edit := salt_edit(request.body, salt)):
        edits.append(edit)
    if yields:
        edits.append(yielding_edit(request.body, request.priority))
    return splice(request.body, edits) if edits else request.body


def _generation_edits(
    request: GenerationRequest, output_limit: int, response_id: str, metered: bool
) -> list[Edit]:
    before, after = request.limit_around
    number = b"%b%d%b" % (before, output_limit, after)
    edits = [(start, end, number) for start, end in request.limit_spans]
    if not edits:
        edits = [append_member(request.body, request.limit_field, number)]
    edits += request.meter_edits if metered else request.usage_edits
    if request.id_edit is not None:
        start, end, before = request.id_edit
        edits.append((start, end, b'%b"%b"' % (before, response_id.encode())))
    return edits


def _parse(endpoint: Endpoint, body: bytes, n_max: int) -> GenerationRequest:
    members = read_members(body)
    is_batch = endpoint is Endpoint.CHAT_BATCH
    stream = read_boolean(members, "stream") and not is_batch
    usage = read_stream_options(members, body) if stream else NO_STREAM
    limit_field, output_limit = _read_output_limit(members, endpoint)
    min_tokens, per_prompt, cut, priority = 0, 1, None, 0
    if not _SELDOM_GIVEN.isdisjoint(members):
        min_tokens = _read_min_tokens(members, limit_field, output_limit)
        per_prompt = _read_sequences(members, n_max)
        _check_the_rest(members, endpoint)
        cut = read_integer(members, "truncate_prompt_tokens", -1, INTEGER_MAX)
        priority = read_integer(members, "priority", -INTEGER_MAX, INTEGER_MAX) or 0
    prompts, layout = _PROMPTS[endpoint](members), Layout() if is_batch else None
    count = layout.count(len(prompts)) if layout else len(prompts)
    prompt_field = "prompt" if endpoint is Endpoint.COMPLETIONS else "messages"
    if count * per_prompt > SEQUENCES_MAX:
        message = f"{count} prompts of {per_prompt} sequences each; a call may have {SEQUENCES_MAX}."
        raise Refused(Code.TOO_MANY_SEQUENCES, message, "n" if count == 1 else prompt_field)
    return GenerationRequest(
        path=endpoint.path,
        dialect=endpoint.dialect,
        endpoint=endpoint,
        body=body,
        model=_read_model(members),
        stream=stream,
        include_usage_asked=usage.asked,
        output_limit=output_limit,
        limit_field=limit_field,
        limit_spans=tuple([(m.start, m.end) for f in LIMIT_FIELDS[endpoint] if (m := members.get(f))]),
        usage_edits=usage.edits,
        meter_edits=usage.meter_edits,
        meter_asked=usage.meter_asked,
        id_edit=None,
        min_tokens=min_tokens,
        truncate_prompt_tokens=cut,
        sequences_per_prompt=per_prompt,
        beside=b"" if _BESIDE.isdisjoint(members) else _read_beside(members),
        priority=priority,
        prompts=prompts,
        prompt_field=prompt_field,
        layout=layout,
        messages=_span(members["messages"]) if endpoint is Endpoint.CHAT else (0, 0),
    )


def _span(member: Member) -> tuple[int, int]:
    return member.start, member.end


_SELDOM_GIVEN = frozenset(
    (
        "min_tokens",
        "use_beam_search",
        "n",
        "best_of",
        "seed",
        "top_logprobs",
        "logprobs",
        "truncate_prompt_tokens",
        "priority",
        EXTRAS,
        *_TRANSFER_FIELDS,
    )
)
"""What `_read_min_tokens`, `_read_sequences` and `_check_the_rest` look for, and two others: looking once costs a tenth
of that."""
_UNSHARED = ("prompt_logprobs", "echo", "use_beam_search")
"""With the first an engine computes a prompt anew, `echo` can mean the same, and beams are calls of their own.

Source: `SamplingParams.skip_reading_prefix_cache` and `to_sampling_params` of vLLM 0.32.
"""
_SALTING = ("cache_salt", "tool_choice")
"""An engine may be told to show no tools to a model that may not choose any."""
_BESIDE = frozenset((*_UNSHARED, *_SALTING))
_PROMPTS = {
    Endpoint.CHAT: read_chat,
    Endpoint.CHAT_BATCH: read_batch,
    Endpoint.COMPLETIONS: read_prompts,
}


def _parse_message(body: bytes) -> GenerationRequest:
    """Anthropic's protocol: what vLLM does not read there, however it is named, is no demand either."""
    endpoint = Endpoint.MESSAGES
    members = read_members(body)
    limit_field, output_limit = _read_output_limit(members, endpoint)
    if output_limit is None:
        raise Refused(Code.MISSING_FIELD, f"`{limit_field}` is missing.", limit_field)
    _check_transfers(members)
    limit = members[limit_field]
    return GenerationRequest(
        path=endpoint.path,
        dialect=endpoint.dialect,
        endpoint=endpoint,
        body=body,
        model=_read_model(members),
        stream=read_boolean(members, "stream"),
        include_usage_asked=True,
        output_limit=output_limit,
        limit_field=limit_field,
        limit_spans=((limit.start, limit.end),),
        id_edit=None,
        min_tokens=0,
        truncate_prompt_tokens=None,
        sequences_per_prompt=1,
        priority=0,
        prompts=read_messages(members),
        prompt_field="messages",
        messages=_span(members["messages"]),
    )


def _parse_response(body: bytes) -> GenerationRequest:
    """OpenAI's newer protocol: one sequence, and no usage frame that would have to be asked for."""
    endpoint = Endpoint.RESPONSES
    members = read_members(body)
    _check_transfers(members)
    background = read_boolean(members, "background")
    if not is_given(members, "input"):
        raise Refused(Code.MISSING_FIELD, "`input` is missing.", "input")
    limit_field, output_limit = _read_output_limit(members, endpoint)
    limit, stream, id_edit = (
        members.get(limit_field),
        read_boolean(members, "stream"),
        _id_edit(members, body),
    )
    if background and id_edit is None:  # until it is over it has to be asked about, by a name
        raise Refused(Code.INVALID_VALUE, "`background` needs a response that is stored.", "background")
    return GenerationRequest(
        path=endpoint.path,
        dialect=endpoint.dialect,
        endpoint=endpoint,
        body=body,
        model=_read_model(members),
        stream=stream,
        output_limit=output_limit,
        limit_field=limit_field,
        limit_spans=((limit.start, limit.end),) if limit else (),
        id_edit=id_edit,
        background=background,
        engine_tools=_has_engine_tools(members),
        min_tokens=0,
        truncate_prompt_tokens=-1 if read_value(members, "truncation") == "auto" else None,
        sequences_per_prompt=1,
        priority=read_integer(members, "priority", -INTEGER_MAX, INTEGER_MAX) or 0,
        prompts=read_response(members),
        prompt_field="input",
        response_id=_read_string(members, "previous_response_id") or "",
    )


def _has_engine_tools(members: Members) -> bool:
    """Of a list that `read_response` reads; what is no tool is for the engine to judge."""
    if not is_given(members, "tools"):
        return False
    try:
        tools = decode(members["tools"].view, "tools", _TOOLS)
    except msgspec.ValidationError:
        return True
    return any(tool.type not in _CLIENTS_TOOLS for tool in tools)


def _id_edit(members: Members, body: bytes) -> Edit | None:
    """Also over an id of the client's own; None where nothing is to be stored."""
    if "store" in members and not read_boolean(members, "store") and not members["store"].is_null:
        return None
    given = members.get("request_id")
    if given is not None:
        return given.start, given.end, b""
    end, _, text = append_member(body, "request_id", b"")
    return end, end, text


def _parse_inputs(endpoint: Endpoint, body: bytes) -> GenerationRequest:
    """Of a call that generates nothing: its answer is one document, however it is asked for."""
    members = read_members(body)
    _check_transfers(members)
    inputs = _read_inputs(endpoint, members)
    return GenerationRequest(
        path=endpoint.path,
        dialect=endpoint.dialect,
        endpoint=endpoint,
        body=body,
        model=_read_model(members),
        stream=False,
        include_usage_asked=True,
        output_limit=0,
        limit_field="",
        limit_spans=(),
        id_edit=None,
        min_tokens=0,
        truncate_prompt_tokens=read_integer(members, "truncate_prompt_tokens", -1, INTEGER_MAX),
        sequences_per_prompt=1,
        priority=read_integer(members, "priority", -INTEGER_MAX, INTEGER_MAX) or 0,
        prompts=inputs.texts,
        prompt_field=inputs.field,
        layout=inputs.layout,
    )


def _read_inputs(endpoint: Endpoint, members: Members) -> Inputs:
    if endpoint in (Endpoint.EMBEDDINGS, Endpoint.POOLING):
        return read_embedded(members, "input", "messages")
    is_score = endpoint in (Endpoint.SCORE, Endpoint.SCORE_V1)
    return read_scored(members) if is_score else read_reranked(members)


def _read_model(members: Members) -> str | None:
    return _read_string(members, "model")


def _read_string(members: Members, name: str) -> str | None:
    member = members.get(name)
    value = None if member is None else decode(member.raw, name)
    if value is None or isinstance(value, str):
        return value
    raise Refused(Code.INVALID_VALUE, f"`{name}` must be a string, got {shown(members[name])}.", name)


def _read_output_limit(members: Members, endpoint: Endpoint) -> tuple[str, int | None]:
    """What is read and does not count has to be a number all the same."""
    fields = LIMIT_FIELDS[endpoint]
    found: tuple[str, int] | None = None
    for name in fields if endpoint is Endpoint.RESPONSES else ("max_completion_tokens", "max_tokens"):
        value = read_integer(members, name, 1, INTEGER_MAX) if name in members else None
        if value is not None and found is None and name in fields:
            found = name, value
    return found or (fields[0], None)


def _read_beside(members: Members) -> bytes | None:
    """As it stands in the body: who writes the same in another way shares less."""
    given = {name: bytes(members[name].raw) for name in (*_UNSHARED, *_SALTING) if name in members}
    if any(given.get(name, b"null") not in (b"null", b"false") for name in _UNSHARED):
        return None
    return b",".join(b"%b=%b" % (name.encode(), given[name]) for name in _SALTING if name in given)


def _read_sequences(members: Members, n_max: int) -> int:
    """`best_of` counts although today's vLLM ignores it: older engines really run that many."""
    read_boolean(members, "use_beam_search")
    most = 1
    for name in ("n", "best_of"):
        value = read_integer(members, name, 1, INTEGER_MAX) or 1
        if value > n_max:
            message = f"`{name}` is {value}; `server.n_max` is {n_max}."
            raise Refused(Code.TOO_MANY_SEQUENCES, message, name)
        most = max(most, value)
    return most


def _read_min_tokens(members: Members, limit_field: str, output_limit: int | None) -> int:
    value = read_integer(members, "min_tokens", 0, INTEGER_MAX) or 0
    if output_limit is not None and value > output_limit:
        message = f"`min_tokens` is {value}, more than `{limit_field}`, which is {output_limit}."
        raise Refused(Code.INVALID_VALUE, message, "min_tokens")
    return value


def _check_the_rest(members: Members, endpoint: Endpoint) -> None:
    """What only the engine uses, but which must not reach it: transfers, and numbers out of any range."""
    _check_transfers(members)
    read_integer(members, "seed", SEED_MIN, SEED_MAX)
    read_integer(members, "top_logprobs", 0, INTEGER_MAX)
    is_flag = "logprobs" in members and members["logprobs"].raw in (b"true", b"false")
    if not (is_flag and endpoint is not Endpoint.COMPLETIONS):
        read_integer(members, "logprobs", 0, INTEGER_MAX)


def _check_transfers(members: Members) -> None:
    for name in _TRANSFER_FIELDS:
        if is_given(members, name):
            raise _transfer(name, name)
    if is_given(members, EXTRAS):
        check_extras(read_value(members, EXTRAS))


def check_extras(extras: Any) -> None:
    """Raises Refused where an engine would find more in them than words for its extensions."""
    for name in _TRANSFER_FIELDS:
        if isinstance(extras, dict) and name in extras:
            raise _transfer(f"{EXTRAS}.{name}", EXTRAS)


def _transfer(name: str, param: str) -> Refused:
    message = f"`{name}` is not accepted: it makes an engine keep blocks after its answer."
    return Refused(Code.INVALID_VALUE, message, param)
