"""A body is to kvgate what it is to the engine, whose parser is `json.loads` of the bytes (Starlette's `Request.json`).

Whatever kvgate forwards, the engine reads the same fields that kvgate has read; whatever the engine's parser refuses,
kvgate refuses; and where kvgate is the stricter one, the reason is one of those listed here.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import PromptText, PromptTokens
from gateway.core.request import Endpoint, GenerationRequest, forward, parse

N_MAX = 16
LIMIT = 77
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
INTEGERS = {
    "max_tokens": (1, 2**31 - 1),
    "max_completion_tokens": (1, 2**31 - 1),
    "n": (1, N_MAX),
    "best_of": (1, N_MAX),
    "min_tokens": (0, 2**31 - 1),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "top_logprobs": (0, 2**31 - 1),
    "logprobs": (0, 2**31 - 1),
}
FLAGS = ("stream", "use_beam_search")
DEPTH_READ = 100
DEPTH_REFUSED = 100_000
"""Between the two lies the interpreter's limit for nested calls, which is another one on every stack."""


# Bodies: JSON text and what is nearly that


def rarely(usual: st.SearchStrategy[str], odd: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """One oddity is found in a body, not one in every place of it."""
    return st.integers(0, 99).flatmap(lambda die: odd if die == 77 else usual)


SPACE = rarely(
    st.sampled_from(["", "", "", " ", "\n", "\t\r\n "]), st.sampled_from(["\x0b", "\u00a0", "\ufeff", "\0"])
)
NUMBERS = "0 1 2 9 16 10.0 1e1 100e-1 -0 -0.0 -1 0.5 1E+2 2147483647"
NO_NUMBERS = "NaN Infinity -Infinity nan 01 - +1 1. .5 1e 0x10 1_0 --1 \u0661"
HUGE_NUMBERS = (
    "1e400 -1e400 1e-400 1.7976931348623159e308 9007199254740993 18446744073709551616 -9223372036854775809"
)
NUMBER = rarely(
    st.sampled_from(NUMBERS.split()),
    st.sampled_from([*NO_NUMBERS.split(), *HUGE_NUMBERS.split(), "1" + "0" * 40, "9" * 4301]),
)
COUNT = rarely(st.sampled_from(["1", "2", "9", "16", "10.0", "1e1", "100e-1", "1E+0", "null"]), NUMBER)
SCALAR = rarely(
    NUMBER | st.sampled_from(["true", "false", "null"]), st.sampled_from(["True", "None", "tru", "nulll", ""])
)
CHARACTERS = rarely(
    st.sampled_from(
        ["a", "b", "stream", "{", "}", "[", ",", ":", "é", "😀", "\u2028", "\\n", '\\"', "\\\\", "\\/"]
    )
    | st.sampled_from(
        ["\\u0061", "\\u00E9", "\\ud83d\\ude00", "\\u0000", "\\u005c", "\\u0022", "\x7f", "<|endoftext|>"]
    ),
    st.sampled_from(
        ["\\ud83d", "\\ude00\\ud83d", "\udc80", "\ud800", "\n", "\0", '"', "\\", "\\x41", "\\u12", "\\U0061"]
    ),
)
STRING = st.lists(CHARACTERS, max_size=4).map(lambda parts: '"' + "".join(parts) + '"')


@st.composite
def keys(draw: st.DrawFn, names: st.SearchStrategy[str]) -> str:
    """A key with some of its characters escaped."""
    name = draw(names)
    escaped = draw(st.sets(st.integers(0, max(0, len(name) - 1)), max_size=2) | st.just(set()))
    form = draw(st.sampled_from(["\\u{:04x}", "\\u{:04X}"]))
    return '"' + "".join(form.format(ord(c)) if at in escaped else c for at, c in enumerate(name)) + '"'


@st.composite
def objects(draw: st.DrawFn, *members: st.SearchStrategy[tuple[str, str]]) -> str:
    """The members in any order, and now and then one of them again."""
    pairs = [draw(member) for member in members]
    if pairs and draw(st.integers(0, 99)) > 93:
        again = draw(st.sampled_from(members))
        pairs.append(draw(again))
    pairs = draw(st.permutations(pairs))
    spaced = [f"{draw(SPACE)}{key}{draw(SPACE)}:{draw(SPACE)}{value}{draw(SPACE)}" for key, value in pairs]
    return "{" + (",".join(spaced) or draw(SPACE)) + "}"


def lists(values: st.SearchStrategy[str], least: int = 0) -> st.SearchStrategy[str]:
    comma = st.sampled_from([",", ",", ", ", " ,\n"])
    return st.tuples(comma, st.lists(values, min_size=least, max_size=3)).map(
        lambda t: "[" + t[0].join(t[1]) + "]"
    )


def member(name: str, value: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(keys(st.just(name)), value)


def some(*members: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(members), max_size=4, unique=True).flatmap(
        lambda chosen: objects(*chosen)
    )


FREE_KEY = keys(st.sampled_from(["a", "b", "", "type", "max_tokens", "stream", "é"]))
VALUE = st.recursive(
    SCALAR | STRING,
    lambda inner: (
        lists(inner)
        | st.lists(st.tuples(FREE_KEY, inner), max_size=2).flatmap(
            lambda pairs: objects(*map(st.just, pairs))
        )
    ),
    max_leaves=5,
)
DEEP = st.sampled_from([50, DEPTH_READ, DEPTH_REFUSED]).flatmap(
    lambda depth: st.sampled_from(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
)
ANY = rarely(VALUE, DEEP)

TEXT_PART = objects(member("type", st.just('"text"')), member("text", STRING))
CONTENT = rarely(STRING | lists(TEXT_PART | STRING), VALUE)
ROLE = rarely(st.sampled_from([f'"{role}"' for role in USUAL_ROLES]), STRING | VALUE)
MESSAGE = st.lists(
    st.sampled_from([member("name", STRING), member("tool_calls", VALUE), st.tuples(FREE_KEY, VALUE)]),
    max_size=2,
).flatmap(lambda more: objects(member("role", ROLE), member("content", CONTENT), *more))
MESSAGES = rarely(lists(MESSAGE, least=1), VALUE)
ID = st.sampled_from(["0", "7", "128000", " 12\t"])
PROMPT = rarely(STRING | lists(STRING, 1) | lists(ID, 1) | lists(lists(ID, 1), 1), VALUE | lists(VALUE))
USAGE = rarely(st.sampled_from(["true", "false", "null"]), VALUE)
OPTIONS = rarely(
    some(member("include_usage", USAGE), member("continuous_usage_stats", USAGE), st.tuples(FREE_KEY, VALUE))
    | st.just("null"),
    VALUE,
)
FLAG = rarely(st.sampled_from(["true", "true", "false", "null"]), VALUE)
OTHERS = {
    **dict.fromkeys(INTEGERS, rarely(COUNT, VALUE)),
    **dict.fromkeys(FLAGS, FLAG),
    "stream_options": OPTIONS,
    "model": rarely(STRING, VALUE),
    "tools": rarely(lists(VALUE), VALUE),
    **dict.fromkeys(("temperature", "user", "", "é", "max_tokens "), ANY),
}


@st.composite
def bodies(draw: st.DrawFn, endpoint: Endpoint) -> bytes:
    """Mostly what a client might send; now and then with one thing that it should not."""
    prompt = member("messages", MESSAGES) if endpoint is Endpoint.CHAT else member("prompt", PROMPT)
    streaming = draw(st.sampled_from([[], ["stream"], ["stream", "stream_options"]]))
    names = dict.fromkeys(streaming + draw(st.lists(st.sampled_from(list(OTHERS)), max_size=5)))
    others = [member(name, OTHERS[name]) for name in names]
    text = draw(SPACE) + draw(objects(prompt, *others)) + draw(SPACE)
    encoded = text.encode(
        draw(st.sampled_from(["utf-8"] * 20 + ["utf-8-sig", "utf-16", "utf-32-le"])), "surrogatepass"
    )
    return encoded + draw(st.sampled_from([b""] * 20 + [b"x", b"\0", b"{}", b",", b"\xff", b"//"]))


@st.composite
def damaged(draw: st.DrawFn, endpoint: Endpoint) -> bytes:
    """A body with a byte or two replaced, put in or left out."""
    body = bytearray(draw(bodies(endpoint).filter(lambda body: len(body) < 5_000)))
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(body)))
        new = draw(
            st.sampled_from([*b'{}[]":,\\ 01e-.nu\0\n\xc3\xed\xff']).map(lambda byte: bytes([byte]))
            | st.just(b"")
        )
        body[start : start + draw(st.integers(0, 1))] = new
    return bytes(body)


ENDPOINTS = [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES]
CALLS = st.sampled_from(ENDPOINTS).flatmap(lambda endpoint: st.tuples(st.just(endpoint), bodies(endpoint)))
DAMAGED = st.sampled_from(ENDPOINTS).flatmap(lambda endpoint: st.tuples(st.just(endpoint), damaged(endpoint)))

INPUT = rarely(PROMPT | MESSAGES | lists(MESSAGES, 1), VALUE)
SIDE = rarely(STRING | lists(STRING, 1) | objects(member("content", lists(TEXT_PART))), VALUE)
ITEM = rarely(MESSAGE | objects(member("type", st.just('"reasoning"')), member("output", CONTENT)), VALUE)
INPUTS = {
    Endpoint.EMBEDDINGS: {"input": INPUT},
    Endpoint.POOLING: {"messages": INPUT},
    Endpoint.SCORE: {"text_1": SIDE, "text_2": SIDE},
    Endpoint.RERANK: {"query": rarely(STRING, VALUE), "documents": SIDE},
    Endpoint.RESPONSES: {
        "input": rarely(STRING | lists(ITEM, 1), VALUE),
        "instructions": rarely(STRING, VALUE),
    },
}
NEWER_FIELDS = {
    "truncate_prompt_tokens": COUNT,
    "max_tokens_per_doc": COUNT,
    "max_output_tokens": COUNT,
    "store": FLAG,
    "stream": FLAG,
    "request_id": ANY,
    "instruction": rarely(STRING, VALUE),
    "text": ANY,
}


@st.composite
def newer_bodies(draw: st.DrawFn, endpoint: Endpoint) -> bytes:
    """As `bodies`, of the routes whose prompts have other names."""
    names = draw(st.lists(st.sampled_from(list(NEWER_FIELDS)), max_size=3, unique=True))
    fields = INPUTS[endpoint] | {name: NEWER_FIELDS[name] for name in names}
    return draw(objects(*(member(name, value) for name, value in fields.items()))).encode(
        errors="surrogatepass"
    )


NEWER = st.sampled_from(list(INPUTS)).flatmap(
    lambda endpoint: st.tuples(st.just(endpoint), newer_bodies(endpoint))
)


# What the engine makes of a body


class Pairs(list[Any]):
    """An object with all its members, also those that a later one replaces."""


def as_pairs(body: bytes) -> Any:
    return json.loads(body, object_pairs_hook=Pairs)


def leaves(value: Any) -> Iterator[Any]:
    """Keys and values of a tree of `Pairs`, or of plain JSON."""
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def engine_reads(body: bytes) -> Any:
    """Raises ValueError or RecursionError."""
    return json.loads(body)


def is_refused_by_engine(body: bytes) -> bool:
    try:
        engine_reads(body)
    except (ValueError, RecursionError):
        return True
    return False


def engine_gets(body: bytes, request: GenerationRequest) -> dict[str, Any]:
    """The client's fields, in their order, with the limit and the usage that are kvgate's."""
    fields: dict[str, Any] = engine_reads(body)
    chat = request.endpoint is Endpoint.CHAT
    limits = [
        name
        for name in ("max_completion_tokens", "max_tokens")
        if name in fields and (chat or name == "max_tokens")
    ]
    fields |= dict.fromkeys(limits or ["max_completion_tokens" if chat else "max_tokens"], LIMIT)
    if fields.get("stream"):
        options = fields.get("stream_options") or {}
        alone = options.get("continuous_usage_stats") and not options.get("include_usage")
        fields["stream_options"] = ({} if alone else options) | {"include_usage": True}
    return fields


def texts_of_message(message: dict[str, Any]) -> Iterator[Any]:
    """The texts and values that a chat template may show."""
    for name, value in message.items():
        if value is None or (name == "role" and value in USUAL_ROLES):
            continue
        if name == "content" and isinstance(value, list):
            yield from (part if isinstance(part, str) else part["text"] for part in value if is_text(part))
        else:
            yield value


def is_text(part: Any) -> bool:
    return isinstance(part, str) or isinstance(part.get("text"), str)


def shown(text: str, value: Any) -> bool:
    """A value is shown as its JSON."""
    return text == value if isinstance(value, str) else repr(json.loads(text)) == repr(value)


# What kvgate read is what the engine reads


def check_fields(request: GenerationRequest, fields: dict[str, Any]) -> None:
    def first(*names: str) -> Any:
        return next((fields[name] for name in names if fields.get(name) is not None), None)

    chat = request.endpoint is Endpoint.CHAT
    options = fields.get("stream_options") or {}
    assert request.model == fields.get("model")
    assert request.stream is bool(fields.get("stream"))
    assert request.include_usage_asked is (request.stream and bool(options.get("include_usage")))
    assert request.output_limit == (
        first("max_completion_tokens", "max_tokens") if chat else first("max_tokens")
    )
    assert request.sequences_per_prompt == max(first("n") or 1, first("best_of") or 1)
    assert request.min_tokens == (first("min_tokens") or 0)
    assert request.truncate_prompt_tokens == first("truncate_prompt_tokens")
    (check_chat if chat else check_prompts)(request, fields)


def check_chat(request: GenerationRequest, fields: dict[str, Any]) -> None:
    (prompt,) = request.prompts
    assert isinstance(prompt, PromptText)
    values = [value for message in fields["messages"] for value in texts_of_message(message)]
    if fields.get("tools") is not None:
        values.append(fields["tools"])
    assert len(prompt.texts) == len(values)
    assert all(map(shown, prompt.texts, values))
    assert prompt.utf8_bytes == sum(len(text.encode()) for text in prompt.texts)


def check_prompts(request: GenerationRequest, fields: dict[str, Any]) -> None:
    prompt = fields["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    for read, sent in zip(request.prompts, prompt, strict=True):
        if isinstance(read, PromptTokens):
            assert all(type(token) is int for token in sent)
            assert read.tokens == len(sent)
        else:
            assert read.texts == (sent,)


# Why kvgate refuses what the engine's parser takes


def is_another_text(body: bytes) -> bool:
    """`json.loads` guesses UTF-16 and UTF-32, skips a byte order mark and lets surrogates pass."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return True
    return text.startswith("\ufeff") or b"\0" in body


def has_lone_surrogate(pairs: Any) -> bool:
    return any(
        isinstance(leaf, str) and any("\ud800" <= c <= "\udfff" for c in leaf) for leaf in leaves(pairs)
    )


def has_constants(body: bytes) -> bool:
    """NaN and the infinities."""
    found: list[str] = []
    json.loads(body, parse_constant=found.append)
    return bool(found)


def is_repeated(pairs: Any) -> bool:
    names = [name for name, _ in pairs]
    return len(set(names)) < len(names)


def is_out_of_range(value: Any) -> bool:
    """1e400, which is infinite to the engine's parser."""
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves(value))


def is_integer(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    low, high = INTEGERS[name]
    return math.isfinite(value) and value == int(value) and low <= value <= high


def is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def are_options(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and is_flag(value.get("include_usage"))
        and is_flag(value.get("continuous_usage_stats"))
    )


def are_messages(value: Any) -> bool:
    def is_content(content: Any) -> bool:
        if isinstance(content, list):
            return all(isinstance(part, str | dict) for part in content)
        return content is None or isinstance(content, str)

    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and is_content(m.get("content")) for m in value)
    )


def is_prompt(value: Any) -> bool:
    def are_ids(ids: Any) -> bool:
        return isinstance(ids, list) and bool(ids) and all(type(token) is int for token in ids)

    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, list) or not value:
        return False
    return are_ids(value) or all(map(are_ids, value)) or all(isinstance(text, str) and text for text in value)


def is_good(name: str, value: Any, fields: dict[str, Any]) -> bool:
    """A value that kvgate must not refuse."""
    chat = "messages" in fields
    if name == "logprobs" and isinstance(value, bool):
        return chat
    if name == "min_tokens" and is_integer(name, value):
        limits = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
        limit = next((fields[name] for name in limits if fields.get(name) is not None), math.inf)
        return (value or 0) <= limit
    if name in INTEGERS:
        return is_integer(name, value)
    checks: dict[str, Callable[[Any], bool]] = {
        "messages": are_messages,
        "prompt": is_prompt,
        "stream_options": are_options,
        "model": lambda model: model is None or isinstance(model, str),
        "tools": lambda tools: tools is None or isinstance(tools, list),
    }
    return not is_out_of_range(value) and checks.get(name, is_flag)(value)


def is_explained(refusal: Refusal, body: bytes) -> bool:
    """True where the body has what the refusal says."""
    fields, pairs = engine_reads(body), as_pairs(body)
    if refusal.code is Code.INVALID_JSON:
        texts = is_another_text(body) or has_lone_surrogate(pairs) or has_constants(body)
        return texts or not isinstance(fields, dict) or body.count(b"[") + body.count(b"{") > DEPTH_REFUSED
    if refusal.code is Code.DUPLICATE_FIELD:
        options = dict(pairs).get("stream_options")
        return is_repeated(pairs) or (isinstance(options, Pairs) and is_repeated(options))
    assert refusal.param, refusal
    if refusal.code is Code.MISSING_FIELD:
        return fields.get(refusal.param) is None
    return not is_good(refusal.param, fields.get(refusal.param), fields)


# The properties


def has_huge_integer(body: bytes) -> bool:
    """Python's parser reads no integer of more digits; one that kvgate does not read either is for the engine to
    refuse.
    """
    return re.search(rb"[0-9]{%d}" % (sys.get_int_max_str_digits() + 1), body) is not None


def check(endpoint: Endpoint, body: bytes) -> None:
    request = parse(endpoint, body, N_MAX)
    if is_refused_by_engine(body):
        assert isinstance(request, Refusal) or has_huge_integer(body)
    elif isinstance(request, Refusal):
        assert is_explained(request, body), request
    else:
        check_fields(request, engine_reads(body))
        sent = forward(request, LIMIT)
        assert repr(engine_reads(sent)) == repr(engine_gets(body, request))
        again = parse(endpoint, sent, N_MAX)
        assert isinstance(again, Refusal) or (again.output_limit, again.prompts) == (LIMIT, request.prompts)
        assert isinstance(again, GenerationRequest) or again.param == "min_tokens"


@settings(max_examples=300, deadline=None)
@given(CALLS)
@example((Endpoint.CHAT, b'{"messages":[{"role":"user","content":"a","content":"b"}]}'))
@example((Endpoint.CHAT, b'{"stream":true,"messages":[{"content":"a"}],"\\u0073tream":false}'))
@example(
    (
        Endpoint.CHAT,
        b'{"messages":[{"content":"a"}],"stream":true,"stream_options":{"include\\u005fusage":false}}',
    )
)
@example((Endpoint.CHAT, b'{"messages":[{}],"stream":true,"stream_options":{"continuous_usage_stats":true}}'))
@example((Endpoint.COMPLETIONS, b'{"prompt":["a","b"],"truncate_prompt_tokens":-1,"n":2,"best_of":3.0}'))
@example((Endpoint.COMPLETIONS, b'{"prompt":[1,-0],"max_tokens":1e1,"x":"\\"}","n":2.0}'))
@example((Endpoint.COMPLETIONS, b'{"prompt":"a","user":{"max_tokens":1,"max_tokens":2},"seed":-0}'))
def test_a_body_is_to_kvgate_what_it_is_to_the_engine(call: tuple[Endpoint, bytes]) -> None:
    check(*call)


@settings(max_examples=200, deadline=None)
@given(DAMAGED)
def test_a_damaged_body_too(call: tuple[Endpoint, bytes]) -> None:
    check(*call)


RESPONSE_ID = "resp_" + "0" * 32


@settings(max_examples=300, deadline=None)
@given(NEWER)
@example((Endpoint.RESPONSES, b'{"input":"a","request_id":{"request_id":"b"},"store":null}'))
@example((Endpoint.RESPONSES, b'{"input":[{"output":[{"text":"a"}],"content":"b"}],"store":false}'))
@example((Endpoint.EMBEDDINGS, b'{"input":[[{"role":"user","content":["a"]}]],"truncate_prompt_tokens":1e1}'))
def test_the_newer_routes_too(call: tuple[Endpoint, bytes]) -> None:
    """Nothing that can be sent breaks them, and only what has to be is changed."""
    endpoint, body = call
    request = parse(endpoint, body, N_MAX)
    if is_refused_by_engine(body):
        assert isinstance(request, Refusal) or has_huge_integer(body)
    elif isinstance(request, GenerationRequest):
        fields = engine_reads(body)
        if endpoint is Endpoint.RESPONSES:
            fields["max_output_tokens"] = LIMIT
            fields |= {} if fields.get("store") is False else {"request_id": RESPONSE_ID}
        sent = forward(request, LIMIT, RESPONSE_ID)
        assert repr(engine_reads(sent)) == repr(fields)
        assert len(request.prompt_tokens([1] * len(request.prompts))) == request.prompt_count


STRICTER = {
    "NaN": (b'{"prompt":"a","x":NaN}', Code.INVALID_JSON),
    "infinity": (b'{"prompt":"a","x":-Infinity}', Code.INVALID_JSON),
    "a key twice": (b'{"prompt":"a","prompt":"b"}', Code.DUPLICATE_FIELD),
    "a key twice, once escaped": (b'{"prompt":"a","pr\\u006fmpt":"b"}', Code.DUPLICATE_FIELD),
    "usage asked for twice": (
        b'{"prompt":"a","stream":true,"stream_options":{"include_usage":true,"include_usage":false}}',
        Code.DUPLICATE_FIELD,
    ),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt":"a"}', Code.INVALID_JSON),
    "UTF-16": ('{"prompt":"a"}'.encode("utf-16"), Code.INVALID_JSON),
    "UTF-32": ('{"prompt":"a"}'.encode("utf-32-be"), Code.INVALID_JSON),
    "a lone surrogate, escaped": (b'{"prompt":"a","x":"\\ud800"}', Code.INVALID_JSON),
    "a lone surrogate, in bytes": (b'{"prompt":"a","x":"\xed\xa0\x80"}', Code.INVALID_JSON),
    "a number out of range where it is read": (b'{"prompt":["a",1e400]}', Code.INVALID_VALUE),
    "a number of more than 64 bytes": (b'{"prompt":"a","n":1.%s}' % (b"0" * 80), Code.INVALID_VALUE),
    "no object": (b'["prompt"]', Code.INVALID_JSON),
    "more than 1,024 fields": (
        json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(1024)}).encode(),
        Code.INVALID_VALUE,
    ),
}


@pytest.mark.parametrize(("body", "code"), STRICTER.values(), ids=STRICTER)
def test_where_kvgate_is_stricter(body: bytes, code: Code) -> None:
    assert not is_refused_by_engine(body)
    refusal = parse(Endpoint.COMPLETIONS, body, N_MAX)
    assert isinstance(refusal, Refusal)
    assert refusal.code is code


def test_the_bodies_made_here_are_of_every_kind() -> None:
    """Else the properties above would hold of nothing."""
    seen: dict[str, int] = {}

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(CALLS)
    def look(call: tuple[Endpoint, bytes]) -> None:
        endpoint, body = call
        request = parse(endpoint, body, N_MAX)
        kind = request.code if isinstance(request, Refusal) else f"{endpoint.name}, stream: {request.stream}"
        seen[kind] = seen.get(kind, 0) + 1

    look()
    newer = Counter[Endpoint]()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(NEWER)
    def look_at_newer(call: tuple[Endpoint, bytes]) -> None:
        newer[call[0]] += isinstance(parse(*call, N_MAX), GenerationRequest)

    look_at_newer()
    assert set(+newer) == set(INPUTS), newer
    read = sum(count for kind, count in seen.items() if "stream" in kind)
    assert read > 50, seen
    assert {
        "CHAT, stream: True",
        "COMPLETIONS, stream: True",
        Code.INVALID_JSON,
        Code.DUPLICATE_FIELD,
    } <= set(seen)
