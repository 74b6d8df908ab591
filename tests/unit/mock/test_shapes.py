"""Key order and content of the answers, against those recorded from a real vLLM 0.32.0."""

import json
from typing import Any

from gateway.mock import openai
from gateway.mock.calls import Call, parse_call
from gateway.mock.engine import EngineConfig, Token
from gateway.mock.openai import Progress, StreamShape, full_answer

HEAD = {"created": 1, "model": "tiny"}
FINGERPRINT = openai.FINGERPRINT


def call(chat: bool, **fields: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [7] * 7}
    raw = json.dumps({"stream": True, "max_tokens": 2} | body | fields).encode()
    return parse_call(chat, raw, "x", EngineConfig(model="tiny"))


def stream(one: Call, *tokens: tuple[int, int, bool]) -> list[str]:
    shape = StreamShape(one, 1)
    events = [
        event for index, number, last in tokens for event in shape.token(Token("x", index, number, last))
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
    shape = StreamShape(call(False), 1)
    list(shape.token(Token("x", 0, 1, False)))
    assert [*shape.abort(), *shape.close()] == [
        b"data: %s\n\n"
        % dump(text_chunk([text_choice("", "abort")], system_fingerprint=FINGERPRINT))[0].encode(),
        openai.DONE,
    ]
    waiting = StreamShape(call(True, stream_options={"include_usage": True}), 1)
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


def test_every_word_is_one_token_of_the_mock() -> None:
    assert all(openai.tokenizer.count(word) == 1 for word in openai.WORDS)
    assert openai.tokenizer.count("".join(map(openai.word, range(1, 30)))) == 29
