"""`/v1/messages`: Anthropic's protocol over a chat call, as vLLM converts it both ways.

Source: answers recorded from vLLM 0.32.0.  Not recorded: errors within a stream, a stream that is cut short.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.mock.bodies import Refusal, check_messages, is_list_of, missing
from gateway.mock.calls import Api, Call, Server, check_model, resolved
from gateway.mock.engine import Token
from gateway.mock.progress import NO_EXTRAS, Extras, Json, Progress, event, text_of
from gateway.mock.prompts import Prompt, Reader

STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_PASSED = ("stream", "cache_salt", "ignore_eos", "mock", "temperature")
_DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"'
)
_DELTA_REST = b'"},"index":0}\n\n'


def parse_messages(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """Raises Refusal as vLLM would answer; `refusal_body` is its body."""
    _require(body, "model", "messages", "max_tokens")
    check_model(body, server)
    prompt = _prompt(body, server)
    passed = {name: body[name] for name in _PASSED if name in body}
    passed["max_completion_tokens"] = body["max_tokens"]
    return resolved(Api.MESSAGES, passed, (prompt,), f"chatcmpl-{call_id}", server)


def counted(body: Mapping[str, Any], server: Server) -> Json:
    """The answer of /v1/messages/count_tokens."""
    _require(body, "model", "messages")
    check_model(body, server)
    tokens = _prompt(body, server).tokens
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def refusal_body(refusal: Refusal) -> Json:
    """Anthropic's envelope; what FastAPI refuses keeps OpenAI's."""
    return refusal.body if refusal.by_validation else _error(refusal.kind, refusal.message)


def message(progress: Progress, created: int, extras: Extras = NO_EXTRAS) -> Json:
    """The body of a call that does not stream; vLLM leaves out what is null."""
    del created
    count = progress.counts[0]
    head = {"id": progress.call.id, "type": "message", "role": "assistant"}
    body = head | {"content": [{"type": "text", "text": text_of(1, count)}], "model": progress.call.model}
    reason = STOP_REASONS.get(progress.reasons[0] or "")
    return (
        body | ({"stop_reason": reason} if reason else {}) | {"usage": _usage(progress.call, count, extras)}
    )


class MessagesStream:
    """The events of one streamed message, in order."""

    def __init__(self, call: Call, created: int) -> None:
        del created
        self.progress = Progress(call)
        self._call = call

    def begin(self) -> list[bytes]:
        return []

    def tokens(self, tokens: Sequence[Token]) -> list[bytes]:
        events = [] if self.progress.started else self._opening()
        for token in tokens:
            self.progress.see(token)
        for _ in self.progress.due([0]):
            first, last = self.progress.tell(0)
            events.append(_DELTA_HEAD + text_of(first, last).encode() + _DELTA_REST)
        return events

    def abort(self) -> list[bytes]:
        if self.progress.started and not self.progress.finished:
            self.progress.end(0, "abort")
        return []

    def close(self, extras: Extras = NO_EXTRAS) -> list[bytes]:
        return [_event(name, fields) for name, fields in self._closing(extras)]

    def error(self, body: Json) -> list[bytes]:
        error = body["error"]
        return [_event("error", {"error": {"type": error["type"], "message": error["message"]}})]

    def _opening(self) -> list[bytes]:
        head: Json = {"id": self._call.id, "type": "message", "role": "assistant", "content": []}
        head |= {"model": self._call.model, "stop_reason": None, "stop_sequence": None}
        start = {"message": head | {"usage": _usage(self._call, 0)}}
        block = {"content_block": {"type": "text", "text": ""}, "index": 0}
        return [_event("message_start", start), _event("content_block_start", block)]

    def _closing(self, extras: Extras) -> Iterator[tuple[str, Json]]:
        if self.progress.started:
            reason = STOP_REASONS.get(self.progress.reasons[0] or "")
            yield "content_block_stop", {"index": 0}
            delta = {"stop_reason": reason, "stop_sequence": None}
            usage = _usage(self._call, self.progress.counts[0], extras)
            yield "message_delta", {"delta": delta, "usage": usage}
        yield "message_stop", {}


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    return event(name, {"type": name, **fields})


def _error(kind: str, text: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": text}}


def _usage(call: Call, output_tokens: int, extras: Extras = NO_EXTRAS) -> Json:
    """Where the cache is told of, the prompt's tokens are those that it neither had nor got."""
    if extras.cached_tokens is None:
        return {"input_tokens": call.prompt_tokens, "output_tokens": output_tokens}
    cached, created = extras.cached_tokens, extras.created_cache_tokens
    rest = {"input_tokens": call.prompt_tokens - cached - created, "output_tokens": output_tokens}
    return rest | {"cache_creation_input_tokens": created, "cache_read_input_tokens": cached}


def _require(body: Mapping[str, Any], *names: str) -> None:
    absent = [name for name in names if name not in body]
    if absent:
        raise missing(body, *absent)
    check_messages(body)


def _prompt(body: Mapping[str, Any], server: Server) -> Prompt:
    messages = [{**one, "content": _content(one.get("content"))} for one in body["messages"]]
    if body.get("system"):
        messages.insert(0, {"role": "system", "content": _content(body["system"])})
    return Reader(body, server.engine, keep=False).chat(messages, _tools(body.get("tools")))


def _content(value: object) -> object:
    """Content blocks as the parts of a chat message."""
    return [_part(block) for block in value] if is_list_of(value, dict) else value


def _part(block: Json) -> Json:
    if block.get("type") == "tool_use":
        return {"type": "text", "text": json.dumps([block.get("name"), block.get("input")])}
    if block.get("type") != "tool_result":
        return block
    inner = _content(block.get("content"))
    parts = inner if is_list_of(inner, dict) else [{"text": inner}]
    texts = [part.get("text") for part in parts]
    return {"type": "text", "text": " ".join(text for text in texts if isinstance(text, str))}


def _tools(tools: object) -> object:
    if not is_list_of(tools, dict):
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.get("name"), "parameters": tool.get("input_schema")},
        }
        for tool in tools
    ]
