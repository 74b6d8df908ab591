"""Key order and content of the answers, against those recorded from a real vLLM 0.32.0."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock import openai
from gateway.mock.calls import Call, Server, parse_chat, parse_text
from gateway.mock.engine import EngineConfig, Token
from gateway.mock.openai import OpenAIStream, full_answer
from gateway.mock.options import Options
from gateway.mock.progress import Extras, Progress

HEAD = {"created": 1, "model": "tiny"}
FINGERPRINT = openai.FINGERPRINT


def call(chat: bool, **fields: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [7] * 7}
    server = Server(EngineConfig(model="tiny"), Options())
    return (parse_chat if chat else parse_text)(
        {"stream": True, "max_tokens": 2} | body | fields, "x", server
    )


def stream(one: Call, *tokens: tuple[int, int, bool]) -> list[str]:
    shape = OpenAIStream(one, 1)
    events = [
        event for index, number, last in tokens for event in shape.tokens([Token("x", index, number, last)])
    ]
    events += shape.close()
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    return [event[6:-2].decode() for event in events]


def dump(*values: object) -> list[str]:
    return [json.dumps(value, separators=(",", ":")) for value in values]


def chat_chunk(choices: list[object], **more: object) -> dict[str, object]:
    return {"id": "chatcmpl-x", "object": "chat.completion.chunk", **HEAD, "choices": choices, **more}


def text_chunk(choices: list[object], **more: object) -> dict[str, object]:
    return {"id": "cmpl-x", "object": "text_completion", **HEAD, "choices": choices, **more}


def role(index: int = 0) -> dict[str, object]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def content(text: str, index: int = 0) -> dict[str, object]:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return choice | {"token_ids": None}


def ended(text: str, reason: str, index: int = 0) -> dict[str, object]:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    return choice | {"stop_reason": None, "token_ids": None}


def text_choice(text: str, reason: str | None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    return choice | {"prompt_token_ids": None, "token_ids": None}


NO_PROMPT = {"prompt_token_ids": None, "prompt_text": None}


def test_a_chat_stream() -> None:
    assert stream(call(True), (0, 1, False), (0, 2, True)) == [
        *dump(
            chat_chunk([role()], **NO_PROMPT),
            chat_chunk([content(" lorem")]),
            chat_chunk([ended(" ipsum", "length")], system_fingerprint=FINGERPRINT),
        ),
        "[DONE]",
    ]


def test_a_chat_stream_with_usage_carries_the_fingerprint_in_the_usage_frame() -> None:
    events = stream(call(True, stream_options={"include_usage": True}), (0, 1, False), (0, 2, True))
    usage = {"prompt_tokens": 8, "total_tokens": 10, "completion_tokens": 2}
    assert events[-3:] == [
        *dump(
            chat_chunk([ended(" ipsum", "length")]),
            chat_chunk([], usage=usage, system_fingerprint=FINGERPRINT),
        ),
        "[DONE]",
    ]


def test_continuous_usage_is_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first = {"prompt_tokens": 8, "total_tokens": 8, "completion_tokens": 0, "completion_tokens_details": None}
    second = {
        "prompt_tokens": 8,
        "total_tokens": 9,
        "completion_tokens": 1,
        "completion_tokens_details": None,
    }
    events = stream(call(True, stream_options=options), (0, 1, False))
    assert events[:2] == dump(
        chat_chunk([role()], usage=first, **NO_PROMPT), chat_chunk([content(" lorem")], usage=second)
    )
    text = stream(call(False, stream_options=options), (0, 1, False))
    usage = {"prompt_tokens": 7, "total_tokens": 8, "completion_tokens": 1}
    assert text[0] == dump(text_chunk([text_choice(" lorem", None)], usage=usage))[0]


def test_a_completion_stream() -> None:
    assert stream(call(False), (0, 1, False), (0, 2, True)) == [
        *dump(
            text_chunk([text_choice(" lorem", None)]),
            text_chunk([text_choice(" ipsum", "length")], system_fingerprint=FINGERPRINT),
        ),
        "[DONE]",
    ]


def test_choices_interleave_after_all_roles_and_the_prompt_counts_once() -> None:
    one = call(True, n=2, stream_options={"include_usage": True})
    events = stream(one, (0, 1, False), (1, 1, False), (0, 2, True), (1, 2, True))
    assert events[:2] == dump(chat_chunk([role(0)], **NO_PROMPT), chat_chunk([role(1)], **NO_PROMPT))
    assert [json.loads(event)["choices"][0]["index"] for event in events[2:-2]] == [0, 1, 0, 1]
    assert json.loads(events[-2])["usage"] == {"prompt_tokens": 8, "total_tokens": 12, "completion_tokens": 4}


def test_sigterm_ends_a_started_stream_with_abort_and_an_unstarted_one_with_done_alone() -> None:
    shape = OpenAIStream(call(False), 1)
    list(shape.tokens([Token("x", 0, 1, False)]))
    assert [*shape.abort(), *shape.close()] == [
        b"data: %s\n\n"
        % dump(text_chunk([text_choice("", "abort")], system_fingerprint=FINGERPRINT))[0].encode(),
        openai.DONE,
    ]
    waiting = OpenAIStream(call(True, stream_options={"include_usage": True}), 1)
    assert [*waiting.abort(), *waiting.close()] == [openai.DONE]


def test_whole_answers() -> None:
    progress = Progress(call(True))
    progress.see(Token("x", 0, 2, True))
    usage = {"prompt_tokens": 8, "total_tokens": 10, "completion_tokens": 2}
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
    end = {"logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None}
    message = {"role": "assistant", "content": " lorem ipsum"} | nothing
    choice: dict[str, object] = {"index": 0, "message": message} | end | {"routed_experts": None}
    expected = {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        **HEAD,
        "choices": [choice],
        "service_tier": None,
    }
    expected |= {
        "system_fingerprint": FINGERPRINT,
        "usage": usage | details,
        "prompt_logprobs": None,
    } | NO_PROMPT
    tail = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    assert dump(full_answer(progress, 1)) == dump(expected | tail)

    progress = Progress(call(False))
    progress.see(Token("x", 0, 1, False))
    end |= {
        "finish_reason": "abort",
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }
    usage = {"prompt_tokens": 7, "total_tokens": 8, "completion_tokens": 1}
    choice = {"index": 0, "text": " lorem"} | end
    expected = {
        "id": "cmpl-x",
        "object": "text_completion",
        **HEAD,
        "choices": [choice],
        "service_tier": None,
    }
    expected |= {"system_fingerprint": FINGERPRINT, "usage": usage | details}
    assert dump(full_answer(progress, 1)) == dump(expected | tail)


def texts(frames: list[bytes]) -> list[str]:
    documents = [json.loads(frame[6:]) for frame in frames if frame != openai.DONE]
    choices = [document["choices"][0] for document in documents if document["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]


@given(chat=st.booleans(), index=st.integers(0, 2), number=st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_the_quick_frame_is_the_slow_frame(chat: bool, index: int, number: int) -> None:
    """One token in the middle of a plain call is put together from bytes: the same bytes as by JSON."""
    one = call(chat, n=3, max_tokens=50)
    quick, slow = OpenAIStream(one, 1), OpenAIStream(one, 1)
    for shape in (quick, slow):
        shape.tokens([Token("x", index, number - 1, False)])
    slow._plain = False
    token = Token("x", index, number, False)
    assert quick.tokens([token]) == slow.tokens([token])
    assert (quick.progress.counts, quick.progress.told) == (slow.progress.counts, slow.progress.told)


def test_tokens_at_hand_are_merged_into_one_chunk_for_each_choice() -> None:
    shape = OpenAIStream(call(False, n=2, max_tokens=5), 1)
    tokens = [Token("x", index, number, False) for number in (1, 2, 3) for index in (0, 1)]
    assert texts(shape.tokens(tokens)) == [" lorem ipsum dolor"] * 2
    assert texts(shape.tokens([Token("x", 0, 4, False)])) == [" sit"]


def test_the_stream_interval_holds_tokens_back_but_for_the_first_and_the_last() -> None:
    shape = OpenAIStream(call(True, max_tokens=9, stream_interval=3), 1)
    sizes = [
        [len(text.split()) for text in texts(shape.tokens([Token("x", 0, number, number == 9)]))]
        for number in range(1, 10)
    ]
    assert sizes == [[0, 1], [], [], [3], [], [], [3], [], [2]]


def test_an_echoed_prompt_comes_before_the_first_token() -> None:
    one = call(False, prompt="def foo", echo=True)
    events = stream(one, (0, 1, False), (0, 2, True))
    first, second = (json.loads(event)["choices"][0] for event in events[:2])
    assert (first["text"], len(first["prompt_token_ids"])) == ("def foo lorem", 2)
    assert (second["text"], second["prompt_token_ids"]) == (" ipsum", None)
    progress = Progress(call(False, prompt="def foo", echo=True, max_tokens=0, stream=False))
    progress.see(Token("x", 0, 1, True))
    answer = full_answer(progress, 1)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("def foo", 1)


def test_log_probabilities_have_an_entry_for_each_token() -> None:
    progress = Progress(call(True, logprobs=True, top_logprobs=3))
    progress.see(Token("x", 0, 2, True))
    entries = full_answer(progress, 1)["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], len(entry["top_logprobs"])) for entry in entries] == [
        (" lorem", 3),
        (" ipsum", 3),
    ]
    assert bytes(entries[0]["bytes"]) == b" lorem"
    assert entries[0]["top_logprobs"][0]["logprob"] == entries[0]["logprob"]


def test_log_probabilities_of_a_completion_have_offsets() -> None:
    progress = Progress(call(False, prompt="def foo", echo=True, logprobs=1))
    progress.see(Token("x", 0, 2, True))
    choice = full_answer(progress, 1)["choices"][0]
    told = choice["logprobs"]
    assert list(told) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert [choice["text"][at:] for at in told["text_offset"]][2] == " lorem ipsum"
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert [row and len(row) for row in told["top_logprobs"]] == [None, 2, 2, 2]
    shape = OpenAIStream(call(False, logprobs=0), 1)
    shape.tokens([Token("x", 0, 1, False)])
    (frame,) = shape.tokens([Token("x", 0, 2, True)])
    assert json.loads(frame[6:])["choices"][0]["logprobs"]["text_offset"] == [len(" lorem")]


def test_token_ids_are_those_of_the_tokenizer() -> None:
    one = call(False, prompt=[65, 66], return_token_ids=True)
    first, second = (
        json.loads(event)["choices"][0] for event in stream(one, (0, 1, False), (0, 2, True))[:2]
    )
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([65, 66], None)
    assert openai.tokenizer.decode(first["token_ids"] + second["token_ids"]) == " lorem ipsum"
    opening = json.loads(stream(call(True, return_token_ids=True), (0, 1, False))[0])
    assert len(opening["prompt_token_ids"]) == 8
    progress = Progress(one)
    progress.see(Token("x", 0, 2, True))
    assert full_answer(progress, 1)["choices"][0]["prompt_token_ids"] == [65, 66]


def test_cached_tokens_and_figures_are_told_where_asked_for() -> None:
    extras = Extras(3, {"queue_time_ms": 1.5})
    shape = OpenAIStream(call(True, stream_options={"include_usage": True}), 1)
    shape.tokens([Token("x", 0, 2, True)])
    last = json.loads(shape.close(extras)[0][6:])
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "created_cache_tokens": 0}
    assert last["metrics"] == {"queue_time_ms": 1.5}
    answer = full_answer(shape.progress, 1, extras)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert answer["metrics"] == {"queue_time_ms": 1.5, "speculative_decoding": None}
