"""The shapes of vLLM's answers: every key in its order, pure functions of a call and its tokens.

Source: answers recorded from vLLM 0.32.0.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.mock import tokenizer
from gateway.mock.calls import Call
from gateway.mock.engine import EngineConfig, Token

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-mock"
DONE = b"data: [DONE]\n\n"
WORDS = (
    " lorem",
    " ipsum",
    " dolor",
    " sit",
    " amet",
    " sed",
    " quis",
    " nisi",
    " duis",
    " aute",
    " irure",
    " magna",
)
"""The output text is this cycle; each word is one token of the mock's tokenizer."""

Json = dict[str, Any]


def word(number: int) -> str:
    """Text of the n-th output token, counted from 1."""
    return WORDS[(number - 1) % len(WORDS)]


def dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def frame(value: object) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def error_frame(body: Json) -> bytes:
    """vLLM writes in-stream errors with spaces after separators."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


class Progress:
    """Tokens seen of a call, and why each of its choices ended."""

    def __init__(self, call: Call) -> None:
        self.call = call
        sequences = len(call.prompts) * call.choices
        self.counts = [0] * sequences
        self.reasons: list[str | None] = [None] * sequences

    @property
    def started(self) -> bool:
        return any(self.counts)

    @property
    def finished(self) -> bool:
        return all(reason is not None for reason in self.reasons)

    def see(self, token: Token) -> None:
        self.counts[token.index] = token.number
        if token.last:
            self.reasons[token.index] = self.call.reason_at(token.index, token.number)

    def usage(self) -> Json:
        return usage(sum(self.call.prompts), sum(self.counts))


class StreamShape:
    """The events of one streamed call, in order."""

    def __init__(self, call: Call, created: int) -> None:
        self.progress = Progress(call)
        self._call = call
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        self._head: Json = {"id": call.id, "object": kind, "created": created, "model": call.model}

    def token(self, token: Token) -> Iterator[bytes]:
        """The events of one token; the first token of a chat brings the role events of all choices."""
        opening = self._call.chat and not self.progress.started
        self.progress.see(token)
        if opening:
            for index in range(len(self.progress.counts)):
                yield self._role(index)
        yield self._chunk(token.index, word(token.number), self.progress.reasons[token.index])

    def abort(self) -> Iterator[bytes]:
        """End every open choice as vLLM does on SIGTERM; nothing when no token was sent yet."""
        if not self.progress.started:
            return
        for index, reason in enumerate(self.progress.reasons):
            if reason is None:
                self.progress.reasons[index] = "abort"
                yield self._chunk(index, "", "abort")

    def close(self) -> Iterator[bytes]:
        if self._call.include_usage and self.progress.started:
            yield frame(
                self._head
                | {"choices": [], "usage": self.progress.usage(), "system_fingerprint": FINGERPRINT}
            )
        yield DONE

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head | {"choices": [choice]} | self._usage(index, 0)
        return frame(chunk | {"prompt_token_ids": None, "prompt_text": None})

    def _chunk(self, index: int, text: str, reason: str | None) -> bytes:
        choice = (
            self._chat_choice(index, text, reason) if self._call.chat else _text_choice(index, text, reason)
        )
        chunk = self._head | {"choices": [choice]} | self._usage(index, self.progress.counts[index])
        if self.progress.finished and not self._call.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return frame(chunk)

    @staticmethod
    def _chat_choice(index: int, text: str, reason: str | None) -> Json:
        choice: Json = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = None
        return choice | {"token_ids": None}

    def _usage(self, index: int, completion: int) -> Json:
        if not self._call.continuous_usage:
            return {}
        figures = usage(self._call.prompt_tokens_of(index), completion)
        return {"usage": figures | {"completion_tokens_details": None} if self._call.chat else figures}


def _text_choice(index: int, text: str, reason: str | None) -> Json:
    choice: Json = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None,
    }
    return choice | {"prompt_token_ids": None, "token_ids": None}


def full_answer(progress: Progress, created: int) -> Json:
    """The body of a call that does not stream; choices that did not end are aborted ones."""
    call = progress.call
    kind = "chat.completion" if call.chat else "text_completion"
    choices = [
        _full_choice(call.chat, index, "".join(map(word, range(1, count + 1))), reason or "abort")
        for index, (count, reason) in enumerate(zip(progress.counts, progress.reasons, strict=True))
    ]
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    body: Json = {"id": call.id, "object": kind, "created": created, "model": call.model, "choices": choices}
    body |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": progress.usage() | details}
    if call.chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    return body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def _full_choice(chat: bool, index: int, text: str, reason: str) -> Json:
    tail: Json = {"logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": None}
    if not chat:
        tail |= {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        return {"index": index, "text": text} | tail
    nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
    message = {"role": "assistant", "content": text} | nothing
    return {"index": index, "message": message} | tail | {"routed_experts": None}


def models(config: EngineConfig, created: int, permission_id: str) -> Json:
    permission = {
        "id": f"modelperm-{permission_id}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    head = {
        "id": config.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": config.model,
    }
    model = head | {"parent": None, "max_model_len": config.max_model_len, "permission": [permission]}
    return {"object": "list", "data": [model]}


def tokenized(ids: Sequence[int], config: EngineConfig, *, strings: bool) -> Json:
    texts = [tokenizer.decode([number]) for number in ids] if strings else None
    return {
        "count": len(ids),
        "max_model_len": config.max_model_len,
        "tokens": list(ids),
        "token_strs": texts,
    }
