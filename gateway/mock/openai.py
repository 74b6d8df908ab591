"""The shapes of the OpenAI routes: every key in its order, pure functions of a call and its tokens.

Source: answers recorded from vLLM 0.32.0.
"""

import json
from collections.abc import Sequence
from typing import Any

from gateway.mock import tokenizer
from gateway.mock.calls import Api, Call, Server
from gateway.mock.engine import Token
from gateway.mock.logprobs import chat_logprobs, prompt_logprobs, prompt_pieces, text_logprobs
from gateway.mock.progress import NO_EXTRAS, Extras, Json, Progress, dump, text_of
from gateway.mock.tokenizer import WORDS, word

__all__ = ["WORDS", "word"]

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-mock"
DONE = b"data: [DONE]\n\n"
_WORDS = [word(number).encode() for number in range(len(WORDS))]
"""By the token's number modulo their count."""
_CHAT_REST = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
_TEXT_REST = (
    b'","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
)


def frame(value: object) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def error_frame(body: Json) -> bytes:
    """vLLM writes in-stream errors with spaces after separators."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


class OpenAIStream:
    """The events of one streamed chat or completion, in order."""

    def __init__(self, call: Call, created: int) -> None:
        self.progress = Progress(call)
        self._call = call
        self._chat = call.api is Api.CHAT
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head: Json = {"id": call.id, "object": kind, "created": created, "model": call.model}
        self._started = False
        self._plain = (
            call.logprobs is None
            and not call.return_token_ids
            and not call.echo
            and not call.continuous_usage
            and call.stream_interval == 1
            and not call.beams
        )
        self._rest = _CHAT_REST if self._chat else _TEXT_REST
        self._heads: dict[int, bytes] = {}

    def begin(self) -> list[bytes]:
        """vLLM sends nothing before the first token."""
        return []

    def tokens(self, tokens: Sequence[Token]) -> list[bytes]:
        """The chunks of tokens that are at hand; those of one choice are merged into one chunk."""
        if self._plain and self._started and len(tokens) == 1 and not tokens[0].last:
            return [self._quick(tokens[0])]
        events = []
        if not self._started:
            self._started = True
            events = self._roles() if self._chat else []
        for token in tokens:
            self.progress.see(token)
        due = self.progress.due(token.index for token in tokens)
        return events + [self._chunk(index) for index in due]

    def abort(self) -> list[bytes]:
        """End every open choice as vLLM does on SIGTERM; nothing when no token was sent yet."""
        if not self._started:
            return []
        events = []
        for index, reason in enumerate(self.progress.reasons):
            if reason is None:
                self.progress.end(index, "abort")
                events.append(self._chunk(index))
        return events

    def close(self, extras: Extras = NO_EXTRAS) -> list[bytes]:
        if not (self._call.include_usage and self._started):
            return [DONE]
        figures = usage(self._call.prompt_tokens, sum(self.progress.counts))
        if extras.cached_tokens is not None:
            details = {"cached_tokens": extras.cached_tokens}
            if self._chat:
                details["created_cache_tokens"] = extras.created_cache_tokens
            figures["prompt_tokens_details"] = details
        last = self._head | {"choices": [], "usage": figures, "system_fingerprint": FINGERPRINT}
        if extras.metrics is not None:
            last["metrics"] = extras.metrics
        return [frame(last), DONE]

    def error(self, body: Json) -> list[bytes]:
        return [error_frame(body), DONE]

    def _quick(self, token: Token) -> bytes:
        """The same bytes as `_chunk` for one token in the middle of a call that asks for nothing special."""
        index, number = token.index, token.number
        progress = self.progress
        progress.counts[index] = progress.told[index] = number
        head = self._heads.get(index)
        if head is None:
            text = b'"delta":{"content":"' if self._chat else b'"text":"'
            head = b"data: %b,%b%b" % (dump(self._head)[:-1], b'"choices":[{"index":%d,' % index, text)
            self._heads[index] = head
        return head + _WORDS[number % len(_WORDS)] + self._rest

    def _roles(self) -> list[bytes]:
        return [self._role(index) for index in range(self._call.width)]

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head | {"choices": [choice]} | self._usage(index, 0)
        ids = list(self._call.prompt_of(index).ids) if self._call.return_token_ids else None
        return frame(chunk | {"prompt_token_ids": ids, "prompt_text": None})

    def _chunk(self, index: int) -> bytes:
        reason = self.progress.reasons[index]
        first, last = self.progress.tell(index)
        make = self._chat_choice if self._chat else self._text_choice
        choice = make(index, first, last, reason)
        chunk = self._head | {"choices": [choice]} | self._usage(index, last)
        if reason is not None and not self._call.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return frame(chunk)

    def _chat_choice(self, index: int, first: int, last: int, reason: str | None) -> Json:
        call = self._call
        known = None if call.logprobs is None else chat_logprobs(first, last, call.logprobs)
        delta = {"content": text_of(first, last)}
        choice: Json = {"index": index, "delta": delta, "logprobs": known, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = None
        return choice | {"token_ids": output_ids(call, first, last)}

    def _text_choice(self, index: int, first: int, last: int, reason: str | None) -> Json:
        call = self._call
        opening = first == 1
        tells_prompt = opening and (call.echo or call.return_token_ids)
        prompt = call.prompt_of(index)
        choice: Json = {
            "index": index,
            "text": output_text(call, index, first, last),
            "logprobs": output_logprobs(call, index, first, last),
            "finish_reason": reason,
            "stop_reason": None,
        }
        ids = list(prompt.ids) if tells_prompt else None
        return choice | {"prompt_token_ids": ids, "token_ids": output_ids(call, first, last)}

    def _usage(self, index: int, completion: int) -> Json:
        if not self._call.continuous_usage:
            return {}
        figures = usage(self._call.prompt_of(index).tokens, completion)
        return {"usage": figures | {"completion_tokens_details": None} if self._chat else figures}


def output_text(call: Call, index: int, first: int, last: int) -> str:
    """A completion's text, the echoed prompt before the first token."""
    prompt = call.prompt_of(index).text if call.echo and first == 1 else ""
    return prompt if call.silent else prompt + text_of(first, last)


def output_ids(call: Call, first: int, last: int) -> list[int] | None:
    return tokenizer.encode(text_of(first, last)) if call.return_token_ids else None


def output_logprobs(call: Call, index: int, first: int, last: int) -> Json | None:
    """A completion's."""
    if call.logprobs is None:
        return None
    prompt = call.prompt_of(index)
    echoed = prompt_pieces(prompt.ids) if call.echo and first == 1 else []
    offset = len(text_of(1, first - 1)) + (len(prompt.text) if call.echo and first > 1 else 0)
    return text_logprobs(first, 0 if call.silent else last, call.logprobs, offset, echoed)


def full_answer(progress: Progress, created: int, extras: Extras = NO_EXTRAS) -> Json:
    """The body of a call that does not stream; choices that did not end are aborted ones."""
    call = progress.call
    chat = call.api is Api.CHAT
    make = _full_chat_choice if chat else _full_text_choice
    choices = [
        make(call, index, count, reason or "abort")
        for index, (count, reason) in enumerate(zip(progress.counts, progress.reasons, strict=True))
    ]
    kind = "chat.completion" if chat else "text_completion"
    body: Json = {"id": call.id, "object": kind, "created": created, "model": call.model, "choices": choices}
    body |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": _full_usage(progress, extras)}
    if chat:
        ids = [number for prompt in call.prompts for number in prompt.ids] if call.return_token_ids else None
        body |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    metrics = None if extras.metrics is None else {**extras.metrics, "speculative_decoding": None}
    return body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": metrics}


def _full_usage(progress: Progress, extras: Extras) -> Json:
    call = progress.call
    chat = call.api is Api.CHAT
    is_batch = chat and len(call.prompts) > 1
    details = None
    if extras.cached_tokens is not None and not (call.beams or is_batch):
        created = extras.created_cache_tokens if chat else None
        details = {"cached_tokens": extras.cached_tokens, "created_cache_tokens": created}
        details |= {"multimodal_tokens": None}
    figures = usage(call.prompt_tokens, sum(progress.counts))
    return figures | {"prompt_tokens_details": details, "completion_tokens_details": None}


def _full_chat_choice(call: Call, index: int, count: int, reason: str) -> Json:
    nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
    message = {"role": "assistant", "content": text_of(1, count)} | nothing
    logprobs = None if call.logprobs is None else chat_logprobs(1, count, call.logprobs)
    tail: Json = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
    return (
        {"index": index, "message": message}
        | tail
        | {"token_ids": output_ids(call, 1, count), "routed_experts": None}
    )


def _full_text_choice(call: Call, index: int, count: int, reason: str) -> Json:
    choice = {"index": index, "text": output_text(call, index, 1, count)}
    tail: Json = {
        "logprobs": output_logprobs(call, index, 1, count),
        "finish_reason": reason,
        "stop_reason": None,
    }
    ids = list(call.prompt_of(index).ids) if call.return_token_ids else None
    known = None
    if call.echo and call.logprobs is not None:
        known = prompt_logprobs(call.prompt_of(index).ids, call.logprobs)
    tail |= {"token_ids": output_ids(call, 1, count), "prompt_logprobs": known, "prompt_token_ids": ids}
    return choice | tail | {"routed_experts": None}


def models(server: Server, created: int, permission_ids: Sequence[str]) -> Json:
    """A card for each served name; `permission_ids` has one for each."""
    cards = [
        _card(name, server, created, permission)
        for name, permission in zip(server.names, permission_ids, strict=True)
    ]
    return {"object": "list", "data": cards}


def _card(name: str, server: Server, created: int, permission_id: str) -> Json:
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
    root = server.options.root or server.engine.model
    head = {"id": name, "object": "model", "created": created, "owned_by": "vllm", "root": root}
    return head | {
        "parent": None,
        "max_model_len": server.engine.max_model_len,
        "permission": [permission],
    }


def tokenized(ids: Sequence[int], max_model_len: int, *, strings: bool) -> Json:
    texts: list[Any] | None = prompt_pieces(ids) if strings else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": list(ids), "token_strs": texts}
