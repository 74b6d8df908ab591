"""Reading request bodies, and forwarding them with nothing changed but what must be."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import body as bodies
from gateway.core import prompt as prompts
from gateway.core.media import MEDIA_TOKENS, MediaRule
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import (
    ESCAPES_COUNTED_BYTES_MIN,
    LITERAL_BYTES_MAX,
    LITERAL_BYTES_MIN,
    MESSAGE_TOKENS,
    NAME_TOKENS,
    PIECES_MAX,
    REPLY_TOKENS,
    TOOL_TOKENS,
    PromptText,
    PromptTokens,
    literal_text,
)
from gateway.core.request import Endpoint, GenerationRequest, forward, parse

N_MAX = 16
USER = {"role": "user", "content": "hi"}


def encode(value: Any, spaced: bool = False) -> bytes:
    return json.dumps(value, separators=None if spaced else (",", ":")).encode()


def chat(**fields: Any) -> bytes:
    return encode({"model": "m", "messages": [USER]} | fields)


def completion(**fields: Any) -> bytes:
    return encode({"model": "m", "prompt": "hi"} | fields)


def with_raw(name: str, literal: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (name.encode(), literal.encode())


def read(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> GenerationRequest:
    request = parse(endpoint, body, N_MAX)
    assert isinstance(request, GenerationRequest), request
    return request


def refused(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> Refusal:
    refusal = parse(endpoint, body, N_MAX)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def text_of(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> PromptText:
    (prompt,) = read(body, endpoint).prompts
    assert isinstance(prompt, PromptText)
    return prompt


# Numbers


LIMITS = ("max_tokens", "max_completion_tokens")
COUNTS = ("n", "best_of")
NUMBERS = (*LIMITS, *COUNTS, "min_tokens", "logprobs", "top_logprobs", "seed", "truncate_prompt_tokens")
NEVER = ("1.5", '"100"', "[]", "{}", "1e400", "-1e400", "1" + "0" * 30, "9" * 5000, "1e18446744073709551616")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("literal", NEVER)
def test_what_is_no_integer_in_range_is_refused_by_name(name: str, literal: str) -> None:
    refusal = refused(with_raw(name, literal))
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, name)
    assert f"`{name}`" in refusal.message
    assert len(refusal.message) < 200


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "logprobs"])
@pytest.mark.parametrize("literal", ["true", "false"])
def test_booleans_are_no_numbers(name: str, literal: str) -> None:
    assert refused(with_raw(name, literal)).param == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_that_json_does_not_have(name: str, literal: str) -> None:
    refusal = refused(with_raw(name, literal))
    assert (refusal.code, refusal.param) == (Code.INVALID_JSON, name)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(("literal", "value"), [("10", 10), ("10.0", 10), ("1e1", 10), ("100e-1", 10)])
def test_ten_is_ten_however_it_is_written(name: str, literal: str, value: int) -> None:
    fields = dict.fromkeys(LIMITS, 20) | {"n": 1}
    fields.pop(name, None)
    request = read(encode(fields | {"messages": [USER]})[:-1] + f',"{name}":{literal}}}'.encode())
    if name in COUNTS:
        assert request.sequences == value
    elif name == "max_completion_tokens":
        assert request.output_limit == value
    elif name in ("min_tokens", "truncate_prompt_tokens"):
        assert getattr(request, name) == value


@pytest.mark.parametrize("name", NUMBERS)
def test_null_is_absent(name: str) -> None:
    assert read(with_raw(name, "null")).output_limit is None


@pytest.mark.parametrize(
    ("name", "smallest", "largest"),
    [
        ("max_tokens", 1, 2**31 - 1),
        ("max_completion_tokens", 1, 2**31 - 1),
        ("n", 1, N_MAX),
        ("best_of", 1, N_MAX),
        ("logprobs", 0, 2**31 - 1),
        ("top_logprobs", 0, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
        ("truncate_prompt_tokens", -1, 2**31 - 1),
    ],
)
def test_bounds(name: str, smallest: int, largest: int) -> None:
    read(with_raw(name, str(smallest)))
    read(with_raw(name, str(largest)))
    assert refused(with_raw(name, str(smallest - 1))).param == name
    assert refused(with_raw(name, str(largest + 1))).param == name


def test_too_many_sequences_has_a_code_of_its_own() -> None:
    for name in COUNTS:
        refusal = refused(with_raw(name, "100000"))
        assert (refusal.code, refusal.param) == (Code.TOO_MANY_SEQUENCES, name)
        assert "100000" in refusal.message
        assert str(N_MAX) in refusal.message


def test_chat_logprobs_is_a_flag_and_completions_logprobs_a_number() -> None:
    read(chat(logprobs=True, top_logprobs=5))
    read(completion(logprobs=5), Endpoint.COMPLETIONS)
    assert refused(completion(logprobs=True), Endpoint.COMPLETIONS).param == "logprobs"


def test_min_tokens_over_the_output_limit() -> None:
    refusal = refused(chat(min_tokens=4000, max_tokens=10))
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "min_tokens")
    assert read(chat(min_tokens=10, max_tokens=10)).min_tokens == 10


# Which output limit counts


@pytest.mark.parametrize(
    ("fields", "limit", "field"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 8000}, 8000, "max_completion_tokens"),
        ({"max_tokens": 50, "max_completion_tokens": None}, 50, "max_tokens"),
        ({"max_tokens": None}, None, "max_completion_tokens"),
        ({}, None, "max_completion_tokens"),
    ],
)
def test_chat_output_limit(fields: dict[str, Any], limit: int | None, field: str) -> None:
    request = read(chat(**fields))
    assert (request.output_limit, request.limit_field) == (limit, field)


def test_completions_ignore_max_completion_tokens_as_the_engine_does() -> None:
    request = read(completion(max_completion_tokens=8000), Endpoint.COMPLETIONS)
    assert request.output_limit is None
    assert json.loads(forward(request, 16)) == json.loads(
        completion(max_completion_tokens=8000, max_tokens=16)
    )


# JSON


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"[]",
        b'"text"',
        b"null",
        b"{",
        b'{"messages":[]',
        b'{"messages":[]}x',
        b"{'messages':[]}",
        b'{"messages":[],}',
        b'{"a":01}',
        b'{"a":"\xff"}',
        b'{"a":"\n"}',
        b'{"a":"\\x"}',
        b'\xef\xbb\xbf{"messages":[]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00 "}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b"[" * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"temperature":NaN,"messages":[]}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_not_json(body: bytes) -> None:
    assert refused(body).code is Code.INVALID_JSON


@pytest.mark.parametrize(
    "tail",
    [
        b'"max_tokens":1,"max_tokens":8000',
        b'"max_tokens":1,"max_tokens":1',
        b'"max_tokens":1,"max_tokens":12',
        b'"max_tokens":12,"max_tokens":1',
        b'"max_tokens":1,"max\\u005ftokens":8000',
        b'"max\\u005Ftokens":1,"max_tokens":1',
        b'"max_tokens":{"a":",\\"max_tokens\\":1"},"max_tokens":1',
        b'"max_tokens":"a","max_tokens":"a,b"',
        # Who took the last value's length for the first one's would go on within the last, and come out at the end.
        b'"max_tokens":0,"m":11,"max_tokens":{"x":5,"m":' + b" " * 15 + b"1}",
    ],
)
def test_a_key_that_comes_twice(tail: bytes) -> None:
    refusal = refused(b'{"messages":[{"role":"user","content":"hi"}],' + tail + b"}")
    assert (refusal.code, refusal.param) == (Code.DUPLICATE_FIELD, "max_tokens")


def test_too_many_fields() -> None:
    assert refused(encode({f"k{i}": 1 for i in range(2000)})).code is Code.INVALID_VALUE


@pytest.mark.parametrize(
    ("values", "most", "around", "words"),
    [
        (b"[],", bodies.CONTAINERS_MAX, 4, "200000 lists and objects"),
        (b"{},", bodies.CONTAINERS_MAX, 4, "200000 lists and objects"),
        (b"0,", bodies.COMMAS_MAX, 2, "1500000 commas"),
        (b'"::::::::::..........",', bodies.COLONS_MAX // 10, 1, "250000 colons"),
    ],
    ids=["lists", "objects", "commas", "colons"],
)
def test_too_many_values_are_refused_before_they_are_read(
    values: bytes, most: int, around: int, words: str
) -> None:
    """`around` are those of the rest of the body."""
    head = b'{"messages":[{"role":"user","content":"hi","z":['
    read(head + values * (most - around) + b"0]}]}")
    refusal = refused(head + values * (most - around + 1))
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, None)
    assert words in refusal.message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEY = st.sampled_from(["a", "b", "max_tokens", 'q"', "\\", "é", "}", ""]) | st.text(max_size=3)
SPACE = st.sampled_from(["", " ", "\n\t", "\r\n  "])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Objects with white space, escapes and now and then a repeated key."""
    members = draw(
        st.lists(st.tuples(KEY, JSON, SPACE, SPACE, SPACE, st.booleans(), st.booleans()), max_size=5)
    )
    parts = [
        f"{a}{json.dumps(key, ensure_ascii=k)}{b}:{c}{json.dumps(value, ensure_ascii=v)}{a}"
        for key, value, a, b, c, k, v in members
    ]
    return (draw(SPACE) + "{" + (",".join(parts) or draw(SPACE)) + "}" + draw(SPACE)).encode(errors="replace")


@given(documents())
def test_members_are_what_the_standard_library_reads(body: bytes) -> None:
    pairs = json.loads(body, object_pairs_hook=lambda pairs: pairs if pairs else {})
    names = [name for name, _ in pairs] if isinstance(pairs, list) else []
    if len(set(names)) < len(names):
        with pytest.raises(bodies.Refused) as raised:
            bodies.read_members(body)
        assert raised.value.refusal.code is Code.DUPLICATE_FIELD
        return
    members = bodies.read_members(body)
    assert list(members) == names
    plain = json.loads(body)
    for name, member in members.items():
        assert body[member.start : member.end] == member.raw
        assert json.loads(member.raw) == plain[name]


@given(
    st.lists(st.tuples(KEY | st.sampled_from(["n", "model"]), JSON), max_size=5),
    st.sampled_from([(",", ":"), (", ", ": "), (", ", ":"), (",", ": ")]),
    st.booleans(),
)
def test_members_are_found_however_a_library_sets_them(
    members: list[tuple[str, Any]], separators: tuple[str, str], escapes: bool
) -> None:
    """Without other white space, as nearly all bodies are; a key that comes twice is found there, too."""
    comma, colon = separators
    parts = [
        json.dumps(name, ensure_ascii=escapes) + colon + json.dumps(value, separators=separators)
        for name, value in members
    ]
    body = ("{" + comma.join(parts) + "}").encode()
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        with pytest.raises(bodies.Refused) as raised:
            bodies.read_members(body)
        assert raised.value.refusal.code is Code.DUPLICATE_FIELD
        return
    found = bodies.read_members(body)
    assert list(found) == names
    for name, value in members:
        assert found[name].raw == body[found[name].start : found[name].end]
        assert json.loads(found[name].raw) == value


@pytest.mark.parametrize(
    "body",
    [
        b'{"n": 1, "n": 12}',
        b'{"n": 12, "n": 1}',
        b'{"a": "b", "a": "b"}',
        b'{"a":1,"b":2,"a":1}',
        b'{"a": 1, "b": ", \\"a\\": 1", "a": 1}',
        b'{"a": 1,"a":  1}',
    ],
)
def test_a_field_that_comes_twice_is_found_in_any_setting(body: bytes) -> None:
    with pytest.raises(bodies.Refused) as raised:
        bodies.read_members(body)
    assert raised.value.refusal.code is Code.DUPLICATE_FIELD


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ 01eNa-.\n"').map(str.encode))
def test_any_bytes_are_read_or_refused_and_never_more_leniently_than_by_the_standard_library(
    body: bytes,
) -> None:
    try:
        members = bodies.read_members(body)
    except bodies.Refused:
        return
    assert list(json.loads(body)) == list(members)


# Prompts of completions


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([1, 2, 3], (3,)), ([[1, 2], [3]], (2, 1)), ([7], (1,))],
)
def test_token_ids_count_exactly(prompt: Any, tokens: tuple[int, ...]) -> None:
    request = read(completion(prompt=prompt), Endpoint.COMPLETIONS)
    assert request.prompts == tuple(PromptTokens(t) for t in tokens)


def test_every_text_is_a_prompt_of_its_own() -> None:
    request = read(completion(prompt=["a", "é"], n=3), Endpoint.COMPLETIONS)
    assert request.prompts == (PromptText(("a",), 1, 1), PromptText(("é",), 1, 2))
    assert (request.sequences_per_prompt, request.sequences) == (3, 6)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, [2]], [1.5], [True], 5, {}, [None]]
)
def test_prompts_that_no_engine_takes(prompt: Any) -> None:
    refusal = refused(completion(prompt=prompt), Endpoint.COMPLETIONS)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "prompt")


@pytest.mark.parametrize("body", [b"{}", b'{"prompt":null}'])
def test_prompt_missing(body: bytes) -> None:
    refusal = refused(body, Endpoint.COMPLETIONS)
    assert (refusal.code, refusal.param) == (Code.MISSING_FIELD, "prompt")


def test_prompts_times_choices_are_bounded() -> None:
    read(completion(prompt=["a"] * 1024), Endpoint.COMPLETIONS)
    for fields in ({"prompt": ["a"] * 1025}, {"prompt": ["a"] * 513, "n": 2}):
        refusal = refused(completion(**fields), Endpoint.COMPLETIONS)
        assert (refusal.code, refusal.param) == (Code.TOO_MANY_SEQUENCES, "prompt")


def test_best_of_counts_as_the_larger() -> None:
    assert read(completion(best_of=4, n=1), Endpoint.COMPLETIONS).sequences == 4
    assert read(completion(n=4, use_beam_search=True), Endpoint.COMPLETIONS).sequences == 4


def test_what_cannot_be_counted_is_refused() -> None:
    for wrong in (7, {}, [7], ["AAAA", None], [["AAAA"]]):
        assert refused(completion(prompt_embeds=wrong), Endpoint.COMPLETIONS).param == "prompt_embeds"
    refusal = refused(completion(prompt_embeds=["A"] * 1025), Endpoint.COMPLETIONS)
    assert (refusal.code, refusal.param) == (Code.TOO_MANY_SEQUENCES, "prompt_embeds")
    for nothing in (None, []):
        assert len(read(completion(prompt_embeds=nothing), Endpoint.COMPLETIONS).prompts) == 1
        assert refused(encode({"prompt_embeds": nothing}), Endpoint.COMPLETIONS).param == "prompt"


@pytest.mark.parametrize(("given", "texts"), [({}, 0), ({"prompt": ""}, 1), ({"prompt": ["a", "b"]}, 2)])
@pytest.mark.parametrize(("tensors", "count"), [("AAAA", 1), (["AAAA", "BBBB"], 2)])
def test_a_tensor_is_a_prompt_that_counts_what_the_fleet_says(
    given: dict[str, Any], texts: int, tensors: Any, count: int
) -> None:
    """And none is decoded; a fleet that says nothing takes none."""
    body = encode({**given, "prompt_embeds": tensors, "max_tokens": 4})
    request = read(body, Endpoint.COMPLETIONS)
    assert request.sequences == count + texts
    refusal = request.not_taken(MediaRule())
    assert refusal is not None
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "prompt_embeds")
    rule = MediaRule(tensor_tokens=77)
    assert request.not_taken(rule) is None
    first = request.by_rule(rule).prompts[0]
    assert isinstance(first, PromptText)
    assert (first.fixed_tokens, first.media_tokens, first.texts, first.is_text_alone) == (77, 77, (), False)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", [{}, {"do_remote_decode": True}, 1])
def test_what_makes_an_engine_keep_blocks_after_its_answer_is_refused(name: str, value: Any) -> None:
    for body, endpoint in ((chat, Endpoint.CHAT), (completion, Endpoint.COMPLETIONS)):
        refusal = refused(body(**{name: value}), endpoint)
        assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, name)
        read(body(**{name: None}), endpoint)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", ["x", 1, [1], {}, None])
def test_an_engine_finds_no_transfer_in_the_words_for_its_extensions(name: str, value: Any) -> None:
    """It looks there for what those fields hold, and does not expect anything but an object."""
    extras = {"vllm_xargs": {"key": "value", name: value}}
    bodies = {
        Endpoint.CHAT: chat(**extras),
        Endpoint.COMPLETIONS: completion(**extras),
        Endpoint.MESSAGES: chat(max_tokens=9, **extras),
        Endpoint.RESPONSES: completion(input="x", **extras),
    }
    for endpoint, body in bodies.items():
        refusal = refused(body, endpoint)
        assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "vllm_xargs")
        assert name in refusal.message
    for harmless in (None, {}, {"key": name}, name, [name]):
        read(chat(vllm_xargs=harmless), Endpoint.CHAT)


# Chats


def test_the_frame_of_a_chat() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "name": "ann", "content": "é"}]
    prompt = text_of(chat(messages=messages))
    assert prompt == PromptText(("be brief", "ann", "é"), 2 * MESSAGE_TOKENS + NAME_TOKENS + REPLY_TOKENS, 13)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", None])
def test_a_usual_role_is_part_of_the_frame(role: str | None) -> None:
    assert text_of(chat(messages=[{"role": role, "content": "hi"}])).texts == ("hi",)


@pytest.mark.parametrize(
    ("role", "text"), [("word " * 10_000, "word " * 10_000), ("👻" * 16,) * 2, ({"a": [1]}, '{"a":[1]}')]
)
def test_any_other_role_is_text(role: Any, text: str) -> None:
    assert text_of(chat(messages=[{"role": role, "content": "hi"}])).texts == (text, "hi")


def test_media_cost_a_fixed_number_whatever_their_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    parts = [{"type": "text", "text": "look"}, image, image, {"type": "input_audio"}, {"type": "hologram"}]
    prompt = text_of(chat(messages=[{"role": "user", "content": parts}]))
    assert prompt.texts == ("look",)
    assert prompt.fixed_tokens == 4 * MEDIA_TOKENS + MESSAGE_TOKENS + REPLY_TOKENS


def test_tools_calls_and_schemas_count_as_compact_json() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "é"}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    schema = {"name": "s", "schema": {"type": "object"}}
    fields = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": tools,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    prompt = text_of(encode(fields, spaced=True))
    assert prompt.texts == tuple(
        json.dumps(value, separators=(",", ":"), ensure_ascii=False) for value in ([call], tools, schema)
    )
    assert prompt.fixed_tokens == MESSAGE_TOKENS + REPLY_TOKENS + 2 * TOOL_TOKENS


def test_everything_else_that_a_template_may_show_counts() -> None:
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "b"}]
    assert text_of(chat(messages=messages, documents=[{"text": "c"}])).texts == ("a", "b", '[{"text":"c"}]')


def decoded(prompt: PromptText) -> tuple[str, ...]:
    return tuple(text if isinstance(text, str) else literal_text(text) for text in prompt.texts)


def test_strings_that_are_neither_short_nor_long_stay_as_they_stand() -> None:
    lengths = [LITERAL_BYTES_MIN - 1, LITERAL_BYTES_MIN, LITERAL_BYTES_MAX, LITERAL_BYTES_MAX + 1]
    texts = ["x" * (length - len('""')) for length in lengths]
    prompt = text_of(chat(messages=[{"role": "user", "content": text} for text in texts]))
    assert [isinstance(text, str) for text in prompt.texts] == [True, False, False, True]
    assert decoded(prompt) == tuple(texts)
    assert (prompt.utf8_bytes, prompt.escape_bytes) == (sum(map(len, texts)), 0)


@given(
    st.lists(
        st.text(st.sampled_from('"\\/ \n\t\x00aé日😀\u2028'), min_size=1).map(lambda text: text * 600),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_strings_that_stay_are_what_the_engine_reads(texts: list[str], ascii_only: bool) -> None:
    messages = [{"role": "user", "content": text, "reasoning": text} for text in texts]
    prompt = text_of(json.dumps({"messages": messages}, ensure_ascii=ascii_only).encode())
    assert decoded(prompt) == tuple(text for text in texts for _ in range(2))
    real = sum(len(text.encode()) for text in decoded(prompt))
    assert prompt.utf8_bytes - prompt.escape_bytes <= real <= prompt.utf8_bytes


def test_the_escapes_of_a_very_long_prompt_are_counted() -> None:
    text = "line after line\n" * 800
    messages = [{"role": "user", "content": text}] * (ESCAPES_COUNTED_BYTES_MIN // len(text) + 1)
    prompt = text_of(chat(messages=messages))
    real = len(text) * len(messages)
    assert real * 0.7 < prompt.utf8_bytes - prompt.escape_bytes <= real


@pytest.mark.parametrize(
    "content",
    ['"' + "x" * 600 + escape + '"' for escape in ("\\ud800", "\\q", "\\u12", "\x01", "\\udc00\\ud800")],
)
def test_no_string_stays_that_cannot_be_decoded(content: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":{content}}}]}}'.encode()
    assert refused(body).code is Code.INVALID_JSON


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, Code.MISSING_FIELD),
        ([], Code.INVALID_VALUE),
        ("hi", Code.INVALID_VALUE),
        (["hi"], Code.INVALID_VALUE),
        ([{"role": "user", "content": 5}], Code.INVALID_VALUE),
        ([{"role": "user", "content": [5]}], Code.INVALID_VALUE),
        ([{}] * (PIECES_MAX + 1), Code.INVALID_VALUE),
        ([{"content": ["x"] * (PIECES_MAX + 1)}], Code.INVALID_VALUE),
        ([{"content": [{}] * (PIECES_MAX + 1)}], Code.INVALID_VALUE),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_messages_that_are_none(messages: Any, code: Code) -> None:
    refusal = refused(chat(messages=messages))
    assert (refusal.code, refusal.param) == (code, "messages")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream", 1), ("stream", "true"), ("model", 5), ("use_beam_search", 1), ("tools", {})],
)
def test_fields_of_another_type(name: str, value: Any) -> None:
    refusal = refused(chat(**{name: value}))
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, name)


def test_a_message_shows_no_more_than_the_start_of_a_wrong_value() -> None:
    refusal = refused(chat(max_tokens="secret" * 1000))
    assert len(refusal.message) < 120


# Forwarding


@pytest.mark.parametrize(
    ("body", "forwarded"),
    [
        (b'{"messages":M}', b'{"messages":M,"max_completion_tokens":7}'),
        (b'{ "messages" : M\n}\n', b'{ "messages" : M\n,"max_completion_tokens":7}\n'),
        (b'{"max_tokens":1e1,"messages":M}', b'{"max_tokens":7,"messages":M}'),
        (b'{"max_tokens" : null ,"messages":M}', b'{"max_tokens" : 7 ,"messages":M}'),
        (
            b'{"max_completion_tokens":9,"messages":M,"max\\u005ftokens":1}',
            b'{"max_completion_tokens":7,"messages":M,"max\\u005ftokens":7}',
        ),
        (
            b'{"stream":true,"messages":M}',
            b'{"stream":true,"messages":M,"max_completion_tokens":7,"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"stream_options":null,"stream":true,"messages":M,"max_tokens":2}',
            b'{"stream_options":{"include_usage":true},"stream":true,"messages":M,"max_tokens":7}',
        ),
        (
            b'{"stream":true,"stream_options":{ },"max_tokens":2,"messages":M}',
            b'{"stream":true,"stream_options":{ "include_usage":true},"max_tokens":7,"messages":M}',
        ),
        (
            b'{"stream":true,"stream_options":{"x": 1.50 },"max_tokens":2,"messages":M}',
            b'{"stream":true,"stream_options":{"x": 1.50 ,"include_usage":true},"max_tokens":7,"messages":M}',
        ),
        (
            b'{"max_tokens":2,"stream":true,"stream_options":{"include_usage": false, "x":"\xc3\xa9"},"messages":M}',
            b'{"max_tokens":7,"stream":true,"stream_options":{"include_usage": true, "x":"\xc3\xa9"},"messages":M}',
        ),
        (
            b'{"stream":true,"stream_options":{"include_usage": true},"max_tokens":2,"messages":M}',
            b'{"stream":true,"stream_options":{"include_usage": true},"max_tokens":7,"messages":M}',
        ),
        (
            b'{"stream":false,"stream_options":{"include_usage":false},"max_tokens":2,"messages":M}',
            b'{"stream":false,"stream_options":{"include_usage":false},"max_tokens":7,"messages":M}',
        ),
        (b'{"stream":null,"max_tokens":2,"messages":M}', b'{"stream":null,"max_tokens":7,"messages":M}'),
    ],
)
def test_forwarded_bytes(body: bytes, forwarded: bytes) -> None:
    messages = '[{"role":"user","content":"a } , \\" é<|endoftext|>"}]'.encode()
    body, forwarded = (text.replace(b"M", messages) for text in (body, forwarded))
    assert forward(read(body), 7) == forwarded


def test_completions_get_max_tokens() -> None:
    assert json.loads(forward(read(completion(), Endpoint.COMPLETIONS), 16))["max_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": True}}, False),
        ({"stream": False, "stream_options": {"include_usage": True}}, False),
    ],
)
def test_what_usage_the_client_asked_for(fields: dict[str, Any], asked: bool) -> None:
    assert read(chat(**fields)).include_usage_asked == asked


@pytest.mark.parametrize("given", [{}, {"include_usage": False}, {"include_usage": None}])
def test_usage_in_every_event_is_not_brought_about(given: dict[str, Any]) -> None:
    """vLLM heeds `continuous_usage_stats` only beside `include_usage`, which is ours here."""
    options = given | {"continuous_usage_stats": True}
    sent = json.loads(forward(read(chat(stream=True, stream_options=options)), 7))
    assert sent["stream_options"] == {"include_usage": True}


METERED = b'{"include_usage":true,"continuous_usage_stats":true}'


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b"", b',"stream_options":' + METERED),
        (b',"stream_options":null', b',"stream_options":' + METERED),
        (b',"stream_options":{}', b',"stream_options":' + METERED),
        (
            b',"stream_options":{"x": 1 , "include_usage":false}',
            b',"stream_options":{"x": 1 , "include_usage":true,"continuous_usage_stats":true}',
        ),
        (
            b',"stream_options":{"continuous_usage_stats" : null,"include_usage":true}',
            b',"stream_options":{"continuous_usage_stats" : true,"include_usage":true}',
        ),
        (b',"stream_options":{"continuous_usage_stats":true}', b',"stream_options":' + METERED),
        (b',"stream_options":' + METERED, b',"stream_options":' + METERED),
    ],
)
def test_usage_in_every_event_is_asked_for_where_the_call_is_metered(given: bytes, sent: bytes) -> None:
    head = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":7,"stream":true'
    request = read(head + given + b"}")
    assert forward(request, 7, metered=True) == head + sent + b"}"
    assert request.meter_asked == (given == b',"stream_options":' + METERED)


@pytest.mark.parametrize("options", [[], "x", 1, {"include_usage": 1}])
def test_stream_options_of_another_type(options: Any) -> None:
    assert refused(chat(stream=True, stream_options=options)).param == "stream_options"


def test_usage_asked_twice_is_refused() -> None:
    body = chat(stream=True)[:-1] + b',"stream_options":{"include_usage":true,"include_usage":false}}'
    assert refused(body).code is Code.DUPLICATE_FIELD


FIELDS = {
    "max_tokens": st.none() | st.integers(1, 9999),
    "max_completion_tokens": st.none() | st.integers(1, 9999),
    "stream": st.none() | st.booleans(),
    "stream_options": st.none()
    | st.dictionaries(st.text(max_size=3), JSON, max_size=2).flatmap(
        lambda rest: st.sampled_from([rest, rest | {"include_usage": False}, {"include_usage": True} | rest])
    ),
    "user": JSON,
    "é": JSON,
}


@given(
    st.lists(st.sampled_from(sorted(FIELDS)), unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
    st.integers(1, 2**31 - 1),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_forwarding_changes_the_limit_and_usage_alone(
    fields: dict[str, Any], limit: int, spaced: bool, ascii_only: bool, metered: bool
) -> None:
    fields = fields | {"messages": [{"role": "user", "content": "é\u2028"}]}
    separators = None if spaced else (",", ":")
    body = json.dumps(fields, separators=separators, ensure_ascii=ascii_only).encode(errors="replace")
    request = parse(Endpoint.CHAT, body, N_MAX)
    if isinstance(request, Refusal):  # a lone surrogate
        assert request.code is Code.INVALID_JSON
        return
    sent = forward(request, limit, metered=metered)
    expected = json.loads(body)
    present = [name for name in ("max_completion_tokens", "max_tokens") if name in expected]
    expected |= dict.fromkeys(present or ["max_completion_tokens"], limit)
    if expected.get("stream"):
        options = expected.get("stream_options") or {}
        alone = options.get("continuous_usage_stats") and not options.get("include_usage")
        wanted = {"include_usage": True} | ({"continuous_usage_stats": True} if metered else {})
        expected["stream_options"] = ({} if alone else options) | wanted
    assert json.loads(sent) == expected
    assert forward(read(sent), limit, metered=metered) == sent


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("[7]", 1), ("[ 1 ,\n2\t, 30 ]", 3), ("[1,-2]", 2), ("[0,0,0,0]", 4)]
)
def test_ids_are_counted_however_they_are_spaced(prompt: str, tokens: int) -> None:
    body = f'{{"model": "m", "prompt": {prompt}, "max_tokens": 1}}'.encode()
    request = parse(Endpoint.COMPLETIONS, body, n_max=16)
    assert isinstance(request, GenerationRequest)
    assert request.prompts == (PromptTokens(tokens),)


# What may be shared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({}, b""),
        ({"cache_salt": "a"}, b'cache_salt="a"'),
        ({"cache_salt": "a", "tool_choice": "none"}, b'cache_salt="a",tool_choice="none"'),
        ({"prompt_logprobs": 0}, None),
        ({"prompt_logprobs": None, "echo": False, "use_beam_search": False}, b""),
        ({"echo": True}, None),
        ({"use_beam_search": True}, None),
        ({"echo": "yes"}, None),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_what_a_body_says_of_sharing(make: Any, fields: dict[str, Any], beside: bytes | None) -> None:
    endpoint = Endpoint.CHAT if make is chat else Endpoint.COMPLETIONS
    request = read(make(**fields), endpoint)
    assert request.beside == beside
    assert request.may_share == (beside is not None)


IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.CHAT, chat(n=2)),
        (Endpoint.CHAT, chat(truncate_prompt_tokens=0)),
        (Endpoint.CHAT, chat(truncate_prompt_tokens=-1)),
        (Endpoint.CHAT, chat(messages=[IMAGE])),
        (Endpoint.CHAT_BATCH, chat(messages=[[USER]])),
        (Endpoint.COMPLETIONS, completion(prompt=["a", "b"])),
        (Endpoint.COMPLETIONS, completion(prompt_embeds="AAAA")),
        (Endpoint.COMPLETIONS, encode({"model": "m", "prompt_embeds": "AAAA"})),
        (Endpoint.EMBEDDINGS, encode({"model": "m", "input": "hi"})),
        (Endpoint.RESPONSES, encode({"model": "m", "input": "hi", "previous_response_id": "resp_1"})),
    ],
)
def test_what_is_not_one_prompt_of_tokens_alone_is_not_shared(endpoint: Endpoint, body: bytes) -> None:
    assert not read(body, endpoint).may_share


def test_ids_are_read_as_they_were_counted() -> None:
    assert prompts.read_ids(completion(prompt=[1, 2, 3])) == [1, 2, 3]
    assert prompts.read_ids(completion(prompt=[[1, 2, 3]])) == [1, 2, 3]
    for wrong in ([[1], [2]], [-1], [2**53]):
        with pytest.raises(msgspec.ValidationError):
            prompts.read_ids(completion(prompt=wrong))
