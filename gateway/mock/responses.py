"""`/v1/responses`: OpenAI's newer protocol over a chat call.  Without a store background mode is refused, as by vLLM.

Source: answers recorded from vLLM 0.32.0.  Not recorded: errors within a stream, a stream that is cut short, and
background mode, which is as in its source.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.mock.bodies import (
    Refusal,
    is_list_of,
    missing,
    parameter_error,
    shown,
    validation_error,
)
from gateway.mock.calls import Api, Call, Server, Stored, check_model, resolved
from gateway.mock.engine import Token
from gateway.mock.progress import NO_EXTRAS, Extras, Json, Progress, event, text_of
from gateway.mock.prompts import Reader

_TOKENS_PER_TURN: Json = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
_OUTPUT_DETAILS: Json = {
    "reasoning_tokens": 0,
    "tool_output_tokens": 0,
    "output_tokens_per_turn": [],
    "tool_output_tokens_per_turn": [],
}


def parse_responses(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """Raises Refusal as vLLM would answer."""
    if body.get("prompt") is not None:
        raise parameter_error("prompt template is not supported", "prompt")
    if "input" not in body:
        raise missing({**body, "request_id": call_id}, "input")  # vLLM adds its own before it looks
    check_model(body, server)
    if body.get("background") and not (server.options.responses_store and body.get("store", True)):
        raise _no_background(body)
    previous = body.get("previous_response_id")
    if previous is not None and previous not in server.stored:
        raise not_found(previous)
    if body.get("truncation") == "auto":  # whatever the output limit: one token is left for it
        body = {**body, "truncate_prompt_tokens": server.engine.max_model_len - 1}
    prompt = Reader(body, server.engine, keep=False).chat(_messages(body, server), body.get("tools"))
    one = {name: value for name, value in body.items() if name not in ("n", "stream_options")}
    limits = ("max_output_tokens",)
    return resolved(
        Api.RESPONSES, one, (prompt,), str(body.get("request_id") or _new_id("resp")), server, limits=limits
    )


def stored(body: Mapping[str, Any], document: dict[str, Any], server: Server) -> Stored:
    """A response and what it answered."""
    said = [content["text"] for item in document["output"] for content in item["content"]]
    answers = [{"role": "assistant", "content": text} for text in said]
    return Stored(document, (*_messages(body, server), *answers))


def queued(call: Call, created: int) -> dict[str, Any]:
    """What vLLM answers, and shows until the response is over."""
    return _Document(Progress(call), created, _new_id("msg")).queued()


def not_found(response_id: str) -> Refusal:
    text = f"Response with id '{response_id}' not found."
    return Refusal(404, text, "invalid_request_error", "response_id")


def not_cancelled() -> Refusal:
    return Refusal(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")


def _no_background(body: Mapping[str, Any]) -> Refusal:
    if body.get("store") is False:
        return parameter_error("background can only be used when `store` is true", "background")
    text = (
        "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable"
        " these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM"
        " server."
    )
    return Refusal(400, text, "invalid_request_error", "background")


def response(progress: Progress, created: int, extras: Extras = NO_EXTRAS) -> Json:
    """The body of a call that does not stream."""
    return _Document(progress, created, _new_id("msg")).ended(extras)


class ResponsesStream:
    """The events of one streamed response, numbered in order."""

    def __init__(self, call: Call, created: int, new_id: Callable[[str], str] | None = None) -> None:
        self.progress = Progress(call)
        self._item_id = (new_id or _new_id)("msg")
        self._document = _Document(self.progress, created, self._item_id)
        self._number = 0

    def begin(self) -> list[bytes]:
        """Before the first token, as vLLM."""
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._document.begun()) for name in names]

    def tokens(self, tokens: Sequence[Token]) -> list[bytes]:
        events = [] if self.progress.started else self._opening()
        for token in tokens:
            self.progress.see(token)
        for _ in self.progress.due([0]):
            text = text_of(*self.progress.tell(0))
            place = {"content_index": 0, "delta": text, "item_id": self._item_id}
            events.append(self._event("response.output_text.delta", **place, logprobs=[], output_index=0))
        return events

    def abort(self) -> list[bytes]:
        if self.progress.started and not self.progress.finished:
            self.progress.end(0, "abort")
        return []

    def close(self, extras: Extras = NO_EXTRAS) -> list[bytes]:
        events = self._ending() if self.progress.started else []
        return [*events, self._event("response.completed", response=self._document.ended(extras))]

    def whole(self, extras: Extras) -> Json:
        """What the last event tells."""
        return self._document.ended(extras)

    def error(self, body: Json) -> list[bytes]:
        error = body["error"]
        return [self._event("error", code=str(error["code"]), message=error["message"], param=error["param"])]

    def _opening(self) -> list[bytes]:
        item = self._document.item([], "in_progress")
        part = self._document.part("", [])
        place = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        return [
            self._event("response.output_item.added", item=item, output_index=0),
            self._event("response.content_part.added", **place, part=part),
        ]

    def _ending(self) -> list[bytes]:
        text, part = self._document.text, self._document.part(self._document.text)
        place = {"content_index": 0, "item_id": self._item_id}
        item = self._document.item([part], "completed")
        return [
            self._event("response.output_text.done", **place, logprobs=[], output_index=0, text=text),
            self._event("response.content_part.done", **place, output_index=0, part=part),
            self._event("response.output_item.done", item=item, output_index=0),
        ]

    def _event(self, name: str, **fields: Any) -> bytes:
        """Keys in alphabetical order, as recorded."""
        document = {**fields, "sequence_number": self._number, "type": name}
        self._number += 1
        return event(name, dict(sorted(document.items())))


class _Document:
    """The response object at its stages."""

    def __init__(self, progress: Progress, created: int, item_id: str) -> None:
        self._progress = progress
        self._created = created
        self._item_id = item_id

    @property
    def text(self) -> str:
        return text_of(1, self._progress.counts[0])

    def begun(self) -> Json:
        return self._whole("in_progress", None, [], None)

    def queued(self) -> Json:
        return self._whole("queued", None, [], None)

    def ended(self, extras: Extras) -> Json:
        reason = self._progress.reasons[0]
        incomplete = {"reason": "max_output_tokens"} if reason == "length" else None
        status = {"length": "incomplete", "stop": "completed"}.get(reason or "", "cancelled")
        output = [self.item([self.part(self.text)], "completed")] if self._progress.started else []
        return self._whole(status, incomplete, output, self._usage(extras))

    def item(self, content: list[Json], status: str) -> Json:
        head = {"id": self._item_id, "content": content, "role": "assistant"}
        return head | {"status": status, "type": "message", "phase": None}

    def part(self, text: str, logprobs: list[Json] | None = None) -> Json:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _usage(self, extras: Extras) -> Json:
        prompt, output = self._progress.call.prompt_tokens, self._progress.counts[0]
        cached = {"cached_tokens": extras.cached_tokens or 0, "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached | _TOKENS_PER_TURN,
            "output_tokens": output,
            "output_tokens_details": _OUTPUT_DETAILS,
            "total_tokens": prompt + output,
        }

    def _whole(self, status: str, incomplete: Json | None, output: list[Json], usage: Json | None) -> Json:
        call = self._progress.call
        asked = call.body
        return {
            "id": call.id,
            "created_at": self._created,
            "incomplete_details": incomplete,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata"),
            "model": call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "temperature": asked.get("temperature", 1.0),
            "tool_choice": asked.get("tool_choice", "auto") if asked.get("tools") else "none",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "background": asked.get("background", False),
            "max_output_tokens": call.limits[0],
            "max_tool_calls": asked.get("max_tool_calls"),
            "previous_response_id": asked.get("previous_response_id"),
            "prompt": asked.get("prompt"),
            "reasoning": asked.get("reasoning"),
            "service_tier": asked.get("service_tier", "auto"),
            "status": status,
            "text": asked.get("text"),
            "top_logprobs": asked.get("top_logprobs"),
            "truncation": asked.get("truncation", "disabled"),
            "usage": usage,
            "user": asked.get("user"),
            "presence_penalty": asked.get("presence_penalty", 0.0),
            "frequency_penalty": asked.get("frequency_penalty", 0.0),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def _messages(body: Mapping[str, Any], server: Server) -> list[Json]:
    """The conversation that a response continues: instructions, what came before without its own, then the input."""
    given = body["input"]
    messages: list[Json] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    before = server.stored.get(str(body.get("previous_response_id")))
    if before is not None:
        messages += [dict(message) for message in before.messages if message.get("role") != "system"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not is_list_of(given, dict):
        text = "Input should be a valid string"
        raise validation_error([("string_type", "body.input.str", text, shown(given))])
    return messages + [_message(item) for item in given]


def _message(item: Json) -> Json:
    """An input item; what is no message counts as its JSON."""
    if "role" in item:
        return item
    return {"role": "tool", "content": json.dumps(item, separators=(",", ":"))}
